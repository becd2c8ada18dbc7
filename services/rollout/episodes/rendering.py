"""The prompt of the next call: tokens that were sampled are kept, and only what is new is rendered and tokenised.

    history    [question]                          prompt  A            sampled  B
    now        [question, answer, tool's result]   prompt  A B C        C: the end of the answer, the result, and the
                                                                        beginning of the next answer

C is the difference of two renderings as text: of the history with the answer, and of all messages as a prompt. When the
second does not begin with the first (a template that removes the reasoning of earlier turns), or when the history is
none of this episode's, the prompt is rendered afresh, and the token tree forks. The answers of the episode keep the
tokens that were sampled there, too, where the template shows their text.
"""

import bisect
import functools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any

from blake3 import blake3

from onbeat.engines import GeneratedResponse
from onbeat.environments import Message
from services.prompts.control_tokens import END, unguarded
from services.prompts.prompt_tokenizer import PromptTokenizer
from services.rollout.engines.stops import first_stop
from services.rollout.episodes.recorder import Call
from services.rollout.episodes.templates import ChatTemplate, TemplateRefusal
from services.rollout.episodes.toolcalls import ToolCall
from services.rollout.token_text import num_common

MARKS = ("<tool_call>", "</tool_call>")
MAX_TRIED = 8  # tokens at which the part of an answer that a template shows may begin


@dataclass(frozen=True)
class Prompt:
    token_ids: list[int]
    extends: Call | None
    num_known: int  # leading messages that an earlier call of the episode had, or was answered with


class Renderer:
    """The chat template and the tokenizer of a model; for one thread at a time."""

    def __init__(self, prompts: PromptTokenizer) -> None:
        self._prompts, self._tokenizer = prompts, prompts.tokenizer
        self._template = ChatTemplate(prompts)

    def fresh(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]],
        answers: Mapping[int, GeneratedResponse] = MappingProxyType({}),
    ) -> list[int]:
        """Return the prompt. `answers`, by the index of their message, keep the tokens that were sampled, as far as the
        template shows their text. Raises ValueError when the messages cannot be rendered or tokenised."""
        text = self._template.render(messages, tools, is_prompt=True)
        token_ids = self._encode(text)
        if not answers:
            return token_ids
        marked = self._template.render(messages, tools, is_prompt=True, ended=answers)
        if marked.replace(END, "") != text or marked.count(END) != len(answers):
            return token_ids  # the template changes what it is given, by its last characters
        kept = self._encode_around([answers[index] for index in sorted(answers)], marked.split(END))
        is_same = self._tokenizer.decode(kept) == self._tokenizer.decode(token_ids)
        return kept if is_same else token_ids

    def _encode_around(self, answers: Sequence[GeneratedResponse], texts: Sequence[str]) -> list[int]:
        """Tokenise the texts that end with an answer each, and the last one, around the tokens of the answers."""
        token_ids: list[int] = []
        rest = texts[0]
        for answer, following in zip(answers, texts[1:], strict=True):
            sampled, stop = list(answer.token_ids), ""
            if answer.finish_reason == "stop":
                stop = self._tokenizer.decode(sampled[-1:], skip_special_tokens=False)
                sampled, last = sampled[:-1], sampled[-1:]
            kept, text = self._shown(sampled, rest)
            token_ids += self._encode_behind(token_ids, rest.removesuffix(text)) + kept
            if kept and stop and following.startswith(stop):
                token_ids += last
                following = following.removeprefix(stop)
            rest = following
        return token_ids + self._encode_behind(token_ids, rest)

    def _encode_behind(self, token_ids: Sequence[int], text: str) -> list[int]:
        return self._encode(text, token_ids[-1] if token_ids else None)

    def _shown(self, sampled: list[int], text: str) -> tuple[list[int], str]:
        """Return the last of the sampled tokens whose text ends this text, and their text; none where it does not."""
        decode = functools.partial(self._tokenizer.decode, skip_special_tokens=False)
        num_shown = num_common(decode(sampled)[::-1], text[::-1], 0)
        starts = range(len(sampled))
        first = bisect.bisect_left(starts, -num_shown, key=lambda start: -len(decode(sampled[start:])))
        for start in starts[first : first + MAX_TRIED]:
            if text.endswith(piece := decode(sampled[start:])):
                return sampled[start:], piece
        return [], ""

    def parse_calls(self, generated: GeneratedResponse, stops: Sequence[str] = ()) -> tuple[str, list[ToolCall]]:
        """Return the text of an answer without its calls of tools, and the calls. `stops`: the job's stop strings."""
        text = generated.text
        if self._beside_marks is not None:
            text = self._tokenizer.decode(generated.token_ids, skip_special_tokens=False)
            text = self._beside_marks.sub("", text)
            text = text[: first_stop(text, stops)] if generated.finish_reason == "stop" else text
        return self._template.parse_calls(text)

    @cached_property
    def _beside_marks(self) -> re.Pattern[str] | None:
        """Match special tokens other than marks of calls. None where marks are no special tokens: an answer's text,
        which leaves out special tokens, has them."""
        added = self._tokenizer.added_tokens_decoder.values()
        special = {*self._tokenizer.all_special_tokens, *(token.content for token in added if token.special)}
        others = "|".join(map(re.escape, special.difference(MARKS))) or "$"
        return None if special.isdisjoint(MARKS) else re.compile(others)

    @cached_property
    def _marks(self) -> set[int]:
        """The tokens that are no text, one of which the template writes behind an answer."""
        return {self._tokenizer.eos_token_id, *self._tokenizer.added_tokens_decoder}

    def extended(
        self, call: Call, messages: Sequence[Message], num_old: int, tools: Sequence[dict[str, Any]]
    ) -> list[int] | None:
        """Return the prompt that follows the call's sample; None when the template rewrites history. The last of the
        first `num_old` messages is the answer of the call. Raises ValueError."""
        full = self._template.render(messages, tools, is_prompt=True)
        try:
            old = self._template.render(messages[:num_old], tools, is_prompt=False)
        except TemplateRefusal:
            return None
        end = self._template.end_of_answer(messages[: num_old - 1], tools)
        if end is None or not full.startswith(old) or not shows(unguarded(old), messages[num_old - 1], end):
            return None
        sampled = call.generated.token_ids
        return call.path + self._encode(self._not_sampled(end, full[len(old) :], call), after=sampled[-1])

    def _not_sampled(self, end: str, new: str, call: Call) -> str:
        """Return the answer's end and what is new, but what was sampled of it: nothing when the sample was cut by its
        length. GLM stops with the beginning of the next message."""
        if call.generated.finish_reason != "stop" or call.generated.token_ids[-1] not in self._marks:
            return end + new  # cut, or stopped by the job within the text
        sampled = self._tokenizer.decode([call.generated.token_ids[-1]], skip_special_tokens=False)
        _, separator, rest = end.partition(sampled)
        return rest + new if separator else (end + new).removeprefix(sampled)

    def _encode(self, text: str, after: int | None = None) -> list[int]:
        try:
            return self._prompts.encode(text, after)
        except TypeError as error:  # tokenizers raise it for halves of surrogate pairs
            raise ValueError(f"the messages cannot be tokenised: {error}") from error


class Conversations:
    """The message histories of one episode. `begun`: the task's messages, which the environment already has."""

    def __init__(self, renderer: Renderer, begun: Sequence[Message] = ()) -> None:
        self._renderer = renderer
        self._known = set(digests_of(begun))  # digests of all beginnings of all histories
        # By the tools, and the digest of the history that the call's answer ends.
        self._answered: dict[tuple[bytes, bytes], Call] = {}
        self._sampled: dict[bytes, GeneratedResponse] = {}  # answer -> sample, where its text shows all

    def prompt(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> Prompt:
        """Return the prompt of the next call. Raises ValueError when it cannot be rendered or tokenised."""
        digests, offered = digests_of(messages), to_bytes(tools)
        num_known = next((n for n in range(len(digests), 0, -1) if digests[n - 1] in self._known), 0)
        num_old = next((n for n in range(num_known, 0, -1) if (offered, digests[n - 1]) in self._answered), 0)
        if num_old:
            call = self._answered[offered, digests[num_old - 1]]
            if (token_ids := self._renderer.extended(call, messages, num_old, tools)) is not None:
                return Prompt(token_ids, call, num_known)
        answers = {
            index: generated
            for index, message in enumerate(messages)
            if message["role"] == "assistant" and (generated := self._sampled.get(to_bytes(comparable(message))))
        }
        return Prompt(self._renderer.fresh(messages, tools, answers), None, num_known)

    def add(self, call: Call, messages: Sequence[Message], tools: Sequence[dict[str, Any]], answer: Message) -> None:
        digests = digests_of([*messages, answer])
        self._known.update(digests)
        self._answered[to_bytes(tools), digests[-1]] = call
        if answer["content"].strip() and not answer.get("tool_calls"):
            self._sampled.setdefault(to_bytes(comparable(answer)), call.generated)


def digests_of(messages: Sequence[Message]) -> list[bytes]:
    """Return the digest of each beginning of the conversation, from the first message to all."""
    digest, digests = b"", []
    for message in messages:
        digest = blake3(digest + to_bytes(comparable(message))).digest()
        digests.append(digest)
    return digests


def comparable(message: Message) -> Message:
    """Return the message without what clients change in an answer that they send back: ids of calls, outer spaces."""
    if message["role"] != "assistant":
        return message
    functions = [call["function"] for call in message.get("tool_calls", ())]
    return {"role": "assistant", "content": message["content"].strip(), "tool_calls": functions}


def to_bytes(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True).encode()


def shows(text: str, answer: Message, end: str) -> bool:
    """Return whether the rendering holds the whole answer, up to spaces: some templates leave out its reasoning."""
    return text.endswith(end) and "".join(answer["content"].split()) in "".join(text.split())
