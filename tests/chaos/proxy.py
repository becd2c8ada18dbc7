"""A TCP proxy on the loopback interface that can be told to be a bad network."""

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any

CHUNK_BYTES = 1 << 16


class Proxy:
    """Passes connections on from `host:port` (port 0: any) to 127.0.0.1:`target_port`, in a thread of its own.

    A change of `target_port` is for new connections; those that there are stay with their target.
    """

    def __init__(self, target_port: int, host: str = "127.0.0.1", port: int = 0) -> None:
        self.is_refusing = False  # new connections are closed at once
        self.delay_s = 0.0  # delay of each piece of data
        self.target_port = target_port
        self._writers: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self._thread.start()
        self._server: asyncio.Server = self._run(asyncio.start_server(self._serve, host, port))
        self.port: int = self._server.sockets[0].getsockname()[1]

    def drop(self) -> None:
        """Reset all connections."""
        self._run(self._drop())

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._server.close)
        self.drop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=10)

    def _run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(10)

    async def _drop(self) -> None:
        for writer in self._writers:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.is_refusing:
            writer.transport.abort()
            return
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self.target_port)
        except OSError:
            writer.transport.abort()
            return
        both = {writer, far_writer}
        self._writers |= both
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._pass_on(reader, far_writer))
                tasks.create_task(self._pass_on(far_reader, writer))
        finally:
            self._writers -= both

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Pass bytes on until one side closes, and then close the other."""
        try:
            while data := await reader.read(CHUNK_BYTES):
                if self.delay_s:
                    await asyncio.sleep(self.delay_s)
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        writer.close()
