"""The first step of a trainer process: it announces its start, before it loads PyTorch."""

import asyncio
import os

from onbeat.process.settings import read_settings
from onbeat.streams.starting import announce_start
from services.trainer.settings import Settings


def announce() -> None:
    """Announce that this trainer is starting. Of several ranks the main one does."""
    if os.environ.get("RANK", "0") == "0":
        asyncio.run(announce_from(read_settings(Settings, "trainer")))


async def announce_from(settings: Settings) -> None:
    try:
        redis = settings.connect_redis()
    except ValueError:  # `main` reports it
        return
    await announce_start(redis, settings.pool, trainers=[settings.trainer_id])
    await redis.aclose()
