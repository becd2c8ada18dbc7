"""Re-checks a job: its audit log by itself, then the ledger and the groups that are still kept against the log."""

import hashlib
from collections.abc import AsyncIterator

from onbeat.streams.audit import Audit, AuditViolation, require
from onbeat.streams.codec import decode_group, payload_digest, span_versions
from onbeat.streams.ledger import Ledger
from onbeat.types import AuditReport, JobState

MAX_ROUNDS = 100  # a running job writes on while its log is read


async def run_audit(ledger: Ledger, job_id: str, kept_head: str = "") -> AuditReport:
    """Raises JobNotFound. A violation is in the report: the first one. `kept_head`: the head of an earlier report."""
    max_staleness = int((await ledger.job_fields(job_id))["max_staleness"])
    audit, num_contents, violation = Audit(job_id, max_staleness, kept_head), 0, None
    try:
        fields = await read_log(ledger, audit)
        require(not kept_head or audit.has_kept_head, f"link {kept_head} is not in the log: it was written anew")
        check_ledger(audit, fields)
        num_contents = await check_contents(ledger, audit, int(fields.get("checkpoint_iteration", "0")))
    except (AuditViolation, ValueError) as error:
        violation = str(error)
    num_groups = sum(len(iteration.digests) for iteration in audit.iterations)
    return AuditReport(
        is_clean=violation is None,
        violation=violation,
        num_entries=audit.num_entries,
        num_groups=num_groups,
        num_commits=audit.next_iteration,
        num_contents=num_contents,
        num_contents_gone=num_groups - num_contents if violation is None else 0,
        head=audit.link,
    )


async def read_log(ledger: Ledger, audit: Audit) -> dict[str, str]:
    """The job's fields in a moment in which the log was read to its end."""
    last = "-"
    for _ in range(MAX_ROUNDS):
        while entries := await ledger.audit_entries(audit.job_id, last):
            audit.read(entries)
            last = entries[-1].id
        fields = await ledger.job_fields(audit.job_id)
        if fields.get("audit_link", "") == audit.link:
            return fields
    raise AuditViolation(f"the log ends with link {audit.link}, the job's newest is {fields.get('audit_link')}")


def check_ledger(audit: Audit, fields: dict[str, str]) -> None:
    """The job's fields follow from its log."""
    config_digest = hashlib.sha256(fields["config"].encode()).hexdigest()
    require(audit.config_digest == config_digest, "the job's configuration is not the one that it was created with")
    published = "" if audit.published is None else str(audit.published)
    for name, logged in {
        "num_opened": str(len(audit.iterations)),
        "next_iteration": str(audit.next_iteration),
        "policy_version": published,
        "weights_digest": audit.weights_digest,
    }.items():
        require(fields.get(name, "") == logged, f"the job's {name} is {fields.get(name)!r}, by the log {logged!r}")
    if fields["state"] == JobState.SUCCEEDED:
        is_complete = audit.next_iteration == int(fields["num_iterations"])
        require(is_complete, f"the job SUCCEEDED with {audit.next_iteration} of {fields['num_iterations']} commits")


async def check_contents(ledger: Ledger, audit: Audit, num_durable: int) -> int:
    """Every kept group is the accepted one; one of an iteration that is not durable must be kept."""
    found = set()
    async for entry, payload in stored_groups(ledger, audit.job_id):
        if entry not in audit.contents:
            continue  # foreign: no trainer takes it
        group_id, digest = audit.contents[entry]
        require(payload_digest(payload) == digest, f"group {group_id} (entry {entry}) was changed after its acceptance")
        group = decode_group(payload)
        wanted = [] if group.HasField("failure") else [audit.iterations[group.iteration].version]
        is_right = (group.group_id, span_versions(group)) == (group_id, wanted)
        require(is_right, f"entry {entry} holds {group.group_id} of versions {span_versions(group)}, not {group_id}")
        found.add(group_id)
    needed = {group_id for iteration in audit.iterations[num_durable:] for group_id in iteration.digests}
    require(needed <= found, f"lost: groups {', '.join(sorted(needed - found)[:5])} of iterations that are not durable")
    return len(found)


async def stored_groups(ledger: Ledger, job_id: str) -> AsyncIterator[tuple[str, bytes]]:
    last = "-"
    while entries := await ledger.rollouts(job_id, last):
        for entry in entries:
            yield entry
        last = entries[-1][0]
