"""Prompts chosen by what the ledger knows of their rows: `data.order = "difficulty"`.

Of row i, s and n are the solved responses and all with a reward, decayed: at each visit both are multiplied by `decay`
and the visit's numbers are added. With a prior of a solved responses and a unsolved ones,

    p_i = (s + a) / (n + 2a)           the solved share
    1 - p_i^G - (1 - p_i)^G            the probability that a group of G responses is mixed, while the policy stays

It does not stay: a row that was mixed is often solved at its next visit. So the expected signal is what came true.
Visits are counted by the p_i before them, in tenths. Of v visits m were mixed; both fade with each iteration:

    (m + 1 - p_i^G - (1 - p_i)^G) / (v + 1)

First visits are counted for themselves, with (m + 1/2) / (v + 1) for rows that no iteration had.

Each prompt that is not to explore takes the row with the highest expected signal; one that explores takes a row that no
iteration had, then the one not seen for longest. A row rests for an eighth of an epoch after each visit. Levels of a
generated task are chosen by the probability alone, do not rest, are explored in turn, and begin with the first.

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

FADING = 0.9  # factor per iteration of the counted visits: the policy changes
UNKNOWN = -1  # instead of the tenth of a solved share, of rows that no iteration had
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
class Visits:
    """Visits of rows with nearly the same solved share, and those of them whose groups were mixed."""

    made: float = 0.0
    mixed: float = 0.0


NO_VISITS = Visits()


@dataclass
class Knowledge:
    """The ledger's knowledge about the rows of one source. Outcomes are added iteration by iteration."""

    settings: DifficultyConfig
    rows: dict[int, Row] = field(default_factory=dict)
    visits: dict[int, Visits] = field(default_factory=dict)  # tenth of the solved share before the visit, or UNKNOWN

    def add_outcomes(self, iteration: int, outcomes: Iterable[Outcome]) -> None:
        """Add an iteration's outcomes; several of one row are one visit, so that their order does not matter."""
        sums: dict[int, list[int]] = {}
        for outcome in outcomes:
            row_sums = sums.setdefault(outcome.row, [0, 0])
            row_sums[0] += outcome.num_solved
            row_sums[1] += outcome.num_rewarded
        for visits in self.visits.values():
            visits.made *= FADING
            visits.mixed *= FADING
        for number, (num_solved, num_rewarded) in sums.items():
            row = self.rows.setdefault(number, Row())
            if num_rewarded:
                visits = self.visits.setdefault(tenth(self.solved_share(number)), Visits())
                visits.made += 1
                visits.mixed += 0 < num_solved < num_rewarded
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

    def expected_signal(self, share: float | None, num_samples: int) -> float:
        """Return the expected signal of a row with this solved share; None: of one that no iteration had."""
        visits = self.visits.get(tenth(share), NO_VISITS)
        first_guess = 0.5 if share is None else mixed_probability(share, num_samples)
        return (visits.mixed + first_guess) / (visits.made + 1)

    def is_in_band(self, number: int) -> bool:
        share, (low, high) = self.solved_share(number), self.settings.band
        return share is not None and low <= share <= high

    def to_json(self) -> str:
        rows = {str(number): [row.solved, row.rewarded, row.seen_in] for number, row in self.rows.items()}
        visits = {str(share): [visits.made, visits.mixed] for share, visits in self.visits.items()}
        return json.dumps({"rows": rows, "visits": visits})

    @classmethod
    def from_json(cls, settings: DifficultyConfig, text: str) -> "Knowledge":
        stored = json.loads(text)
        rows = {int(number): Row(*values) for number, values in stored["rows"].items()}
        visits = {int(share): Visits(*values) for share, values in stored.get("visits", {}).items()}
        return cls(settings, rows, visits)


def tenth(share: float | None) -> int:
    """Return the number that visits of rows with this solved share are counted by."""
    return UNKNOWN if share is None else round(10 * share)


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
        number: knowledge.expected_signal(knowledge.solved_share(number), num_samples)
        for number in rested
        if knowledge.is_in_band(number)
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
    expected_of_unseen, taken = knowledge.expected_signal(None, num_samples), set[int]()
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
        picks.append(Pick(number, why, share, knowledge.expected_signal(share, num_samples)))
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
