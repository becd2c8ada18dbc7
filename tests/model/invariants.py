"""Invariants of every state of a job, and of every call of a script.

`check_call` looks at one call: it may be wrong although both states are right by themselves.
"""

from typing import Any

from onbeat.contracts.errors import IllegalTransition, LeaseLost
from onbeat.contracts.states import JOB_MOVES, IterationState, JobState, Verdict
from onbeat.streams.audit import Audit, AuditViolation, Entry
from onbeat.streams.codec import decode_group, span_versions
from tests.model.store import JOB, NUM_GROUPS, Outcome, State, View


class Violation(Exception):
    """Violation of an invariant."""


def check_call(before: State, name: str, args: tuple[Any, ...], outcome: Outcome, after: State) -> None:
    """Check a call. Raises Violation, naming the call and the rule."""
    try:
        if isinstance(outcome.result, Exception) and not isinstance(outcome.result, LeaseLost | IllegalTransition):
            raise Violation(f"{type(outcome.result).__name__}: {outcome.result}")
        for check in STATES:
            check(after)
        for check_both in CALLS:
            check_both(before.view, name, args, outcome, after.view)
        audit_is_clean(after)  # last, since it tells of much of the above too
    except Violation as violation:
        raise Violation(f"{name}{args}: {violation}") from None


def does_count(group_id: str, source: str = "") -> bool:
    """Return whether the group's rewards differ: those of odd numbers. Of several sources: those from number 3 on, so
    that both first groups are replaced, in either order."""
    index = int(group_id.split("-")[1])
    return index >= 3 if source else index % 2 == 1


def first_iteration(view: View) -> int:
    return int(view.job.get("first_iteration", "0"))


def require(is_right: bool, message: str) -> None:
    if not is_right:
        raise Violation(message)


# ---- in every state --------------------------------------------------------------------------------------------------


def one_version_per_iteration(state: State) -> None:
    """Check that every token of an accepted group is from the one policy version of its iteration."""
    view = state.view
    for payload in view.contents.values():
        group = decode_group(payload)
        versions, wanted = span_versions(group), int(view.iterations[group.iteration]["policy_version"])
        require(versions == [wanted], f"{group.group_id} is of versions {versions}, its iteration is of {wanted}")


def accepted_once(state: State) -> None:
    """Once in the ledger, once in the stream under the entry that the ledger names; only of durable iterations may the
    stream have let go."""
    view = state.view
    stored = [entry.group_id for entry in view.rollouts if entry.state != "deleted"]
    require(len(stored) == len(set(stored)), f"a group is in the stream twice: {stored}")
    num_durable, num_trimmed = (int(view.job.get(name, "0")) for name in ("checkpoint_iteration", "num_trimmed"))
    num_durable = max(num_durable, first_iteration(view))
    require(num_trimmed <= num_durable, f"{num_trimmed} iterations were trimmed, {num_durable} are durable")
    for iteration, groups in view.groups.items():
        accepted = view.accepted(iteration)
        num_accepted = int(view.iterations[iteration]["num_accepted"])
        require(num_accepted == len(accepted), f"iteration {iteration} counts {num_accepted}, accepted are {accepted}")
        num_groups = int(view.iterations[iteration]["num_groups"])
        require(len(groups) == num_groups, f"iteration {iteration} has {len(groups)} groups, not {num_groups}")
        for name in groups:
            is_stored = view.places[name] in view.contents and state.names[view.places[name]] == name
            if name in accepted:
                require(is_stored or iteration < num_trimmed, f"{name} is accepted, and not in the stream")
            else:
                require(name not in stored, f"{name} is in the stream, and not accepted")


def replaced_once(state: State) -> None:
    """Check that an accepted group that does not count is replaced once, by the next spare prompt if there is one."""
    view = state.view
    for iteration, groups in view.groups.items():
        fields = view.iterations[iteration]
        num_replaced = int(fields.get("num_replaced", "0"))
        names = [f"{iteration}-{index}" for index in range(NUM_GROUPS + num_replaced)]
        require(sorted(groups) == names, f"iteration {iteration} has {sorted(groups)}, wanted {names}")
        is_trimmed = iteration < int(view.job.get("num_trimmed", "0"))  # sources went with the contents
        if "num_replaced" in fields and not is_trimmed:
            uncounted = [name for name in view.accepted(iteration) if not does_count(name, view.sources.get(name, ""))]
            num_left, num_short = len(uncounted) - num_replaced, int(fields.get("num_not_replaced", "0"))
            require(num_left == num_short, f"{num_left} groups were not replaced, {num_short} are counted")
            if not view.sources:
                require(not (num_short and view.spares.get(iteration)), "a group was not replaced, and spares are left")


def nothing_lost(state: State) -> None:
    """Check that a waiting group has one entry that a worker holds or can claim, and an accepted one has none."""
    view = state.view
    for iteration in view.groups:
        for name, ledger in view.groups[iteration].items():
            entries = [entry for entry in view.prompts if entry.group_id == name]
            if ledger == "waiting":
                is_claimable = len(entries) == 1 and (entries[0].state == "new" or entries[0].pending is not None)
                require(is_claimable and entries[0].state != "deleted", f"nobody can claim {name}: {entries}")
            else:
                require(not entries, f"{name} is {ledger}, and still has prompts: {entries}")


def trained_once(state: State) -> None:
    """Each group is granted to one micro-batch at most, and only groups of its iteration that are accepted."""
    view = state.view
    for iteration, batches in view.micro_batches.items():
        granted = [name for batch in batches.values() for name in batch.partition("|")[2].split(",")]
        require(len(granted) == len(set(granted)), f"a group was granted twice: {batches}")
        require(set(granted) <= view.accepted(iteration), f"granted {granted}, accepted {view.accepted(iteration)}")
        require(sorted(granted) == view.taken.get(iteration, []), f"granted {granted}, taken {view.taken}")


def iterations_in_order(state: State) -> None:
    """Opened in order and within the bound; drained when all groups are in; committed in order; the published version
    is the number of commits."""
    job, iterations = state.view.job, state.view.iterations
    num_opened, next_iteration = int(job["num_opened"]), int(job["next_iteration"])
    expected = list(range(first_iteration(state.view), num_opened))
    require(sorted(iterations) == expected, f"{num_opened} opened, there are {sorted(iterations)}")
    for number, iteration in iterations.items():
        state_of, num_accepted = iteration["state"], int(iteration["num_accepted"])
        is_committed = state_of == IterationState.COMMITTED
        require(is_committed == (number < next_iteration), f"iteration {number} is {state_of}, next {next_iteration}")
        is_missing_some = num_accepted < int(iteration["num_groups"])
        require((state_of == IterationState.OPEN) == is_missing_some, f"iteration {number} is {state_of}")
        version, oldest = int(iteration["policy_version"]), number - int(job["max_staleness"])
        require(oldest <= version <= number, f"iteration {number} is generated by version {version}")
    if "policy_version" in job:
        published = int(job["policy_version"])
        require(published == next_iteration, f"version {published} is published after {next_iteration} commits")


def audit_is_clean(state: State) -> None:
    """Check that the chain is whole, and records exactly the facts of the ledger."""
    view = state.view
    audit = Audit(JOB, int(view.job["max_staleness"]))
    try:
        audit.read(Entry(str(place), *entry) for place, entry in enumerate(view.audit))
    except AuditViolation as violation:
        raise Violation(str(violation)) from None
    require(audit.next_iteration == int(view.job["next_iteration"]), f"the log has {audit.next_iteration} commits")
    logged = [set(iteration.digests) for iteration in audit.iterations[audit.first_iteration :]]
    accepted = [view.accepted(iteration) for iteration in sorted(view.iterations)]
    require(logged == accepted, f"the log has {logged}, accepted are {accepted}")


STATES = (
    one_version_per_iteration,
    accepted_once,
    replaced_once,
    nothing_lost,
    trained_once,
    iterations_in_order,
)


# ---- along every call ------------------------------------------------------------------------------------------------

OWNED = {"announce", "record", "commit", "checkpointed", "renew_job", "move_job_as"}  # the epoch comes first


def legal_moves(before: View, name: str, args: tuple[Any, ...], outcome: Outcome, after: View) -> None:
    """Check that a job moves along its table."""
    left, reached = JobState(before.job["state"]), JobState(after.job["state"])
    is_resumed = name == "resume" and left.is_final and reached == JobState.PENDING
    require(is_resumed or left == reached or reached in JOB_MOVES[left], f"the job moved from {left} to {reached}")


def fence(before: View, name: str, args: tuple[Any, ...], outcome: Outcome, after: View) -> None:
    """Check that a trainer with an old epoch changes nothing, and is notified."""
    if name in OWNED and args[0] != before.job["epoch"]:
        require(outcome.is_untouched, f"epoch {args[0]} is fenced off, and changed something")
        require(isinstance(outcome.result, LeaseLost), f"epoch {args[0]} is fenced off, and heard {outcome.result}")


def job_lease(before: View, name: str, args: tuple[Any, ...], outcome: Outcome, after: View) -> None:
    """Check that the epoch rises with each claim and each resume, and that no lease is taken before it has run out. A
    resume ends it: whoever had the job before is fenced off."""
    old, new = int(before.job["epoch"]), int(after.job["epoch"])
    require(new in (old, old + 1), f"the epoch went from {old} to {new}")
    if new > old and name != "resume":
        is_free = before.job["lease"] != "fresh" or before.job["state"] == JobState.PENDING
        require(name == "claim_job" and is_free, "the job was claimed from a living trainer")


def group_lease(before: View, name: str, args: tuple[Any, ...], outcome: Outcome, after: View) -> None:
    """Check that a group is claimed only after its lease has run out, and accepted only from its holder."""
    if name == "claim":
        for group_id, _, _ in outcome.result:
            entry = next(entry for entry in before.prompts if entry.group_id == group_id)
            is_free = entry.state == "new" or (entry.pending is not None and entry.pending.lease != "fresh")
            require(is_free, f"{group_id} was claimed from {entry.pending}")
    if name == "submit" and outcome.result == Verdict.ACCEPTED:
        holders = [e.pending.consumer for e in before.prompts if e.group_id == args[1] and e.pending is not None]
        require(holders == [args[0]], f"{args[1]} was accepted from {args[0]}, its holders are {holders}")


def what_is_fixed(before: View, name: str, args: tuple[Any, ...], outcome: Outcome, after: View) -> None:
    """Check that no fact changes later.

    An opened iteration keeps its version and its groups, and gets more only from an accepted group. An accepted group
    keeps its entry, a micro-batch its groups and place, a committed iteration all.
    """
    for number, iteration in before.iterations.items():
        later = after.iterations[number]
        require(iteration["policy_version"] == later["policy_version"], f"iteration {number} changed its version")
        may_grow = name == "submit" and outcome.result == Verdict.ACCEPTED
        is_same = before.groups[number].keys() == after.groups[number].keys()
        is_kept = before.groups[number].keys() <= after.groups[number].keys()
        require(is_same or (may_grow and is_kept), f"iteration {number} has other groups")
        for group_id in before.accepted(number):
            require(before.places[group_id] == after.places[group_id], f"{group_id} was accepted again")
        recorded, later_recorded = before.micro_batches.get(number, {}), after.micro_batches.get(number, {})
        is_kept = recorded.items() <= later_recorded.items() or name == "trim"
        require(is_kept, f"the micro-batches {recorded} became {later_recorded}")
        if iteration["state"] == IterationState.COMMITTED:
            require(iteration == later, f"iteration {number} is committed, and became {later}")


def openings(before: View, name: str, args: tuple[Any, ...], outcome: Outcome, after: View) -> None:
    """Check that an iteration opens on the published version, in a running job."""
    for number in after.iterations.keys() - before.iterations.keys():
        version, published = after.iterations[number]["policy_version"], before.job.get("policy_version")
        require(version == published, f"iteration {number} opened on version {version}, published is {published}")
        require(before.job["state"] == JobState.RUNNING, f"iteration {number} opened, the job is {before.job['state']}")


def commits(before: View, name: str, args: tuple[Any, ...], outcome: Outcome, after: View) -> None:
    """Check that a trainer commits exactly the accepted groups, once, with the weights that are published then."""
    if name == "commit" and not isinstance(outcome.result, Exception):
        _, iteration, digest, trained = args
        require(set(trained) == before.accepted(iteration), f"{trained} were used of {before.accepted(iteration)}")
        is_first = before.iterations[iteration]["state"] != IterationState.COMMITTED
        require(outcome.result == is_first, f"the trainer hears {outcome.result}")
        require(after.iterations[iteration]["weights_digest"] == digest, "other weights were committed")
    if name != "commit":
        require(before.job["next_iteration"] == after.job["next_iteration"], "an iteration was committed")


def replacements(before: View, name: str, args: tuple[Any, ...], outcome: Outcome, after: View) -> None:
    """Check that an accepted group that does not count brings one more of its source, if that has a spare prompt."""
    if name == "submit" and outcome.result == Verdict.ACCEPTED:
        _, group_id, _, source = args
        iteration = int(group_id.split("-")[0])
        spares = before.spares.get(iteration, [])
        is_due = not does_count(group_id, source) and (source in spares if source else bool(spares))
        more = sorted(after.groups[iteration].keys() - before.groups[iteration].keys())
        sources = [after.sources.get(name, "") for name in more]
        require(sources == [source] * is_due, f"{group_id} of {source!r} brought {more} of {sources}, spare: {spares}")


CALLS = (legal_moves, fence, job_lease, group_lease, what_is_fixed, openings, commits, replacements)
