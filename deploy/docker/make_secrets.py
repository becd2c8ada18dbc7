"""Secrets of the compose stack: made once at random, then handed to each service in a volume of its own.

make_secrets.py              make what is missing and hand it out
make_secrets.py show NAME    print one: admin-key, read-key, redis-password, redis-admin-password, weights-key
                             or grafana-password

/secrets/admin has every secret in plain text and is mounted nowhere else. The others have what their service needs.
"""

import hashlib
import os
import secrets
import sys
from pathlib import Path

from onbeat.process.api_keys import ApiKey, Role, digest_of, id_of, new_key, write_keys

ROOT = Path("/secrets")
ADMIN = ROOT / "admin"
ACL_TEMPLATE = Path("/opt/onbeat/share/users.acl.example")
USER = 10001  # user and group of every service
DATA = [Path(f"/{service}-data") for service in ("redis", "trainer", "broker")]  # volumes that may have another owner


def main(arguments: list[str]) -> None:
    if arguments[:1] == ["show"] and len(arguments) == 2:
        sys.stdout.write((ADMIN / Path(arguments[1]).name).read_text() + "\n")
    elif not arguments:
        make_missing()
        hand_out()
    else:
        sys.exit(__doc__)


def make_missing() -> None:
    for name in ("redis-password", "redis-admin-password", "weights-key", "grafana-password"):
        if not (ADMIN / name).exists():
            write(ADMIN / name, secrets.token_urlsafe(32))
    for name, role in (("admin-key", Role.ADMIN), ("read-key", Role.READ)):
        if not (ADMIN / name).exists():
            write(ADMIN / name, new_key(name, role)[0])


def hand_out() -> None:
    """Write the secrets from the plain ones alone, so that the next start mends one that was killed half-way."""
    password = read("redis-password")
    write(ROOT / "redis" / "users.acl", acl(password, read("redis-admin-password")))
    for service in ("redis", "broker", "workers"):
        write(ROOT / service / "redis-password", password)
    write(ROOT / "workers" / "weights-key", read("weights-key"))
    for name in ("read-key", "grafana-password"):
        write(ROOT / "monitoring" / name, read(name), mode=0o444)  # Prometheus and Grafana have users of their own
    write_api_keys(ROOT / "broker" / "api-keys.json")
    for volume in DATA:
        os.chown(volume, USER, USER)


def acl(password: str, admin_password: str) -> str:
    text = ACL_TEMPLATE.read_text()
    for placeholder, secret in (("ADMIN_PASSWORD", admin_password), ("PASSWORD", password)):
        text = text.replace(f"SHA256_OF_THE_{placeholder}", hashlib.sha256(secret.encode()).hexdigest())
    return text


def write_api_keys(path: Path) -> None:
    """Only once: later on `onbeat keys` edits this file."""
    if not path.exists():
        keys = [("admin-key", Role.ADMIN), ("read-key", Role.READ)]
        write_keys(path, [entry(name, role, read(name)) for name, role in keys])
    os.chown(path, USER, USER)


def entry(name: str, role: Role, key: str) -> ApiKey:
    return ApiKey(id=id_of(key), name=name, role=role, sha256=digest_of(key))


def read(name: str) -> str:
    return (ADMIN / name).read_text()


def write(path: Path, content: str, mode: int = 0o400) -> None:
    """Whole or not at all, and owned by the services' user."""
    draft = path.with_name(f".{path.name}.new")
    draft.unlink(missing_ok=True)
    with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o400), "w") as file:
        file.write(content)
        os.fchmod(file.fileno(), mode)
    os.chown(draft, USER, USER)
    draft.replace(path)


if __name__ == "__main__":
    main(sys.argv[1:])
