"""The token tree of an episode: what it gives back is what the engine saw, whatever a client sends."""

import asyncio
import json
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from onbeat.contracts.completions import ChatFailed
from onbeat.contracts.seeds import seed_of
from onbeat.engines import GeneratedResponse, VersionSpan
from onbeat.environments import Outcome
from onbeat.streams.codec import Environment, PromptTask, RolloutGroup, check_group, check_token_lengths
from services.prompts.prompt_tokenizer import PromptTokenizer
from services.rollout.episodes.bodies import ChatBody, GenerateBody
from services.rollout.episodes.episode import Episode, GroupContext
from services.rollout.episodes.recorder import Call, common_prompt, join_spans, to_response
from services.rollout.episodes.rendering import Renderer
from services.rollout.prompts import PromptEncoder
from services.trainer.episode import turn_paths
from tests.episode_rig import QWEN_LIKE, TOOL, VERSION, WITHOUT_SYSTEM, ScriptedEngine, tokenizer_of

SEED = 5
TEMPLATES = {"plain": None, "qwen-like": QWEN_LIKE, "without system": WITHOUT_SYSTEM}
TOKENIZERS = {name: tokenizer_of(template) for name, template in TEMPLATES.items()}
SAMPLES = st.one_of(
    st.text(max_size=8),
    st.sampled_from(
        [
            "<think>\nhm\n</think>\n\n4",
            "hm</think>4",
            "",
            " 4 ",
            '<tool_call>{"name": "add"}</tool_call>',
            "<tool_call>{",
        ]
    ),
)
NEW_MESSAGES = st.lists(
    st.builds(
        lambda role, content: {"role": role, "content": content},
        st.sampled_from(["user", "user", "tool", "system", "assistant"]),
        st.sampled_from(["", "a", "b ", "é<|im_end|>", "</think>", "two\nlines"]),
    ),
    max_size=3,
)
STEPS = st.lists(
    st.fixed_dictionaries(
        {
            "history": st.integers(0, 9),  # the history that goes on
            "new": NEW_MESSAGES,
            "drop": st.integers(0, 2),  # leading messages that a client forgets
            "has_tools": st.booleans(),
            "max_tokens": st.sampled_from([1, 4, 64]),
            "is_raw": st.booleans(),  # tokens, not messages
            "num_parallel": st.sampled_from([1, 1, 1, 2]),
        }
    ),
    max_size=8,
)
LAST = {"history": 0, "new": [], "drop": 0, "has_tools": False, "max_tokens": 64, "is_raw": False, "num_parallel": 1}


class Client:
    """A client of one episode, which takes up any history again."""

    def __init__(self, group: GroupContext, index: int) -> None:
        self.episode = Episode(group, index)
        self._histories: list[list[dict]] = [[]]
        self._paths: list[list[int]] = [[1]]

    async def take(self, step: dict) -> None:
        calls = [self._call(step) for _ in range(step["num_parallel"])]
        for result in await asyncio.gather(*calls, return_exceptions=True):
            assert result is None or isinstance(result, ChatFailed), result

    async def _call(self, step: dict) -> None:
        if step["is_raw"]:
            path = self._paths[step["history"] % len(self._paths)]
            tokens = [*path[: len(path) - step["drop"] or 1], 7][: 1 + len(path)]
            sampling = {"max_tokens": step["max_tokens"]}
            call = await self.episode.complete(GenerateBody(token_ids=tokens, sampling_params=sampling))
        else:
            history = self._histories[step["history"] % len(self._histories)][step["drop"] :]
            body = {"messages": [*history, *step["new"]] or [{"role": "user", "content": "2+2="}]}
            body |= {"tools": [TOOL] if step["has_tools"] else None, "max_tokens": step["max_tokens"]}
            answer = await self.episode.chat(ChatBody.model_validate_json(json.dumps(body)))
            self._histories.append([*body["messages"], answer.message])
            call = answer.call
        self._paths.append(call.path)


async def play(name: str, texts: list[str], episodes: list[list[dict]]) -> tuple[ScriptedEngine, list[Episode]]:
    tokenizer = TOKENIZERS[name]
    engine = ScriptedEngine(tokenizer, *texts)

    async def generate(prompt_token_ids, sampling):
        (response,) = await engine.generate(prompt_token_ids, 1, sampling, VERSION)
        return response

    limits = {"max_response_tokens": 64, "environment": Environment(max_turns=1000)}
    task = PromptTask(group_id="0-0", seed=SEED, temperature=1.0, **limits)
    broken = asyncio.get_running_loop().create_future()
    group = GroupContext(
        task, [], generate, PromptEncoder(tokenizer, None), Renderer(PromptTokenizer(tokenizer)), broken
    )
    clients = [Client(group, index) for index in range(len(episodes))]
    for client, steps in zip(clients, episodes, strict=True):
        for step in [*steps, LAST]:
            await client.take(step)
    return engine, [client.episode for client in clients]


@settings(max_examples=150)
@given(st.sampled_from(sorted(TEMPLATES)), st.lists(SAMPLES, max_size=20), st.lists(STEPS, min_size=1, max_size=3))
def test_paths_of_the_tree_are_what_the_engine_saw(name, texts, episodes):
    engine, played = asyncio.run(play(name, texts, episodes))
    seen = {sampling.seed: (prompt, sampled) for prompt, sampled, sampling in engine.seen}
    prompt_token_ids = common_prompt(episode.calls for episode in played)
    if not prompt_token_ids:
        return  # the group fails: raw tokens may begin with anything
    responses = [to_response(episode.calls, prompt_token_ids, Outcome(0.0)) for episode in played]
    group = RolloutGroup(group_id="0-0", prompt_token_ids=prompt_token_ids, responses=responses)
    check_group(group)
    check_token_lengths(group)
    for index, (episode, response) in enumerate(zip(played, responses, strict=True)):
        expected = [seen[seed_of(SEED, index, call.number)] for call in episode.calls]
        assert len(response.turns) == len(expected)
        assert list(turn_paths(response, prompt_token_ids)) == expected
        held = sum(len(turn.observed_token_ids) + turn.num_sampled for turn in response.turns)
        assert held <= sum(len(prompt) + len(sampled) for prompt, sampled in expected)


# ---- worked examples -------------------------------------------------------------------------------------------------


def call(number: int, prompt: list[int], sampled: list[int], extends: Call | None = None, version: int = 1) -> Call:
    spans = [VersionSpan(version, 0, len(sampled))]
    num_cached = 0 if number == 0 else len(prompt) - 1
    generated = GeneratedResponse(sampled, [-1.0] * len(sampled), "stop", spans, "x" * len(sampled), num_cached)
    return Call(number, f"c{number}", prompt, generated, [1] * len(sampled), extends, "[]", 0.0, 0.0)


def shape(response) -> list:
    return [
        (turn.parent if turn.HasField("parent") else None, turn.num_shared, list(turn.observed_token_ids))
        for turn in response.turns
    ]


def test_tree_of_the_modules_docstring():
    first = call(0, [9, 1], [2])
    calls = [first, call(1, [9, 1, 2, 3], [4], first), call(2, [9, 1, 5], [6])]
    response = to_response(calls, [9], Outcome(1.5, {"part": 1.0}, {"c1": 0.5}))
    assert shape(response) == [(None, 1, [1]), (0, 3, [3]), (0, 2, [5])]
    assert list(response.token_ids) == [2, 4, 6]
    assert [turn.reward if turn.HasField("reward") else None for turn in response.turns] == [None, 0.5, None]
    assert (response.reward, dict(response.reward_parts)) == (1.5, {"part": 1.0})
    assert [turn.num_cached_tokens for turn in response.turns] == [0, 3, 2]


def test_fork_shares_with_the_best_path_and_the_first_of_equals():
    calls = [
        call(0, [9, 1], [2]),
        call(1, [9, 1, 2, 3], [4]),
        call(2, [9, 1, 2, 3], [5]),
        call(3, [9, 1, 2, 3, 5], [6]),
    ]
    assert shape(to_response(calls, [9, 1], Outcome(0.0))) == [(None, 2, []), (0, 3, [3]), (1, 4, []), (2, 5, [])]


def test_group_prompt_is_what_all_fresh_prompts_begin_with():
    first = call(0, [9, 1, 2], [7])
    episodes = [[first, call(1, [9, 1, 2, 7, 3], [4], first)], [call(0, [9, 1, 5], [7]), call(1, [9, 1], [7])]]
    assert common_prompt(episodes) == [9, 1]
    assert common_prompt([[first], [call(0, [8], [1])]]) == []
    assert common_prompt([]) == []


def test_spans_of_calls_are_joined_and_versions_kept_apart():
    calls = [call(0, [9], [1, 2]), call(1, [9], [3]), call(2, [9], [4, 5], version=2)]
    spans = [(span.policy_version, span.start, span.end) for span in join_spans(calls)]
    assert spans == [(1, 0, 3), (2, 3, 5)]


def test_lengths_that_one_call_does_not_know_are_left_out():
    known = call(0, [9], [1])
    unknown = replace(known, number=1, token_lengths=[])
    assert list(to_response([known], [9], Outcome(0.0)).token_lengths) == [1]
    assert list(to_response([known, unknown], [9], Outcome(0.0)).token_lengths) == []
