"""A warm start in the real loop: what it learns, what engines get, and how RL begins after it."""

import itertools
from types import SimpleNamespace

import pytest
import torch

from onbeat.contracts.errors import JobFailed
from onbeat.streams.codec import GroupFailure, RolloutGroup
from services.trainer.checkpoints.saver import checkpoint_bytes
from services.trainer.policy import Policy
from services.trainer.rows import RowRecorder
from services.trainer.supervised import SupervisedRow
from tests.trainer_fixtures import RecordedJob, job_config, make_group, make_row, make_rows, tiny_model, train

NUM_SUPERVISED, NUM_ITERATIONS = 2, 4
LORA = {"rank": 4, "alpha": 8, "target_modules": ["q_proj", "v_proj"]}


def config_of(**sections):
    start = {"num_rows_per_iteration": 3, "num_iterations": NUM_SUPERVISED, "learning_rate": 3e-3}
    start |= {"data": {"type": "jsonl", "path": "examples.jsonl"}} | sections.pop("start", {})
    schedule = {"num_iterations": NUM_ITERATIONS} | sections.pop("schedule", {})
    return job_config(warm_start=start, schedule=schedule, checkpoint={"every_iterations": 1}, **sections)


def groups_of_job():
    supervised = [group for iteration in range(NUM_SUPERVISED) for group in make_rows(iteration)]
    generated = [
        make_group(f"{iteration}-{index}", 5, (3, 1, 4), version=iteration)
        for iteration in range(NUM_SUPERVISED, NUM_ITERATIONS)
        for index in range(4)
    ]
    return supervised + generated


def cross_entropy(model, groups):
    """Return the mean over the learned tokens, each row passed by itself with plain attention."""
    losses = []
    for group in groups:
        (response,) = group.responses
        tokens, learned = list(group.prompt_token_ids), [False] * len(group.prompt_token_ids)
        sampled = iter(response.token_ids)
        for observed, count in [(t.observed_token_ids, t.num_sampled) for t in response.turns] or [([], None)]:
            new = list(itertools.islice(sampled, count))
            tokens += [*observed, *new]
            learned += [False] * len(observed) + [True] * len(new)
        logprobs = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
        losses += [-logprobs[place - 1, tokens[place]] for place in range(1, len(tokens)) if learned[place]]
    return torch.stack(losses).mean()


def test_loss_and_step_are_those_of_cross_entropy(tmp_path):
    """One iteration against AdamW on a loop over the rows, in float32."""
    config = config_of(schedule={"num_iterations": 3}, start={"num_iterations": 1, "num_rows_per_iteration": 3})
    config = config.model_copy(update={"schedule": config.schedule.model_copy(update={"num_iterations": 1})})
    trained = train(config, make_rows(0), tmp_path)
    model = tiny_model(dtype=torch.float32, attention="eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.0)
    loss = cross_entropy(model, make_rows(0))
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    assert trained.job.reports[0]["sft/loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert trained.job.reports[0]["train/grad_norm"] == pytest.approx(norm.item(), rel=1e-5)
    for ours, reference in zip(trained.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours, reference, rtol=0, atol=2e-5)


def test_engines_get_the_first_and_the_last_version_of_it(tmp_path):
    job = train(config_of(), groups_of_job(), tmp_path).job
    assert job.published == [0, 2, 3, 4]
    assert [report["train/learning_rate"] for report in job.reports] == [3e-3, 3e-3, 1e-2, 1e-2]
    assert ["reward_mean" in report for report in job.reports] == [False, False, True, True]
    assert ["mismatch_mean" in report for report in job.reports] == [False, False, True, True]


def test_evaluated_versions_are_published_after_a_wait(tmp_path):
    evaluation = {"data": {"type": "jsonl", "path": "held_out.jsonl"}, "every_iterations": 1}
    job = RecordedJob(config_of(evaluation=evaluation), groups_of_job())
    waits = []
    job.wait_for_evaluation = lambda evaluation: waits.append(evaluation) or {}
    assert train(job.config, [], tmp_path, job=job).job.published == [0, 1, 2, 3, 4]
    assert waits == [0, 1, 4]


@pytest.mark.parametrize("lora", [None, LORA])
@pytest.mark.parametrize("resume_from", [1, 2, 3])
def test_a_job_that_goes_on_has_the_same_bits(tmp_path, resume_from, lora):
    """It stops in the warm start, between that and RL, and in RL, whose reference is the model at the start of it."""
    sections = {"objective": {"type": "grpo", "kl": {"coef": 0.1}}, "lora": lora}
    whole = train(config_of(**sections), groups_of_job(), tmp_path / "whole").job.version_digests
    config = config_of(**sections, start={"num_iterations": NUM_SUPERVISED})
    shorter = config.model_copy(update={"schedule": config.schedule.model_copy(update={"num_iterations": resume_from})})
    train(shorter, groups_of_job(), tmp_path / "cut")
    rest = [group for group in groups_of_job() if group.iteration >= resume_from]
    resumed = train(config, rest, tmp_path / "cut", resume_from=resume_from).job
    assert resumed.version_digests == whole[resume_from:]


@pytest.mark.parametrize("lora", [None, LORA])
def test_the_reference_is_the_warm_started_model(tmp_path, lora):
    kls = {}
    for reference in (None, "base"):
        kl = {"coef": 0.1} | ({"reference": reference} if reference else {})
        config = config_of(objective={"type": "grpo", "kl": kl}, lora=lora)
        reports = train(config, groups_of_job(), tmp_path / str(reference)).job.reports
        kls[reference] = [report.get("train/kl") for report in reports]
    assert kls[None][:2] == kls["base"][:2] == [None, None]
    assert kls[None][2] == pytest.approx(0, abs=1e-6)
    assert kls[None][3] > 1e-6
    assert kls["base"][2] > 1e-4


def test_the_size_of_checkpoints_counts_the_reference(tmp_path):
    config = config_of(objective={"type": "grpo", "kl": {"coef": 0.1}})
    train(config, groups_of_job(), tmp_path)
    files = (tmp_path / "checkpoints" / f"iteration-{NUM_ITERATIONS:06}").rglob("*.safetensors")
    estimate = checkpoint_bytes(Policy.create(tiny_model(dtype=torch.float32), config), config)
    assert sum(path.stat().st_size for path in files) == pytest.approx(estimate, rel=0.1)


def test_the_gate_ends_the_job_with_a_checkpoint(tmp_path):
    evaluation = {"data": {"type": "jsonl", "path": "held_out.jsonl"}, "num_samples_per_prompt": 2}
    config = config_of(evaluation=evaluation, start={"min_pass_at_k": 0.5})
    for score, sentence in (({"pass_at_k": 0.25}, "solves 0.250 of the held-out"), ({}, "was not evaluated")):
        job = RecordedJob(config, groups_of_job())
        job.wait_for_evaluation = lambda _, score=score: score
        with pytest.raises(JobFailed, match=f"stopped before RL: the model after the warm start {sentence}"):
            train(config, [], tmp_path / sentence, job=job)
        assert job.checkpoints[-1][1] == NUM_SUPERVISED
    job = RecordedJob(config, groups_of_job())
    job.wait_for_evaluation = lambda _: {"pass_at_k": 0.5}
    assert train(config, [], tmp_path / "passed", job=job).job.iterations == [0, 1, 2, 3]


def failed_row(name):
    return RolloutGroup(group_id=name, failure=GroupFailure(kind="row_too_long", message="row 3 has 9 tokens"))


def test_rows_that_are_too_long_are_left_out(tmp_path):
    """It does not matter what becomes of failed groups; but an iteration needs one row."""
    config = config_of(
        schedule={"num_iterations": 3}, start={"num_iterations": 1}, rollout={"on_group_failure": "fail"}
    )
    config = config.model_copy(update={"schedule": config.schedule.model_copy(update={"num_iterations": 1})})
    report = train(config, [*make_rows(0)[:2], failed_row("0-2")], tmp_path / "one").job.reports[0]
    assert (report["sft/rows"], report["sft/dropped_rows"]) == (2, 1)
    with pytest.raises(JobFailed, match=r"every row of iteration 0 is longer than the context; .*row 3 has 9 tokens"):
        train(config, [failed_row(f"0-{index}") for index in range(3)], tmp_path / "all")


def test_held_out_rows_are_measured(tmp_path):
    held_out = {"data": {"type": "jsonl", "path": "held_out.jsonl"}, "every_iterations": 5}
    job = RecordedJob(config_of(start={"held_out": held_out}), groups_of_job())
    rows = [make_row(seed, (False, True, True)) for seed in (50, 51)]
    job.held_out_rows = lambda: rows
    cut = job.config.model_copy(
        update={"schedule": job.config.schedule.model_copy(update={"num_iterations": NUM_SUPERVISED})}
    )
    trained = train(cut, [], tmp_path, job=job)
    assert ["sft/held_out_loss" in report for report in job.reports] == [False, True]
    plain = tiny_model(dtype=torch.float32, attention="eager")
    plain.load_state_dict(trained.model.state_dict())
    expected = cross_entropy(plain, [held_out_row.as_group() for held_out_row in rows]).item()
    assert job.reports[1]["sft/held_out_loss"] == pytest.approx(expected, rel=1e-4)
    assert job.reports[1]["sft/held_out_rows"] == 2
    assert job.reports[1]["sft/held_out_perplexity"] == pytest.approx(torch.tensor(expected).exp().item(), rel=1e-4)


def test_held_out_rows_that_are_all_too_long_fail_the_job():
    """A mean over no rows would be a loss of 0."""
    held_out = {"data": {"type": "jsonl", "path": "held_out.jsonl"}}
    config = config_of(start={"held_out": held_out, "on_too_long": "drop"})
    texts = ['{"row": 0, "messages": [1, 2, 3, 4]}', '{"row": 1, "messages": [1, 2]}']
    ledger = SimpleNamespace(iterations=SimpleNamespace(held_out_rows=lambda _: texts))
    lease = SimpleNamespace(ledger=ledger, job=SimpleNamespace(id="j"), run=lambda rows: rows)
    tokenizer = SimpleNamespace(tokenize=lambda ids: SupervisedRow(ids, [False] + [True] * (len(ids) - 1)))
    assert [row.token_ids for row in RowRecorder(lease, config, tokenizer, 3, "t").held_out()] == [[1, 2]]
    with pytest.raises(JobFailed, match="each of the 2 rows is longer than the context of 1 tokens"):
        RowRecorder(lease, config, tokenizer, 1, "t").held_out()


def test_generated_groups_and_rows_are_not_mixed_up(tmp_path):
    generated = [make_group(f"0-{index}", 5, (3,), version=0) for index in range(3)]
    with pytest.raises(JobFailed, match="group 0-0 is no row of examples"):
        train(config_of(), generated, tmp_path)
    rows = [*make_rows(0, 4)]
    with pytest.raises(JobFailed, match="group 0-0 is a row of examples"):
        train(job_config(), rows, tmp_path / "rl")
