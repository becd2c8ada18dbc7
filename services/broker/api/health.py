"""REST of health: whether the broker is alive and can work, its metrics, and the doctor: who waits for whom."""

import asyncio
import os
import pwd
from pathlib import Path

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from redis.exceptions import RedisError

from onbeat.contracts.records import Diagnosis
from onbeat.process.network import is_loopback
from services.broker.api.context import Broker
from services.broker.api.jobs import JobId
from services.broker.api.problems import documented, problem
from services.broker.auth import is_from_here
from services.broker.doctor.diagnosis import diagnose, diagnose_job, find_refusal

router = APIRouter(tags=["health"])
doctor = APIRouter(prefix="/v1", tags=["doctor"], responses=documented(422, 503))

PING_S = 2.0


class Health(BaseModel):
    status: str


class Readiness(Health):
    instance_id: str  # ONBEAT_INSTANCE_ID: a stack knows its own broker by it, and not another one at the same port
    folder: str = ""  # the data folder, and the user who runs the broker: for programs of this machine alone
    user: str = ""


@router.get("/livez")
async def livez() -> Health:
    """Report that the process is alive."""
    return Health(status="alive")


@router.get("/readyz", response_model=Readiness, responses=documented(503))
async def readyz(request: Request, broker: Broker) -> Response:
    """Report whether the broker can work: Redis answers and the control loop runs. Programs of the same machine also
    learn whose stack it is."""
    if not broker.is_conducting():
        return problem(503, "Not ready", "the control loop has ended; the broker must be restarted")
    try:
        async with asyncio.timeout(PING_S):
            await broker.ledger.redis.ping()
    except (RedisError, TimeoutError):
        refusal = await find_refusal(broker.ledger)
        silence = f"Redis does not answer within {PING_S:g} s; check ONBEAT_REDIS_URL"
        return problem(503, "Not ready", f"Redis: {refusal}" if refusal else silence)
    readiness = {"status": "ready", "instance_id": os.environ.get("ONBEAT_INSTANCE_ID", "")}
    return JSONResponse(readiness | (identity(broker.data_dir) if is_local(request) else {}))


def is_local(request: Request) -> bool:
    """Return whether a program of this machine asks, and neither a page in a browser nor a proxy."""
    is_direct = not any(name in request.headers for name in ("forwarded", "x-forwarded-for", "via"))
    is_here = request.client is not None and is_loopback(request.client.host)
    return is_here and is_direct and is_from_here(request.headers)


def identity(data_dir: Path) -> dict[str, str]:
    """Return whose stack this is."""
    try:
        user = pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # as in a container
        user = str(os.getuid())
    return {"folder": str(data_dir), "user": user}


@router.get("/metrics", response_class=Response)
async def metrics(broker: Broker) -> Response:
    """Return the metrics in the Prometheus text format."""
    body, content_type = await broker.meters.render(broker.ledger)
    return Response(body, media_type=content_type)


@doctor.get("/jobs/{job_id}:explain", responses=documented(404))
async def get_explanation(job_id: JobId, broker: Broker) -> Diagnosis:
    """Explain the state of a job, problems first. Each finding is a sentence, with the same facts as fields.

    The verdict is on its learning: reward, truncated responses, time left.
    """
    return await diagnose_job(broker.ledger, job_id)


@doctor.get("/doctor")
async def get_diagnosis(broker: Broker) -> Diagnosis:
    """Check Redis, clocks, trainers, rollouts, streams and all active jobs. It also answers when Redis does not."""
    return await diagnose(broker.ledger, is_conducting=broker.is_conducting(), is_read_only=broker.is_read_only)
