"""A check that the rollouts' engines follow the weights. After an update an engine may silently compute something else:
with a copy of old weights that it has kept, or with weights in a layout that its kernels do not expect.

The trainer's own pass is the fresh computation to compare with, at no extra cost: its gap to the logprobs that came
with the tokens is the iteration's mismatch. In iteration 0 every engine is as it was started, so that mismatch is the
noise of this model, these kernels and this dtype. After the first updates it must not be much larger.
"""

from onbeat.errors import JobFailed

# Number of iterations on updated weights that are compared: in the first, every rollout may have just started.
NUM_PROBED = 3

# Nats per token by which a mismatch may grow beyond three times the first. Ordinary means are 1e-6 in float32 and 0.01
# to 0.13 in bfloat16; packed experts that vLLM read as plain ones were 0.73 off.
SLACK = {"float32": 0.01, "bfloat16": 0.15}


def check_mismatch(mismatch: float, first: float, dtype: str, iteration: int) -> None:
    """Raise JobFailed if an iteration's mean mismatch shows that engines do not follow. `first`: iteration 0's."""
    if mismatch <= 3 * first + SLACK[dtype]:
        return
    raise JobFailed(
        "the rollouts' engine does not follow the weights: its log-probabilities are "
        f"{mismatch:.2g} nats per token off the trainer's in iteration {iteration}, and were {first:.2g} off in "
        f"iteration 0, before any update. Nothing was learnt from iteration {iteration}. Submit the job again with "
        "another engine (ONBEAT_ENGINE=transformers on the rollouts), or another version of it"
    )
