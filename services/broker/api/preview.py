"""REST of what a new job can name, and of what it would begin with, before it is created."""

import time
from importlib.metadata import entry_points
from typing import Annotated

from fastapi import APIRouter, Query
from pydantic import BaseModel

from onbeat.config import JobConfig
from onbeat.config.templates import moment_of
from onbeat.contracts.installed import ENVIRONMENTS, REWARDS
from onbeat.contracts.rewards import SERVICE_REWARDS
from services.broker.admission.preview import MAX_PROMPTS, Preview
from services.broker.api.context import Broker
from services.broker.api.jobs import AS_TOML
from services.broker.api.problems import documented
from services.broker.api.toml_body import TomlRoute

router = APIRouter(prefix="/v1", tags=["jobs"], responses=documented(422, 503), route_class=TomlRoute)


class Installed(BaseModel):
    """Names that are installed where the broker runs. `tasks` are those of data of the type reasoning_gym."""

    rewards: list[str]
    environments: list[str]
    tasks: list[str]


@router.get("/installed")
async def list_installed(broker: Broker) -> Installed:
    """List the rewards, environments and procedural tasks that a job can name, as far as the broker has them."""
    return Installed(
        rewards=sorted({*entry_points(group=REWARDS).names, *SERVICE_REWARDS}),
        environments=sorted(entry_points(group=ENVIRONMENTS).names),
        tasks=await broker.admission.tasks(),
    )


@router.post("/jobs:preview", responses=documented(400, 413), openapi_extra=AS_TOML)
async def preview_job(
    config: JobConfig, broker: Broker, prompts: Annotated[int, Query(ge=1, le=MAX_PROMPTS)] = 3
) -> Preview:
    """Show the first prompts of a job as the model gets them, and try its rewards on them, without creating it.

    Each prompt is scored with two responses: the answer in its row, if it has one, and an empty one.
    With the objective sft the first examples are shown, as messages.
    """
    return await broker.admission.preview(config.dated(moment_of(time.time())), prompts)
