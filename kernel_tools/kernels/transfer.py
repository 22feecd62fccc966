"""The local end of a file's transfer: chunks in flight, resumed at an offset, verified by SHA-256.

`remote_files` is the other end. Works on any line that can send and receive comm messages; keeps no
more than `WINDOW` chunks in memory, and hides latency by having that many under way.
"""

from __future__ import annotations

import hashlib
import io
import os
import secrets
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final, Protocol

from kernel_tools.kernels.base import CellResult, Progress
from kernel_tools.kernels.cells import call_cell, module_source

if TYPE_CHECKING:
    from hashlib import _Hash

# jupyter_server's tornado limit is 10 MiB a message (measured: 9 passes, 10 resets the socket); 4 was
# promised, and 2 with three under way is as fast and holds less.
CHUNK_BYTES: Final = 2 * 1024 * 1024
WINDOW: Final = 3
TARGET: Final = "kernel_tools.files.2"


class RemoteFileError(Exception):
    """The remote could not read or write the file; trying again is no use."""


class DamagedError(ConnectionError):
    """What arrived is not what was sent; counts as a line that broke, so it is tried again."""


@dataclass(frozen=True, slots=True)
class CommMessage:
    """A comm message from the kernel: `comm_msg` or `comm_close`, its data and raw buffers."""

    kind: str
    comm_id: str
    data: Mapping[str, Any]
    buffers: Sequence[bytes | memoryview] = ()


class CommLine(Protocol):
    """What a line must be able to do for a transfer."""

    def execute(self, code: str, timeout_seconds: float) -> CellResult:
        """Run a cell."""

    def send_comm(
        self, kind: str, content: Mapping[str, Any], buffers: Sequence[bytes] = ()
    ) -> None:
        """Send `comm_open`, `comm_msg` or `comm_close` on the shell channel."""

    def receive_comm(self, timeout_seconds: float) -> CommMessage:
        """Return the next comm message of any comm. Raises what the line raises when it is late."""


@dataclass(slots=True)
class Upload:
    """One file on its way there; `run` may be called again on a new line and goes on."""

    source: Path | bytes = field(repr=False)  # may be a run's secrets
    remote_path: str
    mode: int
    answer_seconds: float
    key: str = field(default_factory=lambda: secrets.token_hex(6))

    def run(self, line: CommLine, on_progress: Progress) -> None:
        """Send what is not there yet.

        Raises:
            RemoteFileError: the remote cannot write it.
            DamagedError: the hash does not fit; nothing was put in place.
        """
        request = {"op": "put", "path": self.remote_path, "mode": self.mode, "key": self.key}
        with self._open() as stream:
            total = stream.seek(0, os.SEEK_END)
            stream.seek(0)
            if total < CHUNK_BYTES:
                self._send_at_once(line, request, stream.read(), on_progress)
                return
            comm = _Comm(line, request, self.answer_seconds)
            sent = int(comm.ready["offset"])
            digest = _hash_of_prefix(stream, sent)
            unanswered, last = 0, False
            while unanswered or not last:
                while not last and unanswered < WINDOW:
                    chunk = stream.read(CHUNK_BYTES)
                    digest.update(chunk)
                    # Until the end, wherever that is by now: a file may grow while it is sent.
                    last = len(chunk) < CHUNK_BYTES
                    step: dict[str, Any] = {"offset": sent}
                    if last:
                        step["sha256"] = digest.hexdigest()
                    comm.send(step, [chunk])
                    sent += len(chunk)
                    unanswered += 1
                reply = comm.receive().data
                unanswered -= 1
                _note(reply, max(total, sent), on_progress)
            comm.close()

    def _send_at_once(
        self, line: CommLine, request: Mapping[str, Any], data: bytes, on_progress: Progress
    ) -> None:
        digest = hashlib.sha256(data).hexdigest()
        comm = _Comm(line, {**request, "sha256": digest}, self.answer_seconds, [data])
        _note(comm.ready, len(data), on_progress)

    def _open(self) -> BinaryIO:
        return io.BytesIO(self.source) if isinstance(self.source, bytes) else self.source.open("rb")


@dataclass(slots=True)
class Download:
    """One file on its way here; `run` may be called again on a new line and goes on."""

    remote_path: str
    destination: Path
    answer_seconds: float
    key: str = field(default_factory=lambda: secrets.token_hex(6))
    _identity: str = ""
    _size: int = 0

    @property
    def part(self) -> Path:
        """Where the bytes wait until they are verified."""
        return self.destination.with_name(f".{self.destination.name}.{self.key}.part")

    def run(self, line: CommLine, on_progress: Progress) -> None:
        """Bring what is not here yet, then put the file in place.

        Raises:
            RemoteFileError: the remote cannot read it.
            DamagedError: the hash does not fit; nothing was put in place.
        """
        have = self.part.stat().st_size if self._identity and self.part.exists() else 0
        resume = {"identity": self._identity, "size": self._size, "offset": have}
        request = {"op": "get", "path": self.remote_path, "key": self.key}
        asked = {**request, "resume": resume if have else None}
        comm = _Comm(line, asked, self.answer_seconds)
        offset = int(comm.ready["offset"])
        self._identity, self._size = str(comm.ready["identity"]), int(comm.ready["size"])
        with self.part.open("r+b" if have else "w+b") as stream:
            digest = _hash_of_prefix(stream, offset)
            stream.truncate()
            theirs = self._receive(comm, stream, digest, offset, on_progress)
            stream.flush()
            os.fsync(stream.fileno())
        comm.close()
        if digest.hexdigest() != theirs:
            self.discard()
            raise DamagedError("the download arrived damaged")
        self.part.replace(self.destination)

    def discard(self) -> None:
        """Leave nothing behind; the next `run` starts at the beginning."""
        self._identity = ""
        self.part.unlink(missing_ok=True)

    def _receive(
        self, comm: _Comm, stream: BinaryIO, digest: _Hash, offset: int, on_progress: Progress
    ) -> str:
        asked, unanswered, all_asked = offset, 0, False
        while True:
            while not all_asked and unanswered < WINDOW:
                comm.send({"offset": asked, "length": CHUNK_BYTES})
                asked = min(asked + CHUNK_BYTES, self._size)
                all_asked = asked >= self._size
                unanswered += 1
            message = comm.receive()
            unanswered -= 1
            if len(message.buffers) != 1:
                raise DamagedError("a chunk came without its bytes")
            chunk = message.buffers[0]
            offset += len(chunk)
            if offset != int(message.data["offset"]):
                raise DamagedError("a chunk came twice or was left out")
            stream.write(chunk)
            digest.update(chunk)
            on_progress(offset, self._size)
            if "sha256" in message.data:
                return str(message.data["sha256"])


class _Comm:
    """One comm from open to close; `ready` is the remote's first answer."""

    def __init__(
        self,
        line: CommLine,
        request: Mapping[str, Any],
        answer_seconds: float,
        buffers: Sequence[bytes] = (),
    ) -> None:
        self._line = line
        self._answer_seconds = answer_seconds
        self._id = ""
        first = self._opened(request, buffers)
        if first.kind == "comm_close":
            # The kernel has never heard of the target: new, or restarted.
            line.execute(register_cell(), answer_seconds).check()
            first = self._opened(request, buffers)
        self.ready = self._checked(first).data

    def send(self, data: Mapping[str, Any], buffers: Sequence[bytes] = ()) -> None:
        self._line.send_comm("comm_msg", {"comm_id": self._id, "data": dict(data)}, buffers)

    def receive(self) -> CommMessage:
        return self._checked(self._next())

    def close(self) -> None:
        self._line.send_comm("comm_close", {"comm_id": self._id, "data": {}})

    def _opened(self, request: Mapping[str, Any], buffers: Sequence[bytes]) -> CommMessage:
        self._id = uuid.uuid4().hex
        content = {"comm_id": self._id, "target_name": TARGET, "data": dict(request)}
        self._line.send_comm("comm_open", content, buffers)
        return self._next()

    def _next(self) -> CommMessage:
        while True:
            message = self._line.receive_comm(self._answer_seconds)
            if message.comm_id == self._id:
                return message

    @staticmethod
    def _checked(message: CommMessage) -> CommMessage:
        if message.data.get("again"):
            raise DamagedError(str(message.data["error"]))
        if "error" in message.data:
            raise RemoteFileError(str(message.data["error"]))
        if message.kind == "comm_close":
            raise DamagedError("the kernel closed the transfer")
        return message


def _note(reply: Mapping[str, Any], total: int, on_progress: Progress) -> None:
    if reply.get("damaged"):
        raise DamagedError("the upload arrived damaged")
    on_progress(int(reply["offset"]), total)


def register_cell() -> str:
    """Return the cell that makes a kernel answer transfers."""
    call = {
        "module": "_kernel_tools_remote_files_2",
        "source": module_source("remote_files"),
        "function": "register",
        "arguments": {},
    }
    return call_cell("", call)


def _hash_of_prefix(stream: BinaryIO, length: int) -> _Hash:
    """Read `length` bytes from the start into a new hash; leaves the stream behind them."""
    stream.seek(0)
    digest = hashlib.sha256()
    left = length
    while left:
        block = stream.read(min(1 << 20, left))
        if not block:
            raise DamagedError("the file became shorter than what was sent")
        digest.update(block)
        left -= len(block)
    return digest
