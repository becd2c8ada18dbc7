"""The token tree of an episode: what the engine was given and what it sampled, call by call.

While a group is played, each call holds its full prompt. At the end the common beginning of the group's prompts becomes
the group's prompt, and each call keeps only the tokens that no call before it has:

    call 0   prompt P a     sampled b      ->  group's prompt P; turn 0 observed a, sampled b
    call 1   prompt P a b c sampled d      ->  turn 1 follows turn 0, shares P a b, observed c, sampled d
    call 2   prompt P a e   sampled f      ->  turn 2 follows turn 0, shares P a, observed e: the tree forks
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile

from onbeat.engines import GeneratedResponse
from onbeat.environments import Outcome
from onbeat.streams.codec import Response, Turn, VersionSpan


@dataclass(frozen=True, eq=False)
class Call:
    """One call of the policy that was answered."""

    number: int  # number in the order in which the episode's calls began; a cancelled call leaves a gap
    call_id: str
    prompt_token_ids: list[int]  # as the engine got them
    generated: GeneratedResponse
    token_lengths: list[int]  # [T], or empty
    extends: "Call | None"  # the call whose prompt and sample begin this prompt; None: rendered afresh
    messages_json: str  # the messages that are new
    waited_s: float
    generate_s: float

    @property
    def path(self) -> list[int]:
        return self.prompt_token_ids + self.generated.token_ids


def find_shared(calls: Sequence[Call], num_prompt: int) -> Iterator[tuple[int | None, int]]:
    """Yield for each call the earlier one that shares most of its prompt, and how much. Of several such calls it is the
    first; None when they share the group's prompt only, which has `num_prompt` tokens.

    The paths of the calls below the group's prompt are a tree of tokens. Each node knows the first call on whose path
    it is.
    """
    children: dict[tuple[int, int], int] = {}  # node, token -> node; node 0 ends the group's prompt
    first_calls: list[int | None] = [None]  # [nodes]
    ends: dict[Call, int] = {}  # the last node of a call's path
    for index, call in enumerate(calls):
        known, tokens = call.extends, call.prompt_token_ids
        node, depth = (0, num_prompt) if known is None else (ends[known], len(known.path))
        while depth < len(tokens) and (child := children.get((node, tokens[depth]))) is not None:
            node, depth = child, depth + 1
        yield first_calls[node], depth
        for token_id in [*tokens[depth:], *call.generated.token_ids]:
            node = children.setdefault((node, token_id), len(first_calls))
            if node == len(first_calls):
                first_calls.append(index)
        ends[call] = node


def common_prompt(episodes: Iterable[Sequence[Call]]) -> list[int]:
    """Return the tokens that all prompts of a group's calls begin with, perhaps none. Those that extend a call begin as
    that one's prompt does."""
    prompts = [call.prompt_token_ids for calls in episodes for call in calls if call.extends is None]
    if not prompts:
        return []
    common = prompts[0]
    for prompt in prompts[1:]:
        pairs = zip(common, prompt, strict=False)
        common = common[: sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))]
    return list(common)


def to_response(calls: Sequence[Call], prompt_token_ids: Sequence[int], outcome: Outcome) -> Response:
    """Return an episode as it is submitted. `calls`: at least one, in the order in which they began."""
    shared = find_shared(calls, len(prompt_token_ids))
    response = Response(
        token_ids=[token_id for call in calls for token_id in call.generated.token_ids],
        rollout_logprobs=[logprob for call in calls for logprob in call.generated.rollout_logprobs],
        version_spans=join_spans(calls),
        finish_reason=calls[-1].generated.finish_reason,
        reward=outcome.reward,
        reward_parts=outcome.parts,
        text="".join(call.generated.text for call in calls),
        turns=[
            to_turn(call, *shared_parts, outcome.turn_rewards) for call, shared_parts in zip(calls, shared, strict=True)
        ],
    )
    if all(len(call.token_lengths) == len(call.generated.token_ids) for call in calls):
        response.token_lengths.extend(length for call in calls for length in call.token_lengths)
    return response


def to_turn(call: Call, parent: int | None, num_shared: int, rewards: dict[str, float]) -> Turn:
    return Turn(
        parent=parent,
        num_shared=num_shared,
        observed_token_ids=call.prompt_token_ids[num_shared:],
        num_sampled=len(call.generated.token_ids),
        finish_reason=call.generated.finish_reason,
        num_characters=len(call.generated.text),
        messages_json=call.messages_json,
        call_id=call.call_id,
        reward=rewards.get(call.call_id),
        waited_s=call.waited_s,
        generate_s=call.generate_s,
        num_cached_tokens=call.generated.num_cached_tokens,
    )


def join_spans(calls: Iterable[Call]) -> list[VersionSpan]:
    """Return the spans of all sampled tokens, one after another; neighbours of the same version are one span."""
    joined: list[VersionSpan] = []
    start = 0
    for call in calls:
        for span in call.generated.version_spans:
            moved = VersionSpan(policy_version=span.policy_version, start=start + span.start, end=start + span.end)
            if joined and joined[-1].policy_version == moved.policy_version and joined[-1].end == moved.start:
                joined[-1].end = moved.end
            else:
                joined.append(moved)
        start += len(call.generated.token_ids)
    return joined
