"""Periodic equals synchronous; the recorded order replays to the same bits; what goes wrong is loud."""

import json
import random
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from onbeat.contracts.errors import JobFailed
from onbeat.contracts.response_stats import MAX_PARTS
from onbeat.contracts.states import JobState
from onbeat.objectives import BUILT_IN
from onbeat.objectives.base import Logprobs
from onbeat.objectives.grpo import GrpoObjective
from onbeat.streams.codec import GroupFailure, RolloutGroup
from services.trainer import loop
from services.trainer import stats as stats_module
from services.trainer.batch import pack
from services.trainer.job.interface import Stopped
from services.trainer.model.model import response_logprobs
from services.trainer.policy import Policy
from services.trainer.stats import IterationStats
from services.trainer.world import World
from tests.trainer_fixtures import (
    REWARDED,
    RecordedJob,
    gap,
    job_config,
    model_of,
    open_update,
    recorded_iterations,
    rewarded_iteration,
    set_rollout_logprobs,
    tiny_config,
    tiny_model,
    train,
)

PERIODIC = {"mode": "periodic", "num_iterations": 3}
SYNC = {"mode": "sync", "num_iterations": 3}


def shuffled_within_iterations(groups, seed):
    rng = random.Random(seed)
    return sorted(groups, key=lambda group: (group.iteration, rng.random()))


@pytest.mark.parametrize(
    ("objective", "kl_coef"),
    [
        (objective, coef)
        for objective in [
            {"type": kind, **({} if kind == "online_dpo" else {"normalization": normalization})}
            for kind in REWARDED
            if "periodic" in BUILT_IN[kind].modes
            for normalization in (
                ["-"] if kind == "online_dpo" else ["token_mean", "sequence_mean", "sequence_sum", "constant"]
            )
        ]
        for coef in (0.0, 0.1)
        if coef == 0.0 or objective["type"] != "online_dpo"
    ],
    ids=lambda value: "-".join(value.values()) if isinstance(value, dict) else None,
)
def test_periodic_equals_sync_in_any_arrival_order(objective, kl_coef, tmp_path):
    seed = len(objective["type"])
    objective = objective | {"kl": {"coef": kl_coef}}
    groups = recorded_iterations(seed=seed)
    sync = job_config(schedule=SYNC, objective=objective)
    periodic = job_config(schedule=PERIODIC, objective=objective, training={"max_tokens_per_micro_batch": 40})
    expected, _ = train(sync, groups, tmp_path / "sync", arrivals=12)
    arrived = shuffled_within_iterations(groups, seed)
    trained, _ = train(periodic, arrived, tmp_path / "periodic", arrivals=2)
    # AdamW's first steps divide by the gradient's own size: where it is all but zero, order noise shows in the sign.
    assert gap(model_of(sync), expected).max() > 1e-2, "the job must have moved the weights for this to mean anything"
    assert gap(trained, expected).mean() < 1e-6
    assert gap(trained, expected).max() < 1e-3


@pytest.mark.parametrize("lora", [{}, {"lora": {"rank": 2}}], ids=["full", "lora"])
def test_a_warm_up_changes_no_bit_of_the_training(lora, tmp_path, monkeypatch):
    config, groups = job_config(schedule=PERIODIC, **lora), recorded_iterations()
    _, expected = train(config, groups, tmp_path / "cold")
    monkeypatch.setattr(loop, "COMPILING_DEVICES", ("cpu",))
    _, job = train(config, groups, tmp_path / "warm")
    assert "compiling its kernels" in job.doings
    assert "compiling its kernels" not in expected.doings
    assert [commit[:2] for commit in job.commits] == [commit[:2] for commit in expected.commits]


def test_stop_during_the_warm_up_leaves_the_job_as_it_was(tmp_path, monkeypatch):
    class StoppedJob(RecordedJob):
        def check(self):
            raise Stopped("this process was asked to stop")

    monkeypatch.setattr(loop, "COMPILING_DEVICES", ("cpu",))
    config, groups = job_config(schedule=PERIODIC), recorded_iterations()
    job = StoppedJob(config, groups)
    with pytest.raises(Stopped):
        train(config, groups, tmp_path, job=job)
    assert (job.published, job.checkpoints) == ([], [])


def test_no_rank_asks_for_the_job_once_another_may_have_ended_it(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(RecordedJob, "check", lambda self: calls.append("check") or JobState.RUNNING)
    gather = World.all_gather_bytes
    monkeypatch.setattr(World, "all_gather_bytes", lambda *content: calls.append("gather") or gather(*content))
    train(job_config(schedule=PERIODIC), recorded_iterations(), tmp_path)
    assert calls[-2:] == ["check", "gather"]


@pytest.mark.parametrize(
    ("is_steady", "training", "sizes"),
    [(False, {}, [1, 1, 1, 1]), (True, {}, [4]), (True, {"max_tokens_per_micro_batch": 1}, [1, 1, 1, 1])],
    ids=["apart", "close", "close, but full"],
)
def test_groups_close_behind_one_another_share_a_pass(is_steady, training, sizes, tmp_path):
    config = job_config(schedule=PERIODIC | {"num_iterations": 1}, training=training)
    _, job = train(config, recorded_iterations(1), tmp_path, is_steady=is_steady)
    assert [len(batch) for batch in job.recorded[0]] == sizes


def test_recorded_order_replays_bit_for_bit_in_either_mode(tmp_path):
    groups = shuffled_within_iterations(recorded_iterations(), 7)
    budget = {"max_tokens_per_micro_batch": 45}
    periodic = job_config(schedule=PERIODIC, training=budget)
    first, job = train(periodic, groups, tmp_path / "a", arrivals=3)
    assert len({len(batch) for batches in job.recorded.values() for batch in batches}) > 1
    sync = job_config(schedule=SYNC, training=budget)
    again, _ = train(sync, groups, tmp_path / "b", arrivals=99, micro_batches=job.recorded)
    assert gap(first, again).max() == 0.0


@pytest.mark.parametrize(
    ("objective", "divisor"),
    [
        ({}, "tokens"),
        ({"importance": {"type": "band", "low": 0.05, "high": 5.0}}, "kept tokens"),
        ({"normalization": "sequence_mean"}, "responses"),
    ],
    ids=["tokens", "kept tokens", "responses"],
)
def test_sum_is_divided_once_by_what_the_objective_says(objective, divisor, tmp_path):
    """AdamW hides a factor of the gradient, its norm does not."""
    config, groups = job_config(objective=objective, schedule={"num_iterations": 1}), recorded_iterations(1)
    model = tiny_model(dtype=torch.float32)
    batch = pack(groups, torch.device("cpu"))
    logprobs, _ = response_logprobs(model, batch, 1.0)
    loss = config.objective.loss(batch, Logprobs(logprobs, logprobs.detach(), None))
    loss.loss_sum.backward()
    norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()]).item()
    num_kept = len(logprobs) - loss.num_rejected_tokens
    counts = {"tokens": len(logprobs), "kept tokens": num_kept, "responses": len(batch.response_lengths)}
    assert (num_kept < len(logprobs)) == (divisor == "kept tokens")
    metrics = train(config, groups, tmp_path).job.reports[0]
    assert metrics["train/grad_norm"] == pytest.approx(norm / counts[divisor], rel=1e-4)


def test_clip_keeps_the_direction_of_the_whole_gradient():
    optimizer = Policy.create(tiny_model(dtype=torch.float32), job_config()).optimizer
    gradients = optimizer.gradients()
    for gradient in gradients.values():
        gradient.normal_()
    before = {name: gradient.clone() for name, gradient in gradients.items()}
    norm, limit = optimizer.clip(), optimizer.config.max_grad_norm
    assert norm > limit
    for name, gradient in optimizer.gradients().items():
        torch.testing.assert_close(gradient, before[name] * (limit / norm))


def test_report_counts_worked_by_hand(tmp_path):
    groups = rewarded_iteration(0, [[0.0, 0.0, 1.0]] * 4)
    groups[0].responses[0].finish_reason = "length"
    metrics = train(job_config(schedule={"num_iterations": 1}), groups, tmp_path).job.reports[0]
    assert metrics["reward_mean"] == pytest.approx(1 / 3)
    assert (metrics["num_responses"], metrics["prompt_tokens"], metrics["response_tokens"]) == (12, 48, 36)
    assert metrics["rollout/truncated_frac"] == pytest.approx(1 / 12)
    assert metrics["staleness_max"] == 0
    lengths = [metrics[f"rollout/response_tokens_{name}"] for name in ("min", "mean", "p95", "max")]
    assert lengths == [2, 3, 4, 4]
    assert (metrics["rollout/solved_all_frac"], metrics["rollout/solved_none_frac"]) == (0.0, 0.0)


def test_parts_of_the_reward_keep_their_curves_after_a_resume(tmp_path):
    checkpoint = {"every_iterations": 1}
    whole = job_config(schedule={"num_iterations": 2}, checkpoint=checkpoint)
    half = job_config(schedule={"num_iterations": 1}, checkpoint=checkpoint)
    groups = recorded_iterations(2)
    for group in groups:
        for index, response in enumerate(group.responses):
            response.reward_parts.update({"short": index} | {f"x{group.iteration}-{n}": 1.0 for n in range(20)})
    first = train(half, groups[:4], tmp_path).job.reports[0]
    second = train(whole, groups[4:], tmp_path, resume_from=1).job.reports[0]
    names = {name for name in first if name.startswith("reward/")}
    assert len(names) == 2 * MAX_PARTS
    assert {name for name in second if name.startswith("reward/")} == {"reward/short_mean", "reward/short_std"} < names


def test_wait_for_other_replicas_is_no_busy_time(tmp_path, monkeypatch):
    waited_s = 0.0
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + waited_s)
    monkeypatch.setattr(stats_module, "time", clock)

    class WorldOfALateRank(World):
        def sum_scalars(self, values):
            nonlocal waited_s
            waited_s += 1000.0
            return super().sum_scalars(values)

    config = job_config(schedule={"num_iterations": 1})
    trained = train(config, recorded_iterations(1), tmp_path, world=WorldOfALateRank())
    assert waited_s > 0
    assert trained.job.reports[0]["train/step_s"] < 500
    assert max(span.end - span.start for span in trained.job.spans[0]) < 500


def test_mismatch_is_the_gap_between_trainer_and_rollout(tmp_path):
    config, groups = job_config(schedule={"num_iterations": 1}), recorded_iterations(1)
    batch = pack(groups, torch.device("cpu"))
    exact, _ = response_logprobs(tiny_model(dtype=torch.float32), batch, 1.0)
    set_rollout_logprobs(groups, exact)
    groups[1].responses[0].rollout_logprobs[0] += 0.5
    metrics = train(config, groups, tmp_path).job.reports[0]
    assert metrics["mismatch_max"] == pytest.approx(0.5, abs=1e-4)
    assert metrics["mismatch_mean"] == pytest.approx(0.5 / len(exact), abs=1e-4)


def test_a_failed_group_is_skipped_or_fails_the_job_as_asked(tmp_path):
    failure = GroupFailure(kind="reward_failed", message="boom")
    all_broken = [RolloutGroup(group_id=f"0-{i}", failure=failure) for i in range(4)]
    groups = [*recorded_iterations(1)[:3], all_broken[3]]
    schedule = {"num_iterations": 1}
    for num_updates in (1, 4):  # the last of four has only failed groups: it takes no step
        config = job_config(schedule=schedule, training={"num_updates_per_iteration": num_updates})
        metrics = train(config, groups, tmp_path / str(num_updates)).job.reports[0]
        assert (metrics["rollout/failed_groups"], metrics["num_responses"]) == (1, 9)
    with pytest.raises(JobFailed, match=r"0-3.*reward_failed.*boom"):
        train(job_config(schedule=schedule, rollout={"on_group_failure": "fail"}), groups, tmp_path / "fail")
    with pytest.raises(JobFailed, match=r"every group of iteration 0 failed.*reward_failed: boom"):
        train(job_config(schedule=schedule), all_broken, tmp_path / "all")


def test_a_token_of_another_version_is_refused(tmp_path):
    groups = recorded_iterations(1)
    groups[2].responses[1].version_spans[0].policy_version = 4
    with pytest.raises(JobFailed, match=r"0-2 has tokens of versions \[0, 4\]"):
        train(job_config(schedule={"num_iterations": 1}), groups, tmp_path)


def test_non_finite_loss_names_its_groups_and_spares_the_weights(tmp_path):
    groups = recorded_iterations(1)
    groups[1].responses[0].reward = float("inf")
    config, model = job_config(schedule={"num_iterations": 1}), tiny_model(dtype=torch.float32)
    with pytest.raises(JobFailed, match="0-1"):
        train(config, groups, tmp_path, model=model)
    assert gap(model, model_of(config)).max() == 0.0


def test_non_finite_gradient_names_groups_and_spares_the_weights(tmp_path, monkeypatch):
    """The loss is finite, but the derivative of one group's is not: sqrt at 0."""

    def broken(objective, batch, logprobs, scale, call=GrpoObjective.loss):
        loss = call(objective, batch, logprobs, scale)
        if "0-2" in batch.group_ids:
            loss = replace(loss, loss_sum=loss.loss_sum + (logprobs.trainer - logprobs.old).sum().abs().sqrt())
        return loss

    monkeypatch.setattr(GrpoObjective, "loss", broken)
    config, model = job_config(schedule={"num_iterations": 1}), tiny_model(dtype=torch.float32)
    with pytest.raises(JobFailed, match=r"gradient is not finite.*no step was taken.*own gradient is not finite: 0-2$"):
        train(config, recorded_iterations(1), tmp_path, model=model, arrivals=4)
    assert gap(model, model_of(config)).max() == 0.0


@pytest.mark.parametrize(("peers", "named"), [(["0-7"], "0-7"), ([], "none, only their sum")])
def test_groups_to_blame_are_those_of_all_replicas(peers, named):
    class Pair(World):
        def all_gather_bytes(self, content):
            return [content, json.dumps(peers).encode()]

    gradient = open_update(job_config(), world=Pair(0, 2)).gradient
    gradient.add(recorded_iterations(1)[:1])
    assert gradient.groups_to_blame() == named


@pytest.mark.parametrize(
    "sections", [{}, {"lora": {"rank": 2}, "model": {"dtype": "bfloat16"}}], ids=["full", "lora in bfloat16"]
)
def test_resume_from_a_checkpoint_reaches_the_same_bits(sections, tmp_path):
    groups = recorded_iterations(4)
    whole = job_config(schedule={"num_iterations": 4}, checkpoint={"every_iterations": 2}, **sections)
    expected, job = train(whole, groups, tmp_path / "whole", arrivals=4)
    assert [(first, upto) for first, upto, _ in job.checkpoints] == [(0, 2), (2, 4)]
    half = job_config(schedule={"num_iterations": 2}, checkpoint={"every_iterations": 2}, **sections)
    train(half, groups[:8], tmp_path / "half", arrivals=4)
    resumed = train(whole, groups[8:], tmp_path / "half", arrivals=4, resume_from=2)
    assert resumed.job.iterations == [2, 3]
    assert gap(expected, resumed.model).max() == 0.0


@pytest.mark.parametrize("num_updates", [1, 2])
def test_stopped_trainer_leaves_what_it_has_committed(tmp_path, num_updates):
    class StoppingJob(RecordedJob):
        """A job whose trainer is asked to stop when the last micro-batch of an iteration has been recorded."""

        stops_in = 0

        def check(self):
            if len(self.recorded.get(self.stops_in, [])) == 4:
                raise Stopped
            return super().check()

    sections = {"schedule": PERIODIC, "training": {"num_updates_per_iteration": num_updates}}
    config, groups = job_config(**sections), recorded_iterations(3)
    expected, _ = train(config, groups, tmp_path / "whole")
    job = StoppingJob(config, groups)
    job.stops_in = 2
    with pytest.raises(Stopped):
        train(config, groups, tmp_path / "halves", job=job)
    if num_updates == 2:  # the first update of iteration 2 has moved the weights: all is to be repeated
        assert job.checkpoints == []
        return
    assert [(first, upto) for first, upto, _ in job.checkpoints] == [(0, 2)]
    resumed, _ = train(config, groups[8:], tmp_path / "halves", resume_from=2, micro_batches=job.recorded)
    assert gap(expected, resumed).max() == 0.0


def test_checkpoint_of_another_model_is_refused_by_name(tmp_path):
    config = job_config(schedule={"num_iterations": 1}, checkpoint={"every_iterations": 1})
    train(config, recorded_iterations(1), tmp_path)
    other = tiny_model(tiny_config(hidden_size=16), torch.float32)
    with pytest.raises(ValueError, match=r"iteration-000001 cannot be used: the checkpoint is of another model"):
        train(config, [], tmp_path, model=other, resume_from=1)


def test_bfloat16_parameters_keep_float32_masters(tmp_path):
    """An update far below bf16 resolution must add up over iterations instead of vanishing."""
    config = job_config(optimizer={"learning_rate": 1e-5}, schedule={"num_iterations": 3})
    model = tiny_model(dtype=torch.bfloat16)
    _, job = train(config, recorded_iterations(3), tmp_path, model=model)
    state = load_file(job.checkpoints[-1][2] + "/optimizer/rank-00000-of-00001.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    master, parameter = state[f"master.{name}"], dict(model.named_parameters())[name]
    assert master.dtype == torch.float32
    assert not torch.equal(master, parameter.float())
    assert torch.equal(master.bfloat16(), parameter)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_published_weights_are_those_after_the_step(dtype, tmp_path):
    """They are encoded while later parameters are still being stepped."""
    model, job = train(job_config(), recorded_iterations(3), tmp_path, model=tiny_model(dtype=dtype))
    published = load_file(job.checkpoints[-1][2] + "/model.safetensors")
    assert all(torch.equal(published[name], parameter) for name, parameter in model.named_parameters())


def test_group_used_twice_is_noticed_before_the_commit():
    from tests.world import make_group, tasks_for

    first, second = (make_group(task, version=0) for task in tasks_for(0))
    stats, replica = IterationStats(0), IterationStats(0)
    stats.add_group(first, is_trained=True)
    with pytest.raises(AssertionError, match="0-0 is used twice"):
        stats.add_group(first, is_trained=True)
    replica.add_group(second, is_trained=True)
    stats.merge([stats.to_bytes(), replica.to_bytes()])
    assert stats.digests.keys() == {"0-0", "0-1"}
    with pytest.raises(AssertionError, match="0-1 are used by two replicas"):
        stats.merge([stats.to_bytes(), replica.to_bytes()])
