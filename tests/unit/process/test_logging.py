"""A process whose log cannot be written: it goes on."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import logging, sys
from onbeat.process.logging import configure
configure()
from tqdm import tqdm
for step in tqdm(range(3), mininterval=0):
    logging.getLogger("onbeat").info("step %d", step)
print("x" * 100_000, flush=True)
print("reached", file=open(sys.argv[1], "w"))
"""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_full_disk_under_the_logs_fails_nothing(tmp_path):
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-c", PROGRAM, str(tmp_path / "end")]
        ended = subprocess.run(command, stdout=full, stderr=full, env=os.environ, check=False)
    assert (ended.returncode, (tmp_path / "end").read_text()) == (0, "reached\n")
