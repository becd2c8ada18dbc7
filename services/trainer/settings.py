"""The trainer's settings, read from the environment with the prefix ONBEAT_."""

import os
import socket
import tempfile
from pathlib import Path
from typing import Literal

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from onbeat.process.health import HealthSettings
from onbeat.streams.connection import RedisSettings
from onbeat.weights.security import WireSettings

HOME = os.path.expanduser("~")  # stays "~" for a user without a home folder
CACHE_DIR = Path(HOME if HOME != "~" else tempfile.gettempdir(), ".cache", "onbeat")


class Settings(HealthSettings, WireSettings, RedisSettings, BaseSettings):
    model_config = SettingsConfigDict(env_prefix="ONBEAT_")

    pool: str = Field("default", description="pool whose jobs this trainer takes")
    trainer_id: str = Field(
        default_factory=lambda: f"trainer-{socket.gethostname()}-{os.getpid()}",
        description="a name that no other running trainer has",
    )
    run_id: str = Field(
        "",
        description="an id of this start of the process, from a supervisor that ends the lease when it has seen it end",
    )
    data_dir: Path = Field(Path(".onbeat"), description="checkpoints go to data_dir/jobs/JOB/checkpoints")
    cache_dir: Path = Field(CACHE_DIR, description="folder for converted models")
    device: str = Field("auto", description="device to train on: auto, cpu, cuda or npu")
    cpu_cores: str = Field(
        "", description="cores to train on when the device is the CPU, such as 1 or 0-3,6; empty: all"
    )
    parallelism: Literal["ddp", "fsdp"] = Field(
        "ddp",
        description="how several ranks (torchrun) share a job: ddp, each holds the whole model and trains groups at "
        "its own pace; fsdp, the model is sharded over them and they move in lockstep",
    )
    peer_timeout_s: float = Field(
        7200.0, gt=0, description="longest wait of a rank for the others; must exceed every job's iteration_deadline_s"
    )
    stall_s: float = Field(
        0.0,
        ge=0,
        description="the process ends when training has made no progress for this long, and another trainer takes "
        "over; 0: four fifths of the job's iteration_deadline_s",
    )
    checkpoint_timeout_s: float = Field(
        1800.0, gt=0, description="time limit for writing a checkpoint; the job then fails"
    )
    weights_host: str = Field("127.0.0.1", description="interface that the weights service listens on")
    weights_port: int = Field(0, description="port of the weights service; 0: chosen by the system")
    weights_advertise: str = Field(
        "",
        description="host name that rollouts reach the weights service by; default: weights_host, or this machine's "
        "name for 0.0.0.0",
    )
    weights_egress: int = Field(
        1,
        ge=1,
        description="rollouts on other machines that pull from this trainer at a time; the others pull from rollouts",
    )
    weights_fanout: int = Field(1, ge=1, description="the same limit for each rollout that passes weights on")
    weights_max_calls: int = Field(
        1024, ge=1, description="concurrent calls to the weights service; further ones are refused"
    )
    zone: str = Field("", description="label of a network zone: weights are pulled within a zone where possible")
    lease_s: float = Field(30.0, gt=0, description="another trainer takes over when this one has been silent this long")
    log_format: str = Field("text", description="text or json")
