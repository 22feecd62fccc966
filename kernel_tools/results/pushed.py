"""A run as its pushes left it in the store: what `%remote_fetch --from store` and a resume elsewhere read.

It speaks as the connection to the run's machine would, as far as files and figures go; nothing can be
asked of the run itself.
"""

from __future__ import annotations

import base64
import hashlib
import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kernel_tools.errors import AgentError, FetchError, ObjectNotFoundError, RunNotFoundError
from kernel_tools.launching.pushing import PREFIX, manifest_key
from kernel_tools.results.fetch import fits
from kernel_tools.run import Run
from kernel_tools.runs.mirror import RunMirror
from kernel_tools.runs.registry import Registry, RunRecord
from kernel_tools.stores.base import ObjectStore

RANGE_BYTES: Final = 8 << 20
MOST_MANIFEST_BYTES: Final = 4 << 20


@dataclass(frozen=True, slots=True)
class PushedFile:
    """One file of the last complete push."""

    path: str
    size_bytes: int
    sha256: str
    object: str


@dataclass(frozen=True, slots=True)
class PushedSet:
    """The last complete push of a run."""

    run_id: str
    pushed_at: str
    reason: str
    ended: bool
    files: tuple[PushedFile, ...]
    left_out: tuple[str, ...] = ()

    def find(self, path: str) -> PushedFile | None:
        """Return a file by its path in the run directory."""
        return next((file for file in self.files if file.path == path), None)

    def matching(self, patterns: Sequence[str]) -> tuple[PushedFile, ...]:
        """Return what fits patterns relative to the run directory, or else to its work folder."""
        found: dict[str, PushedFile] = {}
        for pattern in patterns:
            here = [file for file in self.files if fits(file.path, pattern)]
            here = here or [file for file in self.files if fits(file.path, f"work/{pattern}")]
            found.update((file.path, file) for file in here)
        return tuple(found[path] for path in sorted(found))


def read_pushed(store: ObjectStore, run_id: str) -> PushedSet:
    """Return the last complete push of a run.

    Raises:
        RunNotFoundError: the store has none of that run.
        FetchError: its manifest is damaged.
        StoreError: the store does not answer, or refuses.
    """
    key = manifest_key(run_id)
    try:
        data = store.read_range(key, offset=0, length=MOST_MANIFEST_BYTES)
    except ObjectNotFoundError:
        raise RunNotFoundError(
            f"nothing of {run_id} is in the store {store.name}/{store.bucket}.",
            hint="It pushed nothing, or was launched with another store or with --no-push.",
        ) from None
    try:
        document = json.loads(data)
        return PushedSet(
            run_id=str(document["run_id"]),
            pushed_at=str(document["pushed_at"]),
            reason=str(document["reason"]),
            ended=bool(document["ended"]),
            files=tuple(
                PushedFile(
                    str(row["path"]), int(row["size_bytes"]), str(row["sha256"]), str(row["object"])
                )
                for row in document["files"]
            ),
            left_out=tuple(document.get("left_out") or ()),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise FetchError(f"the manifest of {run_id} in the store is damaged.") from error


class StoreLink:
    """An `AgentLink` over what a run has pushed."""

    def __init__(self, store: ObjectStore, run_id: str) -> None:
        self.store = store
        self.pushed = read_pushed(store, run_id)

    @property
    def where(self) -> str:
        """The store in words."""
        return f"store {self.store.name}/{self.store.bucket}, pushed {self.pushed.pushed_at}"

    def call(self, function: str, *, timeout_seconds: float = 60.0, **arguments: Any) -> Any:  # noqa: ARG002
        """Answer `files` and `poll` from the last push.

        Raises:
            AgentError: the run itself would have to be asked.
        """
        if function == "files":
            self.pushed = read_pushed(self.store, self.pushed.run_id)
            rows = self.pushed.matching(arguments["patterns"])
            return {
                "files": [
                    {"path": f.path, "size_bytes": f.size_bytes, "sha256": f.sha256} for f in rows
                ]
            }
        if function == "poll":
            return self._poll(**arguments)
        raise AgentError(
            f"{self.pushed.run_id} is only known from the store, so it cannot be told anything.",
            hint="%remote_connect to its machine first.",
        )

    def get_file(
        self,
        remote_path: str,
        destination: Path,
        *,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Bring one file, going on where an earlier call left `destination`.

        Raises:
            FetchError: the last push has no such file.
            StoreError: the store does not answer, or refuses.
        """
        path = remote_path.partition(f"/runs/{self.pushed.run_id}/")[2]
        file = self.pushed.find(path)
        if file is None:
            raise FetchError(f"the last push of {self.pushed.run_id} has no {path}.")
        destination.parent.mkdir(parents=True, exist_ok=True)
        with destination.open("ab") as stream:
            have = stream.tell()
            if have > file.size_bytes:
                have = 0
                stream.truncate(0)
            while have < file.size_bytes:
                length = min(RANGE_BYTES, file.size_bytes - have)
                block = self.store.read_range(file.object, offset=have, length=length)
                if not block:
                    raise FetchError(f"{path} is shorter in the store than its manifest says.")
                stream.write(block)
                have += len(block)
                if on_progress is not None:
                    on_progress(have, file.size_bytes)

    def _poll(
        self,
        *,
        log_offset: int = 0,
        metrics_offset: int = 0,
        steps_offset: int = 0,
        **_: Any,
    ) -> Mapping[str, Any]:
        status = json.loads(self._read("status.json") or b"{}")
        return {
            "run_id": self.pushed.run_id,
            "run_dir": "",
            "status": {"state": "queued", **status},
            "status_whole": bool(status),
            "agent": None,
            "agent_alive": False,
            "agent_heartbeat_age_seconds": None,
            "boot_id": "",
            "log": _packed(self._read("train.log"), log_offset),
            "metrics": _rows(self._read("metrics.jsonl"), metrics_offset),
            "steps": _rows(self._read("steps.jsonl"), steps_offset),
            "artifacts": json.loads(self._read("artifacts.json") or b"null"),
        }

    def _read(self, path: str) -> bytes:
        file = self.pushed.find(path)
        if file is None:
            return b""
        data = self.store.read_range(file.object, offset=0, length=file.size_bytes)
        if hashlib.sha256(data).hexdigest() != file.sha256:
            raise FetchError(
                f"{path} of {self.pushed.run_id} is not what its manifest says: the run pushes on.",
                hint="Try again.",
            )
        return data


def _packed(data: bytes, offset: int) -> dict[str, Any]:
    start = max(0, len(data) + offset) if offset < 0 else min(offset, len(data))
    packed = base64.b64encode(zlib.compress(data[start:], 1)).decode() if data[start:] else ""
    return {"offset": start, "data": packed, "size": len(data)}


def _rows(data: bytes, offset: int) -> dict[str, Any]:
    start = offset if 0 <= offset <= len(data) else 0
    return {"offset": start, "data": data[start:].decode("utf-8", "replace"), "size": len(data)}


def find_pushed(store: ObjectStore, run_id: str) -> StoreLink:
    """Return a run's last push, found by its id or by a part that fits one run in the store.

    Raises:
        RunNotFoundError: none fits, or more than one.
    """
    try:
        return StoreLink(store, run_id)
    except RunNotFoundError:
        ending = "/manifest.json"
        known = {
            info.key.split("/")[1]
            for info in store.list(f"{PREFIX}/")
            if info.key.endswith(ending) and info.key.count("/") == 2
        }
        fitting = sorted(known_id for known_id in known if run_id in known_id)
        if not fitting:
            raise
        if len(fitting) > 1:
            raise RunNotFoundError(
                f"{run_id!r} fits {len(fitting)} runs in the store.",
                hint=f"Type more of one: {fitting[0]}.",
            ) from None
        return StoreLink(store, fitting[0])


def stored(link: StoreLink, store: ObjectStore, *, registry: Registry) -> Run:
    """Return a run that is read from the store; its log and rows are kept apart from the machine's own."""
    run_id = link.pushed.run_id
    folder = registry.folder(run_id)
    try:
        record = registry.load(run_id)
    except RunNotFoundError:
        project = registry.root.parent.parent
        record = RunRecord(
            run_id=run_id,
            name=run_id,
            created_at="",
            where=f"store {store.name}/{store.bucket}",
            remote_dir="",
            artifact_dir=str(project / "artifacts/remote"),
        )
    return Run(record, link=link, mirror=RunMirror(folder / "store"))
