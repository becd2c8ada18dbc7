"""Prompts chosen by what the ledger knows of their rows: `data.order = "difficulty"`.

Of row i, s and n are the solved responses and all with a reward, decayed: at each visit both are multiplied by `decay`
and the visit's numbers are added. With a prior of a solved responses and a unsolved ones,

    p_i = (s + a) / (n + 2a)           the solved share
    1 - p_i^G - (1 - p_i)^G            the expected signal: the probability that a group of G responses is mixed

Rows that no iteration had are expected to be mixed as often as the rows were that iterations had for the first time.
Each prompt that is not to explore takes the row with the highest expected signal; one that explores takes a row that no
iteration had, then the one not seen for longest. A row rests for an eighth of an epoch after each visit. Levels of a
generated task are chosen in the same way, but do not rest, are explored in turn, and begin with the first.

All of it is a pure function of the recorded outcomes, the recorded choices, the job and the number of the iteration.
Powers are products in a fixed order, so that every machine comes to the same choice.
"""

import heapq
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import accumulate
from zlib import crc32

from onbeat.config.data import DifficultyConfig
from onbeat.streams.outcomes import Outcome
from services.broker.datasets.files import epoch_order

FIRST_DECAY = 0.8  # factor per iteration of the counts of first visits: the policy changes
REST = 8  # a row rests for 1/REST of an epoch after a visit
SIGNAL, UNSEEN, OLDEST, EXPLORED = "signal", "unseen", "oldest", "explored"  # why a row or level was chosen


@dataclass(frozen=True)
class Pick:
    """A row or level that was chosen for a prompt. `solved`: its estimated solved share; None: no iteration had it."""

    row: int
    why: str
    solved: float | None
    expected: float  # signal
    is_level: bool = False

    @property
    def words(self) -> str:
        """The pick in words: `Row 17 was chosen for its expected signal of 84%; 43% solved before.`"""
        reason = {
            SIGNAL: f"for its expected signal of {self.expected:.0%}",
            UNSEEN: "because no iteration had it yet",
            OLDEST: "because it was not seen for longest",
            EXPLORED: "to explore the levels",
        }[self.why]
        before = "" if self.solved is None else f"; {self.solved:.0%} solved before"
        return f"{'Level' if self.is_level else 'Row'} {self.row} was chosen {reason}{before}."

    @property
    def rounded(self) -> "Pick":
        """The pick as it is recorded."""
        solved = None if self.solved is None else round(self.solved, 4)
        return replace(self, solved=solved, expected=round(self.expected, 4))


@dataclass
class Row:
    solved: float = 0.0
    rewarded: float = 0.0
    seen_in: int = -1  # the last iteration that had it

    @property
    def is_known(self) -> bool:
        return self.rewarded > 0


@dataclass
class Knowledge:
    """The ledger's knowledge about the rows of one source. Outcomes are added iteration by iteration."""

    settings: DifficultyConfig
    rows: dict[int, Row] = field(default_factory=dict)
    num_first: float = 0.0  # decayed number of first visits with a reward
    num_first_mixed: float = 0.0

    def add_outcomes(self, iteration: int, outcomes: Iterable[Outcome]) -> None:
        """Add an iteration's outcomes; several of one row are one visit, so that their order does not matter."""
        visits: dict[int, list[int]] = {}
        for outcome in outcomes:
            visit = visits.setdefault(outcome.row, [0, 0])
            visit[0] += outcome.num_solved
            visit[1] += outcome.num_rewarded
        self.num_first *= FIRST_DECAY
        self.num_first_mixed *= FIRST_DECAY
        for number, (num_solved, num_rewarded) in visits.items():
            row = self.rows.setdefault(number, Row())
            if num_rewarded and not row.is_known:
                self.num_first += 1
                self.num_first_mixed += 0 < num_solved < num_rewarded
            if num_rewarded:
                row.solved = self.settings.decay * row.solved + num_solved
                row.rewarded = self.settings.decay * row.rewarded + num_rewarded
            row.seen_in = max(row.seen_in, iteration)

    def add_choice(self, iteration: int, rows: Iterable[int]) -> None:
        """Add rows that an iteration has, whatever comes of them."""
        for number in rows:
            row = self.rows.setdefault(number, Row())
            row.seen_in = max(row.seen_in, iteration)

    def solved_share(self, number: int) -> float | None:
        row, prior = self.rows.get(number), self.settings.prior
        return None if row is None or not row.is_known else (row.solved + prior) / (row.rewarded + 2 * prior)

    def expected_signal(self, number: int, num_samples: int) -> float:
        """Return the probability that a group of a row that an iteration had is mixed; 0 if all its groups failed."""
        share = self.solved_share(number)
        return 0.0 if share is None else mixed_probability(share, num_samples)

    def expected_of_unseen(self) -> float:
        prior = self.settings.prior
        return (self.num_first_mixed + prior) / (self.num_first + 2 * prior)

    def is_in_band(self, number: int) -> bool:
        share, (low, high) = self.solved_share(number), self.settings.band
        return share is not None and low <= share <= high

    def to_json(self) -> str:
        rows = {str(number): [row.solved, row.rewarded, row.seen_in] for number, row in self.rows.items()}
        return json.dumps({"rows": rows, "first": [self.num_first, self.num_first_mixed]})

    @classmethod
    def from_json(cls, settings: DifficultyConfig, text: str) -> "Knowledge":
        stored = json.loads(text)
        rows = {int(number): Row(*values) for number, values in stored["rows"].items()}
        return cls(settings, rows, *stored["first"])


def mixed_probability(share: float, num_samples: int) -> float:
    """Return the probability that of independent responses some are solved and some are not.

    >>> mixed_probability(0.5, 2), mixed_probability(0.0, 8)
    (0.5, 0.0)
    """
    return max(0.0, 1.0 - math.prod([share] * num_samples) - math.prod([1.0 - share] * num_samples))


def explores(prompt: int, explore: float) -> bool:
    """Return whether prompt number `prompt` of a source explores: after each prompt, the share of those that do is
    within one prompt of `explore`.

    >>> [prompt for prompt in range(10) if explores(prompt, 0.3)]
    [3, 6, 9]
    """
    return math.floor((prompt + 1) * explore + 1e-9) > math.floor(prompt * explore + 1e-9)


def choose_rows(
    knowledge: Knowledge,
    candidates: Sequence[int],
    prompts: Sequence[int],
    iteration: int,
    num_samples: int,
    seed: int,
) -> list[Pick]:
    """Choose a row for each prompt, given by its number in the source. `candidates`: the usable rows, ascending.

    A row comes twice in an iteration only if there are fewer rows than prompts.
    """
    picks: list[Pick] = []
    while len(picks) < len(prompts):
        wanted = prompts[len(picks) :]
        picks += choose_once(knowledge, candidates, wanted, iteration, num_samples, seed)
    return picks


def choose_once(
    knowledge: Knowledge,
    candidates: Sequence[int],
    prompts: Sequence[int],
    iteration: int,
    num_samples: int,
    seed: int,
) -> list[Pick]:
    """Choose different rows for the first of these prompts, or all of them."""
    usable = candidates if isinstance(candidates, range) else set(candidates)
    seen = [number for number in knowledge.rows if number in usable]
    rest = max(1, len(candidates) // (REST * len(prompts)))
    rested = [number for number in seen if iteration - knowledge.rows[number].seen_in > rest]
    signals = {
        number: knowledge.expected_signal(number, num_samples) for number in rested if knowledge.is_in_band(number)
    }

    def scramble(number: int) -> int:
        return crc32(f"{seed}/{iteration}/{number}".encode())

    count = len(prompts)
    best = heapq.nsmallest(count, signals, key=lambda number: (-signals[number], scramble(number)))
    oldest = heapq.nsmallest(count, seen, key=lambda number: (knowledge.rows[number].seen_in, scramble(number)))
    unseen = (candidates[place] for place in first_order(seed, len(candidates)))
    queues = {
        SIGNAL: Queue(best),
        UNSEEN: Queue(number for number in unseen if number not in knowledge.rows),
        OLDEST: Queue(oldest),
    }
    expected_of_unseen, taken = knowledge.expected_of_unseen(), set[int]()
    picks = []
    for prompt in prompts:
        order = (UNSEEN, OLDEST, SIGNAL) if explores(prompt, knowledge.settings.explore) else (SIGNAL, UNSEEN, OLDEST)
        best_left, unseen_left = queues[SIGNAL].first(taken), queues[UNSEEN].first(taken)
        is_weak = best_left is not None and signals[best_left] < expected_of_unseen
        if order[0] == SIGNAL and is_weak and unseen_left is not None:
            order = (UNSEEN, SIGNAL, OLDEST)
        why = next((why for why in order if queues[why].first(taken) is not None), None)
        if why is None:
            break
        number = queues[why].first(taken)
        assert number is not None
        taken.add(number)
        share = knowledge.solved_share(number)
        expected = expected_of_unseen if share is None else mixed_probability(share, num_samples)
        picks.append(Pick(number, why, share, expected))
    return picks


@lru_cache(maxsize=4)
def first_order(seed: int, num_rows: int) -> Sequence[int]:
    """Return the order in which rows are explored: that of the first epoch of shuffled rows."""
    return epoch_order(seed, 0, num_rows)


class Queue:
    """Numbers in the order in which they are to be taken, unless another queue has given them."""

    def __init__(self, numbers: Iterable[int]) -> None:
        self._numbers: Iterator[int] = iter(numbers)
        self._first: int | None = next(self._numbers, None)

    def first(self, taken: set[int]) -> int | None:
        while self._first is not None and self._first in taken:
            self._first = next(self._numbers, None)
        return self._first


def choose_levels(knowledge: Knowledge, num_levels: int, prompts: Sequence[int], num_samples: int) -> list[Pick]:
    """Choose a level for each prompt, given by its number in the source: that with the highest expected signal, the
    easier one of two; those that explore take all levels in turn.

    No level counts as solved more often than an easier one: a few failures at a hard one would say less than the prior.
    """
    shares = [knowledge.solved_share(level) for level in range(num_levels)]
    known = accumulate((1.0 if share is None else share for share in shares), min)
    signals = [
        0.0 if share is None else mixed_probability(easiest, num_samples)
        for share, easiest in zip(shares, known, strict=True)
    ]
    best = max(range(num_levels), key=lambda level: (signals[level], -level))
    picks, explore = [], knowledge.settings.explore
    for prompt in prompts:
        is_explored = explores(prompt, explore)
        level = math.floor(prompt * explore + 1e-9) % num_levels if is_explored else best
        why = EXPLORED if is_explored else SIGNAL
        picks.append(Pick(level, why, shares[level], signals[level], is_level=True))
    return picks
