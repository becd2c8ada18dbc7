"""The checks of a new job against what the ledger knows: the checkpoint of its fork, and the trackers of trainers."""

import json
import re
from pathlib import Path
from typing import Any

from onbeat.config import JobConfig
from onbeat.config.model import RENDERING_RULES, LoraConfig
from onbeat.contracts.answers import ANSWER_RULES
from onbeat.contracts.errors import JobNotFound
from onbeat.contracts.rewards import REWARDS_THAT_COMPARE, recorded_rules
from onbeat.streams.ledger import Ledger
from services.broker.admission.model_files import Complaint
from services.broker.admission.review import reward_uses


async def review_fork(ledger: Ledger, config: JobConfig) -> list[Complaint]:
    """Check that the checkpoint of the fork exists and fits: what is wrong, and what to do."""
    if config.fork is None:
        return []
    parent, wanted = config.fork.job, config.fork.iteration
    try:
        fields = await ledger.jobs.fields(parent)
    except JobNotFound as error:
        return [("fork.job", str(error))]
    of_parent = json.loads(fields["config"])
    lora = of_parent.get("lora") and LoraConfig.model_validate(of_parent["lora"])  # older records lack some fields
    if of_parent["model"]["path"] != config.model.path or lora != config.lora:
        message = f"a fork trains the model of job {parent}, {of_parent['model']['path']}, with the same [lora]"
        return [("model.path", message)]
    if complaints := review_rendering(config, parent, of_parent) + review_rules(
        config, parent, recorded_rules(of_parent)
    ):
        return complaints
    newest = int(fields.get("checkpoint_iteration", "0"))
    kept = kept_checkpoints(fields.get("checkpoint", ""))
    if not (wanted in kept or (not kept and 0 < wanted <= newest)):  # not kept: its trainer has another disk
        known = f"there are those after {', '.join(map(str, kept))}" if kept else f"its newest is after {newest}"
        message = f"job {parent} has no checkpoint after {wanted} iterations; "
        message += known if newest else "it has none yet"
        remedy = "; take one of them, or let the next job keep more (checkpoint.every_iterations, checkpoint.keep)"
        return [("fork.iteration", message + remedy)]
    if wanted >= (num_iterations := config.schedule.num_iterations):
        message = f"is {num_iterations}, but the checkpoint that the job starts from already has {wanted} iterations"
        return [("schedule.num_iterations", f"{message}; raise it")]
    return []


def review_rendering(config: JobConfig, parent: str, of_parent: dict[str, Any]) -> list[Complaint]:
    """Complain if the fork would render prompts by other rules than its parent, and does not say that it wants to."""
    is_same = of_parent["model"].get("rendering_rules") == RENDERING_RULES
    if is_same or "rendering_rules" in config.model.model_fields_set:
        return []
    message = f"the prompts of job {parent} were rendered by other rules than {RENDERING_RULES}, which are those here"
    remedy = f"set it to {RENDERING_RULES} if the fork is to go on with these"
    return [("model.rendering_rules", f"{message} and may give other tokens; {remedy}")]


def review_rules(config: JobConfig, parent: str, rules: int | None) -> list[Complaint]:
    """Complain if the fork would compare answers by other rules than its parent, and does not say that it wants to."""
    if rules is None or rules == ANSWER_RULES:
        return []
    by = f"by rules {rules}" if rules else "without recorded rules"
    return [
        (
            f"{use.field}.answer_rules",
            f"the answers of job {parent} were compared {by}, here they are by rules {ANSWER_RULES}, which may give "
            f"other rewards; set it to {ANSWER_RULES} if the fork is to go on with these",
        )
        for use in reward_uses(config)
        if use.reward.name in REWARDS_THAT_COMPARE and "answer_rules" not in use.reward.model_fields_set
    ]


def kept_checkpoints(newest: str) -> list[int]:
    """Return the iterations that have a checkpoint, ascending; [] if the newest one's folder is not on this machine."""
    state_files = Path(newest).parent.glob("iteration-*/state.json") if newest else ()
    names = [re.fullmatch(r"iteration-(\d{6,})", path.parent.name) for path in state_files]  # a copy has another name
    return sorted(int(name[1]) for name in names if name)


async def review_trackers(ledger: Ledger, config: JobConfig) -> list[Complaint]:
    """Find trackers that no living trainer of the pool has. Without a trainer nothing is known."""
    if not config.tracking:
        return []
    alive = await ledger.trainers.live(config.pool)
    known = [set(trainer.trackers) for trainer in alive if trainer.trackers is not None]
    if not known or len(known) < len(alive):
        return []
    place = f"where the trainers of pool {config.pool} run"
    remedy = "install it there and restart them, or leave the tracker out"
    return [
        (f"tracking.{index}.type", f"{tracker.type} is not installed {place}; {remedy}")
        for index, tracker in enumerate(config.tracking)
        if not any(tracker.type in installed for installed in known)
    ]
