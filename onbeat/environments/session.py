"""The session of an episode: the policy behind an OpenAI-compatible URL, on one version from begin to end."""

import json
from typing import Any

import httpx

# A chat message as in OpenAI's API: {"role": ..., "content": ...}, sometimes with `tool_calls` or `tool_call_id`.
Message = dict[str, Any]

ANSWER_DEADLINE_S = 3600.0  # the rollout ends the episode long before


OVER = ("no_turns_left", "context_length_exceeded", "body_too_large")  # codes of refusals that no other call escapes


class SessionError(Exception):
    """The session refused a call; the message says why."""


class EpisodeOver(SessionError):
    """The episode has no call left: all turns are used, or the conversation fills the context. Give it its reward."""


class Session:
    """An episode's access to the policy. `url` and `key` serve any OpenAI-compatible client, until the episode ends."""

    def __init__(self, url: str, key: str) -> None:
        self.url, self.key = url, key
        # Requests to this machine take no proxy and no TLS, whose context alone would take 19 ms.
        self._http = httpx.AsyncClient(
            headers={"Authorization": f"Bearer {key}"},
            timeout=httpx.Timeout(ANSWER_DEADLINE_S, connect=10.0),
            trust_env=False,
            verify=False,
        )

    async def chat(
        self, messages: list[Message], tools: list[dict[str, Any]] | None = None, max_tokens: int | None = None
    ) -> Message:
        """Return the policy's next message: `content`, `tool_calls` if it called tools, and `id`, that of this call.

        Raises EpisodeOver when the episode has no call left, SessionError when the call is refused.
        """
        body: dict[str, Any] = {"messages": messages}
        body |= {name: value for name, value in (("tools", tools), ("max_tokens", max_tokens)) if value is not None}
        # Halves of characters, as in names of files that are no text, are replaced: no tokenizer takes them.
        content = json.dumps(body, ensure_ascii=False, allow_nan=False).encode(errors="replace")
        try:
            answer = await self._http.post(f"{self.url}/chat/completions", content=content)
        except httpx.HTTPError as error:
            raise SessionError(f"the session does not answer: {type(error).__name__}: {error}") from error
        if not answer.is_success:
            raise refusal(answer)
        completion = answer.json()
        return {**completion["choices"][0]["message"], "id": completion["id"]}

    async def close(self) -> None:
        await self._http.aclose()


def refusal(answer: httpx.Response) -> SessionError:
    """Return the error of an answer that is none."""
    try:
        error = answer.json()["error"]
        message, code = str(error["message"]), str(error["code"])
    except (ValueError, KeyError, TypeError):
        message, code = answer.text[:500], ""
    return EpisodeOver(message) if code in OVER else SessionError(message)
