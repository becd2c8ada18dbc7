"""Where this broker runs: read from the environment, prefix ONBEAT_."""

import ipaddress
import ssl
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from onbeat.api_keys import read_keys
from onbeat.streams.connection import RedisSettings


class Settings(RedisSettings, BaseSettings):
    # Compose files pass an unset variable on as an empty one.
    model_config = SettingsConfigDict(env_prefix="ONBEAT_", env_ignore_empty=True, hide_input_in_errors=True)

    host: str = Field("127.0.0.1", description="interface that the REST API listens on")
    port: int = Field(8800, ge=1, le=65535, description="port of the REST API")
    api_keys_file: Path | None = Field(None, description="hashes of the API keys, made by `onbeat keys`; read again")
    allow_anonymous: bool = Field(
        False, description="true: without a keys file, whoever reaches the port from wherever is an admin"
    )
    tls_cert: Path | None = Field(None, description="PEM certificate of the REST API, with its chain; with tls_key")
    tls_key: Path | None = Field(None, description="PEM private key of the REST API, not encrypted")
    requests_per_s: float = Field(100.0, gt=0, description="of one API key, or address without keys, in the long run")
    request_burst: int = Field(1000, ge=1, description="requests of one key or address at once")
    trusted_proxies: str = Field(
        "", description="addresses or networks, comma separated, whose X-Forwarded-For names the caller"
    )
    max_connections: int = Field(1000, ge=1, description="to the REST API at a time; more are answered 503")
    data_dir: Path = Field(Path(".onbeat"), description="the only folder that jsonl and parquet data may lie in")
    has_model_folders: bool = Field(
        True,
        description="model folders of the trainers can be seen here, so a missing one is refused; false: not checked",
    )
    max_body_bytes: int = Field(1024 * 1024, ge=1024, description="a larger request is refused")
    request_timeout_s: float = Field(
        30.0, gt=0, description="for the headers of a request to arrive, and once more for its body"
    )
    dataset_timeout_s: float = Field(120.0, gt=0, description="for producing the prompts of one iteration")
    dataset_memory_mb: int = Field(8192, ge=512, description="address space of the process that produces prompts")
    admission_timeout_s: float = Field(30.0, gt=0, description="for opening a job's data before the job is accepted")
    job_retention_days: float = Field(0.0, ge=0, description="jobs that are over are deleted after so long; 0: never")
    log_format: Literal["text", "json"] = Field("text", description="text or json")
    log_level: str = Field("INFO", description="DEBUG, INFO, WARNING or ERROR")

    @field_validator("api_keys_file")
    @classmethod
    def check_keys(cls, path: Path | None) -> Path | None:
        if path is not None:
            read_keys(path)
        return path

    @model_validator(mode="after")
    def check_tls(self) -> Self:
        """The server itself would tell less, and ask a terminal for a password."""
        if (self.tls_cert is None) != (self.tls_key is None):
            given, missing = ("CERT", "KEY") if self.tls_cert else ("KEY", "CERT")
            raise ValueError(f"ONBEAT_TLS_{given} is set but ONBEAT_TLS_{missing} is not; set both or neither")
        if self.tls_cert is not None:
            try:
                ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self.tls_cert, self.tls_key, password="")
            except OSError as error:
                files = f"ONBEAT_TLS_CERT={self.tls_cert} and ONBEAT_TLS_KEY={self.tls_key}"
                raise ValueError(f"{files} are not a PEM certificate and its unencrypted key: {error}") from error
        return self

    @model_validator(mode="after")
    def check_openness(self) -> Self:
        if self.api_keys_file is None and not self.allow_anonymous and not is_loopback(self.host):
            raise ValueError(
                f"ONBEAT_HOST is {self.host}, but without API keys only this machine may reach the broker: make a key "
                "with `onbeat keys new` and set ONBEAT_API_KEYS_FILE. ONBEAT_ALLOW_ANONYMOUS=true does without keys: "
                "then whoever reaches the port may do anything"
            )
        return self


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return host == "localhost"
