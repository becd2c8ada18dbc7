"""Install pinned packages: `python requirements/install.py [--python PYTHON] LOCK...`.

uv installs them, several times faster than pip, from the package sources that pip is configured for. Where there is no
uv for this machine, or it fails, pip installs them. uv and pip are beside the Python that runs this, and so are the
packages unless --python names another one. Only the standard library is there yet.
"""

import argparse
import ast
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

UV = "uv==0.13.9"
# PyPI has no builds with a local version, such as torch==2.13.0+cpu. PyTorch has them here.
PYTORCH_INDEX = "https://download.pytorch.org/whl/cpu"
# Python keeps the bytecode of modules that it imports. They are a small part: there is no need to compile them all.
COMPILES = sys.dont_write_bytecode
INSTALL = ["install", "--quiet", "--no-deps", "--compile" if COMPILES else "--no-compile"]
PIP = [sys.executable, "-m", "pip"]
# Where pip is configured to take packages from, and the variable that tells uv the same.
UV_VARIABLES = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "trusted-host": "UV_INSECURE_HOST",
    "cert": "SSL_CERT_FILE",
    "client-cert": "SSL_CLIENT_CERT",
    "proxy": "ALL_PROXY",
    "default-timeout": "UV_HTTP_TIMEOUT",
    "timeout": "UV_HTTP_TIMEOUT",
    "no-cache-dir": "UV_NO_CACHE",
}


class InstallError(Exception):
    """The installer failed; the message is its output."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", default=sys.executable, help="the Python that gets the packages")
    parser.add_argument("locks", nargs="+", metavar="LOCK")
    options = parser.parse_args()
    pip = [*PIP, "--python", options.python, *INSTALL]
    try:
        install_local_versions([line for lock in options.locks for line in Path(lock).read_text().splitlines()], pip)
        requirements = [f"--requirement={lock}" for lock in options.locks]
        try:
            install_with_uv(options.python, requirements)
        except (InstallError, OSError) as error:
            say(f"uv cannot install the packages, so pip does, which takes minutes. uv's problem:\n{error}")
            run([*pip, *requirements])
    except InstallError as error:
        say(f"the pinned packages could not be installed:\n{error}")
        return 1
    return 0


def install_local_versions(pins: list[str], pip: list[str]) -> None:
    """Install them from pip's package sources or, where these have none, from PyTorch's own index."""
    for pin in pins:
        if "+" not in pin.partition(";")[0]:
            continue
        try:
            run([*pip, pin])
        except InstallError as error:
            if "No matching distribution found" not in str(error):
                raise
            say(f"pip's package sources have no {pin}: it is installed from {PYTORCH_INDEX}")
            run([*pip, "--index-url", PYTORCH_INDEX, pin])


def install_with_uv(python: str, requirements: list[str]) -> None:
    """Take the best version of all package sources, as pip does."""
    run([*PIP, *INSTALL, UV])
    settings = pip_settings()
    options = ["--quiet", "--no-deps", "--index-strategy", "unsafe-best-match"]
    options.append("--compile-bytecode" if COMPILES else "--no-compile-bytecode")
    if settings.get("no-index", "0").lower() in ("1", "true", "yes", "on"):
        options.append("--no-index")
    variables = {
        variable: ("," if option == "find-links" else " ").join(settings[option].split())
        for option, variable in UV_VARIABLES.items()
        if option in settings
    }
    uv = Path(sys.executable).with_name("uv")
    run([str(uv), "pip", "install", "--python", python, *options, *requirements], variables)


def pip_settings() -> dict[str, str]:
    """Return what `pip install` is configured for: in files, for it alone, in the environment; the last one wins."""
    listed = run([*PIP, "config", "list"]).splitlines()
    settings = {}
    for section in ("global.", "install.", ":env:."):
        for line in listed:
            if line.startswith(section):
                option, _, text = line.removeprefix(section).partition("=")
                if value := ast.literal_eval(text):  # pip ignores empty ones
                    settings[option] = value
    return settings


def run(command: list[str], variables: Mapping[str, str] = {}) -> str:
    """Return its output."""
    done = subprocess.run(
        command, env=os.environ | variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode:
        raise InstallError("\n".join(done.stdout.splitlines()[-20:]))
    return done.stdout


def say(sentence: str) -> None:
    sys.stderr.write(f"set-up: {sentence}\n")


if __name__ == "__main__":
    sys.exit(main())
