"""What one iteration reports: names as in the report and `area/name` for the rest."""

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from onbeat.streams.codec import RolloutGroup
from services.trainer.algorithm.gac import GacAction, GacDecision
from services.trainer.batch import MicroBatch
from services.trainer.objective import Loss


class IterationStats:
    def __init__(self, policy_version: int) -> None:
        self._policy_version = policy_version
        self.num_responses = self.num_tokens = self.num_trained_tokens = self.num_rejected_tokens = self.num_pairs = 0
        self._prompt_tokens = self._truncated = self._uniform_groups = self._failed_groups = 0
        self._rewards: list[float] = []
        self._oldest_version = policy_version
        self._busy_s = 0.0
        self._sums: dict[str, float] = {}
        self._mismatch_max = 0.0
        self.values: dict[str, float] = {}
        self.first_failure = ""

    @contextmanager
    def busy(self, name: str) -> Iterator[None]:
        """Adds to `train_s`, and to the metric `name`."""
        started = time.perf_counter()
        try:
            yield
        finally:
            elapsed_s = time.perf_counter() - started
            self._busy_s += elapsed_s
            self.values[name] = self.values.get(name, 0.0) + elapsed_s

    def add_group(self, group: RolloutGroup) -> None:
        """Count a group, whether or not it has a gradient."""
        rewards = [response.reward for response in group.responses]
        if group.HasField("failure"):
            self._failed_groups += 1
            self.first_failure = self.first_failure or f"{group.failure.kind}: {group.failure.message}"
        self._uniform_groups += len(set(rewards)) == 1
        self._rewards += rewards
        self.num_responses += len(rewards)
        self._prompt_tokens += len(rewards) * len(group.prompt_token_ids)
        for response in group.responses:
            self.num_tokens += len(response.token_ids)
            self._truncated += response.finish_reason == "length"
            oldest = min(span.policy_version for span in response.version_spans)
            self._oldest_version = min(self._oldest_version, oldest)

    def add_loss(self, batch: MicroBatch, trainer_logprobs: torch.Tensor, loss: Loss, entropy: torch.Tensor) -> None:
        """Token quantities [N] become means over the trained tokens under `train/NAME`."""
        gap = (trainer_logprobs.detach() - batch.rollout_logprobs).abs()
        self.num_trained_tokens += len(gap)
        self.num_rejected_tokens += loss.num_rejected_tokens
        self.num_pairs += loss.num_pairs
        self._mismatch_max = max(self._mismatch_max, gap.max().item())
        for name, values in {"mismatch": gap, "entropy": entropy, **loss.token_metrics}.items():
            self._sums[name] = self._sums.get(name, 0.0) + values.detach().sum().item()

    def add_decision(self, decision: GacDecision) -> None:
        if decision.cosine is not None:
            self.values["train/grad_cosine"] = decision.cosine
        self.values |= {f"train/gac_{a}": float(decision.action is a) for a in (GacAction.PROJECT, GacAction.SKIP)}

    def report(self) -> dict[str, float]:
        tokens, responses = max(1, self.num_trained_tokens), max(1, self.num_responses)
        means = {f"train/{name}": total / tokens for name, total in self._sums.items() if name != "mismatch"}
        report = {
            "num_responses": self.num_responses,
            "prompt_tokens": self._prompt_tokens,
            "response_tokens": self.num_tokens,
            "reward_mean": statistics.fmean(self._rewards) if self._rewards else 0.0,
            "reward_std": statistics.pstdev(self._rewards) if self._rewards else 0.0,
            "train_s": self._busy_s,
            "num_training_devices": 1,
            "staleness_max": self._policy_version - self._oldest_version,
            "rollout/response_tokens_mean": self.num_tokens / responses,
            "rollout/truncated_frac": self._truncated / responses,
            "rollout/uniform_groups": self._uniform_groups,
            "rollout/failed_groups": self._failed_groups,
            "train/trained_tokens": self.num_trained_tokens,
        }
        if self.num_trained_tokens:
            report |= {"mismatch_mean": self._sums["mismatch"] / tokens, "mismatch_max": self._mismatch_max}
        return report | means | self.values
