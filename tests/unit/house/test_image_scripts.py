"""The scripts that make images, with stand-ins for the programs that need root, a network or a container engine."""

import os
import subprocess
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[3] / "deploy" / "docker"
AUTHORITIES = Path("/etc/ssl/certs/ca-certificates.crt")
FAILS = 'echo "the reason" >&2; exit 1'
PROGRAMS = {
    "id": "echo 0",
    "docker": 'case "$1" in import) cat >/dev/null ;; *) echo "no registry" >&2; exit 1 ;; esac',
    "debootstrap": 'mkdir -p "$4"/{tmp,etc/apt/apt.conf.d,usr/local/share/ca-certificates}',
    # As in every chroot: folders of the host are not there.
    "chroot": '[ -d "$1${TMPDIR:-/tmp}" ] || { echo "no directory $TMPDIR" >&2; exit 1; }',
    # No archive is known before the first update.
    "apt-get": 'if [ "$1" = indextargets ]; then cat "$LISTS"; else echo "http://a bookworm main" >"$LISTS"; fi',
    "apt-config": "true",
    "python3": "true",
}


def run_with(
    programs: dict[str, str], folder: Path, *command: str | os.PathLike[str]
) -> subprocess.CompletedProcess[str]:
    """Run the script with a temporary folder that exists on this host alone."""
    stand_ins = folder / "bin"
    stand_ins.mkdir()
    for name, text in programs.items():
        (stand_ins / name).write_text(f"#!/bin/bash\n{text}\n")
        (stand_ins / name).chmod(0o755)
    lists = folder / "lists"
    lists.touch()
    env = os.environ | {"PATH": f"{stand_ins}:{os.environ['PATH']}", "TMPDIR": str(folder), "LISTS": str(lists)}
    env.pop("BASE_IMAGE", None)
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=30, check=False)


@pytest.mark.skipif(not AUTHORITIES.exists(), reason="this host is no Debian: it makes no base image")
def test_base_image_is_made_with_any_temporary_folder(tmp_path: Path) -> None:
    done = run_with(PROGRAMS, tmp_path, SCRIPTS / "base-image.sh")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "onbeat-base:bookworm\n"
    assert "cannot be pulled: no registry\n" in done.stderr


@pytest.mark.skipif(not AUTHORITIES.exists(), reason="this host is no Debian: it makes no base image")
@pytest.mark.parametrize("step", ["debootstrap", "chroot", "apt-get"])
def test_step_that_fails_says_why(tmp_path: Path, step: str) -> None:
    fails = {"apt-get": f'[ "$1" = indextargets ] || {{ {FAILS}; }}'}.get(step, FAILS)
    done = run_with(PROGRAMS | {step: fails}, tmp_path, SCRIPTS / "base-image.sh")
    assert done.returncode == 1
    assert "the reason\n" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("base image: ")
