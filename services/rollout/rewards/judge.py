"""A judge: a language model behind an OpenAI-compatible endpoint scores responses by the rubric of the job.

    score:    a call for each response     reward: its score
    ranking:  a call for the group         reward: its place in the order; equal texts share the mean of theirs
    pairs:    a call for each pair         reward: the share of its pairs that it won; a tie is half a win

The order in which responses are shown is drawn from the seed of the group: another one in each group, and the same in
each try. In `pairs` it is a circle: each response meets the `opponents` nearest to it, and is shown first to those
behind it, second to those before it. So a judge that prefers a place does not prefer a response, and a group costs
G * opponents / 2 calls, or G * (G - 1) / 2 if there are no more. `judge_questions.py` has the questions.
"""

import asyncio
import hashlib
import json
import logging
import math
import random
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from statistics import fmean

from pydantic import ValidationError

from onbeat.contracts.rewards import NUM_OPPONENTS, PAIRS, SCORE
from services.rollout import meters
from services.rollout.rewards.judge_questions import QUESTIONS, Completion, messages_of
from services.rollout.rewards.outcome import RewardRefused, RewardRequest, Score
from services.rollout.rewards.service import RewardService
from services.rollout.settings import RewardServiceSettings

logger = logging.getLogger(__name__)

MAX_CACHED = 4096  # rewards of calls

Pair = tuple[int, int]  # indexes of responses: shown first, shown second


class JudgeService(RewardService):
    """A judge. Its answers are kept in this process by model, rubric, order and content."""

    def __init__(self, name: str, settings: RewardServiceSettings) -> None:
        super().__init__(name, settings)
        self._turns = asyncio.Semaphore(settings.max_concurrent)
        self._cache: OrderedDict[str, list[float]] = OrderedDict()

    async def score(
        self, request: RewardRequest, indexes: Sequence[int], scores: dict[int, Score], deadline: float
    ) -> None:
        """Try once; as `RewardPool.score`, with the deadline on the event loop's clock."""
        mode = request.options.get("mode", SCORE)
        if mode == SCORE:
            await self._score_each(request, indexes, scores, deadline)
            return
        if len(indexes) < 2:
            message = f'judge {self._name} compares two responses or more; take mode = "score"'
            raise RewardRefused("invalid", message, retry_after_s=math.inf)
        order = random.Random(request.seed).sample(indexes, len(indexes))
        if mode == PAIRS:
            rewards = await self._compare_pairs(request, order, deadline)
        else:
            ranked = await self._ask(request, order, deadline)
            rewards = dict(zip(order, mean_by_text([request.responses[index] for index in order], ranked), strict=True))
        scores.update({index: Score(reward, {}) for index, reward in rewards.items()})

    async def _score_each(
        self, request: RewardRequest, indexes: Sequence[int], scores: dict[int, Score], deadline: float
    ) -> None:
        first_with = {request.responses[index]: index for index in reversed(indexes)}
        calls = (self._ask(request, [index], deadline) for index in first_with.values())
        outcomes = dict(zip(first_with, await asyncio.gather(*calls, return_exceptions=True), strict=True))
        for index in indexes:
            outcome = outcomes[request.responses[index]]
            if not isinstance(outcome, BaseException):
                scores[index] = Score(outcome[0], {})
        raise_first(outcome for outcome in outcomes.values() if isinstance(outcome, BaseException))

    async def _compare_pairs(
        self, request: RewardRequest, order: Sequence[int], deadline: float
    ) -> dict[int, float | None]:
        """Return the share of its pairs that each response won, None for one in no pair that could be judged."""
        pairs = pairs_of(order, request.options.get("opponents", NUM_OPPONENTS))
        calls = (self._compare(request, pair, deadline) for pair in pairs)
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        errors = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        raise_first(error for error in errors if not is_invalid(error))
        if len(errors) == len(pairs):
            raise_first(errors)
        points: dict[int, list[float]] = {index: [] for index in order}
        for pair, outcome in zip(pairs, outcomes, strict=True):
            if isinstance(outcome, BaseException):
                meters.JUDGE_PAIRS.labels(outcome="failed").inc()
                logger.warning("reward %s: no opinion on responses %d and %d: %s", request.name, *pair, outcome)
                continue
            meters.JUDGE_PAIRS.labels(outcome="tied" if outcome[0] == outcome[1] else "decided").inc()
            for index, point in zip(pair, outcome, strict=True):
                points[index].append(point)
        return {index: fmean(won) if won else None for index, won in points.items()}

    async def _compare(self, request: RewardRequest, pair: Pair, deadline: float) -> list[float]:
        """Return the points of both. Equal texts tie without a call. An answer that is not the JSON that was asked for
        is asked for again, up to `max_attempts` times in all; then it is an error that the group is not retried for."""
        first, second = (request.responses[index] for index in pair)
        if first == second:
            return [0.5, 0.5]
        for _ in range(request.max_attempts):
            try:
                return await self._ask(request, pair, deadline)
            except RewardRefused as error:
                if not is_invalid(error):
                    raise
                last = error
        last.retry_after_s = math.inf
        raise last

    async def _ask(self, request: RewardRequest, shown: Sequence[int], deadline: float) -> list[float]:
        """Return the rewards of responses by place. `shown`: their indexes, in the order in which they are shown."""
        mode, rubric = request.options.get("mode", SCORE), request.options["rubric"]
        texts = [request.responses[index] for index in shown]
        asked = {
            name: request.context[name] for name in ("question", "answer") if request.context.get(name) is not None
        }
        content = json.dumps([self._settings.model, mode, rubric, asked, texts], sort_keys=True)
        key = hashlib.sha256(content.encode()).hexdigest()
        if (rewards := self._cache.get(key)) is not None:
            self._cache.move_to_end(key)
            return rewards
        question = QUESTIONS[mode]
        schema = {"name": "judgement", "strict": True, "schema": question.answer.model_json_schema()}
        body = {
            "model": self._settings.model,
            "messages": messages_of(question, rubric, asked, texts),
            "temperature": 0,
            "max_tokens": self._settings.max_answer_tokens,
            "response_format": {"type": "json_schema", "json_schema": schema},
        }
        try:
            async with asyncio.timeout_at(deadline), self._turns:
                answer = read_answer(await self._post(body, len(texts), request.timeout_s, deadline))
            rewards = question.answer.model_validate_json(answer).by_place(len(texts))
        except TimeoutError as error:
            raise self._no_time() from error
        except ValidationError as error:
            details = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(map(str, details["loc"]))
            message = f"judge {self._name} did not answer with the JSON that it was asked for: {where}: "
            index = shown[0] if mode == SCORE else None
            raise RewardRefused("invalid", message + details["msg"], index) from error
        except ValueError as error:
            raise RewardRefused("invalid", f"judge {self._name}: {error}") from error
        observe_places(rewards)
        self._cache[key] = rewards
        if len(self._cache) > MAX_CACHED:
            self._cache.popitem(last=False)
        return rewards


def pairs_of(circle: Sequence[int], num_opponents: int) -> list[Pair]:
    """Return the pairs in which each response on the circle meets as many others, which are next to it. In each pair
    the one that is behind is shown first.

    >>> pairs_of([0, 1, 2, 3], 2)
    [(0, 1), (1, 2), (2, 3), (3, 0)]
    """
    num = len(circle)
    return [
        (circle[place], circle[(place + step) % num])
        for step in range(1, min(num_opponents, num) // 2 + 1)
        for place in range(num if 2 * step < num else step)
    ]


def mean_by_text(texts: Sequence[str], rewards: Sequence[float]) -> list[float]:
    """Return the rewards, of equal texts their mean: a ranking has no ties.

    >>> mean_by_text(["a", "b", "a"], [1.0, 0.5, 0.0])
    [0.5, 0.5, 0.5]
    """
    by_text: dict[str, list[float]] = {}
    for text, reward in zip(texts, rewards, strict=True):
        by_text.setdefault(text, []).append(reward)
    return [fmean(by_text[text]) for text in texts]


def is_invalid(error: BaseException) -> bool:
    """Return whether the judge answered, but not with the JSON that it was asked for."""
    return isinstance(error, RewardRefused) and error.kind == "invalid"


def raise_first(errors: Iterable[BaseException]) -> None:
    for error in errors:
        raise error


def read_answer(content: bytes) -> str:
    """Return the text of a chat completion, and count its tokens."""
    completion = Completion.model_validate_json(content)
    meters.JUDGE_TOKENS.labels(kind="read").inc(completion.usage.prompt_tokens)
    meters.JUDGE_TOKENS.labels(kind="written").inc(completion.usage.completion_tokens)
    return completion.choices[0].message.content


def observe_places(rewards: Sequence[float]) -> None:
    """Count the rewards of compared responses by the half in which they were shown."""
    for number, reward in enumerate(rewards if len(rewards) > 1 else (), 1):
        half = "first" if number <= len(rewards) / 2 else "second"
        meters.JUDGE_REWARD_BY_PLACE.labels(half=half).observe(reward)
