"""The cause of a failed engine start: one line, also out of a process of vLLM."""

import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import BaseModel, ValidationError, model_validator

from onbeat.engines import EngineDied
from services.rollout.engines.failure import (
    CAUSE_FILE,
    MAX_CHARACTERS,
    EngineStartFailed,
    describe_cause,
    kept_cause,
)

CORE_FAILED = "Engine core initialization failed. See root cause above. Failed core proc(s): {}"


class Picky(BaseModel):
    @model_validator(mode="after")
    def refuse(self) -> "Picky":
        raise ValueError("architectures ['X'] are not supported") from ImportError("No module named 'torchvision'")


def test_cause_is_the_error_that_others_were_raised_from() -> None:
    error = RuntimeError("cannot build")
    error.__cause__ = ValueError("bad\n  head_dim")
    assert describe_cause(ExceptionGroup("several", [error])) == "ValueError: bad head_dim"


def test_error_within_pydantics_is_the_cause() -> None:
    with pytest.raises(ValidationError) as refused:
        Picky()
    assert describe_cause(refused.value) == "ImportError: No module named 'torchvision'"


def test_error_that_was_merely_handled_is_not_the_cause() -> None:
    unknown = ValueError("Transformers does not recognize `x`")
    unknown.__context__ = KeyError("x")
    assert describe_cause(unknown) == "ValueError: Transformers does not recognize `x`"


def test_last_line_of_a_subprocess_is_the_cause() -> None:
    text = "Error raised in subprocess:\nTraceback (most recent call last):\n  File x\nImportError: no torchvision\n"
    error = RuntimeError(text)
    error.__cause__ = subprocess.CalledProcessError(1, "python")
    assert describe_cause(error) == "ImportError: no torchvision"


def test_long_cause_is_cut_in_its_middle() -> None:
    line = describe_cause(ValueError("begin " + "x" * 5000 + " end"))
    assert line.startswith("ValueError: begin")
    assert line.endswith(" end")
    assert len(line) < MAX_CHARACTERS + 10


# ---- a process of vLLM -------------------------------------------------------------------------------------------

WORKER = """
import logging
from services.rollout.engines.failure import keep_causes

keep_causes()
keep_causes()
logger = logging.getLogger("vllm.v1.executor.multiproc_executor")
for message in ("no kernel for sm_99", "WorkerProc initialization failed, see stack trace"):
    try:
        raise ValueError(message)
    except ValueError:
        logger.exception("failed to start")
"""


def test_first_error_that_a_process_of_vllm_logs_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "cause"
    monkeypatch.setenv(CAUSE_FILE, str(path))
    subprocess.run([sys.executable, "-c", WORKER], check=True, capture_output=True, timeout=60)
    cause = kept_cause(RuntimeError(CORE_FAILED.format("{'EngineCore': 1}")), path)
    assert describe_cause(EngineStartFailed(cause)) == "ValueError: no kernel for sm_99"


def test_error_that_names_its_cause_needs_no_log(tmp_path: Path) -> None:
    (tmp_path / "cause").write_text("ValueError: of something else")
    assert kept_cause(ValueError("head_dim 7 is not supported"), tmp_path / "cause") == ""


@pytest.mark.parametrize(("exit_code", "logged"), [(-9, "OSError: swap is full"), (-9, ""), (1, "")])
def test_killed_core_is_no_failure_of_the_model(tmp_path: Path, exit_code: int, logged: str) -> None:
    path = tmp_path / "cause"
    if logged:
        path.write_text(logged)
    with pytest.raises(EngineDied, match="died while it started"):
        kept_cause(RuntimeError(CORE_FAILED.format({"EngineCore": exit_code})), path)
