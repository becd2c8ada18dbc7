"""The rig of the trainer's tests: tiny models, groups, and runs of the real loop over them (`Trained`)."""

import random
from collections import defaultdict
from dataclasses import replace
from typing import NamedTuple

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from onbeat.config import JobConfig
from onbeat.objectives import BUILT_IN
from onbeat.streams.codec import Response, RolloutGroup, VersionSpan
from services.trainer import replay
from services.trainer.accumulate import GradientSum
from services.trainer.batch import pack, rows
from services.trainer.checkpoints.store import CheckpointStore, TrainState
from services.trainer.iteration import OpenIteration
from services.trainer.job.status import Status
from services.trainer.loop import TrainLoop
from services.trainer.model.lora import add_adapters
from services.trainer.model.model import (
    PACKED_ATTENTION,
    Passes,
    register_attention,
    set_up,
    tri_model_logprobs,
    use_attention,
)
from services.trainer.passes.trial import is_head_plain
from services.trainer.policy import Policy
from services.trainer.session import begin, restore
from services.trainer.stats import IterationStats
from services.trainer.supervised import SupervisedRow
from services.trainer.world import ALONE

VOCAB = 61
REWARDED = [kind for kind, objective in BUILT_IN.items() if objective.needs_reward]  # objectives without a teacher


def tiny_config(config_class=LlamaConfig, **options):
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
    }
    return config_class(**(sizes | options))


def tiny_model(config=None, dtype=torch.float64, attention=PACKED_ATTENTION):
    register_attention()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config or tiny_config(), attn_implementation="eager").to(dtype).eval()
    with torch.no_grad():  # the default initialisation is so small that every softmax is flat
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(8.0)
    set_up(model, Passes(has_plain_head=is_head_plain(model)), torch.device("cpu"))
    use_attention(model, attention)
    return model


def moved_model(seed, dtype=torch.float64, by=0.01):
    """Return a tiny model some way from its start."""
    model = tiny_model(dtype=dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=by)
    return model


def make_group(group_id="0-0", prompt_length=5, response_lengths=(3, 1, 4), version=0, seed=0, rewards=None):
    rng = random.Random(f"{seed}-{group_id}")
    iteration = int(group_id.partition("-")[0])

    def tokens(count):
        return [rng.randrange(VOCAB) for _ in range(count)]

    responses = [
        Response(
            token_ids=tokens(length),
            rollout_logprobs=[-rng.random() for _ in range(length)],
            version_spans=[VersionSpan(policy_version=version, start=0, end=length)],
            finish_reason="stop",
            reward=rewards[index] if rewards else rng.random(),
        )
        for index, length in enumerate(response_lengths)
    ]
    return RolloutGroup(
        group_id=group_id,
        iteration=iteration,
        policy_version=version,
        prompt_token_ids=tokens(prompt_length),
        responses=responses,
    )


def make_row(seed=0, learned=(False, False, True, True, False, True)):
    """Make a row of examples with random tokens; `learned`: of each token."""
    generator = torch.Generator().manual_seed(seed)
    return SupervisedRow(torch.randint(VOCAB, (len(learned),), generator=generator).tolist(), list(learned))


def make_rows(iteration, num_rows=3):
    """Make the groups of a supervised iteration: the first one has two learned parts."""
    groups = []
    for index in range(num_rows):
        learned = (False,) * (index + 1) + (True,) * (2 + iteration) if index else (False, True, False, True, True)
        group = make_row(10 * iteration + index, learned).as_group(f"{iteration}-{index}")
        group.iteration = group.policy_version = iteration
        group.is_supervised = True
        groups.append(group)
    return groups


def make_batch():
    """Two unequal groups in one row."""
    return pack([make_group("0-0", 5, (3, 1, 4)), make_group("0-1", 2, (1, 6))], torch.device("cpu"))


def job_config(**sections) -> JobConfig:
    base = {
        "model": {"path": "tiny", "dtype": "float32"},
        "data": {"type": "reasoning_gym", "task": "chain_sum"},
        "reward": {"name": "exact"},
        "rollout": {"num_prompts_per_iteration": 4, "num_samples_per_prompt": 3, "max_response_tokens": 8},
        "optimizer": {"learning_rate": 1e-2},
        "schedule": {"num_iterations": 3},
    }
    for name, values in sections.items():
        base[name] = None if values is None else base.get(name, {}) | values
    return JobConfig.model_validate(base)


def set_rollout_logprobs(groups, logprobs):
    """Give the groups' tokens these log-probabilities of an engine, in order."""
    values = iter(logprobs.tolist())
    for group in groups:
        for response in group.responses:
            response.rollout_logprobs[:] = [next(values) for _ in response.token_ids]


def gradients(model, logprobs):
    """Compute the gradient of a sum in which every token has a different weight."""
    model.zero_grad()
    (logprobs * torch.linspace(-1, 1, len(logprobs), dtype=logprobs.dtype)).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}


def pass_rows(config, models, groups, scale):
    """Pass the groups' rows through policy, old policy and reference, as the trainer does; yields what each gave."""
    policy, old, reference = models
    policy.zero_grad()
    for row in rows(groups, config):
        batch = pack(row, torch.device("cpu"))
        needed = reference if config.objective.needs_reference else None
        logprobs, entropy = tri_model_logprobs(policy, old, needed, batch, 1.0)
        loss = config.objective.loss(batch, logprobs, scale)
        loss.loss_sum.backward()
        yield batch, logprobs, loss, entropy


def gap(left, right):
    """Return the absolute differences of two models' parameters, [P]."""
    return torch.cat([(a - b).flatten() for a, b in zip(left.parameters(), right.parameters(), strict=True)]).abs()


class RecordedJob(replay.RecordedJob):
    """A job that hands out prepared groups in a given order and records what the loop does.

    `arrivals` groups come at a time, with a pause after them unless `is_steady`.
    """

    def __init__(self, config, groups, arrivals=1, micro_batches=None, is_steady=False):
        super().__init__(groups, defaultdict(list, micro_batches or {}))
        self.config, self.job_id = config, "job"
        self._is_steady, self._is_pause = is_steady, False
        self._waiting, self._arrivals = list(self._groups), arrivals
        self.recorded, self.commits, self.checkpoints, self.published, self.held = {}, [], [], [], []
        self.spans, self.advantages, self.events, self.doings = [], [], [], []
        self.status = Status(on_step=lambda: self.doings.append(self.status.doing))

    def num_opened(self):
        return 0

    def accepted(self, iteration, known=()):
        return []

    def take(self, count, timeout_s):
        if self._is_pause:
            self._is_pause = False
            return []
        self._is_pause = not self._is_steady
        taken, self._waiting = self._waiting[: self._arrivals], self._waiting[self._arrivals :]
        return taken

    def is_drained(self, iteration):
        return all(group.iteration != iteration for group in self._waiting)

    def record_micro_batch(self, iteration, group_ids):
        self.recorded.setdefault(iteration, []).append(group_ids)
        return group_ids

    def hold(self, snapshot, delta_bytes):
        self.held.append(snapshot.policy_version)

    def publish(self, snapshot, published):
        self.published.append(snapshot.policy_version)

    def commit(self, commit):
        self.commits.append((commit.iteration, commit.snapshot.manifest.digest, commit.metrics))
        self.spans.append(commit.spans)
        self.advantages.append(commit.advantages)
        return True

    def checkpointed(self, first, next_iteration, path):
        self.checkpoints.append((first, next_iteration, path))

    def emit(self, kind, message):
        self.events.append((kind, message))

    @property
    def reports(self):
        """The reported metrics of each committed iteration, in order."""
        return [metrics for _, _, metrics in self.commits]

    @property
    def version_digests(self):
        """The digests of the committed versions, in order: equal ones are equal bits."""
        return [digest for _, digest, _ in self.commits]

    @property
    def iterations(self):
        """The committed iterations, in order."""
        return [iteration for iteration, _, _ in self.commits]


def model_of(config):
    """Return a tiny model in the job's dtype, with adapters if the job trains adapters."""
    model = tiny_model(dtype=getattr(torch, config.model.dtype))
    if config.lora:
        add_adapters(model, config.lora, config.seed)
    return model


class Trained(NamedTuple):
    """Result of a run of the loop: the model, and the job with everything that the loop gave it."""

    model: torch.nn.Module
    job: RecordedJob


def train(config, groups, tmp_path, model=None, resume_from=None, job=None, world=ALONE, teacher=None, **job_options):
    """Run the real loop over recorded groups, or over those of `job`. A fork begins at `tmp_path/jobs/PARENT`."""
    model = model or model_of(config)
    job = job or RecordedJob(config, groups, **job_options)
    policy = Policy.create(model, config, world)
    policy.teacher = teacher
    policy.files = {"config.json": b"{}"}
    checkpoints = CheckpointStore(tmp_path / "checkpoints", config.checkpoint.keep)
    if config.fork:
        state = begin(tmp_path, "fork", config, policy)
    elif resume_from is not None:
        state = restore(checkpoints, "job", config, policy)
        assert state.next_iteration == resume_from
    else:
        state = TrainState("job", config.model.path)
    TrainLoop(job, config, policy, state, checkpoints).run()
    return Trained(model, job)


class Update(NamedTuple):
    """An update of iteration `index` before its first group, on a fresh policy."""

    gradient: GradientSum
    policy: Policy
    stats: IterationStats


def open_update(config, model=None, index=0, behaviour_version=0, world=ALONE, is_sharded=False):
    policy = replace(Policy.create(model or model_of(config), config, world), is_sharded=is_sharded)
    opened, stats = OpenIteration(config, index, index, behaviour_version), IterationStats(index)
    return Update(GradientSum(opened, policy, stats), policy, stats)


def recorded_iterations(num_iterations=3, seed=0):
    """Groups of whole iterations with unequal lengths, versions as in strict mode."""
    rng = random.Random(seed)
    return [
        make_group(
            f"{iteration}-{index}",
            prompt_length=rng.randrange(1, 9),
            response_lengths=[rng.randrange(1, 8) for _ in range(3)],
            version=iteration,
            seed=seed,
        )
        for iteration in range(num_iterations)
        for index in range(4)
    ]


def rewarded_iteration(iteration, rewards):
    """Groups of one iteration with 4 + (2, 3, 4) tokens, one for each three rewards."""
    return [make_group(f"{iteration}-{i}", 4, (2, 3, 4), iteration, rewards=row) for i, row in enumerate(rewards)]


def stale_iterations(num_iterations, staleness, num_groups=4):
    """Groups of whole iterations, of which iteration t was generated by version max(0, t - staleness)."""
    return [
        make_group(f"{t}-{index}", 4, (3, 2, 5), version=max(0, t - staleness))
        for t in range(num_iterations)
        for index in range(num_groups)
    ]
