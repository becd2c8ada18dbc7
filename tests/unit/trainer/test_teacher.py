"""A teacher (`[teacher]`): its gradient by enumeration and against loops in float64, and the real training loop."""

import math
from dataclasses import replace

import pytest
import torch

from onbeat.contracts.errors import JobFailed
from onbeat.objectives.base.teacher import TeacherConfig
from services.trainer.batch import pack, rows
from services.trainer.checkpoints.store import CheckpointStore
from services.trainer.episode import turn_paths
from services.trainer.model import logprobs as head
from services.trainer.model.lora import add_adapters
from services.trainer.model.model import response_logprobs, tri_model_logprobs, use_attention
from services.trainer.teacher import Teacher, check_full_vocabulary, check_memory, known_tokens
from tests.trainer_episodes import make_episodes
from tests.trainer_fixtures import (
    REWARDED,
    VOCAB,
    RecordedJob,
    job_config,
    make_group,
    moved_model,
    recorded_iterations,
    stale_iterations,
    tiny_config,
    tiny_model,
    train,
)

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
DIVERGENCES = ["sampled_token", "full_vocabulary"]


def distill_config(teacher=None, **sections):
    """Return a job that learns from a teacher alone, without rewards."""
    objective = {"type": "distill"} | sections.pop("objective", {})
    return job_config(objective=objective, reward=None, teacher={"path": "t"} | (teacher or {}), **sections)


def hinted(config):
    """Return the job with a second prompt for its teacher in each row."""
    return config.model_copy(update={"teacher": config.teacher.model_copy(update={"prompt_field": "hint"})})


def teacher_of(config, model=None, missing=(), dtype=torch.float64):
    """Return a frozen teacher that lacks some of the tokens."""
    is_known = torch.ones(VOCAB, dtype=torch.bool)
    is_known[list(missing)] = False
    model = (model or moved_model(7, dtype, by=0.05)).requires_grad_(False)
    return Teacher(model, config.teacher, is_known, is_complete=not missing, stand_in=0)


def loss_of(config, policy, teacher, groups, temperature=1.0, old=None):
    batch = pack(groups, CPU)
    logprobs, _ = tri_model_logprobs(policy, old, None, batch, temperature, teacher)
    return config.objective.loss(batch, logprobs), logprobs


def assert_equal(computed, expected, tolerance=1e-5):
    """Norms of layers are in float32 also in a model of float64."""
    assert (computed - expected).norm() <= tolerance * expected.norm() > 0


def gradient_of(loss_sum, model):
    grads = torch.autograd.grad(loss_sum, [p for p in model.parameters() if p.requires_grad])
    return torch.cat([grad.flatten() for grad in grads])


def distribution(model, tokens, temperature=1.0):
    """Return the log-probabilities [T, V] of the next token after each, from transformers' own pass."""
    use_attention(model, "sdpa")
    logits = model(torch.tensor([tokens]), use_cache=False).logits[0]
    use_attention(model, "onbeat_shared_prompt")
    return (logits / temperature).log_softmax(-1)


# ---- the gradient ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("clip", [None, 0.5])
def test_expected_gradient_is_that_of_the_full_vocabulary(clip, temperature):
    """Every token of the vocabulary is sampled once, and weighed by its probability."""
    policy, prompt = tiny_model(), [3, 9, 27, 4]
    sampled, full = (distill_config({"clip": clip, "divergence": divergence}) for divergence in DIVERGENCES)
    expected = torch.zeros(())
    probabilities = distribution(policy, prompt, temperature)[-1].exp().detach()
    for token in range(VOCAB):
        group = make_group(response_lengths=(1,))
        group.prompt_token_ids[:], group.responses[0].token_ids[:] = prompt, [token]
        loss, _ = loss_of(sampled, policy, teacher_of(sampled, missing=(5, 60)), [group], temperature)
        expected = expected + probabilities[token] * gradient_of(loss.loss_sum, policy)
    loss, _ = loss_of(full, policy, teacher_of(full, missing=(5, 60)), [group], temperature)
    assert_equal(gradient_of(loss.loss_sum, policy), expected)


def test_full_vocabulary_is_the_gradient_of_the_reverse_kl():
    policy, config = tiny_model(), distill_config({"divergence": "full_vocabulary"})
    teacher, groups = teacher_of(config), [make_group("0-0"), make_group("0-1", 2, (1, 6))]
    loss, _ = loss_of(config, policy, teacher, groups, temperature=0.8)
    total = torch.zeros(())
    for group in groups:
        for response in group.responses:
            tokens, start = [*group.prompt_token_ids, *response.token_ids], len(group.prompt_token_ids) - 1
            log_p = distribution(policy, tokens, 0.8)[start:-1]
            log_q = distribution(teacher.model, tokens, 0.8)[start:-1]
            total = total + (log_p.exp() * (log_p - log_q)).sum()
    assert_equal(loss.loss_sum, total)
    assert_equal(gradient_of(loss.loss_sum, policy), gradient_of(total, policy))


@pytest.mark.parametrize(("clip", "is_complete"), [(None, True), (0.3, True), (None, False), (0.3, False)])
def test_loss_and_gradient_equal_an_independent_loop(clip, is_complete):
    """A teacher may lack a token of a prompt, and one that was sampled and is read before others."""
    config = distill_config({"clip": clip, "coef": 1.7})
    policy, old = tiny_model(), moved_model(3)
    groups = [make_group("0-0"), make_group("0-1", 2, (1, 6))]
    missing = () if is_complete else (groups[0].prompt_token_ids[1], groups[1].responses[1].token_ids[2])
    teacher = teacher_of(config, missing=missing)
    loss, _ = loss_of(config, policy, teacher, groups, old=old)
    total, gaps = torch.zeros(()), []
    for group in groups:
        for response in group.responses:
            tokens, start = [*group.prompt_token_ids, *response.token_ids], len(group.prompt_token_ids)
            read = [0 if token in missing else token for token in tokens]
            log_p, log_old, log_q = (
                distribution(model, seen) for model, seen in ((policy, tokens), (old, tokens), (teacher.model, read))
            )
            for place, token in enumerate(response.token_ids, start - 1):
                gap = 0.0 if token in missing else (log_p[place, token] - log_q[place, token]).item()
                clipped = gap if clip is None else max(-clip, min(clip, gap))
                gaps.append((gap, clipped, token in missing))
                total = total + (log_p[place, token] - log_old[place, token].detach()).exp() * 1.7 * clipped
    assert_equal(loss.loss_sum, total)
    assert_equal(gradient_of(loss.loss_sum, policy), gradient_of(total, policy))
    metrics = {name: values.double().mean().item() for name, values in loss.token_metrics.items()}
    assert metrics["teacher_gap"] == pytest.approx(sum(gap for gap, *_ in gaps) / len(gaps))
    assert metrics["teacher_clipped_frac"] == pytest.approx(sum(a != b for a, b, _ in gaps) / len(gaps))
    assert metrics["teacher_unknown_frac"] == pytest.approx(sum(unknown for *_, unknown in gaps) / len(gaps))


@pytest.mark.parametrize("kind", [kind for kind in REWARDED if kind != "online_dpo"])
def test_gap_is_added_to_the_advantages_of_rewards(kind):
    """Also where the ratio is of a whole response: each token has an advantage of its own."""
    extra = {"schedule": {"mode": "sync"}, "objective": {"type": kind}}
    plain, taught = job_config(**extra), job_config(**extra, teacher={"path": "t", "coef": 0.4})
    policy, old = tiny_model(), moved_model(3, by=0.0003)
    groups = [make_group("0-0", rewards=[0.0, 1.0, 0.5]), make_group("0-1", 2, (1, 6, 2), rewards=[1.0, 0.0, 0.0])]
    batch = pack(groups, CPU)
    logprobs, _ = tri_model_logprobs(policy, old, None, batch, 1.0, teacher_of(taught))
    computed = gradient_of(taught.objective.loss(batch, logprobs).loss_sum, policy)

    def token_loss(inputs):
        advantages = inputs.advantages - 0.4 * (logprobs.trainer.detach() - response_logprobs(teacher, batch, 1.0)[0])
        return type(plain.objective).token_loss(plain.objective, replace(inputs, advantages=advantages))

    teacher = teacher_of(taught).model
    logprobs, _ = tri_model_logprobs(policy, old, None, batch, 1.0)
    by_hand = plain.objective.model_copy()
    object.__setattr__(by_hand, "token_loss", token_loss)
    expected = gradient_of(by_hand.loss(batch, logprobs).loss_sum, policy)
    assert_equal(computed, expected)


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_packed_rows_equal_separate_ones(divergence):
    """Groups with a shared prompt, and an episode that forks; policy and teacher each by their own passes."""
    config = distill_config({"divergence": divergence})
    groups = [make_group("0-0"), make_episodes("0-1")]
    results = {}
    for names in (("onbeat_shared_prompt",) * 2, ("sdpa", "onbeat_shared_prompt"), ("onbeat_shared_prompt", "sdpa")):
        policy, teacher = tiny_model(), teacher_of(config)
        use_attention(policy, names[0])
        use_attention(teacher.model, names[1])
        loss, _ = loss_of(config, policy, teacher, groups)
        results[names] = gradient_of(loss.loss_sum, policy)
    first, *others = results.values()
    for gradient in others:
        assert_equal(gradient, first)


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("attention", ["onbeat_shared_prompt", "sdpa"])
def test_teacher_with_prompts_of_its_own_equals_a_loop(attention, divergence):
    """The prompts of two groups begin alike for the policy, and those of other two for the teacher; one forks."""
    config = hinted(distill_config({"divergence": divergence}))
    groups = [make_group("0-0", 20), make_group("0-1", 20, (1, 6)), make_episodes("0-2")]
    groups[1].prompt_token_ids[:17] = groups[0].prompt_token_ids[:17]
    for group, length in zip(groups, (3, 30, 25), strict=True):
        group.teacher_prompt_token_ids[:] = make_group(f"1-{length}", length).prompt_token_ids
    groups[2].teacher_prompt_token_ids[:19] = groups[1].teacher_prompt_token_ids[:19]
    policy, teacher = tiny_model(), teacher_of(config)
    use_attention(teacher.model, attention)
    loss, _ = loss_of(config, policy, teacher, groups)
    computed = gradient_of(loss.loss_sum, policy)
    total = torch.zeros(())
    for group in groups:
        policys, teachers = list(group.prompt_token_ids), list(group.teacher_prompt_token_ids)
        for response in group.responses:
            for before, sampled in turn_paths(response, policys):
                seen, read = [*before, *sampled], [*teachers, *before[len(policys) :], *sampled]
                log_p = distribution(policy, seen)[len(before) - 1 : -1]
                log_q = distribution(teacher.model, read)[len(read) - len(sampled) - 1 : -1]
                if divergence == "sampled_token":
                    log_p, log_q = (log[range(len(sampled)), sampled] for log in (log_p, log_q))
                    total = total + (log_p * (log_p - log_q).detach()).sum()
                else:
                    total = total + (log_p.exp() * (log_p - log_q)).sum()
    assert_equal(computed, gradient_of(total, policy))


def test_longer_one_of_two_prompts_counts_in_the_budget():
    config = hinted(distill_config(training={"max_tokens_per_micro_batch": 40}))
    groups = [make_group("0-0", 4, (3,)), make_group("0-1", 4, (3,))]
    assert len(rows(groups, config)) == 1
    groups[0].teacher_prompt_token_ids[:] = range(30)
    groups[1].teacher_prompt_token_ids[:] = range(9)
    assert len(rows(groups, config)) == 2


@pytest.mark.parametrize(
    ("is_wanted", "prompt", "problem"),
    [
        (True, [], "has no second prompt for the teacher"),
        (False, [1, 2], "has a second prompt for the teacher"),
        (True, [1, VOCAB], f"has token id {VOCAB}"),
    ],
)
def test_group_with_other_prompts_than_the_job_is_not_trained(is_wanted, prompt, problem, tmp_path):
    config = hinted(distill_config()) if is_wanted else distill_config()
    groups = recorded_iterations()
    for group in groups:
        group.teacher_prompt_token_ids[:] = prompt
    with pytest.raises(JobFailed, match=problem):
        train(config, groups, tmp_path, teacher=float_teacher(config))


def test_teacher_may_have_other_sizes_and_more_tokens():
    config = distill_config({"divergence": "full_vocabulary"})
    wide = tiny_config(hidden_size=48, num_hidden_layers=3, vocab_size=VOCAB + 9, tie_word_embeddings=False)
    policy, teacher = tiny_model(), teacher_of(config, tiny_model(wide))
    loss, logprobs = loss_of(config, policy, teacher, [make_group()])
    assert gradient_of(loss.loss_sum, policy).isfinite().all()
    log_p, log_q = (distribution(model, [*make_group().prompt_token_ids])[-1] for model in (policy, teacher.model))
    first = (log_p.exp() * (log_p - log_q[:VOCAB])).sum()
    assert logprobs.lesson.loss[0].item() == pytest.approx(first.item(), rel=1e-6)


def test_blocks_and_recomputed_ones_give_the_same_gradient(monkeypatch):
    config = distill_config({"divergence": "full_vocabulary"})
    groups = [make_group("0-0", 5, (9, 8, 7)), make_group("0-1", 2, (1, 6))]

    def gradient():
        policy = tiny_model()
        return gradient_of(loss_of(config, policy, teacher_of(config), groups)[0].loss_sum, policy)

    whole = gradient()
    for name, value in (("BLOCK_ROWS", 5), ("ROWS", 2), ("KEPT_BYTES", 0)):
        monkeypatch.setattr(head, name, value)
    assert_equal(gradient(), whole)


def test_adapters_learn_from_a_teacher_too():
    config = distill_config({"divergence": "full_vocabulary"}, lora={"rank": 4})
    policy = tiny_model(dtype=torch.float32)
    add_adapters(policy, config.lora, 0)
    loss, _ = loss_of(config, policy, teacher_of(config, dtype=torch.float32), [make_group()])
    assert gradient_of(loss.loss_sum, policy).abs().sum() > 0
    assert all(parameter.grad is None for parameter in policy.parameters() if not parameter.requires_grad)


# ---- the training loop -----------------------------------------------------------------------------------------------


def without_rewards(groups):
    for group in groups:
        for response in group.responses:
            response.reward, response.has_no_reward = 0.0, True
    return groups


def float_teacher(config):
    return teacher_of(config, dtype=torch.float32)


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_policy_comes_nearer_to_its_teacher(divergence, tmp_path):
    """There is no reward, and one response to each prompt: every group is trained."""
    rollout = {"num_prompts_per_iteration": 4, "num_samples_per_prompt": 1, "max_response_tokens": 8}
    config = distill_config({"divergence": divergence}, rollout=rollout, schedule={"num_iterations": 6})
    prompts = [[make_group(f"{t}-{i}", 4, (6,), t) for i in range(4)] for t in range(6)]
    for groups in prompts[1:]:  # the same tokens each time
        for group, first in zip(groups, prompts[0], strict=True):
            group.prompt_token_ids[:] = first.prompt_token_ids
            group.responses[0].token_ids[:] = first.responses[0].token_ids
    groups = without_rewards([group for groups in prompts for group in groups])
    reports = train(config, groups, tmp_path, teacher=float_teacher(config)).job.reports
    name = "train/teacher_divergence" if divergence == "full_vocabulary" else "train/teacher_gap"
    assert reports[0]["train/trained_tokens"] == 24
    assert all("reward_mean" not in report and report["train/skipped_groups"] == 0 for report in reports)
    assert all(report["rollout/uniform_groups"] == 0 for report in reports)
    assert abs(reports[-1][name]) < 0.5 * abs(reports[0][name])


@pytest.mark.parametrize("sections", [{}, {"objective": {"normalization": "sequence_mean"}}, {"lora": {"rank": 4}}])
def test_periodic_equals_sync_with_a_teacher(sections, tmp_path):
    sync, periodic = (
        distill_config(schedule={"mode": mode, "num_iterations": 3}, training=training, **sections)
        for mode, training in (("sync", {}), ("periodic", {"max_tokens_per_micro_batch": 40}))
    )
    groups = without_rewards(recorded_iterations())
    expected = train(sync, groups, tmp_path / "a", teacher=float_teacher(sync), arrivals=12).model
    computed = train(periodic, groups, tmp_path / "b", teacher=float_teacher(periodic)).model
    for left, right in zip(computed.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(left, right, rtol=0, atol=2e-4)


def test_equal_rewards_do_not_keep_a_group_from_its_teacher(tmp_path):
    config = job_config(teacher={"path": "t"}, schedule={"num_iterations": 2, "stop_without_signal": 1})
    groups = [make_group(f"{t}-{i}", 4, (2, 3, 4), t, rewards=[1.0] * 3) for t in range(2) for i in range(4)]
    reports = train(config, groups, tmp_path, teacher=float_teacher(config)).job.reports
    assert [report["train/trained_tokens"] for report in reports] == [36, 36]
    assert all(report["train/grad_norm"] > 0 for report in reports)
    with pytest.raises(JobFailed, match="without signal"):
        train(job_config(schedule={"num_iterations": 2, "stop_without_signal": 1}), groups, tmp_path / "plain")


def test_stale_groups_get_the_gap_of_the_current_policy(tmp_path):
    """The ratio is of the policy that generated: with a ratio of 1 the metrics would be the same, not the weights."""
    config = distill_config(schedule={"mode": "bounded", "max_staleness": 1, "num_iterations": 4})
    groups = without_rewards(stale_iterations(4, staleness=1))
    trained = train(config, groups, tmp_path, teacher=float_teacher(config))
    gaps = [report["train/teacher_gap"] for report in trained.job.reports]
    assert len(set(gaps)) == 4, "each iteration's gap is that of its own weights"


class Killed(Exception):
    pass


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_killed_trainer_goes_on_to_the_same_bits(divergence, tmp_path):
    config = distill_config({"divergence": divergence}, checkpoint={"every_iterations": 1, "keep": 9})
    groups = without_rewards(recorded_iterations())
    expected = train(config, groups, tmp_path / "whole", teacher=float_teacher(config)).job

    class Dying(RecordedJob):
        def commit(self, commit):
            if commit.iteration == 2:
                raise Killed
            return super().commit(commit)

    job = Dying(config, groups)
    with pytest.raises(Killed):
        train(config, groups, tmp_path / "killed", job=job, teacher=float_teacher(config))
    finish_writing(tmp_path / "killed")
    again = RecordedJob(config, groups, micro_batches=dict(job.recorded))
    resumed = train(config, groups, tmp_path / "killed", resume_from=2, job=again, teacher=float_teacher(config)).job
    assert resumed.version_digests == expected.version_digests[2:]


def finish_writing(folder):
    """Wait until the checkpoint after two iterations is whole."""
    for _ in range(200):
        if any(path.name == "iteration-000002" for path in CheckpointStore(folder / "checkpoints", 9).complete()):
            return
        torch.randn(1000, 1000).sum()
    raise AssertionError("the checkpoint was not written")


# ---- vocabularies, heads and memory ----------------------------------------------------------------------------------

TOKENS = {0: "a", 1: "b", 2: "c"}


@pytest.mark.parametrize(
    ("teacher", "num_teacher_rows", "known"),
    [
        (TOKENS, 3, [True, True, True, False]),
        (TOKENS | {3: "pad", 4: "more"}, 8, [True, True, True, False]),  # the policy has no token 3, just a row
        ({0: "a", 2: "c"}, 3, [True, False, True, False]),
        (TOKENS, 2, [True, True, False, False]),  # a tokenizer with more tokens than the embedding
    ],
)
def test_known_tokens_are_those_of_both(teacher, num_teacher_rows, known):
    assert known_tokens(TOKENS, teacher, 4, num_teacher_rows).tolist() == known


def test_another_vocabulary_is_refused_with_the_first_difference():
    with pytest.raises(ValueError, match=r"2 of 3 shared ids are other tokens, such as 1, which is 'c' there and 'b'"):
        known_tokens(TOKENS, {0: "a", 1: "c", 2: "b"}, 3, 3)


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match=r"its weights take 1000000.0 GB here, and .* take a smaller teacher"):
        check_memory(10**15, CPU)
    model = tiny_model()
    model.passes = replace(model.passes, has_plain_head=False)
    check_full_vocabulary(TeacherConfig(path="t"), "Llama", model.passes)
    with pytest.raises(ValueError, match="those of Llama are more; use sampled_token"):
        check_full_vocabulary(TeacherConfig(path="t", divergence="full_vocabulary"), "Llama", model.passes)


def test_gap_has_a_sign_and_a_limit():
    """A token that the teacher finds likelier than the policy gets a positive advantage."""
    lesson = TeacherConfig(path="t", coef=2.0, clip=1.0).lesson(
        torch.tensor([math.log(0.2), math.log(0.5), 0.0]),
        torch.tensor([math.log(0.4), math.log(0.01), -5.0]),
        torch.tensor([True, True, False]),
    )
    assert lesson.advantages.tolist() == pytest.approx([2 * math.log(2), -2.0, 0.0])
    assert lesson.metrics["teacher_clipped_frac"].tolist() == [False, True, False]
