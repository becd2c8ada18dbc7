"""Prompts of further turns: sampled tokens stay as they are, and the tree forks where a template rewrites history."""

import copy
import json

import pytest
from tokenizers import AddedToken

from onbeat.engines import GeneratedResponse
from onbeat.environments import Outcome
from services.prompts.prompt_tokenizer import PromptTokenizer
from services.rollout.episodes.recorder import Call
from services.rollout.episodes.rendering import MARKS, Conversations, Renderer
from services.rollout.episodes.templates import ChatTemplate, TemplateRefusal
from services.rollout.episodes.toolcalls import ToolCall, parse, parse_llama, parse_mistral
from tests.episode_rig import LLAMA_LIKE, MISTRAL_LIKE, QWEN_LIKE, TOOL, WITHOUT_SYSTEM, playing, tokenizer_of

pytestmark = pytest.mark.slow

QUESTION = {"role": "user", "content": "2+2="}
CALL_TEXT = '<tool_call>\n{"name": "add", "arguments": {"b": 2, "a": [1.0]}}\n</tool_call>'
PLAIN_PROMPT = "<|im_start|>user\n2+2=<|im_end|>\n<|im_start|>assistant\n"


def end_with(*message_lists, tools=None, max_tokens=None):
    """Make an environment with these calls; a message that is None stands for the answer before."""

    async def run(task, policy):
        answer = None
        for messages in message_lists:
            history = [answer if message is None else message for message in messages]
            answer = await policy.chat(history, tools, max_tokens)
            answers.append(answer)
        return Outcome(0.0)

    answers: list = []
    run.answers = answers
    return run


async def seen_texts(run, *texts, **options):
    async with playing(run, *texts, **options) as rig:
        group = await rig.group()
        return group, [(rig.text(prompt), rig.text(sampled)) for prompt, sampled, _ in rig.engine.seen]


MORE = {"role": "user", "content": "more"}


async def test_history_that_goes_on_extends_the_sampled_tokens():
    def first_path(group):
        response = group.responses[0]
        return [*group.prompt_token_ids, *response.token_ids[: response.turns[0].num_sampled]]

    group, seen = await seen_texts(end_with([QUESTION], [QUESTION, None, MORE]), " 4 ")
    sampled = " 4 <|im_end|>"
    assert seen[0] == (PLAIN_PROMPT, sampled)
    assert seen[1][0] == f"{PLAIN_PROMPT}{sampled}\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n"
    first, second = group.responses[0].turns
    assert (first.num_shared, second.num_shared) == (len(group.prompt_token_ids), len(first_path(group)))
    assert second.messages_json == '[{"role": "user", "content": "more"}]'


async def test_answer_cut_by_its_length_gets_the_whole_end():
    _, seen = await seen_texts(end_with([QUESTION], [QUESTION, None, MORE], max_tokens=3), "12345")
    assert seen[0][1] == "123"
    assert seen[1][0].startswith(f"{PLAIN_PROMPT}123<|im_end|>\n<|im_start|>user\n")


@pytest.mark.parametrize(
    ("sampled", "sent_back", "template"),
    [
        ("4", {"role": "assistant", "content": "5"}, None),
        ("<think>\nhm\n</think>\n\n5", None, QWEN_LIKE),
        (
            "hm</think>5",
            None,
            tokenizer_of().chat_template.replace("message['content']", "message['content'].split('</think>')[-1]"),
        ),
    ],
    ids=["changed by the client", "template strips reasoning later", "template never shows reasoning"],
)
async def test_history_that_was_not_sampled_forks_the_tree(sampled, sent_back, template):
    run = end_with([QUESTION], [QUESTION, sent_back, MORE])
    group, seen = await seen_texts(run, sampled, template=template)
    assert seen[1][0] == f"{PLAIN_PROMPT}5<|im_end|>\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n"
    _, second = group.responses[0].turns
    assert not second.HasField("parent")  # nothing of the first sample
    assert second.num_shared == len(group.prompt_token_ids)


async def test_template_keeps_reasoning_among_tool_calls_and_extends():
    text = f"<think>\nhm\n</think>\n\nLet me see.\n{CALL_TEXT}"
    result = {"role": "tool", "tool_call_id": "x", "content": "3"}
    run = end_with([QUESTION], [QUESTION, None, result], tools=[TOOL])
    group, seen = await seen_texts(run, text, template=QWEN_LIKE)
    assert seen[1][0].startswith(f"{seen[0][0]}{text}<|im_end|>\n<|im_start|>user\n<tool_response>\n3\n")
    assert group.responses[0].turns[1].parent == 0
    (call,) = run.answers[0]["tool_calls"]
    assert call["function"] == {"name": "add", "arguments": '{"b": 2, "a": [1.0]}'}
    assert run.answers[0]["content"] == "<think>\nhm\n</think>\n\nLet me see."


async def test_tools_are_described_where_the_template_knows_none():
    result = {"role": "tool", "tool_call_id": "x", "content": "3"}
    run = end_with([QUESTION], [QUESTION, None, result, result], tools=[TOOL])
    group, seen = await seen_texts(run, f"See:\n{CALL_TEXT}")
    assert seen[0][0].startswith("<|im_start|>system\n# Tools\n")
    assert '"name": "add"' in seen[0][0]
    assert seen[0][0].endswith(PLAIN_PROMPT)
    answered = "<tool_response>\n3\n</tool_response>"
    new = f"\n<|im_start|>user\n{answered}\n{answered}<|im_end|>\n<|im_start|>assistant\n"
    assert seen[1][0] == f"{seen[0][0]}{seen[0][1]}{new}"
    assert group.responses[0].turns[1].parent == 0


async def test_template_that_hides_results_of_tools_gets_ours():
    hides = QWEN_LIKE.replace("<tool_response>\n{{ message.content }}\n</tool_response>", "")
    result = {"role": "tool", "tool_call_id": "x", "content": "3"}
    _, seen = await seen_texts(end_with([QUESTION], [QUESTION, None, result], tools=[TOOL]), CALL_TEXT, template=hides)
    assert "<tool_response>\n3\n</tool_response>" in seen[1][0]


@pytest.mark.parametrize("mark", ["tool_call", "function"])
def test_template_shows_tools_in_its_own_form_if_it_can_be_read(mark):
    template = QWEN_LIKE.replace("<tool_call>", f"<{mark}>").replace("</tool_call>", f"</{mark}>")
    text = ChatTemplate(PromptTokenizer(tokenizer_of(template))).render([QUESTION], [TOOL], is_prompt=True)
    is_own = mark == "tool_call"
    assert (f"# Tools{json.dumps(TOOL)}<|im_end|>" in text) is is_own
    assert ("You may call functions" in text) is not is_own


async def call_and_answer(task, policy):
    """Make an environment that makes one call of a tool, if the policy calls one, and sends back its result."""
    answer = await policy.chat([QUESTION], [TOOL])
    for call in answer.get("tool_calls", ()):
        assert call["function"] == {"name": "add", "arguments": '{"a": [1.0], "b": 2}'}
        result = {"role": "tool", "tool_call_id": call["id"], "name": "add", "content": "3"}
        await policy.chat([QUESTION, answer, result], [TOOL])
    return Outcome(float(len(answer.get("tool_calls", ()))))


@pytest.mark.parametrize(
    ("template", "text", "shown", "result"),
    [
        (
            LLAMA_LIKE,
            ' {"name": "add", "parameters": {"a": [1.0], "b": 2}}',
            'Respond in the format {"name": function name, ',
            '<|start|>ipython\n\n"3"<|im_end|><|start|>assistant\n\n',
        ),
        (
            MISTRAL_LIKE,
            '[{"name": "add", "arguments": {"a": [1.0], "b": 2}}]',  # [TOOL_CALLS] is a special token
            "[AVAILABLE_TOOLS] [{",
            '[TOOL_RESULTS] {"content": 3, "call_id": "ID"}[/TOOL_RESULTS]',
        ),
    ],
    ids=["llama", "mistral"],
)
async def test_calls_in_the_form_of_the_template_are_read(template, text, shown, result):
    group, seen = await seen_texts(call_and_answer, text, template=template)
    assert group.responses[0].reward == 1.0
    assert shown in seen[0][0]
    assert "<tool_call>" not in seen[0][0]
    (new,) = json.loads(group.responses[0].turns[1].messages_json)
    assert seen[1][0] == f"{seen[0][0]}{text}<|im_end|>{result.replace('ID', new['tool_call_id'])}"
    assert group.responses[0].turns[1].parent == 0


@pytest.mark.parametrize("template", [LLAMA_LIKE, MISTRAL_LIKE])
async def test_call_in_the_form_of_another_template_is_text(template):
    group, _ = await seen_texts(call_and_answer, CALL_TEXT, template=template)
    assert group.responses[0].reward == 0.0


async def test_tools_join_the_system_message_that_is_there():
    system = {"role": "developer", "content": "Be short."}
    _, seen = await seen_texts(end_with([system, QUESTION], tools=[TOOL]))
    assert seen[0][0].startswith("<|im_start|>system\nBe short.\n\n# Tools\n")


async def test_tools_go_to_the_user_where_no_system_is_taken():
    _, seen = await seen_texts(end_with([QUESTION], tools=[TOOL]), template=WITHOUT_SYSTEM)
    assert seen[0][0].startswith("<turn>user\n# Tools\n")
    assert seen[0][0].endswith("</tool_call>\n\n2+2=<|im_end|>\n<turn>assistant\n")


def test_template_that_refuses_a_role_says_which():
    template = ChatTemplate(PromptTokenizer(tokenizer_of(WITHOUT_SYSTEM)))
    with pytest.raises(TemplateRefusal, match="refuses messages of system, user: only user and assistant, please"):
        template.render([{"role": "system", "content": "x"}, QUESTION], [], is_prompt=True)
    assert template.end_of_answer([QUESTION], []) == "<|im_end|>\n"


def test_tokenizer_without_a_template_is_an_error_in_words():
    tokenizer = tokenizer_of()
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="chat_template"):
        Renderer(PromptTokenizer(tokenizer)).fresh([QUESTION], [])


# ---- calls of tools in text ------------------------------------------------------------------------------------------


def test_several_calls_are_found_and_removed():
    text = f"One:\n{CALL_TEXT}\nand two\n<tool_call>" + '{"name":"now"}</tool_call>\n'
    content, calls = parse(text)
    assert calls == [ToolCall("add", {"b": 2, "a": [1.0]}), ToolCall("now", {})]
    assert content == "One:\n\nand two"


@pytest.mark.parametrize("arguments", ['{"a": "</tool_call>"}', '"{\\"a\\": \\"</tool_call>\\"}"'])
def test_arguments_may_hold_the_closing_tag_or_be_json_in_json(arguments):
    text = f'<tool_call>{{"name": "write", "arguments": {arguments}}}</tool_call>'
    assert parse(text) == ("", [ToolCall("write", {"a": "</tool_call>"})])


@pytest.mark.parametrize(
    "block",
    [
        "{'name': 'add'}",
        '{"name": "add", "arguments": {"a": NaN}}',
        '{"name": "add", "arguments": [1]}',
        '{"name": ""}',
        '{"arguments": {}}',
        '{"name": "add", "arguments": {"a": "\\ud800"}}',
        '{"name": "add", "arguments": {"a": 1e999}}',
        '{"name": "add"} and more',
        "[" * 100_000,
        '{"name": "add", "arguments": {"a": ' + "[" * 500 + "]" * 500 + "}}",
        "",
    ],
)
def test_malformed_call_stays_text(block):
    text = f"a <tool_call>{block}</tool_call> b"
    assert parse(text) == (text, [])


def test_call_that_is_not_closed_stays_text_and_hides_none():
    text = f'<tool_call>{{"name": "a"}}\n{CALL_TEXT} <tool_call>'
    assert parse(text) == ('<tool_call>{"name": "a"}\n <tool_call>', [ToolCall("add", {"b": 2, "a": [1.0]})])


LLAMA_CALL = '{"name": "add", "parameters": {"a": 1}}'
MISTRAL_CALL = '{"name": "add", "arguments": {"a": 1}}'


def test_whole_answers_are_calls_of_llama_and_mistral():
    assert parse_llama(f"\n<|python_tag|>{LLAMA_CALL} ") == ("", [ToolCall("add", {"a": 1})])
    two = f'[TOOL_CALLS] [{MISTRAL_CALL}, {{"name": "now", "arguments": {{}}, "id": "123456789"}}]'
    assert parse_mistral(two) == ("", [ToolCall("add", {"a": 1}), ToolCall("now", {})])


@pytest.mark.parametrize(
    ("read", "text"),
    [
        *((parse_llama, f"{LLAMA_CALL}{more}") for more in (f"; {LLAMA_CALL}", " Done.", "}")),
        *((parse_llama, text) for text in (f"I say {LLAMA_CALL}", f"[{LLAMA_CALL}]", '{"name": "Ada", "age": 36}')),
        (parse_llama, '{"name": "add", "parameters": 1}'),
        *((parse_mistral, text) for text in (MISTRAL_CALL, "[]", "[1]", f"Well: [{MISTRAL_CALL}]")),
        (parse_mistral, f'[{MISTRAL_CALL}, {{"name": "Ada"}}]'),
        *(
            (read, text)
            for read in (parse_llama, parse_mistral)
            for text in ("", " 4 ", "[" * 100_000, '{"a":' * 50_000)
        ),
    ],
)
def test_answers_that_are_no_call_stay_as_they_are(read, text):
    assert read(text) == (text, [])


# ---- a real tokenizer ------------------------------------------------------------------------------------------------


def test_bundled_model_extends_as_its_template_renders(smollm2):
    renderer = Renderer(PromptTokenizer(smollm2))
    conversations = Conversations(renderer)
    first = conversations.prompt([QUESTION], [TOOL])
    answer = {"role": "assistant", "content": "It is 4, I am sure."}
    sampled = [*smollm2(answer["content"], add_special_tokens=False)["input_ids"], smollm2.eos_token_id]
    generated = GeneratedResponse(sampled, [0.0] * len(sampled), "stop", [], answer["content"])
    call = Call(0, "id", first.token_ids, generated, [], None, "[]", 0.0, 0.0)
    conversations.add(call, [QUESTION], [TOOL], answer)
    second = conversations.prompt([QUESTION, answer, MORE], [TOOL])
    assert second.extends is call
    assert second.num_known == 2
    # The sample was tokenised as the tokenizer would: extension and fresh rendering agree.
    assert second.token_ids == renderer.fresh([QUESTION, answer, MORE], [TOOL])
    plain = smollm2.apply_chat_template([QUESTION], add_generation_prompt=True, return_dict=True)["input_ids"]
    assert renderer.fresh([QUESTION], []) == list(plain)


def test_marks_of_calls_may_be_special_tokens(smollm2):
    tokenizer = copy.deepcopy(smollm2)
    tokenizer.add_tokens([AddedToken(mark, special=True) for mark in MARKS], special_tokens=True)
    sampled = [*tokenizer(f"Well.\n{CALL_TEXT}", add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    text = tokenizer.decode(sampled, skip_special_tokens=True)
    assert "<tool_call>" not in text
    generated = GeneratedResponse(sampled, [0.0] * len(sampled), "stop", [], text)
    assert Renderer(PromptTokenizer(tokenizer)).parse_calls(generated) == (
        "Well.",
        [ToolCall("add", {"b": 2, "a": [1.0]})],
    )


GLM_LIKE = """[gMASK]{% for message in messages %}<|{{ message.role }}|>
{{ message.content }}{% endfor %}{% if add_generation_prompt %}<|assistant|>
{% endif %}"""


def test_stop_token_that_begins_the_next_message_is_not_doubled(smollm2):
    tokenizer = copy.deepcopy(smollm2)
    tokenizer.add_tokens([AddedToken(f"<|{role}|>", special=True) for role in ("user", "assistant")])
    tokenizer.chat_template = GLM_LIKE
    renderer = Renderer(PromptTokenizer(tokenizer))
    conversations = Conversations(renderer)
    answer = {"role": "assistant", "content": "Five"}
    sampled = tokenizer("Five<|user|>", add_special_tokens=False)["input_ids"]
    generated = GeneratedResponse(sampled, [0.0] * len(sampled), "stop", [], "Five")
    call = Call(0, "id", renderer.fresh([QUESTION], []), generated, [], None, "[]", 0.0, 0.0)
    conversations.add(call, [QUESTION], [], answer)
    prompt = conversations.prompt([QUESTION, answer, MORE], [])
    assert prompt.extends is call
    assert tokenizer.decode(prompt.token_ids) == tokenizer.decode(renderer.fresh([QUESTION, answer, MORE], []))
