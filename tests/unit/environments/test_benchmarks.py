"""The environments of the benchmarks: as many turns as they say, and the same tokens as TRL puts together."""

from benchmarks.bench_environments import LINE, TEMPLATE, EveryAnswerCalls, Lookup
from onbeat.environments import Task
from onbeat.environments.tools import NO_TOOLS, methods_as_tools
from services.rollout.engines.interface import GeneratedResponse
from services.rollout.episodes.recorder import Call
from services.rollout.episodes.rendering import Conversations, Renderer
from tests.episode_rig import tokenizer_of
from tests.scripted_session import ScriptedSession, says

TASK = Task([{"role": "user", "content": "begin"}], "begin")


async def test_every_answer_but_the_last_calls_the_tool():
    session = ScriptedSession(says("ab"), says("bc"), says("de"))
    outcome = await EveryAnswerCalls(num_turns=3).run(TASK, session)
    assert [message["role"] for message in session.asked[-1]] == ["user", "assistant", "tool", "assistant", "tool"]
    assert session.asked[-1][-1]["content"] == LINE
    assert [tool["function"]["name"] for tool in session.tools] == ["look"]
    assert outcome.reward == 0.03


def test_next_prompt_has_the_tokens_that_trl_puts_together():
    tokenizer = tokenizer_of(TEMPLATE)
    conversations = Conversations(Renderer(tokenizer))
    tools = [tool.schema() for tool in methods_as_tools(Lookup(), NO_TOOLS).values()]
    first = conversations.prompt(TASK.messages, tools)
    answer, result = says("4 or 5"), {"role": "tool", "name": "look", "content": LINE}
    sampled = tokenizer(answer["content"], add_special_tokens=False)["input_ids"]
    generated = GeneratedResponse(sampled, [0.0] * len(sampled), "length", [], answer["content"])
    call = Call(0, "id", first.token_ids, generated, [], None, "[]", 0.0, 0.0)
    conversations.add(call, TASK.messages, tools, answer)
    second = conversations.prompt([*TASK.messages, answer, result], tools)
    assert second.extends is call
    # TRL appends what a dummy conversation with the tool's result has beyond the one without it.
    dummy = [{"role": "user", "content": "dummy"}, {**says(""), "tool_calls": [{"function": {"name": "look"}}]}]
    before = tokenizer.apply_chat_template(dummy, tokenize=True, return_dict=False)
    after = tokenizer.apply_chat_template(
        [*dummy, result], add_generation_prompt=True, tokenize=True, return_dict=False
    )
    assert after[: len(before)] == before
    assert second.token_ids == [*first.token_ids, *sampled, *after[len(before) :]]
