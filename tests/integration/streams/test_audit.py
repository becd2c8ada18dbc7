"""The audit log: clean after a real flow; each way to cheat is the first violation that it names."""

import asyncio
import contextlib
import uuid
from collections.abc import Callable

import pytest

from onbeat.cli.look import describe_audit
from onbeat.contracts.errors import JobNotFound
from onbeat.contracts.records import WeightUpdate
from onbeat.contracts.states import JobState
from onbeat.streams.audit import Audit, AuditViolation, Entry
from onbeat.streams.codec import encode_group, payload_digest
from onbeat.streams.keys import ROLLOUT_GROUP, JobKeys
from onbeat.streams.ledger import Ledger
from services.broker.auditor import run_audit
from tests.world import World, failed_group, make_group, tasks_for


async def finished_job(ledger: Ledger, num_durable: int = 1) -> str:
    """Three iterations of two groups; the second one has a failed group."""
    job_id, epoch = await World(ledger).started_job()
    for iteration in range(3):
        await ledger.iterations.open(job_id, iteration, iteration, tasks_for(iteration))
        if iteration == 1:
            claim = (await World(ledger).claim_all(job_id, count=1))[0]
            await ledger.rollout.submit(job_id, claim.entry_id, failed_group(claim.task))
        await World(ledger).drain(job_id)
        await World(ledger).commit(job_id, epoch, iteration)
    await ledger.trainer.checkpointed(job_id, epoch, 0, num_durable, "/checkpoints/1")
    await ledger.jobs.move(job_id, JobState.SUCCEEDED, epoch=epoch)
    return job_id


async def test_finished_job_is_clean(ledger: Ledger) -> None:
    report = await run_audit(ledger, await finished_job(ledger))
    assert report.is_clean, report.violation
    assert (report.num_groups, report.num_commits, report.num_contents, report.num_contents_gone) == (6, 3, 6, 0)
    assert report.num_entries == 2 + 3 + 6 + 3
    assert len(report.head) == 40


async def test_running_job_is_clean_while_others_write(ledger: Ledger, world: World) -> None:
    job_id, _ = await world.started_job()
    await ledger.iterations.open(job_id, 0, 0, tasks_for(0, num_groups=60))
    claims = await world.claim_all(job_id)

    submitting = asyncio.create_task(world.submit_groups(job_id, claims))
    reports = []
    while not submitting.done():
        reports.append(await run_audit(ledger, job_id))
    await submitting
    assert [report.violation for report in reports if not report.is_clean] == []
    assert (await run_audit(ledger, job_id)).num_groups == 60


# ---- whoever can write to Redis can cheat, and is seen ---------------------------------------------------------------


async def forget_an_acceptance(ledger: Ledger, job: JobKeys) -> None:
    entry = next(entry for entry in await ledger.audit_log.entries(job.job_id) if entry.line.startswith("accepted"))
    await ledger.redis.xdel(job.audit, entry.id)


async def cut_the_log(ledger: Ledger, job: JobKeys) -> None:
    await ledger.redis.xdel(job.audit, (await ledger.audit_log.entries(job.job_id))[-1].id)


async def change_a_group(ledger: Ledger, job: JobKeys) -> None:
    """Change the reward of the accepted group, at its place: the stream ends there, so that the entry's id is free."""
    entries = await ledger.redis.xrange(job.rollouts)
    last, fields = entries[-1]
    group = (await ledger.iterations.accepted_groups(job.job_id, 2))[-1]
    group.responses[0].reward += 1
    rest = entries[:-1]
    await ledger.redis.delete(job.rollouts)
    for entry, kept in rest:
        await ledger.redis.xadd(job.rollouts, kept, id=entry)
    await ledger.redis.xadd(job.rollouts, fields | {b"group": encode_group(group)}, id=last)


async def lose_a_group(ledger: Ledger, job: JobKeys) -> None:
    await ledger.redis.xdel(job.rollouts, (await ledger.redis.xrange(job.rollouts))[-1][0])


async def rewrite_a_committed_iteration(ledger: Ledger, job: JobKeys) -> None:
    await ledger.redis.hset(job.iteration(1), "policy_version", "0")


async def forget_the_log(ledger: Ledger, job: JobKeys) -> None:
    await ledger.redis.delete(job.audit)
    await ledger.redis.hdel(job.job, "audit_link")


async def load(ledger: Ledger, job: JobKeys, digest: str) -> None:
    update = WeightUpdate(received_bytes=1, pull_s=0.1, apply_s=0.1, load_s=0.1, weights_digest=digest)
    await ledger.versions.engine_ready(job.job_id, 1, "w1", update)


@pytest.mark.parametrize(
    ("cheat", "violation"),
    [
        (forget_an_acceptance, "link does not follow"),
        (cut_the_log, "the log ends with link"),
        (change_a_group, "was changed after its acceptance"),
        (lose_a_group, "lost: groups 2-1"),
        (lambda ledger, job: ledger.redis.hset(job.job, "config", "{}"), "configuration is not the one"),
        (
            lambda ledger, job: ledger.redis.hset(job.job, "weights_digest", "d9"),
            "weights_digest is 'd9', by the log 'd3'",
        ),
        (lambda ledger, job: ledger.redis.hset(job.job, "num_iterations", "4"), "SUCCEEDED with 3 of 4"),
        (rewrite_a_committed_iteration, "iteration 1: its policy_version is '0', by the log '1'"),
        (lambda ledger, job: ledger.redis.delete(job.groups(0)), "iteration 0: its ledger of groups"),
        (forget_the_log, "has no audit log"),
        (lambda ledger, job: load(ledger, job, "d9"), "w1 loaded policy version 1 with digest d9, by the log d1"),
        (
            lambda ledger, job: ledger.redis.hset(job.weights(0), "digest", "d9"),
            "was announced with digest d9, by the log d0",
        ),
    ],
)
async def test_cheat_is_seen(cheat: Callable, violation: str, ledger: Ledger) -> None:
    job_id = await finished_job(ledger)
    await cheat(ledger, JobKeys(job_id))
    report = await run_audit(ledger, job_id)
    assert not report.is_clean
    assert violation in (report.violation or "")


async def taught_job(ledger: Ledger, is_recorded: bool = True) -> str:
    """Return a job with a teacher that has committed an iteration."""
    teacher = {"teacher": {"path": "t"}}
    job_id, epoch = await World(ledger).started_job(**teacher)
    if is_recorded:
        assert await ledger.trainer.record_teacher(job_id, epoch, "d1") == "d1"
        assert await ledger.trainer.record_teacher(job_id, epoch, "d2") == "d1"
    await ledger.iterations.open(job_id, 0, 0, tasks_for(0))
    await World(ledger).drain(job_id)
    await World(ledger).commit(job_id, epoch, 0)
    return job_id


async def test_a_job_has_one_teacher_and_its_log_names_it(ledger: Ledger) -> None:
    job_id = await taught_job(ledger)
    report = await run_audit(ledger, job_id)
    assert report.is_clean, report.violation
    lines = [entry.line for entry in await ledger.audit_log.entries(job_id)]
    assert lines.count("teacher\td1") == 1
    await ledger.redis.hset(JobKeys(job_id).job, "teacher_digest", "d2")
    violation = (await run_audit(ledger, job_id)).violation or ""
    assert "teacher_digest is 'd2', by the log 'd1'" in violation
    silent = (await run_audit(ledger, await taught_job(ledger, is_recorded=False))).violation or ""
    assert "has a teacher, and its log does not say which one" in silent


async def test_loads_are_compared_and_those_of_older_releases_counted(ledger: Ledger) -> None:
    job_id = await finished_job(ledger)
    await load(ledger, JobKeys(job_id), "d1")
    old = WeightUpdate(received_bytes=1, pull_s=0.1, apply_s=0.1, load_s=0.1)
    await ledger.versions.engine_ready(job_id, 2, "w1", old)
    report = await run_audit(ledger, job_id)
    assert report.is_clean, report.violation
    assert (report.num_loads, report.num_loads_unknown) == (1, 1)
    assert describe_audit(report).splitlines()[0].endswith("; 1 loads of weights compared, 1 recorded no digest")


async def test_rewritten_log_does_not_contain_a_head_kept_earlier(ledger: Ledger) -> None:
    job_id, other = await finished_job(ledger), await finished_job(ledger)
    kept = (await ledger.audit_log.entries(job_id))[5].link
    assert (await run_audit(ledger, job_id, kept)).is_clean
    assert "was written anew" in ((await run_audit(ledger, other, kept)).violation or "")


async def test_worker_with_a_false_version_is_detected_by_its_tokens(ledger: Ledger, world: World) -> None:
    """The test calls the script itself: the argument names version 0, the tokens version 7."""
    job_id = await world.create_job()
    job = JobKeys(job_id)
    await world.start_training(job_id)
    await ledger.iterations.open(job_id, 0, 0, tasks_for(0))
    claim = (await world.claim_all(job_id))[0]
    payload = encode_group(make_group(claim.task, version=7))
    keys = [job.iteration(0), job.groups(0), job.busy(0), job.prompts, job.rollouts, job.lengths]
    keys += [job.spares(0), job.lost_rollouts]
    args = [claim.entry_id, "w1", ROLLOUT_GROUP, 0, claim.task.group_id, payload, "0", "", 1.0, "iteration"]
    verdict = await ledger.rollout._run("submit_group", job, keys, *args, payload_digest(payload), "", "")
    assert verdict == b"accepted"
    assert "tokens of versions [7], its iteration is on [0]" in ((await run_audit(ledger, job_id)).violation or "")


async def test_audit_is_clean_while_retention_drops_what_it_reads(ledger, monkeypatch):
    job_id = await finished_job(ledger)
    rollouts, calls = ledger.audit_log.rollouts, 0

    async def trimmed_first(*args):
        nonlocal calls
        calls += 1
        if calls == 1:  # the log was read, the contents not yet
            await ledger.redis.hset(JobKeys(job_id).job, "checkpoint_iteration", 3)
            assert await ledger.iterations.trim(job_id, 0, 1)
        return await rollouts(*args)

    monkeypatch.setattr(ledger.audit_log, "rollouts", trimmed_first)
    report = await run_audit(ledger, job_id)
    assert report.is_clean, report.violation
    assert report.num_contents_gone == 2


async def test_audit_of_an_unknown_or_vanishing_job_is_not_found(ledger, monkeypatch):
    with pytest.raises(JobNotFound):
        await run_audit(ledger, f"job-{uuid.uuid4().hex}")
    job_id = await finished_job(ledger)
    iteration_fields = ledger.iterations.fields

    async def deleted_first(*args):
        with contextlib.suppress(JobNotFound):
            await ledger.jobs.delete(job_id)
        return await iteration_fields(*args)

    monkeypatch.setattr(ledger.iterations, "fields", deleted_first)
    with pytest.raises(JobNotFound):
        await run_audit(ledger, job_id)


# ---- what a protocol without our rules would write -------------------------------------------------------------------

RIGHT = ["created\tj\tc", "published\t0\td0", "opened\t0\t0\t1", "accepted\t0\t0-0\t0\tw\t1-0\taa\t"]
# fmt: off
WRONG = {
    "opened\t1\t0\t1": "versions may be 0 older at most",
    "opened\t1\t1\t1": "published version is 0",
    "opened\t0\t0\t1": "next iteration to open is 1",
    "accepted\t0\t0-0\t0\tw\t2-0\tbb\t": "accepted before",
    "accepted\t0\t0-1\t0\tw\t2-0\tbb\t": "has 1 groups only",
    "accepted\t5\t5-0\t5\tw\t2-0\tbb\t": "list index",
    "committed\t0\t1\t1\td1\tother": "used other groups",
    "committed\t0\t2\t1\td1\tother": "makes version 1",
    "committed\t1\t2\t1\td1\tother": "next iteration to commit is 0",
    "published\t1\td1": "published by their commit",
    "created\tj\tc": "created once",
    "trained\t0": "no kind of entry",
    "": "no kind of entry",
    "opened\t0": "missing 2 required",
}
# fmt: on


@pytest.mark.parametrize("line", WRONG)
def test_wrong_entry_is_a_violation(line: str) -> None:
    audit = Audit("j", max_staleness=0)
    audit.read(chained(RIGHT))
    with pytest.raises(AuditViolation, match=WRONG[line]):
        audit.read(chained([*RIGHT, line])[-1:])


def test_mixed_versions_are_a_violation() -> None:
    lines = [*RIGHT[:3], "accepted\t0\t0-0\t0,1\tw\t1-0\taa\t"]
    with pytest.raises(AuditViolation, match=r"versions \[0,1\], the iteration's is 0"):
        Audit("j", max_staleness=0).read(chained(lines))


def chained(lines: list[str]) -> list[Entry]:
    import hashlib

    entries: list[Entry] = []
    for number, line in enumerate(lines):
        before = entries[-1].link if entries else ""
        entries.append(Entry(f"{number}-0", line, hashlib.sha1(f"{before}\n{line}".encode()).hexdigest()))
    return entries


# ---- groups that failed ------------------------------------------------------------------------------------------


async def test_failed_groups_are_counted_apart(ledger: Ledger) -> None:
    report = await run_audit(ledger, await finished_job(ledger))
    assert (report.num_groups, report.num_failed_groups, report.num_trained_groups) == (6, 1, 5)
    assert "6 groups accepted, 1 of them failed and not trained; " in describe_audit(report)


async def test_job_whose_groups_all_failed_is_not_called_clean(ledger: Ledger, world: World) -> None:
    job_id, epoch = await world.started_job()
    await ledger.iterations.open(job_id, 0, 0, tasks_for(0))
    for claim in await world.claim_all(job_id):
        await ledger.rollout.submit(job_id, claim.entry_id, failed_group(claim.task))
    assert (await run_audit(ledger, job_id)).is_clean  # the job may still train others
    await ledger.jobs.move(job_id, JobState.FAILED, "every group of iteration 0 failed", epoch=epoch)
    report = await run_audit(ledger, job_id)
    assert (report.is_clean, report.violation, report.num_failed_groups) == (False, None, 2)
    assert describe_audit(report).startswith("NOTHING TRAINED: ")
    assert "2 groups accepted, 2 of them failed and not trained" in describe_audit(report)
