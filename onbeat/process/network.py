"""Addresses, certificates and secret files, as every service checks them."""

import ipaddress
import ssl
from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator

# Compose passes an unset variable on as an empty one, which as a path would be the current folder.
OptionalFile = Annotated[Path | None, BeforeValidator(lambda value: None if value == "" else value)]


def is_loopback(host: str) -> bool:
    """Return whether a host, by address or name, is reached on this machine alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # the host is a name
        return host == "localhost"


def host_of(address: str) -> str:
    """Return the host of `host:port`, an IPv6 address without its brackets."""
    return address.rpartition(":")[0].strip("[]")


def read_file(name: str, path: Path) -> str:
    """Return the text in the file of setting `name`. Raise ValueError, without the text, when there is none."""
    try:
        text = path.read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ValueError(f"{name}={path} cannot be read: {reason}") from None
    if not text:
        raise ValueError(f"{name}={path} is empty")
    return text


def check_certificate(cert: tuple[str, Path | None], key: tuple[str, Path | None]) -> None:
    """Check a PEM certificate and its key, each given as the name of its setting and its file; both or neither are set.

    Raise ValueError.
    """
    if cert[1] is None or key[1] is None:
        if (cert[1] is None) != (key[1] is None):
            given, missing = (cert[0], key[0]) if cert[1] else (key[0], cert[0])
            raise ValueError(f"{given} is set but {missing} is not; set both or neither")
        return
    try:  # an empty password, since without one OpenSSL would ask the terminal for it
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert[1], key[1], password="")
    except OSError as error:
        files = " and ".join(f"{name}={path}" for name, path in (cert, key))
        raise ValueError(f"{files} are not a PEM certificate and its unencrypted key: {error}") from error


def trust(name: str, ca_file: str | Path) -> ssl.SSLContext:
    """Return a client's context that trusts the authority in the file of setting `name`. Raise ValueError."""
    try:
        return ssl.create_default_context(cafile=ca_file)
    except OSError as error:
        raise ValueError(f"{name}={ca_file} has no PEM certificate: {error}") from error
