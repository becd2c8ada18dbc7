"""Jobs for pages to show, written through the ledger as a trainer and a rollout would, in well under a second.

Curves bend as those of a job that learns; prompts come again in every iteration.
"""

import json
import math
import random
import statistics
import time
import uuid
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

from onbeat.config import JobConfig
from onbeat.contracts.records import PublishedWeights, WeightUpdate
from onbeat.contracts.states import JobState
from onbeat.streams.codec import (
    PromptPart,
    PromptTask,
    Response,
    RolloutGroup,
    Timings,
    Turn,
    VersionSpan,
    given_rewards,
)
from onbeat.streams.ledger import Ledger
from services.broker.evaluations import score
from services.broker.samples import sample_groups
from tests.world import LEASE_S, World, job_body

WORKERS = ("rollout-0", "rollout-1")
A_DAY_S = 86_400
WORDS = ("seven", "plus", "two", "is", "nine", "so", "the", "answer", "is", "9")


@dataclass(frozen=True)
class Content:
    """Contents of a job's groups. There is one group for each prompt of an iteration."""

    prompts: tuple[str, ...] = ("What is 7 + 2?", "What is 5 - 9?", "What is 3 + 3?", "What is 8 - 1?")
    words: tuple[str, ...] = WORDS
    num_samples: int = 4
    is_episode: bool = False  # responses have three turns; the third rewrites the history
    # The first response of a group, and that to the first held-out prompt:
    is_cut: bool = False  # it ends at its limit, in an episode that of its second turn
    is_judged: bool = False  # the judge has no opinion on it
    sources: tuple[str, ...] = ()  # names by prompt, in a job of several sources
    held_out: tuple[str, ...] = ()  # prompts of an evaluation at the start and one at the end


async def seed_job(
    ledger: Ledger,
    name: str,
    num_iterations: int = 12,
    state: JobState = JobState.SUCCEEDED,
    content: Content = Content(),
    num_done: int | None = None,
) -> str:
    """Create a job and return its id, while no broker runs. `num_done` is the number of committed iterations.

    The default of `num_done` is all iterations. Any name is accepted, also one that the broker would refuse.
    """
    rollout = {"num_prompts_per_iteration": len(content.prompts), "num_samples_per_prompt": content.num_samples}
    body = job_body(rollout=rollout, schedule={"num_iterations": num_iterations})
    if content.sources:
        body["data"] = [body["data"] | {"name": name} for name in dict.fromkeys(content.sources)]
    if content.held_out:
        body["evaluation"] = {"data": body["data"], "num_prompts": len(content.held_out), "every_iterations": 1000}
    job_id, epoch = await start_job(ledger, name, body)
    num_done = num_iterations if num_done is None else num_done
    await seed_evaluation(ledger, job_id, 0, num_iterations, content)
    for iteration in range(num_done):
        await seed_iteration(ledger, job_id, epoch, iteration, content)
    if num_done == num_iterations:
        await seed_evaluation(ledger, job_id, num_iterations, num_iterations + 1, content)
    if state is JobState.CANCELLED:
        await ledger.jobs.move(job_id, JobState.CANCELLING)
    if state is not JobState.RUNNING:
        await ledger.jobs.move(job_id, state, "the machine went away" if state is JobState.FAILED else "")
    return job_id


async def start_job(ledger: Ledger, name: str, body: dict[str, Any]) -> tuple[str, str]:
    """Create a job whose trainer has published version 0. Return its id and the epoch."""
    config = JobConfig.model_validate(body)
    job_id, num_iterations = f"job-{uuid.uuid4().hex[:12]}", config.schedule.num_iterations
    assert await ledger.jobs.create(job_id, config.model_dump(mode="json") | {"name": name}, num_iterations, 0)
    epoch = await ledger.trainer.claim_job(job_id, "trainer-0", A_DAY_S)
    assert epoch is not None
    await ledger.versions.announce(job_id, epoch, 0, "127.0.0.1:1", "d0", PublishedWeights(**PUBLISHED))
    return job_id, epoch


async def seed_examples(ledger: Ledger, num_done: int = 2) -> str:
    """Create a job that learns examples alone, and return its id: one iteration is open behind the committed ones."""
    start = {"data": {"type": "jsonl", "path": "examples.jsonl"}, "num_rows_per_iteration": 2}
    body = job_body(objective={"type": "sft"}, warm_start=start, schedule={"num_iterations": num_done + 2})
    generating = ("data", "reward", "rollout")
    body = {section: value for section, value in body.items() if section not in generating}
    job_id, epoch = await start_job(ledger, "examples", body)
    for iteration in range(num_done + 1):
        assert await ledger.iterations.open_rows(job_id, iteration, ["{}"] * 2) == ""
        if iteration < num_done:
            rows = [row_of(f"{iteration}-{place}", iteration) for place in range(2)]
            await ledger.trainer.record_rows(job_id, epoch, iteration, "trainer-0", rows)
            metrics = {"num_responses": 2, "prompt_tokens": 10, "response_tokens": 8, "train_s": 0.003}
            metrics |= {"sft/loss": 2.5 / (1 + iteration), "sft/rows": 2}
            report = (f"d{iteration + 1}", metrics, "used", False, {})
            await ledger.trainer.commit(job_id, epoch, iteration, iteration + 1, *report)
    return job_id


def row_of(group_id: str, iteration: int) -> RolloutGroup:
    """Build a conversation with two learned answers."""
    asked = json.dumps([{"role": "user", "content": "And 3 more?"}])
    turns = [
        Turn(num_shared=3, num_sampled=2, num_characters=1, messages_json="[]"),
        Turn(parent=0, num_shared=5, observed_token_ids=[8, 9], num_sampled=2, num_characters=2, messages_json=asked),
    ]
    return RolloutGroup(
        group_id=group_id,
        iteration=iteration,
        policy_version=iteration,
        is_supervised=True,
        worker_id="trainer-0",
        prompt_token_ids=[1, 2, 3],
        prompt_text="What is 7 + 2?",
        responses=[Response(token_ids=[4, 5, 6, 7], has_no_reward=True, text="912", turns=turns)],
    )


async def seed_reward(world: World, reward_mean: float, **sections: Any) -> str:
    """Create a job with this reward in its only iteration, and return its id, while no broker runs."""
    job_id, epoch = await world.started_job(schedule={"num_iterations": 1}, **sections)
    await world.run_iteration(job_id, epoch, 0, reward_mean=reward_mean)
    return job_id


PUBLISHED: dict[str, Any] = {"full_bytes": 269_000_000, "delta_bytes": 3_100_000, "encode_s": 0.2, "publish_s": 0.3}
UPDATE = WeightUpdate(received_bytes=3_100_000, pull_s=0.002, apply_s=0.001, load_s=0.001, held_s=0.001)


async def seed_iteration(ledger: Ledger, job_id: str, epoch: str, iteration: int, content: Content) -> None:
    dice = random.Random(iteration)
    tasks = [
        PromptTask(group_id=f"{iteration}-{row}", iteration=iteration, text=prompt, data_row=row, source=source)
        for row, (prompt, source) in enumerate(zip_longest(content.prompts, content.sources, fillvalue=""))
    ]
    assert await ledger.iterations.open(job_id, iteration, iteration, tasks) == ""
    for worker in WORKERS:
        await ledger.versions.engine_ready(job_id, iteration, worker, UPDATE)
    advantages: dict[str, list[float | None]] = {}
    for turn in range(len(tasks)):
        worker = WORKERS[turn % len(WORKERS)]
        for claim in await ledger.rollout.claim(job_id, worker, 1, LEASE_S):
            group = group_of(claim.task, worker, content, dice)
            await ledger.rollout.submit(job_id, claim.entry_id, group)
            advantages[group.group_id] = advantages_of(group)
    version, digest = iteration + 1, f"d{iteration + 1}"
    await ledger.versions.announce(job_id, epoch, version, "127.0.0.1:1", digest, PublishedWeights(**PUBLISHED))
    metrics = report(iteration, dice)
    await ledger.trainer.commit(job_id, epoch, iteration, version, digest, metrics, "used", True, advantages)


async def seed_evaluation(ledger: Ledger, job_id: str, version: int, following: int, content: Content) -> None:
    """Answer the held-out prompts, if there are any, with this policy version."""
    if not content.held_out:
        return
    dice = random.Random(version)
    tasks = [
        PromptTask(group_id=f"eval-{version}-{row}", iteration=version, text=prompt, data_row=row, is_evaluation=True)
        for row, prompt in enumerate(content.held_out)
    ]
    assert await ledger.evaluations.open(job_id, version, version, following, tasks) == ""
    await ledger.versions.engine_ready(job_id, version, WORKERS[0], UPDATE)
    for claim in await ledger.rollout.claim(job_id, WORKERS[0], len(tasks), LEASE_S):
        group = group_of(claim.task, WORKERS[0], replace(content, num_samples=1), dice)
        await ledger.rollout.submit(job_id, claim.entry_id, group)
    groups = await ledger.evaluations.groups(job_id, version)
    scores, samples = score(groups), sample_groups(groups, len(groups))
    assert await ledger.evaluations.finish(job_id, version, "scored", scores, samples)


def advantages_of(group: RolloutGroup) -> list[float | None]:
    """Reward minus the mean of those of the group; None without a reward."""
    mean = statistics.fmean(given_rewards(group))
    return [None if response.has_no_reward else response.reward - mean for response in group.responses]


def group_of(task: PromptTask, worker: str, content: Content, dice: random.Random) -> RolloutGroup:
    return RolloutGroup(
        group_id=task.group_id,
        iteration=task.iteration,
        policy_version=task.policy_version,
        is_evaluation=task.is_evaluation,
        prompt_token_ids=list(range(12)),
        prompt_text=task.text,
        prompt_parts=[
            PromptPart(text="<|im_start|>", is_special=True),
            PromptPart(text=f"user\n{task.text}"),
            PromptPart(text="<|im_end|>", is_special=True),
            PromptPart(text="\n"),
        ],
        data_row=task.data_row,
        source=task.source,
        worker_id=worker,
        timings=Timings(generate_s=0.004, score_s=0.001, worker_busy_s=0.004),
        responses=[
            response_of(task, content, dice, is_first=(task.data_row if task.is_evaluation else place) == 0)
            for place in range(content.num_samples)
        ],
    )


def response_of(task: PromptTask, content: Content, dice: random.Random, is_first: bool) -> Response:
    """Build a response with one token per word, and one without text for the end of the sequence."""
    words = [content.words[0], *(f" {word}" for word in content.words[1:])]
    is_right = dice.random() < learned(task.iteration)
    is_cut, has_no_reward = is_first and content.is_cut, is_first and content.is_judged
    return Response(
        token_ids=[*range(100, 100 + len(words)), 2],
        rollout_logprobs=[-3 * dice.random() ** 3 - 0.001 for _ in range(len(words) + 1)],
        token_lengths=[*map(len, words), 0],
        version_spans=[VersionSpan(policy_version=task.policy_version, start=0, end=len(words) + 1)],
        finish_reason="length" if is_cut and not content.is_episode else "stop",
        reward=0.0 if has_no_reward else float(is_right),
        has_no_reward=has_no_reward,
        reward_parts={"form": 0.5} if has_no_reward else {"right": float(is_right), "form": 0.5},
        text="".join(words),
        turns=turns_of(words, is_cut) if content.is_episode else [],
    )


def turns_of(words: list[str], is_cut: bool) -> list[Turn]:
    """Return the turns of an episode: three words, three words, and the rest with the end of the sequence."""
    call = {"function": {"name": "add", "arguments": {"left": 7, "right": 2}}}  # agents may send an object
    asked = [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "7 + 2 = 9"}]
    parts = [words[:3], words[3:6], words[6:]]
    shared = [(None, 12, 0), (0, 12 + 3, 5), (1, 14, 4)]  # parent, tokens shared, tokens observed
    return [
        Turn(
            parent=parent,
            num_shared=num_shared,
            observed_token_ids=range(num_observed),
            num_sampled=len(part) + (part is parts[-1]),
            num_characters=sum(map(len, part)),
            finish_reason="length" if is_cut and part is parts[1] else "stop",
            messages_json=json.dumps(asked if parent is not None else []),
            waited_s=1.5 if parent is not None else 0.0,
            generate_s=0.2,
        )
        for part, (parent, num_shared, num_observed) in zip(parts, shared, strict=True)
    ]


def learned(iteration: int) -> float:
    """Share of right responses."""
    return 0.2 + 0.6 * (1 - math.exp(-iteration / 8))


def report(iteration: int, dice: random.Random) -> dict[str, Any]:
    """Return the report of an iteration as a trainer commits it."""
    now = time.time()
    noise = 0.05 * dice.random()
    spans = [("micro_batch", now - 0.004, 0.002), ("optimizer", now - 0.002, 0.001), ("publish", now - 0.001, 0.001)]
    return {
        "num_responses": 16,
        "prompt_tokens": 192,
        "response_tokens": 176 + dice.randrange(40),
        "train_s": 0.003,
        "reward_mean": learned(iteration) + noise,
        "reward_std": 0.4 - noise,
        "staleness_max": 0,
        "mismatch_mean": 0.01 + noise / 10,
        "mismatch_max": 0.1 + noise,
        "rollout/response_tokens_mean": 11.0 + noise,
        "rollout/truncated_frac": 0.0,
        "train/grad_norm": 1.0 + 5 * noise,
        "train/grad_cosine": 0.5 - noise,
        "train/kl": 0.001 * iteration,
        "train/entropy": 1.2 - 0.02 * iteration,
        "train/clipped_frac": noise,
        "train/learning_rate": 2e-5,
        "spans": spans,
    }
