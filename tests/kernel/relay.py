"""A TCP relay on loopback: adds latency, and cuts lines when told to."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable


class Relay:
    """Stands before a port. `delay_seconds` is added to each byte each way, whatever the throughput.

    `cut()` breaks every open line; `cut_after(n)` does so once, when n more bytes have gone upstream;
    `cut_at_next_answer()` when the server next says anything, so that a request was heard and its reply
    is lost.
    """

    def __init__(self, port: int, *, delay_seconds: float = 0.0) -> None:
        self.delay_seconds = delay_seconds
        self.port = 0
        self.connections = 0
        self._target = port
        self._left: int | None = None
        self._loses_answer = False
        self._loop = asyncio.new_event_loop()
        self._lines: set[asyncio.StreamWriter] = set()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="relay", daemon=True)
        self._thread.start()
        self._ready.wait(10)

    def cut(self) -> None:
        self._call(self._cut)

    def cut_after(self, upstream_bytes: int) -> None:
        self._left = upstream_bytes

    def cut_at_next_answer(self) -> None:
        self._loses_answer = True

    def close(self) -> None:
        self._call(self._server.close)
        self._call(self._cut)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def _call(self, function: Callable[[], None]) -> None:
        done = threading.Event()

        def act() -> None:
            function()
            # A transport that was aborted closes its socket in the loop's next turn.
            self._loop.call_soon(done.set)

        self._loop.call_soon_threadsafe(act)
        done.wait(10)

    def _cut(self) -> None:
        for writer in self._lines:
            writer.transport.abort()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)

        async def listen() -> None:
            self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
            self.port = self._server.sockets[0].getsockname()[1]
            self._ready.set()

        self._loop.run_until_complete(listen())
        self._loop.run_forever()
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))

    async def _accept(self, near: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            far, forth = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            back.transport.abort()
            return
        self._lines |= {back, forth}
        # Cancelled when the test is over; asyncio would print a trace of it.
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(self._pump(near, forth, upstream=True), self._pump(far, back))
        self._lines -= {back, forth}
        for writer in (back, forth):
            writer.close()

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, upstream: bool = False
    ) -> None:
        async def deliver(due: float, data: bytes) -> None:
            await asyncio.sleep(max(0.0, due - self._loop.time()))
            writer.write(data)

        queue: asyncio.Queue[tuple[float, bytes] | None] = asyncio.Queue()

        async def sender() -> None:
            while (item := await queue.get()) is not None:
                await deliver(*item)
                await writer.drain()

        sending = asyncio.create_task(sender())
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                if upstream and self._left is not None:
                    self._left -= len(data)
                    if self._left <= 0:
                        self._left = None
                        self._cut()
                        break
                if not upstream and self._loses_answer:
                    self._loses_answer = False
                    self._cut()
                    break
                queue.put_nowait((self._loop.time() + self.delay_seconds, data))
        queue.put_nowait(None)
        with contextlib.suppress(OSError):
            await sending
        with contextlib.suppress(OSError, RuntimeError):
            writer.write_eof()
