"""One push: the files that changed, each to an object that the last manifest does not name; then the manifest.

What is cut off before the manifest changes nothing of the set before it.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from typing import Callable, Dict, List, Mapping, Optional, Sequence, Set, Tuple

from .errors import SourceError
from .files import Json, read_json, utc_now, write_json
from .targets import PartedUpload, Target, Targets
from .upload import Sender

_PUSHED = os.path.join("control", "pushed.json")
# Of what was left out; the manifest must stay small, however many files fit a pattern.
_MOST_NAMED = 100


class Ledger:
    """What the store has of a run: the files of its last manifest, and of one that may have arrived too.

    An answer that is lost leaves it open which of the two stands there, so neither's objects are written
    to. Kept on disk for the process that comes after; where the disk is full, in memory alone.
    """

    def __init__(self, run_dir: str) -> None:
        self._path = os.path.join(run_dir, _PUSHED)
        told = read_json(self._path) or {}
        self.files: List[Json] = told.get("files") or []
        self.attempted: List[Json] = told.get("attempted") or []

    @property
    def rows(self) -> Dict[str, List[Json]]:
        """Each file's rows by its path, the newest first."""
        found: Dict[str, List[Json]] = {}
        for row in (*self.attempted, *self.files):
            found.setdefault(row["path"], []).append(row)
        return found

    def attempt(self, files: List[Json]) -> None:
        """A manifest that names `files` is about to be sent."""
        self.attempted = files
        self._save()

    def arrived(self) -> None:
        """The store has said that it has it."""
        self.files, self.attempted = self.attempted, []
        self._save()

    def _save(self) -> None:
        with contextlib.suppress(OSError):
            write_json(self._path, {"files": self.files, "attempted": self.attempted})


class CompleteSet:
    """What one push carries.

    Args:
        run_dir: the run.
        run_id: its id.
        reason: why it is pushed, in words.
        ended: whether the run has ended and nothing will follow.
        ledger: what is in the store; read from the run directory where none is given.
    """

    def __init__(
        self,
        run_dir: str,
        run_id: str,
        *,
        reason: str,
        ended: bool,
        ledger: Optional[Ledger] = None,
    ) -> None:
        self.files = self.bytes = 0  # that were sent
        self.left_out: List[str] = []
        self._run_dir = run_dir
        self._run_id = run_id
        self._reason = reason
        self._ended = ended
        self._ledger = Ledger(run_dir) if ledger is None else ledger
        self._rows: List[Json] = []

    def send(
        self,
        targets: Targets,
        paths: Sequence[str],
        *,
        documents: Mapping[str, bytes],
        used: Set[str],
        check: Callable[[], None],
        on_file: Callable[[str], None],
    ) -> None:
        """Send what is not in the store as it is now, and the manifest of all.

        Args:
            targets: where to.
            paths: relative to the run directory; what is gone by now is passed over, and what cannot
                be read is left out: it must not keep the checkpoints from the store.
            documents: content by path, sent instead of a file.
            used: URLs of parted uploads that have served; added to.
            check: called often; may raise to end it.
            on_file: told each path that was sent.

        Raises:
            PushError: one sentence; the set before stands as it was.
        """
        before = self._ledger.rows
        taken = {row["object"] for rows in before.values() for row in rows}
        sender = Sender(check=lambda _sent: check(), wait=_patient(check))
        try:
            for path in [path for path in paths if path not in documents]:
                check()
                full = os.path.join(self._run_dir, path)
                seen = identity(full)
                if seen is None:
                    continue
                known = [row for row in before.get(path, ()) if tuple(row["seen"]) == seen]
                if known:
                    self._rows.append(known[0])
                    continue
                target = self._choose(targets, path, taken)
                if target is not None:
                    upload = _unused(target, used) if seen[0] > targets.part_bytes else None
                    try:
                        digest, size = sender.send_file(
                            full, target, name=path, part_bytes=targets.part_bytes, upload=upload
                        )
                    except SourceError:
                        self._leave_out(path)
                    else:
                        self._note(path, size, digest, target, seen, on_file)
            for path, data in documents.items():
                target = self._choose(targets, path, taken)
                if target is not None:
                    digest = sender.send_bytes(data, target, name=path)
                    self._note(path, len(data), digest, target, (0, 0), on_file)
            self._ledger.attempt(self._rows)
            text = json.dumps(self._manifest(), indent=1)  # in ASCII: a file's name may be no UTF-8
            sender.send_bytes(text.encode("ascii"), targets.manifest, name="the manifest")
            self._ledger.arrived()
        finally:
            sender.close()

    def _choose(self, targets: Targets, path: str, taken: Set[str]) -> Optional[Target]:
        target = targets.choose(path, taken)
        if target is None:
            self._leave_out(path)
        else:
            taken.add(target.object)
        return target

    def _leave_out(self, path: str) -> None:
        """Go on without a file; what the store has of it stays as good as it was."""
        self.left_out.append(path)
        self._rows += self._ledger.rows.get(path, [])[:1]

    def _note(
        self,
        path: str,
        size: int,
        digest: str,
        target: Target,
        seen: Tuple[int, int],
        on_file: Callable[[str], None],
    ) -> None:
        self._rows.append(
            {
                "path": path,
                "size_bytes": size,
                "sha256": digest,
                "object": target.object,
                "seen": list(seen),
            }
        )
        self.files += 1
        self.bytes += size
        on_file(path)

    def _manifest(self) -> Json:
        return {
            "schema_version": 1,
            "run_id": self._run_id,
            "pushed_at": utc_now(),
            "reason": self._reason,
            "ended": self._ended,
            "files": self._rows,
            "left_out": self.left_out[:_MOST_NAMED],
        }


def identity(path: str) -> Optional[Tuple[int, int]]:
    """Return size and time of the last change; None where there is no file."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return (found.st_size, found.st_mtime_ns)


def _unused(target: Target, used: Set[str]) -> Optional[PartedUpload]:
    for upload in target.uploads:
        if upload.complete not in used:
            used.add(upload.complete)
            return upload
    return None


def _patient(check: Callable[[], None]) -> Callable[[float], None]:
    """A sleep that an end cuts short."""

    def wait(seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            check()
            time.sleep(0.2)

    return wait
