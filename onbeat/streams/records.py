"""Records of iterations and evaluations, built from the ledger's fields, and a job's curves made of them.

The broker's REST API and the trainer's trackers show the same numbers. Nothing here writes.
"""

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean

from onbeat.contracts.errors import JobNotFound
from onbeat.contracts.intervals import Interval, share_of
from onbeat.contracts.records import EvaluationRecord, IterationRecord, num_before_rl
from onbeat.streams.inspection import IterationHashes, iteration_hashes
from onbeat.streams.ledger import Ledger

Fields = dict[str, str]

# The trainer's metrics may have these fields of the record, by their plain names.
INT_METRICS = ("num_responses", "prompt_tokens", "response_tokens", "staleness_max")
FLOAT_METRICS = ("reward_mean", "reward_std", "train_s", "mismatch_mean", "mismatch_max")
DERIVED = ("wall_s", "generate_s", "weight_sync_s", "rollout_idle_frac", "trainer_idle_frac", "overlap_frac", "tpspd")
SERIES_OF_RECORD = (*INT_METRICS, *FLOAT_METRICS, *DERIVED)
SCORES = ("reward_mean", "reward_std", "pass_at_k", "response_tokens_mean", "truncated_frac")


def iteration_record(
    hashes: IterationHashes,
    ready_at: float | None,
    published_at: float | None,
    previous_commit_at: float,
    earlier: Sequence[Fields] = (),
) -> IterationRecord:
    """Combine times of the trainer, the rollouts and the ledger; None where something has not happened yet.

    `ready_at`: when an engine was open on its version. `published_at`: when that was published, by an earlier commit
    (the first one: by the first opening). `earlier`: the iterations before it that were trained while it was generated.
    """
    fields = hashes.fields
    record = IterationRecord.model_validate({**fields, "metrics": {}})
    record.engine_ready_at = ready_at
    if ready_at is not None and published_at is not None:
        record.weight_sync_s = max(0.0, ready_at - published_at)
    generating_since = max(record.opened_at, ready_at or 0.0)
    if record.first_accepted_at is not None:
        record.first_group_s = record.first_accepted_at - generating_since
    if record.drained_at is not None and not record.is_supervised:
        record.generate_s = record.drained_at - generating_since
    if record.committed_at is not None:
        record.wall_s = max(1e-6, record.committed_at - previous_commit_at)
    add_metrics(record, fields.get("metrics", "{}"))
    add_choice(record, fields.get("choice", ""))
    add_shares(record, hashes.busy_s)
    record.overlap_frac = overlap_frac(fields, earlier)
    return record


def add_metrics(record: IterationRecord, metrics_json: str) -> None:
    """Spread the trainer's metrics over the record."""
    metrics = {name: value for name, value in json.loads(metrics_json).items() if is_finite(value)}
    record.num_training_devices = int(metrics.pop("num_training_devices", 1))
    for kind, names in ((int, INT_METRICS), (float, FLOAT_METRICS)):
        for name in metrics.keys() & names:
            setattr(record, name, kind(metrics.pop(name)))
    record.metrics = metrics


def add_choice(record: IterationRecord, choice: str) -> None:
    """Add why the prompts were chosen, and what signal was expected of them; spare ones are left out."""
    first = json.loads(choice)["picks"][: record.num_groups - record.num_replaced] if choice else []
    picks = [pick for pick in first if pick]
    if picks:
        record.num_chosen = dict(sorted(Counter(pick["why"] for pick in picks).items()))
        record.metrics["data/expected_signal"] = fmean(pick["expected"] for pick in picks)
        record.metrics["data/unseen_frac"] = sum(pick["solved"] is None for pick in picks) / len(picks)
        if shares := [pick["solved"] for pick in picks if pick["solved"] is not None]:
            record.metrics["data/solved_before"] = fmean(shares)


def is_finite(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def add_shares(record: IterationRecord, busy_s: dict[str, float]) -> None:
    """Add idle shares and tokens per second per device, once the iteration is committed."""
    wall_s = record.wall_s
    if wall_s is None:
        return
    if busy_s:
        record.rollout_idle_frac = clip_fraction(1 - fmean(busy_s.values()) / wall_s)
    if record.train_s is not None:
        record.trainer_idle_frac = clip_fraction(1 - record.train_s / wall_s)
    if record.prompt_tokens is not None and record.response_tokens is not None:
        num_devices = (record.num_training_devices or 1) + len(busy_s)
        record.tpspd = (record.prompt_tokens + record.response_tokens) / wall_s / max(1, num_devices)


def overlap_frac(fields: Fields, earlier: Sequence[Fields] = ()) -> float | None:
    """Return the share of the seconds in which an iteration was generated during which a micro-batch ran, too: one of
    its own, or of `earlier` iterations that the trainer still worked on.

    None before the commit, if nothing was generated, and if the trainer was replaced since the opening: the work of the
    one before is not recorded, and was done again.
    """
    generated = json.loads(fields.get("generated", "[]"))
    if "committed_epoch" not in fields or fields["committed_epoch"] != fields.get("opened_epoch"):
        return None
    return share_of([batch for trained in (*earlier, fields) for batch in micro_batches(trained)], generated)


def micro_batches(fields: Fields) -> list[Interval]:
    """Return when the trainer ran micro-batches of an iteration, as its commit reported them."""
    spans = json.loads(fields.get("metrics", "{}")).get("spans", [])
    batches: list[Interval] = []
    for span in spans if isinstance(spans, list) else []:
        match span:  # other trainers may report anything
            case ["micro_batch", int() | float() as start, int() | float() as took_s]:
                batches.append((start, start + took_s))
    return batches


def clip_fraction(value: float) -> float:
    return min(1.0, max(0.0, value))


async def read_iterations(ledger: Ledger, job_id: str, after: int, limit: int) -> list[IterationRecord]:
    """Return iterations with a number above `after`, in order. Raise JobNotFound."""
    job = await ledger.jobs.fields(job_id)
    start = first_iteration(job)
    after = max(after, start - 1)
    wanted = range(after + 1, min(int(job["num_opened"]), after + 1 + limit))
    if not wanted:
        return []
    ready_times = await ledger.versions.ready_times(job_id)
    # The commit of this one may have published the version of the first that is wanted.
    staleness = int(job["max_staleness"])
    first = max(start, wanted[0] - 1 - staleness)
    hashes = await iteration_hashes(ledger, job_id, range(first, wanted[-1] + 1))
    if not all(stored.fields for stored in hashes):
        raise JobNotFound(job_id)  # the job was deleted meanwhile
    iterations = {number: stored.fields for number, stored in enumerate(hashes, start=first)}
    records = []
    for place, iteration_hash in enumerate(hashes[wanted[0] - first :], start=wanted[0] - first):
        fields = iteration_hash.fields
        earlier = [stored.fields for stored in hashes[max(0, place - staleness) : place]]
        version = int(fields["policy_version"])
        previous = fields.get("previous_commit_at") or job.get("last_commit_at") or fields["opened_at"]
        published = published_at(version, iterations)
        ready_at = ready_times.get(version)
        records.append(iteration_record(iteration_hash, ready_at, published, float(previous), earlier))
    return records


def published_at(version: int, iterations: Mapping[int, Fields]) -> float | None:
    """Return the Unix time since when rollouts could have the version; None when its iteration is not committed.

    No iteration produced a job's first version.
    """
    made_by = iterations.get(version - 1)
    time = iterations[version].get("opened_at") if made_by is None else made_by.get("committed_at")
    return float(time) if time else None


def first_iteration(job: Fields) -> int:
    """Return 0, unless the job is a fork: it counts on from the checkpoint that it started from."""
    return int(job.get("first_iteration", "0"))


def evaluation_record(fields: Fields) -> EvaluationRecord:
    scores = json.loads(fields.get("scores", "{}"))
    known = {name: scores.pop(name) for name in SCORES if name in scores}
    return EvaluationRecord.model_validate({**fields, **known, "metrics": scores})


async def read_evaluations(ledger: Ledger, job_id: str, after: int = -1) -> list[EvaluationRecord]:
    """Return evaluations with a number above `after`, in order. Raise JobNotFound."""
    job = await ledger.jobs.fields(job_id)
    config = json.loads(job["config"])
    section, schedule = config.get("evaluation"), config["schedule"]
    ends = [*schedule.get("earlier_ends", []), int(job["num_iterations"])]
    records, evaluation = [], first_iteration(job)
    while section and evaluation < int(job.get("next_evaluation", "0")):
        if evaluation > after and (fields := await ledger.evaluations.fields(job_id, evaluation)):
            records.append(evaluation_record(fields))  # one that was not opened before an earlier end is left out
        end = next((end for end in ends if evaluation < end), ends[-1])
        evaluation = following_evaluation(evaluation, section["every_iterations"], end, num_before_rl(config))
    return records


def following_evaluation(evaluation: int, every: int, num_iterations: int, num_supervised: int = 0) -> int:
    """Return the number of the next evaluation; after the last one a number beyond the job. The end of a warm start is
    evaluated, too.

    >>> [following_evaluation(e, every=4, num_iterations=10) for e in (0, 4, 8, 10)]
    [4, 8, 10, 11]
    """
    if evaluation >= num_iterations:
        return num_iterations + 1
    following = min((evaluation // every + 1) * every, num_iterations)
    return min(following, num_supervised) if evaluation < num_supervised else following


def evaluation_series(records: Iterable[EvaluationRecord]) -> dict[str, list[tuple[int, float]]]:
    """Return `eval/name` -> (evaluation, value) pairs."""
    series: dict[str, list[tuple[int, float]]] = {}
    for record in records:
        scores = {name: getattr(record, name) for name in SCORES} | record.metrics
        for name, value in scores.items():
            if value is not None:
                series.setdefault(f"eval/{name}", []).append((record.evaluation, value))
    return series


def metric_series(records: Iterable[IterationRecord]) -> dict[str, list[tuple[int, float]]]:
    """Return `area/name` -> (iteration, value) pairs; the record's own fields are under `iteration/`."""
    series: dict[str, list[tuple[int, float]]] = {}
    for record in records:
        for name, value in metrics_point(record).items():
            series.setdefault(name, []).append((record.iteration, value))
    return dict(sorted(series.items()))


def metrics_point(record: IterationRecord) -> dict[str, float]:
    """Return one iteration's values in the series."""
    values = {f"iteration/{name}": getattr(record, name) for name in SERIES_OF_RECORD}
    return {name: value for name, value in (values | record.metrics).items() if value is not None}
