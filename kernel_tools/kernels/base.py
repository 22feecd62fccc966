"""What a remote kernel is to the rest: the `RemoteKernel` protocol, its results, the server's address.

Adapters live beside this module and are the only ones that import a client library. Whatever those
raise leaves here as one of `kernel_tools.errors`; no URL or token leaves unredacted.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol, runtime_checkable
from urllib.parse import parse_qs, urlsplit, urlunsplit

from kernel_tools.errors import (
    InvalidArgumentError,
    KernelAuthError,
    KernelConnectionError,
    KernelError,
    KernelLostError,
    KernelRefusedError,
    RemoteExecutionError,
)
from kernel_tools.redact import redact, register_secret
from kernel_tools.settings import Secret

# Called with (bytes done, bytes in all) while a file travels.
Progress = Callable[[int, int], None]
# Called with each piece of a cell's output, as it comes.
OnOutput = Callable[["CellOutput"], None]


@dataclass(frozen=True, slots=True)
class Patience:
    """How long to wait for what, in seconds. The defaults fit a busy Kaggle session: 15 s a round trip.

    Attributes:
        first: until the very first answer, where nobody listens: the likeliest cause is a wrong URL.
        connect: until a line is back, retries included; also where the first answer is 502, 503, 504.
        start: until a new kernel answers: imports from a cold disk.
        request: one HTTP request, and the opening of one WebSocket.
        answer: one chunk of a file; without an answer for so long the line counts as lost.
        stall: a file's transfer, without one byte of progress.
        turn: for the turn behind a file that travels.
    """

    first: float = 3.0
    connect: float = 20.0
    start: float = 60.0
    request: float = 20.0
    answer: float = 30.0
    stall: float = 120.0
    turn: float = 600.0


PATIENCE: Final = Patience()

# A proxy answers these while the kernel and its runs live on; 429 asks for a pause, 524 is Cloudflare's.
PASSING_STATUSES: Final = frozenset({408, 425, 429, 500, 502, 503, 504, 520, 522, 524})


@dataclass(frozen=True, slots=True)
class RemoteErrorInfo:
    """What the remote code raised."""

    ename: str
    evalue: str
    traceback: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CellOutput:
    """A piece of what a cell says.

    Attributes:
        kind: `stdout`, `stderr`, `display` or `clear`.
        text: of the first two.
        data, metadata: a display by MIME type; an expression's value is one too.
    """

    kind: str
    text: str = ""
    data: Mapping[str, Any] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)


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

    def execute(
        self, code: str, *, timeout_seconds: float = 60.0, on_output: OnOutput | None = None
    ) -> CellResult:
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

    def state(self) -> str:
        """Return what the server says of the kernel: `idle`, `busy`, `starting`, ..."""

    def hang_up(self) -> None:
        """Drop the line: a call that waits on it ends with `KernelConnectionError`; the kernel lives."""

    def close(self, *, stop_kernel: bool) -> None:
        """Let go of the line; with `stop_kernel`, end the kernel too if it is ours."""


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """Where a Jupyter server is. The URL may itself be the credential, so only `shown` is printed."""

    base_url: str = field(repr=False)
    token: Secret | None
    shown: str
    password: Secret | None = None

    @classmethod
    def parse(
        cls, url: str, token: Secret | str | None = None, *, password: Secret | None = None
    ) -> ServerAddress:
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
        return cls(base_url, token, redact(base_url), password)


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


def error_of_status(status: int, what: str, *, known: bool = True) -> KernelError:
    """Name an HTTP status.

    Args:
        status: 400 or above.
        what: what was asked, redacted.
        known: the server has answered us before, so that a refusal is news.
    """
    if status in {401, 403}:
        if known:
            return KernelAuthError(
                f"The Jupyter server refused {what} ({status}): the URL or token has expired: get a "
                "new one and %remote_connect again; the run goes on."
            )
        return KernelAuthError(
            f"The Jupyter server refused {what} ({status}): the URL or token is wrong or has expired.",
            hint="Get a new one and %remote_connect again; a run that was started goes on.",
        )
    if status == 404:
        return KernelLostError(
            f"The Jupyter server does not know {what} (404).",
            hint="The kernel or the session has ended; %remote_connect again. Runs are found by %remote_runs.",
        )
    if status == 405:
        return KernelRefusedError(f"The Jupyter server does not allow {what} (405).")
    if status in PASSING_STATUSES:
        return KernelConnectionError(
            f"The Jupyter server answered {status} to {what}.",
            hint="Try again in a moment; a run that was started goes on.",
            status=status,
        )
    return KernelError(
        f"The Jupyter server answered {status} to {what}.",
        hint="Its own log says why; a run that was started goes on.",
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
