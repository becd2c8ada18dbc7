"""The metrics of one iteration: names as in the report, `area/name` for the rest. They are sums, so replicas add up."""

import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from onbeat.config.schedule import Schedule
from onbeat.contracts.errors import JobFailed
from onbeat.contracts.response_stats import ResponseStats, is_solved, part_name
from onbeat.objectives.base import Loss
from onbeat.objectives.base.kl import kl_estimate
from onbeat.streams.codec import Response, RolloutGroup, do_rewards_differ, given_rewards, group_digest, is_truncated
from onbeat.streams.signal import Signal, does_part_differ
from services.trainer.batch import MicroBatch
from services.trainer.checkpoints.store import TrainState
from services.trainer.episode import CACHED_FRAC, episode_sums
from services.trainer.gac import GacAction, GacDecision
from services.trainer.sources import source_sums, take_source_scores
from services.trainer.spans import Span

Advantages = dict[str, list[float | None]]  # group id -> [G] as trained; None: that response was not trained

COMPARED = ("token/mismatch", "token/divergence")  # sums over `compared_tokens`; all others over the trained tokens

NO_REWARD = "rollout/responses_without_reward"  # only of iterations that have any

MAX_SHOWN = 20_000  # responses of an iteration up to which advantages are published

SPAN_KINDS = {"train/micro_batches_s": "micro_batch", "train/step_s": "optimizer", "train/snapshot_s": "publish"}


@dataclass
class Tally:
    """The counts of an update. All but the first are of groups that count; a step may be divided by them."""

    num_arrived: int = 0  # responses of all groups
    num_tokens: int = 0
    num_responses: int = 0
    num_pairs: int = 0
    num_rejected_tokens: int = 0


@dataclass
class IterationStats:
    """The statistics of one replica's share of an iteration, and of all replicas after `merge`."""

    policy_version: int
    sums: dict[str, float] = field(default_factory=dict)
    maxima: dict[str, float] = field(default_factory=dict)
    values: dict[str, float] = field(default_factory=dict)  # set by the steps: equal on every replica
    first_failure: str = ""
    digests: dict[str, str] = field(default_factory=dict)  # group id -> group_digest of what was used
    tally: Tally = field(default_factory=Tally)  # tally of the update since it began
    spans: list[Span] = field(default_factory=list)  # this replica's only
    advantages: Advantages = field(default_factory=dict)
    responses: ResponseStats = field(default_factory=ResponseStats)
    signal: Signal = field(default_factory=Signal)
    is_supervised: bool = False  # true if the groups are rows of examples

    @contextmanager
    def busy(self, name: str) -> Iterator[None]:
        """Add the block's time to `train_s` and to the metric `name`."""
        with self.span(SPAN_KINDS[name]):
            yield
        elapsed_s = self.spans[-1].end - self.spans[-1].start
        self._add("train_s", elapsed_s)
        self._add(name, elapsed_s)

    @contextmanager
    def span(self, kind: str) -> Iterator[None]:
        """Show the block in the timeline, but in no metric."""
        started = time.monotonic()
        yield
        self.spans.append(Span(kind, started, time.monotonic()))

    def add_micro_batch(self, num_rows: int) -> None:
        """Count a micro-batch that went through the model in `num_rows` passes."""
        self._add("train/micro_batches", 1)
        self._add("train/passes", num_rows)

    def add_group(self, group: RolloutGroup, is_trained: bool, counted: Sequence[Response] | None = None) -> None:
        """Count a group, whether or not it has a gradient. `counted`: the responses by which the update is divided;
        default: all that have a reward."""
        num_responses, rewards = len(group.responses), given_rewards(group)
        assert group.group_id not in self.digests, f"group {group.group_id} is used twice"
        self.digests[group.group_id] = group_digest(group)
        if group.HasField("failure"):
            self._add("rollout/failed_groups", 1)
            self.first_failure = self.first_failure or f"{group.failure.kind}: {group.failure.message}"
        self._add("rollout/uniform_groups", num_responses > 0 and not self.signal.is_in(group))
        self._add("train/skipped_groups", num_responses > 0 and not is_trained)
        self._add("reward", sum(rewards))
        self._add("reward_square", sum(reward * reward for reward in rewards))
        self._add("prompt_tokens", num_responses * len(group.prompt_token_ids))
        self._add("num_responses", num_responses)
        if len(rewards) < num_responses:
            self._add(NO_REWARD, num_responses - len(rewards))
        of_source = source_sums(group, self.responses.solved_at_of(group.source), self.signal)
        for name, total in (episode_sums(group) | of_source).items():
            self._add(name, total)
        self.tally.num_arrived += num_responses
        if counted is None:
            counted = [response for response in group.responses if not response.has_no_reward]
        self.tally.num_responses += len(counted)
        self.tally.num_tokens += sum(len(response.token_ids) for response in counted)
        self.responses.add(group.responses, group.source)
        self._add_unsolved(group)
        for response in group.responses:
            self._add("response_tokens", len(response.token_ids))
            self._add("truncated", is_truncated(response))
            oldest = min(span.policy_version for span in response.version_spans)
            self._raise("staleness_max", self.policy_version - oldest)

    def add_row(self, group: RolloutGroup) -> None:
        """Count a row of examples, which is a group of one response or, if it was too long, of none."""
        assert group.group_id not in self.digests, f"group {group.group_id} is used twice"
        self.digests[group.group_id] = group_digest(group)
        if group.HasField("failure"):
            self._add("sft/dropped_rows", 1)
            self.first_failure = self.first_failure or f"{group.failure.kind}: {group.failure.message}"
        for response in group.responses:
            num_learned = len(response.token_ids)
            num_observed = sum(len(turn.observed_token_ids) for turn in response.turns)
            self._add("sft/rows", 1)
            self._add("response_tokens", num_learned)
            self._add("prompt_tokens", len(group.prompt_token_ids) + num_observed)
            self.tally.num_arrived += 1
            self.tally.num_responses += 1
            self.tally.num_tokens += num_learned

    def _add_unsolved(self, group: RolloutGroup) -> None:
        """Count a group whose rewards differ although no response is solved, and the parts that differ in it."""
        is_any_solved = any(
            is_solved(reward, self.responses.solved_at_of(group.source)) for reward in given_rewards(group)
        )
        is_by_reward = self.signal.rules.get(group.source, "reward") == "reward"  # else it teaches by another rule
        is_counted = is_by_reward and do_rewards_differ(group) and not is_any_solved
        self._add("rollout/mixed_unsolved_groups", is_counted)
        names = {name for response in group.responses for name in response.reward_parts} if is_counted else set()
        for name in sorted(names):
            if does_part_differ(name, group.responses) and part_name(name) in self.responses.parts:
                self._add(f"unsolved/{part_name(name)}", 1)

    def add_loss(
        self,
        batch: MicroBatch,
        trainer_logprobs: torch.Tensor,
        behaviour_logprobs: torch.Tensor | None,
        loss: Loss,
        entropy: torch.Tensor,
    ) -> None:
        """Add a loss. Token quantities [N] become means over the trained tokens under `train/NAME`.

        Two gaps are kept apart: `mismatch` is that of the engines, at the weights that generated; `divergence` (k3) is
        added by newer weights. Without the trainer's own logprobs at those weights (`behaviour_logprobs`) neither is
        known, so their means are over the compared tokens only.
        """
        if loss.advantages is not None:
            self._add_advantages(batch, loss.advantages)
        self.tally.num_pairs += loss.num_pairs
        self.tally.num_rejected_tokens += loss.num_rejected_tokens
        self._add("train/trained_tokens", len(trainer_logprobs))
        token_sums = {"entropy": entropy, **loss.token_metrics}
        if behaviour_logprobs is not None:
            gap = (behaviour_logprobs - batch.rollout_logprobs).abs()
            self._add("compared_tokens", len(gap))
            self._raise("mismatch_max", gap.max().item())
            divergence = kl_estimate("k3", behaviour_logprobs, trainer_logprobs.detach())
            token_sums |= {"mismatch": gap, "divergence": divergence}
        for name, values in token_sums.items():
            self._add(f"token/{name}", values.detach().sum().item())

    def _add_advantages(self, batch: MicroBatch, advantages: torch.Tensor) -> None:
        """Record the advantages of a micro-batch; a group may come in several parts."""
        values, members = iter(advantages.tolist()), iter(torch.cat(batch.members).tolist())
        for group_id, rewards, part in zip(batch.group_ids, batch.group_rewards, batch.members, strict=True):
            recorded = self.advantages.setdefault(group_id, [None] * len(rewards))
            for _ in range(len(part)):
                recorded[next(members)] = round(next(values), 4) + 0.0  # no -0.0

    def add_decision(self, decision: GacDecision) -> None:
        if decision.cosine is not None:
            self.values["train/grad_cosine"] = decision.cosine
        for action in (GacAction.PROJECT, GacAction.SKIP):
            name = f"train/gac_{action}"
            self.values[name] = self.values.get(name, 0.0) + (decision.action is action)

    def merge(self, messages: list[bytes]) -> None:
        """Become the total of the messages (`to_bytes`) of all replicas, this one included, by rank.

        The fixed order gives the same bits everywhere: each replica makes decisions from the total by itself.
        """
        self.sums, self.maxima, self.first_failure, self.digests, self.advantages = {}, {}, "", {}, {}
        before = self.responses
        self.responses = ResponseStats(
            solved_at=before.solved_at, by_source=before.by_source, summed_parts=before.summed_parts
        )
        for message in messages:
            replica = json.loads(message)
            for name, value in replica["sums"].items():
                self._add(name, value)
            for name, value in replica["maxima"].items():
                self._raise(name, value)
            self.first_failure = self.first_failure or replica["first_failure"]
            twice = self.digests.keys() & replica["digests"].keys()
            assert not twice, f"groups {', '.join(sorted(twice))} are used by two replicas"
            self.digests |= replica["digests"]
            self.advantages |= replica["advantages"]
            self.responses.merge(ResponseStats.model_validate(replica["responses"]))

    def to_bytes(self) -> bytes:
        names = ("sums", "maxima", "first_failure", "digests", "advantages")
        recorded = {name: getattr(self, name) for name in names} | {"responses": self.responses.model_dump(mode="json")}
        return json.dumps(recorded).encode()

    @property
    def has_signal(self) -> bool:
        """True if any group has signal, or is a row of examples."""
        if self.is_supervised:
            return True
        num_groups = len(self.digests) - self.sums.get("rollout/failed_groups", 0.0)
        return self.sums.get("rollout/uniform_groups", 0.0) < num_groups

    @property
    def divergence(self) -> float:
        """The estimated KL per token (k3) from the generating policy to the one in training, before its step."""
        return self.sums.get("token/divergence", 0.0) / max(1.0, self.sums.get("compared_tokens", 0.0))

    def shown_advantages(self) -> Advantages:
        """Return the advantages; {} if there are more than MAX_SHOWN responses, as they are for people to look at."""
        return self.advantages if sum(map(len, self.advantages.values())) <= MAX_SHOWN else {}

    def report(self, num_replicas: int = 1, parts: Sequence[str] = ()) -> dict[str, float]:
        """Return the metrics. `parts`: those of the reward that the job has curves of."""
        if self.is_supervised:
            return self._report_rows(num_replicas)
        sums = {"rollout/failed_groups": 0.0, "train/trained_tokens": 0.0, **self.sums}
        responses, tokens = max(1.0, sums.get("num_responses", 0.0)), max(1.0, sums["train/trained_tokens"])
        compared = max(1.0, sums.pop("compared_tokens", 0.0))
        reward_scores = self._reward_scores(sums.pop("reward", 0.0), sums.pop("reward_square", 0.0))
        episodes, later_tokens = sums.pop("num_episodes", 0.0), sums.pop("num_later_prompt_tokens", 0.0)
        report = reward_scores | {
            "num_training_devices": num_replicas,
            "rollout/response_tokens_mean": sums.get("response_tokens", 0.0) / responses,
            "rollout/truncated_frac": sums.pop("truncated", 0.0) / responses,
        }
        report |= {f"rollout/{name}": value for name, value in self.responses.shape().items()}
        report |= self.responses.part_scores(parts) | self.responses.mixed_scores() | take_source_scores(sums)
        for name, total in sums.items():
            if name.startswith("unsolved/"):
                part = name.removeprefix("unsolved/")
                report |= {f"rollout/mixed_unsolved_{part}": total} if part in parts else {}
            elif name.startswith("token/"):
                divisor = compared if name in COMPARED else tokens
                report[name.replace("token/", "train/")] = total / divisor
            elif name.startswith("per_episode/"):
                report[name.removeprefix("per_")] = total / episodes
            elif name == CACHED_FRAC:
                report[name] = total / later_tokens
            else:
                report[name] = total / num_replicas if name.endswith("_s") else total
        if "train/mismatch" in report:
            report["mismatch_mean"] = report.pop("train/mismatch")
        return {"staleness_max": 0.0} | report | self.maxima | self.values

    def _report_rows(self, num_replicas: int) -> dict[str, float]:
        """Return the metrics of a supervised iteration: nothing about rewards, engines and other policies."""
        report: dict[str, float] = {"num_training_devices": num_replicas, "train/trained_tokens": 0.0}
        for name, total in self.sums.items():
            if name == "token/loss":
                report["sft/loss"] = total / max(1.0, self.sums["train/trained_tokens"])
            elif not name.startswith("token/"):
                report[name] = total / num_replicas if name.endswith("_s") else total
        return report | self.maxima | self.values

    @property
    def num_rewarded(self) -> float:
        """Number of responses that have a reward."""
        return self.sums.get("num_responses", 0.0) - self.sums.get(NO_REWARD, 0.0)

    def _reward_scores(self, total: float, squares: float) -> dict[str, float]:
        """Return mean and deviation of the rewards; none if responses came, and all of them without a reward."""
        if self.num_rewarded == 0 and NO_REWARD in self.sums:
            return {}
        mean = total / max(1.0, self.num_rewarded)
        variance = squares / max(1.0, self.num_rewarded) - mean**2
        return {"reward_mean": mean, "reward_std": math.sqrt(max(0.0, variance))}

    def _add(self, name: str, value: float) -> None:
        self.sums[name] = self.sums.get(name, 0.0) + value

    def _raise(self, name: str, value: float) -> None:
        self.maxima[name] = max(self.maxima.get(name, value), value)


def check_signal(stats: IterationStats, schedule: Schedule, state: TrainState, leave: Callable[[], bool]) -> None:
    """Raise JobFailed after too many iterations in a row without signal. A resumed job may have as many again.

    `leave` writes a checkpoint before that, and returns whether it is on disk.
    """
    limit, is_last = schedule.stop_without_signal, state.next_iteration in schedule.ends
    if limit is None or is_last or state.num_without_signal == 0 or state.num_without_signal % limit:
        return
    more = f"`onbeat jobs resume` gives this job {limit} more"
    if not leave():
        more = "its checkpoint could not be written (the trainer's log says why): check the disk before you resume"
    mean = stats.sums["reward"] / max(1.0, stats.num_rewarded)
    raise JobFailed(
        f"stopped after {state.next_iteration} iterations, the last {limit} without signal: in each group all "
        f"responses had {stats.signal.words}; rewards were {mean:g} on average in the last iteration "
        "(schedule.stop_without_signal). "
        f"Read samples, and correct reward or data in a new job; {more}"
    )
