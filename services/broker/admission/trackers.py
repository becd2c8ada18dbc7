"""The check that a job's trackers are installed where a trainer may take the job."""

from onbeat.config import JobConfig
from onbeat.streams.ledger import Ledger
from services.broker.admission.models import Complaint


async def review_trackers(ledger: Ledger, config: JobConfig) -> list[Complaint]:
    """Find trackers that no living trainer of the pool has. Without a trainer nothing is known."""
    if not config.tracking:
        return []
    alive = await ledger.trainers.live(config.pool)
    known = [set(trainer.trackers) for trainer in alive if trainer.trackers is not None]
    if not known or len(known) < len(alive):
        return []
    return [
        (
            f"tracking.{index}.type",
            f"{tracker.type} is not installed where the trainers of pool {config.pool} run; install it there and "
            "restart them, or leave the tracker out",
        )
        for index, tracker in enumerate(config.tracking)
        if not any(tracker.type in installed for installed in known)
    ]
