"""Bounds of a check. An iteration has two groups, and spare ones."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Bounds:
    """A fault: a process dies, an answer is lost, a living process' lease runs out, a group is handed back, an engine
    answers with another version."""

    num_iterations: int = 2
    max_staleness: int = 0
    every_iterations: int = 1  # checkpoints
    num_workers: int = 2
    num_trainers: int = 2
    num_brokers: int = 1  # one that has looked long ago is as good as two, but for opening at the same moment
    num_ranks: int = 1  # ranks of a trainer, which take separate micro-batches
    num_faults: int = 1
    num_spares: int = 0  # prompts of an iteration that may replace others; `does_count` says which groups need none
    num_sources: int = 1  # sources that take turns at the prompts
    first_iteration: int = 0  # a fork begins with it
    num_pauses: int = 0
    num_cancels: int = 0
    num_resumes: int = 0  # resumes of the job after a cancel


SMALL = {
    "trainers": Bounds(num_workers=1),
    "rollouts": Bounds(num_iterations=1, num_brokers=2),
    "bounded": Bounds(max_staleness=1, num_faults=0),
    "ranks": Bounds(num_ranks=2, num_workers=1, num_faults=0),
    "users": Bounds(num_pauses=1, num_cancels=1, num_workers=1, num_faults=0),
    "spares": Bounds(num_spares=1, num_iterations=1, num_workers=1),
    "sources": Bounds(num_sources=2, num_spares=2, num_iterations=1, num_trainers=1, num_faults=0),
    "fork": Bounds(
        num_sources=2, num_spares=2, num_iterations=2, first_iteration=1, num_workers=1, num_trainers=1, num_faults=0
    ),
    "resume": Bounds(
        num_sources=2,
        num_spares=1,
        num_iterations=1,
        num_workers=1,
        num_trainers=1,
        num_faults=0,
        num_cancels=1,
        num_resumes=1,
    ),
}
LARGE = {
    "strict": Bounds(),
    "bounded": Bounds(max_staleness=1, num_workers=1),
    "three faults": Bounds(num_faults=3, num_iterations=1),
    "rare checkpoints": Bounds(every_iterations=2, num_workers=1, num_brokers=2),
    "ranks": Bounds(num_ranks=2, num_workers=1, num_iterations=1),
    "users": Bounds(num_pauses=1, num_cancels=1, num_workers=1, num_iterations=1),
    "spares": Bounds(num_spares=2, num_iterations=1),
}
