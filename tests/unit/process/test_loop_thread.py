"""The loop of a thread, as the trainer uses it; tests/unit/client has the blocking client's promises."""

import asyncio
import contextlib
import functools
import signal
import threading
from collections.abc import Iterator

import pytest

from onbeat.process.loop_thread import LoopThread
from tests.waiting import wait_until


@pytest.fixture
def background() -> Iterator[LoopThread]:
    background = LoopThread("test")
    yield background
    background.close(asyncio.sleep(0))


def test_call_that_takes_too_long_is_cancelled(background: LoopThread) -> None:
    is_cancelled = threading.Event()

    async def wait_for_ever() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            is_cancelled.set()

    with pytest.raises(TimeoutError):
        background.run(wait_for_ever(), timeout_s=0.1)
    assert is_cancelled.wait(10)


def test_failure_that_no_caller_waits_for_is_logged(background: LoopThread, caplog: pytest.LogCaptureFixture) -> None:
    async def fail() -> None:
        raise KeyError("no such field")

    background.start(fail())
    background.start(asyncio.sleep(3600)).cancel()  # no failure
    background.run(asyncio.sleep(0.1))
    (record,) = caplog.records
    assert record.exc_info is not None
    assert repr(record.exc_info[1]) == "KeyError('no such field')"


def test_close_does_not_wait_for_a_coroutine_that_ignores_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onbeat.process.loop_thread.CLOSE_S", 0.2)
    thread, is_there = LoopThread("client"), threading.Event()

    async def stay() -> None:
        is_there.set()
        while True:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(3600)

    thread.start(stay())
    assert is_there.wait(10)
    with pytest.raises(TimeoutError):
        thread.close(asyncio.sleep(0))
    assert thread.is_closed


def test_handler_of_signals_waits_for_no_lock_of_its_thread(background: LoopThread) -> None:
    lock, taken = threading.Lock(), []  # as that of an event, which a thread has for a moment whenever it waits for it
    take = functools.partial(lock.acquire, timeout=10)
    before = signal.signal(signal.SIGUSR1, lambda *_: background.call_soon(lambda: taken.append(take())))
    try:
        with lock:
            signal.raise_signal(signal.SIGUSR1)
            assert taken == []
    finally:
        signal.signal(signal.SIGUSR1, before)
    wait_until(lambda: taken == [True], "the loop's thread has it")
