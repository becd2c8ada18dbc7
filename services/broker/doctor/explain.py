"""The explanation of a job's situation: what waits for what, since when, and what happens next. It only reads.

How the job learns is in services/broker/doctor/learning.py.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from itertools import takewhile
from typing import Any

from pydantic import ValidationError
from redis.exceptions import ResponseError

from onbeat.config.explain import first_wrong
from onbeat.contracts.deadlines import SILENT_S
from onbeat.contracts.records import Finding, ProcessRecord, WorkerRecord
from onbeat.contracts.states import IterationState, JobState
from onbeat.streams.inspection import PromptLease
from onbeat.streams.ledger import Ledger
from onbeat.streams.records import Fields
from onbeat.streams.stream_ids import time_of
from services.broker.deadlines import (
    ARRIVAL_S,
    CANCEL_GRACE_S,
    JOB_FAILS,
    RECENT_S,
    is_fresh_start,
    num_lost_trainers,
    queued_at,
    trainers_away_s,
)
from services.broker.doctor.learning import explain_learning
from services.broker.doctor.memory import explain_memory
from services.broker.doctor.situation import Situation, Unit, held_by_worker, read_situation

SLOW_OPENING_S = 60.0  # time for preparing prompts

REMARKS = {
    "stale": "submissions were refused for their policy version",
    "lost": "submissions were refused because another rollout holds the lease",
    "failed_groups": "of the accepted groups failed and are not trained",
    "replaced": "of the accepted groups without signal, replaced by other prompts",
    "not_replaced": "of the accepted groups without signal, not replaced: all prompts are used up",
}
START_TRAINER = "`onbeat up`, or `python -m services.trainer` with ONBEAT_POOL="
START_ROLLOUT = "`onbeat up`, or `python -m services.rollout` with ONBEAT_POOL="


def count(number: int, noun: str) -> str:
    """Return a number with its noun: `1 prompt`, `2 prompts`."""
    return f"{number} {noun}{'s' * (number != 1)}"


async def explain_job(ledger: Ledger, job_id: str) -> list[Finding]:
    """Explain a job, problems first: who waits for whom, and how it learns. Raises JobNotFound."""
    fields = await ledger.jobs.fields(job_id)
    try:
        about_work = await explain_work(ledger, fields)
    except ResponseError as error:
        return [explain_refused_read(job_id, error)]
    about_learning = await explain_learning(ledger, fields)
    if JobState(fields["state"]).is_final:
        return [*about_work, *about_learning]
    is_late = [finding for finding in about_work if finding.is_problem]
    return sorted([*is_late, *about_learning, *about_work[len(is_late) :]], key=lambda finding: not finding.is_problem)


def explain_refused_read(job_id: str, error: ResponseError) -> Finding:
    sentence = f"Redis refuses to read the streams of {job_id} ({error}): was a key deleted, or did Redis lose data? "
    return Finding(sentence=sentence + "Cancel the job, and submit it again", job_id=job_id, is_problem=True)


async def explain_work(ledger: Ledger, fields: Fields) -> list[Finding]:
    """Explain who waits for whom in a job, and whose memory is short, problems first."""
    job_id, state = fields["id"], JobState(fields["state"])
    if state.is_final:
        return [explain_end(fields, state, await ledger.now())]
    try:
        situation = await read_situation(ledger, fields)
    except ValidationError as error:
        sentence = f"this broker does not understand the configuration of {job_id}: {first_wrong(error)}; "
        return [Finding(sentence=sentence + "is it of another version of Onbeat?", job_id=job_id, is_problem=True)]
    processes: list[ProcessRecord] = [*situation.trainers.values(), *situation.workers.values()]
    about_memory = explain_memory([process for process in processes if process.job_id == job_id], situation.now)
    findings = [*EXPLANATIONS[state](situation), *about_memory, *explain_starting(processes, situation.now)]
    return sorted(findings, key=lambda finding: not finding.is_problem)


def explain_starting(processes: Iterable[ProcessRecord], now: float) -> list[Finding]:
    """Name the services that load their libraries: `starting: trainer-0, 12 s; rollout-0, 12 s`."""
    starting = [process for process in processes if process.is_starting(now)]
    if not starting:
        return []
    parts = [f"{process.id}, {process.silence_s(now):.0f} s" for process in starting]
    who, since_s = ", ".join(process.id for process in starting), max(process.silence_s(now) for process in starting)
    return [Finding(sentence=f"starting: {'; '.join(parts)}", who=who, since_s=since_s)]


# ---- by state ----------------------------------------------------------------------------------------------------


def explain_end(fields: Fields, state: JobState, now: float) -> Finding:
    since_s = max(0.0, now - float(fields["finished_at"]))
    done = f"after {fields['next_iteration']} of {fields['num_iterations']} iterations"
    ended = "was cancelled" if state is JobState.CANCELLED else state.lower()
    sentence = f"{fields['id']} {ended} {since_s:.0f} s ago, {done}"
    if "error" in fields:
        sentence += f": {fields['error']}"
    is_failed = state is JobState.FAILED
    return Finding(sentence=sentence, job_id=fields["id"], who=fields["id"], is_problem=is_failed, since_s=since_s)


def explain_pending(s: Situation) -> list[Finding]:
    pool, pending_s = s.config.pool, s.now - queued_at(s.fields)
    start = f"{s.job_id} has been PENDING for {pending_s:.0f} s: "
    idle, busy = s.live_trainers("idle"), s.busy_trainers()
    about: dict[str, Any] = {"who": s.job_id, "waits_for": f"a trainer of pool {pool}", "since_s": pending_s}
    if idle:
        is_late = pending_s > SILENT_S and not s.num_before
        event = f"{idle[0]} asks for jobs" + (" but does not take it; see its log" if is_late else " and takes it next")
        findings = [s.find(start + event, is_problem=is_late, **about)]
    elif busy:
        event = f"{busy}; before it: {count(s.num_before, 'pending job')} of pool {pool}"
        findings = [s.find(start + event, **about)]
    elif starting := s.starting_trainer():
        findings = [s.find(start + starting, **about)]
    else:
        deadline_s = s.config.schedule.start_deadline_s
        left_s, when = time_left(deadline_s, trainers_away_s(s.fields, s.trainers.values(), s.now), ARRIVAL_S)
        event = f"no trainer of pool {pool} has asked for jobs in the last {SILENT_S:.0f} s{last_seen(s)}; "
        event += f"start one: {START_TRAINER}{pool}"
        due = f"{JOB_FAILS} {when} if no trainer comes (schedule.start_deadline_s)"
        findings = [
            s.find(start + event, is_problem=True, **about),
            s.find(due, who=s.job_id, next=JOB_FAILS, deadline_s=left_s),
        ]
    return findings + missing_rollouts(s)


def explain_running(s: Situation) -> list[Finding]:
    units = [explain_unit(s, unit) for unit in (*s.iterations, *s.evaluations)]
    of_rollouts = [*waiting_episodes(s), *missing_rollouts(s), *silent_rollouts(s), *serving_rollouts(s)]
    return [*explain_losses(s), *explain_trainer(s), *explain_opening(s), *units, *of_rollouts, *explain_deadline(s)]


def explain_paused(s: Situation) -> list[Finding]:
    sentence = (
        f"{s.job_id} has been PAUSED by its user for {s.state_since_s:.0f} s and stays paused without a limit: "
        f"`onbeat jobs resume {s.job_id}` continues it, `onbeat jobs cancel {s.job_id}` ends it"
    )
    pause = s.find(sentence, who=s.job_id, waits_for="its user", since_s=s.state_since_s)
    if s.lease_left_s > 0:
        return [pause, *explain_trainer(s)]
    return [pause, s.find("no trainer holds the job; one takes it over when it is resumed")]


def explain_cancelling(s: Situation) -> list[Finding]:
    start = f"{s.job_id} has been CANCELLING for {s.state_since_s:.0f} s: "
    about: dict[str, Any] = {"who": s.job_id, "since_s": s.state_since_s, "next": "the broker ends the job"}
    if s.lease_left_s <= 0:
        return [s.find(start + "no trainer holds it, so the broker ends it within a second", deadline_s=1.0, **about)]
    left_s = max(0.0, CANCEL_GRACE_S - s.silent_s)
    event = f"{s.owner} has to stop at its next safe point; otherwise the broker ends the job in {left_s:.0f} s"
    return [s.find(start + event, waits_for=s.owner, deadline_s=left_s, **about), *explain_trainer(s)]


EXPLANATIONS: dict[JobState, Callable[[Situation], list[Finding]]] = {
    JobState.PENDING: explain_pending,
    JobState.RUNNING: explain_running,
    JobState.PAUSED: explain_paused,
    JobState.CANCELLING: explain_cancelling,
}


# ---- the trainer -------------------------------------------------------------------------------------------------


def time_left(deadline_s: float, waited_s: float, most_s: float) -> tuple[float, str]:
    """Return the seconds until a deadline, and when it is in words. Brokers do not count a time in which none of them
    ran: a job that is past its deadline has at most `most_s` left, from the start of a broker."""
    if waited_s <= deadline_s:
        return deadline_s - waited_s, f"in {deadline_s - waited_s:.0f} s"
    left_s = min(most_s, deadline_s)
    return left_s, f"within {left_s:.0f} s"


def explain_losses(s: Situation) -> list[Finding]:
    num_lost, limit = num_lost_trainers(s.events), s.config.schedule.max_lost_trainers
    since = takewhile(lambda event: not is_fresh_start(event), s.events)
    failed = [
        s.find(event.message, who=event.message.partition(" ends:")[0], is_problem=s.lease_left_s <= 0)
        for event in since
        if event.kind == "trainer.failed"
    ]
    if not num_lost:
        return failed[:1]
    sentence = f"{count(num_lost, 'trainer')} in a row ended without committing iteration "
    sentence += f"{s.fields['next_iteration']}; the job fails after {limit} (schedule.max_lost_trainers). The log of a "
    sentence += "trainer that ended may say why"
    return [*failed[:1], s.find(sentence, who=s.owner, is_problem=num_lost > 1)]


def explain_trainer(s: Situation) -> list[Finding]:
    pool, left_s = s.config.pool, s.lease_left_s
    if left_s <= 0 and (end := s.end_of_owner()) is not None:
        about = {"waits_for": f"a trainer of pool {pool}", "since_s": s.now - end.time, "next": "a trainer continues"}
        return [s.find(end.message, who=s.owner, is_problem=True, **about)]
    if left_s <= 0:
        idle, busy, starting = s.live_trainers("idle"), s.busy_trainers(), s.starting_trainer()
        has_left = (record := s.trainers.get(s.owner)) is not None and record.is_alive(s.now)
        gone = "has left the job" if has_left else "stopped, died or lost its connection"
        sentence = f"{s.owner} {gone}: its lease of {s.job_id} ran out {-left_s:.0f} s ago; "
        no_trainer = f"no trainer of pool {pool} is free to take over; start one: {START_TRAINER}{pool}"
        after = f"the first one that is free takes over: {busy}"
        sentence += f"{idle[0]} takes over" if idle else after if busy else starting or no_trainer
        about = {"waits_for": f"a trainer of pool {pool}", "since_s": -left_s, "next": "another trainer takes over"}
        return [s.find(sentence, who=s.owner, is_problem=not (starting or (has_left and busy)), **about)]
    doing = s.fields.get("doing") or "training"
    doing_s = max(0.0, s.now - float(s.fields.get("doing_since", s.fields.get("started_at", s.now))))
    record = s.trainers.get(s.owner)
    silent_s = record.silence_s(s.now) if record and not record.is_starting(s.now) else 0.0
    about = {"next": "another trainer may take over", "deadline_s": left_s}
    if silent_s >= SILENT_S:
        sentence = f"{s.owner} was last seen {silent_s:.0f} s ago, {doing}; its lease of {s.job_id} runs out in "
        sentence += f"{left_s:.0f} s, unless it comes back; see its log"
        return [s.find(sentence, who=s.owner, is_problem=True, waits_for=doing, since_s=doing_s, **about)]
    sentence = f"{s.owner} is {doing} ({doing_s:.0f} s)"
    lease = f"{s.owner} holds {s.job_id}: its lease runs out in {left_s:.0f} s, unless renewed"
    activity = s.find(sentence, who=s.owner, waits_for=doing, since_s=doing_s)
    return [activity, s.find(lease, who=s.owner, is_detail=True, **about)]


def last_seen(s: Situation) -> str:
    """Return ` (the last one, trainer-a, stopped 40 s ago)`; '' if no trainer is known."""
    if not s.trainers:
        return ""
    last = max(s.trainers.values(), key=lambda trainer: trainer.last_seen_at)
    how = "stopped" if last.state == "stopped" else "was last seen"
    return f" (the last one, {last.id}, {how} {last.silence_s(s.now):.0f} s ago)"


# ---- iterations --------------------------------------------------------------------------------------------------


def explain_opening(s: Situation) -> list[Finding]:
    """Explain why no iteration is open; empty while one is open."""
    iteration, published = int(s.fields["next_iteration"]), s.fields.get("policy_version", "none")
    about: dict[str, Any] = {"who": s.job_id, "since_s": s.silent_s}
    if iteration >= s.config.schedule.num_iterations:
        sentence = f"all {iteration} iterations are committed, but {s.owner} has not finished the job yet"
        return [s.find(sentence, waits_for=s.owner, **about)]
    if s.iterations:
        return []
    wanted = 0 if s.config.is_supervised(iteration) else max(0, iteration - s.config.max_staleness)
    if published == "none" or int(published) < wanted:
        sentence = f"iteration {iteration} is not open: it needs policy version {wanted}, and trainer {s.owner} has "
        return [s.find(f"{sentence}published {published}", waits_for=s.owner, **about)]
    is_slow = s.silent_s > SLOW_OPENING_S
    sentence = f"iteration {iteration} is not open yet: a broker has been preparing its prompts for {s.silent_s:.0f} s"
    sentence += "; see the log of the broker" if is_slow else ""
    return [s.find(sentence, waits_for="broker", is_problem=is_slow, **about)]


def explain_unit(s: Situation, unit: Unit) -> Finding:
    """Describe an open iteration or evaluation.

    `iteration 3 (policy version 3): 5 of 8 groups accepted; 2 with rollout-a (claimed or renewed 1 s ago, attempt 1 at
    most)`
    """
    fields = unit.fields
    start = f"{unit.name} (policy version {fields['policy_version']}): "
    start += f"{fields['num_accepted']} of {fields['num_groups']} groups accepted"
    if fields["state"] == IterationState.DRAINED:
        since_s = max(0.0, s.now - float(fields["drained_at"]))
        user = s.owner if unit in s.iterations else "broker"
        duty = "has to train and commit them" if unit in s.iterations else "has to score them"
        sentence = f"{start}, the last one {since_s:.0f} s ago; {user} {duty}"
        return s.find(sentence, who=unit.name, waits_for=user, since_s=since_s)
    if fields.get("is_supervised"):
        sentence, since_s = f"{start}; {s.owner} has to tokenise the rows", max(0.0, s.now - float(fields["opened_at"]))
        return s.find(sentence, who=unit.name, waits_for=s.owner, since_s=since_s)
    counts = {remark: int(fields.get(f"num_{remark}", "0")) for remark in REMARKS}
    remarks = [f"{number} {REMARKS[remark]}" for remark, number in counts.items() if number]
    parts = [start, *describe_leases(s, unit), *remarks]
    since_s = max(0.0, s.now - float(fields["opened_at"]))
    return s.find("; ".join(parts), who=unit.name, waits_for=count(len(unit.waiting), "group"), since_s=since_s)


def describe_leases(s: Situation, unit: Unit) -> list[str]:
    """Describe where the groups are that have not been accepted."""
    waiting = [lease for entry in unit.waiting if (lease := s.leases.get(entry))]
    parts = []
    for worker, leases in sorted(held_by_worker(waiting).items()):
        renewed_s, attempt = min(lease.idle_s for lease in leases), max(lease.attempt for lease in leases)
        who = f"{len(leases)} with {worker}"
        record = s.workers.get(worker)
        doing = f"; {record.doing}" if record and record.doing and record.waiting_episode is None else ""
        parts.append(f"{who} (claimed or renewed {renewed_s:.0f} s ago, attempt {attempt} at most{doing})")
    if back := [lease for lease in waiting if lease.is_handed_back]:
        attempt = max(lease.attempt for lease in back)
        parts.append(f"{len(back)} handed back and free again (attempt {attempt} at most)")
    if fresh := [entry for entry in unit.waiting if entry not in s.leases]:
        since_s = max(0.0, s.now - min(map(time_of, fresh)))
        parts.append(f"{len(fresh)} waiting for {since_s:.0f} s: {why_unclaimed(s)}")
    return parts


def waiting_episodes(s: Situation) -> list[Finding]:
    """Describe, of each rollout, the episode that waits longest for its environment."""
    findings = []
    for worker in s.live_workers():
        if worker.job_id != s.job_id or (wait := worker.waiting_episode) is None:
            continue
        since_s = wait.waited_s + worker.silence_s(s.now)
        left_s = None if wait.left_s is None else max(0.0, wait.left_s - worker.silence_s(s.now))
        sentence = f"group {wait.group_id}: {worker.id} waits for {wait.waits_for} of episode {wait.episode} "
        sentence += f"for {since_s:.0f} s"
        sentence += "" if left_s is None else f"; the episode is given up in {left_s:.0f} s (environment.timeout_s)"
        about = {"since_s": since_s, "next": "the episode is given up", "deadline_s": left_s}
        findings.append(s.find(sentence, who=worker.id, waits_for=wait.waits_for, **about))
    return findings


def why_unclaimed(s: Situation) -> str:
    alive = s.live_workers()
    ours = [worker for worker in alive if worker.job_id == s.job_id]
    if not alive:
        return "no rollout is alive"
    if not ours:
        others = [describe_elsewhere(worker, s.job_id) for worker in alive]
        return "no rollout serves this job; " + ", ".join(others[:5])
    if all(worker.state == "generating" for worker in ours):
        return "every rollout is at capacity"
    return ", ".join(describe_state(worker) for worker in ours[:5] if worker.state != "generating")


def describe_elsewhere(worker: WorkerRecord, job_id: str) -> str:
    """Describe a rollout that does not serve the job."""
    if failure := worker.engine_failures.get(job_id):
        return f"{worker.id} cannot load the model ({failure.cause})"
    return f"{worker.id} serves {worker.job_id}" if worker.job_id else f"{worker.id} is idle"


def describe_state(worker: WorkerRecord) -> str:
    """Describe what a rollout does instead of generating. One that starts reports the step, or what keeps it."""
    doing = f" ({worker.doing})" if worker.state == "starting" and worker.doing else ""
    return f"{worker.id} is {worker.state}{doing}"


def explain_deadline(s: Situation) -> list[Finding]:
    """Say what happens if nothing arrives. Nothing does while the trainer writes the last checkpoint, nor while the job
    waits for trainers that train others."""
    is_trained = int(s.fields["next_iteration"]) >= s.config.schedule.num_iterations
    if is_trained and not s.evaluations and s.lease_left_s + ARRIVAL_S > 0:
        return []
    if s.lease_left_s <= 0 and s.busy_trainers():
        return []
    deadline_s = s.config.schedule.iteration_deadline_s
    left_s, when = time_left(deadline_s, s.silent_s, deadline_s)
    consequence = f"{s.evaluations[0].name} is given up" if s.evaluations else JOB_FAILS
    sentence = (
        f"no progress for {s.silent_s:.0f} s; {consequence} {when} if nothing arrives (schedule.iteration_deadline_s)"
    )
    about = {"since_s": s.silent_s, "next": consequence, "deadline_s": left_s}
    is_late = s.silent_s > deadline_s / 2
    return [s.find(sentence, who=s.job_id, is_problem=is_late, is_detail=not is_late, **about)]


# ---- rollouts ----------------------------------------------------------------------------------------------------


def missing_rollouts(s: Situation) -> list[Finding]:
    is_needed = s.evaluations or not s.config.is_supervised(int(s.fields["next_iteration"]))
    if not is_needed or any(worker.is_alive(s.now) or worker.is_starting(s.now) for worker in s.workers.values()):
        return []
    pool = s.config.pool
    sentence = f"no rollout is alive: none in pool {pool} was seen in the last {SILENT_S:.0f} s; start a rollout: "
    return [s.find(f"{sentence}{START_ROLLOUT}{pool}", who=s.job_id, waits_for="a rollout", is_problem=True)]


def silent_rollouts(s: Situation) -> list[Finding]:
    """Explain silent rollouts that hold prompts of this job or have served it recently."""
    held = held_by_worker(s.leases.values())
    ours = [worker for worker in s.workers.values() if worker.job_id == s.job_id]
    served = {worker.id for worker in ours if worker.silence_s(s.now) < RECENT_S}
    return [
        explain_silence(s, worker_id, held.get(worker_id, []))
        for worker_id in sorted(held.keys() | served)
        if (worker := s.workers.get(worker_id)) is None or not (worker.is_alive(s.now) or worker.is_starting(s.now))
    ]


def explain_silence(s: Situation, worker_id: str, leases: list[PromptLease]) -> Finding:
    worker = s.workers.get(worker_id)
    since_s = worker.silence_s(s.now) if worker else None
    seen = f"was last seen {since_s:.0f} s ago ({worker.state})" if worker else "is no longer listed"
    if not leases:
        return s.find(f"{worker_id} {seen}; it holds nothing", who=worker_id, is_problem=True, since_s=since_s)
    left_s = None
    if worker and worker.lease_s:
        left_s = max(0.0, worker.lease_s - min(lease.idle_s for lease in leases))
    when = "when their leases run out" if left_s is None else f"in {left_s:.0f} s"
    sentence = f"{worker_id} {seen}; others take over its {count(len(leases), 'prompt')} {when}"
    about = {"since_s": since_s, "next": "others take over its prompts", "deadline_s": left_s}
    return s.find(sentence, who=worker_id, is_problem=True, **about)


def serving_rollouts(s: Situation) -> list[Finding]:
    states = Counter(worker.state for worker in s.live_workers() if worker.job_id == s.job_id)
    if not states:
        return []
    summary = ", ".join(f"{number} {state}" for state, number in sorted(states.items()))
    return [s.find(f"{s.job_id} is served by {count(states.total(), 'rollout')}: {summary}")]
