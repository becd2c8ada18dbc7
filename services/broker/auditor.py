"""The audit of a job: it checks the audit log by itself, then the ledger and the groups still kept against the log."""

import json

from onbeat.config import JobConfig
from onbeat.config.data import DIFFICULTY
from onbeat.contracts.records import AuditReport
from onbeat.contracts.rewards import recorded_rules
from onbeat.contracts.section import IS_ACCEPTED
from onbeat.contracts.states import IterationState, JobState
from onbeat.streams.audit import Audit, AuditViolation, require
from onbeat.streams.codec import RolloutGroup, decode_group, payload_digest, span_versions
from onbeat.streams.inspection import stored_groups
from onbeat.streams.ledger import Ledger
from onbeat.streams.outcomes import Outcome
from onbeat.streams.signal import Signal
from services.broker.choice_audit import check_choices
from services.broker.source_audit import Content, check_sources

MAX_ROUNDS = 100  # a running job continues to write while its log is read


async def run_audit(ledger: Ledger, job_id: str, kept_head: str = "") -> AuditReport:
    """Audit a job and report the first violation. `kept_head`: the head of an earlier report. Raises JobNotFound."""
    job = await ledger.jobs.fields(job_id)
    max_staleness = int(job["max_staleness"])
    audit, num_contents, violation = Audit(job_id, max_staleness, kept_head), 0, None
    num_loads = num_loads_unknown = 0
    try:
        fields = await read_log(ledger, audit)
        require(not kept_head or audit.has_kept_head, f"link {kept_head} is not in the log: it was written anew")
        check_job(audit, fields)
        await check_iterations(ledger, audit)
        num_loads, num_loads_unknown = await check_loads(ledger, audit)
        num_contents = await check_contents(ledger, audit, fields["config"])
    except AuditViolation as error:
        await ledger.jobs.state(job_id)  # raises JobNotFound: what is missing may have been deleted with the job
        violation = str(error)
    num_groups = sum(len(iteration.digests) for iteration in audit.iterations)
    committed = audit.iterations[: audit.next_iteration]
    num_trained = sum(len(iteration.digests) - iteration.num_failed for iteration in committed)
    return AuditReport(
        is_clean=violation is None and (num_trained > 0 or not JobState(job["state"]).is_final),
        violation=violation,
        num_entries=audit.num_entries,
        num_groups=num_groups,
        num_failed_groups=sum(iteration.num_failed for iteration in audit.iterations),
        num_trained_groups=num_trained,
        num_commits=audit.next_iteration - audit.first_iteration,
        num_contents=num_contents,
        num_contents_gone=num_groups - num_contents if violation is None else 0,
        num_loads=num_loads,
        num_loads_unknown=num_loads_unknown,
        head=audit.link,
        answer_rules=recorded_rules(json.loads(job["config"])),
    )


async def read_log(ledger: Ledger, audit: Audit) -> dict[str, str]:
    """Read the log to its end. Returns the job's fields of the same moment."""
    last = "-"
    for _ in range(MAX_ROUNDS):
        while entries := await ledger.audit_log.entries(audit.job_id, last):
            audit.read(entries)
            last = entries[-1].id
        fields = await ledger.jobs.fields(audit.job_id)
        if fields.get("audit_link", "") == audit.link:
            return fields
    raise AuditViolation(f"the log ends with link {audit.link}, the job's newest is {fields.get('audit_link')}")


def check_job(audit: Audit, fields: dict[str, str]) -> None:
    """Check that the job's fields follow from its log."""
    require(audit.num_entries > 0, "the job has no audit log; it is older than this release")
    config_digest = payload_digest(fields["config"].encode())
    require(audit.config_digest == config_digest, "the job's configuration is not the one that it was created with")
    has_learned = bool(json.loads(fields["config"]).get("teacher")) and audit.next_iteration > audit.first_iteration
    require(bool(audit.teacher_digest) or not has_learned, "the job has a teacher, and its log does not say which one")
    published = "" if audit.published is None else str(audit.published)
    for name, logged in {
        "num_opened": str(len(audit.iterations)),
        "next_iteration": str(audit.next_iteration),
        "policy_version": published,
        "weights_digest": audit.weights_digest,
        "teacher_digest": audit.teacher_digest,
    }.items():
        require(fields.get(name, "") == logged, f"the job's {name} is {fields.get(name)!r}, by the log {logged!r}")
    if fields["state"] == JobState.SUCCEEDED:
        is_complete = audit.next_iteration == int(fields["num_iterations"])
        require(is_complete, f"the job SUCCEEDED with {audit.next_iteration} of {fields['num_iterations']} commits")


async def check_iterations(ledger: Ledger, audit: Audit) -> None:
    """Check that the ledger of each committed iteration follows from the log."""
    first = audit.first_iteration
    for number, logged in enumerate(audit.iterations[first : audit.next_iteration], start=first):
        fields = await ledger.iterations.fields(audit.job_id, number)
        groups = await ledger.iterations.groups(audit.job_id, number)
        for name, value in {
            "state": IterationState.COMMITTED,
            "policy_version": logged.version,
            "num_groups": logged.num_groups,
            "num_accepted": logged.num_groups,
            "weights_digest": logged.weights_digest,
        }.items():
            stored = fields.get(name)
            require(stored == str(value), f"iteration {number}: its {name} is {stored!r}, by the log {str(value)!r}")
        wanted = {group_id: f"accepted:{entry}" for group_id, entry in logged.entries.items()}
        require(groups == wanted, f"iteration {number}: its ledger of groups is not that of the log")


async def check_loads(ledger: Ledger, audit: Audit) -> tuple[int, int]:
    """Check that rollouts loaded the weights whose digests are in the log. Return the numbers of loads that recorded a
    digest, and of those that did not: they are of older releases."""
    num_loads = num_unknown = 0
    for version, logged in audit.digests.items():
        announced = await ledger.versions.digest(audit.job_id, version)
        is_same = announced in ("", logged)
        require(
            is_same, f"policy version {version} was announced with digest {announced[:12]}, by the log {logged[:12]}"
        )
        record = await ledger.versions.weights(audit.job_id, version)
        for rollout, update in ({} if record is None else record.rollouts).items():
            loaded = update.weights_digest
            place = f"{rollout} loaded policy version {version}"
            require(loaded in ("", logged), f"{place} with digest {loaded[:12]}, by the log {logged[:12]}")
            num_loads, num_unknown = num_loads + bool(loaded), num_unknown + (not loaded)
    return num_loads, num_unknown


async def check_contents(ledger: Ledger, audit: Audit, config: str) -> int:
    """Check that every kept group is the accepted one and that only trimmed ones are missing. Returns their number."""
    job = json.loads(config)
    signal, has_sources = Signal.of_record(job), isinstance(job.get("data"), list)
    # The most groups that an iteration of dynamic sampling may have; None: the job has none, or it depends on sources.
    max_groups = None if has_sources else job["rollout"].get("max_prompts_per_iteration")
    accepted = {
        entry: (group_id, logged.digests[group_id])
        for logged in audit.iterations
        for group_id, entry in logged.entries.items()
    }
    checked: dict[str, Content] = {}
    outcomes: dict[str, Outcome | None] = {}
    chooses = any(source.get("order") == DIFFICULTY for source in (job["data"] if has_sources else [job["data"]]))
    validated = JobConfig.model_validate(job, context=IS_ACCEPTED) if has_sources or chooses else None
    async for entry, payload in stored_groups(ledger, audit.job_id):
        if entry in accepted:  # other entries are foreign: no trainer takes them
            group_id, digest = accepted[entry]
            is_same = payload_digest(payload) == digest
            require(is_same, f"group {group_id} (entry {entry}) was changed after its acceptance")
            group = check_content(audit, group_id, payload, max_groups, signal)
            checked[group_id] = Content(group.source, signal.is_in(group))
            if validated is not None and chooses and not group.is_supervised:
                outcomes[group_id] = Outcome.of_group(validated, group)
    num_trimmed = int((await ledger.jobs.fields(audit.job_id)).get("num_trimmed", "0"))  # now: some may just have gone
    needed = {group_id for logged in audit.iterations[num_trimmed:] for group_id in logged.digests}
    lost = sorted(needed - checked.keys())
    require(not lost, f"lost: groups {', '.join(lost[:5])}, which were not trimmed")
    if validated is not None and has_sources:
        check_sources(validated, audit, checked)
    if validated is not None and chooses:
        await check_choices(ledger, validated, audit, outcomes)
    return len(checked)


def check_content(audit: Audit, group_id: str, payload: bytes, max_groups: int | None, signal: Signal) -> RolloutGroup:
    """Check policy versions by the tokens themselves, not by what their rollout reported. With dynamic sampling, check
    by its rewards that a group was replaced, or was not, by the rule. Return the group."""
    try:
        group = decode_group(payload)
    except ValueError as error:
        raise AuditViolation(str(error)) from error
    require(group.group_id == group_id, f"the entry of group {group_id} holds group {group.group_id}")
    opened = audit.iterations[group.iteration]
    kind = "a row of examples" if group.is_supervised else "no row of examples"
    require(group.is_supervised == opened.is_supervised or group.HasField("failure"), f"group {group_id} is {kind}")
    if opened.is_supervised:
        require(not span_versions(group), f"group {group_id} has tokens of a policy, and its iteration is supervised")
        return group
    if group_id in opened.replaced:
        is_by_reward = signal.rule_of(group.source) == "reward"
        words = "its rewards differ" if is_by_reward else f"it has signal ({signal.key_of(group.source)})"
        require(not signal.is_in(group), f"group {group_id} was replaced although {words}")
    elif max_groups is not None and opened.num_before[group_id] < max_groups:
        is_by_reward = signal.rule_of(group.source) == "reward"
        words = "its rewards are equal" if is_by_reward else f"it has {signal.words_of(group.source)}"
        require(signal.is_in(group), f"group {group_id} was not replaced although {words}")
    wanted = [] if group.HasField("failure") else [opened.version]
    versions = span_versions(group)
    require(versions == wanted, f"group {group_id} has tokens of versions {versions}, its iteration is on {wanted}")
    return group
