"""The rollout's own measurements: busy time per iteration, tokens per second, Prometheus counters."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise

from prometheus_client import Counter, Gauge, Histogram, Summary

from onbeat.contracts.intervals import Interval, union_of
from onbeat.contracts.records import WeightUpdate

WEIGHT_BUCKETS_S = (0.03, 0.1, 0.3, 1, 3, 10, 60)

GROUPS = Counter("onbeat_rollout_groups", "Groups by what became of them", ["outcome"])
RESPONSE_TOKENS = Counter("onbeat_rollout_response_tokens", "Tokens of finished responses")
RELEASED = Counter("onbeat_rollout_released_groups", "Leases handed back after an error")
HANDED_BACK = Counter("onbeat_rollout_handed_back_groups", "Leases handed back: after an error, a stop or a move")
DISCARDED_TOKENS = Counter("onbeat_rollout_discarded_tokens", "Tokens sampled for groups that came to nothing here")
REWARD_TRIES = Counter("onbeat_rollout_reward_tries", "Tries to score a group: scored, or why not", ["outcome"])
JUDGE_TOKENS = Counter("onbeat_rollout_judge_tokens", "Tokens that judges read and wrote, by their count", ["kind"])
JUDGE_REWARD_BY_PLACE = Summary(
    "onbeat_rollout_judge_reward_by_place",
    "Rewards of compared responses by the half in which they were shown",
    ["half"],
)
JUDGE_PAIRS = Counter("onbeat_rollout_judge_pairs", "Pairs that judges compared: decided, tied or failed", ["outcome"])
IN_FLIGHT = Gauge("onbeat_rollout_groups_in_flight", "Groups claimed and not yet submitted")
POLICY_VERSION = Gauge("onbeat_rollout_policy_version", "The policy version that is served")
CHATS = Counter("onbeat_rollout_chats", "Chats by how they ended; cancelled: nobody waited any more", ["outcome"])
EPISODES = Counter("onbeat_rollout_episodes", "Tries of episodes: finished, or the kind of failure", ["outcome"])
EPISODE_CALLS = Counter(
    "onbeat_rollout_episode_calls", "Calls of the policy by environments: answered, cancelled, or refused", ["outcome"]
)
GENERATE_S = Histogram("onbeat_rollout_generate_seconds", "Generating one group", buckets=(0.1, 0.5, 1, 5, 10, 60, 300))
SCORE_S = Histogram("onbeat_rollout_score_seconds", "Scoring one group", buckets=(0.01, 0.1, 0.5, 1, 5, 10, 60))
WEIGHT_PULL_S = Histogram("onbeat_rollout_weight_pull_seconds", "Pulling a version", buckets=WEIGHT_BUCKETS_S)
WEIGHT_APPLY_S = Histogram(
    "onbeat_rollout_weight_apply_seconds", "Decoding and verifying a version", buckets=WEIGHT_BUCKETS_S
)
WEIGHT_LOAD_S = Histogram("onbeat_rollout_weight_load_seconds", "Loading a version", buckets=WEIGHT_BUCKETS_S)
WEIGHT_OPEN_S = Histogram(
    "onbeat_rollout_weight_open_seconds", "From the optimizer step's begin to the engine open", buckets=WEIGHT_BUCKETS_S
)
WEIGHT_RECEIVED_BYTES = Counter("onbeat_rollout_weight_received_bytes", "Bytes that came for versions that are served")
WEIGHT_FULL_BYTES = Counter("onbeat_rollout_weight_full_bytes", "Sizes of these versions")
WEIGHT_FAULTS = Counter("onbeat_rollout_weight_faults", "What went wrong in pulls of these versions and was cured")

RATE_WINDOW_S = 10.0
MAX_INTERVALS = 32  # intervals of one group
SHORT_GAP_S = 0.1  # it is not worth a mark on a timeline
MAX_ITERATIONS = 16  # busy time is kept for this many of the newest iterations


def record_update(version: int, full_bytes: int, update: WeightUpdate) -> None:
    """Record that this rollout now serves `version`, whose full size is `full_bytes`."""
    POLICY_VERSION.set(version)
    WEIGHT_PULL_S.observe(update.pull_s)
    WEIGHT_APPLY_S.observe(update.apply_s)
    WEIGHT_LOAD_S.observe(update.load_s)
    if update.open_s is not None:
        WEIGHT_OPEN_S.observe(update.open_s)
    WEIGHT_RECEIVED_BYTES.inc(update.received_bytes)
    WEIGHT_FULL_BYTES.inc(full_bytes)
    WEIGHT_FAULTS.inc(update.num_faults)


class BusyMeter:
    """A meter of the seconds with at least one response in flight, per iteration. Overlapping groups count once, for
    the oldest iteration among them, so no second is counted for two iterations. An evaluation counts for the iteration
    of its number, while no iteration is generated.

    A group of iteration 0 from second 0 to 4 and one of iteration 1 from 3 to 5 give 4 seconds and 1.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._finished_s: dict[int, float] = {}
        self._num_running: dict[tuple[bool, int], int] = {}  # counts by iteration or evaluation, and its number
        self._since = clock()

    @contextmanager
    def running(self, iteration: int, is_evaluation: bool = False) -> Iterator[None]:
        unit = (is_evaluation, iteration)
        self._advance()
        self._num_running[unit] = self._num_running.get(unit, 0) + 1
        try:
            yield
        finally:
            self._advance()
            self._num_running[unit] -= 1
            if not self._num_running[unit]:
                del self._num_running[unit]

    def seconds(self, iteration: int) -> float:
        self._advance()
        return self._finished_s.get(iteration, 0.0)

    def _advance(self) -> None:
        """Credit the time since the last change."""
        now = self._clock()
        if self._num_running:
            _, oldest = min(self._num_running)
            self._finished_s[oldest] = self._finished_s.get(oldest, 0.0) + now - self._since
            for old in sorted(self._finished_s)[:-MAX_ITERATIONS]:
                del self._finished_s[old]
        self._since = now


class TokenRate:
    """The tokens per second of responses that were finished in the last RATE_WINDOW_S."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._finished: deque[tuple[float, int]] = deque()

    def add(self, num_tokens: int) -> None:
        self._finished.append((self._clock(), num_tokens))

    def per_second(self) -> float:
        oldest = self._clock() - RATE_WINDOW_S
        while self._finished and self._finished[0][0] < oldest:
            self._finished.popleft()
        return sum(num_tokens for _, num_tokens in self._finished) / RATE_WINDOW_S


def marks_of(union: Sequence[Interval], max_number: int = MAX_INTERVALS) -> list[Interval]:
    """Return the intervals without the shortest gaps between them: those below SHORT_GAP_S, and more for fewer."""
    gaps = sorted((start - end for (_, end), (start, _) in pairwise(union)), reverse=True)
    longest_closed = gaps[max_number - 1] if len(gaps) >= max_number else 0.0
    return union_of(union, max(longest_closed, SHORT_GAP_S))
