"""The deadlines of jobs, and the rules by which they are counted: watcher and retention act on them, the doctor
explains them. docs/operating.md has a table of the durations."""

from collections.abc import Iterable
from itertools import takewhile

from onbeat.contracts.records import Event, TrainerRecord
from onbeat.contracts.states import JobState
from onbeat.streams.records import Fields

ARRIVAL_S = 60.0  # trainers that start together with a broker have this long before an old pending job fails
CANCEL_GRACE_S = 120.0  # a trainer that holds its lease has this long to stop after a cancel; its job ends all the same
RECENT_S = 600.0  # the doctor mentions a dead process that holds nothing for this long
JOB_FAILS = "the job fails"  # the `next` of findings about a deadline of the whole job


def trainers_away_s(fields: Fields, trainers: Iterable[TrainerRecord], now: float) -> float:
    """Return the seconds since a pending job could last have been taken: while trainers of its pool are alive, it
    rightly waits its turn."""
    return now - max([queued_at(fields), *(trainer.last_seen_at for trainer in trainers)])


def queued_at(fields: Fields) -> float:
    """Return the Unix time since which a pending job has waited: a job that was over may have been resumed."""
    return float(fields.get("queued_at", fields["created_at"]))


def num_lost_trainers(newest_first: Iterable[Event]) -> int:
    """Count trainers that were lost since the last commit, or since the job was resumed, as far back as events are
    kept: those that another one took over from, and that had not handed the job over."""
    num_lost, is_handed_over = 0, False
    for event in reversed(list(takewhile(lambda event: not is_fresh_start(event), newest_first))):
        if event.kind == "job.handed_over":
            is_handed_over = True
        elif event.kind == "job.taken_over":
            num_lost, is_handed_over = num_lost + (not is_handed_over), False
    return num_lost


def is_fresh_start(event: Event) -> bool:
    """Return whether the count of lost trainers begins again here: at a commit, or at a resume."""
    return event.kind == "iteration.committed" or event.data.get("state") == JobState.PENDING
