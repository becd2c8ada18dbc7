"""Entries of strangers and broken rollouts on a job's streams: none of them is trained on, all are counted."""

import math
import random
from collections.abc import Callable

import pytest

from onbeat.contracts.states import IterationState, Verdict
from onbeat.streams.codec import PromptTask, Response, RolloutGroup
from onbeat.streams.keys import ROLLOUT_GROUP, TRAINER_GROUP, JobKeys
from onbeat.streams.ledger import Ledger
from services.broker.auditor import run_audit
from tests.fuzz import FUZZ_FACTOR
from tests.world import World, failed_group, make_group, tasks_for

LARGE = 2**31 - 1


async def num_foreign(ledger: Ledger, job_id: str) -> int:
    return int((await ledger.jobs.fields(job_id)).get("num_foreign", 0))


async def test_entries_never_accepted_are_dropped_and_counted(ledger: Ledger, world: World) -> None:
    async def foreign_groups(ledger: Ledger) -> list[dict[str, bytes]]:
        """Entries of a rollouts stream that no submission has put there."""
        other, _ = await World(ledger).open_job()
        await World(ledger).drain(other)
        accepted = await ledger.iterations.accepted_groups(other, 0)
        true = make_group(tasks_for(0)[0]).SerializeToString()
        noise = [text.encode("latin-1") for text in ("", "\0", "\xff" * 50, "{}", "x" * 100_000)]
        future = make_group(tasks_for(7)[0])
        unnamed = make_group(PromptTask(group_id="nobody", iteration=0))
        unnumbered = make_group(PromptTask(group_id="0-0", iteration=LARGE), version=LARGE)
        payloads = [*noise, true[:-7], true[3:], true + b"\xff", true]
        payloads += [group.SerializeToString() for group in (future, unnamed, unnumbered, *accepted, RolloutGroup())]
        return [{"group": payload} for payload in payloads] + [{"other": true}, {"": b""}, {"GROUP": true}]

    job_id, epoch = await world.open_job()
    entries = await foreign_groups(ledger)
    for entry in entries[::2]:
        await ledger.redis.xadd(JobKeys(job_id).rollouts, entry)
    await world.drain(job_id)
    for entry in entries[1::2]:
        await ledger.redis.xadd(JobKeys(job_id).rollouts, entry)
    taken = await take_all(ledger, job_id)
    assert sorted(group.group_id for group in taken) == ["0-0", "0-1"]
    assert await num_foreign(ledger, job_id) == len(entries)
    events = await ledger.event_log.read(job_id)
    assert sum(event.data["num"] for event in events if event.kind == "stream.foreign") == len(entries)
    assert [group.group_id for group in await ledger.iterations.accepted_groups(job_id, 0)] == [
        g.group_id for g in taken
    ]
    assert (await ledger.redis.xpending(JobKeys(job_id).rollouts, TRAINER_GROUP))["pending"] == len(taken)
    assert await world.commit(job_id, epoch, 0)
    assert (await run_audit(ledger, job_id)).is_clean


async def test_accepted_entries_that_are_played_again_are_dropped(ledger: Ledger, world: World) -> None:
    """The entries are those of this iteration and of the one before."""
    job_id, epoch = await world.open_job()
    await world.drain(job_id)
    played = await ledger.redis.xrange(JobKeys(job_id).rollouts)
    assert len(await take_all(ledger, job_id)) == 2
    for _, fields in played:
        await ledger.redis.xadd(JobKeys(job_id).rollouts, fields)
    assert await take_all(ledger, job_id) == []
    await ledger.versions.announce(job_id, epoch, 1, "127.0.0.1:1", "d1")
    await world.commit(job_id, epoch, 0)
    assert await ledger.iterations.open(job_id, 1, 1, tasks_for(1)) == ""
    for _, fields in played:
        await ledger.redis.xadd(JobKeys(job_id).rollouts, fields)
    await world.drain(job_id)
    assert {group.iteration for group in await take_all(ledger, job_id)} == {1}
    assert await num_foreign(ledger, job_id) == 4


async def test_prompts_that_were_never_dispatched_are_set_aside(ledger: Ledger, world: World) -> None:
    job_id, _ = await world.open_job()
    task = tasks_for(0)[0].SerializeToString()
    entries = [{"task": payload} for payload in (b"", b"\xff" * 30, task[:-3], task, b"\0")]
    entries += [{"task": tasks_for(5)[0].SerializeToString()}, {"other": task}, {"": b""}]
    for entry in entries:
        await ledger.redis.xadd(JobKeys(job_id).prompts, entry)
    claims = await world.claim_all(job_id)
    assert sorted(claim.task.group_id for claim in claims) == ["0-0", "0-1"]
    assert await world.claim_all(job_id, "w2") == []
    assert await num_foreign(ledger, job_id) == len(entries)
    assert (await ledger.redis.xpending(JobKeys(job_id).prompts, ROLLOUT_GROUP))["pending"] == len(claims)
    await world.submit_groups(job_id, claims)


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


def first(group: RolloutGroup) -> Response:
    return group.responses[0]


def fail(group: RolloutGroup, busy_s: float) -> None:
    claimed = PromptTask(group_id=group.group_id, iteration=group.iteration, policy_version=group.policy_version)
    group.CopyFrom(failed_group(claimed))
    group.timings.worker_busy_s = busy_s


BROKEN: dict[str, Callable[[RolloutGroup], object]] = {
    "no responses": lambda group: group.ClearField("responses"),
    "empty response": lambda group: first(group).CopyFrom(Response(text=first(group).text)),
    "nan reward": lambda group: setattr(first(group), "reward", math.nan),
    "reward out of bounds": lambda group: setattr(first(group), "reward", 1.1e6),
    "infinite reward": lambda group: setattr(first(group), "reward", -math.inf),
    "fewer logprobs": lambda group: first(group).rollout_logprobs.pop(),
    "no spans": lambda group: first(group).ClearField("version_spans"),
    "gap": lambda group: setattr(first(group).version_spans[0], "start", 1),
    "beyond": lambda group: setattr(first(group).version_spans[0], "end", LARGE),
    "no prompt": lambda group: group.ClearField("prompt_token_ids"),
    "lengths of fewer tokens": lambda group: first(group).token_lengths.append(len(first(group).text)),
    "lengths of less text": lambda group: first(group).token_lengths.extend([1, len(first(group).text) - 2]),
    "lengths of more text": lambda group: first(group).token_lengths.extend([2**32 - 1, len(first(group).text)]),
    "endless scoring": lambda group: setattr(group.timings, "score_s", math.inf),
    "scoring that ends before it begins": lambda group: setattr(group.timings, "score_s", -1e300),
    "generation of no duration": lambda group: setattr(group.timings, "generate_s", math.nan),
    "generation of the age of the world": lambda group: setattr(group.timings, "generate_s", 1e300),
    "failed and never busy": lambda group: fail(group, -math.inf),
    "failed and not": lambda group: setattr(group.failure, "kind", "engine"),
}


@pytest.mark.parametrize("how", BROKEN)
async def test_a_group_that_breaks_its_promises_is_refused_by_name(ledger: Ledger, world: World, how: str) -> None:
    job_id, _ = await world.open_job()
    claim, _ = await world.claim_all(job_id)
    group = make_group(claim.task)
    BROKEN[how](group)
    with pytest.raises(ValueError, match=f"group {claim.task.group_id}"):
        await ledger.rollout.submit(job_id, claim.entry_id, group)
    assert await ledger.rollout.submit(job_id, claim.entry_id, make_group(claim.task)) is Verdict.ACCEPTED


@pytest.mark.parametrize("seed", range(30 * FUZZ_FACTOR))
async def test_submission_that_differs_from_its_lease_is_refused(ledger: Ledger, world: World, seed: int) -> None:
    """Another group, iteration, version, worker or entry: whatever is wrong, the two groups stay to be had."""
    rng = random.Random(seed)
    job_id, _ = await world.open_job()
    claim, other = await world.claim_all(job_id)
    for _ in range(10):
        entry_id, group = claim.entry_id, make_group(claim.task)
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
