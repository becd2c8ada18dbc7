"""Small parts of the rollout: busy time, token rate, how much to claim, engines by name, model files."""

from types import SimpleNamespace

import pytest

from services.rollout import engines
from services.rollout.engines import create_engine
from services.rollout.inflight import Flight, FlightTable, Stage, num_claimable
from services.rollout.meters import MAX_ITERATIONS, BusyMeter, TokenRate
from services.rollout.session import write_model_files


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_overlapping_groups_count_once_and_idle_time_does_not():
    clock = Clock()
    busy = BusyMeter(clock)
    with busy.running(0):
        clock.now = 3.0
        with busy.running(0):
            clock.now = 4.0
    clock.now = 10.0  # idle
    with busy.running(0):
        clock.now = 11.5
        assert busy.seconds(0) == 5.5  # 0-4 and 10-11.5, the second still running
    assert busy.seconds(0) == 5.5


def test_groups_that_end_crosswise_count_as_one_stretch():
    clock = Clock()
    busy = BusyMeter(clock)
    first, second = busy.running(0), busy.running(0)
    first.__enter__()
    clock.now = 3.0
    second.__enter__()
    clock.now = 4.0
    first.__exit__(None, None, None)
    clock.now = 5.0
    second.__exit__(None, None, None)
    assert busy.seconds(0) == 5.0


def test_iterations_have_separate_busy_times_and_old_ones_are_forgotten():
    clock = Clock()
    busy = BusyMeter(clock)
    for iteration in range(MAX_ITERATIONS + 5):
        with busy.running(iteration):
            clock.now += iteration
    assert busy.seconds(MAX_ITERATIONS + 4) == MAX_ITERATIONS + 4
    assert busy.seconds(0) == 0.0
    assert len(busy._finished_s) == MAX_ITERATIONS


def test_a_failed_generation_ends_its_busy_time():
    clock = Clock()
    busy = BusyMeter(clock)

    def fail_after_two_seconds() -> None:
        with busy.running(0):
            clock.now = 2.0
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail_after_two_seconds()
    clock.now = 9.0
    assert busy.seconds(0) == 2.0


def test_token_rate_is_of_the_last_ten_seconds():
    clock = Clock()
    rate = TokenRate(clock)
    rate.add(100)
    clock.now = 9.0
    rate.add(50)
    assert rate.per_second() == 15.0
    clock.now = 10.5
    assert rate.per_second() == 5.0


def flights_of(*stages: Stage) -> FlightTable:
    table = FlightTable()
    for index, stage in enumerate(stages):
        table.add(Flight(SimpleNamespace(entry_id=str(index)), stage))  # type: ignore[arg-type]
    return table


WAITING, GENERATING, SCORING = Stage.WAITING, Stage.GENERATING, Stage.SCORING


@pytest.mark.parametrize(
    ("stages", "capacity", "num_samples", "num_workers", "expected"),
    [
        ((), 64, 8, 1, 8),  # all 8 prompts fit
        ((GENERATING,) * 3, 64, 8, 1, 5),
        ((WAITING,) * 8, 64, 8, 1, 0),
        ((), 64, 8, 2, 4),  # half of them with two workers
        ((), 64, 8, 3, 3),
        ((GENERATING,) * 2, 64, 8, 2, 2),
        ((SCORING,) * 4, 64, 8, 2, 4),  # scoring holds no place
        ((), 20, 8, 1, 3),  # two fit, one more waits for the first free place
        ((), 4, 8, 1, 1),  # a group larger than the capacity is taken alone
        ((GENERATING,), 4, 8, 1, 0),
        ((SCORING,) * 6, 16, 8, 1, 0),  # but scoring may not pile up
        ((SCORING,) * 5, 16, 8, 1, 1),
    ],
)
def test_claims_fill_free_capacity_and_leave_the_others_their_share(
    stages, capacity, num_samples, num_workers, expected
):
    assert num_claimable(flights_of(*stages), capacity, num_samples, 8, num_workers) == expected


def test_engine_gets_the_options_that_it_knows(monkeypatch):
    class Narrow:
        def __init__(self, *, dtype: str) -> None:
            self.dtype = dtype

    entry = SimpleNamespace(name="narrow", load=lambda: Narrow)
    monkeypatch.setattr(engines, "entry_points", lambda group: [entry])
    engine = create_engine("narrow", dtype="float32", cpu_cores="0")
    assert isinstance(engine, Narrow)
    assert engine.dtype == "float32"
    with pytest.raises(ValueError, match=r"no engine 'wide' .* one of: narrow"):
        create_engine("wide")


def test_model_files_are_plain_data_inside_the_folder(tmp_path):
    files = {"config.json": b"{}", "modeling_evil.py": b"boom", "pytorch_model.bin": b"pickle"}
    write_model_files(tmp_path / "model", files)
    assert [path.name for path in (tmp_path / "model").iterdir()] == ["config.json"]
    with pytest.raises(ValueError, match=r"\.\./config\.json"):
        write_model_files(tmp_path / "other", {"../config.json": b"{}"})
