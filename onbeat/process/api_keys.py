"""API keys of the broker and the file that holds their hashes: written by `onbeat keys`, read by brokers.

A key is `onbeat_ID_SECRET`: the id finds its entry and may be logged; the secret is 256 random bits, so its plain
SHA-256 cannot be reversed by search, and a slow password hash would only slow down every request.
"""

import contextlib
import fcntl
import hashlib
import os
import secrets
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from pathlib import Path

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, ValidationError, field_validator


class Role(StrEnum):
    """The roles in ascending order: each one includes those before it."""

    READ = "read"
    SUBMIT = "submit"
    ADMIN = "admin"

    def includes(self, other: "Role") -> bool:
        order = list(Role)
        return order.index(self) >= order.index(other)


class ApiKey(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    id: str = Field(pattern=r"^[0-9a-f]{4,64}$")
    name: str = Field(max_length=200)
    role: Role
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$", description="of the whole key, as hexadecimal digits")
    expires_at: AwareDatetime | None = None

    def has_expired(self, now: datetime) -> bool:
        return self.expires_at is not None and now >= self.expires_at


class KeysFile(BaseModel):
    model_config = ConfigDict(extra="forbid")

    keys: list[ApiKey]

    @field_validator("keys")
    @classmethod
    def check_ids(cls, keys: list[ApiKey]) -> list[ApiKey]:
        if len({key.id for key in keys}) < len(keys):
            raise ValueError("two keys have the same id")
        return keys


def new_key(name: str, role: Role, lifetime: timedelta | None = None) -> tuple[str, ApiKey]:
    """Return the key itself, which is stored nowhere, and its entry."""
    key_id = secrets.token_hex(6)
    key = f"onbeat_{key_id}_{secrets.token_urlsafe(32)}"
    expires_at = datetime.now(UTC).replace(microsecond=0) + lifetime if lifetime else None
    return key, ApiKey(id=key_id, name=name, role=role, sha256=digest_of(key), expires_at=expires_at)


def digest_of(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def id_of(key: str) -> str:
    """Return the id in a key; '' for text that does not have the form of a key."""
    parts = key.split("_", 2)
    return parts[1] if len(parts) == 3 and parts[0] == "onbeat" else ""


def read_keys(path: Path) -> list[ApiKey]:
    """Return the keys of a file. Raise ValueError with the file and its problem."""
    try:
        return KeysFile.model_validate_json(path.read_bytes()).keys
    except OSError as error:
        raise ValueError(
            f"the keys file {path} cannot be read: {error.strerror}; `onbeat keys new` makes one"
        ) from None
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"])) or "the whole"
        raise ValueError(f"the keys file {path} is broken at {place}: {first['msg']}") from None


@contextlib.contextmanager
def keys_to_edit(path: Path) -> Iterator[list[ApiKey]]:
    """Yield the keys of a file, if there is one; write them back at the end if they changed. Editors take turns.

    Readers see the file of before or of after, never a part; it keeps its owner. Raise ValueError when it is broken or
    cannot be written.
    """
    path = path.resolve()  # a link stays a link
    with locked(path.parent):
        before = read_keys(path) if path.exists() else []
        keys = list(before)
        yield keys
        if keys != before:
            try:
                write_keys(path, keys)
            except OSError as error:
                raise ValueError(f"cannot write {path}: {error.strerror}; the keys are as they were") from None


def write_keys(path: Path, keys: list[ApiKey]) -> None:
    draft = path.with_name(f".{path.name}.new")
    draft.unlink(missing_ok=True)
    content = KeysFile(keys=keys).model_dump_json(indent=2, exclude_none=True) + "\n"
    with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        if path.exists():
            keep_owner(file.fileno(), path)
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)


def keep_owner(file: int, path: Path) -> None:
    """Keep the file's owner: otherwise a broker of that user could not read a file that another user edited."""
    owner = path.stat()
    try:
        os.fchown(file, owner.st_uid, owner.st_gid)
    except PermissionError:
        raise ValueError(f"the keys file {path} belongs to user {owner.st_uid}; edit it as that user") from None


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise ValueError(f"the folder {folder} of the keys file cannot be opened: {error.strerror}") from None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
