"""The PromptTasks of prompts: a pure function of the job's config and the number of the iteration or evaluation."""

import json
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from onbeat.config import EnvironmentConfig, EvaluationConfig, HeldOutSet, JobConfig
from onbeat.contracts.rewards import RewardConfig
from onbeat.contracts.seeds import seed_of
from onbeat.streams.codec import Environment, Message, PromptTask, Reward
from onbeat.streams.ledger import Ledger
from services.broker.datasets import ChatMessage, DatasetError, DatasetSpec, PromptItem
from services.broker.datasets.process import DatasetPool, DatasetProcess
from services.broker.datasets.sources import move_error, places_in, read_places


async def produce_tasks(config: JobConfig, iteration: int, process: DatasetProcess) -> list[PromptTask]:
    """Produce the tasks of iteration t from the dataset's items t*n to t*n + n-1, or from those of several sources
    that take turns; those after the first `num_prompts_per_iteration` are spare. Raises DatasetError."""
    if isinstance(config.data, list):
        return build_tasks(config, iteration, await read_places(config, places_in(config, iteration), process))
    num_prompts = config.rollout.num_reserved_prompts
    items, _ = await process.read(DatasetSpec.of_job(config), iteration * num_prompts, num_prompts)
    return build_tasks(config, iteration, items)


def build_tasks(config: JobConfig, iteration: int, items: list[PromptItem]) -> list[PromptTask]:
    tasks = []
    longest = {source.name or "": source.max_response_tokens for _, source in config.sources}
    rewards, environments = config.rewards_by_source, config.environments_by_source
    for index, item in enumerate(items):
        task = build_task(config, item, rewards[item.source], environments[item.source])
        task.max_response_tokens = longest[item.source] or config.rollout.max_response_tokens
        task.group_id, task.iteration = f"{iteration}-{index}", iteration
        task.num_samples, task.temperature = config.rollout.num_samples_per_prompt, config.rollout.temperature
        task.seed, task.source = seed_of(config.seed, iteration, index), item.source
        if item.row is not None and (config.rollout.dispatch == "longest_first" or config.chooses_prompts):
            task.data_row = item.row
        tasks.append(task)
    return tasks


async def longest_first(ledger: Ledger, job_id: str, tasks: list[PromptTask]) -> list[PromptTask]:
    """Order the prompts for dispatch: those that may take longest begin first, so that others do not wait for them.

    The order is by the mean length of the responses when the prompt was last generated; a new prompt counts as average.
    Only the order changes: group ids, prompts and seeds stay together, so the same set of groups is trained.
    """
    rows = [task.data_row for task in tasks if task.HasField("data_row")]
    lengths = dict(zip(rows, await ledger.iterations.lengths(job_id, rows), strict=True))
    known = [length for length in lengths.values() if length is not None]
    if not known:
        return tasks
    mean = fmean(known)
    return sorted(tasks, key=lambda task: lengths.get(task.data_row) or mean, reverse=True)


async def read_held_out(config: JobConfig, process: DatasetProcess) -> list[PromptItem]:
    """Read the prompts of all held-out sets, one set after the other. Raises DatasetError."""
    return [
        item
        for held_out in config.held_out
        for item in await read_set(held_out, config.seed, process, held_out.num_prompts)
    ]


async def read_set(
    held_out: HeldOutSet, job_seed: int, process: DatasetProcess | DatasetPool, num_prompts: int
) -> list[PromptItem]:
    """Read the first prompts of a held-out set. Raises DatasetError."""
    try:
        items, _ = await process.read(DatasetSpec.of_evaluation(held_out, job_seed), 0, num_prompts)
    except DatasetError as error:
        raise move_error(error, f"{held_out.field}.data") from error
    return items


def build_evaluation_tasks(config: JobConfig, evaluation: int, items: list[PromptItem]) -> list[PromptTask]:
    """Build tasks with the same prompts and seeds each time: only the policy differs between two evaluations."""
    assert config.evaluation is not None
    tasks = []
    places = [(held_out, place) for held_out in config.held_out for place in range(held_out.num_prompts)]
    for index, (item, (held_out, place)) in enumerate(zip(items, places, strict=True)):
        task = build_task(config, item, held_out.rewards, held_out.environment)
        task.group_id, task.iteration, task.is_evaluation = f"eval-{evaluation}-{index}", evaluation, True
        task.num_samples = config.evaluation.num_samples_per_prompt
        fill_sampling(task, config.evaluation)
        task.seed = seed_of(config.seed, "evaluation", *([held_out.name] if held_out.name else []), place)
        tasks.append(task)
    return tasks


def fill_sampling(task: PromptTask, evaluation: EvaluationConfig) -> None:
    task.temperature, task.top_p, task.min_p = evaluation.temperature, evaluation.top_p, evaluation.min_p
    task.top_k, task.min_tokens = evaluation.top_k or 0, evaluation.min_tokens


def build_task(
    config: JobConfig, item: PromptItem, rewards: Sequence[RewardConfig], environment: EnvironmentConfig | None
) -> PromptTask:
    """Build the part of a task that training and evaluation have in common."""
    rollout = config.rollout
    task = PromptTask(
        messages=to_wire(item.messages),
        text=item.text,
        teacher_messages=to_wire(item.teacher_messages),
        teacher_text=item.teacher_text,
        max_response_tokens=rollout.max_response_tokens,
        deadline_s=rollout.group_deadline_s,
        stop=rollout.stop,
        stop_token_ids=rollout.stop_token_ids,
        reward_context_json=json.dumps(item.context),
        environment=Environment(max_turns=environment.max_turns, **common_fields(environment)) if environment else None,
    )
    if environment is not None and environment != config.environment:
        task.environment.max_attempts = environment.max_attempts
    for reward in rewards:
        message = Reward(max_attempts=reward.max_attempts, **common_fields(reward))
        if reward.part is None:
            task.reward.CopyFrom(message)
        else:
            message.weight, message.part = reward.weight, reward.part
            task.rewards.append(message)
    return task


def to_wire(messages: Sequence[ChatMessage]) -> list[Message]:
    return [Message(role=message.role, content=message.content) for message in messages]


def common_fields(section: EnvironmentConfig | RewardConfig) -> dict[str, Any]:
    """Return the fields that an environment and a reward have in common."""
    limits = {"timeout_s": section.timeout_s, "memory_limit_mb": section.memory_limit_mb}
    return {"name": section.name, "options_json": json.dumps(section.options), **limits}
