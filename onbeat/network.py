"""Addresses and certificates, as every service checks them."""

import ipaddress
import ssl
from pathlib import Path


def is_loopback(host: str) -> bool:
    """Return whether a host, by address or name, is reached on this machine alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # the host is a name
        return host == "localhost"


def host_of(address: str) -> str:
    """Return the host of `host:port`, an IPv6 address without its brackets."""
    return address.rpartition(":")[0].strip("[]")


def check_certificate(cert: tuple[str, Path], key: tuple[str, Path]) -> None:
    """Check a PEM certificate and its key, each given as the name of its setting and its file. Raise ValueError."""
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
