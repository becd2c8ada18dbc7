"""The reference rollout engine: a plain Hugging Face model, one request at a time.

It is slow and simple on purpose. Tests compare vLLM with it, and it serves where vLLM does not exist.
"""

import asyncio
import math
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM

from onbeat.engines import (
    ChatSampling,
    FinishReason,
    GeneratedResponse,
    Sampling,
    TextPiece,
    VersionMismatch,
    VersionSpan,
)
from onbeat.engines.arrivals import gathered
from services.prompts.tokenizer import load_tokenizer
from services.rollout.engines.stops import Ending, read_end_ids
from services.rollout.engines.weight_files import (
    LM_HEAD_WEIGHT,
    TensorShapes,
    check_weight_file,
    read_checkpoint_shapes,
)

GREEDY_BELOW = 1e-5  # temperature; below, the likeliest token is taken


@dataclass
class Draft:
    """A chat response between two of its tokens."""

    sampling: ChatSampling
    policy_version: int
    generator: torch.Generator
    next_input: list[int]  # the prompt, then the previous token
    cache: Any = None


@dataclass
class Progress:
    """A request while a thread computes its responses."""

    is_over: threading.Event = field(default_factory=threading.Event)  # it was cancelled, or has ended
    num_tokens: int = 0  # sampled so far


class TransformersEngine:
    """An engine over Transformers; see `Engine` for the contract.

    `dtype` is "float32" or "bfloat16", `device` any torch device. `max_num_seqs` is what `capacity` reports; requests
    beyond the running one wait for it.
    """

    takes = frozenset({"greedy", "top_p", "top_k", "min_p", "min_tokens", "stop", "stop_token_ids"})

    def __init__(self, *, dtype: str = "float32", max_num_seqs: int = 16, device: str = "cpu") -> None:
        self._dtype: torch.dtype = getattr(torch, dtype)
        self._max_num_seqs = max_num_seqs
        self._device = torch.device(device)
        self._turn = asyncio.Lock()  # requests wait here: waiting threads would be missed by pulls and name look-ups
        self._lock = threading.Lock()  # held by the thread that uses the model, which outlives a cancelled request
        self._model: Any = None
        self._tokenizer: Any = None
        self._eos_token_ids: list[int] = []
        self._shapes: TensorShapes = {}
        self._version: int | None = None
        self.num_in_flight = self.num_cancelled_tokens = 0

    async def start(self, model_dir: Path, policy_version: int) -> None:
        assert self._model is None, "the engine is already started"
        await asyncio.to_thread(self._read_model, model_dir)
        self._version = policy_version

    def _read_model(self, model_dir: Path) -> None:
        self._shapes = read_checkpoint_shapes(model_dir)
        self._tokenizer = load_tokenizer(model_dir, local_files_only=True)
        model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=self._dtype, local_files_only=True)
        eos = model.generation_config.eos_token_id
        eos_token_ids = set(eos if isinstance(eos, list) else [eos]) | {self._tokenizer.eos_token_id}
        self._eos_token_ids = sorted((eos_token_ids - {None}) | read_end_ids(model_dir))
        for tensor in (*model.parameters(), *model.buffers()):
            # Otherwise it may map the file itself, which changes to the next version under us.
            tensor.data = tensor.data.clone()
        self._model = model.to(self._device).eval()

    async def generate(
        self, prompt_token_ids: list[int], num_samples: int, sampling: Sampling, expected_version: int
    ) -> list[GeneratedResponse]:
        if self._model is None or expected_version != self._version:
            raise VersionMismatch(expected_version, self._version)
        if sampling.temperature < 0:
            raise ValueError(f"temperature {sampling.temperature} is negative")
        self.num_in_flight += num_samples
        progress = Progress()
        try:
            async with self._turn:
                sampled = asyncio.to_thread(self._sample, prompt_token_ids, num_samples, sampling, progress)
                endings, logprobs_GT = await sampled
        except asyncio.CancelledError:
            self.num_cancelled_tokens += progress.num_tokens
            raise
        finally:
            progress.is_over.set()
            self.num_in_flight -= num_samples
        return [
            to_response(ending, logprobs, expected_version)
            for ending, logprobs in zip(endings, logprobs_GT.tolist(), strict=True)
        ]

    @torch.inference_mode()
    def _sample(
        self, prompt_token_ids: list[int], num_samples: int, sampling: Sampling, progress: Progress
    ) -> tuple[list[Ending], Tensor]:
        """Return [G] responses and the float32 logprobs of their tokens, [G, T], T the longest response: the batch goes
        on until then. The prompt is read once.

        Nothing more is computed once `progress.is_over` is set: the request was cancelled.
        """
        endings = [Ending(self._decode, sampling, self._eos_token_ids) for _ in range(num_samples)]
        with self._lock:
            if progress.is_over.is_set():
                return endings, torch.empty(num_samples, 0)
            generator = torch.Generator(self._device).manual_seed(sampling.seed)
            end_ids = torch.tensor([*self._eos_token_ids, *sampling.stop_token_ids], device=self._device)
            prompt = torch.tensor([prompt_token_ids], device=self._device)
            output = self._model(prompt, use_cache=True, logits_to_keep=1)
            output.past_key_values.batch_repeat_interleave(num_samples)
            logits_GV = output.logits[:, -1].expand(num_samples, -1)
            logprobs = []
            for place in range(sampling.max_response_tokens):
                forbidden = end_ids if place < sampling.min_tokens else end_ids[:0]
                token_G1, logprobs_G1 = draw(logits_GV.float(), sampling, generator, forbidden)
                logprobs.append(logprobs_G1)
                for ending, token_id in zip(endings, token_G1[:, 0].tolist(), strict=True):
                    if ending.finish_reason is None:
                        ending.push(token_id)
                        progress.num_tokens += 1
                if all(ending.finish_reason for ending in endings) or progress.is_over.is_set():
                    break
                output = self._model(token_G1, past_key_values=output.past_key_values, use_cache=True)
                logits_GV = output.logits[:, -1]
            return endings, torch.cat(logprobs, 1).cpu()

    def _decode(self, token_ids: list[int]) -> str:
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=True)
        return text

    async def stream(
        self, prompt_token_ids: list[int], sampling: ChatSampling, expected_version: int
    ) -> AsyncGenerator[TextPiece]:
        """Yield pieces of text; see `StreamingEngine`. A chat locks the model for one token at a time, so that a group
        waits no longer than that."""
        if self._model is None or expected_version != self._version:
            raise VersionMismatch(expected_version, self._version)
        generator = torch.Generator(self._device).manual_seed(sampling.seed)
        draft = Draft(sampling, expected_version, generator, prompt_token_ids)
        token_ids: list[int] = []
        finish_reason: FinishReason | None = None
        shown = ""
        self.num_in_flight += 1
        try:
            while finish_reason is None:
                token_ids.append(await asyncio.to_thread(self._draw_next, draft))
                num_shown = len(token_ids)
                if token_ids[-1] in (*self._eos_token_ids, *sampling.stop_token_ids):
                    finish_reason, num_shown = "stop", num_shown - 1
                elif len(token_ids) == sampling.max_response_tokens:
                    finish_reason = "length"
                shown_ids = token_ids[:num_shown]
                text = self._tokenizer.decode(shown_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
                if finish_reason is None:
                    text = text.rstrip("\ufffd")  # the character is not complete yet
                yield TextPiece(text[len(shown) :], 1, finish_reason)
                shown = text
        finally:
            self.num_in_flight -= 1

    @torch.inference_mode()
    def _draw_next(self, draft: Draft) -> int:
        """Draw the next token. Raises VersionMismatch when the weights were replaced meanwhile."""
        with self._lock:
            if self._model is None or self._version != draft.policy_version:
                raise VersionMismatch(draft.policy_version, self._version)
            inputs = torch.tensor([draft.next_input], device=self._device)
            output = self._model(inputs, past_key_values=draft.cache, use_cache=True, logits_to_keep=1)
            token_11, _ = draw(output.logits[:, -1].float(), draft.sampling, draft.generator)
        token_id = int(token_11)
        draft.cache, draft.next_input = output.past_key_values, [token_id]
        return token_id

    @property
    def _is_tied(self) -> bool:
        assert self._model is not None
        return bool(getattr(self._model.config, "tie_word_embeddings", False))  # some families lack it

    async def load(self, policy_version: int, weights_file: Path, arrivals: AsyncIterator[Sequence[str]]) -> None:
        assert self._model is not None, "load before start"
        assert self.num_in_flight == 0, f"load with {self.num_in_flight} responses in flight"
        served, self._version = self._version, None
        names_in_file = check_weight_file(weights_file, self._shapes, is_tied=self._is_tied)
        async with gathered(arrivals, names_in_file, must_be_all=served is None) as arrived:
            while names := await arrived.take():
                await asyncio.to_thread(self._replace_weights, weights_file, names)
            arrived.check()
        self._version = policy_version

    def _replace_weights(self, weights_file: Path, names: Sequence[str]) -> None:
        with self._lock, safe_open(weights_file, framework="pt") as tensors:
            weights = {name: tensors.get_tensor(name) for name in names}
            if self._is_tied:
                weights.pop(LM_HEAD_WEIGHT, None)  # it would overwrite the embedding
            self._model.load_state_dict(weights, strict=False)

    def version(self) -> int | None:
        return self._version

    def capacity(self) -> int:
        return self._max_num_seqs

    async def stop(self) -> None:
        self._model = self._version = None


def draw(
    logits_GV: Tensor, sampling: Sampling, generator: torch.Generator, forbidden: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Draw a token of each row, none of the ids in `forbidden` [F]. Return tokens and their logprobs, both [G, 1]."""
    if forbidden is not None and len(forbidden):
        logits_GV = logits_GV.index_fill(1, forbidden, -torch.inf)
    if sampling.temperature < GREEDY_BELOW:
        token_G1 = logits_GV.argmax(-1, keepdim=True)
        return token_G1, logits_GV.log_softmax(-1).gather(1, token_G1)
    logprobs_GV = torch.log_softmax(truncated(logits_GV / sampling.temperature, sampling), dim=-1)
    token_G1 = torch.multinomial(logprobs_GV.exp(), 1, generator=generator)
    return token_G1, logprobs_GV.gather(1, token_G1)


def truncated(logits_GV: Tensor, sampling: Sampling) -> Tensor:
    """Return the logits of what may be drawn, minus infinity elsewhere. As in vLLM, min_p is first and top_p last."""
    if sampling.min_p > 0:
        least_G1 = logits_GV.max(-1, keepdim=True).values + math.log(sampling.min_p)
        logits_GV = logits_GV.masked_fill(logits_GV < least_G1, -torch.inf)
    if 0 < sampling.top_k < logits_GV.shape[1]:
        least_G1 = logits_GV.topk(sampling.top_k).values[:, -1:]
        logits_GV = logits_GV.masked_fill(logits_GV < least_G1, -torch.inf)
    if sampling.top_p < 1:
        sorted_GV, order_GV = logits_GV.softmax(-1).sort(dim=-1, descending=True)
        is_beyond_GV = sorted_GV.cumsum(-1) - sorted_GV >= sampling.top_p  # never true of the likeliest token
        logits_GV = logits_GV.masked_fill(is_beyond_GV.gather(1, order_GV.argsort(-1)), -torch.inf)
    return logits_GV


def to_response(ending: Ending, logprobs: list[float], version: int) -> GeneratedResponse:
    num_tokens = len(ending.token_ids)
    return GeneratedResponse(
        token_ids=ending.token_ids,
        rollout_logprobs=logprobs[:num_tokens],
        finish_reason=ending.finish_reason or "length",
        version_spans=[VersionSpan(version, 0, num_tokens)],
        text=ending.text,
    )
