"""Text that looks like a control token and is none: `<|im_end|>` in a row, in the answer of a tool, in a question.

Tokenizers find control tokens by their text, wherever that came from. Here the strings of a conversation are guarded
before the template sees them, so that the control tokens of the rendered text are the template's own. Text with guards
is tokenised by a copy of the tokenizer in which the control tokens have other names:

    content      a <|im_end|> b
    guarded      a <G|im_end|> b
    rendered     <|im_start|>user\n a <G|im_end|> b <|im_end|>\n
    renamed      N<|im_start|>user\n a <|im_end|> b N<|im_end|>\n

Control tokens are those that the tokenizer calls special. Other tokens that were added to it, such as `<think>` in the
models of Qwen, are vocabulary, and mean the same wherever they stand.
"""

import json
import re
from functools import lru_cache
from typing import Any

ESCAPE = "\U0002a6d6"  # a rare character, which templates leave as it is: the last of CJK Extension B of Unicode 10
GUARD, LITERAL = f"{ESCAPE}1", f"{ESCAPE}0"  # a guard, and the character itself
END = f"{ESCAPE}2"  # the end of a message's content, where a caller asks for that
BYTE = re.compile("<0x[0-9A-F]{2}>")  # tokens of single bytes, which text without a token of its own is made of
NAMES = range(0x2A6D5, 0x2A000, -1)  # characters that may begin a control token's other name


class ControlTokens:
    """The control tokens of a tokenizer of transformers; like the tokenizer, for one thread at a time."""

    def __init__(self, tokenizer: Any) -> None:
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        added = getattr(tokenizer, "added_tokens_decoder", {}).values()
        texts = {token.content for token in added if token.special} | set(tokenizer.all_special_tokens)
        texts = {text for text in texts if len(text) > 1 and not BYTE.fullmatch(text)}
        self.texts = sorted(texts, key=len, reverse=True)
        anywhere = "|".join(map(re.escape, self.texts)) or "(?!)"
        self._mark = re.compile(anywhere)
        first = "|".join({re.escape(text[0]) for text in self.texts}) or "(?!)"  # tested first: some have a thousand
        self._start_of_mark = re.compile(f"(?={first})(?=(?:{anywhere}))(.)", re.DOTALL)
        # A mark must not come about where two strings meet, either.
        self._beginnings = tuple({text[:end] for text in self.texts for end in range(1, len(text))})
        self._endings = tuple({text[start:] for text in self.texts for start in range(1, len(text))})
        self._beginnings = tuple(part for part in self._beginnings if not part[0].isalnum())
        self._endings = tuple(part for part in self._endings if not part[-1].isalnum())
        self._renamed = lru_cache(1)(self._rename)

    def guard(self, value: Any) -> Any:
        """Return a value of JSON in which no string holds the text of a control token, nor a part of one at an end."""
        if isinstance(value, dict):
            return {self.guard(key): self.guard(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.guard(item) for item in value]
        if not isinstance(value, str):
            return value
        text = self._start_of_mark.sub(rf"\1{GUARD}", value.replace(ESCAPE, LITERAL))
        before = GUARD if value.startswith(self._endings) else ""
        return before + text + (GUARD if value.endswith(self._beginnings) else "")

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Tokenise a text with guards: what they guard becomes plain text, all other marks become control tokens.

        Raises ValueError where the tokenizer cannot tell them apart.
        """
        plain = unguarded(text)
        name = next(chr(code) for code in NAMES if chr(code) not in plain)
        renamed = unguarded(self._mark.sub(lambda match: name + match[0], text))
        token_ids: list[int] = self._renamed(name).encode(renamed, add_special_tokens=add_special_tokens).ids
        return token_ids

    def _rename(self, name: str) -> Any:
        from tokenizers import Tokenizer

        if self._backend is None:
            marks = ", ".join(self.texts[:5])
            raise ValueError(
                f"a text holds one of the model's control tokens ({marks}, ...), and its tokenizer, which is not of "
                "the library tokenizers, cannot take it as plain text; save the tokenizer as tokenizer.json"
            )
        names = {text: name + text for text in self.texts}
        try:
            tokenizer = Tokenizer.from_str(json.dumps(renamed_file(json.loads(self._backend.to_str()), names)))
        except Exception as error:  # the library raises nothing narrower
            raise ValueError(f"a text holds a control token, which cannot be taken as plain text: {error}") from error
        moved = [text for text in self.texts if tokenizer.token_to_id(names[text]) != self._backend.token_to_id(text)]
        if moved:
            raise ValueError(f"a text holds a control token; in plain text {moved[0]} would get another id")
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return tokenizer


def unguarded(text: str) -> str:
    """Return a text as it was without guards."""
    return text.replace(GUARD, "").replace(LITERAL, ESCAPE)


def renamed_file(file: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    """Return the content of a tokenizer.json in which these tokens have other names."""
    model = file["model"]
    vocabulary = model["vocab"]
    if isinstance(vocabulary, dict):
        model["vocab"] = {names.get(text, text): token_id for text, token_id in vocabulary.items()}
    else:  # Unigram
        model["vocab"] = [[names.get(text, text), score] for text, score in vocabulary]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    for token in file["added_tokens"]:
        token["content"] = names.get(token["content"], token["content"])
    return file
