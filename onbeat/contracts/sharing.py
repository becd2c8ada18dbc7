"""The devices that engine and trainer of a job share, if any, and what that means for their overlap, in words."""

from collections.abc import Iterable, Sequence
from statistics import median

from onbeat.contracts.records import IterationRecord, JobRecord, ProcessRecord

SOME = 0.05  # share of the time of generation; with less, the two sides take turns
EXAMPLE = "examples/overlap.toml"


def sharing_of(rollouts: Iterable[ProcessRecord], trainers: Iterable[ProcessRecord]) -> str | None:
    """Return what rollouts and trainers of a job share: "cores", "accelerators" or "nothing"; None: it is not known.

    Devices of the same name are one device if both processes see the same machine or container.
    """
    engines, learners = devices_of(rollouts), devices_of(trainers)
    if not engines or not learners:
        return None
    shared = engines & learners
    if not shared:
        return "nothing"
    return "cores" if all(device.startswith("core ") for _, device in shared) else "accelerators"


def devices_of(processes: Iterable[ProcessRecord]) -> set[tuple[str, str]]:
    """Return the (machine, device) pairs of the processes that report them."""
    return {
        (process.host.name, device)
        for process in processes
        if process.host is not None
        for device in process.devices or []
    }


def overlap_sentence(job: JobRecord, records: Sequence[IterationRecord]) -> str | None:
    """Return how much of the generation overlapped with training in these iterations, and why; None: not measured."""
    known = [record.overlap_frac for record in records if record.overlap_frac is not None]
    if not known:
        return None
    share = median(known)
    if job.config.get("schedule", {}).get("mode") == "sync":
        return "the trainer begins when all responses are generated (schedule.mode is sync); with periodic they overlap"
    measured = f"during {share:.0%} of the time of generation, the trainer worked on groups that were complete"
    if job.sharing not in ("cores", "accelerators"):
        return measured if share >= SOME else f"{measured}: {reason_of_little(records)}"
    where = "these cores" if job.sharing == "cores" else "an accelerator"
    if share >= SOME:
        return f"engine and trainer share {where}; {measured}, and each slowed the other down"
    elsewhere = f"with devices of their own they overlap, see {EXAMPLE}"
    return f"engine and trainer share {where}, so they take turns: faster here; {elsewhere}"


def reason_of_little(records: Sequence[IterationRecord]) -> str:
    """Return why little overlaps where each side has devices of its own."""
    known = [record.train_s / record.generate_s for record in records if record.train_s and record.generate_s]
    if known and median(known) < 2 * SOME:
        return "training is short beside it"
    return "the groups of an iteration end at nearly the same time"
