"""The diagnosis of an installation: Redis, clocks, trainers, rollouts, streams, and every active job explained."""

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from redis.exceptions import RedisError, ResponseError

from onbeat.contracts.deadlines import SILENT_S
from onbeat.contracts.errors import JobNotFound
from onbeat.contracts.records import Diagnosis, Finding, ProcessRecord, TrainerRecord, WorkerRecord
from onbeat.contracts.states import JobState
from onbeat.streams import inspection
from onbeat.streams.connection import public_address, why_refused
from onbeat.streams.inspection import existing_jobs
from onbeat.streams.ledger import Ledger
from onbeat.streams.unreadable import MISREAD, find_unreadable
from services.broker.deadlines import RECENT_S
from services.broker.doctor.explain import count, explain_job, explain_refused_read, explain_starting
from services.broker.doctor.memory import explain_memory
from services.broker.doctor.verdict import read_verdict
from services.broker.settings import READ_ONLY

DEADLINE_S = 10.0  # limit for the whole diagnosis
REFUSAL_S = 2.0  # additional time to find out whether the password is wrong
LEAVING_S = 120.0  # a trainer or rollout has this long to notice that its job is over
MAX_SKEW_S = 2.0  # skew of ages that pages show
MAX_JOBS = 50  # started jobs that are explained, the oldest first
MAX_PENDING = 5  # pending jobs that are explained; the others wait for the same
FULL = 0.9  # share of maxmemory


async def diagnose(ledger: Ledger, *, is_conducting: bool, is_read_only: bool = False) -> Diagnosis:
    """Examine everything; faults become findings, not exceptions. It ends within DEADLINE_S + REFUSAL_S."""
    findings = [explain_broker(is_conducting, is_read_only)]
    try:
        async with asyncio.timeout(DEADLINE_S):
            findings += await examine_redis(ledger)
            of_jobs = await examine_jobs(ledger)
            named = {finding.who for finding in of_jobs}
            findings += [finding for finding in await examine_pools(ledger) if finding.who not in named]
            findings += of_jobs
    except (RedisError, TimeoutError) as error:
        where, refusal = public_address(ledger.redis), await find_refusal(ledger)
        reason = str(error) or f"no answer within {DEADLINE_S:.0f} s"
        sentence = f"Redis at {where} does not answer ({reason}), so nothing else can be examined"
        sentence += "; check that it runs and that ONBEAT_REDIS_URL of the broker names it"
        if refusal:
            sentence = f"Redis at {where} does not let the broker in, so nothing else can be examined; {refusal}"
        findings.append(Finding(sentence=sentence, who="redis", is_problem=True))
    return diagnosis(findings)


async def find_refusal(ledger: Ledger) -> str:
    """Return why Redis refuses the broker; '' if it does not, or does not answer."""
    try:
        async with asyncio.timeout(REFUSAL_S):
            return await why_refused(ledger.redis)
    except TimeoutError:
        return ""


async def diagnose_job(ledger: Ledger, job_id: str) -> Diagnosis:
    """Explain one job, with the verdict on how it learns. Raises JobNotFound."""
    findings = await explain_job(ledger, job_id)
    return diagnosis(findings, await read_verdict(ledger, await ledger.jobs.fields(job_id)))


def diagnosis(findings: list[Finding], verdict: str = "") -> Diagnosis:
    """Return the findings as a diagnosis, problems first."""
    ordered = sorted(findings, key=lambda finding: not finding.is_problem)
    is_healthy = not any(finding.is_problem for finding in ordered)
    return Diagnosis(is_healthy=is_healthy, verdict=verdict, findings=ordered)


def explain_broker(is_conducting: bool, is_read_only: bool) -> Finding:
    if is_read_only:
        return Finding(sentence=READ_ONLY, who="broker")
    if is_conducting:
        return Finding(sentence="the broker answers, and its control loop runs", who="broker")
    sentence = "the control loop of the broker has ended: no iteration will be opened; see its log and start it again"
    return Finding(sentence=sentence, who="broker", is_problem=True)


# ---- Redis -------------------------------------------------------------------------------------------------------


async def examine_redis(ledger: Ledger) -> list[Finding]:
    asked_at, started = time.time(), time.perf_counter()
    redis_time = await ledger.now()
    round_trip_s = time.perf_counter() - started
    skew_s = abs(asked_at + round_trip_s / 2 - redis_time)
    where = public_address(ledger.redis)
    answer = Finding(sentence=f"Redis at {where} answers within {round_trip_s * 1000:.1f} ms", who="redis")
    is_skewed = skew_s > MAX_SKEW_S
    sentence = f"the clocks of broker and Redis differ by {skew_s:.1f} s"
    sentence += "; synchronise them (NTP), or the dashboard shows wrong ages" if is_skewed else ""
    clocks = Finding(sentence=sentence, who="broker", is_problem=is_skewed)
    return [answer, clocks, *await examine_storage(ledger)]


async def examine_storage(ledger: Ledger) -> list[Finding]:
    """Examine whether Redis persists its data. This user may not be allowed to ask."""
    try:
        info = await ledger.redis.info("persistence") | await ledger.redis.info("memory")
    except ResponseError as error:
        why = f"because this user may not run INFO: {error}"
        return [Finding(sentence=f"Redis does not report whether it keeps its data on disk, {why}", who="redis")]
    findings = [await explain_persistence(ledger, info)]
    limit, used = int(info.get("maxmemory", 0)), int(info.get("used_memory", 0))
    if limit and info.get("maxmemory_policy") != "noeviction":
        sentence = "Redis evicts keys when memory is short, those of jobs included: maxmemory-policy is "
        sentence += f"{info['maxmemory_policy']}; set it to noeviction"
        findings.append(Finding(sentence=sentence, who="redis", is_problem=True))
    if limit and used > FULL * limit:
        sentence = f"Redis uses {used / 1e6:.0f} of {limit / 1e6:.0f} MB (maxmemory); "
        sentence += "give it more memory, or run fewer jobs"
        findings.append(Finding(sentence=sentence, who="redis", is_problem=True))
    return findings


async def explain_persistence(ledger: Ledger, info: dict[str, Any]) -> Finding:
    if info.get("aof_last_write_status", "ok") != "ok":
        sentence = "Redis cannot write its append-only file (aof_last_write_status); is its disk full?"
        return Finding(sentence=sentence, who="redis", is_problem=True)
    if not info.get("aof_enabled"):
        sentence = "Redis keeps no append-only file: when it restarts, jobs go back to its last snapshot, or are lost; "
        return Finding(sentence=sentence + "set appendonly yes", who="redis")
    try:
        policy = (await ledger.redis.config_get("appendfsync")).get("appendfsync", "unknown")
    except ResponseError:
        policy = "unknown, this user may not run CONFIG"
    return Finding(sentence=f"Redis keeps an append-only file (appendfsync {policy})", who="redis")


# ---- trainers and rollouts ---------------------------------------------------------------------------------------


async def examine_pools(ledger: Ledger) -> list[Finding]:
    """Examine the default pool and those of the jobs that are explained."""
    jobs = await existing_jobs(ledger, await ledger.lists.started_and_next(MAX_PENDING))
    pools = {"default", *(fields.get("pool", "default") for fields in jobs.values())}
    now = await ledger.now()
    findings: list[Finding] = []
    idle: list[ProcessRecord] = []
    for pool in sorted(pools):
        of_trainers, of_rollouts = await ledger.trainers.heartbeats(pool), await ledger.workers.heartbeats(pool)
        trainers, workers = of_trainers.records, of_rollouts.records
        findings.append(explain_pool(pool, trainers, workers, now))
        findings += explain_unreadable(pool, of_trainers.unreadable + of_rollouts.unreadable)
        processes: list[ProcessRecord] = [*trainers, *workers]
        findings += explain_starting(processes, now)
        findings += [finding for process in processes if (finding := explain_silence(process, now))]
        findings += [finding for process in processes if (finding := await explain_hang(ledger, process, now))]
        idle += [process for process in processes if process.job_id is None]  # a job's are explained with it
    return findings + explain_memory(idle, now)


def explain_pool(pool: str, trainers: list[TrainerRecord], workers: list[WorkerRecord], now: float) -> Finding:
    """Describe a pool: `pool default: 1 trainer alive (trainer-a is training job-1), 2 rollouts alive (...)`."""
    parts = []
    kinds: dict[str, Sequence[ProcessRecord]] = {"trainer": trainers, "rollout": workers}
    for kind, processes in kinds.items():
        alive = [process for process in processes if process.is_alive(now)]
        names = [f"{process.id} is {process.state}{f' {process.job_id}' * bool(process.job_id)}" for process in alive]
        more = ", ..." if len(names) > 8 else ""
        parts.append(f"{count(len(alive), kind)} alive" + (f" ({', '.join(names[:8])}{more})" if names else ""))
    return Finding(sentence=f"pool {pool}: {', '.join(parts)}", who=pool)


def explain_unreadable(pool: str, names: list[str]) -> list[Finding]:
    if not names:
        return []
    shown = ", ".join(names[:8]) + ", ..." * (len(names) > 8)
    are = "is" if len(names) == 1 else "are"
    sentence = f"{count(len(names), 'heartbeat')} of pool {pool} cannot be read, and {are} left out ({shown}): another "
    sentence += "version of Onbeat wrote them, or another program. The next trainer and the next rollout that start in "
    sentence += "this pool remove those that are not written again"
    return [Finding(sentence=sentence, who=pool, is_problem=True)]


def explain_silence(process: ProcessRecord, now: float) -> Finding | None:
    """Report a process that is silent; None if it is starting or alive, has stopped, or is long gone."""
    silent_s = process.silence_s(now)
    if process.state == "stopped" or process.is_starting(now) or not SILENT_S < silent_s < RECENT_S:
        return None
    sentence = f"{process.id} was last seen {silent_s:.0f} s ago ({process.state}) and did not sign off: it died or "
    sentence += "lost its connection"
    return Finding(sentence=sentence, who=process.id, is_problem=True, since_s=silent_s)


async def explain_hang(ledger: Ledger, process: ProcessRecord, now: float) -> Finding | None:
    """Report a process that still works on an ended job; None if it does not. Heartbeats have their own thread and
    continue when the work itself is stuck in the device or in a library."""
    if process.job_id is None or not process.is_alive(now):
        return None
    try:
        fields = await ledger.jobs.fields(process.job_id)
    except JobNotFound:
        return None
    over_s = now - float(fields.get("finished_at", now))
    if over_s < LEAVING_S:
        return None
    sentence = f"{process.id} still works on {process.job_id}, which has been {fields['state']} for {over_s:.0f} s: "
    sentence += "it hangs; kill it, and its supervisor starts it again"
    return Finding(sentence=sentence, job_id=process.job_id, who=process.id, is_problem=True, since_s=over_s)


# ---- jobs --------------------------------------------------------------------------------------------------------


async def examine_jobs(ledger: Ledger) -> list[Finding]:
    started, counts = await ledger.lists.started(), await ledger.lists.counts()
    explained = (await ledger.lists.started_and_next(MAX_PENDING))[: MAX_JOBS + MAX_PENDING]
    findings = []
    for job_id in explained:
        try:
            findings += await explain_job(ledger, job_id)
            findings.append(await explain_streams(ledger, job_id))
        except JobNotFound:
            continue
        except ResponseError as error:
            if (refusal := explain_refused_read(job_id, error)) not in findings:
                findings.append(refusal)
        except MISREAD as error:
            reason = await find_unreadable(ledger, job_id) or f"{type(error).__name__}: {error}"
            sentence = f"the record of {job_id} cannot be read ({reason}); "
            sentence += "cancel the job, and let an admin delete it"
            findings.append(Finding(sentence=sentence, job_id=job_id, is_problem=True))
    num_unfinished, num_ended = len(started) + counts.pop(JobState.PENDING), sum(counts.values())
    total = f"{count(num_unfinished + num_ended, 'job')}, {num_unfinished} of them unfinished"
    more = f"; only the oldest {len(explained)} of these are explained here" if num_unfinished > len(explained) else ""
    return [*findings, Finding(sentence=total + more, who="broker")]


async def explain_streams(ledger: Ledger, job_id: str) -> Finding:
    lengths = await inspection.stream_lengths(ledger, job_id)
    sentence = (
        f"streams of {job_id}: {count(lengths.num_unclaimed, 'prompt')} waiting, "
        f"{lengths.num_prompts - lengths.num_unclaimed} being answered; {count(lengths.num_groups, 'group')} kept"
    )
    return Finding(sentence=sentence, job_id=job_id, is_detail=True)
