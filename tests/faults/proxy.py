"""A proxy on loopback before a real Jupyter server: it forwards all, except where a `Schedule` says what
goes wrong. Deterministic: a fault is due at the n-th request or frame of its kind, never at a time.
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

HTML = b"<!doctype html><title>Sign in</title><p>Please sign in.</p>"
# What stands for the server's 10 MiB limit on a frame, so that it costs no 10 MiB to reach.
DEFAULT_FRAME_LIMIT = 10 * 1024 * 1024


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong.

    Attributes:
        kind: one of `HTTP_FAULTS`, `OPENING_FAULTS`, `FRAME_FAULTS`.
        at: at the how many-th request, opening, or frame (counted over the proxy's life, from 0).
        count: for how many in a row.
        status: the answer of `status`.
        seconds: of a delay.
    """

    kind: str
    at: int
    count: int = 1
    status: int = 502
    seconds: float = 0.0


# Before or instead of the answer to an HTTP request.
HTTP_FAULTS = (
    "status", "login page", "http reset", "reply lost", "http half-open", "reply late", "trickle",
)  # fmt: skip
# When a WebSocket is opened.
OPENING_FAULTS = ("opening refused", "opened then reset", "opening half-open")
# To a frame from the client (up) or from the server (down).
FRAME_FAULTS = (
    "drop up", "drop down", "cut up", "cut down", "half-open up", "half-open down", "late down",
    "twice up", "twice down", "swapped up", "bit flip up", "bit flip down",
    "kernel killed", "kernel restarted", "second client",
)  # fmt: skip
EVERY_KIND = (*HTTP_FAULTS, *OPENING_FAULTS, *FRAME_FAULTS)


@dataclass(frozen=True)
class Schedule:
    """What goes wrong in one run of the test, by seed."""

    seed: int
    faults: tuple[Fault, ...]
    expires_at_request: int | None = None
    frame_limit: int = DEFAULT_FRAME_LIMIT

    @classmethod
    def of_seed(cls, seed: int) -> Schedule:
        """Draw three to eight faults; one seed in ten has a URL that expires as well."""
        rng = random.Random(f"kernel_tools {seed}")
        faults = []
        for kind in rng.choices(EVERY_KIND, k=rng.randint(3, 8)):
            if kind in HTTP_FAULTS:
                at, count = rng.randrange(14), rng.choice((1, 1, 2, 4))
            elif kind in OPENING_FAULTS:
                at, count = rng.randrange(6), rng.choice((1, 1, 2))
            else:
                at, count = int(rng.triangular(0, 120, 12)), 1
            status = rng.choice((429, 500, 502, 502, 503, 504, 404))
            # 404 for good means that the kernel is gone; a burst of them is a proxy that woke up.
            faults.append(
                Fault(kind, at, 1 if status == 404 else count, status, rng.uniform(0.05, 1.2))
            )
        expires = rng.randrange(2, 12) if rng.random() < 0.1 else None
        return cls(seed, tuple(faults), expires)


@dataclass
class Counters:
    """What came by so far."""

    requests: int = 0
    openings: int = 0
    frames: int = 0
    happened: list[str] = field(default_factory=list)
    methods: list[tuple[str, str]] = field(default_factory=list)


class FaultProxy:
    """`schedule` may be replaced at any time; `on_kernel(what, kernel_id)` carries out what a line cannot.

    Args:
        port: the server's.
        on_kernel: called in a thread with `killed`, `restarted` or `second client`.
    """

    def __init__(self, port: int, on_kernel: Callable[[str, str], None]) -> None:
        self.schedule = Schedule(0, ())
        self.counters = Counters()
        self.expired = False
        self.refuses_start: int | None = (
            None  # the status that a request for a kernel is answered with
        )
        self.port = 0
        self._target = port
        self._on_kernel = on_kernel
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task] = set()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fault proxy", daemon=True)
        self._thread.start()
        assert self._ready.wait(10)

    def start(self, schedule: Schedule) -> None:
        """Begin a schedule: counters at zero, nothing expired."""
        self.schedule, self.counters, self.expired = schedule, Counters(), False

    def heal(self) -> None:
        """Forward everything from now on; lines that are half-open stay so."""
        self.schedule = dataclasses.replace(self.schedule, faults=(), expires_at_request=None)
        self.expired = False

    def close(self) -> None:
        async def stop() -> None:
            self._server.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(stop(), self._loop).result(20)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    # What is due ------------------------------------------------------------------------------

    def _due(self, kinds: tuple[str, ...], number: int) -> Fault | None:
        for fault in self.schedule.faults:
            if fault.kind in kinds and fault.at <= number < fault.at + fault.count:
                self.counters.happened.append(f"{fault.kind} at {number}")
                return fault
        return None

    # HTTP -------------------------------------------------------------------------------------

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)

        async def listen() -> None:
            self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
            self.port = self._server.sockets[0].getsockname()[1]
            self._ready.set()

        self._loop.run_until_complete(listen())
        self._loop.run_forever()

    async def _accept(self, near: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await self._serve(near, back)
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass
        except asyncio.CancelledError:
            pass  # the test is over; asyncio would print a trace of it
        finally:
            self._tasks.discard(task)
            back.transport.abort()

    async def _serve(self, near: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
        head = await near.readuntil(b"\r\n\r\n")
        method, path, _ = head.split(b"\r\n", 1)[0].decode("latin-1").split(" ", 2)
        body = await near.readexactly(_length(head))
        self.counters.methods.append((method, path))
        request = self.counters.requests
        self.counters.requests += 1
        limit = self.schedule.expires_at_request
        if limit is not None and request >= limit:
            self.expired = True
        if self.expired:
            await _answer(back, 403 if request % 2 else 401, b'{"message": "Forbidden"}')
            await near.read()
            return
        starts = method == "POST" and path.split("?")[0].endswith(("/sessions", "/kernels"))
        if starts and self.refuses_start is not None:
            await _answer(back, self.refuses_start, b'{"message": "No"}')
            await near.read()
            return
        if b"upgrade: websocket" in head.lower():
            await self._websocket(head, near, back, path)
            return
        fault = self._due(HTTP_FAULTS, request)
        kind = "" if fault is None else fault.kind
        if kind == "status":
            assert fault is not None
            await _answer(back, fault.status, b'{"message": "from the proxy"}')
            await near.read()
        elif kind == "login page":
            await _answer(back, 200, HTML, "text/html")
            await near.read()
        elif kind == "http half-open":
            await near.read()  # until the client gives up
        elif kind != "http reset":
            reply = await self._fetch(head, body)
            if kind == "reply lost":
                return
            if kind == "reply late":
                assert fault is not None
                await asyncio.sleep(fault.seconds)
            if kind == "trickle":
                for byte in range(len(reply)):
                    back.write(reply[byte : byte + 1])
                    await back.drain()
                    await asyncio.sleep(0.01)
            else:
                back.write(reply)
            await back.drain()
            back.write_eof()
            await near.read()

    async def _fetch(self, head: bytes, body: bytes) -> bytes:
        far, forth = await asyncio.open_connection("127.0.0.1", self._target)
        try:
            forth.write(_with_close(head) + body)
            await forth.drain()
            return await far.read()
        finally:
            forth.close()

    # WebSockets -------------------------------------------------------------------------------

    async def _websocket(
        self, head: bytes, near: asyncio.StreamReader, back: asyncio.StreamWriter, path: str
    ) -> None:
        opening = self.counters.openings
        self.counters.openings += 1
        fault = self._due(OPENING_FAULTS, opening)
        kind = "" if fault is None else fault.kind
        if kind == "opening refused":
            await _answer(back, 502, b"bad gateway")
            return
        if kind == "opening half-open":
            await near.read()
            return
        far, forth = await asyncio.open_connection("127.0.0.1", self._target)
        try:
            forth.write(head)
            answer = await far.readuntil(b"\r\n\r\n")
            back.write(answer)
            await back.drain()
            if kind == "opened then reset" or b" 101 " not in answer.split(b"\r\n", 1)[0]:
                return
            line = _Line(self, path.split("/kernels/", 1)[1].split("/", 1)[0])
            pumps = [
                asyncio.ensure_future(line.pump(near, forth, up=True)),
                asyncio.ensure_future(line.pump(far, back, up=False)),
            ]
            try:
                await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for pump in pumps:
                    pump.cancel()
                await asyncio.gather(*pumps, return_exceptions=True)
        finally:
            forth.transport.abort()


class _Line:
    """One WebSocket, forwarded frame by frame."""

    def __init__(self, proxy: FaultProxy, kernel_id: str) -> None:
        self._proxy = proxy
        self._kernel_id = kernel_id
        self._silent = {True: False, False: False}
        self._held: bytes | None = None

    async def pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, up: bool
    ) -> None:
        while True:
            frame = await _read_frame(reader)
            if frame.is_control:
                if not self._silent[up]:
                    writer.write(frame.raw)
                    await writer.drain()
                continue
            if up and len(frame.raw) > self._proxy.schedule.frame_limit:
                return
            number = self._proxy.counters.frames
            self._proxy.counters.frames += 1
            fault = self._proxy._due(FRAME_FAULTS, number)
            if not await self._forward(frame, writer, fault, up=up):
                return

    async def _forward(
        self, frame: _Frame, writer: asyncio.StreamWriter, fault: Fault | None, *, up: bool
    ) -> bool:
        """Return whether the line lives on."""
        kind, _, way = ("", "", "") if fault is None else fault.kind.rpartition(" ")
        hits = fault is not None and way == ("up" if up else "down")
        if fault is not None and fault.kind in {
            "kernel killed",
            "kernel restarted",
            "second client",
        }:
            what = fault.kind.removeprefix("kernel ")
            await asyncio.to_thread(self._proxy._on_kernel, what, self._kernel_id)
        if not hits:
            # A fault of the other direction is due at the next frame that goes there.
            if fault is not None and way in {"up", "down"}:
                self._postpone(fault)
            kind = ""
        if kind == "half-open":
            self._silent = {True: True, False: True}
        if self._silent[up]:
            return True
        raw = frame.raw
        if kind == "drop":
            return False
        if kind == "cut":
            writer.write(raw[: len(raw) // 2])
            await writer.drain()
            return False
        if kind == "late":
            assert fault is not None
            await asyncio.sleep(fault.seconds)
        if kind == "bit flip":
            raw = frame.flipped()
        if kind == "swapped" and self._held is None:
            self._held = raw
            return True
        writer.write(raw + raw if kind == "twice" else raw)
        if self._held is not None and up:
            writer.write(self._held)
            self._held = None
        await writer.drain()
        return True

    def _postpone(self, fault: Fault) -> None:
        schedule = self._proxy.schedule
        later = dataclasses.replace(fault, at=self._proxy.counters.frames)
        faults = tuple(later if one is fault else one for one in schedule.faults)
        self._proxy.schedule = dataclasses.replace(schedule, faults=faults)
        self._proxy.counters.happened.pop()


@dataclass(frozen=True)
class _Frame:
    raw: bytes
    header: int
    opcode: int

    @property
    def is_control(self) -> bool:
        return self.opcode >= 8

    def flipped(self) -> bytes:
        """One bit of a file's bytes; the rest of a message is the protocol's, which no line flips alone."""
        if self.opcode != 2 or len(self.raw) - self.header < 4096:
            return self.raw
        changed = bytearray(self.raw)
        changed[-1] ^= 4
        return bytes(changed)


async def _read_frame(reader: asyncio.StreamReader) -> _Frame:
    head = await reader.readexactly(2)
    length = head[1] & 0x7F
    if length == 126:
        head += await reader.readexactly(2)
        (length,) = struct.unpack("!H", head[2:])
    elif length == 127:
        head += await reader.readexactly(8)
        (length,) = struct.unpack("!Q", head[2:])
    if head[1] & 0x80:
        head += await reader.readexactly(4)
    return _Frame(head + await reader.readexactly(length), len(head), head[0] & 0x0F)


async def _answer(
    back: asyncio.StreamWriter, status: int, body: bytes, kind: str = "application/json"
) -> None:
    back.write(
        f"HTTP/1.1 {status} From the proxy\r\nContent-Type: {kind}\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode()
        + body
    )
    await back.drain()
    back.write_eof()
    await asyncio.sleep(0)


def _length(head: bytes) -> int:
    for line in head.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.strip().lower() == b"content-length":
            return int(value)
    return 0


def _with_close(head: bytes) -> bytes:
    lines = [
        line for line in head.rstrip().split(b"\r\n") if not line.lower().startswith(b"connection:")
    ]
    return b"\r\n".join([*lines, b"Connection: close"]) + b"\r\n\r\n"
