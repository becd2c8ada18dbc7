"""What strangers and broken rollouts put on a job's streams or submit: none of it is trained on, all is counted."""

import math
import random

import pytest

from onbeat.streams.codec import PromptTask, RolloutGroup, check_content
from onbeat.streams.keys import JobKeys
from onbeat.streams.ledger import Ledger, rollout_side
from onbeat.types import IterationState, Verdict
from tests.broker_fixtures import (
    claim_all,
    commit,
    drain,
    failed_group,
    make_group,
    open_job,
    tasks_for,
)
from tests.fuzz import FUZZ_FACTOR

LARGE = 2**31 - 1


async def number(ledger: Ledger, job_id: str, name: str) -> int:
    return int((await ledger.jobs.fields(job_id)).get(name, 0))


async def foreign_groups(ledger: Ledger) -> list[dict[str, bytes]]:
    """Entries of a rollouts stream that no submission has put there."""
    other, _ = await open_job(ledger)
    await drain(ledger, other)
    accepted = await ledger.iterations.accepted_groups(other, 0)
    true = make_group(tasks_for(0)[0]).SerializeToString()
    noise = [text.encode("latin-1") for text in ("", "\0", "\xff" * 50, "{}", "x" * 100_000)]
    future = make_group(tasks_for(7)[0])
    unnamed = make_group(PromptTask(group_id="nobody", iteration=0))
    unnumbered = make_group(PromptTask(group_id="0-0", iteration=LARGE), version=LARGE)
    payloads = [*noise, true[:-7], true[3:], true + b"\xff", true]
    payloads += [group.SerializeToString() for group in (future, unnamed, unnumbered, *accepted, RolloutGroup())]
    return [{"group": payload} for payload in payloads] + [{"other": true}, {"": b""}, {"GROUP": true}]


async def test_entries_never_accepted_are_dropped_and_counted(ledger: Ledger) -> None:
    job_id, epoch = await open_job(ledger)
    entries = await foreign_groups(ledger)
    for entry in entries[::2]:
        await ledger.redis.xadd(JobKeys(job_id).rollouts, entry)
    await drain(ledger, job_id)
    for entry in entries[1::2]:
        await ledger.redis.xadd(JobKeys(job_id).rollouts, entry)
    taken = await take_all(ledger, job_id)
    assert sorted(group.group_id for group in taken) == ["0-0", "0-1"]
    assert await number(ledger, job_id, "num_foreign") == len(entries)
    assert [group.group_id for group in await ledger.iterations.accepted_groups(job_id, 0)] == [
        g.group_id for g in taken
    ]
    assert await commit(ledger, job_id, epoch, 0)


async def test_accepted_entries_that_are_played_again_are_dropped(ledger: Ledger) -> None:
    """Those of this iteration and of the one before."""
    job_id, epoch = await open_job(ledger)
    await drain(ledger, job_id)
    played = await ledger.redis.xrange(JobKeys(job_id).rollouts)
    assert len(await take_all(ledger, job_id)) == 2
    for _, fields in played:
        await ledger.redis.xadd(JobKeys(job_id).rollouts, fields)
    assert await take_all(ledger, job_id) == []
    await ledger.versions.announce(job_id, epoch, 1, "127.0.0.1:1", "d1")
    await commit(ledger, job_id, epoch, 0)
    assert await ledger.iterations.open(job_id, 1, 1, tasks_for(1)) == ""
    for _, fields in played:
        await ledger.redis.xadd(JobKeys(job_id).rollouts, fields)
    await drain(ledger, job_id)
    assert {group.iteration for group in await take_all(ledger, job_id)} == {1}
    assert await number(ledger, job_id, "num_foreign") == 4


async def test_prompts_that_were_never_dispatched_are_set_aside(ledger: Ledger) -> None:
    job_id, _ = await open_job(ledger)
    task = tasks_for(0)[0].SerializeToString()
    entries = [{"task": payload} for payload in (b"", b"\xff" * 30, task[:-3], task, b"\0")]
    entries += [{"task": tasks_for(5)[0].SerializeToString()}, {"other": task}, {"": b""}]
    for entry in entries:
        await ledger.redis.xadd(JobKeys(job_id).prompts, entry)
    claims = await claim_all(ledger, job_id)
    assert sorted(claim.task.group_id for claim in claims) == ["0-0", "0-1"]
    assert await claim_all(ledger, job_id, "w2") == []
    assert await number(ledger, job_id, "num_foreign") == len(entries)
    for claim in claims:
        assert await ledger.rollout.submit(job_id, claim.entry_id, make_group(claim.task)) is Verdict.ACCEPTED


async def take_all(ledger: Ledger, job_id: str) -> list[RolloutGroup]:
    taken: list[RolloutGroup] = []
    while await ledger.redis.xlen(JobKeys(job_id).rollouts) and (await lag(ledger, job_id)):
        taken += await ledger.trainer.take(job_id, "trainer-a", 5, 0.05)
    return taken


async def lag(ledger: Ledger, job_id: str) -> bool:
    """Entries that nobody has read yet."""
    (group,) = await ledger.redis.xinfo_groups(JobKeys(job_id).rollouts)
    return bool(await ledger.redis.xrange(JobKeys(job_id).rollouts, f"({group['last-delivered-id'].decode()}", count=1))


# ---- submissions -------------------------------------------------------------------------------------------------


def spoil(group: RolloutGroup, how: str) -> None:
    response = group.responses[0]
    match how:
        case "no responses":
            del group.responses[:]
        case "empty response":
            del response.token_ids[:], response.rollout_logprobs[:], response.version_spans[:]
        case "nan reward":
            response.reward = math.nan
        case "infinite reward":
            response.reward = -math.inf
        case "fewer logprobs":
            del response.rollout_logprobs[-1:]
        case "no spans":
            del response.version_spans[:]
        case "gap":
            response.version_spans[0].start = 1
        case "beyond":
            response.version_spans[0].end = 2**31 - 1
        case "no prompt":
            del group.prompt_token_ids[:]
        case "lengths of fewer tokens":
            response.token_lengths[:] = [len(response.text)]
        case "lengths of less text":
            response.token_lengths[:] = [1, len(response.text) - 2]
        case "lengths of more text":
            response.token_lengths[:] = [2**32 - 1, len(response.text)]
        case "endless scoring":
            group.timings.score_s = math.inf
        case "scoring that ends before it begins":
            group.timings.score_s = -1e300
        case "generation of no duration":
            group.timings.generate_s = math.nan
        case "generation of the age of the world":
            group.timings.generate_s = 1e300
        case "failed and never busy":
            group.CopyFrom(failed_group(claimed_by(group)))
            group.timings.worker_busy_s = -math.inf
        case "failed and not":
            group.failure.kind = "engine"


def claimed_by(group: RolloutGroup) -> PromptTask:
    return PromptTask(group_id=group.group_id, iteration=group.iteration, policy_version=group.policy_version)


BROKEN = [
    "no responses",
    "empty response",
    "nan reward",
    "infinite reward",
    "fewer logprobs",
    "no spans",
    "gap",
    "beyond",
    "no prompt",
    "lengths of fewer tokens",
    "lengths of less text",
    "lengths of more text",
    "endless scoring",
    "scoring that ends before it begins",
    "generation of no duration",
    "generation of the age of the world",
    "failed and never busy",
    "failed and not",
]


@pytest.mark.parametrize("how", BROKEN)
async def test_a_group_that_breaks_its_promises_is_refused_by_name(ledger: Ledger, how: str) -> None:
    job_id, _ = await open_job(ledger)
    claim, _ = await claim_all(ledger, job_id)
    group = make_group(claim.task)
    spoil(group, how)
    with pytest.raises(ValueError, match=f"group {claim.task.group_id}"):
        await ledger.rollout.submit(job_id, claim.entry_id, group)
    assert await ledger.rollout.submit(job_id, claim.entry_id, make_group(claim.task)) is Verdict.ACCEPTED


async def test_group_accepted_before_durations_were_checked_is_trained(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id, epoch = await open_job(ledger, num_groups=3)
    claims = await claim_all(ledger, job_id)
    with monkeypatch.context() as earlier:
        earlier.setattr(rollout_side, "check_group", check_content)
        for claim, score_s in zip(claims, (-math.inf, -1e300, math.nan), strict=True):
            group = make_group(claim.task)
            group.timings.score_s = score_s
            assert await ledger.rollout.submit(job_id, claim.entry_id, group) is Verdict.ACCEPTED
    assert len(await take_all(ledger, job_id)) == 3
    assert await number(ledger, job_id, "num_foreign") == 0
    assert await commit(ledger, job_id, epoch, 0)


@pytest.mark.parametrize("seed", range(30 * FUZZ_FACTOR))
async def test_submission_that_differs_from_its_lease_is_refused(ledger: Ledger, seed: int) -> None:
    """Another group, iteration, version, worker or entry: whatever is wrong, the two groups stay to be had."""
    rng = random.Random(seed)
    job_id, _ = await open_job(ledger)
    mine, other = await claim_all(ledger, job_id)
    for _ in range(10):
        entry_id, group = mine.entry_id, make_group(mine.task)
        wrong = rng.sample(["id", "iteration", "version", "worker", "entry"], rng.randint(1, 5))
        if "id" in wrong:
            group.group_id = rng.choice(["", "nobody", "0-9", "x" * 10_000, "\0", "0-0 "])
        if "iteration" in wrong:
            group.iteration = rng.choice([1, 7, LARGE])
        if "version" in wrong:
            group.responses[0].version_spans[0].policy_version = rng.choice([1, LARGE])
        if "worker" in wrong:
            group.worker_id = rng.choice(["", "w2", "\0", "w1 "])
        if "entry" in wrong:
            entry_id = rng.choice(["0-0", "9999999999999-0", other.entry_id])
        assert await ledger.rollout.submit(job_id, entry_id, group) is not Verdict.ACCEPTED, wrong
    assert await ledger.iterations.state(job_id, 0) is IterationState.OPEN
    assert await ledger.iterations.accepted_groups(job_id, 0) == []
