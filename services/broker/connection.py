"""A client's connection with timeouts: uvicorn itself waits for a request's headers for ever."""

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol


def connection_class(timeout_s: float) -> type[asyncio.Protocol]:
    """Return a class for uvicorn's `http`. h11 limits a request's headers before it asks us; httptools does not.

    A connection ends when the headers of its next request, or the rest of a body that was not read, have not arrived
    `timeout_s` after the previous response. While a request is being answered, its body has its own deadline:
    `BodyLimit`. A connection also ends when the client takes nothing from a full buffer of responses for `timeout_s`.
    """

    class Connection(H11Protocol):
        _hang_up: asyncio.TimerHandle | None = None
        _give_up: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._expect_request()

        def connection_lost(self, exc: Exception | None) -> None:
            for timer in (self._hang_up, self._give_up):
                if timer is not None:
                    timer.cancel()
            super().connection_lost(exc)

        def on_response_complete(self) -> None:
            super().on_response_complete()
            self._expect_request()

        def pause_writing(self) -> None:
            super().pause_writing()
            self._give_up = self.loop.call_later(timeout_s, self.transport.abort)

        def resume_writing(self) -> None:
            if self._give_up is not None:
                self._give_up.cancel()
            super().resume_writing()

        def _expect_request(self) -> None:
            if self._hang_up is not None:
                self._hang_up.cancel()
            self._hang_up = self.loop.call_later(timeout_s, self._end_if_silent)

        def _end_if_silent(self) -> None:
            cycle: Any = self.cycle
            if cycle is None or cycle.response_complete:
                self.transport.close()

    return Connection
