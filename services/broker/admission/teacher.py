"""The check of a job's teacher: of its files, as of any model, and of its vocabulary, in a process of its own.

The process has the trainer's code, which compares again when the job starts: what is not known here is left to it.
"""

import importlib.util
import json
import logging

from onbeat.config import JobConfig
from onbeat.process.children import ChildDied, ChildProcess
from services.broker.admission.model_files import Complaint
from services.broker.admission.models import review_model

logger = logging.getLogger(__name__)

CHILD = "services.trainer.vocabularies"
CHECK_S = 60.0  # time for both tokenizers, where others use the processor, too


def review_teacher(config: JobConfig, has_model_folders: bool) -> list[Complaint]:
    """Return complaints about the job's teacher. `has_model_folders`: the trainers' folders can be seen from here."""
    if config.teacher is None:
        return []
    # It sees the prompts as the policy's template makes them, and needs none of its own.
    as_policy = config.model.model_copy(update={"path": config.teacher.path, "chat_template": ""})
    complaints = review_model(config.model_copy(update={"model": as_policy}), has_model_folders)
    return [(field.replace("model.path", "teacher.path"), message) for field, message in complaints]


async def review_vocabulary(config: JobConfig) -> list[Complaint]:
    """Complain about a teacher that has other tokens than the model."""
    if config.teacher is None or importlib.util.find_spec("transformers") is None:
        return []
    models = config.model.path, config.teacher.path
    child = await ChildProcess.start("the process that compares vocabularies", CHILD, *models)
    try:
        problem: str = json.loads(await child.receive(CHECK_S))["problem"]
    except (TimeoutError, ChildDied) as error:
        reason = str(error) or f"not within {CHECK_S:g} s"
        logger.warning("the vocabularies of %s and %s were not compared: %s", *models, reason)
        return []
    finally:
        await child.kill()
    return [("teacher.path", problem)] if problem else []
