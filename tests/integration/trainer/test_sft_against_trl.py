"""Our supervised rows, loss and gradient against TRL's SFTTrainer on the same conversations, and its chat templates."""

from itertools import groupby
from pathlib import Path

import pytest
import torch
import trl
from datasets import Dataset
from trl import SFTConfig, SFTTrainer

from onbeat.objectives.sft import SftObjective
from services.trainer.model.model import load_model, tri_model_logprobs
from services.trainer.supervised import RowTokenizer, SupervisedRow, SupervisedRowError, pack_rows
from tests.tiny_models import CHAT_TEMPLATE, build_tokenizer, write_tied_model

CPU = torch.device("cpu")
SHOWN = "{{ message['content'] }}<|im_end|>"
# The same text, in which TRL finds the tokens of answers.
MARKED_TEMPLATE = CHAT_TEMPLATE.replace(
    f"<|im_start|>{{{{ message['role'] }}}}\n{SHOWN}\n",
    "<|im_start|>{{ message['role'] }}\n{% if message['role'] == 'assistant' %}{% generation %}"
    f"{SHOWN}{{% endgeneration %}}{{% else %}}{SHOWN}{{% endif %}}{{{{ '\n' }}}}",
)


def conversation(*contents: str) -> list[dict[str, str]]:
    return [{"role": "assistant" if i % 2 else "user", "content": content} for i, content in enumerate(contents)]


CONVERSATIONS = [
    conversation("2 + 2?", "4"),
    conversation("hi", "Hello.", "3 + 4 = ?", "It is 7,\nI think.", "sure?", "yes"),
    [{"role": "system", "content": "Be short."}, *conversation("Name a colour, please", "red", "another", "blue")],
]


def test_loss_and_gradient_equal_trl(tmp_path):
    """Several turns, masked prompts, different lengths: theirs padded, ours packed into rows of two sizes."""
    model_dir = write_tied_model(tmp_path / "model")
    tokenizer = build_tokenizer()
    tokenizer.chat_template = MARKED_TEMPLATE
    config = SFTConfig(
        output_dir=str(tmp_path / "trl"),
        per_device_train_batch_size=len(CONVERSATIONS),
        assistant_only_loss=True,
        max_length=None,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to=[],
        model_init_kwargs={"dtype": "float32"},
    )
    dataset = Dataset.from_list([{"messages": messages} for messages in CONVERSATIONS])
    trainer = SFTTrainer(str(model_dir), config, train_dataset=dataset, processing_class=tokenizer)
    inputs = next(iter(trainer.get_train_dataloader()))
    num_items = (inputs["labels"][:, 1:] != -100).sum()
    expected = trainer.compute_loss(trainer.model.eval(), dict(inputs), num_items_in_batch=num_items)
    expected.backward()

    rows = RowTokenizer(build_tokenizer())
    model = load_model(str(model_dir), torch.float32, CPU)
    objective, total, num_tokens = SftObjective(type="sft"), 0.0, 0
    batches = pack_rows([rows.tokenize(messages) for messages in CONVERSATIONS], 200, CPU)
    assert len(batches) == 2
    for batch in batches:
        loss = objective.loss(batch, tri_model_logprobs(model, None, None, batch, 1.0)[0])
        loss.loss_sum.backward()
        total, num_tokens = total + loss.loss_sum.item(), num_tokens + len(batch.target_ids)
    assert num_tokens == num_items
    divisor = objective.denominator(num_tokens, len(CONVERSATIONS), 0, 8)
    assert total / divisor == pytest.approx(expected.item(), rel=1e-5)
    theirs = dict(trainer.model.named_parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad / divisor, theirs[name].grad, rtol=1e-4, atol=1e-6)


# ---- chat templates of families ------------------------------------------------------------------------------------

TEMPLATES = Path(trl.__file__).parent / "chat_templates"
SINGLE = conversation("2 + 2?", "4 <- that")
SEVERAL = conversation("2 + 2?", "4", "more, é?", "5\nand 6")
REASONED = conversation("2 + 2?", "<think>\nhm\n</think>\n\n4")
ALIKE = ["cohere", "gemma", "gemma3", "lfm2", "llama3", "phi3", "qwen2_5", "qwen3_instruct_2507"]
MARKS = "<|im_start|> <|im_end|> <|eot_id|> <|start_header_id|> <|end_header_id|> <start_of_turn> <end_of_turn> <|end|>"
MARKS += " <|user|> <|assistant|> <|START_OF_TURN_TOKEN|> <|END_OF_TURN_TOKEN|> <|start|> <|return|> <|channel|>"
MARKS += " <|message|> <\uff5cUser\uff5c> <\uff5cAssistant\uff5c> <\uff5cend▁of▁sentence\uff5c>"


def tokenizer_of_family(family: str):
    tokenizer = build_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": MARKS.split()})
    tokenizer.chat_template = (TEMPLATES / f"{family}.jinja").read_text(encoding="utf-8")
    return tokenizer


def learned_texts(row: SupervisedRow, tokenizer) -> list[str]:
    """Return the learned runs as text."""
    pairs = zip(row.learned, row.token_ids, strict=True)
    runs = [(learned, [token for _, token in run]) for learned, run in groupby(pairs, lambda pair: pair[0])]
    return [tokenizer.decode(tokens, skip_special_tokens=False) for learned, tokens in runs if learned]


@pytest.mark.parametrize("messages", [SINGLE, SEVERAL], ids=["one answer", "several"])
@pytest.mark.parametrize("family", ALIKE)
def test_rows_equal_those_of_trl_but_for_line_feeds(family, messages):
    """TRL also learns line feeds around an answer, which no policy ever samples: they are the template's."""
    tokenizer = tokenizer_of_family(family)
    row = RowTokenizer(tokenizer).tokenize(messages)
    theirs = tokenizer.apply_chat_template(
        messages,
        chat_template=(TEMPLATES / f"{family}_training.jinja").read_text(encoding="utf-8"),
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    assert theirs["input_ids"][: len(row.token_ids)] == row.token_ids
    pairs = zip(row.token_ids, row.learned, theirs["assistant_masks"], strict=False)
    differing = [token for token, ours, is_theirs in pairs if ours != is_theirs]
    assert tokenizer.decode(differing).strip() == ""
    assert len(differing) <= 3


@pytest.mark.parametrize(
    ("family", "messages", "learned"),
    [
        ("qwen3", SINGLE, ["<think>\n\n</think>\n\n4 <- that<|im_end|>"]),
        ("qwen3", SEVERAL, ["4<|im_end|>", "<think>\n\n</think>\n\n5\nand 6<|im_end|>"]),
        ("qwen3", REASONED, ["<think>\nhm\n</think>\n\n4<|im_end|>"]),
        ("qwen3_5_think", REASONED, ["hm\n</think>\n\n4<|im_end|>"]),
        ("qwen3_8", REASONED, ["hm\n</think>\n\n4<|im_end|>"]),
        ("deepseek_r1_distill", REASONED, ["hm\n</think>\n\n4<\uff5cend▁of▁sentence\uff5c>"]),
        ("glm4moe", SINGLE, ["\n<think></think>\n4 <- that<|im_end|>"]),  # the template ends no answer: the model's EOS
        ("gptoss", SINGLE, ["<|channel|>final<|message|>4 <- that<|return|>"]),
    ],
)
def test_answer_is_what_the_template_shows_behind_its_prompt(family, messages, learned):
    tokenizer = tokenizer_of_family(family)
    assert learned_texts(RowTokenizer(tokenizer).tokenize(messages), tokenizer) == learned


@pytest.mark.parametrize(
    ("family", "messages", "sentence"),
    [
        ("qwen3", REASONED + SINGLE, "message 2 .* remove the reasoning of earlier turns"),
        ("gptoss", SEVERAL, "message 2 .* remove the reasoning of earlier turns"),  # an earlier answer ends otherwise
        ("deepseek_r1_distill", SINGLE, "has an answer without <think>"),
        ("qwen3_5_nothink", REASONED, "message 2 .* behind the prompt; write the answer in the form"),
        ("llava_next", SINGLE, "cannot be shown by the chat template"),
    ],
)
def test_answer_that_the_policy_would_not_write_so_is_refused(family, messages, sentence):
    with pytest.raises(SupervisedRowError, match=sentence):
        RowTokenizer(tokenizer_of_family(family)).tokenize(messages)


def test_last_answer_is_learned_behind_a_rewritten_history():
    tokenizer = tokenizer_of_family("qwen3")
    row = RowTokenizer(tokenizer, learn="last_answer").tokenize(REASONED + SEVERAL[2:])
    assert learned_texts(row, tokenizer) == ["<think>\n\n</think>\n\n5\nand 6<|im_end|>"]
    assert "hm" not in tokenizer.decode(row.token_ids)
