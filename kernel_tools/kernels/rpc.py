"""Calls from here to the agent there: one idempotent cell a call, repeated when the line drops.

The agent's package is laid on the remote once per content and loaded under a name made of its hash, so
an old notebook and a new one can talk to the same machine. Nothing is started twice by a repeat: that
is the agent's promise, and why cells are repeated here and nowhere else.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

from kernel_tools.agent import bootstrap
from kernel_tools.errors import (
    AgentError,
    InvalidArgumentError,
    KernelConnectionError,
    KernelTimeoutError,
    KernelToolsError,
    RemoteExecutionError,
    RunNotFoundError,
    SyncError,
)
from kernel_tools.kernels.base import CellResult, RemoteKernel, backoff_seconds
from kernel_tools.kernels.cells import FRAME_ABSENT, call_cell, module_source, short_call_cell

AGENT_PACKAGE: Final = "kernel_tools_agent"
# A file up to this size goes in a pack with others, a larger one alone.
PACKED_BYTES: Final = 1024 * 1024
# Raw bytes after which a pack is closed.
PACK_BYTES: Final = 4 * 1024 * 1024
# A pack up to this size goes inside the code of its cell; one above it as a file, a round trip more.
# IPython hashes and tokenizes a cell in Python: 2 ms a kilobyte on a busy machine, measured.
IN_CODE_BYTES: Final = 32 * 1024
# The same for what a call is given, before it is compressed; fifty files make 5 KB.
ARGUMENTS_IN_CODE_BYTES: Final = 96 * 1024
# A busy Kaggle session answered after 15 s, measured; a half-open line never does.
ATTEMPT_SECONDS: Final = 20.0
# What the agent raises for a caller to catch, by class name there.
AGENT_ERRORS: Final[Mapping[str, type[KernelToolsError]]] = {
    "AgentError": AgentError,
    "RunNotFoundError": RunNotFoundError,
    "ValueRefusedError": InvalidArgumentError,
}


@dataclass(frozen=True, slots=True)
class Blob:
    """Content on its way. `read` gives the bytes that `sha256` names; `path`, where it lies in a file
    that is large, lets them be streamed instead.
    """

    sha256: str
    size: int
    read: Callable[[], bytes]
    path: Path | None = None

    @classmethod
    def of(cls, data: bytes) -> Blob:
        """Wrap bytes that are at hand."""
        return cls(hashlib.sha256(data).hexdigest(), len(data), lambda: data)


@dataclass(frozen=True, slots=True)
class Found:
    """What a remote lacks, and which listings it has never had."""

    missing: tuple[str, ...]
    unknown: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class AgentSource:
    """The agent as it travels.

    Attributes:
        contents: bytes by name in the package.
        manifest: `{name: [mode, sha256]}`, what the remote lays as `agent/<hash>/kernel_tools_agent`.
        hash: twelve hex digits that name all of it.
    """

    contents: Mapping[str, bytes]
    manifest: Mapping[str, Sequence[int | str]]
    hash: str

    @property
    def digests(self) -> tuple[str, ...]:
        """The SHA-256 of each file."""
        return tuple(str(digest) for _, digest in self.manifest.values())

    @property
    def blobs(self) -> tuple[Blob, ...]:
        """The files, ready to be sent."""
        return tuple(Blob.of(data) for data in self.contents.values())


@cache
def agent_source() -> AgentSource:
    """Read the agent's modules from where `kernel_tools.agent` lies; kept for the process's life."""
    folder = Path(bootstrap.__file__).resolve().parent
    contents = {path.name: path.read_bytes() for path in sorted(folder.glob("*.py"))}
    manifest: dict[str, Sequence[int | str]] = {
        name: (0o644, hashlib.sha256(data).hexdigest()) for name, data in contents.items()
    }
    return AgentSource(contents, manifest, bootstrap.hash12(manifest))


class AgentClient:
    """The agent on one kernel's machine, below one remote folder.

    Args:
        kernel: the line; calls take turns on it.
        remote_dir: POSIX path on the remote; a relative one is resolved there once, by the first call.
        attempt_seconds: until a cell counts as lost for the first time; then twice as long.
        sleep, clock: for tests.
    """

    def __init__(
        self,
        kernel: RemoteKernel,
        remote_dir: str,
        *,
        attempt_seconds: float = ATTEMPT_SECONDS,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.kernel = kernel
        self._attempt_seconds = attempt_seconds
        self._remote_dir = remote_dir
        self._resolved = False
        self._source = agent_source()
        self._framed: RemoteKernel | None = None  # which kernel was seen to have the frame
        self._sleep = sleep
        self._clock = clock

    def on(self, kernel: RemoteKernel) -> AgentClient:
        """Return a client of the same folder on another kernel of the same machine."""
        other = AgentClient(
            kernel,
            self._remote_dir,
            attempt_seconds=self._attempt_seconds,
            sleep=self._sleep,
            clock=self._clock,
        )
        other._resolved = self._resolved
        return other

    @property
    def agent_hash(self) -> str:
        """Names the agent's content; twelve hex digits."""
        return self._source.hash

    @property
    def remote_dir(self) -> str:
        """The absolute folder on the remote (one round trip the first time)."""
        if not self._resolved:
            self.missing(())
        return self._remote_dir

    def call(
        self, function: str, *, timeout_seconds: float = 60.0, **arguments: Any
    ) -> dict[str, Any]:
        """Call `api.<function>(**arguments)` of the agent, laying the agent first where it is absent.

        Raises:
            AgentError: the agent refused or failed.
            RunNotFoundError: there is no such run.
            KernelError: the line or the kernel; a lost line is retried until the time is up.
        """
        remote_dir = self.remote_dir
        call = {
            "module": f"_kernel_tools_agent_{self._source.hash}",
            "folder": f"{remote_dir}/agent/{self._source.hash}/{AGENT_PACKAGE}",
            "api": "api",
            "function": function,
            "arguments": arguments,
        }
        if function != "inspect_remote":
            arguments.setdefault("remote_dir", remote_dir)
        self._send_apart(call)
        reply = self._ask(call, timeout_seconds=timeout_seconds)
        if reply.get("error", {}).get("type") == "AgentMissing":
            self.ensure_agent()
            reply = self._ask(call, timeout_seconds=timeout_seconds)
        return _result_of(reply, function)

    def call_module(
        self, module: str, function: str, *, timeout_seconds: float = 60.0, **arguments: Any
    ) -> dict[str, Any]:
        """Call a function of a module of this folder, which is sent along; it may be repeated."""
        source = module_source(module)
        digest = hashlib.sha256(source.encode()).hexdigest()[:12]
        call = {
            "module": f"_kernel_tools_{module}_{digest}",
            "source": source,
            "function": function,
            "arguments": arguments,
        }
        return _result_of(self._ask(call, timeout_seconds=timeout_seconds), function)

    def ensure_agent(self) -> str:
        """Lay the agent on the remote unless it is there; return the folder that holds its package."""
        self.send(self._pick(self._source.blobs, self.missing(self._source.digests)))
        return f"{self._remote_dir}/agent/{self._source.hash}"

    def missing(self, digests: Iterable[str]) -> tuple[str, ...]:
        """Ask which contents the remote lacks; learns the absolute `remote_dir` by the way."""
        return self.look(digests).missing

    def look(self, digests: Iterable[str], listings: Iterable[str] = ()) -> Found:
        """Ask which of these contents, and of those that the listings name, the remote lacks."""
        arguments = {
            "remote_dir": self._remote_dir, "digests": list(digests), "listings": list(listings),
        }  # fmt: skip
        result = self._bootstrap("missing", arguments)
        self._remote_dir = str(result["remote_dir"])
        self._resolved = True
        return Found(tuple(result["missing"]), tuple(result["unknown"]))

    def send(self, blobs: Iterable[Blob]) -> None:
        """Send these contents, then lay the agent's folder. Safe to repeat.

        Raises:
            SyncError: a large file changed while it was being sent.
        """
        held: list[bytes] = []
        for blob in blobs:
            if blob.size > PACKED_BYTES:
                self._send_alone(blob)
                continue
            held.append(blob.read())
            # Compressing what is held anew for each file would be quadratic; raw size is the safe side.
            if sum(map(len, held)) > PACK_BYTES:
                self._receive(held)
                held = []
        self._receive(held)

    def put_secrets(self, run_id: str, payload: Mapping[str, Any]) -> str:
        """Write `secrets/<run_id>.json` (0600, its folder 0700); return its path on the remote.

        The content travels as a file, never inside code.
        """
        path = f"{self.remote_dir}/secrets/{run_id}.json"
        self.kernel.put_file(json.dumps(payload).encode(), path, mode=0o600)
        return path

    @staticmethod
    def _pick(blobs: Iterable[Blob], digests: Iterable[str]) -> Iterable[Blob]:
        known = {blob.sha256: blob for blob in blobs}
        return (known[digest] for digest in digests)

    def _send_alone(self, blob: Blob) -> None:
        """Straight to its place: `put_file` is whole or nothing too, and the remote hashes it again."""
        digest = blob.sha256
        source = blob.read() if blob.path is None else blob.path
        self.kernel.put_file(source, f"{self.remote_dir}/blobs/{digest[:2]}/{digest}")
        if self.missing([digest]):
            raise SyncError(f"{blob.path} changed while it was being sent.", hint="Sync again.")

    def _receive(self, contents: list[bytes]) -> None:
        manifest = {"hash": self._source.hash, "files": self._source.manifest}
        arguments = {"remote_dir": self.remote_dir, "agent_manifest": manifest}
        pack = bootstrap.pack(contents)
        if len(pack) <= IN_CODE_BYTES:
            self._bootstrap("receive", arguments, blob=pack)
            return
        path = f"{self.remote_dir}/blobs/.{secrets.token_hex(8)}.pack"
        self.kernel.put_file(pack, path)
        self._bootstrap("receive", arguments, blob_file=path)

    def _send_apart(self, call: dict[str, Any]) -> None:
        """Let large arguments (the manifest of thousands of files) travel as a file, not as code."""
        data = json.dumps(call["arguments"]).encode()
        if len(data) > ARGUMENTS_IN_CODE_BYTES:
            blob = Blob.of(data)
            self.send([blob])
            path = f"{self._remote_dir}/blobs/{blob.sha256[:2]}/{blob.sha256}"
            call.update(arguments={}, arguments_file=path)

    def _bootstrap(
        self,
        function: str,
        arguments: dict[str, Any],
        *,
        blob: bytes | None = None,
        blob_file: str | None = None,
    ) -> dict[str, Any]:
        call = {
            "module": f"_kernel_tools_bootstrap_{self._source.hash}",
            "source": self._source.contents["bootstrap.py"].decode(),
            "function": function,
            "arguments": arguments,
        }
        if blob is not None or blob_file is not None:
            call["blob"] = "archive"
        if blob_file is not None:
            call["blob_file"] = blob_file
        return _result_of(self._ask(call, timeout_seconds=60.0, blob=blob), function)

    def _ask(
        self, call: Mapping[str, Any], *, timeout_seconds: float, blob: bytes | None = None
    ) -> dict[str, Any]:
        deadline = self._clock() + timeout_seconds
        patience = self._attempt_seconds
        for wait in backoff_seconds():
            remaining = deadline - self._clock()
            patient = max(0.1, min(remaining, patience))
            try:
                reply = self._exchange(call, blob, patient)
                # None: the kernel is new, or was restarted; the second cell lays what answers it.
                return self._exchange(call, blob, patient) or {} if reply is None else reply
            except (KernelConnectionError, KernelTimeoutError) as error:
                if self._clock() + wait >= deadline:
                    raise
                if isinstance(error, KernelTimeoutError):
                    # The cell may only be slow (a hash of gigabytes), and the next waits behind it.
                    patience *= 2
            self._sleep(wait)
        raise AssertionError  # pragma: no cover - the waits never end

    def _exchange(
        self, call: Mapping[str, Any], blob: bytes | None, timeout_seconds: float
    ) -> dict[str, Any] | None:
        """Send one cell; None where it was a short one and the kernel lacks what answers it."""
        nonce = f"<{secrets.token_hex(8)}>"
        short = self._framed is self.kernel
        make = short_call_cell if short else call_cell
        result = self.kernel.execute(make(nonce, call, blob=blob), timeout_seconds=timeout_seconds)
        if short and nonce + FRAME_ABSENT in result.stdout:
            self._framed = None
            return None
        reply = _reply_of(result, nonce)
        self._framed = self.kernel
        return reply


def _reply_of(result: CellResult, nonce: str) -> dict[str, Any]:
    """Find the reply's line among whatever else was printed.

    Raises:
        KernelConnectionError: it is not there or not whole (the server drops output above 1 MB/s).
        RemoteExecutionError: the frame itself raised.
    """
    start = result.stdout.rfind(nonce)
    if start < 0 and result.error is not None and result.error.ename != "KeyboardInterrupt":
        raise RemoteExecutionError(result.error.ename, result.error.evalue, result.error.traceback)
    line = result.stdout[start + len(nonce) :].split("\n", 1)[0] if start >= 0 else ""
    try:
        reply = json.loads(line)
    except ValueError:
        raise KernelConnectionError("The reply of a cell was lost on the way.") from None
    assert isinstance(reply, dict)
    return reply


def _result_of(reply: Mapping[str, Any], function: str) -> dict[str, Any]:
    error = reply.get("error")
    if error is None:
        result = reply["result"]
        assert isinstance(result, dict)
        return result
    known = AGENT_ERRORS.get(error["type"])
    if known is not None:
        raise known(error["message"])
    trace = tuple(error.get("traceback", "").splitlines())
    cause = RemoteExecutionError(error["type"], error["message"], trace)
    raise AgentError(
        f"The agent failed at {function}: {error['type']}: {error['message']}"
    ) from cause
