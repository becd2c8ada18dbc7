"""The groups of a job that have the same prompt: an index of its rollouts stream by a digest of the text.

Accepted groups never change, so each is read once; a query reads the entries since the last one. It reads in slices, so
that other tasks have their turn, and with one reader per job at a time. A broker that restarts reads everything again.
"""

import asyncio
import contextlib
from collections import deque
from dataclasses import dataclass, field
from functools import lru_cache
from statistics import fmean
from typing import NamedTuple

from blake3 import blake3
from pydantic_core import from_json

from onbeat.contracts.records import GroupSummary
from onbeat.streams.codec import RolloutGroup, decode_group
from onbeat.streams.inspection import accepted_entries, stored_groups
from onbeat.streams.ledger import Ledger
from onbeat.streams.records import Fields
from onbeat.streams.stream_ids import id_before
from services.broker.views.records import group_order

MAX_JOBS = 4  # the jobs queried last
MAX_GROUPS = 20_000  # per job: the newest
MAX_ALIKE = 1000  # per answer: the newest
SLICE = 16  # groups
READ_S = 10.0  # per query; groups read by then stay in the index


class StillReading(Exception):
    """The job has more groups than can be read in one query."""


class Place(NamedTuple):
    """A group in the stream."""

    entry: str
    prompt: bytes  # digest
    group: GroupSummary


@dataclass
class Prompts:
    """The index of one job, as far as its stream has been read."""

    last: str = ""  # the last entry that was read; none yet
    places: deque[Place] = field(default_factory=lambda: deque(maxlen=MAX_GROUPS))  # in the order of the stream
    reading: asyncio.Lock = field(default_factory=asyncio.Lock)

    def add(self, entry: str, payload: bytes) -> None:
        self.last = entry
        with contextlib.suppress(ValueError):  # an entry of another program
            group = decode_group(payload)
            self.places.append(Place(entry, digest_of(group.prompt_text), summary_of(group)))


class Alike:
    """The indices of all jobs of one broker."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._index_of = lru_cache(MAX_JOBS)(lambda _job_id: Prompts())

    async def find(self, job_id: str, prompt: str) -> list[GroupSummary]:
        """Return the kept groups with this prompt, by iteration and number. Raises JobNotFound, StillReading."""
        job = await self._ledger.jobs.fields(job_id)
        first_kept = int(job.get("num_trimmed", "0"))
        prompts = self._index_of(job_id)
        try:
            async with asyncio.timeout(READ_S), prompts.reading:
                prompts.last = prompts.last or await self._start(job_id, job, first_kept)
                async for entry, payload in stored_groups(self._ledger, job_id, prompts.last, SLICE):
                    prompts.add(entry, payload)
        except TimeoutError as error:
            raise StillReading(f"the groups of job {job_id} are still being read; ask again") from error
        wanted = digest_of(prompt)
        alike = [each for each in prompts.places if each.prompt == wanted and each.group.iteration >= first_kept]
        found = alike[-MAX_ALIKE:]
        names = [(place.group.iteration, place.group.group_id) for place in found]
        accepted = await accepted_entries(self._ledger, job_id, names)
        # Entries in the stream that were not accepted are left out: no trainer takes them.
        known = [place.group for place, entry in zip(found, accepted, strict=True) if place.entry == entry]
        return sorted(known, key=lambda group: group_order(group.group_id))

    async def _start(self, job_id: str, job: Fields, first_kept: int) -> str:
        """Return the entry before the oldest iteration that fits into the index."""
        rollout = from_json(job["config"])["rollout"]
        num_prompts = int(rollout.get("max_prompts_per_iteration") or rollout["num_prompts_per_iteration"])
        first = int(job["num_opened"]) - max(1, MAX_GROUPS // num_prompts)
        accepted = await self._ledger.iterations.accepted_entries(job_id, first) if first > first_kept else []
        return id_before(accepted[0]) if accepted else "-"


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
