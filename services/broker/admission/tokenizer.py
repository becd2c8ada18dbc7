"""The check of a model's tokenizer and chat template in a process of its own, before a job is created."""

import json
import logging
import signal

from onbeat.config import JobConfig
from onbeat.process.children import ChildDied, ChildProcess
from services.broker.admission.model_files import Complaint, wrong_model

logger = logging.getLogger(__name__)

CHILD = "services.broker.admission.tokenizer_child"
CPU_S, MEMORY_MB = 20, 4096  # a vocabulary of 260,000 tokens takes about 3 s and 420 MB
CHECK_S = 60.0  # time for all of it, where others use the processor, too


async def review_tokenizer(config: JobConfig) -> list[Complaint]:
    """Complain about the tokenizer of a model in a folder, if it does not fit the model or its template cannot show the
    job's prompts. What is not known in time is left to the trainer, which checks the template again."""
    request = {
        "model": config.model.path,
        "section": config.rendering_field,
        "as_chat": getattr(config.rendering, "as_chat", True),
        "has_environment": bool(config.environments),
        "has_system_prompt": config.has_system_prompt,
        "chat_template": config.model.chat_template,
        "options": config.rendering.template_options,
        "now": config.rendering.now,
    }
    child = await ChildProcess.start("the process that reads it", CHILD, str(CPU_S), str(MEMORY_MB))
    try:
        await child.send(request, CHECK_S)
        problem: str = json.loads(await child.receive(CHECK_S))["problem"]
    except TimeoutError:
        logger.warning("the tokenizer of %s was not checked within %g s", config.model.path, CHECK_S)
        return []
    except ChildDied as error:
        problem = f"tokenizer or chat template of {config.model.path} cannot be used: {reason_of(error)}; correct them"
    finally:
        await child.kill()
    return wrong_model(problem) if problem else []


def reason_of(error: ChildDied) -> str:
    if error.exit_code == -signal.SIGXCPU:
        return f"loading one and rendering the other take more than {CPU_S} s"
    return f"they need more than {MEMORY_MB} MB" if "MemoryError" in error.last_words else str(error)
