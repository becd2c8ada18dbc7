"""`onbeat plan memory`: bytes that are counted without memory are those that a real pass takes."""

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from onbeat.cli import app
from onbeat.config import OptimizerConfig
from onbeat.machine.processor import Hardware
from services.rollout import memory_plan as rollout_plan
from services.trainer import memory_plan
from services.trainer.batch import pack
from services.trainer.memory_plan import (
    LiveBytes,
    Placement,
    Sizes,
    empty_teacher,
    largest_row,
    measure_sizes,
    plan_trainer,
    row_of_examples,
)
from services.trainer.model.model import DTYPES, Passes, response_logprobs
from services.trainer.model.optimizer import MasterAdamW
from tests.trainer_fixtures import job_config, make_group, tiny_config, tiny_model
from tests.world import job_body

pytestmark = pytest.mark.slow

PROMPT, RESPONSE, SIZE = 40, 24, 4
MB = 1_000_000


def config_of(**sections):
    rollout = {"num_prompts_per_iteration": 2, "num_samples_per_prompt": SIZE, "max_response_tokens": RESPONSE}
    return job_config(**{"model": {"path": "x", "dtype": "float32"}, "rollout": rollout} | sections)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("num_layers", "width", "vocab_size"), [(6, 256, 256), (12, 512, 32_768)])
def test_planned_activations_are_those_of_a_real_pass(num_layers, width, vocab_size, dtype) -> None:
    """Also where a gradient of the embedding, which only a pass in bfloat16 makes, takes more than what layers keep."""

    def real_pass_bytes(model):
        """Return the bytes that LiveBytes measures for the same groups, besides the sum of gradients."""
        batch = pack([make_group(f"0-{i}", PROMPT, [RESPONSE] * SIZE) for i in range(2)], torch.device("cpu"), False)
        MasterAdamW(model, OptimizerConfig()).gradients()
        with LiveBytes() as live:
            response_logprobs(model, batch, 1.0)[0].sum().backward()
        return live.peak

    sizes = {"num_hidden_layers": num_layers, "hidden_size": width, "intermediate_size": 512}
    wide = tiny_config(**sizes, vocab_size=vocab_size)
    sizes = measure_sizes(config_of(model={"path": "x", "dtype": dtype}), wide, Passes(), PROMPT)
    model = tiny_model(wide, DTYPES[dtype])
    assert sizes.num_parameters == sum(p.numel() for p in model.parameters())
    assert sizes.pass_bytes == pytest.approx(real_pass_bytes(model), rel=0.1)


def test_a_sharded_pass_makes_gradients_of_its_own() -> None:
    """The gradients are those of a tied embedding: the head's and the embedding's, which are added to each other."""
    wide = tiny_config(hidden_size=512, vocab_size=32_768, tie_word_embeddings=True)
    alone, sharded = (measure_sizes(config_of(), wide, Passes(), PROMPT, num_ranks).pass_bytes for num_ranks in (1, 2))
    assert sharded - alone > 0.9 * 32_768 * 512 * 4


def test_rows_of_a_model_that_cannot_be_packed_are_planned_too() -> None:
    """Each response then has a row with its prompt."""
    config = tiny_config(num_hidden_layers=6, hidden_size=256, intermediate_size=512)
    packed, separate = (
        measure_sizes(config_of(), config, choice, PROMPT).pass_bytes for choice in (Passes(), Passes("sdpa"))
    )
    ratio = (PROMPT + RESPONSE) * SIZE / (PROMPT + RESPONSE * SIZE)  # ratio of their places; targets are the same
    assert 0.7 * ratio < separate / packed < 1.1 * ratio


@pytest.mark.parametrize(
    ("model", "num_places"),
    [({}, PROMPT + 3 * RESPONSE - 1), ({"max_context_tokens": PROMPT + 30}, PROMPT + 29)],
    ids=["all turns", "as the context takes"],
)
def test_an_episode_is_planned_with_all_of_its_turns(model, num_places) -> None:
    sections = {"environment": {"name": "x", "max_turns": 3}, "training": {"max_tokens_per_micro_batch": 64}}
    config = config_of(model={"path": "x", "dtype": "float32"} | model)
    config = type(config).model_validate(config.model_dump(exclude={"reward"}) | sections)
    assert largest_row(config, PROMPT).layout.num_places == num_places


def test_checkpointing_and_lora_take_less() -> None:
    wide = tiny_config(num_hidden_layers=6, hidden_size=256, intermediate_size=512)
    checkpointing = {"training": {"has_gradient_checkpointing": True}}
    sections = ({}, checkpointing, {"lora": {"rank": 4}}, checkpointing | {"lora": {"rank": 4}})
    full, checkpointed, adapted, both = (
        measure_sizes(config_of(**section), wide, Passes(), PROMPT) for section in sections
    )
    assert checkpointed.pass_bytes < 0.6 * full.pass_bytes
    assert both.pass_bytes < 0.6 * adapted.pass_bytes
    assert adapted.num_trained < 0.1 * full.num_trained
    assert adapted.num_parameters == full.num_parameters


GPU, HALF_GPU = Placement(is_on_host=False), Placement(2, is_on_host=False)
CHECKPOINT = "checkpoint while it is written"
TWO_UPDATES = {"training": {"num_updates_per_iteration": 2}}


@pytest.mark.parametrize(
    ("sections", "dtype", "placement", "expected"),
    [
        # weights 4, moments 8, gradients 4 bytes for each of a million parameters; a version is the weights themselves
        ({}, "float32", Placement(), {"weights": 4, "optimizer": 8, "gradients": 4, "published versions": 0}),
        ({}, "float32", Placement(), {"deltas": 0}),
        ({}, "bfloat16", Placement(), {"weights": 2, "optimizer": 12, "gradients": 4, "published versions": 0}),
        ({}, "bfloat16", Placement(), {"deltas": 1}),
        ({}, "bfloat16", Placement(num_ranks=2), {"weights": 2, "optimizer": 4, "gradients": 2}),
        ({"objective": {"kl": {"coef": 0.1}}}, "float32", Placement(), {"reference model": 4}),
        (
            {"schedule": {"mode": "bounded", "max_staleness": 2}},
            "float32",
            Placement(),
            {"older policies": 4, "published versions": 12},
        ),
        # the ratio of a second update needs the weights that generated, and an objective without a ratio does not
        (TWO_UPDATES, "float32", Placement(), {"older policies": 4, "published versions": 4}),
        (
            {"objective": {"type": "online_dpo"}} | TWO_UPDATES,
            "float32",
            Placement(),
            {"older policies": 0, "published versions": 4},
        ),
        ({}, "float32", GPU, {"published versions": 8, CHECKPOINT: 12}),  # memory of the host
        ({"gac": {"mode": "metric"}}, "float32", GPU, {CHECKPOINT: 16}),
        ({}, "float32", HALF_GPU, {CHECKPOINT: 6}),
    ],
)
def test_bytes_of_a_million_parameters_by_part(sections, dtype, placement, expected) -> None:
    config = config_of(**{"model": {"path": "x", "dtype": dtype}, "gac": {"mode": "off"}} | sections)
    sizes = Sizes(MB, MB, num_outside_layers=0, pass_bytes=50 * MB, num_layers=2)
    parts = plan_trainer(config, sizes, placement)["host"]
    assert {name: parts.get(name, 0) / MB for name in expected} == expected


@pytest.mark.parametrize("divergence", ["sampled_token", "full_vocabulary"])
def test_a_teacher_is_planned_with_its_pass(divergence) -> None:
    """The weights are held; its pass is over before that of the policy, but for the states of the full vocabulary."""
    config = config_of(objective={"type": "distill"}, teacher={"path": "t", "divergence": divergence})
    wide = tiny_config(num_hidden_layers=6, hidden_size=256, vocab_size=8192)
    teacher = empty_teacher(config, tiny_config(hidden_size=512, vocab_size=8192), Passes(), 8192)
    alone, taught = (measure_sizes(config, wide, Passes(), PROMPT, teacher=model) for model in (None, teacher))
    assert taught.num_teacher == sum(parameter.numel() for parameter in teacher.model.parameters()) > 512 * 8192
    logits = 4 * 8192 * 2 * SIZE * RESPONSE  # bytes of the teacher's, and of the slopes
    expected = 2 * logits if divergence == "full_vocabulary" else 0
    assert taught.pass_bytes - alone.pass_bytes == pytest.approx(expected, rel=0.25)
    parts = plan_trainer(config, taught, Placement())["host"]
    assert parts["teacher"] == 4 * taught.num_teacher
    assert plan_trainer(config, taught, Placement(num_ranks=2))["host"]["teacher"] == 2 * taught.num_teacher


@pytest.mark.parametrize(("budget", "places"), [(512, 416), (400, 400), (280, 280), (208, 208), (150, 124)])
def test_the_largest_row_fills_the_budget(budget, places) -> None:
    """A group has 40 prompt tokens and 4 responses of up to 43 tokens, whose last one is not fed back: 208 places."""
    rollout = {"num_prompts_per_iteration": 2, "num_samples_per_prompt": 4, "max_response_tokens": 43}
    config = config_of(rollout=rollout, training={"max_tokens_per_micro_batch": budget})
    assert memory_plan.largest_row(config, PROMPT).layout.num_places == places


@pytest.mark.parametrize(
    ("dtype", "bfloat16", "expected"),
    [
        ("float32", "emulated", {"weights": 4, "packed embeddings": 2, "loading": 2, "gaps": 0.3}),
        ("bfloat16", "native", {"weights": 2, "packed embeddings": 1, "loading": 1, "gaps": 0.15}),
        ("bfloat16", "emulated", {"weights": 2, "loading": 0.5}),
    ],
)
def test_an_engine_is_planned_with_the_weights_it_packs(dtype, bfloat16, expected, monkeypatch) -> None:
    """A model of a million parameters, a quarter of them in its embedding, on processors with and without bfloat16."""
    monkeypatch.setattr(rollout_plan, "read_processor", lambda: Hardware("x", "y", bfloat16))
    model = {"vocab_size": 1000, "hidden_size": 250}
    engine = rollout_plan.plan_rollout(model, MB, dtype, 64, 8, False, 0.0)["engine core"]
    other = {"program", "cache", "logits"}
    assert {name: size / MB for name, size in engine.items() if name not in other} == expected


def plan_of(model: Path, folder: Path, *options: str, **sections):
    job = job_body(
        model={"path": str(model), "dtype": "float32", "max_context_tokens": 64},
        data={"type": "reasoning_gym", "task": "chain_sum"},
        **sections,
    )
    (folder / "job.json").write_text(json.dumps(job))
    return CliRunner().invoke(app, ["plan", "memory", str(folder / "job.json"), *options])


def test_the_command_shows_every_process(tmp_path: Path) -> None:
    tiny_config().save_pretrained(tmp_path / "model")
    shown = plan_of(tmp_path / "model", tmp_path, "--json")
    assert shown.exit_code == 0, shown.output
    plan = json.loads(shown.stdout)
    assert set(plan) == {"trainer", "rollout", "engine core"}
    assert plan["engine core"]["cache"] > 0


AUTO = {"rollout": {"max_response_tokens": 24}, "training": {"max_tokens_per_micro_batch": "auto"}}


def test_the_command_plans_the_rows_that_a_trainer_would_choose(tmp_path: Path, monkeypatch) -> None:
    """Plenty of memory takes a whole iteration: 2 prompts of 40 tokens with 2 responses of 24."""
    tiny_config().save_pretrained(tmp_path / "model")
    model, prompt = tmp_path / "model", ("--prompt-tokens", "40")
    much, exact = (json.loads(plan_of(model, tmp_path, *prompt, "--json", **more).stdout) for more in (AUTO, {}))
    assert much.pop("max_tokens_per_micro_batch") == 2 * (40 + 2 * 24)
    assert much.keys() == exact.keys()
    assert (
        "planned with rows of 176 tokens, what auto would choose here"
        in plan_of(model, tmp_path, *prompt, **AUTO).stdout
    )
    gpu = plan_of(model, tmp_path, *prompt, "--gpu", **AUTO).stdout
    assert "planned with rows of 176 tokens, a whole iteration: what fits on the GPU is not known" in gpu


def test_less_memory_plans_shorter_rows(tmp_path: Path) -> None:
    rollout = {"num_prompts_per_iteration": 512, "num_samples_per_prompt": SIZE, "max_response_tokens": RESPONSE}
    config = config_of(rollout=rollout)
    config = config.model_copy(update={"training": job_config(training=AUTO["training"]).training})
    request = {"num_ranks": 1, "is_on_host": True, "prompt_tokens": PROMPT}
    plans = [
        memory_plan.plan(config, tiny_config(), request | {"available_bytes": size})
        for size in (600 * MB, 1100 * MB, 100_000 * MB, None)
    ]
    least, some, most, unknown = (answer["row_tokens"] for answer in plans)
    assert least == 512 < some < most == unknown == 512 * (PROMPT + SIZE * RESPONSE)
    assert sum(plans[1]["parts"]["host"].values()) <= 600 * MB  # half a GB is kept
    given = memory_plan.plan(config.with_row_tokens(some), tiny_config(), request | {"available_bytes": None})
    assert given["row_tokens"] == some


def test_the_command_plans_sharded_passes_of_several_ranks(tmp_path: Path) -> None:
    """They take more than those of one rank, by the gradient that the head makes."""
    tiny_config(hidden_size=512, vocab_size=8192).save_pretrained(tmp_path / "model")
    alone, sharded = (
        json.loads(plan_of(tmp_path / "model", tmp_path, "--ranks", ranks, "--json").stdout)["trainer"]["activations"]
        for ranks in ("1", "2")
    )
    assert sharded - alone > 0.9 * 8192 * 512 * 4


def test_a_model_without_configuration_is_refused(tmp_path: Path) -> None:
    shown = plan_of(tmp_path / "nothing", tmp_path)
    assert isinstance(shown.exception, ValueError)
    assert "nothing" in str(shown.exception)
    unknown = plan_of(Path("bundled:nothing"), tmp_path)
    assert str(unknown.exception).startswith("bundled:nothing is not known; known: ")


def test_a_plan_that_takes_too_long_ends_with_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onbeat.cli.service.DEADLINE_S", 0.1)
    shown = plan_of(tmp_path / "model", tmp_path)
    assert isinstance(shown.exception, ValueError)
    assert "try again when this machine is less busy" in str(shown.exception)


def test_rows_of_a_warm_start_fill_the_token_budget() -> None:
    start = {"data": {"type": "jsonl", "path": "x.jsonl"}, "num_rows_per_iteration": 4, "epochs": 2}
    config = config_of(warm_start=start, training={"max_tokens_per_micro_batch": 1024}).with_warm_start(1)
    assert row_of_examples(config).layout.num_places == 1023  # the last token predicts nothing
    shorter = config.model_copy(update={"model": config.model.model_copy(update={"max_context_tokens": 64})})
    assert row_of_examples(shorter).layout.num_places == 4 * 64 - 1
    without = config_of(training={"max_tokens_per_micro_batch": 1024})
    planned, generated = (measure_sizes(job, tiny_config(), Passes(), PROMPT) for job in (config, without))
    assert planned.pass_bytes > generated.pass_bytes


def test_the_version_at_the_end_of_a_warm_start_is_planned() -> None:
    """It is kept for the KL term, unless this pulls towards the base."""
    start = {"data": {"type": "jsonl", "path": "x.jsonl"}, "num_rows_per_iteration": 4, "num_iterations": 1}
    sizes = Sizes(MB, MB, num_outside_layers=0, pass_bytes=50 * MB, num_layers=2)
    kept, base = (
        plan_trainer(
            config_of(warm_start=start, objective={"type": "grpo", "kl": {"coef": 0.1} | reference}), sizes, Placement()
        )["host"]["published versions"]
        for reference in ({}, {"reference": "base"})
    )
    assert kept - base == 4 * MB
