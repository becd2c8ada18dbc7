"""A model's prompts: a conversation or plain text in, token ids out, alike for rollouts, length counts and checks."""

from collections.abc import Collection, Sequence
from datetime import datetime
from typing import Any

from onbeat.config.templates import TemplateArguments, option_problem
from services.prompts.control_tokens import END, ESCAPE, ControlTokens, unguarded


class PromptTokenizer:
    """The chat template and the tokenizer of a model; like the tokenizer of transformers, for one thread at a time."""

    def __init__(self, tokenizer: Any, arguments: TemplateArguments | None = None) -> None:
        self.tokenizer = tokenizer
        self._control_tokens = ControlTokens(tokenizer)
        self._is_text_plain = arguments is not None and arguments.control_tokens == "text"
        self._inputs: dict[str, Any] = dict(arguments.template_options) if arguments else {}
        if arguments and arguments.now is not None:  # else transformers shows the time of each rendering
            self._inputs["strftime_now"] = datetime.fromisoformat(arguments.now).strftime

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]] = (),
        *,
        is_prompt: bool = True,
        ended: Collection[int] = (),
    ) -> str:
        """Return the text of a conversation for `encode`; a prompt ends where the next answer begins.

        What looks like a control token in messages and tools is guarded, see `control_tokens`; `unguarded` gives the
        text as it reads. `ended`: indices of messages behind whose content the text gets an END.
        Raises what templates raise: TemplateError, ValueError, TypeError, LookupError, AttributeError, RecursionError.
        """
        guarded, guarded_tools = self._control_tokens.guard(messages), self._control_tokens.guard(tools)
        for index in ended:
            guarded[index]["content"] += END
        text: str = self.tokenizer.apply_chat_template(
            guarded, tools=guarded_tools or None, tokenize=False, add_generation_prompt=is_prompt, **self._inputs
        )
        return text

    def suffix(self, messages: Sequence[dict[str, Any]]) -> str:
        """Return the text with which a prompt of these messages ends, behind the last message: the beginning of the
        answer, such as `<|im_start|>assistant` or `<think>`. '' where the template renders none. Raises as `render`."""
        prompt, conversation = self.render(messages), self.render(messages, is_prompt=False)
        return unguarded(prompt.removeprefix(conversation)) if prompt.startswith(conversation) else ""

    def encode(self, rendered: str, after: int | None = None) -> list[int]:
        """Tokenise what `render` returned, or a piece of that. Raises TypeError for halves of surrogate pairs.

        `after`: the token before the piece, as some tokenizers treat the beginning of a text differently.
        """
        if after is not None:
            before = self.tokenizer.decode([after], skip_special_tokens=False)
            alone, together = self.encode(before), self.encode(before + rendered)
            return together[len(alone) :] if together[: len(alone)] == alone else self.encode(rendered)
        if ESCAPE in rendered:
            return self._control_tokens.encode(rendered, add_special_tokens=False)
        return list(self.tokenizer(rendered, add_special_tokens=False)["input_ids"])

    def guarded(self, text: str) -> str:
        """Return a piece for `encode` in which nothing is a control token."""
        guarded: str = self._control_tokens.guard(text)
        return guarded

    def plain_text(self, text: str) -> str:
        """Return text that is no conversation as a piece for `encode`: guarded, if the job says so."""
        return self.guarded(text) if self._is_text_plain else text

    def mark_at(self, end: str) -> str:
        """Return the added token right behind an answer, such as `<|im_end|>`, from the text behind it; '' if there is
        none."""
        added = (token.content for token in self.tokenizer.added_tokens_decoder.values())
        return max((text for text in added if end.lstrip().startswith(text)), key=len, default="")

    def encode_messages(self, messages: Sequence[dict[str, Any]]) -> list[int]:
        return self.encode(self.render(messages))

    def encode_text(self, text: str) -> list[int]:
        """Tokenise a prompt that is no conversation, with the tokens that the tokenizer puts before a text, but not an
        end of sequence behind it, nor a beginning in front of one that the text has."""
        guarded = self.plain_text(text)
        if guarded != text:
            token_ids = self._control_tokens.encode(guarded, add_special_tokens=True)
        else:
            token_ids = list(self.tokenizer(text)["input_ids"])
        first, last = self.tokenizer.bos_token_id, self.tokenizer.eos_token_id
        alone = self.encode(guarded)
        if token_ids[-1:] == [last] and token_ids[-1 - len(alone) : -1] == alone:
            token_ids.pop()
        if token_ids[:2] == [first, first] and token_ids[1:] == alone:
            del token_ids[0]
        return token_ids


def check_template_options(tokenizer: Any, arguments: TemplateArguments, section: str = "data") -> None:
    """Raise ValueError for an option that the model's chat template does not name: it would change nothing. `section`:
    the field of the arguments."""
    if not arguments.template_options:
        return
    from transformers.utils.chat_template_utils import _get_template_variables  # knows the tags that templates add

    names = set(_get_template_variables(tokenizer.get_chat_template()))
    if problem := option_problem(arguments.template_options, names, section):
        raise ValueError(problem)
