"""Every error a caller may want to catch, and how it looks in a notebook.

    KernelToolsError
    ├── InvalidArgumentError        a magic or function was called wrongly
    ├── ConfigurationError          a configuration, setting or .env value is wrong
    ├── MissingDependencyError      an optional package is not installed
    ├── NotConnectedError           there is no connection of that name
    ├── KernelError
    │   ├── KernelConnectionError   the server or its line does not answer (retry may help)
    │   ├── KernelAuthError         401 or 403: the URL or token is wrong or has expired
    │   ├── KernelTimeoutError      no reply within the deadline
    │   ├── KernelLostError         the kernel is gone (404, died)
    │   ├── KernelRefusedError      the server does not allow it (405)
    │   └── RemoteExecutionError    the remote code raised
    ├── AgentError                  the agent on the remote refused or failed
    ├── SyncError                   the code must not or could not travel
    ├── StoreError
    │   ├── StoreUnreachableError   the object store does not answer
    │   ├── StoreAuthError          wrong key, no permission
    │   └── ObjectNotFoundError     no such object or bucket
    ├── StagingError                a data set is not fit to be staged
    ├── ServiceError                an embedded local service did not start
    ├── RunNotFoundError            no run of that id
    ├── RunFailed                   the run ended as failed or timed out
    ├── WaitTimeoutError            the run goes on after `wait(timeout=)`
    └── FetchError                  a file could not be brought back whole

A subclass is one thing to catch; nothing here is told apart by its message. In IPython each shows as
one line. It is deliberately no `UsageError`: tools that execute notebooks (nbmake, nbval) take a cell
that raised that one for a success.
"""

from __future__ import annotations

from kernel_tools.redact import redact


class KernelToolsError(Exception):
    """Base of all. `str(error)` is one redacted sentence: what, where, and what to type next."""

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        text = redact(" ".join(message.split()))
        self.hint = None if hint is None else redact(" ".join(hint.split()))
        super().__init__(text if self.hint is None else f"{text} {self.hint}")

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle without calling `__init__`, which subclasses may widen."""
        return (_rebuild, (type(self), str(self), dict(self.__dict__)))

    def _render_traceback_(self) -> list[str]:
        """IPython's hook: one line instead of a traceback (`%tb` shows the same; see `__cause__`)."""
        return [f"{type(self).__name__}: {self}"]


def _rebuild(kind: type[KernelToolsError], text: str, state: dict[str, object]) -> KernelToolsError:
    error = kind.__new__(kind)
    Exception.__init__(error, text)
    error.__dict__.update(state)
    return error


class InvalidArgumentError(KernelToolsError):
    """A magic or function was called with arguments that do not fit."""


class ConfigurationError(KernelToolsError):
    """A configuration file, override, setting or .env value is wrong."""


class MissingDependencyError(KernelToolsError):
    """An optional package is needed and absent; the message says what to install."""


class NotConnectedError(KernelToolsError):
    """There is no connection, or none of that name."""


class KernelError(KernelToolsError):
    """Base of what goes wrong between here and the remote kernel."""


class KernelConnectionError(KernelError):
    """The server or the line to it does not answer; trying again may help.

    Attributes:
        status: the HTTP status that a server or proxy answered with, None where nobody did.
    """

    def __init__(self, message: str, *, hint: str | None = None, status: int | None = None) -> None:
        super().__init__(message, hint=hint)
        self.status = status


class KernelAuthError(KernelError):
    """The server answered 401 or 403."""


class KernelTimeoutError(KernelError):
    """The kernel gave no reply within the deadline; what was sent may still run."""


class KernelLostError(KernelError):
    """The kernel is gone: the server does not know it, or it died."""


class KernelRefusedError(KernelError):
    """The server does not allow what was asked, whoever asks (405)."""


class RemoteExecutionError(KernelError):
    """The remote code raised.

    Attributes:
        ename: class name of the remote exception.
        evalue: its text.
        traceback: its lines, redacted.
    """

    def __init__(self, ename: str, evalue: str, traceback: tuple[str, ...] = ()) -> None:
        self.ename = ename
        self.evalue = redact(evalue)
        self.traceback = tuple(redact(line) for line in traceback)
        super().__init__(f"{ename} on the remote: {evalue}")

    def _render_traceback_(self) -> list[str]:
        """Show the remote's own traceback: the code that raised is the user's, and is not here."""
        return [*self.traceback, *super()._render_traceback_()]


class AgentError(KernelToolsError):
    """The agent on the remote refused a request or failed at it."""


class SyncError(KernelToolsError):
    """The code must not or could not travel."""


class StoreError(KernelToolsError):
    """Base of what goes wrong with object storage."""


class StoreUnreachableError(StoreError):
    """The object store does not answer."""


class StoreAuthError(StoreError):
    """The store refused the keys, or they permit too little."""


class ObjectNotFoundError(StoreError):
    """There is no such object or bucket."""


class StagingError(KernelToolsError):
    """A data set is not fit to be staged, or staging it failed."""


class ServiceError(KernelToolsError):
    """An embedded local service (Jupyter server, object store) did not start or answer."""


class RunNotFoundError(KernelToolsError):
    """No run of that id is known here or on the remote."""


class RunFailed(KernelToolsError):  # noqa: N818 - the name users read in a batch log
    """The run ended as `failed` or `timed_out` (or `stopped`, where completion was awaited).

    Attributes:
        run_id: which run.
        state: its final state, as a string.
        remote_error: `status["error"]`: type, message, traceback, rank; or None.
    """

    def __init__(
        self,
        message: str,
        *,
        run_id: str,
        state: str,
        remote_error: dict[str, object] | None = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(message, hint=hint)
        self.run_id = run_id
        self.state = state
        self.remote_error = remote_error


class WaitTimeoutError(KernelToolsError):
    """`wait(timeout=)` ended before the run did; the run goes on."""


class FetchError(KernelToolsError):
    """A file could not be brought back whole and verified."""
