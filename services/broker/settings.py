"""The broker's settings, read from the environment with the prefix ONBEAT_."""

import importlib.util
import re
import shlex
import shutil
from pathlib import Path
from typing import Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from onbeat.process.api_keys import read_keys
from onbeat.process.network import check_certificate, is_loopback, trust
from onbeat.streams.connection import RedisSettings

READ_ONLY = "read-only view; `onbeat up` here continues the jobs, `onbeat chat JOB` works"
HEADER_NAME = r"[A-Za-z0-9!#$%&'*+.^_`|~-]+"


class Settings(RedisSettings, BaseSettings):
    # Compose files pass an unset variable on as an empty one.
    model_config = SettingsConfigDict(env_prefix="ONBEAT_", env_ignore_empty=True, hide_input_in_errors=True)

    host: str = Field("127.0.0.1", description="interface that the REST API listens on")
    port: int = Field(8800, ge=1, le=65535, description="port of the REST API")
    api_keys_file: Path | None = Field(
        None, description="file with the hashes of the API keys, made by `onbeat keys`; read again when it changes"
    )
    allow_anonymous: bool = Field(
        False, description="true: without a keys file, any client that can reach the port has the role admin"
    )
    tls_cert: Path | None = Field(None, description="PEM certificate of the REST API, with its chain; needs tls_key")
    tls_key: Path | None = Field(None, description="PEM private key of the REST API, not encrypted")
    requests_per_s: float = Field(
        100.0, gt=0, description="sustained rate of one API key, or of one address without keys"
    )
    request_burst: int = Field(1000, ge=1, description="requests that one key or address may send at once")
    trusted_proxies: str = Field(
        "", description="comma-separated addresses or networks of proxies whose X-Forwarded-For names the caller"
    )
    max_connections: int = Field(
        1000, ge=1, description="open connections to the REST API; further ones are answered 503"
    )
    data_dir: Path = Field(Path(".onbeat"), description="the only folder that jsonl and parquet data are read from")
    has_model_folders: bool = Field(
        True,
        description="true: the broker sees the trainers' model folders and refuses a missing one; false: not checked",
    )
    is_read_only: bool = Field(False, description="true: jobs can be read, but not changed, as in `onbeat view`")
    max_body_bytes: int = Field(1024 * 1024, ge=1024, description="largest body of a request; a larger one is refused")
    max_dataset_bytes: int = Field(10 * 10**9, ge=1024, description="largest data file that can be uploaded")
    upload_timeout_s: float = Field(3600.0, gt=0, description="time limit for the whole upload of a data file")
    max_pending_jobs: int = Field(
        1000, ge=1, description="pending jobs that one API key may have, or all callers without keys together"
    )
    request_timeout_s: float = Field(
        30.0, gt=0, description="time limit for receiving the headers of a request, and the same again for its body"
    )
    dataset_timeout_s: float = Field(120.0, gt=0, description="time limit for preparing the prompts of one iteration")
    dataset_memory_mb: int = Field(
        8192, ge=512, description="address space of each of up to three processes that prepare prompts"
    )
    admission_timeout_s: float = Field(
        30.0, gt=0, description="time limit for opening a job's data before the job is accepted"
    )
    job_retention_days: float = Field(
        0.0, ge=0, description="jobs that have ended are deleted after this time; 0: never"
    )
    otlp_endpoint: str | None = Field(
        None, description="base URL of an OpenTelemetry collector (OTLP over HTTP) that gets traces; not set: no traces"
    )
    otlp_headers_file: Path | None = Field(
        None, description="headers for the collector, such as its key: one `name=value` a line"
    )
    otlp_tls_ca: Path | None = Field(
        None, description="PEM authority of the collector's certificate; default: those of the system"
    )
    otlp_timeout_s: float = Field(10.0, gt=0, le=20, description="time limit for one request to the collector")
    trace_every_iterations: int = Field(1, ge=1, description="trace every n-th iteration of a job: 0, n, 2n, ...")
    notify_command: str = Field(
        "",
        description="command that gets a notice, as JSON on its standard input, when a job ends or has its first "
        "problem; its words are split as in a shell, which does not run it",
    )
    notify_url: str = Field(
        "", repr=False, description="URL that the same notices are posted to; its path is not logged"
    )
    notify_timeout_s: float = Field(10.0, gt=0, le=300, description="time limit for delivering a notice, of each try")
    chat_queue: int = Field(
        16, ge=1, description="chats of a job that may wait for a rollout; further ones are answered 429"
    )
    chat_take_s: float = Field(
        10.0, gt=0, le=50, description="time limit for a rollout to take a chat; then it is answered 503"
    )
    chat_answer_s: float = Field(300.0, gt=0, description="time limit for the whole answer of a chat")
    chat_max_tokens: int = Field(4096, ge=1, description="largest max_tokens that a chat may ask for")
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
        """Check certificate and key: the server itself would report less, and ask a terminal for a password."""
        check_certificate(("ONBEAT_TLS_CERT", self.tls_cert), ("ONBEAT_TLS_KEY", self.tls_key))
        return self

    @model_validator(mode="after")
    def check_tracing(self) -> Self:
        """Check the tracing settings at the start, not at the first iteration."""
        if self.otlp_endpoint is None:
            return self
        if not is_base_url(self.otlp_endpoint):
            raise ValueError(
                "ONBEAT_OTLP_ENDPOINT is not like http://collector:4318: an address with http or https and nothing "
                "behind it (/v1/traces is added); keys go into ONBEAT_OTLP_HEADERS_FILE"
            )
        if not has_otlp():
            raise ValueError(
                "ONBEAT_OTLP_ENDPOINT is set, but opentelemetry-exporter-otlp-proto-http is not installed; install "
                "requirements/broker.lock, or unset it"
            )
        self.otlp_headers()
        if self.otlp_tls_ca is not None:
            trust("ONBEAT_OTLP_TLS_CA", self.otlp_tls_ca)
        return self

    def otlp_headers(self) -> dict[str, str]:
        """Read the headers for the collector. Raises ValueError for a file that is missing or broken."""
        return {} if self.otlp_headers_file is None else read_headers(self.otlp_headers_file)

    @model_validator(mode="after")
    def check_notices(self) -> Self:
        """Check at the start what would fail at the end of the first job."""
        if self.notify_command:
            try:
                program = [*shlex.split(self.notify_command), ""][0]
            except ValueError as error:
                raise ValueError(f"ONBEAT_NOTIFY_COMMAND: {error}; quote its words as for a shell") from error
            if shutil.which(program) is None:
                raise ValueError(f"ONBEAT_NOTIFY_COMMAND: there is no program {program!r} here; give its path")
        if self.notify_url and not re.fullmatch(r"https?://[^\s/?#]+(/\S*)?", self.notify_url):
            raise ValueError("ONBEAT_NOTIFY_URL is no address with http:// or https:// and a host")
        return self

    @model_validator(mode="after")
    def check_openness(self) -> Self:
        if self.api_keys_file is None and not self.allow_anonymous and not is_loopback(self.host):
            raise ValueError(
                f"ONBEAT_HOST is {self.host}, but without API keys only this machine may reach the broker: make a key "
                "with `onbeat keys new` and set ONBEAT_API_KEYS_FILE. With ONBEAT_ALLOW_ANONYMOUS=true it runs without "
                "keys: then any client that can reach the port may do anything"
            )
        return self


def read_headers(path: Path) -> dict[str, str]:
    """Read one `name=value` per line. Raises ValueError without the values, which are secrets."""
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"ONBEAT_OTLP_HEADERS_FILE={path} cannot be read: {type(error).__name__}") from error
    headers = {}
    for number, line in enumerate(lines, start=1):
        if line.strip():
            name, _, value = (part.strip() for part in line.partition("="))
            if not re.fullmatch(HEADER_NAME, name) or not value or not (value.isascii() and value.isprintable()):
                raise ValueError(f"ONBEAT_OTLP_HEADERS_FILE={path}: line {number} is not like name=value")
            headers[name] = value
    return headers


def is_base_url(text: str) -> bool:
    """Return whether the text is an HTTP(S) URL without user, query and fragment."""
    try:
        return re.fullmatch(r"https?://[^\s/@?#]+(/[^\s?#]*)?", text) is not None and urlsplit(text).port != 0
    except ValueError:  # the port or an IPv6 address is wrong
        return False


def has_otlp() -> bool:
    try:
        return importlib.util.find_spec("opentelemetry.exporter.otlp.proto.http") is not None
    except ModuleNotFoundError:  # not even its parent
        return False
