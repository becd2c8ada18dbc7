"""The prompts of one iteration as PromptTasks: a pure function of (job config, iteration)."""

import hashlib
import json

from onbeat.config import JobConfig
from onbeat.streams.codec import Message, PromptTask, Reward
from services.broker.datasets import DatasetSpec, PromptItem
from services.broker.datasets.process import DatasetProcess


async def produce_tasks(config: JobConfig, iteration: int, process: DatasetProcess) -> list[PromptTask]:
    """Iteration t takes the dataset's items t*n to t*n + n-1. Raises DatasetError."""
    num_prompts = config.rollout.num_prompts_per_iteration
    items = await process.read(DatasetSpec.of_job(config), iteration * num_prompts, num_prompts)
    return build_tasks(config, iteration, items)


def build_tasks(config: JobConfig, iteration: int, items: list[PromptItem]) -> list[PromptTask]:
    return [build_task(config, iteration, index, item) for index, item in enumerate(items)]


def build_task(config: JobConfig, iteration: int, index: int, item: PromptItem) -> PromptTask:
    rollout, reward = config.rollout, config.reward
    return PromptTask(
        group_id=f"{iteration}-{index}",
        iteration=iteration,
        messages=[Message(role=message.role, content=message.content) for message in item.messages],
        text=item.text,
        num_samples=rollout.num_samples_per_prompt,
        max_response_tokens=rollout.max_response_tokens,
        temperature=rollout.temperature,
        seed=task_seed(config.seed, iteration, index),
        deadline_s=rollout.group_deadline_s,
        reward=Reward(
            name=reward.name,
            options_json=json.dumps(reward.options),
            timeout_s=reward.timeout_s,
            memory_limit_mb=reward.memory_limit_mb,
        ),
        reward_context_json=json.dumps(item.context),
    )


def task_seed(job_seed: int, iteration: int, index: int) -> int:
    """31 bits: fits every generator that an engine may feed with it."""
    digest = hashlib.sha256(f"{job_seed}/{iteration}/{index}".encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1
