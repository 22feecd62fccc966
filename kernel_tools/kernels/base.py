"""What a remote kernel is to the rest: the `RemoteKernel` protocol, its results, the server's address.

Adapters live beside this module and are the only ones that import a client library. Whatever those
raise leaves here as one of `kernel_tools.errors`; no URL or token leaves unredacted.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, runtime_checkable
from urllib.parse import parse_qs, urlsplit, urlunsplit

from kernel_tools.errors import (
    InvalidArgumentError,
    KernelAuthError,
    KernelConnectionError,
    KernelError,
    KernelLostError,
    RemoteExecutionError,
)
from kernel_tools.redact import redact, register_secret
from kernel_tools.settings import Secret

# Called with (bytes done, bytes in all) while a file travels.
Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class RemoteErrorInfo:
    """What the remote code raised."""

    ename: str
    evalue: str
    traceback: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CellResult:
    """What a cell printed, and what it raised, if it did."""

    stdout: str = ""
    stderr: str = ""
    error: RemoteErrorInfo | None = None

    def check(self) -> CellResult:
        """Return self.

        Raises:
            RemoteExecutionError: the cell raised.
        """
        if self.error is not None:
            raise RemoteExecutionError(self.error.ename, self.error.evalue, self.error.traceback)
        return self


@runtime_checkable
class RemoteKernel(Protocol):
    """One kernel on a Jupyter server. Calls take turns: a second thread waits for the first.

    Every call raises `KernelConnectionError` (the line), `KernelAuthError` (401, 403),
    `KernelLostError` (404) or `KernelTimeoutError`, and nothing foreign.
    """

    notice: str
    """What a person should know about how the kernel was found; empty when all went as asked."""

    @property
    def kernel_id(self) -> str:
        """The server's id of the kernel."""

    @property
    def owned(self) -> bool:
        """True where we started it; only then may it be interrupted or stopped."""

    @property
    def description(self) -> str:
        """One redacted line for people."""

    def execute(self, code: str, *, timeout_seconds: float = 60.0) -> CellResult:
        """Run a cell once. It is never sent a second time, and never interrupted by a timeout."""

    def put_file(
        self,
        source: Path | bytes,
        remote_path: str,
        *,
        mode: int = 0o644,
        on_progress: Progress | None = None,
    ) -> None:
        """Write a remote file, whole or not at all, verified by SHA-256. Safe to repeat."""

    def get_file(
        self, remote_path: str, destination: Path, *, on_progress: Progress | None = None
    ) -> None:
        """Bring a remote file, whole or not at all, verified by SHA-256. Safe to repeat.

        Raises:
            FetchError: the remote file does not exist, or what came is not what is there.
        """

    def interrupt(self) -> None:
        """Interrupt what runs.

        Raises:
            KernelError: the kernel is not ours.
        """

    def close(self, *, stop_kernel: bool) -> None:
        """Let go of the line; with `stop_kernel`, end the kernel too if it is ours."""


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """Where a Jupyter server is. The URL may itself be the credential, so only `shown` is printed."""

    base_url: str = field(repr=False)
    token: Secret | None
    shown: str

    @classmethod
    def parse(cls, url: str, token: Secret | str | None = None) -> ServerAddress:
        """Read what a person pasted: a base URL, Kaggle's `/k/<id>/<token>/proxy`, or `...?token=`.

        A trailing `/lab`, `/tree` or `/api` is dropped; an explicit `token` wins over the URL's own.

        Raises:
            InvalidArgumentError: it is no http(s) URL.
        """
        parts = urlsplit(url.strip())
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise InvalidArgumentError(
                "The kernel's URL must start with http:// or https:// and name a host.",
                hint="Copy it whole from Kaggle's 'VSCode Compatible URL' or from `jupyter server list`.",
            )
        own_token = parse_qs(parts.query).get("token", [None])[0]
        if token is None or isinstance(token, str):
            token = Secret(token or own_token or "") if token or own_token else None
        path = _server_path(parts.path)
        segments = path.split("/")
        if len(segments) > 3 and segments[1] == "k" and segments[-1] == "proxy":
            register_secret(segments[3])
        if parts.password:
            register_secret(parts.password)
        base_url = urlunsplit((parts.scheme, parts.netloc, path, "", ""))
        return cls(base_url, token, redact(base_url))


def _server_path(path: str) -> str:
    path = path.rstrip("/")
    segments = path.split("/")
    for page in ("lab", "tree", "api", "notebooks"):
        if page in segments:
            # The page is the last part that a browser adds, never part of a Kaggle credential.
            at = len(segments) - 1 - segments[::-1].index(page)
            if "proxy" not in segments[at:]:
                segments = segments[:at]
    return "/".join(segments)


def error_of_status(status: int, what: str) -> KernelError:
    """Name an HTTP status: `what` says what was asked, redacted."""
    if status in {401, 403}:
        return KernelAuthError(
            f"The Jupyter server refused {what} ({status}): the URL or token is wrong or has expired.",
            hint="Get a new URL and %remote_connect again; a run that was started goes on.",
        )
    if status == 404:
        return KernelLostError(
            f"The Jupyter server does not know {what} (404).",
            hint="The kernel or the session has ended; %remote_connect again. Runs are found by %remote_runs.",
        )
    return KernelConnectionError(
        f"The Jupyter server answered {status} to {what}.",
        hint="Try again in a moment; a run that was started goes on.",
    )


class ForeignError(Exception):
    """A client library's exception, its text redacted, kept as the `__cause__` of ours."""

    @classmethod
    def of(cls, error: BaseException) -> ForeignError:
        """Copy class name and redacted text; the original, which may hold a URL, is let go."""
        kind = type(error)
        return cls(f"{kind.__module__}.{kind.__qualname__}: {redact(str(error))}")


def backoff_seconds(
    *, first: float = 0.1, factor: float = 2.0, most: float = 5.0, rng: random.Random | None = None
) -> Iterator[float]:
    """Yield waits for ever: exponential, each drawn from the upper half of its step (jitter)."""
    rng = rng or random.Random()  # noqa: S311 - jitter, no secret
    step = first
    while True:
        yield rng.uniform(step / 2, step)
        step = min(step * factor, most)
