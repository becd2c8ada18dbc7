"""A reward behind HTTP: one POST scores a group. Its address comes from the operator's settings, never from a job.

-> {"service": "judge", "options": {}, "context": {"question": ..., "answer": ...}, "responses": ["4", "5"]}
<- {"scores": [1.0, {"reward": 0.5, "format": 1.0}]}       one per response, in order: a number, or with its parts;
                                                            null: no opinion
"""

import asyncio
import json
import math
import re
from collections.abc import Sequence
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Annotated, Any
from urllib.parse import urlsplit

import httpx
from pydantic import BaseModel, Field, ValidationError

from onbeat.process.children import MAX_ANSWER_BYTES
from onbeat.process.network import is_loopback
from services.rollout.rewards.outcome import UNREACHABLE, Number, RewardRefused, RewardRequest, RewardUnavailable, Score
from services.rollout.settings import RewardServiceSettings

CONNECT_S = 5.0
MAX_RETRY_AFTER_S = 60.0  # a longer Retry-After is cut to this
PAST_PROXIES = dict.fromkeys(("all://", "http://", "https://"))  # services on this machine need no proxy
BUSY_STATUSES = {408, 425, 429}  # try again later: they say nothing about the request


# An error for each of 300,000 wrong numbers would take a gigabyte.
Parts = Annotated[dict[str, Number | None], Field(fail_fast=True)]


class ServiceAnswer(BaseModel):
    scores: Annotated[list[Number | Parts | None], Field(fail_fast=True)]


class RewardService:
    """A service over HTTP. All responses of a call are scored together, within `timeout_s` for each of them."""

    def __init__(self, name: str, settings: RewardServiceSettings) -> None:
        self._name, self._settings = name, settings
        self._client = httpx.AsyncClient(
            timeout=httpx.Timeout(None, connect=CONNECT_S),
            limits=httpx.Limits(max_connections=None),
            follow_redirects=False,
            mounts=PAST_PROXIES if is_loopback(urlsplit(settings.url).hostname or "") else None,
        )

    async def score(
        self, request: RewardRequest, indexes: Sequence[int], scores: dict[int, Score], deadline: float
    ) -> None:
        """Try once; as `RewardPool.score`, with the deadline on the event loop's clock."""
        options = {name: value for name, value in request.options.items() if name != "service"}
        responses = [request.responses[index] for index in indexes]
        body = {"service": self._name, "options": options, "context": request.context, "responses": responses}
        content = await self._post(body, len(indexes), request.timeout_s, deadline)
        scores.update(zip(indexes, read_scores(self._name, content, len(indexes)), strict=True))

    async def close(self) -> None:
        await self._client.aclose()

    async def _post(self, body: dict[str, Any], num_responses: int, timeout_s: float, deadline: float) -> bytes:
        """Return the answer's body, within `timeout_s` for each response. Raises RewardUnavailable, or RewardRefused
        when the service refuses the request."""
        limit_s = min(timeout_s * num_responses, deadline - asyncio.get_running_loop().time())
        if limit_s <= 0:
            raise self._no_time()
        try:
            async with (
                asyncio.timeout(limit_s),
                self._client.stream(
                    "POST", self._settings.url, content=json.dumps(body).encode(), headers=self._headers()
                ) as answer,
            ):
                self._check_status(answer)
                return await self._read_body(answer)
        except TimeoutError as error:
            message = (
                f"service {self._name} took longer than {limit_s:.3g} s for {num_responses} responses ("
                "reward.timeout_s for each, at most what rollout.group_deadline_s leaves)"
            )
            raise RewardUnavailable("timeout", message) from error
        except httpx.HTTPError as error:
            message = f"service {self._name} cannot be reached: {type(error).__name__}: {error}"
            raise RewardUnavailable(UNREACHABLE, message) from error

    def _no_time(self) -> RewardUnavailable:
        """Return the error of a group that has no time left, which is not the service's failure."""
        message = f"the group has no time left for service {self._name}; raise rollout.group_deadline_s"
        return RewardUnavailable("timeout", message)

    def _headers(self) -> dict[bytes, bytes]:
        headers = {b"Content-Type": b"application/json", b"Accept-Encoding": b"identity"}
        path = self._settings.bearer_token_file
        if path is not None:
            where = f"bearer_token_file of service {self._name} in ONBEAT_REWARD_SERVICES"
            try:
                token = path.read_bytes().strip()  # read each time, because tokens are renewed
            except OSError as error:
                raise RewardUnavailable(UNREACHABLE, f"{where}: {error}") from error
            if not re.fullmatch(rb"[!-~]+", token):  # httpx would quote it
                message = f"{where}: {path} has to hold one token, of visible ASCII characters without white space"
                raise RewardUnavailable(UNREACHABLE, message)
            headers[b"Authorization"] = b"Bearer " + token
        return headers

    def _check_status(self, answer: httpx.Response) -> None:
        status = f"service {self._name} answers {answer.status_code} {answer.reason_phrase}"
        if answer.is_success:
            return
        if answer.is_redirect:
            message = f"{status}: redirects are not followed, correct its url in ONBEAT_REWARD_SERVICES"
            raise RewardRefused("refused", message, retry_after_s=math.inf)
        if answer.is_client_error and answer.status_code not in BUSY_STATUSES:
            remedy = ": set its bearer_token_file in ONBEAT_REWARD_SERVICES" if answer.status_code == 401 else ""
            raise RewardRefused("refused", status + remedy, retry_after_s=math.inf)
        raise RewardUnavailable(UNREACHABLE, status, retry_after_s=read_retry_after(answer))

    async def _read_body(self, answer: httpx.Response) -> bytes:
        content = bytearray()
        async for chunk in answer.aiter_raw():
            content += chunk
            if len(content) > MAX_ANSWER_BYTES:
                message = f"service {self._name} sends more than {MAX_ANSWER_BYTES} bytes"
                raise RewardRefused("invalid", message)
        return bytes(content)


def read_scores(service: str, content: bytes, num_responses: int) -> list[Score]:
    """Parse one score per response. Raises RewardRefused for anything else."""
    try:
        answer = ServiceAnswer.model_validate_json(content)
    except ValidationError as error:
        errors = error.errors(include_url=False, include_input=False)
        deepest = max(errors, key=lambda details: len(details["loc"]))  # the error inside a mapping
        where = ".".join(map(str, ("answer", *deepest["loc"])))
        raise RewardRefused("invalid", f"service {service}: {where}: {deepest['msg']}") from error
    if len(answer.scores) != num_responses:
        message = f"service {service} gives {len(answer.scores)} scores for {num_responses} responses"
        raise RewardRefused("invalid", message)
    scores = []
    for score in answer.scores:
        parts = dict(score) if isinstance(score, dict) else {"reward": score}
        if "reward" not in parts:
            raise RewardRefused("invalid", f"a score of service {service} has no 'reward', only {sorted(parts)}")
        reward = parts.pop("reward")
        scores.append(Score(reward, {name: value for name, value in parts.items() if value is not None}))
    return scores


def read_retry_after(answer: httpx.Response) -> float:
    """Return the seconds of the header, which holds seconds or a date; 0 when it is absent or nonsense."""
    text = answer.headers.get("Retry-After", "")
    try:
        seconds = float(text) if text.isdecimal() else (parsedate_to_datetime(text) - datetime.now(UTC)).total_seconds()
    except (ValueError, TypeError, OverflowError):
        return 0.0
    return min(max(seconds, 0.0), MAX_RETRY_AFTER_S)
