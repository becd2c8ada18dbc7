"""A broker, a job and rollouts in this process, and OpenAI's own client before them."""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import torch
from transformers import AutoTokenizer

from onbeat.contracts.records import WorkerRecord
from onbeat.streams.ledger import Ledger
from onbeat.weights.client import WeightsClient
from services.rollout.engines.transformers_engine import Draft, TransformersEngine
from tests.broker_fixtures import Server, serving
from tests.integration.rollout.rollout_rig import Rig, serving_model

HELLO = [{"role": "user", "content": "2+2="}]


class PacedEngine(TransformersEngine):
    """Each token of a chat takes `pace_s`. An `is_endless` one ends for its length only."""

    def __init__(self, pace_s: float = 0.0, *, is_endless: bool = False) -> None:
        super().__init__()
        self.pace_s, self.is_endless = pace_s, is_endless
        self.num_tokens = 0

    async def start(self, model_dir: Path, policy_version: int) -> None:
        await super().start(model_dir, policy_version)
        if self.is_endless:
            self._eos_token_ids = []

    @torch.inference_mode()
    def _draw_next(self, draft: Draft) -> int:
        time.sleep(self.pace_s)
        self.num_tokens += 1
        return super()._draw_next(draft)


class ChatRig(Rig):
    """A rig whose job a broker knows. The broker has no conductor: tests open iterations themselves."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(ledger)
        self.url = ""
        self.model_dir = Path()
        self.server: Server | None = None

    @asynccontextmanager
    async def broker(self, folder: Path, **settings: Any) -> AsyncIterator[None]:
        async with serving(self.ledger, folder, has_conductor=False, **settings) as broker:
            self.url, self.server = broker.url, broker.server
            yield

    def client(self, api_key: str = "none") -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key=api_key, max_retries=0, timeout=60.0)

    async def ask(self, **fields: Any) -> Any:
        """Return the answer of the official client, or the exception that it raises."""
        async with self.client() as client:
            return await client.chat.completions.create(**self.request(**fields))

    def request(self, **fields: Any) -> dict[str, Any]:
        return {"model": self.job_id, "messages": HELLO, "max_tokens": 12, "seed": 5} | fields

    def prompt_token_ids(self) -> list[int]:
        """Return the prompt's token ids of `HELLO`."""
        tokenizer = AutoTokenizer.from_pretrained(self.model_dir)
        return list(tokenizer.apply_chat_template(HELLO, add_generation_prompt=True, return_dict=True)["input_ids"])

    async def record(self) -> WorkerRecord | None:
        return next(iter(await self.ledger.workers.records(self.pool)), None)

    async def until_serving(self, version: int = 0) -> None:
        async def is_serving() -> bool:
            record = await self.record()
            return record is not None and record.policy_version == version and record.state in ("idle", "generating")

        await self.until(is_serving, timeout_s=60)

    async def train(self, iteration: int) -> None:
        """Run an iteration with the rollouts, and publish the next version."""
        await self.open(iteration, self.task(iteration, 0))
        await self.drained(iteration, timeout_s=60)
        await self.commit(iteration)


@asynccontextmanager
async def chatting(ledger: Ledger, folder: Path, **settings: Any) -> AsyncIterator[ChatRig]:
    """Run a job with a real tiny model and a broker, but no rollout yet."""
    rig = ChatRig(ledger)
    async with serving_model(rig, folder) as rig.model_dir, rig.broker(folder, **settings):
        rig.connect = WeightsClient
        try:
            yield rig
        finally:
            await rig.stop()
