"""The audit log of a job: a chain of entries, which the scripts write when they accept a group or commit a version.

Each entry is a line of tab-separated words, and a link: SHA-1 of the previous link, a line feed, and the line (the only
hash that Redis scripts have; configuration, groups and weights are in the lines by BLAKE3).

    created    job id, digest of the configuration, of a fork also its first iteration
    extended   digest of the configuration, number of iterations    the job got more of them when it had done all
    teacher    digest of the frozen model that the job learns from, before its first commit
    published  version, digest of the weights                       the first version; later ones by their commit
    opened     iteration, policy version, number of groups, digest of the choice of its prompts if outcomes decide
    rows       iteration, number of rows, digest of the rows     a supervised iteration was opened with these examples
    accepted   iteration, group id, versions of its tokens, worker, entry of the rollouts stream, group_digest, failure
               (of a row no versions, and the trainer that tokenised it)
    replaced   iteration, group id, group id of the next spare prompt   the accepted group has no signal
               (in a job of several sources the next one of the same source, which gets the next group id)
    committed  iteration, version, is_published, digest of the weights, used_digest

A clean log proves: one policy version per iteration and group, each group accepted once and used by exactly one commit,
each iteration opened and committed once and in order.
"""

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from onbeat.streams.codec import used_digest


@dataclass(frozen=True)
class Entry:
    id: str
    line: str
    link: str


class AuditViolation(Exception):
    """The first entry that breaks a rule, and the rule."""


@dataclass
class Iteration:
    version: int
    num_groups: int
    choice: str = ""  # digest of how its prompts were chosen; empty: not by outcomes
    digests: dict[str, str] = field(default_factory=dict)  # group id -> group_digest
    entries: dict[str, str] = field(default_factory=dict)  # group id -> entry of the rollouts stream
    num_before: dict[str, int] = field(default_factory=dict)  # group id -> number of groups just before its acceptance
    replaced: dict[str, str] = field(default_factory=dict)  # accepted groups that do not count -> those in their place
    num_failed: int = 0  # accepted groups without responses
    weights_digest: str = ""  # digest of the version that it made
    is_supervised: bool = False  # true if the groups are rows of examples, which no policy generated


@dataclass
class Audit:
    """A check of one job's entries, read in order; it raises AuditViolation at the first entry that breaks a rule."""

    job_id: str
    max_staleness: int
    kept_head: str = ""  # a link that was kept outside of the log, and must be in it
    link: str = ""
    has_kept_head: bool = False
    num_entries: int = 0
    config_digest: str = ""
    published: int | None = None
    first_iteration: int = 0  # earlier ones are of the job that this one was forked from
    next_iteration: int = 0  # the next iteration to be committed
    weights_digest: str = ""  # digest of the newest published version
    teacher_digest: str = ""
    digests: dict[int, str] = field(default_factory=dict)  # policy version -> digest of its weights
    iterations: list[Iteration] = field(default_factory=list)

    def read(self, entries: Iterable[Entry]) -> None:
        for entry in entries:
            kind, *words = entry.line.split("\t")
            try:
                self._check_link(entry)
                require(kind in RULES, f"{kind!r} is no kind of entry")
                RULES[kind](self, *words)
            except (AuditViolation, TypeError, ValueError, IndexError) as error:
                raise AuditViolation(f"audit entry {entry.id} ({entry.line[:120]!r}): {error}") from error
            self.num_entries += 1

    def _check_link(self, entry: Entry) -> None:
        link = hashlib.sha1(f"{self.link}\n{entry.line}".encode(), usedforsecurity=False).hexdigest()
        require(entry.link == link, "its link does not follow from the entry before: the log was changed")
        self.link = link
        self.has_kept_head |= link == self.kept_head

    def _created(self, job_id: str, config_digest: str, first_iteration: str = "0") -> None:
        require(self.num_entries == 0, "a job is created once, and first")
        require(job_id == self.job_id, f"it is the log of another job, {job_id}")
        self.config_digest = config_digest
        self.first_iteration = self.next_iteration = int(first_iteration)
        self.iterations = [Iteration(version=0, num_groups=0) for _ in range(self.first_iteration)]

    def _extended(self, config_digest: str, num_iterations: str) -> None:
        require(len(self.iterations) == self.next_iteration, "a job gets more iterations when all of its own are done")
        require(int(num_iterations) > self.next_iteration, f"it has made {self.next_iteration} iterations")
        self.config_digest = config_digest

    def _teacher(self, digest: str) -> None:
        require(not self.teacher_digest, "the job has a teacher already")
        require(self.next_iteration == self.first_iteration, "the job began without a teacher")
        self.teacher_digest = digest

    def _published(self, version: str, digest: str) -> None:
        require(self.published is None, "later versions are published by their commit")
        self.published, self.weights_digest = int(version), digest
        self.digests[int(version)] = digest

    def _opened(self, iteration: str, version: str, num_groups: str, choice: str = "") -> None:
        number = int(iteration)
        require(number == len(self.iterations), f"the next iteration to open is {len(self.iterations)}")
        require(int(version) == self.published, f"the published version is {self.published}")
        require(number - int(version) <= self.max_staleness, f"versions may be {self.max_staleness} older at most")
        self.iterations.append(Iteration(int(version), int(num_groups), choice))

    def _rows(self, iteration: str, num_rows: str, _digest: str) -> None:
        number = int(iteration)
        require(number == len(self.iterations), f"the next iteration to open is {len(self.iterations)}")
        require(number == self.next_iteration, f"the next iteration to commit is {self.next_iteration}")
        self.iterations.append(Iteration(number, int(num_rows), is_supervised=True))

    def _accepted(
        self, iteration: str, group_id: str, versions: str, _worker: str, stream_entry: str, digest: str, failure: str
    ) -> None:
        opened = self.iterations[int(iteration)]
        require(group_id not in opened.digests, "the group was accepted before")
        require(len(opened.digests) < opened.num_groups, f"the iteration has {opened.num_groups} groups only")
        wanted = "" if failure or opened.is_supervised else str(opened.version)
        require(versions == wanted, f"its tokens are of versions [{versions}], the iteration's is {opened.version}")
        opened.digests[group_id], opened.entries[group_id] = digest, stream_entry
        opened.num_failed += bool(failure)
        opened.num_before[group_id] = opened.num_groups

    def _replaced(self, iteration: str, group_id: str, next_id: str) -> None:
        opened = self.iterations[int(iteration)]
        require(group_id in opened.digests, "the group was not accepted")
        require(group_id not in opened.replaced, "the group was replaced before")
        wanted = f"{iteration}-{opened.num_groups}"
        require(next_id == wanted, f"{next_id} took its place, {wanted} is the next prompt")
        opened.replaced[group_id] = next_id
        opened.num_groups += 1

    def _committed(self, iteration: str, version: str, is_published: str, digest: str, used: str) -> None:
        number = int(iteration)
        require(number == self.next_iteration, f"the next iteration to commit is {self.next_iteration}")
        opened = self.iterations[number]
        require(len(opened.digests) == opened.num_groups, f"{len(opened.digests)} of {opened.num_groups} groups are in")
        require(int(version) == number + 1, f"iteration {number} makes version {number + 1}")
        require(used == used_digest(opened.digests), "the step used other groups than those that were accepted")
        opened.weights_digest = self.digests[int(version)] = digest
        self.next_iteration = number + 1
        if is_published == "1":
            self.published, self.weights_digest = int(version), digest


RULES: dict[str, Callable[..., None]] = {
    "created": Audit._created,
    "extended": Audit._extended,
    "teacher": Audit._teacher,
    "published": Audit._published,
    "opened": Audit._opened,
    "rows": Audit._rows,
    "accepted": Audit._accepted,
    "replaced": Audit._replaced,
    "committed": Audit._committed,
}


def require(is_right: bool, message: str) -> None:
    if not is_right:
        raise AuditViolation(message)
