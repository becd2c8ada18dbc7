"""Groups of episodes, and what a plain model computes of them: one path at a time, nothing packed."""

import random

import torch
from hypothesis import strategies as st

from onbeat.streams.codec import Response, RolloutGroup, Turn, VersionSpan, check_content
from tests.trainer_fixtures import VOCAB

# Turns as (the turn before, how many tokens of its path after the prompt are kept, tokens observed, tokens sampled).
SHAPES = {
    "one turn": [(None, 0, 0, 4)],
    "chain": [(None, 0, 0, 3), (0, 3, 2, 4), (1, 9, 3, 2)],
    "fork at the prompt's end": [(None, 0, 0, 3), (None, 0, 2, 4)],
    "fork in an observation": [(None, 0, 4, 3), (0, 2, 3, 2)],
    "fork in a sampled run": [(None, 0, 0, 5), (0, 2, 3, 4)],
    "several levels": [(None, 0, 0, 3), (0, 3, 2, 4), (1, 6, 1, 3), (2, 8, 2, 2), (1, 9, 1, 1), (2, 7, 0, 3)],
    "siblings behind one token": [(None, 0, 2, 3), (0, 5, 0, 2), (0, 5, 0, 4), (0, 5, 0, 1)],
    "one token each": [(None, 0, 0, 1), (None, 0, 0, 1), (None, 0, 1, 1)],
    "extended after a fork": [(None, 0, 1, 3), (0, 2, 0, 2), (0, 4, 2, 2)],
}
MIXED = [*SHAPES.values(), 3, 1]  # a number: a response of so many tokens that has no turns


def make_episodes(group_id="0-0", prompt_length=5, shapes=MIXED, version=0, seed=0, is_unique=False):
    """Create a group with a response of each shape. `is_unique`: no token id comes twice in it."""
    rng = random.Random(f"{seed}-{group_id}")
    numbers = iter(range(1_000_000))

    def tokens(count):
        return [next(numbers) if is_unique else rng.randrange(VOCAB) for _ in range(count)]

    prompt = tokens(prompt_length)
    responses = []
    for shape in shapes:
        turns = [] if isinstance(shape, int) else shape
        length = shape if isinstance(shape, int) else sum(sampled for *_, sampled in turns)
        responses.append(
            Response(
                token_ids=tokens(length),
                rollout_logprobs=[-rng.random() for _ in range(length)],
                version_spans=[VersionSpan(policy_version=version, start=0, end=length)],
                finish_reason="stop",
                reward=rng.random(),
                turns=[
                    Turn(
                        parent=parent,
                        num_shared=prompt_length + kept,
                        num_sampled=sampled,
                        waited_s=2.0,
                        generate_s=0.5,
                    )
                    for parent, kept, _, sampled in turns
                ],
            )
        )
        for turn, (_, _, observed, _) in zip(responses[-1].turns, turns, strict=True):
            turn.observed_token_ids[:] = tokens(observed)
    group = RolloutGroup(
        group_id=group_id,
        iteration=int(group_id.partition("-")[0]),
        policy_version=version,
        prompt_token_ids=prompt,
        responses=responses,
    )
    check_content(group)
    return group


@st.composite
def random_turns(draw):
    """Draw the turns of an episode: each may continue any earlier one, from any place of its path on."""
    turns, lengths = [], []
    for index in range(draw(st.integers(1, 6))):
        parent = draw(st.one_of(st.none(), st.integers(0, index - 1))) if index else None
        longest = 0 if parent is None else lengths[parent]
        kept = draw(st.one_of(st.just(longest), st.integers(0, longest)))
        observed, sampled = draw(st.integers(0, 4)), draw(st.integers(1, 4))
        turns.append((parent, kept, observed, sampled))
        lengths.append(kept + observed + sampled)
    return turns


def paths_of(group):
    """Return, for every turn in order, all tokens before the sampled ones, and the sampled ones."""
    turn_paths = []
    for response in group.responses:
        paths, sampled = [], list(response.token_ids)
        for turn in response.turns or [Turn(num_shared=len(group.prompt_token_ids), num_sampled=len(sampled))]:
            before = [*group.prompt_token_ids] if not turn.HasField("parent") else paths[turn.parent]
            before = [*before[: turn.num_shared], *turn.observed_token_ids]
            turn_paths.append((before, sampled[: turn.num_sampled]))
            paths.append(before + sampled[: turn.num_sampled])
            del sampled[: turn.num_sampled]
    return turn_paths


def path_logprobs(model, groups, temperature=1.0):
    """Compute the reference: each path alone through a plain transformers model; each sampled token once."""
    model.set_attn_implementation("sdpa")
    logprobs = []
    for group in groups:
        for before, sampled in paths_of(group):
            logits = model(torch.tensor([before + sampled])).logits[0, len(before) - 1 : -1] / temperature
            logprobs.append(logits.log_softmax(-1).gather(-1, torch.tensor(sampled)[:, None])[:, 0])
    return torch.cat(logprobs)
