"""Where this broker runs: read from the environment, prefix ONBEAT_."""

from pathlib import Path
from typing import Literal

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict


class Settings(BaseSettings):
    model_config = SettingsConfigDict(env_prefix="ONBEAT_")

    redis_url: str = Field("redis://127.0.0.1:6379", description="the Redis of broker, trainers and rollouts")
    redis_retry_s: float = Field(60.0, gt=0, description="how long an unreachable Redis is retried before giving up")
    host: str = Field("127.0.0.1", description="interface that the REST API listens on")
    port: int = Field(8800, ge=1, le=65535, description="port of the REST API")
    data_dir: Path = Field(Path(".onbeat"), description="the only folder that jsonl and parquet data may lie in")
    has_model_folders: bool = Field(
        True,
        description="model folders of the trainers can be seen here, so a missing one is refused; false: not checked",
    )
    max_body_bytes: int = Field(1024 * 1024, ge=1024, description="a larger request is refused")
    dataset_timeout_s: float = Field(120.0, gt=0, description="for producing the prompts of one iteration")
    dataset_memory_mb: int = Field(8192, ge=512, description="address space of the process that produces prompts")
    admission_timeout_s: float = Field(30.0, gt=0, description="for opening a job's data before the job is accepted")
    log_format: Literal["text", "json"] = Field("text", description="text or json")
    log_level: str = Field("INFO", description="DEBUG, INFO, WARNING or ERROR")
