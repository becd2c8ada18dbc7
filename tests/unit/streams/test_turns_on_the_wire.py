"""Turns that are no tree, or did not sample all tokens, and groups that are too large are refused where they enter."""

import pytest

from onbeat.contracts.records import MAX_TURNS
from onbeat.contracts.states import EpisodeFailureKind
from onbeat.streams.codec import Response, RolloutGroup, Turn, VersionSpan, check_content, check_group

FIRST = {"num_shared": 2, "num_sampled": 2, "num_characters": 2}
NEXT = {"parent": 0, "num_shared": 4, "observed_token_ids": [7], "num_sampled": 1, "num_characters": 1}


def group_of(*turns: dict) -> RolloutGroup:
    response = Response(
        token_ids=[3, 4, 5],
        rollout_logprobs=[-1.0] * 3,
        version_spans=[VersionSpan(policy_version=0, start=0, end=3)],
        text="abc",
        turns=[Turn(**turn) for turn in turns],
    )
    return RolloutGroup(group_id="0-0", prompt_token_ids=[1, 2], responses=[response])


def test_turns_that_extend_or_fork_are_taken():
    check_content(group_of(FIRST, NEXT))
    check_content(group_of(FIRST, NEXT | {"num_shared": 3}))  # it forks behind the first sampled token
    check_content(group_of(FIRST, NEXT | {"num_cached_tokens": 5}))
    check_content(group_of())


@pytest.mark.parametrize("is_failed", [True, False])
def test_only_known_kinds_of_failed_episodes_are_taken(is_failed: bool):
    group = group_of(FIRST, NEXT)
    if is_failed:
        del group.responses[:]
        group.failure.kind = "environment_failed"
    for kind in EpisodeFailureKind:
        group.failed_episodes[kind] = 1
    check_content(group)
    group.failed_episodes["made_up"] = 1
    with pytest.raises(ValueError, match="group 0-0: 'made_up' is no kind of a failed episode; there are: raised, "):
        check_content(group)


@pytest.mark.parametrize(
    ("turns", "problem"),
    [
        ((FIRST, NEXT | {"parent": 1}), "turn 1 follows turn 1, which is not before it"),
        ((FIRST, NEXT | {"num_shared": 5}), "turn 1 shares 5 tokens, not 2 to 4"),
        ((FIRST, NEXT | {"num_shared": 1}), "turn 1 shares 1 tokens, not 2 to 4"),
        ((FIRST | {"num_shared": 3}, NEXT), "turn 0 shares 3 tokens, not 2 to 2"),
        ((FIRST, NEXT | {"num_sampled": 0}), "turn 1 sampled no token"),
        ((FIRST, NEXT | {"num_cached_tokens": 6}), "turn 1 has 6 cached tokens of a prompt of 5"),
        ((FIRST,), "its turns sampled 2 tokens, and it has 3"),
        ((FIRST, NEXT | {"num_characters": 0}), "its turns gave 2 characters of its text"),
        ((FIRST, *[NEXT] * MAX_TURNS), "it has 1025 turns, of at most 1024"),
    ],
)
def test_turns_that_are_no_tree_are_refused(turns: tuple[dict, ...], problem: str):
    with pytest.raises(ValueError, match=f"group 0-0, response 0: {problem}"):
        check_content(group_of(*turns))


def test_group_too_large_for_redis_says_what_to_lower(monkeypatch: pytest.MonkeyPatch):
    group = group_of(FIRST, NEXT)
    check_group(group)
    monkeypatch.setattr("onbeat.streams.codec.MAX_GROUP_BYTES", group.ByteSize() - 1)
    with pytest.raises(
        ValueError, match=r"group 0-0: \d+ bytes, of at most \d+; lower rollout.num_samples_per_prompt, "
    ):
        check_group(group)
