"""A trial of an architecture: it finds out on a tiny random model which passes over a micro-batch are right.

The reference is transformers' own model, one sequence at a time, without padding or cache. The passes of `model.py` are
compared with it, log-probabilities and gradient, in float32, where equal means equal: the noise of bfloat16 on the real
model would hide a real difference. The first passes that agree are chosen; if none do, the model is refused by name. It
is also refused if its logits depend on later tokens, or if its published tensors do not make up the whole model.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from onbeat.streams.codec import Response, RolloutGroup, Turn
from services.trainer.batch import MicroBatch, pack
from services.trainer.episode import turn_paths
from services.trainer.model.errors import TRIAL_ERRORS
from services.trainer.model.lora import bypassed_layers, published_tensors
from services.trainer.model.model import PACKED_ATTENTION, Passes, register_attention, response_logprobs, set_up
from services.trainer.passes.shrink import (
    MAX_PARAMETERS,
    NUM_LAYERS,
    VOCAB_SIZE,
    num_parameters,
    random_model,
    shrunken,
)
from services.trainer.weights.store import SAFETENSORS_DTYPES

PREFIX = 16  # tokens that all prompts begin with
GROUPS = ((24, (20, 1, 9)), (30, (9,)), (5, (13, 13)))  # tokens of the rest of the prompt, and of responses
FORKING = (20, 6)  # tokens of the rest of the prompts whose response is an episode that forks
TURNS = (  # turns: the turn before, how many tokens of its path after the prompt are kept, observed, sampled
    (None, 0, 0, 5),
    (0, 5, 3, 4),
    (1, 12, 4, 6),
    (1, 9, 2, 3),  # a branch behind the first token that turn 1 sampled
    (0, 2, 0, 7),  # a branch behind the second token of turn 0
    (None, 0, 2, 1),
)
TOLERANCE = 1e-3  # greatest gap of logprobs, in nats, and of the gradient, relative to its norm
SENSITIVITY = 0.1  # a change of the prompt must move logprobs by this share of their standard deviation
SIZES = [(NUM_LAYERS, True), (2, True), (2, False)]  # layers, and whether they are narrow
HEAD_GAIN = 16.0  # makes logits large enough for a cap to have an effect
CANDIDATES = [  # the fastest first
    (PACKED_ATTENTION, False),
    ("sdpa", True),
    ("eager", True),
    ("sdpa", False),
    ("eager", False),
]


@dataclass(frozen=True)
class Reference:
    """A tiny random model of the architecture and the results of transformers with it."""

    config: Any
    model: Any
    groups: Sequence[RolloutGroup]
    logprobs: torch.Tensor  # [N], of all response tokens of the groups
    gradients: dict[str, torch.Tensor]


def try_architecture(
    config: Any, longest_tokens: float, is_sharded: bool = False, may_pack: bool = True
) -> tuple[Passes, str]:
    """Return the fastest right passes for sequences up to that length, and why they are not packed ('' if they are).

    `is_sharded`: ranks go through the layers together, so a micro-batch must be one pass. Raises ValueError naming the
    architecture and the reason when no passes are right.
    """
    register_attention()
    name = architecture_name(config)
    reference = create_reference(config, longest_tokens, name)
    try:
        problem = sequence_problem(reference) or publishing_problem(reference)
    except TRIAL_ERRORS as error:
        problem = f"a tiny model of it fails ({describe(error)})"
    if problem:
        raise ValueError(f"{name} cannot be trained: {problem}")
    has_plain_head, cpu = is_head_plain(reference.model), torch.device("cpu")
    bypassed = bypassed_layers(reference.model, torch.tensor([reference.groups[0].prompt_token_ids]))
    kinds = reference.groups[: len(GROUPS)], reference.groups[len(GROUPS) :]  # other kernels may serve forks
    batches = [pack(groups, cpu) for groups in kinds]
    reasons: list[str] = []
    for attention, is_padded in CANDIDATES if may_pack else CANDIDATES[1:]:
        passes = Passes(attention, is_padded, has_plain_head, bypassed)
        if not (reason := try_passes(passes, reference, batches)):
            if is_sharded and not (passes.is_packed or passes.is_padded):
                raise ValueError(
                    f"{name} needs a pass for each length of sequences, which sharded ranks cannot make together; use "
                    "ONBEAT_PARALLELISM=ddp"
                )
            return passes, reasons[0] if reasons else ""
        reasons.append(reason)
    raise ValueError(f"{name} cannot be trained: its passes differ from transformers' own ({reasons[-1]})")


def architecture_name(config: Any) -> str:
    names: list[str] = getattr(config, "architectures", None) or [f"a model of type {config.model_type}"]
    return names[0]


def create_reference(config: Any, longest_tokens: float, name: str) -> Reference:
    """Build a model of the first of SIZES that works and shows differences. Raises ValueError naming the model."""
    groups = trial_groups()
    for num_layers, is_narrow in SIZES:
        try:
            small = shrunken(config, longest_tokens, num_layers, is_narrow)
            if (size := num_parameters(small)) > MAX_PARAMETERS:
                raise ValueError(f"it still has {size} parameters")
            model = random_model(small, "eager")
            logprobs = plain_logprobs(model, groups)
            reference = Reference(small, model, groups, logprobs.detach(), gradients_of(model, logprobs))
            if not (change := change_with_prompt(reference)) >= SENSITIVITY:
                raise ValueError(f"another prompt moves its logprobs by {change:.2g} of their standard deviation only")
            return reference
        except TRIAL_ERRORS as error:
            failure = error
    raise ValueError(f"{name} cannot be trained: a tiny model of it fails ({describe(failure)})") from failure


@torch.no_grad()
def change_with_prompt(reference: Reference) -> float:
    """Return how far logprobs are from those after the reversed prompt, on average, in their standard deviations.

    Deep random models of some architectures forget the prompt: then wrong passes would not be noticed.
    """
    backwards = [
        RolloutGroup(prompt_token_ids=list(group.prompt_token_ids)[::-1], responses=group.responses)
        for group in reference.groups
    ]
    change = plain_logprobs(reference.model, backwards) - reference.logprobs
    return (change.abs().mean() / reference.logprobs.std()).item()


def try_passes(passes: Passes, reference: Reference, batches: Sequence[MicroBatch]) -> str:
    """Compare the passes over all of the reference's groups with it. Returns what is wrong with them, or ''."""
    kind = "packed rows" if passes.is_packed else f"{'padded' if passes.is_padded else 'separate'} rows"
    tried = f"{kind} with {passes.attention} attention" if not passes.is_packed else kind
    try:
        model = random_model(reference.config, passes.attention)  # some classes choose their attention when built
        model.load_state_dict(reference.model.state_dict())
        set_up(model, passes, torch.device("cpu"))
        logprobs = torch.cat([response_logprobs(model, batch, 1.0)[0] for batch in batches])
        gradient_gap = gap_of_gradients(gradients_of(model, logprobs), reference.gradients)
    except TRIAL_ERRORS as error:
        return f"{tried} fail: {describe(error)}"
    gap = (logprobs - reference.logprobs).abs().max().item()
    if gap <= TOLERANCE and gradient_gap <= TOLERANCE:  # false for NaN as well
        return ""
    return f"{tried} differ by {gap:.2g} nats and by {gradient_gap:.2g} of the gradient"


@torch.no_grad()
def sequence_problem(reference: Reference) -> str:
    """Return the problem if a token's logits depend on later tokens, or '': no engine can sample from such logits."""
    prompt = list(reference.groups[0].prompt_token_ids)
    whole, half = (forward(reference.model, tokens) for tokens in (prompt, prompt[: len(prompt) // 2]))
    gap = (whole[: len(half)] - half).norm() / half.norm()  # sums over other lengths differ in their last bits
    return "" if gap <= TOLERANCE else "its logits depend on later tokens, so that it is no causal language model"


@torch.no_grad()
def publishing_problem(reference: Reference) -> str:
    """Return what a rollout would lack that gets the published tensors and the configuration, or ''."""
    published = dict(published_tensors(reference.model))
    unknown = [
        f"{name} ({tensor.dtype})" for name, tensor in published.items() if tensor.dtype not in SAFETENSORS_DTYPES
    ]
    if unknown:
        return f"{unknown[0]} cannot be published"
    copied = random_model(reference.config, "eager", seed=1)
    copied.load_state_dict(published, strict=False)
    tokens = list(reference.groups[0].prompt_token_ids)
    gap = (forward(copied, tokens) - forward(reference.model, tokens)).abs().max().item()
    return "" if gap <= TOLERANCE else f"a copy made from what is published of it differs by {gap:.2g}"


@torch.no_grad()
def is_head_plain(model: Any) -> bool:
    """Return whether the logits are just hidden states times the head's weight: no bias, cap or scale."""
    token_ids = torch.arange(16, device=model.device)[None]
    try:
        weight = model.get_output_embeddings().weight
        kept = weight.clone()
        try:
            weight.mul_(HEAD_GAIN)
            hidden = model.get_decoder()(token_ids, use_cache=False).last_hidden_state
            expected, computed = model(token_ids, use_cache=False).logits, hidden @ weight.T
            return bool((computed - expected).norm() <= TOLERANCE * expected.norm())
        finally:
            weight.copy_(kept)
    except TRIAL_ERRORS:
        return False


def plain_logprobs(model: Any, groups: Iterable[RolloutGroup]) -> torch.Tensor:
    """Return logprobs [N]: each turn alone after its path, as any transformers model computes it."""
    logprobs = []
    for group in groups:
        for response in group.responses:
            for before, sampled in turn_paths(response, list(group.prompt_token_ids)):
                logits = forward(model, before + sampled)[len(before) - 1 : -1]
                logprobs.append(logits.float().log_softmax(-1).gather(-1, torch.tensor(sampled)[:, None])[:, 0])
    return torch.cat(logprobs)


def forward(model: Any, tokens: list[int]) -> torch.Tensor:
    """Return the logits [T, V] of one sequence."""
    logits: torch.Tensor = model(torch.tensor([tokens]), use_cache=False).logits[0]
    return logits


def gradients_of(model: Any, logprobs: torch.Tensor) -> dict[str, torch.Tensor]:
    """Compute the gradient of a sum in which every token has a different weight. As in the training of float32, it is
    added to what is there before the pass."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    (logprobs * torch.linspace(-1.0, 1.0, len(logprobs))).sum().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def gap_of_gradients(computed: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Return the norm of the difference over all parameters, relative to the expected norm; no gradient counts as 0."""
    difference = total = 0.0
    for name in computed.keys() | expected.keys():
        left, right = computed.get(name, torch.zeros(())), expected.get(name, torch.zeros(()))
        difference += (left - right).square().sum().item()
        total += right.square().sum().item()
    distance: float = (difference / total) ** 0.5
    return distance


def trial_groups() -> list[RolloutGroup]:
    """Create groups with a shared prefix, responses of several lengths, and some sequences of equal length; then such
    with an episode."""
    generator = torch.Generator().manual_seed(0)

    def tokens(count: int) -> list[int]:
        return torch.randint(VOCAB_SIZE, (count,), generator=generator).tolist()

    def response(count: int, num_prompt: int = 0, turns: Sequence[tuple[int | None, int, int, int]] = ()) -> Response:
        episode = [
            Turn(parent=parent, num_shared=num_prompt + kept, observed_token_ids=tokens(observed), num_sampled=sampled)
            for parent, kept, observed, sampled in turns
        ]
        return Response(token_ids=tokens(count), rollout_logprobs=[0.0] * count, turns=episode)

    prefix = tokens(PREFIX)
    groups = [(length, [response(count) for count in lengths]) for length, lengths in GROUPS]
    num_sampled = sum(sampled for *_, sampled in TURNS)
    groups += [(length, [response(num_sampled, PREFIX + length, TURNS), response(9)]) for length in FORKING]
    return [
        RolloutGroup(group_id=str(index), prompt_token_ids=prefix + tokens(length), responses=responses)
        for index, (length, responses) in enumerate(groups)
    ]


def describe(error: Exception) -> str:
    first_line = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {first_line}"[:200]
