"""Small parts of the rollout: busy time, token rate, how much to claim, engines by name, model files."""

import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from onbeat.config import JobConfig
from onbeat.contracts.intervals import union_of
from onbeat.streams.codec import Environment, PromptTask
from onbeat.streams.ledger import Claim
from services import device
from services.rollout import __main__ as rollout
from services.rollout.attach import write_model_files
from services.rollout.engines import registry
from services.rollout.engines.registry import create_engine, prepare_engine
from services.rollout.inflight import Flight, RoundSize, Stage, num_claimable
from services.rollout.meters import MAX_ITERATIONS, BusyMeter, TokenRate, marks_of
from services.rollout.settings import Settings


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
        with suppress(RuntimeError), busy.running(0):
            clock.now = 4.0
            raise RuntimeError("a generation that fails ends, too")
    clock.now = 10.0  # idle
    with busy.running(0):
        clock.now = 11.5
        assert busy.seconds(0) == 5.5  # 0-4 and 10-11.5, the second still running
    for iteration in range(1, MAX_ITERATIONS + 1):
        with busy.running(iteration):
            clock.now += iteration
    assert [busy.seconds(0), busy.seconds(1), busy.seconds(MAX_ITERATIONS)] == [0.0, 1.0, MAX_ITERATIONS]  # 0 is old


def test_a_late_evaluation_takes_no_time_from_iterations():
    clock = Clock()
    busy = BusyMeter(clock)
    with busy.running(3, is_evaluation=True):
        clock.now = 1.0
        with busy.running(4):
            clock.now = 3.0
    assert [busy.seconds(3), busy.seconds(4)] == [1.0, 2.0]


@pytest.mark.parametrize(("iteration", "seconds"), [(0, [5.0, 0.0]), (1, [4.0, 1.0])])
def test_groups_that_end_crosswise_share_no_second(iteration: int, seconds: list[float]):
    """The second group belongs to `iteration`, the first one to 0."""
    clock = Clock()
    busy = BusyMeter(clock)
    first, second = busy.running(0), busy.running(iteration)
    first.__enter__()
    clock.now = 3.0
    second.__enter__()
    clock.now = 4.0
    first.__exit__(None, None, None)
    clock.now = 5.0
    second.__exit__(None, None, None)
    assert [busy.seconds(0), busy.seconds(1)] == seconds


def test_token_rate_is_of_the_last_ten_seconds():
    clock = Clock()
    rate = TokenRate(clock)
    rate.add(100)
    clock.now = 9.0
    rate.add(50)
    assert rate.per_second() == 15.0
    clock.now = 10.5
    assert rate.per_second() == 5.0


def test_marks_of_calls_leave_out_the_shortest_gaps():
    in_engine = union_of([(10.0, 11.5), (17.0, 18.0), (12.05, 13.0), (11.0, 12.0), (11.2, 11.3), (15.0, 16.0)])
    assert in_engine == [(10.0, 12.0), (12.05, 13.0), (15.0, 16.0), (17.0, 18.0)]
    assert marks_of(in_engine) == [(10.0, 13.0), (15.0, 16.0), (17.0, 18.0)]
    assert marks_of(in_engine, 2) == [(10.0, 13.0), (15.0, 18.0)]
    assert marks_of(in_engine, 1) == [(10.0, 18.0)]


def flights_of(*stages: Stage, num_samples: int = 8, iteration: int = 0, is_evaluation: bool = False) -> list[Flight]:
    flights: list[Flight] = []
    add_flights(flights, *stages, num_samples=num_samples, iteration=iteration, is_evaluation=is_evaluation)
    return flights


def played_flights(*stages: Stage) -> list[Flight]:
    flights: list[Flight] = []
    add_flights(flights, *stages, num_samples=8, environment=Environment(name="game"))
    return flights


def add_flights(flights: list[Flight], *stages: Stage, **task) -> None:
    for stage in stages:
        flights.append(Flight(Claim(str(len(flights)), 1, PromptTask(**task)), stage))


WAITING, GENERATING, SCORING = Stage.WAITING, Stage.GENERATING, Stage.SCORING
TRAINING = RoundSize(num_prompts=8, num_samples=8)


@pytest.mark.parametrize(
    ("stages", "capacity", "num_workers", "expected"),
    [
        ((), 64, 1, 8),  # all 8 prompts fit
        ((GENERATING,) * 3, 64, 1, 5),
        ((WAITING,) * 8, 64, 1, 0),
        ((), 64, 2, 4),  # half of them with two workers
        ((), 64, 3, 3),
        ((GENERATING,) * 2, 64, 2, 2),
        ((SCORING,) * 4, 64, 2, 4),  # scoring holds no place
        ((), 20, 1, 3),  # two fit, one more waits for the first free place
        ((), 4, 1, 1),  # a group larger than the capacity is taken alone
        ((GENERATING,), 4, 1, 0),
        ((SCORING,) * 6, 16, 1, 0),  # but scoring may not pile up
        ((SCORING,) * 5, 16, 1, 1),
    ],
)
def test_claims_fill_free_capacity_and_leave_others_their_share(stages, capacity, num_workers, expected):
    assert num_claimable(flights_of(*stages), capacity, TRAINING, None, num_workers) == expected


def test_stragglers_of_an_iteration_are_not_counted_in_the_next():
    flights = flights_of(GENERATING, GENERATING, iteration=4)
    assert num_claimable(flights, 128, TRAINING, None, 2) == 2  # groups of any iteration
    add_flights(flights, WAITING, WAITING, num_samples=8, iteration=5)
    assert num_claimable(flights, 128, TRAINING, None, 2) == 2  # 5 has begun: its share is 4
    add_flights(flights, WAITING, WAITING, num_samples=8, iteration=5)
    assert num_claimable(flights, 128, TRAINING, None, 2) == 0


def test_places_of_waiting_episodes_are_for_other_groups():
    flights = played_flights(*[GENERATING] * 3)
    waiting = [SimpleNamespace(doing="", num_waiting=number) for number in (8, 5, 0)]
    for flight, episodes in zip(flights, waiting, strict=True):
        flight.episodes = episodes
    assert num_claimable(flights, 16, TRAINING, None, 1, num_playable=32) == 1  # 3 + 8 responses hold places
    waiting[2].num_waiting = 8
    assert num_claimable(flights, 16, TRAINING, None, 1, num_playable=32) == 2
    assert num_claimable(flights, 16, TRAINING, None, 1, num_playable=4) == 1
    assert num_claimable(flights, 16, TRAINING, None, 1, num_playable=2) == 0  # memory has become short
    assert num_claimable(flights, 16, TRAINING, None, 2, num_playable=32) == 1  # the worker's share is 4


def test_claims_keep_a_process_free_for_any_next_prompt():
    """Episodes and responses of one turn: which kind comes next is not known."""
    flights = [*played_flights(*[GENERATING] * 3), *flights_of(*[GENERATING] * 3)]
    assert num_claimable(flights, 128, TRAINING, None, 1, num_playable=8) == 2  # share of 8
    assert num_claimable(flights, 128, TRAINING, None, 1, num_playable=4) == 1
    assert num_claimable(flights, 128, TRAINING, None, 1, num_playable=3) == 0
    assert num_claimable(flights[3:], 128, TRAINING, None, 1, num_playable=1) == 1  # responses of one turn need none
    scoring = played_flights(*[SCORING] * 3)
    assert num_claimable(scoring, 128, TRAINING, None, 1, num_playable=3) == 3


def test_evaluation_of_single_samples_fills_the_engine_as_well():
    def claims_until_full(flights: list[Flight], evaluation: RoundSize, num_workers: int, **task) -> int:
        """Groups of this kind that a worker claims one claim after the other."""
        before = len(flights)
        while count := num_claimable(flights, 64, TRAINING, evaluation, num_workers):
            add_flights(flights, *[GENERATING] * count, **task)
        return len(flights) - before

    evaluation = RoundSize(num_prompts=100, num_samples=1)
    single = {"num_samples": 1, "is_evaluation": True}
    assert claims_until_full(flights_of(), evaluation, 1, **single) == 65  # full, and something waits
    assert claims_until_full(flights_of(), evaluation, 2, **single) == 50  # the share of each of two workers
    assert claims_until_full(flights_of(*[GENERATING] * 3), evaluation, 1, **single) == 41  # 24 + 41 responses
    flights = flights_of(GENERATING, num_samples=1, is_evaluation=True)
    assert claims_until_full(flights, evaluation, 2, num_samples=8) == 4  # training's share is training's


def test_engine_gets_the_options_that_it_knows(monkeypatch):
    prepared = []

    class Narrow:
        def __init__(self, *, dtype: str) -> None:
            self.dtype = dtype

        @staticmethod
        def prepare(device: str) -> None:
            prepared.append(device)

    entries = [SimpleNamespace(name="narrow", load=lambda: Narrow), SimpleNamespace(name="plain", load=lambda: object)]
    monkeypatch.setattr("onbeat.contracts.installed.entry_points", lambda group: entries)
    engine = create_engine("narrow", dtype="float32", cpu_cores="0")
    assert isinstance(engine, Narrow)
    assert engine.dtype == "float32"
    for name in ("narrow", "plain"):
        prepare_engine(name, device="cpu", cpu_cores="0")
    assert prepared == ["cpu"]
    with pytest.raises(ValueError, match=r"ONBEAT_ENGINE: no engine 'wide' .* there are: narrow"):
        create_engine("wide")


async def test_engine_is_prepared_before_there_is_a_job_with_settings(monkeypatch, redis_url):
    quickstart = Path(__file__).parents[3] / "examples" / "quickstart.toml"
    steps, options = [], {}

    class Jobless:
        def __init__(self, settings, ledger, hardware, factories, devices) -> None:
            self.stop = None
            assert devices == ["npu 3"]
            factories.create_engine(JobConfig.from_file(quickstart))

        async def run(self) -> None:
            steps.append("wait for a job")

    monkeypatch.setattr(rollout, "check_engine", lambda *_: "npu")
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "3")
    monkeypatch.setattr(rollout, "find_hardware", lambda device: device)
    monkeypatch.setattr(rollout, "prepare_engine", lambda name, **place: steps.append((name, place)))
    monkeypatch.setattr(rollout, "create_engine", lambda name, **given: options.update(given))
    monkeypatch.setattr(rollout, "Worker", Jobless)
    settings = Settings(
        engine="mine", redis_url=redis_url, tensor_parallel_size=2, cpu_cores="0-3", gpu_memory_utilization=0.7
    )
    assert await rollout.supervise(settings) == 0
    place = {"device": "npu", "tensor_parallel_size": 2, "cpu_cores": "0-3"}
    assert steps == [("mine", place), "wait for a job"]
    assert options == options | place | {"gpu_memory_utilization": 0.7}


def test_cpu_rollout_looks_for_jobs_before_its_slow_imports():
    code = (
        "import sys, services.rollout.__main__\n"
        "from services.rollout.engines.registry import find_device, knows_accelerators, load_engine\n"
        "load_engine('vllm'), knows_accelerators() or find_device('auto')\n"
        "print([name for name in ('torch', 'transformers', 'vllm') if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("torch", "torch_npu", "device_name"),
    [("2.13.0+cpu", None, "cpu"), ("2.13.0+cpu", "there", "looked"), ("2.13.0+cu130", None, "looked")],
)
def test_pytorch_is_asked_for_the_device_unless_it_is_the_cpu(monkeypatch, torch, torch_npu, device_name):
    monkeypatch.setattr(registry, "version", lambda name: torch)
    monkeypatch.setattr(registry, "find_spec", lambda name: torch_npu)
    monkeypatch.setattr(device, "choose_device", lambda name: SimpleNamespace(type="looked"))
    assert [registry.find_device(name) for name in ("auto", "cpu")] == [device_name, device_name]
    assert registry.find_device("cuda") == "looked"


def test_model_files_are_plain_data_inside_the_folder(tmp_path):
    files = {"config.json": b"{}", "modeling_evil.py": b"boom", "pytorch_model.bin": b"pickle"}
    write_model_files(tmp_path / "model", files)
    assert [path.name for path in (tmp_path / "model").iterdir()] == ["config.json"]
    with pytest.raises(ValueError, match=r"\.\./config\.json"):
        write_model_files(tmp_path / "other", {"../config.json": b"{}"})
