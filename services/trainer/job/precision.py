"""The dtype that a job computes in: resolved once, from the hardware of its trainer and rollouts, and recorded.

    model.dtype   trainer and rollouts                      the job computes in
    auto          all have instructions for bfloat16        bfloat16
    auto          one of them does not                      float32
    bfloat16      one of them emulates it                   bfloat16, with a warning
    bfloat16      the trainer's device cannot               nothing: the job fails

Rollouts that are not there yet do not count: one that joins later computes in the recorded dtype.
"""

from collections.abc import Mapping

from onbeat.config import JobConfig
from onbeat.contracts.errors import JobFailed
from onbeat.machine.processor import Hardware
from onbeat.streams.ledger import Ledger
from services.trainer.settings import Settings

# Measured on AVX2 with PyTorch 2.13: a linear layer's forward pass, and its backward pass on one thread.
EMULATED = "its bfloat16 products take 6 to 25 times as long as those in float32"


async def resolve_dtype(
    ledger: Ledger, job_id: str, epoch: str, fields: Mapping[str, str], hardware: Hardware, settings: Settings
) -> JobConfig:
    """Return the job with its recorded dtype; record it first if this is the job's first trainer.

    Raises JobFailed if the trainer's device cannot compute in it, LeaseLost, and pydantic's ValidationError for a job
    of another version of Onbeat.
    """
    config = JobConfig.of_job(fields)
    wanted = config.model.dtype
    if wanted == "bfloat16" and hardware.bfloat16 == "missing":
        remedy = "submit the job with auto or float32"
        if "dtype" in fields:
            remedy = "in which another trainer began this job; take this trainer out of the pool and resume the job"
        raise JobFailed(f"model.dtype: the trainer's {hardware} cannot compute in bfloat16; {remedy}")
    if "dtype" in fields:
        return config
    slow = [] if hardware.bfloat16 == "native" else [f"the trainer's {hardware}"]
    for rollout in await ledger.workers.live(settings.pool):
        if rollout.bfloat16 in ("emulated", "missing"):
            slow.append(f"{rollout.id}'s {rollout.hardware}")
    if wanted == "auto":
        dtype = "float32" if slow else "bfloat16"
        reason = f"{slow[0]} has no bfloat16 instructions" if slow else "this processor has instructions for it"
    else:
        dtype, reason = wanted, "as the job asks for"
    recorded = await ledger.trainer.record_dtype(job_id, epoch, dtype, f"precision: {dtype} ({reason})")
    if wanted == "bfloat16" and slow:
        warning = f"model.dtype = bfloat16, but {slow[0]} has no instructions for it: {EMULATED}; use auto or float32"
        await ledger.event_log.emit(job_id, "job.warning", warning)
    return config.with_dtype(recorded)
