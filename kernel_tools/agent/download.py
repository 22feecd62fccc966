"""Download one object by its presigned URL: several ranges at a time, resumed to the byte, hashed meanwhile.

No message holds the URL. What is kept of an interrupted download is a `PartFile`, which the next call
goes on from; what arrived can be read from its start while the rest still comes.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Callable, Optional, Tuple, TypeVar

from .disk import FULL_ERRORS
from .errors import DiskFullError, InputError, StopRequestedError
from .partfile import PartFile, discard
from .presigned import LINE_ERRORS, MOST_FAILURES, Line, RefusedError, describe_failure, wait_after
from .readalong import ReadAlong, Reader

if TYPE_CHECKING:
    from hashlib import _Hash

# What a broken connection may cost, and a thread holds.
_READ_BYTES = 128 << 10
# Parts on disk at a time for each connection, where what is read is kept elsewhere: one arrives, one is read.
_SLOTS = 2
# A connection that brought so much before it broke was worth it: no pause before the next.
_PROGRESS_BYTES = 64 << 10
_STAGE_AGAIN = "launch again"
_T = TypeVar("_T")


class DamagedPartError(Exception):
    """What an interrupted download left is not the beginning of what was staged."""


class _ReplacedError(Exception):
    """The object is not the one that the partial file came from."""


class NoRangesError(Exception):
    """The store sends the whole object, whatever range is asked for."""


@dataclass(frozen=True)
class Begun:
    """The beginning of an object that is kept elsewhere: its length, and what was hashed of it.

    With it the part file is a few parts long; what is read must be kept elsewhere too before it is released.
    """

    size_bytes: int
    digest: _Hash


class _DiskError(Exception):
    """This machine's disk does not take what came."""


class Download:
    """An object on its way here. Threads bring it; `stream` reads it along, `finish` waits for its hash.

    Args:
        url: presigned for GET.
        part: path of the partial file.
        name: what to call the object in messages.
        size_bytes: its size; None where it is not known.
        sha256: its hash; None where it is not known.
        begun: where its beginning is kept elsewhere, and what follows will be; size and hash are known then.
        connections: how many at a time.
        check: called often, with the bytes that are here; may raise to end it.
        wait: sleeps between tries.
    """

    def __init__(
        self,
        url: str,
        part: str,
        *,
        name: str,
        size_bytes: Optional[int],
        sha256: Optional[str],
        begun: Optional[Begun] = None,
        connections: int = 4,
        check: Callable[[int], None] = lambda _have: None,
        wait: Callable[[float], object] = time.sleep,
    ) -> None:
        self.part = part
        self.resumed = 0
        self._url, self._name = url, name
        self._size, self._sha256, self._begun = size_bytes, sha256, begun
        self._check, self._wait = check, wait
        self._tag = ""
        self._whole = False
        self._opened = threading.Event()
        self._ended = threading.Event()
        self._error: Optional[BaseException] = None
        self._hashed: Optional[str] = None
        self._parts: Optional[PartFile] = None
        self._along: Optional[ReadAlong] = None
        self._lines = [Line(url) for _ in range(max(1, connections))]
        if size_bytes is not None and sha256 is not None:
            try:
                self._lay(size_bytes, sha256)
            except _DiskError as error:
                raise self._full(error) from error
        self._threads = [
            threading.Thread(target=self._work, args=(line,), name=f"range of {name}", daemon=True)
            for line in self._lines
        ]
        self._hasher = threading.Thread(target=self._hash, name=f"hash of {name}", daemon=True)

    def __enter__(self) -> "Download":  # noqa: PYI034 - Python 3.8 has no Self
        self.start()
        return self

    def __exit__(self, kind: object, error: Optional[BaseException], trace: object) -> None:
        """Close it.

        Raises:
            DamagedPartError: what an earlier call left was at fault, and is gone.
        """
        damaged = isinstance(error, InputError) and self.resumed and not os.path.exists(self.part)
        self.close()
        if damaged:
            raise DamagedPartError from error

    def start(self) -> None:
        """Begin."""
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """End it, wherever it is; the partial file stays."""
        self._ended.set()
        self._opened.set()
        for line in self._lines:
            line.abort()
        for thread in (*self._threads, self._hasher):
            if thread.ident is not None:
                thread.join(1.0)  # a line in a name lookup hears nothing; it is a daemon
        if self._parts is not None and not any(thread.is_alive() for thread in self._threads):
            self._parts.close()
            if self._error is not None and not self._parts.have:
                discard(self.part)

    @property
    def have(self) -> int:
        """How many bytes are here."""
        return 0 if self._parts is None else self._parts.have

    def size(self) -> int:
        """Wait until the store has answered; return the object's size, 0 where only its end tells it."""
        self._await(self._opened)
        assert self._parts is not None
        return self._parts.size or 0

    def stream(self) -> Reader:
        """Return the bytes as they come, once. Reading raises what ended the download."""
        self._await(self._opened)
        along = self._follow()
        reader = along.reader(self._watch)
        self._hasher.start()
        return reader

    def finish(self) -> str:
        """Wait for all of it and return its SHA-256.

        Raises:
            InputError: it cannot be had, or is not what was staged; then nothing is left of it.
        """
        if self._along is None:
            self._await(self._opened)
            self._follow()
            self._hasher.start()
        while self._hashed is None:
            self._watch()
            self._hasher.join(0.1)
        self._watch()
        if self._sha256 is not None and self._hashed != self._sha256:
            discard(self.part)
            raise InputError(
                f"{self._name} is not what was staged: its SHA-256 is {self._hashed[:12]}.., "
                f"not {self._sha256[:12]}..; stage it again"
            )
        return self._hashed

    def _await(self, event: threading.Event) -> None:
        while not event.wait(0.1):
            self._watch()
        self._watch()

    def _follow(self) -> ReadAlong:
        assert self._parts is not None
        start, digest = (
            (0, None) if self._begun is None else (self._begun.size_bytes, self._begun.digest)
        )
        self._along = ReadAlong(self._parts, self._still_wanted, start=start, digest=digest)
        return self._along

    def _watch(self) -> None:
        if self._error is not None:
            raise self._error
        self._check(self.have)

    # The threads -------------------------------------------------------------------------------

    def _work(self, line: Line) -> None:
        """Bring part after part; the first line leads, the others follow once the store has answered."""
        try:
            if line is not self._lines[0]:
                self._opened.wait()
            elif self._parts is None:
                self._open(line)
            elif self._parts.complete:
                self._opened.set()
            while not self._ended.is_set() and self._parts is not None:
                part = self._parts.claim(self._still_wanted)
                if part is None:
                    return
                try:
                    self._persist(line, part)
                except NoRangesError:
                    if self._begun is not None:
                        raise
                    self._parts.close()
                    self._lay(self._parts.size, self._sha256 or self._tag, whole=True)
        except _DiskError as error:
            self._fail(self._full(error))
        except Exception as error:  # noqa: BLE001 - raised again by who waits
            self._fail(error)
        finally:
            line.close()

    def _full(self, error: _DiskError) -> DiskFullError:
        return DiskFullError(f"the disk is full: {self._name} could not be downloaded ({error})")

    def _fail(self, error: BaseException) -> None:
        if self._error is None and not self._ended.is_set():
            self._error = error
        self._ended.set()
        self._opened.set()
        for line in self._lines:
            line.abort()

    def _hash(self) -> None:
        assert self._along is not None
        try:
            self._hashed = self._along.sha256()
        except StopRequestedError:
            pass
        except Exception as error:  # noqa: BLE001 - raised again by who waits
            self._fail(error)

    def _still_wanted(self) -> None:
        if self._ended.is_set():
            raise StopRequestedError

    def _open(self, line: Line) -> None:
        """Learn size and tag from the answer to a first range, and take in what it brings."""
        failures = 0
        while not self._ended.is_set():
            try:
                response = line.get({"Range": "bytes=0-0"})
                with contextlib.closing(response):
                    _, total = _place(response, 0)
                    self._refuse_size(total)
                    self._tag = response.getheader("ETag") or ""
            except RefusedError as error:
                if error.status == 416 and self._size in (None, 0):  # an empty object has no range
                    self._lay(0, self._tag)
                    return
                failures = self._after_refusal(error, failures)
            except LINE_ERRORS as error:
                failures = self._after(describe_failure(self._url, error), failures)
            else:
                self._lay(total, self._sha256 or self._tag, whole=response.status != 206)
                line.close()
                return

    def _lay(self, size: Optional[int], tag: str, *, whole: bool = False) -> None:
        self._whole = whole or size is None
        begun = self._begun
        try:
            if begun is None:
                self._parts = PartFile(self.part, size=size, tag=tag, whole=whole)
            else:
                slots = _SLOTS * len(self._lines)
                self._parts = PartFile(
                    self.part, size=size, tag=tag, slots=slots, start=begun.size_bytes
                )
        except OSError as error:
            if error.errno in FULL_ERRORS:
                raise _DiskError(error.strerror) from error
            raise InputError(f"{self._name} cannot be written: {error.strerror}") from error
        self.resumed = self._parts.resumed
        # What is kept elsewhere may be followed by parts that are here: they are read before others have room.
        if begun is not None or self._parts.complete or None in (self._size, self._sha256):
            self._opened.set()

    def _persist(self, line: Line, part: int) -> None:
        """Bring one part, over as many connections as it takes."""
        assert self._parts is not None
        failures = 0
        while not self._ended.is_set():
            start, end = self._parts.missing(part)
            if start == end:
                return
            try:
                self._receive(line, part, start, end)
            except _ReplacedError:
                raise InputError(
                    f"{self._name} was replaced in the store while it was downloaded: {_STAGE_AGAIN}"
                ) from None
            except RefusedError as error:
                failures = self._after_refusal(error, failures)
            except LINE_ERRORS as error:
                line.close()
                if self._parts.missing(part)[0] - start >= _PROGRESS_BYTES:
                    failures = 0
                else:
                    failures = self._after(describe_failure(self._url, error), failures)
            else:
                return

    def _after_refusal(self, error: RefusedError, failures: int) -> int:
        if not error.passing:
            raise InputError(error.sentence("download", self._name, again=_STAGE_AGAIN)) from None
        return self._after(str(error), failures)

    def _after(self, failure: str, failures: int) -> int:
        """Wait before the next try; raise after too many."""
        if failures >= MOST_FAILURES:
            raise InputError(f"cannot download {self._name}: {failure}") from None
        if not self._ended.is_set():
            wait_after(failures + 1, self._wait)
        return failures + 1

    def _receive(self, line: Line, part: int, start: int, end: Optional[int]) -> None:
        assert self._parts is not None
        headers = {} if end is None else {"Range": f"bytes={start}-{end - 1}"}
        try:
            response = line.get(headers)
        except RefusedError as error:
            if error.status == 416:  # it is shorter than what we hold
                raise _ReplacedError from None
            raise
        with contextlib.closing(response):
            begins, total = _place(response, start)
            self._refuse_size(total)
            tag = response.getheader("ETag") or ""
            if self._sha256 is None and self._tag and tag and tag != self._tag:
                raise _ReplacedError
            if response.status != 206 and not self._whole:
                line.close()
                if self._opened.is_set() and self._begun is None:
                    raise ConnectionError("the store sent all instead of a range")
                raise NoRangesError
            if begins != start:
                self._parts.restart(part)
            self._opened.set()
            self._take(response, part, begins, end)
            if response.status == 206:
                response.read()  # its end, so that the connection is good for the next part
            else:
                line.close()
        if end is None:
            if total is not None and self._parts.have < total:
                raise ConnectionError("the connection ended early")
            self._parts.end()

    def _take(
        self, response: http.client.HTTPResponse, part: int, start: int, end: Optional[int]
    ) -> None:
        """Write what comes, up to `end`."""
        assert self._parts is not None
        position = start
        room = memoryview(bytearray(_READ_BYTES))
        while end is None or position < end:
            wanted = _READ_BYTES if end is None else min(_READ_BYTES, end - position)
            count = response.readinto(room[:wanted])
            if not count:
                if end is not None:
                    raise ConnectionError("the connection ended early")
                return
            if self._ended.is_set():
                raise StopRequestedError
            try:
                self._parts.write(part, room[:count])
            except OSError as error:
                raise _DiskError(error.strerror) from error
            position += count

    def _refuse_size(self, total: Optional[int]) -> None:
        if self._size is not None and total is not None and total != self._size:
            discard(self.part)
            raise InputError(
                f"{self._name} has {total} bytes in the store, not the {self._size} that were staged: "
                "it was replaced; stage it again"
            )


def anew_once(bring: Callable[[], _T]) -> _T:
    """Return what `bring` does; where an earlier call's part was damaged, all comes anew, once."""
    try:
        return bring()
    except DamagedPartError:
        return bring()


def _place(response: http.client.HTTPResponse, asked: int) -> Tuple[int, Optional[int]]:
    """Return where the answer begins in the object, and the object's size where it is told."""
    if response.status == 206:
        match = re.match(r"bytes (\d+)-\d+/(\d+)", response.getheader("Content-Range") or "")
        if match is None or int(match.group(1)) != asked:
            raise _ReplacedError
        return asked, int(match.group(2))
    length = response.getheader("Content-Length")
    return 0, int(length) if length and length.isdigit() else None
