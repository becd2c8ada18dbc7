"""Third-party packages that travel along to a machine without a network: `make gpu-check-wheels` fetches them.

    python3 benchmarks/gpu_check/wheels.py FOLDER      (the standard library and pip are enough)

They are what Onbeat needs besides PyTorch and transformers, for Python 3.12, at the pins of requirements/cpu.lock.
"""

import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NAMES = ROOT / "requirements" / "gpu-check-wheels.in"
PYTHON, LIMIT_MB = "3.12", 40
GLIBCS = ("_2_28_x86_64", "_2_17_x86_64", "2014_x86_64", "2010_x86_64", "1_x86_64")
# These stand for all of them: a machine that has them has been set up for Onbeat.
MODULES = ("blake3", "fastapi", "grpc", "prometheus_client", "pydantic_settings", "redis", "tensorboard", "zstandard")


def fetch(folder: Path) -> None:
    """Download the wheels. Raises CalledProcessError, with pip's words on the terminal, SystemExit when too large."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.whl"):
        old.unlink()
    places = [f"--platform=manylinux{glibc}" for glibc in GLIBCS]
    options = ["--no-deps", "--only-binary=:all:", f"--python-version={PYTHON}", "--implementation=cp", *places]
    pins = [f"--constraint={ROOT / 'requirements' / 'cpu.lock'}", f"--requirement={NAMES}"]
    command = [sys.executable, "-m", "pip", "download", "--quiet", f"--dest={folder}", *options, *pins]
    subprocess.run(command, check=True)
    wheels = list(folder.glob("*.whl"))
    size_mb = sum(wheel.stat().st_size for wheel in wheels) / 1e6
    if size_mb > LIMIT_MB:
        raise SystemExit(f"the wheels in {folder} take {size_mb:.0f} MB, allowed are {LIMIT_MB}; shorten {NAMES}")
    print(f"{len(wheels)} wheels, {size_mb:.0f} MB, in {folder}")


def missing_modules() -> list[str]:
    return [name for name in MODULES if find_spec(name) is None]


def unpack(folder: Path, target: Path) -> str:
    """Make the wheels importable from `target`, if any are missing here; '' or a sentence about what is wrong."""
    write_entry_points(target)
    missing = missing_modules()
    if not missing:
        return ""
    wheels = sorted(map(str, folder.glob("*.whl")))
    if not wheels:
        remedy = "run `make gpu-check-wheels` where there is a network and take the folder .wheels along"
        return f"missing here: {', '.join(missing)}; {remedy}; until then only the parts that need PyTorch alone run"
    options = ["--no-index", "--no-deps", "--no-compile", "--disable-pip-version-check", "--quiet"]
    command = [sys.executable, "-m", "pip", "install", *options, f"--target={target}", *wheels]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return f"the wheels in {folder} cannot be unpacked: {done.stderr.strip()}" if done.returncode else ""


def write_entry_points(target: Path) -> None:
    """Write entry points, so that Onbeat's engines and rewards are found by name as if the checkout were installed."""
    from onbeat import __version__  # not at the top: `make gpu-check-wheels` runs this file as a program

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    folder = target / f"{project['name']}-{__version__}.dist-info"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {__version__}\n")
    groups = (
        f"[{group}]\n" + "".join(f"{name} = {place}\n" for name, place in entries.items())
        for group, entries in project["entry-points"].items()
    )
    (folder / "entry_points.txt").write_text("\n".join(groups))


if __name__ == "__main__":
    fetch(Path(sys.argv[1]))
