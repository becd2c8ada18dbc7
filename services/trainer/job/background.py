"""An event loop in a thread, so that heartbeats and weight pulls continue while the main thread computes."""

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Background:
    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="background", daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T], timeout_s: float = 120.0) -> T:
        """Run on the loop and wait for the result. Raises TimeoutError after `timeout_s`."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        try:
            return future.result(timeout_s)
        except TimeoutError:
            future.cancel()
            raise

    def start(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Future[Any]:
        """Start a task that runs until it is cancelled."""

        async def create() -> asyncio.Task[Any]:
            return asyncio.ensure_future(coroutine)

        return self.run(create())

    def cancel(self, task: asyncio.Future[Any]) -> None:
        self.loop.call_soon_threadsafe(task.cancel)

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(timeout=5)
