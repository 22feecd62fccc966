"""Bring every input into place: download, verify, unpack, mark, rename, link into the work folder.

    <datasets_dir>/<sha256>/{marker.json,content/...}    appears by rename, complete
    <datasets_dir>/.part-<sha256>                        what an interrupted download left
    <datasets_dir>/.new-<sha256>-<random>                being unpacked

A present marker with the right hash means that nothing is downloaded.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import shutil
import stat
import threading
import time
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional

from .download import download
from .errors import InputError, StopRequestedError
from .extract import Bounds, extract
from .files import fsync_folder, read_json, utc_now, write_json
from .job import Input, Job
from .trainer import place_in_work

# Kaggle keeps 20 GB of the first and nothing of the second, which is larger: data goes there.
_KAGGLE_WORKING, _KAGGLE_SCRATCH = "/kaggle/working", "/kaggle/tmp"
_PARALLEL = 4
_TELL_SECONDS = 0.5
_TICK_SECONDS = 0.1
_CANCEL_SECONDS = 2.0
# What archive tools of desktops add, and nobody means.
_JUNK = frozenset(["__MACOSX", ".DS_Store", "._.DS_Store"])

Rows = List[Dict[str, Any]]


def stage_inputs(
    run_dir: str,
    job: Job,
    *,
    urls: Mapping[str, str],
    log: Callable[[str], None],
    progress: Callable[[Rows], None],
    should_stop: Callable[[], bool],
    stall_seconds: Optional[float],
) -> None:
    """Stage all inputs of a job, several at once, and link each to its `dest` in the work folder.

    Args:
        run_dir: the run.
        job: names the inputs and the folder of data sets.
        urls: presigned URL by object name; never logged.
        log: takes one line for the run's log.
        progress: takes one row an input: name, bytes, size_bytes, percent, state.
        should_stop: whether the run was asked to end.
        stall_seconds: how long no byte may come.

    Raises:
        InputError: an input cannot be had or is refused.
        StopRequestedError: the run was asked to end.
    """
    if not job.inputs:
        return
    folder = datasets_dir(run_dir, job)
    os.makedirs(folder, exist_ok=True)
    tasks = [_Task(one, folder, urls.get(one.object)) for one in job.inputs]
    turns = threading.BoundedSemaphore(_PARALLEL)
    # Daemons: a thread that hangs in a socket must not keep a stopped run alive.
    threads = [
        threading.Thread(target=task.guarded, args=(turns,), name=task.input.name, daemon=True)
        for task in tasks
    ]
    for thread in threads:
        thread.start()
    try:
        _wait(tasks, progress, should_stop, stall_seconds)
    except BaseException:
        for task in tasks:
            task.cancelled.set()
        for thread in threads:
            thread.join(_CANCEL_SECONDS / len(threads))
        raise
    for task in tasks:
        place_in_work(run_dir, task.input.dest, content_root(task.content, task.input))
        log(f"remote_dataset_ready={task.input.dest}")
    progress([task.row() for task in tasks])


def datasets_dir(run_dir: str, job: Job) -> str:
    """Return where staged data is kept: the job's choice, else beside the runs."""
    if job.datasets_dir:
        return os.path.abspath(os.path.expanduser(job.datasets_dir))
    if os.path.isdir(_KAGGLE_WORKING) and _can_be_made(_KAGGLE_SCRATCH):
        return os.path.join(_KAGGLE_SCRATCH, "remote_kernel_tools", "datasets")
    return os.path.join(os.path.dirname(os.path.dirname(run_dir)), "datasets")


def _can_be_made(folder: str) -> bool:
    """True for a folder that is writable, or that could be made where it belongs."""
    return os.access(folder if os.path.isdir(folder) else os.path.dirname(folder), os.W_OK)


def content_root(content: str, one: Input) -> str:
    """Return the folder (or file) of staged content that stands for `dest`.

    The archive's single top folder becomes the last part of `dest`, whatever it is called; an archive
    that holds the whole path, or several tops, unpacks to the same place.

    Raises:
        InputError: there is nothing in it.
    """
    if one.format == "file":
        return os.path.join(content, _file_name(one))
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


def _wait(
    tasks: List[_Task],
    progress: Callable[[Rows], None],
    should_stop: Callable[[], bool],
    stall_seconds: Optional[float],
) -> None:
    """Return when all are ready; raise what the first one raised, or the end that was asked for."""
    seen: List[Any] = []
    moved = told = time.monotonic()
    while True:
        pending = [task for task in tasks if not task.ended.wait(_TICK_SECONDS / len(tasks))]
        for task in tasks:
            if task.error is not None:
                raise task.error
        if not pending:
            return
        if should_stop():
            raise StopRequestedError
        now = time.monotonic()
        rows = [task.row() for task in tasks]
        if now - told >= _TELL_SECONDS:
            told = now
            progress(rows)
        figures = [(row["bytes"], row["state"], task.unpacked) for row, task in zip(rows, tasks)]
        if figures != seen:
            seen, moved = figures, now
        if stall_seconds is not None and now - moved > stall_seconds:
            waiting = ", ".join(task.input.name for task in pending)
            raise InputError(f"stalled: no byte of {waiting} came for {stall_seconds:.0f} s")


class _Task:
    """One input on its way, in a thread of its own; `row` may be read from any other."""

    def __init__(self, one: Input, folder: str, url: Optional[str]) -> None:
        self.input = one
        self.content = ""
        self.unpacked = 0
        self.cancelled = threading.Event()
        self.ended = threading.Event()
        self.error: Optional[Exception] = None
        self._folder = folder
        self._url = url
        self._bytes = 0
        self._state = "waiting"

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
        key = self.input.sha256 or hashlib.sha256(self.input.object.encode("utf-8")).hexdigest()
        with _lock(os.path.join(self._folder, ".lock-" + key), self._check):
            if self.input.sha256 is not None and self._present(key):
                self._finish(key)
                return
            digest = self._fetch(os.path.join(self._folder, ".part-" + key))
            self._finish(digest)

    def _fetch(self, part: str) -> str:
        one = self.input
        if self._url is None:
            raise InputError(f"there is no link to {one.name}: launch again")
        self._room()
        self._state = "downloading"
        digest = download(
            self._url, part, name=one.name, size_bytes=one.size_bytes, sha256=one.sha256,
            tick=self._downloaded, wait=self.cancelled.wait,
        )  # fmt: skip
        self._state = "unpacking"
        if self._present(digest):
            os.unlink(part)
            return digest
        for name in os.listdir(self._folder):
            if name.startswith(".new-" + digest):  # of a process that was killed; we hold the lock
                shutil.rmtree(os.path.join(self._folder, name), ignore_errors=True)
        building = os.path.join(self._folder, f".new-{digest}-{os.urandom(4).hex()}")
        content = os.path.join(building, "content")
        os.makedirs(content)
        try:
            files, size = self._unpack(part, content)
            content_root(content, one)
            write_json(
                os.path.join(building, "marker.json"),
                {
                    "schema_version": 1,
                    "sha256": digest,
                    "size_bytes": os.stat(part).st_size if os.path.exists(part) else size,
                    "format": one.format,
                    "file_count": files,
                    "content_bytes": size,
                    "created_at": utc_now(),
                },
            )
            os.sync()  # a marker must not outlive its content when the machine goes down
            shutil.rmtree(os.path.join(self._folder, digest), ignore_errors=True)
            os.rename(building, os.path.join(self._folder, digest))
            fsync_folder(self._folder)
        except InputError:
            _unlink(part)
            raise
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            _unlink(part)
            raise InputError(f"the disk is full: {one.name} could not be unpacked") from error
        finally:
            shutil.rmtree(building, ignore_errors=True)
        _unlink(part)
        return digest

    def _unpack(self, part: str, content: str) -> Any:
        one = self.input
        if one.format == "file":
            size = os.stat(part).st_size
            os.rename(part, os.path.join(content, _file_name(one)))
            files = 1
        else:
            bounds = Bounds(os.stat(part).st_size, one.content_bytes, one.file_count)
            files, size = extract(
                part, content, kind=one.format, bounds=bounds, tick=self._unpacked_so_far
            )
        _protect(content)
        return files, size

    def _room(self) -> None:
        """Refuse before the download what cannot fit after it."""
        one = self.input
        need = (one.size_bytes or 0) + (0 if one.format == "file" else one.content_bytes or 0)
        free = shutil.disk_usage(self._folder).free
        if need > free:
            raise InputError(
                f"the disk is too small for {one.name}: it needs {need / 1e9:.1f} GB, {free / 1e9:.1f} GB are free in {self._folder}"
            )

    def _present(self, digest: str) -> bool:
        folder = os.path.join(self._folder, digest)
        marker = read_json(os.path.join(folder, "marker.json")) or {}
        return marker.get("sha256") == digest and os.path.isdir(os.path.join(folder, "content"))

    def _finish(self, digest: str) -> None:
        self.content = os.path.join(self._folder, digest, "content")
        self._state = "ready"

    def _downloaded(self, have: int) -> None:
        self._bytes = have
        self._check()

    def _unpacked_so_far(self, done: int) -> None:
        self.unpacked = done
        self._check()

    def _check(self) -> None:
        if self.cancelled.is_set():
            raise StopRequestedError


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


def _protect(folder: str) -> None:
    """Make the files read-only: the content is shared by runs."""
    for base, _, names in os.walk(folder):
        for name in names:
            path = os.path.join(base, name)
            mode = stat.S_IMODE(os.stat(path).st_mode)
            os.chmod(path, mode & ~(stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH))


def _entries(folder: str) -> List[str]:
    try:
        return sorted(name for name in os.listdir(folder) if name not in _JUNK)
    except OSError:
        return []


def _file_name(one: Input) -> str:
    return "file" + os.path.splitext(one.dest)[1]


def _unlink(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
