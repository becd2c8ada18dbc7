"""The review of a new job by all checks beyond its schema, also of one that its schema refuses, as far as that goes."""

from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError
from redis.exceptions import RedisError

from onbeat.config import JobConfig
from services.broker.admission.ledger_checks import review_fork, review_trackers
from services.broker.admission.model_files import Complaint
from services.broker.admission.review import JobRefused, Remarks
from services.broker.api.context import Context
from services.broker.datasets.process import TooBusy

# Numbers that a job needs and that hardly matter to these checks; nothing is said about them here.
ANY_NUMBERS = {
    "rollout": {"num_prompts_per_iteration": 1, "num_samples_per_prompt": 2, "max_response_tokens": 1},
    "schedule": {"num_iterations": 1},
}


async def review(broker: Context, config: JobConfig) -> Remarks:
    """Return remarks about the job's data. Raises JobRefused with everything that is wrong."""
    complaints, remarks = await examine(broker, config)
    if complaints:
        raise JobRefused(complaints, remarks.rows)
    return remarks


async def examine(broker: Context, config: JobConfig) -> tuple[list[Complaint], Remarks]:
    complaints, remarks = await broker.admission.examine(config)
    complaints = complaints + await review_fork(broker.ledger, config) + await review_trackers(broker.ledger, config)
    return complaints, remarks


async def examine_the_rest(
    broker: Context, body: Any, wrong: Sequence[str], misspelt: Sequence[str]
) -> list[Complaint]:
    """Return what is wrong besides the fields that the schema refuses; nothing if there is no job without them.

    `misspelt`: those of them that are no keys. Their sections may lack the right ones, so nothing is said about these.
    """
    config = job_without(body, wrong)
    if config is None:
        return []
    try:
        complaints, _ = await examine(broker, config)
    except (RedisError, TooBusy):  # the fields are wrong all the same
        return []
    sections = {section_of(field) for field in misspelt}
    return [
        (field, message)
        for field, message in complaints
        if section_of(field) not in sections and not any(overlap(field, other) for other in wrong)
    ]


def job_without(body: Any, fields: Sequence[str]) -> JobConfig | None:
    """Return the job with defaults instead of these fields; None if there is no such job."""
    for field in fields:
        body = without(body, field.split("."))
    if not isinstance(body, dict) or not all(isinstance(body.get(name) or {}, dict) for name in ANY_NUMBERS):
        return None
    filled = {name: numbers | (body.get(name) or {}) for name, numbers in ANY_NUMBERS.items()}
    try:
        return JobConfig.model_validate(body | filled)
    except ValidationError:
        return None


def without(value: Any, path: Sequence[str]) -> Any:
    """Return a copy without what lies at the path, if anything does.

    >>> without({"tracking": [{"type": "wandb", "tags": 5}]}, ["tracking", "0", "tags"])
    {'tracking': [{'type': 'wandb'}]}
    """
    key, *rest = path
    if isinstance(value, list) and rest:
        return [without(item, rest) if str(index) == key else item for index, item in enumerate(value)]
    if not isinstance(value, dict) or key not in value:
        return value
    inner = {key: without(value[key], rest)} if rest else {}
    return {name: item for name, item in value.items() if name != key} | inner


def section_of(field: str) -> str:
    return field.partition(".")[0]


def overlap(field: str, other: str) -> bool:
    """Return whether a field is the other one, or lies within it.

    >>> overlap("reward.options", "reward.options.pattern"), overlap("data.path", "data.path_field")
    (True, False)
    """
    return f"{field}.".startswith(f"{other}.") or f"{other}.".startswith(f"{field}.")
