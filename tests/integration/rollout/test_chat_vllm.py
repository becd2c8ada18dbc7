"""Talking to a policy that real vLLM serves, while it trains."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import openai
import pytest

from onbeat.engines import ChatSampling, Sampling, TextPiece
from services.rollout.engines.vllm_engine import VllmEngine
from tests.integration.rollout.chat_rig import chatting


class HeldEngine(VllmEngine):
    """A chat comes no further than its first piece while it may not."""

    def __init__(self) -> None:
        super().__init__(cpu_cores="0", kv_cache_gib=0.25, max_num_seqs=32, dtype="float32")
        self.may_go_on = asyncio.Event()
        self.may_go_on.set()

    async def stream(
        self, prompt_token_ids: list[int], sampling: ChatSampling, expected_version: int
    ) -> AsyncGenerator[TextPiece]:
        async with aclosing(super().stream(prompt_token_ids, sampling, expected_version)) as pieces:
            async for piece in pieces:
                yield piece
                await self.may_go_on.wait()


async def test_vllm_answers_streams_stops_and_makes_way(ledger, tmp_path):
    engine = HeldEngine()
    async with chatting(ledger, tmp_path) as rig, rig.client() as client:
        rig.start_worker(engine, chat_grace_s=0.0)  # type: ignore[arg-type]
        await rig.until_serving()
        whole = await rig.ask(n=2, max_tokens=24)
        expected = [
            (await engine.generate(rig.prompt_token_ids(), 1, Sampling(24, 1.0, 5 + i), 0))[0] for i in range(2)
        ]
        assert [choice.message.content for choice in whole.choices] == [response.text for response in expected]
        assert whole.usage.completion_tokens == sum(len(response.token_ids) for response in expected)
        assert len({(await rig.ask(temperature=0, seed=seed)).choices[0].message.content for seed in range(3)}) == 1

        stream = await client.chat.completions.create(**rig.request(max_tokens=24), stream=True)
        pieces = [chunk.choices[0].delta.content async for chunk in stream]
        assert "".join(pieces) == whole.choices[0].message.content
        assert len(pieces) > 2
        stop = whole.choices[0].message.content[4:6]
        ended = (await rig.ask(max_tokens=24, stop=stop)).choices[0]
        assert ended.message.content == whole.choices[0].message.content.partition(stop)[0]
        assert ended.finish_reason == "stop"

        assert engine._llm is not None
        processor = engine._llm.output_processor
        assert not processor.has_unfinished_requests()  # requests that a stop string has cut off have ended, too
        engine.may_go_on.clear()
        asking = asyncio.create_task(rig.ask(max_tokens=450))
        await rig.until(lambda: engine.num_in_flight == 1)
        asking.cancel()
        await rig.until(lambda: engine.num_in_flight == 0 and not processor.has_unfinished_requests())

        stream = await client.chat.completions.create(**rig.request(max_tokens=450), stream=True)
        await anext(stream)
        await rig.train(0)
        with pytest.raises(openai.APIError, match=r"moved on from version 0 to 1"):
            assert {chunk.system_fingerprint async for chunk in stream} <= {f"{rig.job_id}@0"}
        await rig.until_serving(1)
        engine.may_go_on.set()
        after = await rig.ask(n=2, max_tokens=24)
        assert after.system_fingerprint == f"{rig.job_id}@1"
        assert after.choices != whole.choices
