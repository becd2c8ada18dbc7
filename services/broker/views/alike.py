"""The groups of a job that have the same prompt: an index of its rollouts stream by a digest of the text.

Accepted groups never change, so each is read once; a query reads the entries since the last one. It reads in slices, so
that other tasks have their turn, and with one reader per job at a time. A broker that restarts reads everything again.
"""

import asyncio
import json
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from statistics import fmean
from typing import NamedTuple

from blake3 import blake3

from onbeat.streams.codec import RolloutGroup, decode_group
from onbeat.streams.inspection import accepted_entries
from onbeat.streams.ledger import Ledger
from onbeat.streams.records import Fields
from onbeat.streams.stream_ids import id_before
from onbeat.types import GroupSummary
from services.broker.views.records import group_order

MAX_JOBS = 4  # the jobs queried last
MAX_GROUPS = 20_000  # per job: the newest
MAX_ALIKE = 1000  # per answer: the newest
SLICE = 16  # groups
READ_S = 10.0  # per query; groups read by then stay in the index


class StillReading(Exception):
    """The job has more groups than can be read in one query."""

    def __init__(self, job_id: str) -> None:
        super().__init__(f"the groups of job {job_id} are still being read; ask again")


class Place(NamedTuple):
    """A group in the stream."""

    entry: str
    prompt: bytes  # digest
    group: GroupSummary


@dataclass
class Prompts:
    """The index of one job, as far as its stream has been read."""

    cursor: str | None = None  # the last entry that was read; None: not begun
    places: deque[Place] = field(default_factory=deque)  # in the order of the stream
    by_prompt: dict[bytes, deque[Place]] = field(default_factory=dict)
    reading: asyncio.Lock = field(default_factory=asyncio.Lock)

    def add(self, place: Place) -> None:
        self.places.append(place)
        self.by_prompt.setdefault(place.prompt, deque()).append(place)
        if len(self.places) > MAX_GROUPS:
            oldest = self.places.popleft()
            alike = self.by_prompt[oldest.prompt]
            alike.popleft()
            if not alike:
                del self.by_prompt[oldest.prompt]


class Alike:
    """The indices of all jobs of one broker."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._jobs: OrderedDict[str, Prompts] = OrderedDict()

    async def find(self, job_id: str, prompt: str) -> list[GroupSummary]:
        """Return the kept groups with this prompt, by iteration and number. Raises JobNotFound, StillReading."""
        job = await self._ledger.jobs.fields(job_id)
        first_kept = int(job.get("num_trimmed", "0"))
        prompts = self._prompts_of(job_id)
        try:
            async with asyncio.timeout(READ_S), prompts.reading:
                prompts.cursor = prompts.cursor or await self._start(job_id, job)
                await self._read_on(job_id, prompts)
        except TimeoutError as error:
            raise StillReading(job_id) from error
        alike = prompts.by_prompt.get(digest_of(prompt), ())
        found = [place for place in alike if place.group.iteration >= first_kept][-MAX_ALIKE:]
        names = [(place.group.iteration, place.group.group_id) for place in found]
        accepted = await accepted_entries(self._ledger, job_id, names)
        # Entries in the stream that were not accepted are left out: no trainer takes them.
        known = [place.group for place, entry in zip(found, accepted, strict=True) if place.entry == entry]
        return sorted(known, key=lambda group: group_order(group.group_id))

    def _prompts_of(self, job_id: str) -> Prompts:
        prompts = self._jobs.setdefault(job_id, Prompts())
        self._jobs.move_to_end(job_id)
        while len(self._jobs) > MAX_JOBS:
            self._jobs.popitem(last=False)
        return prompts

    async def _start(self, job_id: str, job: Fields) -> str:
        """Return the entry before the oldest iteration that fits into the index."""
        rollout = json.loads(job["config"])["rollout"]
        num_prompts = int(rollout.get("max_prompts_per_iteration") or rollout["num_prompts_per_iteration"])
        first = int(job["num_opened"]) - max(1, MAX_GROUPS // num_prompts)
        if first <= int(job.get("num_trimmed", "0")):
            return "-"
        accepted = await self._ledger.iterations.accepted_entries(job_id, first)
        return id_before(accepted[0]) if accepted else "-"

    async def _read_on(self, job_id: str, prompts: Prompts) -> None:
        """Read to the end of the stream."""
        assert prompts.cursor is not None, "it is not said where to begin"
        while entries := await self._ledger.audit_log.rollouts(job_id, prompts.cursor, SLICE):
            for entry, payload in entries:
                try:
                    group = decode_group(payload)
                    prompts.add(Place(entry, digest_of(group.prompt_text), summary_of(group)))
                except ValueError:  # an entry of another program
                    continue
            prompts.cursor = entries[-1][0]
            await asyncio.sleep(0)


def digest_of(prompt: str) -> bytes:
    return blake3(prompt.encode()).digest(length=16)


def summary_of(group: RolloutGroup) -> GroupSummary:
    rewards = [response.reward for response in group.responses]
    return GroupSummary(
        iteration=group.iteration,
        group_id=group.group_id,
        policy_version=group.policy_version,
        num_responses=len(rewards),
        reward_mean=fmean(rewards) if rewards else None,
    )
