"""The packages of extras that an installation lacks. The metadata of the installed wheel names them."""

import re
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, distribution, requires

from onbeat.contracts.errors import OnbeatError

# As in: mcp>=2.3; extra == "mcp". Of extras that take others: onbeat[hub,math]; extra == "local".
REQUIREMENT = re.compile(r"""(?P<name>[\w.-]+)(\[(?P<inner>[\w,.-]+)\])?[^;]*; extra == ["'](?P<extra>[\w-]+)["']""")


def require_extra(
    *extras: str, user: str, install: str = "", error: Callable[[str], BaseException] = OnbeatError
) -> None:
    """Raise an error with one sentence if packages of these extras are not installed for `user`, such as "the broker".

    The sentence names the extras, or the one in `install` that has them all. Nothing is imported to find out.
    """
    missing = sorted({package for extra in extras for package in packages_of(extra) if not is_installed(package)})
    if missing:
        extra = install or ",".join(extras)
        remedy = f"pip install 'onbeat[{extra}]' (not installed: {', '.join(missing)})"
        raise error(f"{user} needs the packages of the extra `{extra}`: {remedy}")


def packages_of(extra: str) -> set[str]:
    """Return the names that the metadata has for an extra. A checkout that is not installed has none."""
    try:
        lines = requires("onbeat") or []
    except PackageNotFoundError:
        return set()
    packages = set()
    for match in map(REQUIREMENT.match, lines):
        if match is None or match["extra"] != extra:
            continue
        if match["name"] == "onbeat":
            packages |= {package for inner in match["inner"].split(",") for package in packages_of(inner)}
        else:
            packages.add(match["name"])
    return packages


def is_installed(package: str) -> bool:
    try:
        distribution(package)
    except PackageNotFoundError:
        return False
    return True
