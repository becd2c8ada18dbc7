"""Episodes on a real engine: the logprobs of every turn are those of a fresh forward pass over its path."""

import asyncio
import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from onbeat.engines import Sampling
from onbeat.environments import Outcome
from onbeat.streams.codec import check_group, check_logprobs
from services.rollout.engines.transformers_engine import TransformersEngine
from services.rollout.prompts import PromptEncoder
from services.trainer.episode import turn_paths
from tests.episode_rig import VERSION, Rig, flight_of
from tests.tiny_models import write_untied_model
from tests.waiting import until

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
TEMPERATURE = 0.8


async def use_a_tool(task, policy):
    """Two turns: the tool answers with the length of what was sampled; a third one summarises, so the tree forks."""
    answer = await policy.chat(task.messages, [TOOL])
    result = {"role": "tool", "tool_call_id": "a", "content": f"{len(answer['content'])} characters"}
    last = await policy.chat([*task.messages, answer, result], [TOOL])
    await policy.chat([*task.messages, {"role": "user", "content": f"sum up {len(last['content'])}"}], [TOOL])
    return Outcome(1.0, {"turns": 3.0}, {last["id"]: 0.5})


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return write_untied_model(tmp_path_factory.mktemp("model") / "model")


async def test_logprobs_of_all_turns_are_those_of_a_fresh_pass(model_dir):
    episodes = 3
    engine = TransformersEngine(dtype="float32")
    await engine.start(model_dir, VERSION)
    encoder = await asyncio.to_thread(PromptEncoder.load, model_dir, None)
    rig = Rig(use_a_tool, engine=engine, encoder=encoder)
    await rig.server.start()
    try:
        flight = flight_of(num_samples=episodes, max_response_tokens=16, temperature=TEMPERATURE)
        group = await rig.producer.produce(flight)
    finally:
        await rig.server.stop()
        await engine.stop()
    check_group(group)
    check_logprobs(group)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    assert len(group.responses) == episodes
    assert len({tuple(response.token_ids) for response in group.responses}) == episodes
    for response in group.responses:
        assert [turn.parent if turn.HasField("parent") else None for turn in response.turns] == [None, 0, None]
        paths = turn_paths(response, list(group.prompt_token_ids))
        logprobs = [logprob for prompt, sampled in paths for logprob in fresh(model, prompt, sampled)]
        torch.testing.assert_close(torch.tensor(list(response.rollout_logprobs)), torch.tensor(logprobs))
        assert "characters" in json.loads(response.turns[1].messages_json)[0]["content"]


async def test_generation_that_is_cancelled_computes_no_further(model_dir):
    """An agent that gives up and asks again must not leave the engine ever more to do."""
    engine = TransformersEngine(dtype="float32")
    await engine.start(model_dir, VERSION)
    engine._eos_token_ids = [-1]  # so that no response ends by chance
    num_passes = 0

    def count(*_: object) -> None:
        nonlocal num_passes
        num_passes += 1

    engine._model.register_forward_hook(count)
    given_up = [
        asyncio.create_task(engine.generate([1, 2, 3], 1, Sampling(400, 1.0, seed), VERSION)) for seed in range(3)
    ]
    await until(lambda: num_passes >= 2)
    for request in given_up:
        request.cancel()
    await engine.generate([1, 2, 3], 1, Sampling(1, 1.0, 7), VERSION)  # the model is free only behind the others
    assert num_passes < 600  # half of the 1200 calls
    await engine.stop()


@torch.inference_mode()
def fresh(model, prompt, sampled):
    """Return the logprobs of the sampled tokens, [T], by one pass over prompt and sample."""
    logits_TV = model(torch.tensor([prompt + sampled])).logits[0, len(prompt) - 1 : -1]
    logprobs_TV = torch.log_softmax(logits_TV.float() / TEMPERATURE, dim=-1)
    return logprobs_TV.gather(1, torch.tensor(sampled)[:, None])[:, 0].tolist()
