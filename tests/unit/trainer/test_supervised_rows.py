"""Supervised rows: their tokens are those of the policy's own prompts and episodes, and only answers are learned."""

from itertools import groupby, pairwise

import pytest
from transformers import PreTrainedTokenizerFast

from onbeat.config import JobConfig
from onbeat.config.templates import TemplateArguments
from onbeat.environments import Outcome
from onbeat.streams.codec import Message, PromptTask, check_group
from services.broker.samples import group_samples
from services.rollout.end_of_turn import end_of_turn
from services.rollout.prompts import PromptEncoder
from services.trainer.rows import add_texts
from services.trainer.supervised import RowTokenizer, SupervisedRow, SupervisedRowError
from tests.episode_rig import LLAMA_LIKE, MISTRAL_LIKE, QWEN_LIKE, WITHOUT_SYSTEM, playing, tokenizer_of
from tests.small_tokenizers import KINDS, TEXTS
from tests.tiny_models import CHAT_TEMPLATE
from tests.world import job_body

OPENS = CHAT_TEMPLATE.replace("assistant\n{%", "assistant\n<think>\n{%")  # it opens every answer
STRIPS = OPENS.replace("message['content']", "message['content'].split('</think>')[-1].lstrip('\\n')")
# The last answer ends with another token than those before, as in gpt-oss.
ENDS = CHAT_TEMPLATE.replace(
    "<|im_end|>\n{%",
    "{{ '<|endoftext|>' if loop.last and message['role'] == 'assistant' else '<|im_end|>' }}\n{%",
)
UNMARKED = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
UNMARKED += "{% if add_generation_prompt %}assistant: {% endif %}"


def conversation(*contents: str) -> list[dict[str, str]]:
    return [{"role": "assistant" if i % 2 else "user", "content": content} for i, content in enumerate(contents)]


def runs_of(row: SupervisedRow, tokenizer) -> list[str]:
    """Return the runs of tokens that are not learned, learned, not learned ... as text."""
    pairs = zip(row.learned, row.token_ids, strict=True)
    runs = [[token for _, token in run] for _, run in groupby(pairs, lambda pair: pair[0])]
    return [tokenizer.decode(tokens, skip_special_tokens=False) for tokens in runs]


def prompt_of(tokenizer, messages, options=None) -> list[int]:
    """Tokenise a prompt as a rollout does."""
    task = PromptTask(messages=[Message(**message) for message in messages])
    return PromptEncoder(tokenizer, None, options).encode(task)


# ---- prompts and ends as the policy has them -----------------------------------------------------------------------


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, QWEN_LIKE, WITHOUT_SYSTEM, LLAMA_LIKE, MISTRAL_LIKE, OPENS])
def test_prompt_is_the_policys_and_the_end_is_the_rollouts(template):
    tokenizer = tokenizer_of(template)
    opening = "<think>\n" if template == OPENS else ""
    messages = conversation("2 + 2?", "4", "and 3?", opening + "5")
    row = RowTokenizer(tokenizer, learn="last_answer").tokenize(messages)
    prompt = prompt_of(tokenizer, messages[:3])
    assert row.token_ids[: len(prompt)] == prompt
    assert row.learned == [False] * len(prompt) + [True] * (len(row.token_ids) - len(prompt))
    assert row.token_ids[-1] == end_of_turn(PromptEncoder(tokenizer, None))
    assert tokenizer.decode(row.token_ids[len(prompt) : -1]).strip() == "5"


def test_prompt_has_the_jobs_options_and_date():
    template = "{{ strftime_now('%Y') }} {{ words }} " + CHAT_TEMPLATE
    data = job_body()["data"] | {"template_options": {"words": "short"}, "now": "2026-01-31T23:30:00Z"}
    options = JobConfig.model_validate(job_body(data=data)).rendering
    tokenizer = tokenizer_of(template)
    messages = [{"role": "system", "content": "Be brief."}, *conversation("2 + 2?", "4")]
    row = RowTokenizer(tokenizer, options).tokenize(messages)
    prompt = prompt_of(tokenizer, messages[:2], options)
    assert row.token_ids[: len(prompt)] == prompt
    assert tokenizer.decode(prompt).startswith("2026 short ")


async def test_several_answers_are_the_tokens_of_an_episode():
    """The same messages, played by an engine that samples these answers."""

    async def run(task, policy):
        history = conversation("2+2=")
        for question in ("more", "and more", None):
            history.append(await policy.chat(history))
            history += conversation(question)[: question is not None]
        return Outcome(0.0)

    async with playing(run, "4", "5 ", "66") as rig:
        group = await rig.group()
    (episode,) = group.responses[:1]
    row = RowTokenizer(tokenizer_of()).tokenize(conversation("2+2=", "4", "more", "5 ", "and more", "66"))
    example = row.as_group()
    assert list(example.prompt_token_ids) == list(group.prompt_token_ids)
    assert list(example.responses[0].token_ids) == list(episode.token_ids)
    assert len(example.responses[0].turns) == 3
    for turn, played in zip(example.responses[0].turns, episode.turns, strict=True):
        assert (turn.HasField("parent"), turn.parent) == (played.HasField("parent"), played.parent)
        assert (turn.num_shared, turn.num_sampled) == (played.num_shared, played.num_sampled)
        assert list(turn.observed_token_ids) == list(played.observed_token_ids)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("template", [CHAT_TEMPLATE, UNMARKED, None])
def test_no_token_crosses_the_border_of_prompt_and_answer(kind, template):
    """Neither a merge nor the space that some tokenizers put before a text changes the prompt or the answer."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=kind(), eos_token="<|im_end|>", unk_token="<unk>")
    tokenizer.chat_template = template
    rows = RowTokenizer(tokenizer)
    for question, answer in pairwise(TEXTS):
        messages = conversation(question.strip() + "=", answer)
        row = rows.tokenize(messages)
        encoder = PromptEncoder(tokenizer, None)
        prompt = (
            prompt_of(tokenizer, messages[:1]) if template else encoder.encode(PromptTask(text=question.strip() + "="))
        )
        assert row.token_ids[: len(prompt)] == prompt
        assert row.learned == [False] * len(prompt) + [True] * (len(row.token_ids) - len(prompt))
        assert row.token_ids[-1] == tokenizer.eos_token_id
        if kind is KINDS[0]:  # the others do not give back every text
            assert tokenizer.decode(row.token_ids[len(prompt) :]) == answer + "<|im_end|>"


def test_sentencepiece_puts_no_space_before_a_completion():
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=KINDS[1](), eos_token="<|im_end|>", unk_token="<unk>")
    row = RowTokenizer(tokenizer).tokenize(conversation("f(a=", "1)"))
    assert tokenizer.decode(row.token_ids) == "f(a=1)<|im_end|>"


def test_text_of_a_control_token_in_an_answer_is_plain_text():
    tokenizer = tokenizer_of()
    row = RowTokenizer(tokenizer).tokenize(conversation("what ends a turn?", "<|im_end|> does <"))
    assert row.token_ids.count(tokenizer.eos_token_id) == 2  # the ends of the two turns
    assert tokenizer.decode(row.token_ids[row.learned.index(True) :]) == "<|im_end|> does <<|im_end|>"
    tokenizer.chat_template = STRIPS  # shows no such answer itself
    row = RowTokenizer(tokenizer).tokenize(conversation("what ends a turn?", "<think>\nhm</think><|im_end|>"))
    assert row.token_ids.count(tokenizer.eos_token_id) == 2


# ---- learned tokens ------------------------------------------------------------------------------------------------

TWO = conversation("2 + 2?", "4", "more", "5\n")


@pytest.mark.parametrize(
    ("learn", "runs"),
    [
        (
            "answers",
            [
                "<|im_start|>user\n2 + 2?<|im_end|>\n<|im_start|>assistant\n",
                "4<|im_end|>",
                "\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n",
                "5\n<|im_end|>",
            ],
        ),
        (
            "last_answer",
            [
                "<|im_start|>user\n2 + 2?<|im_end|>\n<|im_start|>assistant\n4<|im_end|>\n"
                "<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n",
                "5\n<|im_end|>",
            ],
        ),
        (
            "all",
            [
                "<|im_start|>",  # nothing predicts the first token
                "user\n2 + 2?<|im_end|>\n<|im_start|>assistant\n4<|im_end|>\n"
                "<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n5\n<|im_end|>\n",
            ],
        ),
    ],
)
def test_learned_tokens_are_those_of_the_chosen_turns(learn, runs):
    tokenizer = tokenizer_of()
    assert runs_of(RowTokenizer(tokenizer, learn=learn).tokenize(TWO), tokenizer) == runs


@pytest.mark.parametrize(
    ("template", "answers", "learned"),
    [
        (LLAMA_LIKE, ["4 \n"], ["4<|im_end|>"]),  # it trims what it is given
        (UNMARKED, ["4", "5"], ["4<|im_end|>", "5<|im_end|>"]),  # no mark behind an answer: the model's own end
        (QWEN_LIKE, ["4", "<think>\nhm\n</think>\n\n5"], ["4<|im_end|>", "<think>\nhm\n</think>\n\n5<|im_end|>"]),
        (OPENS, ["<think>\nhm</think>4"], ["hm</think>4<|im_end|>"]),  # opened once
        (STRIPS, ["<think>\nhm</think>4"], ["hm</think>4<|im_end|>"]),
    ],
)
def test_answer_is_learned_as_the_policy_would_write_it(template, answers, learned):
    tokenizer = tokenizer_of(template)
    contents = [text for answer in answers for text in ("a question", answer)]
    assert runs_of(RowTokenizer(tokenizer).tokenize(conversation(*contents)), tokenizer)[1::2] == learned


@pytest.mark.parametrize(
    ("learn", "prompt", "response", "turns"),
    [
        ("answers", "2 + 2?", "45\n", [("4", []), ("5\n", [TWO[2]])]),
        ("last_answer", "user: 2 + 2?\nassistant: 4\nuser: more", "5\n", []),
        ("all", "user: 2 + 2?\nassistant: 4\nuser: more", "5\n", []),
    ],
)
def test_learned_answers_are_shown_with_what_comes_before(learn, prompt, response, turns):
    group = RowTokenizer(tokenizer_of(), learn=learn).tokenize(TWO).as_group("0-0")
    group.is_supervised = True
    add_texts(group, TWO)
    check_group(group)
    (sample,) = group_samples(group)
    assert (sample.prompt, sample.response) == (prompt, response)
    assert [(turn.text, turn.messages) for turn in sample.turns] == turns


def test_without_a_template_a_prompt_is_completed():
    tokenizer = tokenizer_of()
    plain = JobConfig.model_validate(job_body(data={"type": "jsonl", "path": "rows.jsonl", "as_chat": False})).data
    messages, runs = conversation("Q: 2 + 2?", " 4"), ["Q: 2 + 2?", " 4<|im_end|>"]
    assert runs_of(RowTokenizer(tokenizer, plain).tokenize(messages), tokenizer) == runs
    tokenizer.chat_template = None
    assert runs_of(RowTokenizer(tokenizer).tokenize(messages), tokenizer) == runs
    as_text = TemplateArguments(control_tokens="text")
    row = RowTokenizer(tokenizer, as_text).tokenize(conversation("Q?", "<|im_end|>"))
    assert row.token_ids.count(tokenizer.eos_token_id) == 1


# ---- refusals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("messages", "sentence"),
    [
        ([], "ends with a message of the role None, which has no answer"),
        (conversation("2 + 2?"), "ends with a message of the role 'user', which has no answer"),
        (conversation("2 + 2?", " \n"), "has an empty answer, number 1 of 1; write one, or leave the row out"),
        (conversation("a", "", "b", "4"), "has an empty answer, number 1 of 2"),
        ([{"role": "assistant", "content": "4"}], "begins with an answer, and has no prompt before it"),
        ([*TWO[:3], TWO[3] | {"tool_calls": []}], "has tool_calls in message 4, which would not be shown"),
        (conversation("half \ud800", "4"), "not be tokenised"),
    ],
)
def test_row_without_an_answer_to_learn_is_refused(messages, sentence):
    with pytest.raises(SupervisedRowError, match=sentence):
        RowTokenizer(tokenizer_of()).tokenize(messages)


@pytest.mark.parametrize(
    ("template", "messages", "sentence"),
    [
        (
            QWEN_LIKE,
            conversation("a", "<think>\nhm\n</think>\n\n4", "b", "5"),
            "message 2 .* reasoning of earlier turns",
        ),
        (OPENS, TWO, "message 2 .* reasoning of earlier turns"),
        (ENDS, TWO, "message 2 .* reasoning of earlier turns"),
        (OPENS, TWO[:2], "has an answer without <think>, with which the prompt of the chat template ends"),
        ("{{ messages[0]['content'] }}", TWO[:2], "message 2 .* behind the prompt; write the answer in the form"),
        (WITHOUT_SYSTEM, [{"role": "system", "content": "x"}, *TWO], "only user and assistant, please"),
        (None, TWO, "messages of user, assistant, user, assistant, and without a chat template"),
    ],
)
def test_answer_that_the_template_rewrites_is_refused(template, messages, sentence):
    tokenizer = tokenizer_of()
    tokenizer.chat_template = template
    with pytest.raises(SupervisedRowError, match=sentence):
        RowTokenizer(tokenizer).tokenize(messages)


def test_empty_answers_of_the_history_are_no_matter_to_the_last():
    tokenizer = tokenizer_of()
    row = RowTokenizer(tokenizer, learn="last_answer").tokenize(conversation("a", "", "b", "4"))
    assert runs_of(row, tokenizer)[1:] == ["4<|im_end|>"]


def test_model_without_any_end_is_refused():
    tokenizer = tokenizer_of(UNMARKED)
    tokenizer.eos_token = None
    with pytest.raises(SupervisedRowError, match="neither the chat template nor the tokenizer has a token that ends"):
        RowTokenizer(tokenizer).tokenize(TWO)
