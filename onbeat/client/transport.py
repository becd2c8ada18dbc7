"""HTTP to a broker: bounded retries, server-sent events, and errors with a remedy. It knows no route."""

import asyncio
import logging
import os
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self, TypeVar

import httpx
from pydantic import ValidationError

from onbeat.contracts.deadlines import STREAM_SILENCE_S
from onbeat.contracts.errors import ApiError, OnbeatError
from onbeat.contracts.records import Record
from onbeat.process.brokers import DEFAULT_URL, BrokerPlace, Source, describe_reading, find_broker, refuse_change
from onbeat.process.network import trust
from onbeat.process.records import OpenRecords

RecordT = TypeVar("RecordT", bound=Record)

logger = logging.getLogger(__name__)

RETRY_DELAYS_S = (0.2, 0.5, 1.0)  # before the second, third and fourth try
BUSY_STATUSES = frozenset({429, 502, 503, 504})  # temporary: too many requests, no broker behind a proxy, Redis is away


@dataclass(frozen=True)
class StreamMessage:
    """One server-sent event."""

    kind: str
    data: str
    id: str  # '' if the event has none


class BrokerUnreachable(OnbeatError):
    """The broker did not answer, after retries, or only with one of BUSY_STATUSES (then `status`, else None)."""

    def __init__(self, url: str, reason: str, status: int | None = None) -> None:
        super().__init__(
            f"the broker at {url} cannot do this now: {reason}"
            if status is not None
            else f"no answer from a broker at {url} ({reason}); start a local stack with `onbeat up`, "
            "or name another broker with --url or ONBEAT_URL"
        )
        self.url, self.reason, self.status = url, reason, status


class Transport:
    """A connection to one broker, by default the one that commands ask, too: ONBEAT_URL, else the stack of the data
    folder, else its records, else the default address; the last two can only be read.

    ONBEAT_API_KEY and ONBEAT_CA_FILE are for the broker in ONBEAT_URL alone. An invalid URL, key or CA raises
    ValueError; records that cannot be opened raise OnbeatError.
    """

    def __init__(
        self,
        base_url: str | BrokerPlace | None = None,
        api_key: str | None = None,
        timeout_s: float = 15.0,
        ca_file: str | Path | None = None,  # PEM authority of the broker's certificate; default: those of the system
    ) -> None:
        self._records: OpenRecords | None = None
        if base_url is None:
            base_url = find_broker()
            if base_url.source is Source.NAMED:
                api_key = api_key or os.environ.get("ONBEAT_API_KEY")
                ca_file = ca_file or os.environ.get("ONBEAT_CA_FILE")
            if reading := describe_reading(base_url):
                logger.warning("%s", reading)
            if base_url.source is Source.RECORDS:
                self._records = OpenRecords(base_url.folder)
                base_url = replace(base_url, url=self._records.url)
        self.place = BrokerPlace(Source.NAMED, base_url) if isinstance(base_url, str) else base_url
        self.base_url = self.place.url.rstrip("/")
        self.timeout_s = timeout_s
        is_here = host_of(self.base_url) in ("127.0.0.1", "localhost", "::1")
        if api_key and not is_here and self.base_url.startswith("http:"):
            logger.warning("the API key travels in the clear to %s; give the broker TLS and use https", self.base_url)
        self._http = httpx.AsyncClient(
            base_url=self.base_url,
            headers={"Authorization": f"Bearer {checked_key(api_key)}"} if api_key else {},
            timeout=timeout_s,
            trust_env=not is_here,  # no proxy between us and a broker on this machine
            verify=trust("ca_file", ca_file) if ca_file else True,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._http.aclose()
        if self._records is not None:
            await asyncio.to_thread(self._records.close)

    async def get(self, path: str, **params: Any) -> Any:
        """Return the JSON under a path; parameters that are None are left out."""
        given = {name: value for name, value in params.items() if value is not None}
        return await self.request("GET", path, params=given, is_repeatable=True)

    async def messages(self, path: str, after: str) -> AsyncGenerator[StreamMessage]:
        """Yield server-sent events after the one with this id, until the broker ends them.

        Raise ApiError for refusals, and BrokerUnreachable if the broker is busy or away or the connection breaks.
        """
        headers = {"Last-Event-ID": after, "Accept": "text/event-stream"}
        timeout = httpx.Timeout(self.timeout_s, read=STREAM_SILENCE_S)
        try:
            async with self._http.stream("GET", path, headers=headers, timeout=timeout) as response:
                if not response.is_success:
                    await response.aread()
                    self._parse(response)
                fields: dict[str, str] = {}
                async for line in lines_of(response.aiter_text()):
                    name, _, value = line.partition(": ")
                    if name:
                        fields[name] = value
                    elif "event" in fields:
                        yield StreamMessage(fields["event"], fields.get("data", ""), fields.get("id", ""))
                    if not line:
                        fields = {}
        except httpx.RequestError as error:
            raise BrokerUnreachable(self.base_url, str(error) or type(error).__name__) from error

    async def request(self, method: str, path: str, *, is_repeatable: bool = False, **options: Any) -> Any:
        """Make one call with bounded retries; a call that is not repeatable is only retried when nothing was sent.
        `timeout`: seconds that its answer may take; connecting always has `timeout_s`.

        Raise ApiError for refusals, BrokerUnreachable without an answer or while the broker is busy, and UnnamedBroker
        for a change where nothing may be changed.
        """
        if method != "GET":
            refuse_change(self.place)
        silence_s = options.pop("timeout", self.timeout_s)
        timeout = httpx.Timeout(silence_s, connect=self.timeout_s)
        for delay_s in (*RETRY_DELAYS_S, None):
            try:
                response = await self._http.request(method, path, timeout=timeout, **options)
            except httpx.ReadTimeout as error:  # it has waited long enough: a broker that answers so late is busy
                raise BrokerUnreachable(self.base_url, f"connected, but silent for {silence_s:g} s") from error
            except httpx.RequestError as error:
                is_timeout = isinstance(error, httpx.TimeoutException)  # the next try would take as long again
                if delay_s is None or is_timeout or not (is_repeatable or isinstance(error, httpx.ConnectError)):
                    raise BrokerUnreachable(self.base_url, str(error) or type(error).__name__) from error
            else:
                is_retried = is_repeatable and response.status_code in BUSY_STATUSES and delay_s is not None
                if not is_retried:
                    return self._parse(response)
            await asyncio.sleep(delay_s or 0)
        raise AssertionError("the last try returns or raises")

    def _parse(self, response: httpx.Response) -> Any:
        try:
            return parse_answer(response)
        except ApiError as error:
            if error.status in BUSY_STATUSES:
                raise BrokerUnreachable(self.base_url, str(error), error.status) from error
            raise


async def lines_of(chunks: AsyncIterator[str]) -> AsyncGenerator[str]:
    r"""Yield the lines that end with \n or \r\n. For `aiter_lines` of httpx a line also ends at U+2028 and the like."""
    rest = ""
    async for chunk in chunks:
        *lines, rest = (rest + chunk).split("\n")
        for line in lines:
            yield line.removesuffix("\r")


def host_of(base_url: str) -> str:
    """Return the host in the URL. Raise ValueError when it is not a URL of a broker."""
    try:
        url = httpx.URL(base_url)
    except httpx.InvalidURL as error:
        raise ValueError(f"{base_url!r} is not a URL: {error}") from error
    if url.scheme not in ("http", "https") or not url.host:
        raise ValueError(f"{base_url!r} is not a broker's URL; expected something like {DEFAULT_URL}")
    if url.port is not None and not 0 < url.port < 65536:
        raise ValueError(f"{base_url!r} is not a broker's URL: ports go from 1 to 65535")
    return url.host


def checked_name(name: str, expected: str, punctuation: str = "-") -> str:
    """Return a name for a path. Raise ValueError, with `what` it should be, where it could lead to another path."""
    if not name or not all(character.isalnum() or character in punctuation for character in name):
        raise ValueError(f"{name!r} is not {expected}")
    return name


def checked_key(api_key: str) -> str:
    """Return the key. Raise ValueError, without quoting it, when it cannot be a header."""
    if not all("!" <= character <= "~" for character in api_key):
        raise ValueError("the API key has a blank, a line end or a character beyond ASCII; copy it again")
    return api_key


def parse_answer(response: httpx.Response) -> Any:
    """Return the JSON of a success, or None without content. Raise ApiError with the problem document of a refusal."""
    if response.status_code == 204:
        return None
    try:
        body = response.json()
    except ValueError:
        body = None
    if response.is_success and body is not None:
        return body
    if not isinstance(body, dict) or "title" not in body:  # no problem document: from a proxy, or /v1/chat
        of_chat = body.get("error") if isinstance(body, dict) else None
        said = str(of_chat.get("message", "")) if isinstance(of_chat, dict) else ""
        text = said or response.text.strip()[:200] or "empty answer"
        raise ApiError(response.status_code, response.reason_phrase or "not a broker's answer", text)
    detail, errors, rows = body.get("detail"), body.get("errors"), body.get("rows")
    raise ApiError(
        response.status_code,
        str(body["title"] or response.reason_phrase),
        detail if isinstance(detail, str) else "",
        errors if isinstance(errors, list) else None,
        rows if isinstance(rows, list) else None,
    )


def part_of(answer: Any, name: str) -> Any:
    """Return a part of an answer. Raise OnbeatError without it: no broker of this version has answered."""
    if not isinstance(answer, dict) or name not in answer:
        raise OnbeatError(f"the answer has no {name!r}; is --url or ONBEAT_URL a broker of this version?")
    return answer[name]


def read_record(record: type[RecordT], answer: Any) -> RecordT:
    """Return an answer, or the JSON of a message, as a record. Raise OnbeatError when it is none; its cause names all
    wrong fields."""
    try:
        return record.model_validate_json(answer) if isinstance(answer, str) else record.model_validate(answer)
    except ValidationError as error:
        problem = error.errors()[0]
        field = ".".join(map(str, problem["loc"])) or "all of it"
        reason = f"the broker's answer is no {record.__name__} ({field}: {problem['msg']})"
        raise OnbeatError(f"{reason}; client and broker may be of different versions: use the broker's") from error
