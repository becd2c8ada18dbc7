"""An open iteration: the versions that it is about, which groups may enter it, and whether engines follow the weights.

After an update an engine may silently compute something else: with a copy of old weights that it has kept, or with
weights in a layout that its kernels do not expect. The trainer's own pass is the fresh computation to compare with, at
no extra cost: its gap to the logprobs that came with the tokens is the iteration's mismatch. In iteration 0 every
engine is as it was started, so that mismatch is the noise of this model, these kernels and this dtype. After the first
updates it must not be much larger.
"""

from dataclasses import dataclass

from onbeat.config import JobConfig
from onbeat.contracts.errors import JobFailed
from onbeat.streams.codec import RolloutGroup, check_logprobs, span_versions

# Number of iterations on updated weights that are compared: in the first, every rollout may have just started.
NUM_PROBED = 3

# Nats per token by which a mismatch may grow beyond three times the first. Ordinary means are 1e-6 in float32 and 0.01
# to 0.13 in bfloat16; packed experts that vLLM read as plain ones were 0.73 off.
SLACK = {"float32": 0.01, "bfloat16": 0.15}


@dataclass
class OpenIteration:
    config: JobConfig
    index: int
    current_version: int  # version of the weights at the start; each update since has moved them
    behaviour_version: int | None = None  # the version that generated its groups; None until the first are here
    num_updates_done: int = 0

    @property
    def old_version(self) -> int | None:
        """The version that the importance ratio divides by; None when it is the policy itself and the ratio is 1."""
        assert self.behaviour_version is not None, "no pass before the first groups are here"
        objective = self.config.objective
        if not objective.has_importance_ratio:
            return None
        wanted = self.behaviour_version if objective.old_policy == "behaviour" else self.current_version
        return None if wanted == self.current_version and self.num_updates_done == 0 else wanted

    @property
    def place_of_step(self) -> int:
        """The place of the next update's step in the job's schedule, from 1."""
        if self.is_supervised:
            return self.index + 1
        return (
            (self.index - self.config.num_supervised) * self.config.training.num_updates_per_iteration
            + self.num_updates_done
            + 1
        )

    @property
    def has_behaviour_logprobs(self) -> bool:
        """True if the pass for the loss includes the policy that generated."""
        is_on_policy = self.behaviour_version == self.current_version and self.num_updates_done == 0
        return is_on_policy or self.behaviour_version == self.old_version

    @property
    def is_supervised(self) -> bool:
        """True if its groups are rows of examples, which no engine generated."""
        return self.config.is_supervised(self.index)

    @property
    def is_probed(self) -> bool:
        """True if the update to come compares the engines with the trainer; the same on every rank."""
        if self.is_supervised:
            return False
        age = self.index - self.config.first_generated
        return self.num_updates_done == 0 and age <= NUM_PROBED + self.config.max_staleness

    def check_mismatch(self, mismatch: float, first: float) -> None:
        """Raise JobFailed if the iteration's mean mismatch shows that engines do not follow. `first`: iteration 0's."""
        if mismatch <= 3 * first + SLACK[self.config.model.dtype]:  # false for NaN as well
            return
        raise JobFailed(
            "the rollouts' engine does not follow the weights: its log-probabilities are "
            f"{mismatch:.2g} nats per token off the trainer's in iteration {self.index}, and were {first:.2g} off in "
            f"iteration 0, before any update. Nothing was learnt from iteration {self.index}. Submit the job again "
            "with another engine (ONBEAT_ENGINE=transformers on the rollouts), or another version of it"
        )

    def verify(self, group: RolloutGroup, vocab_size: int) -> None:
        """Check the group again at this end: the submission script has checked the same rule. Raises JobFailed."""
        if group.HasField("failure"):
            if self.config.rollout.on_group_failure == "fail":
                raise JobFailed(f"group {group.group_id}: {group.failure.kind}: {group.failure.message}")
            return
        if group.is_supervised != self.is_supervised:
            raise JobFailed(f"group {group.group_id} is {'a' if group.is_supervised else 'no'} row of examples")
        if self.is_supervised:
            self._check_tokens(group, vocab_size, num_samples=1)
            return
        wanted, versions = self.behaviour_version, span_versions(group)
        assert wanted is not None, "an iteration with groups is open"
        newest, oldest = self.current_version, self.current_version - self.config.max_staleness
        if versions != [wanted] or not oldest <= wanted <= newest:
            allowed = f"one version, {oldest} to {newest}"
            raise JobFailed(f"group {group.group_id} has tokens of versions {versions}, wanted {wanted} ({allowed})")
        self._check_tokens(group, vocab_size, self.config.rollout.num_samples_per_prompt)

    def _check_tokens(self, group: RolloutGroup, vocab_size: int, num_samples: int) -> None:
        try:
            check_logprobs(group)
            size = len(group.responses)
            if size != num_samples:
                raise ValueError(f"group {group.group_id} has {size} responses, not {num_samples}")
            teacher = self.config.teacher
            has_field = teacher is not None and teacher.prompt_field is not None
            if has_field != bool(group.teacher_prompt_token_ids):
                number = "no second prompt" if has_field else "a second prompt"
                raise ValueError(f"group {group.group_id} has {number} for the teacher, unlike teacher.prompt_field")
            if (largest := largest_token_id(group)) >= vocab_size:
                raise ValueError(f"group {group.group_id} has token id {largest}, the model has {vocab_size} tokens")
        except ValueError as error:
            raise JobFailed(f"{error}; worker {group.worker_id} sent it, stop that one") from error


def largest_token_id(group: RolloutGroup) -> int:
    """Return the largest id of all tokens: of the prompts, sampled, and observed by an episode."""
    sampled = [response.token_ids for response in group.responses]
    observed = [turn.observed_token_ids for response in group.responses for turn in response.turns]
    return max(max(ids) for ids in (group.prompt_token_ids, group.teacher_prompt_token_ids, *sampled, *observed) if ids)
