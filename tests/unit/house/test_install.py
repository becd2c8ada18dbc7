"""Set-up takes packages from where pip is told to, with uv or without, and PyTorch from its own index where it must."""

import base64
import hashlib
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from collections.abc import Callable
from importlib.metadata import distribution
from pathlib import Path

import pytest

pytestmark = pytest.mark.rare

INSTALL = Path(__file__).parents[3] / "requirements" / "install.py"
PYTORCH = "https://download.pytorch.org/whl/cpu"
UV = Path(sys.executable).with_name("uv")
Installer = Callable[..., subprocess.CompletedProcess[str]]


def publish(index: Path, name: str, version: str, script: str = "") -> None:
    """Publish a wheel in a simple index, with a module of the same name or, if there is a script, with that alone."""
    folder = index / name
    folder.mkdir(parents=True)
    wheel = f"{name}-{version}-py3-none-any.whl"
    files = {
        f"{name}-{version}.data/scripts/{name}" if script else f"{name}.py": script,
        f"{name}-{version}.dist-info/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{name}-{version}.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{path},sha256={digest(text)},{len(text)}\n" for path, text in files.items())
    with zipfile.ZipFile(folder / wheel, "w") as archive:
        for path, text in (files | {f"{name}-{version}.dist-info/RECORD": record}).items():
            entry = zipfile.ZipInfo(path)
            entry.external_attr = 0o100755 << 16
            archive.writestr(entry, text)
    (folder / "index.html").write_text(f'<a href="{wheel.replace("+", "%2B")}">{wheel}</a>')


def digest(text: str) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()


def uv_version() -> str:
    (line,) = (line for line in INSTALL.read_text().splitlines() if line.startswith('UV = "uv=='))
    return line.split("==")[1].rstrip('"')


@pytest.fixture
def install(tmp_path: Path) -> Installer:
    """Run the script in an environment of its own, with an index that pip is configured for and one of PyTorch's."""
    venv.create(tmp_path / "venv", symlinks=True)
    packages = next((tmp_path / "venv").glob("lib/python3*/site-packages"))
    # Importing pip here would turn off the hook of setuptools, and with it every later import of setuptools.
    (packages / "pip").symlink_to(str(distribution("pip").locate_file("pip")))
    script, text = tmp_path / "install.py", INSTALL.read_text()
    assert text.count(PYTORCH) == 1
    script.write_text(text.replace(PYTORCH, (tmp_path / "pytorch").as_uri()))
    (tmp_path / "cpu.lock").write_text("plain==1.0\nkernels==1.0+cpu ; python_version > '3'\n")

    def run(pip_conf: str = "", *options: str) -> subprocess.CompletedProcess[str]:
        conf = tmp_path / "pip.conf"
        conf.write_text(f"[global]\nindex-url = {(tmp_path / 'company').as_uri()}\n{pip_conf}")
        env = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "UV_"))}
        env |= {"PIP_CONFIG_FILE": str(conf), "UV_CACHE_DIR": str(tmp_path / "cache"), "HOME": str(tmp_path)}
        command = [tmp_path / "venv/bin/python", script, *options, tmp_path / "cpu.lock"]
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)

    return run


def installed(folder: Path, environment: str = "venv") -> dict[str, str]:
    """Return the versions of the packages, and the program that installed them."""
    installers = (folder / environment).glob("lib/python3*/site-packages/*.dist-info/INSTALLER")
    return {path.parent.name.removesuffix(".dist-info"): path.read_text().strip() for path in installers}


def test_pytorch_comes_from_its_own_index_where_no_source_has_it(install: Installer, tmp_path: Path) -> None:
    broken_uv = "#!/bin/sh\necho broken >&2\nexit 2\n"
    publish(tmp_path / "company", "plain", "1.0")
    publish(tmp_path / "company", "uv", uv_version(), broken_uv)
    publish(tmp_path / "pytorch", "kernels", "1.0+cpu")
    done = install()
    assert done.returncode == 0, done.stderr
    said, *rest = done.stderr.splitlines()
    assert said.startswith("set-up: pip's package sources have no kernels==1.0+cpu")
    assert said.endswith(f"it is installed from file://{tmp_path}/pytorch")
    assert rest == ["set-up: uv cannot install the packages, so pip does, which takes minutes. uv's problem:", "broken"]
    assert installed(tmp_path).keys() == {"plain-1.0", "kernels-1.0+cpu", f"uv-{uv_version()}"}


def test_package_that_no_source_has_ends_set_up_with_its_name(install: Installer, tmp_path: Path) -> None:
    publish(tmp_path / "company", "kernels", "1.0+cpu")
    done = install()
    assert done.returncode == 1
    assert "set-up: the pinned packages could not be installed:\n" in done.stderr
    assert "No matching distribution found for plain==1.0" in done.stderr


def test_uv_gets_the_sources_that_pip_has(install: Installer, tmp_path: Path) -> None:
    publish(tmp_path / "company", "kernels", "1.0+cpu")
    publish(tmp_path / "company", "uv", uv_version(), '#!/bin/sh\nenv >"$HOME/variables"\n')
    (tmp_path / "a.pem").touch()
    empty = "index-url =\n"  # leaves the one above, as in pip
    done = install(
        f"extra-index-url = file:///a\n  file:///b\nfind-links = /c /d\n[install]\ncert = {tmp_path}/a.pem\n{empty}"
    )
    assert done.returncode == 0, done.stderr
    variables = dict(line.split("=", 1) for line in (tmp_path / "variables").read_text().splitlines())
    assert variables["UV_DEFAULT_INDEX"] == (tmp_path / "company").as_uri()
    assert variables["UV_INDEX"] == "file:///a file:///b"
    assert variables["UV_FIND_LINKS"] == "/c,/d"
    assert variables["SSL_CERT_FILE"] == f"{tmp_path}/a.pem"


@pytest.mark.skipif(not UV.exists(), reason="set-up found no uv for this machine")
def test_uv_installs_what_is_not_there_yet(install: Installer, tmp_path: Path) -> None:
    publish(tmp_path / "company", "uv", uv_version(), f'#!/bin/sh\nexec "{UV}" "$@"\n')
    publish(tmp_path / "more", "plain", "1.0")
    publish(tmp_path / "even-more", "kernels", "1.0+cpu")
    links = " ".join(str(folder) for folder in (tmp_path / "more" / "plain", tmp_path / "even-more" / "kernels"))
    done = install(f"extra-index-url = {(tmp_path / 'none').as_uri()}\nfind-links = {links}\n")
    assert (done.returncode, done.stderr) == (0, "")
    assert installed(tmp_path) == {"plain-1.0": "uv", "kernels-1.0+cpu": "pip", f"uv-{uv_version()}": "pip"}


@pytest.mark.skipif(not UV.exists(), reason="set-up found no uv for this machine")
def test_another_python_gets_the_packages_and_no_installer(install: Installer, tmp_path: Path) -> None:
    venv.create(tmp_path / "other", symlinks=True)
    publish(tmp_path / "company", "uv", uv_version(), f'#!/bin/sh\nexec "{UV}" "$@"\n')
    publish(tmp_path / "company", "plain", "1.0")
    publish(tmp_path / "pytorch", "kernels", "1.0+cpu")
    done = install("", "--python", str(tmp_path / "other/bin/python"))
    assert done.returncode == 0, done.stderr
    assert installed(tmp_path, "other") == {"plain-1.0": "uv", "kernels-1.0+cpu": "pip"}
    assert installed(tmp_path) == {f"uv-{uv_version()}": "pip"}


@pytest.fixture
def make_setup(tmp_path: Path) -> Callable[..., int]:
    """Run `make setup` with a Python that makes environments whose packages install if `sources` is there."""
    for name in (
        "Makefile",
        "pyproject.toml",
        *(f"requirements/{platform_name}.lock" for platform_name in ("cpu", "cuda", "dev")),
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(INSTALL.parents[1] / name, tmp_path / name)
    python = tmp_path / "python3"
    python.write_text(
        '#!/bin/sh\n[ "$2" = venv ] || exit 0\nrm -rf .venv\nmkdir -p .venv/bin\n'
        'for name in python pip; do printf "#!/bin/sh\\ntest -e sources" >.venv/bin/$name; done\nchmod +x .venv/bin/*\n'
    )
    python.chmod(0o755)
    command = ["make", "-s", "setup", "PYTHON=./python3"]
    return lambda *more: (
        subprocess.run([*command, *more], cwd=tmp_path, capture_output=True, timeout=30, check=False).returncode
    )


def test_interrupted_set_up_is_continued_for_its_platform(make_setup: Callable[..., int], tmp_path: Path) -> None:
    assert make_setup("PLATFORM=cuda") != 0
    assert make_setup() != 0
    (tmp_path / "sources").touch()
    assert make_setup() == 0
    assert (tmp_path / ".venv" / ".setup-cuda").exists()


def test_set_up_begins_anew_after_a_failure_and_keeps_the_rest(make_setup: Callable[..., int], tmp_path: Path) -> None:
    assert make_setup() != 0
    (tmp_path / ".venv" / "half-installed").touch()
    (tmp_path / "sources").touch()
    assert make_setup() == 0
    assert not (tmp_path / ".venv" / "half-installed").exists()
    (tmp_path / ".venv" / "a-reward").touch()  # a file of the user
    os.utime(tmp_path / ".venv" / ".setup-cpu", (0, 0))  # there is a new lock
    assert make_setup() == 0
    assert (tmp_path / ".venv" / "a-reward").exists()
    assert (tmp_path / ".venv" / ".setup-cpu").stat().st_mtime > 0
