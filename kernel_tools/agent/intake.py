"""One input on its way into the folder of data sets: download, verify, unpack, mark, rename.

A tar is unpacked while it still comes, and kept as what was unpacked; nothing has its name before its hash
was found right.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import threading
import time
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

from . import host
from .disk import FULL_ERRORS
from .download import Begun, DamagedPartError, Download, NoRangesError, anew_once
from .errors import DiskFullError, InputError, StopRequestedError, UnsafeArchiveError
from .extract import Bounds, Writer, extract, extract_stream, extract_tar
from .files import file_size, read_json, utc_now, write_json
from .job import Input
from .kept_tar import KeptTar
from .partfile import discard
from .readalong import Reader

# What archive tools of desktops add, and nobody means.
_JUNK = frozenset(["__MACOSX", ".DS_Store", "._.DS_Store"])
# SHA-256, bytes of the archive, files, bytes of their content.
Taken = Tuple[str, int, int, int]
_STREAMED = ("tar", "tar.gz")
# By then the system has written most of it, and the trainer is past its start.
_SECURE_SECONDS = 30.0


class Intake:
    """One input, in a thread of its own; `row` may be read from any other.

    Args:
        one: the input.
        folder: of data sets.
        url: presigned; None where the run was given none.
        connections: how many ranges at a time.
    """

    def __init__(self, one: Input, folder: str, url: Optional[str], connections: int) -> None:
        self.input = one
        self.content = ""
        self.unpacked = 0
        self.queued = False
        self.cancelled = threading.Event()
        self.ended = threading.Event()
        self.error: Optional[Exception] = None
        self._key = one.sha256 or hashlib.sha256(one.object.encode("utf-8")).hexdigest()
        self._folder = folder
        self._url = url
        self._connections = connections
        # A tar that is known is kept as what was unpacked from it, where the store sends ranges.
        known = one.sha256 is not None and one.size_bytes is not None
        self._keeps_content = known and one.format == "tar"
        self._bytes = 0
        self._state = "waiting"

    @property
    def ready(self) -> bool:
        """Whether a complete copy is here already."""
        return self.input.sha256 is not None and self._present(self._key)

    @property
    def arrived_bytes(self) -> int:
        """What an interrupted download has left on disk."""
        try:
            left = os.stat(self._part).st_blocks * 512
        except OSError:
            return 0
        if os.path.exists(self._journal):
            for base, _, names in os.walk(self._building):
                left += sum(os.path.getsize(os.path.join(base, name)) for name in names)
        return left

    def row(self) -> Dict[str, Any]:
        """Return the figures for `agent.json`."""
        size = self.input.size_bytes
        percent = 100.0 if self._state == "ready" else 0.0
        if size and self._state != "ready":
            percent = 100.0 * self._bytes / size
        return {
            "name": self.input.name,
            "state": self._state,
            "bytes": self._bytes,
            "size_bytes": size,
            "percent": round(percent, 1),
        }

    def guarded(self, turns: threading.BoundedSemaphore) -> None:
        """The thread: `run` when it is its turn; what it raises is kept in `error`."""
        try:
            with turns:
                self.run()
        except Exception as error:  # noqa: BLE001 - raised again by the waiting thread
            self.error = error
        self.ended.set()

    def run(self) -> None:
        """Make the input's folder complete; sets `content`."""
        self.queued = True  # where another process brings the same, it is that one's to stall
        with _lock(os.path.join(self._folder, ".lock-" + self._key), self._check):
            self.queued = False
            if self.ready:
                discard(self._part)  # of a call that was killed after its rename
                self._clear_unfinished()
                self._finish(self._key)
                return
            if self._url is None:
                raise InputError(f"there is no link to {self.input.name}: launch again")
            self._finish(anew_once(self._bring))

    @property
    def _part(self) -> str:
        return os.path.join(self._folder, ".part-" + self._key)

    @property
    def _journal(self) -> str:
        return self._part + ".journal"

    @property
    def _building(self) -> str:
        return os.path.join(self._folder, ".new-" + self._key)

    def _bring(self) -> str:
        """Download and unpack side by side. Returns the SHA-256 of the object."""
        one, building = self.input, self._building
        # A journal that a machine took down with it says nothing of the files there.
        if not (self._keeps_content and file_size(self._journal)):
            self._clear_unfinished()
        content = os.path.join(building, "content")
        os.makedirs(content, exist_ok=True)
        self._state, self._bytes, self.unpacked = "downloading", 0, 0
        take = self._take_keeping if self._keeps_content else self._take
        try:
            digest, archive_bytes, files, size = take(content)
            if not self._present(digest):
                self._settle(building, digest, archive_bytes, files, size)
        except NoRangesError:
            self._keeps_content = False
            discard(self._part)
            return self._bring()
        except (DiskFullError, UnsafeArchiveError):
            discard(self._part)
            raise
        except OSError as error:
            if error.errno not in FULL_ERRORS:
                raise
            discard(self._part)
            raise DiskFullError(f"the disk is full: {one.name} could not be unpacked") from error
        finally:
            if not os.path.exists(
                self._journal
            ):  # without it, what was unpacked cannot be gone on from
                shutil.rmtree(building, ignore_errors=True)
        _discard_aside(self._part)
        shutil.rmtree(building, ignore_errors=True)
        return digest

    def _download(self, begun: Optional[Begun] = None) -> Download:
        one = self.input
        return Download(
            self._url or "", self._part, name=one.name, size_bytes=one.size_bytes,
            sha256=one.sha256, begun=begun, connections=self._connections, check=self._downloaded,
            wait=self.cancelled.wait,
        )  # fmt: skip

    def _take_keeping(self, content: str) -> Taken:
        """Unpack a tar as it comes; what there is of it stays, so that the archive need not."""
        one = self.input
        bounds = Bounds(one.size_bytes or 0, one.content_bytes, one.file_count)
        with contextlib.ExitStack() as stack:
            coming: List[Download] = []

            def go_on(start: int, digest: Any) -> Reader:
                coming.append(stack.enter_context(self._download(Begun(start, digest))))
                return coming[0].stream()

            try:
                with contextlib.closing(
                    KeptTar(self._journal, go_on=go_on, check=self._downloaded)
                ) as tar:
                    files, size = extract_tar(tar, Writer(content, bounds, self._unpacked_so_far))
                    tar.coming()
            except (UnsafeArchiveError, FileExistsError) as error:
                if tar.resumed:
                    discard(self._part)
                    raise DamagedPartError from error
                coming[
                    0
                ].finish()  # where these are not the bytes that were staged, that is the news
                raise
            return coming[0].finish(), coming[0].have, files, size

    def _take(self, content: str) -> Taken:
        """Unpack what is verified, or a tar as it comes; the archive stays until it is."""
        one = self.input
        with self._download() as coming:
            if one.format in _STREAMED:
                size = coming.size() or one.size_bytes or 0
                bounds = Bounds(size, one.content_bytes, one.file_count)
                try:
                    with coming.stream() as stream:
                        files, size = extract_stream(
                            stream, content, kind=one.format, bounds=bounds,
                            tick=self._unpacked_so_far,
                        )  # fmt: skip
                except UnsafeArchiveError:
                    if one.sha256 is not None:
                        coming.finish()  # as above
                    raise
                return coming.finish(), coming.have, files, size
            digest = coming.finish()
            self._state = "unpacking"
            if one.format == "file":
                place = os.path.join(content, _file_name(one))
                os.rename(self._part, place)
                os.chmod(place, 0o444)
                return digest, coming.have, 1, coming.have
            bounds = Bounds(coming.have, one.content_bytes, one.file_count)
            files, size = extract(
                self._part, content, kind=one.format, bounds=bounds, tick=self._unpacked_so_far
            )
            return digest, coming.have, files, size

    def _settle(self, building: str, digest: str, archive: int, files: int, size: int) -> None:
        """Mark what was unpacked, and give it its name."""
        content_root(os.path.join(building, "content"), self.input)
        marker = {
            "schema_version": 1,
            "sha256": digest,
            "size_bytes": archive,
            "format": self.input.format,
            "file_count": files,
            "content_bytes": size,
            "created_at": utc_now(),
            # Until all is on disk, it is good for as long as the machine stays up.
            "boot_id": host.boot_id(),
            "on_disk": False,
        }
        with open(os.path.join(building, "marker.json"), "w", encoding="utf-8") as stream:
            json.dump(marker, stream, indent=1)
        place = os.path.join(self._folder, digest)
        shutil.rmtree(place, ignore_errors=True)
        os.rename(building, place)
        threading.Thread(target=_secure, args=(place,), name="sync", daemon=True).start()

    def _clear_unfinished(self) -> None:
        """Remove what a killed process was unpacking; the lock is ours."""
        for name in os.listdir(self._folder):
            if name.startswith(".new-" + self._key):
                shutil.rmtree(os.path.join(self._folder, name), ignore_errors=True)

    def _present(self, digest: str) -> bool:
        folder = os.path.join(self._folder, digest)
        marker = read_json(os.path.join(folder, "marker.json")) or {}
        outlived = marker.get("on_disk", True) or marker.get("boot_id") == host.boot_id()
        return (
            outlived
            and marker.get("sha256") == digest
            and os.path.isdir(os.path.join(folder, "content"))
        )

    def _finish(self, digest: str) -> None:
        self.content = os.path.join(self._folder, digest, "content")
        self._state = "ready"

    def _downloaded(self, have: int) -> None:
        self._bytes = have
        if self._state == "downloading" and have == self.input.size_bytes:
            self._state = "unpacking"
        self._check()

    def _unpacked_so_far(self, done: int) -> None:
        self.unpacked = done
        self._check()

    def _check(self) -> None:
        if self.cancelled.is_set():
            raise StopRequestedError


def content_root(content: str, one: Input) -> str:
    """Return the folder (or file) of staged content that stands for `dest`.

    The archive's single top folder becomes the last part of `dest`, whatever it is called; an archive
    that holds the whole path, or several tops, unpacks to the same place.

    Raises:
        InputError: there is nothing in it.
    """
    if one.format == "file":  # its ending is that of the dest that it came for first
        return os.path.join(content, *_entries(content)[:1])
    whole = content
    for part in one.dest.split("/"):
        if _entries(whole) != [part]:
            break
        whole = os.path.join(whole, part)
    else:
        if os.path.isdir(whole):
            return whole
    names = _entries(content)
    if not names:
        raise InputError(f"the archive of {one.name} is empty")
    top = os.path.join(content, names[0])
    return top if len(names) == 1 and os.path.isdir(top) else content


def _discard_aside(part: str) -> None:
    """Remove a part file at once by name, its bytes in a thread: giving back gigabytes takes a while."""
    try:
        descriptor = os.open(part, os.O_RDONLY)
    except OSError:
        discard(part)
        return
    discard(part)
    threading.Thread(target=os.close, args=(descriptor,), name="discard", daemon=False).start()


def _secure(place: str) -> None:
    """Bring all to disk and say so in the marker; a crash of the machine before that costs a download."""
    time.sleep(_SECURE_SECONDS)
    os.sync()
    path = os.path.join(place, "marker.json")
    marker = read_json(path)
    if marker is not None:
        with contextlib.suppress(OSError):
            write_json(path, dict(marker, on_disk=True))


@contextlib.contextmanager
def _lock(path: str, check: Callable[[], None]) -> Iterator[None]:
    """One process at a time for one content; where the file system has no locks, none is taken."""
    with open(path, "ab") as stream:
        while True:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                check()
                time.sleep(0.2)
            except OSError:
                break
        yield


def _entries(folder: str) -> Any:
    try:
        return sorted(name for name in os.listdir(folder) if name not in _JUNK)
    except OSError:
        return []


def _file_name(one: Input) -> str:
    return "file" + os.path.splitext(one.dest)[1]
