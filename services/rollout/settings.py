"""The settings of a rollout, read from the environment, prefix ONBEAT_. The job says what is generated."""

import os
import secrets
import socket
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

import httpx
from pydantic import BaseModel, ConfigDict, Field, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from onbeat.machine.accelerators import ROLLOUTS_MEMORY
from onbeat.process.health import HealthSettings
from onbeat.streams.connection import RedisSettings
from onbeat.weights.security import WireSettings


class RewardServiceSettings(BaseModel):
    """The address of a service for the reward `http`, or of a model for the reward `judge`, and the token for it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    url: str = Field(description="address that groups are posted to")
    bearer_token_file: Path | None = Field(None, description="file with the token of the Authorization header")
    model: str = Field("", description="judge: name of the model at this OpenAI-compatible `.../chat/completions`")
    max_concurrent: int = Field(8, ge=1, description="judge: calls at a time")
    max_answer_tokens: int = Field(1024, ge=16, description="judge: limit of an answer, its reasoning included")

    @field_validator("url")
    @classmethod
    def check_url(cls, url: str) -> str:
        parts = urlsplit(url)
        if parts.username is not None or parts.password is not None:
            raise ValueError("put no user or password into the url, they would be logged; use bearer_token_file")
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0:  # .port raises ValueError
            raise ValueError(f"{url!r} is no http:// or https:// address")
        try:
            httpx.Request("POST", url)
        except (httpx.InvalidURL, ValueError) as error:  # ValueError: a host that IDNA does not know
            raise ValueError(f"{url!r} cannot be called: {error}") from error
        return url


def new_worker_id() -> str:
    return f"rollout-{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"


class Settings(HealthSettings, WireSettings, RedisSettings, BaseSettings):
    model_config = SettingsConfigDict(env_prefix="ONBEAT_")

    pool: str = Field("default", description="pool whose jobs this rollout serves")
    worker_id: str = Field(
        default_factory=new_worker_id, min_length=1, description="name that no other running rollout has"
    )
    engine: str = Field("vllm", description="inference engine: an installed entry point of the group `onbeat.engines`")
    device: str = Field("auto", description="device of the engine: auto, cpu, cuda or npu")
    tensor_parallel_size: int = Field(1, ge=1, description="devices that hold the model together")
    gpu_memory_utilization: float = Field(
        ROLLOUTS_MEMORY, gt=0, le=1, description="share of each CUDA or NPU device's memory for the engine"
    )
    cpu_cores: str = Field("", description="cores of the engine on a CPU, such as 0 or 0-3; empty: the engine chooses")
    max_num_seqs: int = Field(64, ge=1, description="responses generated concurrently")
    kv_cache_gib: float = Field(1.0, gt=0, description="largest memory of the engine's cache on a CPU")
    engine_start_s: float = Field(
        900.0, gt=0, description="time limit for starting the engine on a model; it is then replaced"
    )
    engine_load_s: float = Field(
        600.0, gt=0, description="time limit for loading a pulled version into the engine, which is then replaced"
    )
    lease_s: float = Field(
        30.0, gt=0, description="others take over a prompt when its rollout has been silent this long"
    )
    staging_dir: Path | None = Field(
        None, description="folder for the model's configuration; default: the system's temporary folder"
    )
    weights_relay: bool = Field(True, description="pass weights on to other rollouts")
    weights_host: str = Field("127.0.0.1", description="interface that weights are served on for other rollouts")
    weights_port: int = Field(0, ge=0, lt=65536, description="port of the weights service; 0: chosen by the system")
    weights_advertise: str = Field(
        "",
        description="host name that others reach this one by; default: weights_host, or the machine's name for 0.0.0.0",
    )
    zone: str = Field("", description="label of a network zone: weights are pulled within a zone where possible")
    reward_processes: int = Field(1, ge=1, description="groups scored concurrently")
    reward_services: dict[
        Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}$")], RewardServiceSettings
    ] = Field(
        {},
        description="services of the rewards http and, with a model, judge, by name: "
        '{"check": {"url": "http://...", "bearer_token_file": "/..."}}',
    )
    environment_processes: int = Field(
        32, ge=1, description="groups played in environments concurrently, fewer while memory is short"
    )
    chat_slots: int = Field(
        2, ge=0, description="chats answered at a time, and responses that they may have in the engine; 0: no chats"
    )
    chat_grace_s: float = Field(
        1.0, ge=0, description="time that running chats have to finish before another policy version is loaded"
    )
    drain_s: float = Field(60.0, ge=0, description="time after SIGTERM to finish the groups in flight")
    log_format: Literal["text", "json"] = Field("text", description="text or json")
