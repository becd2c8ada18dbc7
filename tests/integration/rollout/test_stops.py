"""Stops and the sampling of held-out sets: the same by both engines, on a tiny model that names several end tokens."""

import json
import math
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from onbeat.engines import Engine, Sampling
from services.rollout.engines.transformers_engine import TransformersEngine
from services.rollout.engines.vllm_engine import VllmEngine
from tests.tiny_models import EOS_TOKEN, SPECIAL_TOKENS, write_tied_model

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]

PROMPT = list(b"two and two is")
VERSION, NUM_SAMPLES = 1, 16
IN_CONFIG, IN_GENERATION_CONFIG = {40, 41}, {50}
LETTERS = "abcdefghijklmnop"
PIECES = [first + second for first in LETTERS for second in LETTERS]


def build_pair_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer whose tokens are two letters each, so that all that a random model samples is text."""
    tokenizer = Tokenizer(models.BPE(vocab={piece: index for index, piece in enumerate(PIECES)}, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(SPECIAL_TOKENS)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS_TOKEN)


TOKENIZER = build_pair_tokenizer()


def text_of(token_ids: list[int]) -> str:
    return TOKENIZER.decode(token_ids, skip_special_tokens=True)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_tied_model(tmp_path_factory.mktemp("stops") / "model")
    TOKENIZER.save_pretrained(folder)
    for name, end_ids in (("config.json", sorted(IN_CONFIG)), ("generation_config.json", *IN_GENERATION_CONFIG)):
        file = folder / name
        file.write_text(json.dumps(json.loads(file.read_text("utf-8")) | {"eos_token_id": end_ids}), encoding="utf-8")
    return folder


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["vllm", "transformers"])
async def engine(request: pytest.FixtureRequest, model_dir: Path) -> AsyncIterator[Engine]:
    if request.param == "vllm":
        created: Engine = VllmEngine(cpu_cores="0", kv_cache_gib=0.25, max_num_seqs=32, dtype="float32")
    else:
        created = TransformersEngine()
    await created.start(model_dir, VERSION)
    yield created
    await created.stop()


@pytest.fixture(scope="module")
def logits_of(model_dir: Path):
    """Return the logits of the first sampled tokens, [T, V]."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)

    def logits(token_ids: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            return model(torch.tensor([PROMPT + token_ids])).logits[0, len(PROMPT) - 1 : -1]

    return logits


async def draw(engine: Engine, num_samples: int = NUM_SAMPLES, max_tokens: int = 48, **sampling):
    fields = {"temperature": 1.0, "seed": 3} | sampling
    return await engine.generate(PROMPT, num_samples, Sampling(max_tokens, **fields), VERSION)


async def test_all_end_tokens_of_the_files_stop(engine: Engine) -> None:
    end_ids = IN_CONFIG | IN_GENERATION_CONFIG | {TOKENIZER.eos_token_id}
    responses = await draw(engine, num_samples=64, max_tokens=400)
    last = {response.token_ids[-1] for response in responses if response.finish_reason == "stop"}
    assert last == end_ids
    for response in responses:
        assert not end_ids & set(response.token_ids[:-1])
        assert (response.finish_reason == "stop") == (response.token_ids[-1] in end_ids)
        assert len(response.token_ids) <= 400


async def test_response_ends_with_the_token_that_completes_a_stop(engine: Engine) -> None:
    free = await draw(engine)
    stop = free[0].text[3:6]  # it begins and ends within tokens of two letters
    num_stopped = 0
    for before, after in zip(free, await draw(engine, stop=(stop, "zz")), strict=True):
        num_tokens = len(after.token_ids)
        assert after.token_ids == before.token_ids[:num_tokens]
        assert after.rollout_logprobs == pytest.approx(before.rollout_logprobs[:num_tokens], abs=1e-4)
        assert after.version_spans[-1].end == num_tokens
        assert after.text == before.text.partition(stop)[0]
        if stop in before.text:
            num_stopped += 1
            assert after.finish_reason == "stop"
            assert stop in text_of(after.token_ids)
            assert stop not in text_of(after.token_ids[:-1])
    assert num_stopped > 0


async def test_stop_token_ends_a_response_and_is_no_text(engine: Engine) -> None:
    free = await draw(engine)
    stop_id = free[0].token_ids[2]
    num_stopped = 0
    for before, after in zip(free, await draw(engine, stop_token_ids=(stop_id,)), strict=True):
        assert after.token_ids == before.token_ids[: len(after.token_ids)]
        if stop_id in before.token_ids:
            num_stopped += 1
            assert (after.token_ids.index(stop_id), after.finish_reason) == (len(after.token_ids) - 1, "stop")
            assert after.text == text_of(after.token_ids[:-1])
    assert num_stopped > 0


async def test_temperature_0_takes_the_likeliest_token(engine: Engine, logits_of) -> None:
    (response,) = await draw(engine, num_samples=1, max_tokens=12, temperature=0.0)
    logprobs = logits_of(response.token_ids).log_softmax(-1)
    assert response.token_ids == logprobs.argmax(-1).tolist()
    assert response.rollout_logprobs == pytest.approx(logprobs.max(-1).values.tolist(), abs=1e-3)


def kept_by(name: str, value: float, logits_TV: torch.Tensor) -> torch.Tensor:
    """Return which tokens may be drawn, [T, V], by the definition of a truncation."""
    probs_TV = logits_TV.softmax(-1)
    if name == "min_p":
        return probs_TV >= value * probs_TV.max(-1, keepdim=True).values
    likelier_TVV = probs_TV[:, None, :] > probs_TV[:, :, None]
    if name == "top_k":
        return likelier_TVV.sum(-1) < value
    return (probs_TV[:, None, :] * likelier_TVV).sum(-1) < value


@pytest.mark.parametrize(("name", "value"), [("top_k", 3), ("top_p", 0.6), ("min_p", 0.2)])
async def test_truncated_sampling_draws_what_it_may(engine: Engine, logits_of, name: str, value: float) -> None:
    temperature = 0.8
    drawn, allowed_logprobs = set(), []
    for response in await draw(engine, num_samples=24, max_tokens=6, temperature=temperature, **{name: value}):
        logits_TV = logits_of(response.token_ids) / temperature
        kept_TV = kept_by(name, value, logits_TV)
        expected = logits_TV.masked_fill(~kept_TV, -math.inf).log_softmax(-1)
        places = torch.arange(len(response.token_ids))
        assert kept_TV[places, response.token_ids].all()
        allowed_logprobs += expected[places, response.token_ids].tolist()
        assert response.rollout_logprobs == pytest.approx(allowed_logprobs[-len(places) :], abs=1e-3)
        drawn.add(response.token_ids[0])
    assert len(drawn) > 1


async def test_nothing_stops_before_min_tokens(engine: Engine) -> None:
    free = await draw(engine)
    stop_id, stop = free[0].token_ids[0], free[0].text[3:6]
    assert len((await draw(engine, num_samples=1, stop_token_ids=(stop_id,)))[0].token_ids) == 1
    end_ids = {stop_id, *IN_CONFIG, *IN_GENERATION_CONFIG, TOKENIZER.eos_token_id}
    for response in await draw(engine, stop_token_ids=(stop_id,), stop=(stop,), min_tokens=30):
        assert len(response.token_ids) > 30
        assert not end_ids & set(response.token_ids[:30])
    for response in await draw(engine, stop_token_ids=(stop_id,), min_tokens=30, max_tokens=30):
        assert (len(response.token_ids), response.finish_reason) == (30, "length")
