"""The remote end of a file's transfer. Travels as text, so: Python 3.8, standard library, self-contained.

One comm a file, raw buffers, both directions pulled by offset: a broken transfer goes on where it was.
A file appears by rename, after its SHA-256 was compared; until then it is `.<name>.<key>.part`.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from typing import Any, Dict, Sequence, Union  # noqa: UP035 - Python 3.8 runs this

Json = Dict[str, Any]  # noqa: UP006
Buffer = Union[bytes, memoryview]  # noqa: UP007

TARGET = "kernel_tools.files.2"
_BLOCK_BYTES = 1 << 20

# What is under way, by the caller's key: a new comm for the same key ends the one whose line broke.
_under_way: dict[str, _Put | _Get] = {}


def register() -> Json:
    """Make this kernel answer transfers; again and again is fine."""
    from IPython.core.getipython import get_ipython

    get_ipython().kernel.comm_manager.register_target(TARGET, _opened)
    return {}


def _opened(comm: Any, message: Json) -> None:
    request = message["content"]["data"]
    key = request["key"]
    if key in _under_way:
        _under_way.pop(key).close()
    try:
        answer: _Put | _Get = _Put(request) if request["op"] == "put" else _Get(request)
        if message.get("buffers"):
            # A file of one chunk comes with the opening: one round trip.
            reply, _ = answer.step({"offset": 0, **request}, message["buffers"])
            comm.send(reply)
            comm.close()
            return
    except Exception as error:  # noqa: BLE001 - told to the caller
        _refuse(comm, error)
        return
    _under_way[key] = answer

    def received(message: Json) -> None:
        try:
            reply, buffers = answer.step(message["content"]["data"], message.get("buffers") or [])
        except Exception as error:  # noqa: BLE001 - told to the caller
            answer.close()
            _refuse(comm, error)
            return
        comm.send(reply, buffers=buffers)

    def closed(_message: Json) -> None:
        answer.close()
        if _under_way.get(key) is answer:
            del _under_way[key]

    comm.on_msg(received)
    comm.on_close(closed)
    comm.send(answer.ready)


def _refuse(comm: Any, error: Exception) -> None:
    text = f"{type(error).__name__}: {error}"
    comm.send({"error": text, "again": isinstance(error, OutOfOrderError)})
    comm.close()


class OutOfOrderError(Exception):
    """A chunk came twice, or one is missing before it: the line is at fault, and trying again helps."""


class _Put:
    """Writes chunks at their offsets; the last one brings the hash."""

    def __init__(self, request: Json) -> None:
        self.path = os.path.abspath(os.path.expanduser(request["path"]))
        folder, name = os.path.split(self.path)
        os.makedirs(folder, exist_ok=True)
        self.part = os.path.join(folder, f".{name}.{request['key']}.part")
        descriptor = os.open(self.part, os.O_RDWR | os.O_CREAT, request["mode"])
        self.file = os.fdopen(descriptor, "r+b")
        self.hash = hashlib.sha256()
        self.offset = 0
        resumed = () if "sha256" in request else iter(lambda: self.file.read(_BLOCK_BYTES), b"")
        for block in resumed:
            self.hash.update(block)
            self.offset += len(block)
        self.ready = {"offset": self.offset}

    def step(self, request: Json, buffers: Sequence[Buffer]) -> tuple[Json, list[Buffer]]:
        if request["offset"] != self.offset:
            raise OutOfOrderError("a chunk is out of order")
        chunk = buffers[0]
        self.file.seek(self.offset)
        self.file.write(chunk)
        self.hash.update(chunk)
        self.offset += len(chunk)
        wanted = request.get("sha256")
        if wanted is None:
            self.file.flush()
            return {"offset": self.offset}, []
        self.file.truncate(self.offset)
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()
        if self.hash.hexdigest() != wanted:
            os.unlink(self.part)
            return {"offset": self.offset, "damaged": True}, []
        os.replace(self.part, self.path)
        return {"offset": self.offset}, []

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.file.close()


class _Get:
    """Reads chunks of a file as it was when it was opened; what is appended later is not sent."""

    def __init__(self, request: Json) -> None:
        path = os.path.abspath(os.path.expanduser(request["path"]))
        if os.path.isdir(path):
            raise IsADirectoryError(f"{path} is a folder")
        self.file = open(path, "rb")  # noqa: SIM115 - open until the comm closes
        status = os.fstat(self.file.fileno())
        # Another identity than before the line broke: the caller starts at 0 again.
        identity = f"{status.st_dev}-{status.st_ino}"
        self.size = status.st_size
        self.offset = 0
        self.hash = hashlib.sha256()
        resumed = request.get("resume")
        if resumed and resumed["identity"] == identity and resumed["size"] <= self.size:
            self.size = resumed["size"]
            while self.offset < resumed["offset"]:
                block = self.file.read(min(_BLOCK_BYTES, resumed["offset"] - self.offset))
                if not block:
                    raise EOFError("the file became shorter")
                self.hash.update(block)
                self.offset += len(block)
        self.ready = {"offset": self.offset, "size": self.size, "identity": identity}

    def step(self, request: Json, _buffers: Sequence[Buffer]) -> tuple[Json, list[Buffer]]:
        if request["offset"] != self.offset:
            raise OutOfOrderError("a chunk is out of order")
        chunk = self.file.read(min(request["length"], self.size - self.offset))
        if not chunk and self.offset < self.size:
            raise EOFError("the file became shorter while it was read")
        self.hash.update(chunk)
        self.offset += len(chunk)
        reply: Json = {"offset": self.offset}
        if self.offset == self.size:
            reply["sha256"] = self.hash.hexdigest()
            self.close()
        return reply, [chunk]

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.file.close()
