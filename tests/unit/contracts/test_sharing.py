"""The sentence about overlap in each situation, and what engine and trainer share by their heartbeats."""

import pytest

from onbeat.contracts.records import HostMemory, IterationRecord, JobRecord, TrainerRecord, WorkerRecord
from onbeat.contracts.sharing import overlap_sentence, sharing_of
from onbeat.contracts.states import IterationState, JobState

CORES, CARD, CARDS = ["core 0", "core 1"], ["cuda 0"], ["cuda 0", "cuda 1"]


def sentence(sharing: str | None, mode: str, *shares: float | None, **times: float) -> str | None:
    job = JobRecord(
        id="j",
        name="n",
        pool="default",
        state=JobState.RUNNING,
        created_at=0.0,
        num_iterations=9,
        sharing=sharing,
        config={"schedule": {"mode": mode}},
    )
    head = {"state": IterationState.COMMITTED, "policy_version": 0, "num_groups": 8, "opened_at": 0.0}
    head |= times
    records = [IterationRecord(iteration=i, overlap_frac=share, **head) for i, share in enumerate(shares)]
    return overlap_sentence(job, records)


TURNS = "so they take turns: faster here; with devices of their own they overlap, see examples/overlap.toml"


@pytest.mark.parametrize(
    ("sharing", "mode", "shares", "expected"),
    [
        ("cores", "periodic", (0.0, 0.04, 0.9), f"engine and trainer share these cores, {TURNS}"),
        ("accelerators", "bounded", (0.0,), f"engine and trainer share an accelerator, {TURNS}"),
        (
            "cores",
            "periodic",
            (0.37, None),
            "engine and trainer share these cores; during 37% of the time of generation, the trainer worked on groups "
            "that were complete, and each slowed the other down",
        ),
        (
            "nothing",
            "periodic",
            (0.5, 0.61, 0.7),
            "during 61% of the time of generation, the trainer worked on groups that were complete",
        ),
        (
            "nothing",
            "periodic",
            (0.0,),
            "during 0% of the time of generation, the trainer worked on groups that were complete: the groups of an "
            "iteration end at nearly the same time",
        ),
        (
            None,
            "bounded",
            (0.2,),
            "during 20% of the time of generation, the trainer worked on groups that were complete",
        ),
        (
            "cores",
            "sync",
            (0.0,),
            "the trainer begins when all responses are generated (schedule.mode is sync); with periodic they overlap",
        ),
        ("nothing", "periodic", (None, None), None),
        ("nothing", "periodic", (), None),
    ],
)
def test_sentence_fits_the_machine(sharing, mode, shares, expected) -> None:
    assert sentence(sharing, mode, *shares) == expected


def test_short_training_is_a_reason_of_its_own() -> None:
    assert str(sentence("nothing", "periodic", 0.02, train_s=0.5, generate_s=10.0)).endswith(
        "training is short beside it"
    )
    assert str(sentence("nothing", "periodic", 0.02, train_s=5.0, generate_s=10.0)).endswith("at nearly the same time")


@pytest.mark.parametrize(
    ("rollouts", "trainers", "expected"),
    [
        ([("a", CORES)], [("a", CORES)], "cores"),
        ([("a", ["core 0"])], [("a", ["core 1"])], "nothing"),
        ([("a", ["core 0"]), ("a", ["core 1"])], [("a", ["core 1"])], "cores"),  # one of two rollouts
        ([("a", CORES)], [("b", CORES)], "nothing"),  # machines of their own
        ([("a", CARDS)], [("a", CARD)], "accelerators"),
        ([("a", CARD)], [("a", CORES)], "nothing"),
        ([("a", None)], [("a", CORES)], None),  # heartbeat of an older release
        ([], [("a", CORES)], None),
    ],
)
def test_same_device_of_the_same_machine_is_shared(rollouts, trainers, expected) -> None:
    def host(name: str) -> HostMemory:
        return HostMemory(name=name, available_bytes=1, total_bytes=2)

    engines = [WorkerRecord(id="w", state="idle", host=host(name), devices=devices) for name, devices in rollouts]
    learners = [TrainerRecord(id="t", state="training", host=host(name), devices=devices) for name, devices in trainers]
    assert sharing_of(engines, learners) == expected
