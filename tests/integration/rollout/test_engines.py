"""Real engines on tiny models: what an engine samples after a load is what a fresh engine on those weights samples."""

import asyncio
import json
import math
import os
import platform
import random
import shutil
import sys
import time
from asyncio.subprocess import DEVNULL, PIPE
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio
import torch
from safetensors.torch import load_file, save, save_file
from transformers import AutoModelForCausalLM

from onbeat.engines import (
    BadWeightFile,
    ChatSampling,
    Engine,
    EngineDied,
    GeneratedResponse,
    Sampling,
    VersionMismatch,
    VersionSpan,
)
from onbeat.engines.arrivals import whole_modules
from onbeat.machine.processor import read_processor
from services.rollout.engines import vllm_engine
from services.rollout.engines.transformers_engine import TransformersEngine
from services.rollout.engines.vllm_engine import VllmEngine
from services.rollout.engines.weight_files import read_shapes
from tests.rollout_fakes import arriving
from tests.tiny_models import (
    build_tokenizer,
    write_mixtral_model,
    write_perturbed_weights,
    write_tied_model,
    write_untied_model,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")

SHORT_PROMPT = list(b"two and two is")
# Over several blocks of the prefix cache, which are of 128 tokens on the CPU.
LONG_PROMPT = [(7 * index) % 251 for index in range(300)]
PROBE_PROMPTS = (SHORT_PROMPT, LONG_PROMPT, SHORT_PROMPT[:5])
FIRST_VERSION = 3
FRESH_VERSION = 9
OWN_DTYPE = "bfloat16" if read_processor().bfloat16 == "native" else "float32"  # jobs with model.dtype = "auto" have it
CORE_DEATH_DEADLINE_S = 30.0  # far below the minutes after which an engine without an answer is given up
NOISE = {"bfloat16": (0.05, 0.2), "float32": (1e-4, 1e-3)}  # nats per token, mean and largest


@dataclass
class Subject:
    """An engine that tests share and load as they like; `next_version` counts so that versions only grow."""

    engine: Engine
    first_weights: Path  # weights at the engine's start
    second_weights: Path
    second_model_dir: Path  # a whole model with `second_weights`
    dtype: str
    fresh_probe: list[GeneratedResponse]  # responses of an engine started on `second_weights`, in a file without a name
    next_version: int = FIRST_VERSION

    async def load(self, weights_file: Path, batches: Iterable[Sequence[str]] | None = None) -> int:
        """Load weights whose names arrive in these `batches`; None is all of them at once."""
        arrivals = arriving([self.names()] if batches is None else batches)
        self.next_version += 1
        await self.engine.load(self.next_version, weights_file, arrivals)
        return self.next_version

    def names(self) -> list[str]:
        return list(read_shapes(self.first_weights))


@contextmanager
def file_without_a_name(content: bytes) -> Iterator[Path]:
    """Make a file in memory that other processes reach by a link, which leads to no name in any folder."""
    fd = os.memfd_create("weights")
    try:
        os.truncate(fd, len(content))
        os.pwrite(fd, content, 0)
        yield Path(f"/proc/{os.getpid()}/fd/{fd}")
    finally:
        os.close(fd)


async def probe(engine: Engine, version: int, temperature: float = 1.0) -> list[GeneratedResponse]:
    """Responses one after the other, because bfloat16 results depend on what else is in the batch."""
    responses = []
    for seed, prompt in enumerate(PROBE_PROMPTS):
        sampling = Sampling(max_response_tokens=24, temperature=temperature, seed=seed)
        responses += await engine.generate(prompt, 1, sampling, version)
    return responses


def sampled(responses: list[GeneratedResponse]) -> list[tuple[list[int], list[float]]]:
    return [(response.token_ids, response.rollout_logprobs) for response in responses]


def teacher_forced_logprobs(
    model_dir: Path, prompt: list[int], response: list[int], dtype: torch.dtype, temperature: float
) -> torch.Tensor:
    """Tempered logprobs [T] of a response from one plain forward pass."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype)
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1].float()
    return torch.log_softmax(logits / temperature, -1).gather(1, torch.tensor(response)[:, None])[:, 0]


def new_vllm_engine(dtype: str) -> VllmEngine:
    return VllmEngine(cpu_cores="0", kv_cache_gib=0.25, max_num_seqs=32, dtype=dtype)


async def open_subject(tmp_path: Path, model_dir: Path, create_engine, dtype: str) -> Subject:
    first_weights = model_dir / "model.safetensors"
    second_model_dir = Path(shutil.copytree(model_dir, tmp_path / "second"))
    second_weights = write_perturbed_weights(model_dir, second_model_dir / "model.safetensors", seed=1)
    fresh_dir = Path(shutil.copytree(model_dir, tmp_path / "fresh", ignore=shutil.ignore_patterns("*.safetensors")))
    with file_without_a_name(second_weights.read_bytes()) as weights_file:
        (fresh_dir / "model.safetensors").symlink_to(weights_file)
        fresh = create_engine(dtype=dtype)
        await fresh.start(fresh_dir, FRESH_VERSION)
    fresh_probe = await probe(fresh, FRESH_VERSION)
    await fresh.stop()
    engine = create_engine(dtype=dtype)
    await engine.start(model_dir, FIRST_VERSION)
    return Subject(engine, first_weights, second_weights, second_model_dir, dtype, fresh_probe)


def subject_of(name: str, write_model, create_engine, dtype: str):
    """Make a fixture that opens the subject."""

    @pytest_asyncio.fixture(scope="module", loop_scope="module", name=name)
    async def opened(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Subject]:
        tmp_path = tmp_path_factory.mktemp(name)
        subject = await open_subject(tmp_path, write_model(tmp_path / "first"), create_engine, dtype)
        yield subject
        await subject.engine.stop()

    return opened


tied = subject_of("tied", write_tied_model, new_vllm_engine, OWN_DTYPE)
untied = subject_of("untied", write_untied_model, new_vllm_engine, "bfloat16")
reference = subject_of("reference", write_tied_model, TransformersEngine, "bfloat16")


@pytest.fixture(params=["tied", "untied", "reference"])
def subject(request: pytest.FixtureRequest) -> Subject:
    return request.getfixturevalue(request.param)


@pytest.fixture(params=["tied", "reference"])
def either_engine(request: pytest.FixtureRequest) -> Subject:
    return request.getfixturevalue(request.param)


async def test_loaded_engine_samples_what_a_fresh_one_samples(subject: Subject) -> None:
    before = await probe(subject.engine, await subject.load(subject.first_weights))
    after = await probe(subject.engine, await subject.load(subject.second_weights))
    again = await probe(subject.engine, await subject.load(subject.first_weights))
    assert sampled(after) == sampled(subject.fresh_probe)
    assert sampled(before) == sampled(again) != sampled(after)


async def test_experts_follow_every_update_in_vllm(tmp_path: Path) -> None:
    """Also one that leaves the experts as they are. On the CPU vLLM computes with packed copies of their weights.

    In float32: rounding may send a token to other experts. A job of `tests/e2e/test_vllm.py` trains Qwen3-MoE, too.
    """
    subject = await open_subject(tmp_path, write_mixtral_model(tmp_path / "first"), new_vllm_engine, "float32")
    attention = [name for name in subject.names() if "self_attn" in name]
    try:
        await subject.load(subject.second_weights)
        assert_logprobs_are_the_models(subject.second_model_dir, subject.fresh_probe, subject.dtype)
        assert sampled(await probe(subject.engine, subject.next_version)) == sampled(subject.fresh_probe)
        await subject.load(subject.first_weights, [attention])
        assert sampled(await probe(subject.engine, subject.next_version)) != sampled(subject.fresh_probe)
        await subject.load(subject.second_weights, [attention])
        assert sampled(await probe(subject.engine, subject.next_version)) == sampled(subject.fresh_probe)
    finally:
        await subject.engine.stop()


def assert_logprobs_are_the_models(
    model_dir: Path, responses: list[GeneratedResponse], dtype: str, temperature: float = 1.0
) -> None:
    """Assert that the logprobs of a probe's `responses` are the model's, up to the rounding of the engine's dtype."""
    mean, largest = NOISE[dtype]
    for prompt, response in zip(PROBE_PROMPTS, responses, strict=True):
        expected = teacher_forced_logprobs(model_dir, prompt, response.token_ids, torch.float32, temperature)
        gap = (torch.tensor(response.rollout_logprobs) - expected).abs()
        assert gap.mean() < mean
        assert gap.max() < largest


@pytest.mark.parametrize("temperature", [1.0, 0.6])
async def test_rollout_logprobs_are_the_models_own_to_rounding(subject: Subject, temperature: float) -> None:
    responses = await probe(subject.engine, await subject.load(subject.second_weights), temperature)
    assert_logprobs_are_the_models(subject.second_model_dir, responses, subject.dtype, temperature)


RUBBISH = float("nan")  # a value where no tensor may be read: it would spoil every response


@pytest.mark.parametrize("seed", [0, 1])
async def test_engine_after_partial_loads_equals_a_fresh_one(subject: Subject, tmp_path: Path, seed: int) -> None:
    """Away from second_weights in three loads and back in one, each of some modules. What a file has of the others is
    rubbish."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    model_dir = Path(shutil.copytree(subject.second_model_dir, tmp_path / "model"))
    second = load_file(subject.second_weights)
    served, moved = dict(second), set[str]()

    async def load(named: set[str]) -> list[GeneratedResponse]:
        content = {name: served[name] if name in named else torch.full_like(served[name], RUBBISH) for name in served}
        save_file(content, tmp_path / "part.safetensors")
        order = rng.sample(sorted(named), len(named))
        cut = rng.randint(0, len(order))
        version = await subject.load(tmp_path / "part.safetensors", [order[:cut], order[cut:]])
        return await probe(subject.engine, version)

    await subject.load(subject.second_weights)
    for _ in range(3):
        named = whole_modules(rng.sample(sorted(served), 2), served)
        for name in sorted(named):  # a set has another order in each process, and so would the noise
            noise = 0.02 * torch.randn(served[name].shape, generator=generator)
            served[name] = (served[name].float() + noise).to(served[name].dtype)
        responses = await load(named)
        save_file(served, model_dir / "model.safetensors", metadata={"format": "pt"})
        assert_logprobs_are_the_models(model_dir, responses, subject.dtype)
        assert sampled(responses) != sampled(subject.fresh_probe)
        moved |= named
    served.update({name: second[name] for name in moved})
    assert sampled(await load(moved)) == sampled(subject.fresh_probe)


async def test_a_tensor_is_read_once_it_is_named(subject: Subject) -> None:
    """One name at a time, in any order, and its bytes come into the file only just before."""
    weights = load_file(subject.second_weights)
    final = save(weights)
    rubbish = save({name: torch.full_like(weight, RUBBISH) for name, weight in weights.items()})
    header_bytes = 8 + int.from_bytes(final[:8], "little")
    assert final[:header_bytes] == rubbish[:header_bytes]
    offsets = json.loads(final[8:header_bytes])
    order = random.Random(0).sample(sorted(weights), len(weights))

    async def arrivals(weights_file: Path) -> AsyncIterator[Sequence[str]]:
        with weights_file.open("r+b", buffering=0) as file:
            for name in order:
                start, end = (header_bytes + offset for offset in offsets[name]["data_offsets"])
                file.seek(start)
                file.write(final[start:end])
                yield [name]
                await asyncio.sleep(0.002)

    await subject.load(subject.first_weights)
    subject.next_version += 1
    with file_without_a_name(rubbish) as weights_file:
        await subject.engine.load(subject.next_version, weights_file, arrivals(weights_file))
    assert sampled(await probe(subject.engine, subject.next_version)) == sampled(subject.fresh_probe)


async def test_load_without_changed_tensors_keeps_the_model(subject: Subject) -> None:
    await subject.load(subject.second_weights)
    version = await subject.load(subject.first_weights, batches=[])
    responses = await probe(subject.engine, version)
    assert sampled(responses) == sampled(subject.fresh_probe)
    assert {span.policy_version for response in responses for span in response.version_spans} == {version}


def fails_half_way(names: list[str]) -> Iterator[list[str]]:
    """Ends within a fused layer."""
    yield names[: names.index("model.layers.1.self_attn.k_proj.weight") + 1]
    raise OSError("the stream broke")


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the engine core is not forked, so it is not patched")
async def test_core_gives_memory_back_after_a_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    VllmEngine.prepare("cpu", "0", 1)
    vllm_engine.importing().result()
    from services.rollout.engines import weight_transfer

    monkeypatch.setattr(weight_transfer, "give_back_if_scarce", (tmp_path / "given back").touch)
    model_dir = write_tied_model(tmp_path / "model")
    weights = model_dir / "model.safetensors"
    engine = new_vllm_engine(OWN_DTYPE)
    await engine.start(model_dir, FIRST_VERSION)
    try:
        assert not (tmp_path / "given back").exists()
        await engine.load(FRESH_VERSION, weights, arriving([list(read_shapes(weights))]))
        assert (tmp_path / "given back").exists()
    finally:
        await engine.stop()


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the engine core is not forked, so it is not patched")
async def test_core_packs_every_packed_layer_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """See that vLLM's loaders get none of their tensors from the second update on."""
    VllmEngine.prepare("cpu", "0", 1)
    vllm_engine.importing().result()
    from vllm.model_executor.layers.linear import LinearBase

    from services.rollout.engines.weight_transfer import FileWeightTransferEngine

    log, finish = tmp_path / "updates", FileWeightTransferEngine.finish_weight_update

    def finish_noted(self: Any) -> None:
        layers = [layer for layer in self.model.modules() if isinstance(layer, LinearBase)]
        num_known = len(self._linears._layers)
        finish(self)
        num_packed = sum(layer.weight.numel() == 0 for layer in layers)
        with log.open("a", encoding="utf-8") as lines:
            lines.write(f"{len(layers)} {num_packed} {num_known} {len(self._linears._layers)}\n")

    monkeypatch.setattr(FileWeightTransferEngine, "finish_weight_update", finish_noted)
    model_dir = write_tied_model(tmp_path / "model")
    weights = model_dir / "model.safetensors"
    engine = new_vllm_engine(OWN_DTYPE)
    await engine.start(model_dir, FIRST_VERSION)
    try:
        for version in (FIRST_VERSION + 1, FIRST_VERSION + 2):
            await engine.load(version, weights, arriving([list(read_shapes(weights))]))
    finally:
        await engine.stop()
    (num_layers, num_packed, *first), (*_, num_known, num_last) = [
        [int(number) for number in line.split()] for line in log.read_text("utf-8").splitlines()
    ]
    assert num_layers == 2 * 4  # two layers, whose attention and MLP have two each
    assert num_packed in (0, num_layers)  # the processor decides whether vLLM packs
    assert first == [0, num_packed]
    assert [num_known, num_last] == [num_packed, num_packed]


async def test_load_that_fails_half_way_is_repaired_by_a_full_one(subject: Subject) -> None:
    await subject.load(subject.first_weights)
    with pytest.raises(OSError, match="the stream broke"):
        await subject.load(subject.second_weights, fails_half_way(subject.names()))
    assert subject.engine.version() is None
    with pytest.raises(ValueError, match="no version is served"):
        await subject.load(subject.second_weights, [subject.names()[1:]])
    assert subject.engine.version() is None
    responses = await probe(subject.engine, await subject.load(subject.second_weights))
    assert sampled(responses) == sampled(subject.fresh_probe)


async def test_prompt_blocks_shared_in_one_step_give_right_logprobs(tied: Subject) -> None:
    """Four groups at once whose prompts begin alike: their responses reuse blocks that are only just being written."""
    version = await tied.load(tied.second_weights)
    prompts = [[*LONG_PROMPT, *SHORT_PROMPT[: index + 1]] for index in range(4)]
    sampling = Sampling(max_response_tokens=16, temperature=1.0, seed=3)
    groups = await asyncio.gather(*(tied.engine.generate(prompt, 4, sampling, version) for prompt in prompts))
    for prompt, responses in zip(prompts, groups, strict=True):
        for response in responses:
            expected = teacher_forced_logprobs(tied.second_model_dir, prompt, response.token_ids, torch.float32, 1.0)
            gap = (torch.tensor(response.rollout_logprobs) - expected).abs()
            mean, largest = NOISE[tied.dtype]
            assert gap.mean() < mean
            assert gap.max() < 1.5 * largest


async def test_vllm_prepares_its_layers_while_tensors_travel(tied: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    is_prepared, update_weights = asyncio.Event(), tied.engine._llm.update_weights

    async def recorded(request: object) -> None:
        await update_weights(request)
        is_prepared.set()

    async def arrivals() -> AsyncIterator[Sequence[str]]:
        await asyncio.wait_for(is_prepared.wait(), 20)
        yield tied.names()

    monkeypatch.setattr(tied.engine._llm, "update_weights", recorded)
    tied.next_version += 1
    await tied.engine.load(tied.next_version, tied.second_weights, arrivals())
    assert sampled(await probe(tied.engine, tied.next_version)) == sampled(tied.fresh_probe)


async def test_prefix_cache_of_old_weights_is_dropped(subject: Subject) -> None:
    sampling = Sampling(max_response_tokens=24, temperature=1.0, seed=1)
    old = await subject.load(subject.first_weights)
    for _ in range(2):
        (cached,) = await subject.engine.generate(LONG_PROMPT, 1, sampling, old)
    new = await subject.load(subject.second_weights)
    (fresh,) = await subject.engine.generate(LONG_PROMPT, 1, sampling, new)
    assert sampled([fresh]) == sampled(subject.fresh_probe[1:2])
    assert fresh.num_cached_tokens == 0
    if isinstance(subject.engine, VllmEngine):
        assert cached.num_cached_tokens > len(LONG_PROMPT) // 2


async def test_every_token_is_stamped_with_the_version_that_is_served(subject: Subject) -> None:
    for response in subject.fresh_probe:  # before any load
        assert response.version_spans == [VersionSpan(FRESH_VERSION, 0, len(response.token_ids))]
    for weights_file in (subject.first_weights, subject.second_weights):
        version = await subject.load(weights_file)
        responses = await subject.engine.generate(SHORT_PROMPT, 8, Sampling(64, 1.0, 5), version)
        assert len(responses) == 8
        for response in responses:
            assert response.version_spans == [VersionSpan(version, 0, len(response.token_ids))]
            assert len(response.rollout_logprobs) == len(response.token_ids)


async def test_moving_copy_changes_no_weight_of_the_reference_engine(tmp_path: Path) -> None:
    """The host pulls the next version into the file at once; nobody has called `load` yet."""
    model_dir = write_untied_model(tmp_path / "model")
    other = write_perturbed_weights(model_dir, tmp_path / "other.safetensors", seed=1).read_bytes()
    weights_file = model_dir / "model.safetensors"
    engine = TransformersEngine(dtype="bfloat16")
    with file_without_a_name(weights_file.read_bytes()) as copy:
        weights_file.unlink()
        weights_file.symlink_to(copy)
        await engine.start(model_dir, FIRST_VERSION)
        before = await probe(engine, FIRST_VERSION)
        with open(copy, "r+b") as file:  # noqa: ASYNC230, memory
            file.write(other)
        assert sampled(await probe(engine, FIRST_VERSION)) == sampled(before)
    await engine.stop()


async def test_request_pinned_to_another_version_is_refused(either_engine: Subject) -> None:
    version = await either_engine.load(either_engine.first_weights)
    for other in (version - 1, version + 1):
        with pytest.raises(VersionMismatch) as refusal:
            await either_engine.engine.generate(SHORT_PROMPT, 1, Sampling(4, 1.0, 0), other)
        assert (refusal.value.expected, refusal.value.served) == (other, version)
        with pytest.raises(VersionMismatch):
            await anext(either_engine.engine.stream(SHORT_PROMPT, ChatSampling(4, 1.0, 0), other))
    assert either_engine.engine.num_in_flight == 0


async def test_more_prompt_tokens_than_one_step_takes_are_generated(tied: Subject) -> None:
    """vLLM's engine core dies on the CPU when it reads part of a seeded request's prompt in one step."""
    version = await tied.load(tied.first_weights)
    prompts = [[index, *LONG_PROMPT] for index in range(24)]
    groups = await asyncio.gather(
        *(tied.engine.generate(prompt, 2, Sampling(4, 1.0, 0), version) for prompt in prompts)
    )
    assert [len(responses) for responses in groups] == [2] * len(prompts)


async def test_prompt_beyond_the_context_is_refused_as_a_value(tied: Subject) -> None:
    version = await tied.load(tied.first_weights)
    too_long = [1] * 100_000
    with pytest.raises(ValueError, match="longer than the maximum model length"):
        await tied.engine.generate(too_long, 2, Sampling(4, 1.0, 0), version)
    with pytest.raises(ValueError, match="longer than the maximum model length"):
        await anext(tied.engine.stream(too_long, ChatSampling(4, 1.0, 0), version))
    assert tied.engine.num_in_flight == 0
    assert len(await tied.engine.generate([1, 2, 3], 2, Sampling(4, 1.0, 0), version)) == 2


def write_file_with_a_wrong_shape(good: Path, bad: Path) -> None:
    weights = load_file(good)
    weights["model.norm.weight"] = weights["model.norm.weight"][:-1].clone()
    save_file(weights, bad)


async def test_failed_load_serves_nothing_until_a_good_one(either_engine: Subject, tmp_path: Path) -> None:
    write_file_with_a_wrong_shape(either_engine.second_weights, tmp_path / "bad.safetensors")
    version = await either_engine.load(either_engine.first_weights)
    with pytest.raises(BadWeightFile):
        await either_engine.load(tmp_path / "bad.safetensors")
    assert either_engine.engine.version() is None
    for expected in (version, version + 1):
        with pytest.raises(VersionMismatch):
            await either_engine.engine.generate(SHORT_PROMPT, 1, Sampling(4, 1.0, 0), expected)
    repaired = await either_engine.load(either_engine.second_weights)
    assert sampled(await probe(either_engine.engine, repaired)) == sampled(either_engine.fresh_probe)


@pytest.mark.parametrize(("exists", "message"), [(False, "No such file"), (True, "Attempted to load weight")])
async def test_failed_load_in_the_vllm_worker_is_repaired_by_the_next(tied, tmp_path, monkeypatch, exists, message):
    if exists:
        write_file_with_a_wrong_shape(tied.second_weights, tmp_path / "bad.safetensors")
    await tied.load(tied.first_weights)
    with monkeypatch.context() as unchecked:
        unchecked.setattr(vllm_engine, "check_weight_file", lambda *_, **__: tied.names())
        with pytest.raises(Exception, match=message):
            await tied.load(tmp_path / "bad.safetensors")
    assert tied.engine.version() is None
    assert sampled(await probe(tied.engine, await tied.load(tied.second_weights))) == sampled(tied.fresh_probe)


async def test_sampling_defaults_of_the_model_are_ignored_but_not_eos(either_engine: Subject) -> None:
    """The tiny models' generation config asks for top_k = 2."""
    version = await either_engine.load(either_engine.first_weights)
    responses = await either_engine.engine.generate(SHORT_PROMPT, 16, Sampling(400, 1.0, 11), version)
    assert len({response.token_ids[0] for response in responses}) > 2
    eos_token_id = build_tokenizer().eos_token_id
    for response in responses:
        assert eos_token_id not in response.token_ids[:-1]
        assert (response.finish_reason == "stop") == (response.token_ids[-1] == eos_token_id)
    assert {response.finish_reason for response in responses} == {"stop", "length"}


async def test_tokens_come_as_often_as_their_logprobs_say(either_engine: Subject) -> None:
    version = await either_engine.load(either_engine.first_weights)
    num_samples = 600
    responses = await either_engine.engine.generate(SHORT_PROMPT, num_samples, Sampling(1, 0.3, seed=5), version)
    counts = Counter(response.token_ids[0] for response in responses)
    logprobs = {response.token_ids[0]: response.rollout_logprobs[0] for response in responses}
    expected = {token: num_samples * math.exp(logprob) for token, logprob in logprobs.items()}
    common = [token for token in counts if expected[token] >= 10]
    assert len(common) >= 5, "the model spreads its mass so that there is something to count"
    assert all(abs(counts[token] - expected[token]) < 4 * math.sqrt(expected[token]) for token in common)
    others = num_samples - sum(expected[token] for token in common)
    num_others = num_samples - sum(counts[token] for token in common)
    assert abs(num_others - others) < 4 * math.sqrt(max(others, 1))


async def test_every_rank_of_two_loads_its_shard(tmp_path: Path) -> None:
    model_dir = write_tied_model(tmp_path / "first")
    second_dir = Path(shutil.copytree(model_dir, tmp_path / "second"))
    second_weights = write_perturbed_weights(model_dir, second_dir / "model.safetensors", seed=1)
    engine = VllmEngine(cpu_cores="0,1", kv_cache_gib=0.25, max_num_seqs=8, tensor_parallel_size=2)
    await engine.start(model_dir, FIRST_VERSION)
    try:
        await engine.load(FRESH_VERSION, second_weights, arriving([[name] for name in read_shapes(second_weights)]))
        assert_logprobs_are_the_models(second_dir, await probe(engine, FRESH_VERSION), "bfloat16")
    finally:
        await engine.stop()


@pytest.mark.parametrize("call", ["generate", "load"])
async def test_call_ends_at_once_when_the_core_is_killed(call: str, tmp_path: Path) -> None:
    model_dir = write_tied_model(tmp_path / "model")
    engine = VllmEngine(cpu_cores="0", kv_cache_gib=0.25)
    before = set(psutil.Process().children())
    await engine.start(model_dir, FIRST_VERSION)
    started = set(psutil.Process().children()) - before
    core_processes = [process for process in started if "resource_tracker" not in " ".join(process.cmdline())]
    sampling = Sampling(max_response_tokens=8, temperature=1.0, seed=0)
    weights = model_dir / "model.safetensors"
    try:
        for process in core_processes:  # a core that stands still cannot answer before it is killed
            process.suspend()
        waiting = asyncio.create_task(
            engine.generate(SHORT_PROMPT, 1, sampling, FIRST_VERSION)
            if call == "generate"
            else engine.load(FRESH_VERSION, weights, arriving([[name] for name in read_shapes(weights)]))
        )
        await asyncio.sleep(0.2)
        assert not waiting.done()
        for process in core_processes:
            process.kill()
        async with asyncio.timeout(CORE_DEATH_DEADLINE_S):
            with pytest.raises(EngineDied):
                await waiting
            with pytest.raises(EngineDied if call == "generate" else VersionMismatch):
                await engine.generate(SHORT_PROMPT, 1, sampling, FIRST_VERSION)
    finally:
        await engine.stop()


START_AND_SLEEP = """
import asyncio, sys
from pathlib import Path
from services.rollout.engines.vllm_core import CoreContext
from services.rollout.engines.vllm_engine import VllmEngine
from vllm.v1.engine import utils

async def main():
    engine = VllmEngine(cpu_cores="0", kv_cache_gib=0.25)
    await engine.start(Path(sys.argv[1]), 0)
    assert utils.get_mp_context is CoreContext, "the core is not forked"
    sys.stdout.write("started\\n")
    sys.stdout.flush()
    await asyncio.sleep(600)

asyncio.run(main())
"""


async def test_killed_rollout_leaves_no_vllm_process(tmp_path: Path) -> None:
    model_dir = write_tied_model(tmp_path / "model")
    rollout = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", START_AND_SLEEP, str(model_dir)), stdout=PIPE, stderr=DEVNULL
    )
    assert rollout.stdout is not None
    while (line := await rollout.stdout.readline()) != b"started\n":
        assert line, "the rollout ended before its engine had started"
    processes = psutil.Process(rollout.pid).children(recursive=True)
    assert len(processes) == 2, "the engine core, and Python's tracker of its shared memory"
    rollout.kill()
    await rollout.wait()
    deadline = time.monotonic() + 20
    while alive := [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]:
        assert time.monotonic() < deadline, alive
        await asyncio.sleep(0.2)
