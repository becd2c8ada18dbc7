"""The evaluations of one job: due ones are opened, drained ones are scored, and stuck ones are given up.

Evaluation e is due when version e is published and iteration e is open: training's prompts go first. e is 0, each
multiple of `every_iterations`, the end of a warm start, and the number of iterations: the end.
"""

import asyncio
import logging
from bisect import bisect_right
from collections.abc import Collection, Sequence
from itertools import accumulate
from statistics import fmean, pstdev

from onbeat.config import HeldOutSet, JobConfig
from onbeat.contracts.response_stats import ResponseStats, more_parts, parts_of, rewards_of_sets
from onbeat.contracts.states import EvaluationState
from onbeat.streams.codec import RolloutGroup, given_rewards, is_truncated
from onbeat.streams.ledger import Ledger
from onbeat.streams.ledger.evaluations import Scores
from onbeat.streams.records import Fields, following_evaluation, read_evaluations
from services.broker.datasets import DatasetError, PromptItem
from services.broker.datasets.process import DatasetProcess
from services.broker.samples import sample_groups
from services.broker.tasks import build_evaluation_tasks, read_held_out

logger = logging.getLogger(__name__)

NUM_SAMPLES = 16  # responses of an evaluation that are kept for people to read


def due_evaluation(fields: Fields, num_iterations: int) -> int | None:
    """Return the number of the evaluation that is due by the job's fields; None when none is due yet."""
    evaluation = int(fields.get("next_evaluation", "0"))
    has_opened = int(fields["num_opened"]) > evaluation or evaluation == num_iterations
    has_version = int(fields["next_iteration"]) >= evaluation
    return evaluation if evaluation <= num_iterations and has_opened and has_version else None


class Evaluator:
    """A job's evaluator. It holds nothing that must survive: another broker reads the prompts again."""

    def __init__(self, ledger: Ledger, process: DatasetProcess, job_id: str) -> None:
        self._ledger, self._process, self._job_id = ledger, process, job_id
        self._reading: asyncio.Task[list[PromptItem]] | None = None

    def prepare(self, config: JobConfig) -> None:
        """Read the prompts ahead of time."""
        if config.evaluation is not None and self._reading is None:
            work = read_held_out(config, self._process)
            self._reading = asyncio.create_task(work, name=f"held-out prompts {self._job_id}")

    async def close(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)

    async def step(self, config: JobConfig, fields: Fields) -> None:
        if config.evaluation is None:
            return
        self.prepare(config)
        evaluation = due_evaluation(fields, config.schedule.num_iterations)
        if evaluation is not None and self._reading is not None and self._reading.done():
            await self._open(config, evaluation, int(fields["policy_version"]))
        for open_one in await self._ledger.evaluations.open_ones(self._job_id):
            if await self._ledger.evaluations.state(self._job_id, open_one) is EvaluationState.DRAINED:
                await self._finish(config, open_one)

    async def _open(self, config: JobConfig, evaluation: int, version: int) -> None:
        assert config.evaluation is not None
        assert self._reading is not None
        every, num_iterations = config.evaluation.every_iterations, config.schedule.num_iterations
        following = following_evaluation(evaluation, every, num_iterations, config.num_supervised)
        try:
            tasks = build_evaluation_tasks(config, evaluation, self._reading.result())
        except DatasetError as error:
            self._reading = None  # the next evaluation tries again
            await self._ledger.evaluations.fail(self._job_id, evaluation, following, f"no prompts: {error}")
            return
        reason = await self._ledger.evaluations.open(self._job_id, evaluation, version, following, tasks)
        logger.info("job %s: evaluation %d: %s", self._job_id, evaluation, reason or f"open on version {version}")

    async def _finish(self, config: JobConfig, evaluation: int) -> None:
        groups = await self._ledger.evaluations.groups(self._job_id, evaluation)
        earlier = await read_evaluations(self._ledger, self._job_id)
        by_set = split(groups, config.held_out)
        scores = score_sets(by_set, config.held_out, {name for record in earlier for name in record.metrics})
        reward = describe(scores)
        samples = [
            sample for groups_of_set in by_set for sample in sample_groups(groups_of_set, NUM_SAMPLES // len(by_set))
        ]
        if await self._ledger.evaluations.finish(self._job_id, evaluation, reward, scores, samples):
            logger.info("job %s: evaluation %d: %s", self._job_id, evaluation, reward)

    async def give_up(self, silent_s: float) -> bool:
        """End open evaluations, so that training need not wait for them. Returns False when none is open."""
        open_ones = await self._ledger.evaluations.open_ones(self._job_id)
        for evaluation in open_ones:
            fields = await self._ledger.evaluations.fields(self._job_id, evaluation)
            done = f"{fields['num_accepted']} of {fields['num_groups']} groups accepted"
            message = f"given up, no progress for {silent_s:.0f} s: {done}"
            await self._ledger.evaluations.fail(self._job_id, evaluation, evaluation, message)
        return bool(open_ones)


def split(groups: Sequence[RolloutGroup], sets: Sequence[HeldOutSet]) -> list[list[RolloutGroup]]:
    """Return the groups of each set, by the order of prompts in an evaluation."""
    ends = list(accumulate(held_out.num_prompts for held_out in sets))
    by_set: list[list[RolloutGroup]] = [[] for _ in sets]
    for group in groups:
        by_set[bisect_right(ends, int(group.group_id.rpartition("-")[2]))].append(group)
    return by_set


def score_sets(by_set: Sequence[Sequence[RolloutGroup]], sets: Sequence[HeldOutSet], known: Collection[str]) -> Scores:
    """Return the scores of the first set, and those of each named one as `NAME/score`.

    `known`: names of scores in earlier evaluations.
    """
    scores: Scores = {}
    for groups, held_out in zip(by_set, sets, strict=True):
        prefix = f"{held_out.name}/" if held_out.name else ""
        parts = parts_of(name.removeprefix(prefix) for name in known if name.startswith(prefix))
        metrics = score(groups, held_out.solved_at, parts)
        scores |= metrics if held_out is sets[0] else {}
        scores |= {f"{prefix}{name}": value for name, value in metrics.items()}
    return scores


def describe(scores: Scores) -> str:
    """Return the rewards in words: `reward 0.250 easy, 0.125 hard`."""
    if of_sets := rewards_of_sets(scores):
        return "reward " + ", ".join(f"{reward:.3f} {name}" for name, reward in of_sets.items())
    return f"reward {scores['reward_mean']:.3f}" if "reward_mean" in scores else "no group could be scored"


def score(groups: Sequence[RolloutGroup], solved_at: float = 1.0, known_parts: Sequence[str] = ()) -> Scores:
    """Return means over all responses, those of rewards over the responses that have one; `pass_at_k` over prompts with
    several rewards. Empty when every group failed, or no response has a reward.

    `known_parts`: of the reward, in earlier evaluations.
    """
    stats = ResponseStats(solved_at=solved_at)
    for group in groups:
        stats.add(group.responses)
    responses = [response for group in groups for response in group.responses]
    rewards = [reward for group in groups for reward in given_rewards(group)]
    if not rewards:
        return {}
    scores = {
        "reward_mean": fmean(rewards),
        "reward_std": pstdev(rewards),
        "response_tokens_mean": fmean(len(response.token_ids) for response in responses),
        "truncated_frac": fmean(map(is_truncated, responses)),
    }
    if len(rewards) > stats.num_groups:
        scores["pass_at_k"] = 1.0 - stats.num_solved_none / stats.num_groups
    return scores | stats.shape() | stats.part_scores(more_parts(known_parts, stats.parts))
