"""REST of the doctor: who waits for whom, in one job and in the whole installation."""

from fastapi import APIRouter

from onbeat.types import Diagnosis
from services.broker.api.context import Broker
from services.broker.api.jobs import JobId
from services.broker.api.problems import documented
from services.broker.doctor.diagnosis import diagnose, diagnosis
from services.broker.doctor.explain import explain_job

router = APIRouter(prefix="/v1", tags=["doctor"], responses=documented(422, 503))


@router.get("/jobs/{job_id}:explain", responses=documented(404))
async def get_explanation(job_id: JobId, broker: Broker) -> Diagnosis:
    """Explain the state of a job, problems first. Each finding is a sentence, with the same facts as fields."""
    return diagnosis(await explain_job(broker.ledger, job_id))


@router.get("/doctor")
async def get_diagnosis(broker: Broker) -> Diagnosis:
    """Check Redis, clocks, trainers, rollouts, streams and all active jobs. It also answers when Redis does not."""
    return await diagnose(broker.ledger, is_conducting=broker.is_conducting())
