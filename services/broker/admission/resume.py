"""The resumption of a job that is over. Its ledger, its recorded groups and its checkpoints are still there."""

import json

from pydantic import ValidationError

from onbeat.config import JobConfig
from onbeat.config.explain import first_wrong
from onbeat.config.model import RENDERING_RULES
from onbeat.contracts.answers import ANSWER_RULES
from onbeat.contracts.errors import CannotResume
from onbeat.contracts.rewards import recorded_rules
from onbeat.contracts.states import JobState
from onbeat.streams.ledger import Extension, Ledger
from onbeat.streams.records import following_evaluation
from services.broker.admission.review import Admission, JobRefused


async def resume_over(
    ledger: Ledger, admission: Admission, job_id: str, num_iterations: int | None, max_pending: int
) -> None:
    """Make the job wait for a trainer again. Raises CannotResume with what to do instead, JobRefused, TooManyPending,
    JobNotFound."""
    fields = await ledger.jobs.fields(job_id)
    state, num_before = JobState(fields["state"]), int(fields["num_iterations"])
    check_resumable(job_id, state, num_before, num_iterations)
    try:
        config = JobConfig.model_validate_json(fields["config"])
    except ValidationError as error:
        reason = f"its configuration does not fit what is installed here ({first_wrong(error)}); submit it again"
        raise CannotResume(job_id, state, reason) from error
    if "rendering_rules" not in json.loads(fields["config"])["model"]:
        reason = f"its prompts were rendered without the rules {RENDERING_RULES} of this version, by which text that "
        raise CannotResume(job_id, state, f"{reason}looks like a control token is plain text; submit it again")
    if recorded_rules(json.loads(fields["config"])) == 0:
        reason = f"its answers were compared without the rules {ANSWER_RULES} of this version, which give other rewards"
        raise CannotResume(job_id, state, f"{reason}; submit it again")
    extension = None
    if num_iterations is not None:
        if num_iterations <= num_before:
            message = f"the job has done {num_before} iterations; give a larger total, got {num_iterations}"
            raise JobRefused([("num_iterations", message)])
        config, every = config.extended(num_iterations), config.evaluation and config.evaluation.every_iterations
        due = following_evaluation(num_before, every, num_iterations) if every else None
        extension = Extension(config.model_dump(mode="json"), num_iterations, due)
    complaints, _ = await admission.examine(config)
    if complaints:
        raise JobRefused(complaints)
    await ledger.jobs.resume(job_id, state, extension, max_pending)


def check_resumable(job_id: str, state: JobState, num_before: int, num_iterations: int | None) -> None:
    """Raise CannotResume, with what to do instead, unless a job in this state can be resumed with these iterations."""
    if not state.is_final:
        raise CannotResume(job_id, state, "only a job that SUCCEEDED can get more iterations; wait until it has")
    if state is JobState.SUCCEEDED and num_iterations is None:
        more = f"`onbeat jobs resume {job_id} --iterations N`"
        raise CannotResume(job_id, state, f"all of its {num_before} iterations are done; ask for more: {more}")
    if state is not JobState.SUCCEEDED and num_iterations is not None:
        reason = f"resume it without more iterations first; it can get more than its {num_before} once it has SUCCEEDED"
        raise CannotResume(job_id, state, reason)
