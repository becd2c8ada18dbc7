"""The steps of the loop beside training in a job with supervised iterations: waits for evaluations, the gate before RL,
and the loss on held-out rows."""

import json
from collections.abc import Callable
from dataclasses import asdict

from onbeat.config import JobConfig
from onbeat.contracts.errors import JobFailed
from services.trainer.checkpoints.store import TrainState
from services.trainer.held_out_loss import held_out_loss, perplexity
from services.trainer.job.interface import TrainingJob
from services.trainer.policy import Policy
from services.trainer.stats import IterationStats
from services.trainer.supervised import SupervisedRow


class WarmStart:
    """Every rank has one. `leave` writes a checkpoint, and returns whether it is on disk."""

    def __init__(self, job: TrainingJob, config: JobConfig, policy: Policy, leave: Callable[[], bool]) -> None:
        self._job, self._config, self._policy, self._leave = job, config, policy, leave
        self._held_out: list[SupervisedRow] | None = None  # None: not read yet

    def before(self, state: TrainState) -> None:
        """Wait, before an iteration changes weights that are to be evaluated. Raises JobFailed if the job is not to go
        on into RL, and ValueError without the weights that its KL term needs."""
        config, iteration = self._config, state.next_iteration
        if config.warm_start is None:
            return
        if config.is_supervised(iteration):
            if config.is_evaluated(iteration):
                self._job.wait_for_evaluation(iteration)
            return
        if self._policy.started is not None and not self._policy.started.snapshots:
            raise ValueError(
                f"objective.kl.reference: the checkpoint after {iteration} iterations lacks the model at the end of "
                f"the warm start; fork from iteration {config.num_supervised} or an earlier one, or set it to 'base'"
            )
        if iteration == config.num_supervised and config.warm_start.min_pass_at_k is not None:
            self._pass_gate(iteration, config.warm_start.min_pass_at_k)

    def _pass_gate(self, iteration: int, least: float) -> None:
        score = self._job.wait_for_evaluation(iteration).get("pass_at_k")
        if score is not None and score >= least:
            return
        kept = "its checkpoint is kept" if self._leave() else "its checkpoint could not be written"
        reached = "was not evaluated" if score is None else f"solves {score:.3f} of the held-out prompts (pass@k)"
        raise JobFailed(
            f"stopped before RL: the model after the warm start {reached}, and warm_start.min_pass_at_k is {least:g}; "
            f"{kept}. Train longer or on other examples, or lower the limit, in a new job"
        )

    def measure(self, stats: IterationStats, iteration: int) -> None:
        """Add the loss on held-out rows of the version that the iteration has made, if it is due."""
        config, world = self._config, self._policy.world
        section = config.warm_start.held_out if config.warm_start is not None else None
        if section is None or not config.is_supervised(iteration):
            return
        if self._held_out is None:  # before it is due, so that rows that cannot be learned fail the job early
            rows = [asdict(row) for row in self._job.held_out_rows()] if world.is_main else []
            everywhere = json.loads(world.broadcast_bytes(json.dumps(rows).encode()))
            self._held_out = [SupervisedRow(**row) for row in everywhere]
        if (iteration + 1) % section.every_iterations and iteration + 1 != config.num_supervised:
            return
        loss = held_out_loss(self._policy, self._held_out, config.training.row_tokens)
        stats.values["sft/held_out_loss"] = loss
        stats.values["sft/held_out_perplexity"] = perplexity(loss)
        stats.values["sft/held_out_rows"] = len(self._held_out)
