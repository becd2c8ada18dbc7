"""`make gpu-check` without a GPU: the same parts with tiny shapes, so that no GPU's time goes into typing errors.

The job is left to `make gpu-check-rehearsal`: tests/e2e has jobs on this engine.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("part", ["attention", "step", "packing", "publish", "invariance"])
def test_a_part_of_the_check_is_right_on_a_cpu(part, tmp_path):
    command = [sys.executable, "-m", "benchmarks.gpu_check", part, "--folder", str(tmp_path)]
    no_gpu = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    no_gpu.pop("TORCH_COMPILE_DISABLE", None)  # of tests with vLLM in this process
    done = subprocess.run(command, cwd=ROOT, env=no_gpu, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "every part that can runs on the CPU, with tiny shapes" in done.stdout
    result = json.loads((tmp_path / "gpu_check.json").read_text())
    assert result["device"] == "cpu"
    assert result["parts"][part]["status"] == "done"
    assert result["parts"][part]["checks"] or result["parts"][part]["figures"]
