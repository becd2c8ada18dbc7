"""An open iteration: the versions that it is about, and which groups may enter it."""

from dataclasses import dataclass

from onbeat.config import JobConfig
from onbeat.errors import JobFailed
from onbeat.streams.codec import RolloutGroup, check_logprobs, span_versions
from services.trainer.engine_probe import NUM_PROBED
from services.trainer.policy import old_version


@dataclass
class OpenIteration:
    config: JobConfig
    index: int
    current_version: int  # of the weights at its start
    behaviour_version: int | None = None  # the version that generated its groups; None until the first are here
    num_updates_done: int = 0

    @property
    def old_version(self) -> int | None:
        """The version that the importance ratio divides by; None when it is the policy itself."""
        assert self.behaviour_version is not None, "no pass before the first groups are here"
        return old_version(self.config, self.behaviour_version, self.current_version, self.num_updates_done)

    @property
    def place_of_step(self) -> int:
        """The place of the next update's step in the job's schedule, from 1."""
        return self.index * self.config.training.num_updates_per_iteration + self.num_updates_done + 1

    @property
    def has_behaviour_logprobs(self) -> bool:
        """True if the pass for the loss includes the policy that generated."""
        is_on_policy = self.behaviour_version == self.current_version and self.num_updates_done == 0
        return is_on_policy or self.behaviour_version == self.old_version

    @property
    def is_probed(self) -> bool:
        """True if the update to come compares the engines with the trainer; the same on every rank."""
        age = self.index - self.config.first_iteration
        return self.num_updates_done == 0 and age <= NUM_PROBED + self.config.max_staleness

    def verify(self, group: RolloutGroup, vocab_size: int) -> None:
        """Check the group again at this end: the submission script has checked the same rule. Raises JobFailed."""
        if group.HasField("failure"):
            if self.config.rollout.on_group_failure == "fail":
                raise JobFailed(f"group {group.group_id}: {group.failure.kind}: {group.failure.message}")
            return
        wanted, versions = self.behaviour_version, span_versions(group)
        assert wanted is not None, "an iteration with groups is open"
        newest, oldest = self.current_version, self.current_version - self.config.max_staleness
        if versions != [wanted] or not oldest <= wanted <= newest:
            allowed = f"one version, {oldest} to {newest}"
            raise JobFailed(f"group {group.group_id} has tokens of versions {versions}, wanted {wanted} ({allowed})")
        try:
            check_logprobs(group)
            self._check_sizes(group, vocab_size)
        except ValueError as error:
            raise JobFailed(f"{error}; worker {group.worker_id} sent it, stop that one") from error

    def _check_sizes(self, group: RolloutGroup, vocab_size: int) -> None:
        size, num_samples = len(group.responses), self.config.rollout.num_samples_per_prompt
        if size != num_samples:
            raise ValueError(f"group {group.group_id} has {size} responses, not {num_samples}")
        if (largest := largest_token_id(group)) >= vocab_size:
            raise ValueError(f"group {group.group_id} has token id {largest}, the model has {vocab_size} tokens")


def largest_token_id(group: RolloutGroup) -> int:
    """Return the largest id of all tokens: of the prompt, sampled, and observed by an episode."""
    sampled = [response.token_ids for response in group.responses]
    observed = [turn.observed_token_ids for response in group.responses for turn in response.turns]
    return max(max(ids) for ids in (group.prompt_token_ids, *sampled, *observed) if ids)
