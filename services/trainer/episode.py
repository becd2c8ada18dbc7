"""The token tree of an episode, as the trainer computes it: the inputs, their order, and what predicts what.

The tokens of a response lie here turn by turn: those that a turn observed, then those that it sampled. Each stands
behind another one, on the path of its turn. A token that another one stands behind is an input, so it gets a place;
the last token of a path that nothing continues predicts nothing, and gets none.

    turn 0   [o0 s0 s1 s2]       turn 1, behind s0, rewrites what came after it
    turn 1   [o1 o2 s3 s4]       turn 2, behind s4, extends turn 1
    turn 2   [o3 s5 s6]

    places   o0 s0 | s1 | o1 o2 s3 s4 o3 s5         three segments: the first is the parent of the others
    sampled  s0 <- o0, s1 <- s0, s2 <- s1, s3 <- o2, s4 <- s3, s5 <- o3, s6 <- s5

Without turns a response is one turn that observes nothing.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from onbeat.streams.codec import Response, RolloutGroup
from services.trainer.attention import Tree

CACHED_FRAC = "episode/cached_frac"  # a metric: of the prompts of all calls but the first of each episode


@dataclass(frozen=True)
class TurnSpan:
    """The tokens of one turn among those of its episode."""

    start: int
    first_sampled: int
    end: int
    num_shared: int  # tokens of the path before it, those of the group's prompt included
    parent: int  # -1: none
    before: int  # the token that its first one stands behind; -1: the last one of the group's prompt


def turn_spans(response: Response, num_prompt: int) -> list[TurnSpan]:
    """Return the turns of an episode behind a prompt of that many tokens."""
    spans: list[TurnSpan] = []
    start = 0
    for turn in response.turns:
        parent = turn.parent if turn.HasField("parent") else -1
        before = token_at(spans, parent, turn.num_shared - 1, num_prompt)
        first_sampled = start + len(turn.observed_token_ids)
        spans.append(TurnSpan(start, first_sampled, first_sampled + turn.num_sampled, turn.num_shared, parent, before))
        start = spans[-1].end
    return spans


def token_at(spans: Sequence[TurnSpan], turn: int, position: int, num_prompt: int) -> int:
    """Return the token at a position of a turn's path; -1: it is one of the group's prompt."""
    if position < num_prompt:
        return -1
    while position < spans[turn].num_shared:
        turn = spans[turn].parent
    return spans[turn].start + position - spans[turn].num_shared


def turn_paths(response: Response, prompt: list[int]) -> Iterator[tuple[list[int], list[int]]]:
    """Yield what the engine was asked in each turn and what it sampled: each turn by itself, with all before it."""
    if not response.turns:
        yield prompt, list(response.token_ids)
    paths: list[list[int]] = []
    start = 0
    for turn in response.turns:
        parent = paths[turn.parent] if turn.HasField("parent") else prompt
        before = parent[: turn.num_shared] + list(turn.observed_token_ids)
        sampled = list(response.token_ids[start : start + turn.num_sampled])
        yield before, sampled
        start += len(sampled)
        paths.append(before + sampled)


def num_leaves(spans: Sequence[TurnSpan]) -> int:
    """Count the turns that nothing continues; one less is how often the episode forks."""
    continued = {span.before + 1 for span in spans}
    return sum(span.end not in continued for span in spans)


def episode_sums(group: RolloutGroup) -> dict[str, float]:
    """Return the sums over a group's episodes for the report; {} if its responses are none and none failed. Those named
    `per_episode/NAME` become means over episodes, `episode/NAME`."""
    sums = {f"episode/failed_{kind}": float(count) for kind, count in group.failed_episodes.items()}
    if sums:
        sums["episode/failed"] = sum(sums.values())
    episodes = [response for response in group.responses if response.turns]
    if episodes:
        num_prompt = len(group.prompt_token_ids)
        turns = [turn for response in episodes for turn in response.turns]
        num_paths = sum(num_leaves(turn_spans(response, num_prompt)) for response in episodes)
        sums |= {
            "num_episodes": len(episodes),
            "per_episode/turns_mean": len(turns),
            "per_episode/forks_mean": num_paths - len(episodes),
            "per_episode/observed_tokens": sum(len(turn.observed_token_ids) for turn in turns),
            "per_episode/environment_s": sum(turn.waited_s for turn in turns),
            "per_episode/generate_s": sum(turn.generate_s for turn in turns),
        }
    later = [turn for response in episodes for turn in response.turns[1:]]
    if later:
        sums["num_later_prompt_tokens"] = sum(turn.num_shared + len(turn.observed_token_ids) for turn in later)
        sums[CACHED_FRAC] = sum(turn.num_cached_tokens for turn in later)
    return sums


def num_response_places(response: Response, num_prompt: int) -> int:
    """Count the places of a response, as `lay_out` gives them."""
    if not response.turns:
        return len(response.token_ids) - 1
    spans = turn_spans(response, num_prompt)
    return spans[-1].end - num_leaves(spans)


def lay_out(response: Response, num_prompt: int) -> tuple[list[int], Tree]:
    """Return the input tokens of a response, in the order of their places, and the tree that they are."""
    if not response.turns:
        return list(response.token_ids[:-1]), Tree.chain(len(response.token_ids))
    spans = turn_spans(response, num_prompt)
    tokens: list[int] = []
    sampled = iter(response.token_ids)
    for turn in response.turns:
        tokens += turn.observed_token_ids
        tokens += [next(sampled) for _ in range(turn.num_sampled)]
    segments, parents = find_segments(spans)
    order = torch.cat(segments)
    lengths = tuple(len(segment) for segment in segments)
    return [tokens[index] for index in order.tolist()], Tree(lengths, parents, find_predictors(spans, order))


def find_predictors(spans: Sequence[TurnSpan], order: torch.Tensor) -> torch.Tensor:
    """Return the place of the token before each sampled one; -1: the last one of the group's prompt."""
    place_of = torch.full((spans[-1].end,), -1)
    place_of[order] = torch.arange(len(order))
    before = torch.arange(-1, spans[-1].end - 1)
    before[[span.start for span in spans]] = torch.tensor([span.before for span in spans])
    sampled = torch.cat([before[span.first_sampled : span.end] for span in spans])
    return torch.where(sampled < 0, -1, place_of[sampled])


def find_segments(spans: Sequence[TurnSpan]) -> tuple[list[torch.Tensor], tuple[int, ...]]:
    """Return the tokens of each segment, in pre-order, and its parent: one empty segment if there are no places."""
    pieces = cut_pieces(spans)
    children: dict[int, list[int]] = {-1: []}  # starts of the next pieces by the start of a piece; -1: the prompt
    for start, (_, parent) in pieces.items():
        children.setdefault(start, [])
        children[parent].append(start)
    last_places = {start: end - (not children[start]) for start, (end, _) in pieces.items()}
    children = {
        start: [start_of_piece for start_of_piece in starts if last_places[start_of_piece] > start_of_piece]
        for start, starts in children.items()
    }

    segments: list[torch.Tensor] = []
    parents: list[int] = []
    left = [(piece, -1) for piece in reversed(children[-1])]
    while left:
        piece, parent = left.pop()
        runs = [torch.arange(piece, last_places[piece])]
        while len(children[piece]) == 1:  # nothing forks here
            piece = children[piece][0]
            runs.append(torch.arange(piece, last_places[piece]))
        left += [(child, len(segments)) for child in reversed(children[piece])]
        segments.append(torch.cat(runs))
        parents.append(parent)
    return (segments, tuple(parents)) if segments else ([torch.arange(0)], (-1,))


def cut_pieces(spans: Sequence[TurnSpan]) -> dict[int, tuple[int, int]]:
    """Cut all turns where another one stands behind a token: start of a piece -> (its end, start of the one before)."""
    before_turn = {span.start: span.before for span in spans}
    cuts = sorted({*before_turn, *(span.before + 1 for span in spans if span.before >= 0), spans[-1].end})
    ending_at = dict(zip(cuts[1:], cuts, strict=False))  # the starts of pieces by their ends
    pieces = {}
    for end, start in ending_at.items():
        before = before_turn.get(start, start - 1)
        pieces[start] = (end, ending_at[before + 1] if before >= 0 else -1)
    return pieces
