"""One push: the files that changed, each to an object that the last manifest does not name; then the manifest.

What is cut off before the manifest changes nothing of the set before it.
"""

from __future__ import annotations

import json
import os
import time
from typing import Callable, List, Mapping, Optional, Sequence, Set, Tuple

from .files import Json, read_json, utc_now, write_json
from .targets import PartedUpload, Target, Targets
from .upload import Sender

_PUSHED = os.path.join("control", "pushed.json")


class CompleteSet:
    """What one push carries.

    Args:
        run_dir: the run.
        run_id: its id.
        reason: why it is pushed, in words.
        ended: whether the run has ended and nothing will follow.
    """

    def __init__(self, run_dir: str, run_id: str, *, reason: str, ended: bool) -> None:
        self.files = self.bytes = 0  # that were sent
        self.left_out: List[str] = []
        self._run_dir = run_dir
        self._run_id = run_id
        self._reason = reason
        self._ended = ended
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
            paths: relative to the run directory; what is gone by now is passed over.
            documents: content by path, sent instead of a file.
            used: URLs of parted uploads that have served; added to.
            check: called often; may raise to end it.
            on_file: told each path that was sent.

        Raises:
            PushError: one sentence; the set before stands as it was.
        """
        before = {row["path"]: row for row in read_pushed(self._run_dir)}
        taken = {row["object"] for row in before.values()}
        sender = Sender(check=lambda _sent: check(), wait=_patient(check))
        try:
            for path in [path for path in paths if path not in documents]:
                check()
                full = os.path.join(self._run_dir, path)
                seen, known = identity(full), before.get(path)
                if seen is None:
                    continue
                if known is not None and tuple(known["seen"]) == seen:
                    self._rows.append(known)
                    continue
                target = self._choose(targets, path, taken)
                if target is not None:
                    upload = _unused(target, used) if seen[0] > targets.part_bytes else None
                    digest, size = sender.send_file(
                        full, target, name=path, part_bytes=targets.part_bytes, upload=upload
                    )
                    self._note(path, size, digest, target, seen, on_file)
            for path, data in documents.items():
                target = self._choose(targets, path, taken)
                if target is not None:
                    digest = sender.send_bytes(data, target, name=path)
                    self._note(path, len(data), digest, target, (0, 0), on_file)
            document = self._manifest()
            text = json.dumps(document, indent=1, ensure_ascii=False)
            sender.send_bytes(text.encode("utf-8"), targets.manifest, name="the manifest")
            write_json(os.path.join(self._run_dir, _PUSHED), document)
        finally:
            sender.close()

    def _choose(self, targets: Targets, path: str, taken: Set[str]) -> Optional[Target]:
        target = targets.choose(path, taken)
        if target is None:
            self.left_out.append(path)
        else:
            taken.add(target.object)
        return target

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
            "left_out": self.left_out,
        }


def read_pushed(run_dir: str) -> List[Json]:
    """Return the rows of the last manifest that is in the store."""
    return (read_json(os.path.join(run_dir, _PUSHED)) or {}).get("files") or []


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
