"""The table of docs/sizes.md is what the trainer's rule for the size of a checkpoint gives."""

from pathlib import Path

from services.trainer.checkpoints.saver import state_bytes
from tests.trainer_fixtures import job_config

PAGE = Path(__file__).parents[3] / "docs/sizes.md"
NUM_CHECKPOINTS, TRAINED_SHARE, BFLOAT16_BYTES = 3, 0.005, 2


def test_checkpoints_on_the_page_of_sizes_are_computed() -> None:
    without, with_gac = job_config(gac={"mode": "off"}), job_config(gac={"mode": "metric"})
    assert without.checkpoint.keep + 1 == NUM_CHECKPOINTS
    rows = [line.strip("| ").split(" | ") for line in PAGE.read_text("utf-8").splitlines() if "B | " in line]
    assert len(rows) == 7
    for name, *cells in rows:
        num_parameters = round(float(name.removesuffix("B")) * 1e9)
        for config, share, place in ((without, 1.0, 0), (with_gac, 1.0, 2), (without, TRAINED_SHARE, 4)):
            size = state_bytes(config, round(num_parameters * share)) + num_parameters * BFLOAT16_BYTES
            expected = [size / 1e9, NUM_CHECKPOINTS * size / 1e9]
            assert cells[place : place + 2] == [f"{gb:.1f}" if gb < 10 else f"{gb:.0f}" for gb in expected], name
