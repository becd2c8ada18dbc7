"""The broker's health: whether it is alive, whether it can work, and its metrics."""

import asyncio

from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from redis.exceptions import RedisError

from services.broker.api.context import Broker
from services.broker.api.problems import documented, problem
from services.broker.doctor.diagnosis import find_refusal

router = APIRouter(tags=["health"])

PING_S = 2.0


class Health(BaseModel):
    status: str


@router.get("/livez")
async def livez() -> Health:
    """Report that the process is alive."""
    return Health(status="alive")


@router.get("/readyz", response_model=Health, responses=documented(503))
async def readyz(broker: Broker) -> Response:
    """Report whether the broker can work: Redis answers and the control loop runs."""
    if not broker.is_conducting():
        return problem(503, "Not ready", "the control loop has ended; the broker must be restarted")
    try:
        async with asyncio.timeout(PING_S):
            await broker.ledger.redis.ping()
    except (RedisError, TimeoutError):
        refusal = await find_refusal(broker.ledger)
        silence = f"Redis does not answer within {PING_S:g} s; check ONBEAT_REDIS_URL"
        return problem(503, "Not ready", f"Redis: {refusal}" if refusal else silence)
    return JSONResponse({"status": "ready"})


@router.get("/metrics", response_class=Response)
async def metrics(broker: Broker) -> Response:
    """Return the metrics in the Prometheus text format."""
    body, content_type = await broker.meters.render(broker.ledger)
    return Response(body, media_type=content_type)
