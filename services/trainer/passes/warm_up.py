"""Passes over made-up tokens before training begins, so that no iteration waits for kernels to be compiled.

They come before the first version is published: an engine on the same device, which starts then, measures the free
memory, and must find what the trainer leaves.
"""

from collections.abc import Iterator
from typing import Any

import torch

from onbeat.streams.codec import Response, RolloutGroup
from services.trainer.batch import pack
from services.trainer.model.model import response_logprobs

NUM_GROUPS = (4, 8)  # two lengths: for the second one the compiler makes kernels that take any
PROMPT_TOKENS, RESPONSE_TOKENS, NUM_RESPONSES = 40, 20, 2
NUM_TOKENS = 256  # tokens of the vocabulary in use: the last ones of some models stand for no text


def warm_up(model: Any, device: torch.device) -> Iterator[None]:
    """Pass rows of two lengths through the model, forward and backward, and without a gradient, as frozen models are
    passed; yield after each. The caller drops the gradient. All ranks of a sharded model must do this."""
    num_tokens = min(NUM_TOKENS, model.config.get_text_config().vocab_size)
    for num_groups in NUM_GROUPS:
        batch = pack([made_up_group(index, num_tokens) for index in range(num_groups)], device)
        with torch.no_grad():
            response_logprobs(model, batch, temperature=1.0)
        yield
        response_logprobs(model, batch, temperature=1.0)[0].sum().backward()
        yield


def made_up_group(index: int, num_tokens: int) -> RolloutGroup:
    tokens = [(index + place) % num_tokens for place in range(PROMPT_TOKENS + RESPONSE_TOKENS)]
    response = Response(token_ids=tokens[PROMPT_TOKENS:], rollout_logprobs=[0.0] * RESPONSE_TOKENS)
    prompt = tokens[:PROMPT_TOKENS]  # no two groups begin with the same token, so they share no prefix
    return RolloutGroup(group_id=str(index), prompt_token_ids=prompt, responses=[response] * NUM_RESPONSES)
