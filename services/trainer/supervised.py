"""Rows of examples for supervised training: the tokens of a conversation, and which of them are learned.

    messages   [user: 2+2?]                                      [assistant: 4]
    text       <|im_start|>user 2+2?<|im_end|><|im_start|>assistant  4 <|im_end|>
               not learned: what the policy gets as its prompt       learned, with the token that ends a response

The prompt is tokenised as rollouts do, by itself; the answer goes on behind its last token, and no token crosses the
border. An answer is what the chat template shows behind its own prompt, which may be more than the message has (an
empty `<think>` block). Further turns extend the tokens before them, as an episode does.

A conversation is one row, in which each answer is learned at the place where the policy would write it. Where a
template shows an answer otherwise to later turns (it removes their reasoning), such a row does not exist: it is refused
by name, and `last_answer` learns the last answer behind the history as the template shows it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Any

import torch

from onbeat.config.templates import TemplateArguments
from onbeat.contracts.examples import Learn, problem_of_example
from onbeat.streams.codec import Response, RolloutGroup, Turn
from services.prompts.control_tokens import END, unguarded
from services.prompts.prompt_tokenizer import PromptTokenizer
from services.trainer.batch import MicroBatch, Part, fill_rows, pack
from services.trainer.chat_template import OPEN_TAG

Messages = list[dict[str, str]]


class SupervisedRowError(ValueError):
    """The row cannot be learned; the message is a sentence about the row that says why."""


@dataclass(frozen=True)
class SupervisedRow:
    token_ids: list[int]
    learned: list[bool]  # targets; the first token, which nothing predicts, is none, and the last one is

    def __post_init__(self) -> None:
        assert len(self.token_ids) == len(self.learned)
        assert not self.learned[0], "nothing predicts the first token"
        assert self.learned[-1], "tokens behind the last learned one change nothing"

    def as_group(self, group_id: str = "") -> RolloutGroup:
        """Return the row as a group of one response: the learned tokens, in turns if others are between them. Without
        logprobs, spans and reward, which only samples have."""
        runs = [(is_learned, len(list(run))) for is_learned, run in groupby(self.learned)]
        starts = [0, *accumulate(length for _, length in runs)]
        turns = [
            Turn(
                num_shared=starts[index - 1] if index > 1 else starts[index],
                parent=index // 2 - 1 if index > 1 else None,
                observed_token_ids=self.token_ids[starts[index - 1] : starts[index]] if index > 1 else [],
                num_sampled=runs[index][1],
            )
            for index in range(1, len(runs), 2)
        ]
        learned = [token for token, is_learned in zip(self.token_ids, self.learned, strict=True) if is_learned]
        response = Response(token_ids=learned, has_no_reward=True, turns=turns if len(turns) > 1 else [])
        return RolloutGroup(group_id=group_id, prompt_token_ids=self.token_ids[: starts[1]], responses=[response])


def pack_rows(rows: Sequence[SupervisedRow], max_tokens: int, device: torch.device) -> list[MicroBatch]:
    """Pack rows, in order, into micro-batches of at most `max_tokens` places; a longer row is one by itself."""
    parts = (Part.whole(row.as_group(str(index))) for index, row in enumerate(rows))
    return [pack(row, device) for row in fill_rows(parts, max_tokens)]


@dataclass(frozen=True)
class Piece:
    text: str
    is_answer: bool
    has_end: bool = True  # false for an answer behind which the template writes no mark: it gets the model's own end


class RowTokenizer:
    """The tokenizer of a job's rows; like that of transformers, for one thread at a time.

    Conversations are shown by the chat template. Without one, or with `as_chat = false`, a row is a prompt and its
    completion, as plain text.
    """

    def __init__(self, tokenizer: Any, options: TemplateArguments | None = None, learn: Learn = "answers") -> None:
        self._tokenizer, self._learn = tokenizer, learn
        self._prompts = PromptTokenizer(tokenizer, options)
        self._is_chat = bool(tokenizer.chat_template) and getattr(options, "as_chat", True)

    def tokenize(self, messages: Messages) -> SupervisedRow:
        """Tokenise one row. Raises SupervisedRowError."""
        from jinja2.exceptions import TemplateError

        if problem := problem_of_example(messages, self._learn, is_chat=self._is_chat):
            raise SupervisedRowError(problem)
        try:
            if not self._is_chat:
                return self._complete(messages)
            pieces = list(self._pieces(messages))
            return self._join(self._prompts.encode(pieces[0].text), pieces[1:])
        except SupervisedRowError:
            raise
        except (TemplateError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            reason = str(error) or type(error).__name__
            raise SupervisedRowError(f"cannot be shown by the chat template, or not be tokenised: {reason}") from error

    def _complete(self, messages: Messages) -> SupervisedRow:
        """Tokenise a prompt and its completion, which ends with the model's end of a sequence."""
        prompt, answer = (message["content"] for message in messages)
        piece = Piece(self._prompts.plain_text(answer), is_answer=True, has_end=False)
        return self._join(self._prompts.encode_text(prompt), [piece])

    def _join(self, token_ids: list[int], pieces: Sequence[Piece]) -> SupervisedRow:
        """Tokenise pieces behind the first prompt's tokens."""
        if not token_ids:
            raise SupervisedRowError("has a prompt without tokens; write one, or leave the row out")
        learned = [self._learn == "all"] * len(token_ids)
        for piece in pieces:
            new = self._prompts.encode(piece.text, after=token_ids[-1]) if piece.text else []
            token_ids = token_ids + new + ([] if piece.has_end else [self._end_of_sequence()])
            learned += [piece.is_answer or self._learn == "all"] * (len(token_ids) - len(learned))
        learned[0] = False
        return SupervisedRow(token_ids, learned)

    def _end_of_sequence(self) -> int:
        token_id: int | None = self._tokenizer.eos_token_id
        if token_id is None:
            raise SupervisedRowError(
                "cannot be ended: neither the chat template nor the tokenizer has a token that ends an answer; set "
                "eos_token in the model's tokenizer_config.json"
            )
        return token_id

    # ---- conversations -------------------------------------------------------------------------------------------

    def _pieces(self, messages: Messages) -> Iterator[Piece]:
        """Yield the first prompt, the first learned answer with its end, what is between it and the next, and so on."""
        turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        if self._learn == "last_answer":
            turns = turns[-1:]
        text, ends = self._show(messages, turns)
        mark = self._prompts.mark_at(text[ends[-1] :])
        before = 0
        for turn, end in zip(turns, ends, strict=True):
            prompt, rest = self._prompts.render(messages[:turn]), text[end:]
            shown = text[len(prompt) : end] if text.startswith(prompt) and len(prompt) >= before else None
            answer = self._answer(messages[turn]["content"], prompt, shown, is_alone=len(turns) == 1)
            if answer is None or not rest.lstrip().startswith(mark):
                raise rewritten(turn, len(turns) == 1)
            closing = rest[: rest.index(mark) + len(mark)]
            yield Piece(prompt[before:], is_answer=False)
            yield Piece(answer + closing, is_answer=True, has_end=bool(mark))
            before = end + len(closing)
        if self._learn == "all":
            yield Piece(text[before:], is_answer=False)

    def _answer(self, content: str, prompt: str, shown: str | None, is_alone: bool) -> str | None:
        """Return the text behind its prompt of an answer with this content: as the template shows it, if it shows all
        of it behind that prompt, else None. Where the prompt opens the answer, as with `<think>`, and the content does,
        too, it is opened once; `is_alone`: then it need not be shown so, as no other turn follows."""
        tag = OPEN_TAG.search(prompt)
        if tag and content.lstrip().startswith(tag[1]):
            content = content.lstrip().removeprefix(tag[1])
            content = content.lstrip() if prompt[-1].isspace() else content
            if shown is not None and squeezed(content) == squeezed(unguarded(shown)):
                return shown
            return self._prompts.guarded(content.rstrip()) if is_alone else None
        if shown is None and tag and is_alone:
            raise SupervisedRowError(
                f"has an answer without {tag[1]}, with which the prompt of the chat template ends; begin the answer "
                "with that, or give the model another template (model.chat_template_file)"
            )
        return shown if shown is not None and squeezed(content) in squeezed(unguarded(shown)) else None

    def _show(self, messages: Messages, turns: Sequence[int]) -> tuple[str, list[int]]:
        """Return the text of a conversation, and where the content of each of these turns ends in it."""
        text = self._prompts.render(messages, is_prompt=False)
        trimmed = [
            message | {"content": message["content"].rstrip()} if index in turns else message
            for index, message in enumerate(messages)
        ]
        for given in (messages, trimmed):  # many templates trim what they are given
            *parts, rest = self._prompts.render(given, is_prompt=False, ended=turns).split(END)
            if "".join([*parts, rest]) == text and len(parts) == len(turns):
                return text, list(accumulate(map(len, parts)))
        raise rewritten(turns[-1], len(turns) == 1)


def squeezed(text: str) -> str:
    """Return text without spaces, which templates add and remove."""
    return "".join(text.split())


def rewritten(turn: int, is_alone: bool) -> SupervisedRowError:
    shown = f"has an answer in message {turn + 1} that the chat template shows otherwise than the policy would write it"
    if is_alone:
        return SupervisedRowError(
            f"{shown} behind the prompt; write the answer in the form that the template shows, change "
            "template_options, or give the model another template (model.chat_template_file)"
        )
    return SupervisedRowError(
        f"{shown} there (some templates remove the reasoning of earlier turns); learn only the last answer of each "
        "row, or give the model another template (model.chat_template_file)"
    )
