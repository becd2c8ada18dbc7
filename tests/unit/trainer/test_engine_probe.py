"""Engines that keep old weights somewhere end the job before anything is learnt from them; ordinary ones do not."""

import pytest
import torch

from onbeat.contracts.errors import JobFailed
from services.trainer.batch import pack
from services.trainer.iteration import NUM_PROBED
from services.trainer.model.lora import published_tensors
from services.trainer.model.model import response_logprobs
from services.trainer.world import World
from tests.trainer_fixtures import (
    RecordedJob,
    job_config,
    make_group,
    model_of,
    open_update,
    set_rollout_logprobs,
    stale_iterations,
    tiny_model,
    train,
)

pytestmark = pytest.mark.slow

BOUNDED = {"mode": "bounded", "max_staleness": 2, "num_iterations": 5}
JOBS = {
    "periodic": {},
    "sync": {"schedule": {"mode": "sync"}},
    "several updates": {"training": {"num_updates_per_iteration": 2}},
    "lora": {"lora": {"rank": 4}},
    "bounded": {"schedule": BOUNDED},
    "proximal": {"schedule": BOUNDED, "objective": {"old_policy": "proximal", "importance": {"type": "truncated"}}},
    "online dpo": {"schedule": BOUNDED, "objective": {"type": "online_dpo"}},
}
jobs = pytest.mark.parametrize("sections", JOBS.values(), ids=JOBS.keys())


class EngineJob(RecordedJob):
    """Hands out groups once their version is published, with the logprobs of an engine that loaded it.

    `keeps`: the engine never loads tensors with this in their name. `noise`: mean error of its logprobs, in nats.
    """

    def __init__(self, config, keeps="", noise=0.0):
        self._noise = noise
        groups = stale_iterations(config.schedule.num_iterations, config.max_staleness)
        super().__init__(config, groups, arrivals=4)
        self._waiting, self._keeps = [], keeps
        self._engine = tiny_model(dtype=getattr(torch, config.model.dtype))
        self._generator = torch.Generator().manual_seed(0)

    @torch.no_grad()
    def publish(self, snapshot, published):
        super().publish(snapshot, published)
        self.newest = dict(snapshot.tensors())
        for name, tensor in self.newest.items():
            if not self._keeps or self._keeps not in name:
                self._engine.get_parameter(name).copy_(tensor)
        for group in self._groups:
            if group.policy_version == snapshot.policy_version:
                self._generate(group)
                self._waiting.append(group)

    def _generate(self, group):
        logprobs, _ = response_logprobs(self._engine, pack([group], torch.device("cpu")), 1.0)
        errors = torch.randn(logprobs.shape, generator=self._generator) * self._noise * (torch.pi / 2) ** 0.5
        set_rollout_logprobs([group], logprobs + errors)


def run(sections, tmp_path, resume_from=None, **job_options):
    config = job_config(**sections)
    job = EngineJob(config, **job_options)
    train(config, None, tmp_path, resume_from=resume_from, job=job)
    return job


@jobs
def test_job_fails_before_it_learns_from_an_outdated_engine(sections, tmp_path):
    config = job_config(**sections)
    job, model = EngineJob(config, keeps="layers.1.mlp"), model_of(config)
    with pytest.raises(JobFailed, match="does not follow the weights") as failure:
        train(config, None, tmp_path, model, job=job)
    first = config.max_staleness + 1
    assert f"off the trainer's in iteration {first}, " in str(failure.value)
    assert "ONBEAT_ENGINE" in str(failure.value)
    assert job.iterations == list(range(first))
    assert all(torch.equal(job.newest[name], tensor) for name, tensor in published_tensors(model))


@jobs
@pytest.mark.parametrize(("dtype", "noise"), [("float32", 1e-6), ("bfloat16", 0.05), ("bfloat16", 0.13)])
def test_job_with_an_ordinary_engine_ends_well(sections, dtype, noise, tmp_path):
    job = run(sections | {"model": {"dtype": dtype}}, tmp_path, noise=noise)
    assert len(job.commits) == job.config.schedule.num_iterations


def test_engine_is_compared_with_iteration_0_after_a_restart_too(tmp_path):
    one_iteration = {"schedule": {"num_iterations": 1}, "checkpoint": {"every_iterations": 1}}
    run(one_iteration, tmp_path)
    with pytest.raises(JobFailed, match="off the trainer's in iteration 1,"):
        run({}, tmp_path, resume_from=1, keeps="layers.1.mlp")


class RestartedJob(EngineJob):
    """The engine starts again on a version, and keeps a layer from then on."""

    version = 1

    def publish(self, snapshot, published):
        self._keeps = "layers.1.mlp" if snapshot.policy_version > self.version else ""
        super().publish(snapshot, published)


def test_late_rollouts_are_compared_after_their_first_update(tmp_path):
    config = job_config()
    with pytest.raises(JobFailed, match="off the trainer's in iteration 2,"):
        train(config, None, tmp_path, job=RestartedJob(config))


def test_later_iterations_are_not_compared(tmp_path):
    config = job_config(schedule={"num_iterations": NUM_PROBED + 2})
    job = RestartedJob(config)
    job.version = NUM_PROBED
    train(config, None, tmp_path, job=job)
    assert job.reports[-1]["mismatch_mean"] > 0.01


@jobs
@pytest.mark.parametrize("num_updates", [1, 2])
def test_mismatch_is_that_of_the_engines_alone(sections, num_updates, tmp_path):
    """The passes of online DPO and the proximal policy, too, are not at the weights that generated."""
    schedule = sections.get("schedule", {}) | {"num_iterations": NUM_PROBED + 4}
    sections = sections | {"schedule": schedule, "training": {"num_updates_per_iteration": num_updates}}
    job = run(sections, tmp_path, noise=1e-5)
    assert all(0.3e-5 < values["mismatch_mean"] < 3e-5 and values["mismatch_max"] < 1e-4 for values in job.reports)
    if schedule.get("mode") == "bounded":
        assert all(values["train/divergence"] > 1e-3 for values in job.reports[1:]), "the policy has moved since"


@pytest.mark.parametrize("num_groups", [0, 2])
def test_later_all_ranks_compare_the_first_pass_only(num_groups, monkeypatch):
    class Peers(World):
        def largest(self, value):
            return 3

    probed = []

    def probe(version, batch, temperature):
        probed.append((version, batch.group_ids))
        return torch.zeros(len(batch.target_ids))

    config = job_config(**JOBS["online dpo"], training={"max_tokens_per_micro_batch": 1})
    gradient, policy, stats = open_update(config, None, 9, behaviour_version=8, world=Peers(), is_sharded=True)
    monkeypatch.setattr(policy, "logprobs_at", probe)
    gradient.add([make_group(f"9-{i}", response_lengths=(3, 2, 5), version=8) for i in range(num_groups)])
    assert probed == [(8, ["9-0"] if num_groups else ["idle"])]
    assert ("token/mismatch" in stats.sums) == bool(num_groups)
