"""A job that is over goes on: its ledger, its recorded groups and its checkpoints are still there."""

from pydantic import ValidationError

from onbeat.config import JobConfig
from onbeat.errors import CannotResume
from onbeat.streams.ledger import Extension, Ledger
from onbeat.streams.records import following_evaluation
from onbeat.types import JobState
from services.broker.admission import Admission, FieldError, JobRefused


async def resume_over(ledger: Ledger, admission: Admission, job_id: str, num_iterations: int | None) -> None:
    """Let it wait for a trainer. Raises CannotResume with what to do instead, JobRefused, JobNotFound."""
    fields = await ledger.jobs.fields(job_id)
    state, num_before = JobState(fields["state"]), int(fields["num_iterations"])
    check_resumable(job_id, state, num_before, num_iterations)
    try:
        config = JobConfig.model_validate_json(fields["config"])
    except ValidationError as error:
        raise CannotResume(job_id, state, "it is of another version of Onbeat; submit it again") from error
    if num_iterations is None:
        await admission.review(config)
        await ledger.jobs.resume(job_id, state)
        return
    if num_iterations <= num_before:
        message = f"the job has made {num_before} iterations; ask for more of them in all, got {num_iterations}"
        raise JobRefused([FieldError(field="num_iterations", message=message)])
    config = config.extended(num_iterations)
    await admission.review(config)
    next_evaluation = None
    if config.evaluation is not None:
        next_evaluation = following_evaluation(num_before, config.evaluation.every_iterations, num_iterations)
    extension = Extension(config.model_dump(mode="json"), num_iterations, next_evaluation)
    await ledger.jobs.resume(job_id, state, extension)


def check_resumable(job_id: str, state: JobState, num_before: int, num_iterations: int | None) -> None:
    """Raise CannotResume, with what to do instead, unless the job can be resumed so."""
    if not state.is_final:
        raise CannotResume(job_id, state, "only a job that SUCCEEDED can be given more iterations; let it come so far")
    if state is JobState.SUCCEEDED and num_iterations is None:
        reason = (
            f"all of its {num_before} iterations are done; ask for more: `onbeat jobs resume {job_id} --iterations N`"
        )
        raise CannotResume(job_id, state, reason)
    if state is not JobState.SUCCEEDED and num_iterations is not None:
        reason = f"resume it with its {num_before} iterations first; it can be given more when it has SUCCEEDED"
        raise CannotResume(job_id, state, reason)
