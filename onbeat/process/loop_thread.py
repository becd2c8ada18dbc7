"""An event loop in its own thread, for callers without a loop and for work beside a thread that computes."""

import asyncio
import concurrent.futures
import logging
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

R = TypeVar("R")

CLOSE_S = 10.0  # time for the last coroutine, and for others that ignore that they are cancelled

logger = logging.getLogger(__name__)


class LoopThread:
    """One event loop in a background thread; `run` blocks the caller until a coroutine is done there.

    owner: what the loop belongs to, in one word, for messages and the thread's name.
    """

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"onbeat-{owner}", daemon=True)
        self._thread.start()
        # No coroutine may reach the loop after the last one. Reentrant: the garbage collector may end streams anywhere.
        self._lock = threading.RLock()
        self.is_closed = False

    def run(self, coroutine: Coroutine[Any, Any, R], timeout_s: float | None = 120.0) -> R:
        """Run the coroutine and return its result. `timeout_s`: None to wait for as long as it takes.

        Raise TimeoutError after `timeout_s`, and RuntimeError when the thread is closed, also meanwhile.
        """
        future = self._submit(coroutine)
        try:
            return future.result(timeout_s)
        except concurrent.futures.CancelledError as error:
            raise RuntimeError(f"this {self._owner} was closed by another thread before the answer came") from error
        except (TimeoutError, KeyboardInterrupt):
            future.cancel()
            raise

    def start(self, coroutine: Coroutine[Any, Any, Any]) -> concurrent.futures.Future[Any]:
        """Start the coroutine, and do not wait for it; to cancel it, cancel the future. Its failure is logged.

        Raise RuntimeError when the thread is closed.
        """
        future = self._submit(coroutine)
        future.add_done_callback(log_failure)
        return future

    def call_soon(self, function: Callable[[], object]) -> None:
        """Call the function in the loop's thread. This takes no lock, so that a handler of signals may do it."""
        self._loop.call_soon_threadsafe(function)

    def _submit(self, coroutine: Coroutine[Any, Any, R]) -> concurrent.futures.Future[R]:
        with self._lock:
            if self.is_closed:
                coroutine.close()
                raise RuntimeError(f"this {self._owner} is closed; make a new one")
            return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def close(self, last: Coroutine[Any, Any, None]) -> None:
        """Cancel all running coroutines, so that no caller waits for ever, and run `last`. Safe to repeat.

        Raise TimeoutError when they do not end within CLOSE_S.
        """
        with self._lock:
            if self.is_closed:
                last.close()
                return
            self.is_closed = True
            ending = asyncio.run_coroutine_threadsafe(cancel_others_and(last), self._loop)
        try:
            ending.result(CLOSE_S)
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()


def log_failure(future: concurrent.futures.Future[Any]) -> None:
    if not future.cancelled() and (error := future.exception()) is not None:
        logger.error("a background task failed", exc_info=error)


async def cancel_others_and(last: Coroutine[Any, Any, None]) -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    await last
