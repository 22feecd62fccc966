"""A cell on the remote kernel: sent once, its output as it comes, values there and back.

Whoever waits does so in the calling thread, and the line is read in another, so that Ctrl-C can do what
the kernel allows: interrupt it where it is ours, else only stop waiting.
"""

from __future__ import annotations

import queue
import secrets
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from kernel_tools.connecting.connection import Connection
from kernel_tools.errors import (
    InvalidArgumentError,
    KernelConnectionError,
    KernelError,
    KernelLostError,
)
from kernel_tools.kernels import values
from kernel_tools.kernels.base import CellOutput, CellResult, OnOutput, RemoteKernel
from kernel_tools.kernels.bounded import LateError, within
from kernel_tools.redact import redact

# Nobody waits for longer; an actual limit is for runs.
FOREVER_SECONDS: Final = 30 * 86400.0
# Without a word from the cell for so long, the server is asked whether it still runs.
PROBE_SECONDS: Final = 15.0
ANSWER_SECONDS: Final = 5.0
# An unfinished line is held back for so long: a secret must not slip through in two halves.
FLUSH_SECONDS: Final = 0.25


def execute(
    connection: Connection,
    code: str,
    *,
    push: Mapping[str, Any],
    bring: Sequence[str],
    on_output: OnOutput,
    probe_seconds: float = PROBE_SECONDS,
) -> dict[str, Any]:
    """Run a cell once, and return the variables of `bring` as they are after it.

    Args:
        connection: where.
        code: the cell.
        push: variables that are set there first.
        bring: names of variables there.
        on_output: told what the cell prints and shows, redacted.
        probe_seconds: of silence, before the server is asked whether the cell still runs.

    Raises:
        RemoteExecutionError: the cell raised.
        InvalidArgumentError: a value is none that can travel, or there is none of that name.
        KernelLostError: the kernel was gone; a new one is there now, without variables.
        KernelConnectionError: the line broke; the cell is not sent again.
    """
    for name in (*push, *bring):
        if not name.isidentifier():
            raise InvalidArgumentError(f"{name!r} is no name of a variable.")
    for name, value in push.items():
        _send(connection, name, value)
    kernel = connection.usable_kernel()
    try:
        kernel.state()  # a line to a kernel that is gone would just be silent
        _Waiting(kernel, code, on_output, probe_seconds).result().check()
    except KernelLostError:
        connection.revive(kernel)
        raise KernelLostError(
            "The kernel was gone, and with it its variables; there is a new one now.",
            hint="Run the cell again.",
        ) from None
    return {name: _bring(connection, name) for name in bring}


class _Waiting:
    """A cell under way."""

    def __init__(
        self, kernel: RemoteKernel, code: str, on_output: OnOutput, probe_seconds: float
    ) -> None:
        self._kernel = kernel
        self._code = code
        self._shown = _Redacted(on_output)
        self._probe_seconds = probe_seconds
        self._events: queue.SimpleQueue[CellOutput | CellResult | BaseException] = (
            queue.SimpleQueue()
        )
        self._interrupted = False

    def result(self) -> CellResult:
        """Wait for the end."""
        threading.Thread(target=self._run, name="kernel_tools cell", daemon=True).start()
        while True:
            try:
                event = self._next()
            except KeyboardInterrupt:
                self._react()
                continue
            if isinstance(event, CellOutput):
                self._shown.add(event)
                continue
            self._shown.flush()
            if isinstance(event, CellResult):
                return event
            if type(event) is KernelConnectionError:
                raise KernelConnectionError(
                    f"The line broke while the cell ran in {self._kernel.description}; it may still "
                    "run there, and was not sent again.",
                    hint="What it printed since is lost; its variables are not: %%remote shows them.",
                ) from event
            raise event

    def _run(self) -> None:
        try:
            self._events.put(
                self._kernel.execute(
                    self._code, timeout_seconds=FOREVER_SECONDS, on_output=self._events.put
                )
            )
        except BaseException as error:  # noqa: BLE001 - raised again by the thread that waits
            self._events.put(error)

    def _next(self) -> CellOutput | CellResult | BaseException:
        idle_once = False
        heard = time.monotonic()
        while True:
            try:
                return self._events.get(timeout=FLUSH_SECONDS)
            except queue.Empty:
                self._shown.flush()
            if time.monotonic() - heard < self._probe_seconds:
                continue
            heard = time.monotonic()
            try:
                idle = within(ANSWER_SECONDS, self._kernel.state) == "idle"
            except KernelLostError as error:
                self._kernel.hang_up()
                return error
            except (KernelError, LateError):
                idle = False
            if idle and idle_once:
                # Its last words were lost, and will not come again.
                self._kernel.hang_up()
                return KernelConnectionError("the end of the cell was lost on the way.")
            idle_once = idle

    def _react(self) -> None:
        """Do what Ctrl-C may do here; a second one always ends the waiting."""
        if self._kernel.owned and not self._interrupted:
            self._interrupted = True
            self._kernel.interrupt()
            return
        self._kernel.hang_up()
        why = "" if self._kernel.owned else ", which is not ours and so is never interrupted"
        print(
            f"Stopped waiting; the cell goes on in {self._kernel.description}{why}.",
            file=sys.stderr,
        )
        raise KeyboardInterrupt from None


class _Redacted:
    """Passes output on without secrets; text by whole lines, its rest when nothing more comes."""

    def __init__(self, on_output: OnOutput) -> None:
        self._on_output = on_output
        self._kind = ""
        self._rest = ""

    def add(self, output: CellOutput) -> None:
        if output.kind not in {"stdout", "stderr"}:
            self.flush()
            data = {
                kind: redact(value)
                if isinstance(value, str) and kind.startswith("text/")
                else value
                for kind, value in output.data.items()
            }
            self._on_output(CellOutput(output.kind, data=data, metadata=output.metadata))
            return
        if output.kind != self._kind:
            self.flush()
            self._kind = output.kind
        text = self._rest + output.text
        end = max(text.rfind("\n"), text.rfind("\r")) + 1
        self._rest = text[end:]
        self._say(text[:end])

    def flush(self) -> None:
        text, self._rest = self._rest, ""
        self._say(text)

    def _say(self, text: str) -> None:
        if text:
            self._on_output(CellOutput(self._kind, redact(text)))


def _send(connection: Connection, name: str, value: Any) -> None:
    with tempfile.TemporaryDirectory(prefix="kernel_tools-") as folder:
        path = Path(folder) / "value"
        _refusing(f"--push {name}", lambda: values.write(value, str(path)))
        there = _place(connection)
        connection.put_file(path, there, mode=0o600)
    _ask(connection, f"--push {name}", "take", name=name, path=there)
    _ask(connection, "", "discard", path=there)


def _bring(connection: Connection, name: str) -> Any:
    there = _place(connection)
    _ask(connection, f"-o {name}", "give", name=name, path=there)
    with tempfile.TemporaryDirectory(prefix="kernel_tools-") as folder:
        path = Path(folder) / "value"
        connection.get_file(there, path)
        _ask(connection, "", "discard", path=there)
        return _refusing(f"-o {name}", lambda: values.read(str(path)))


def _place(connection: Connection) -> str:
    return f"{connection.remote_dir}/values/{secrets.token_hex(8)}"


def _ask(connection: Connection, what: str, function: str, **arguments: str) -> None:
    _refusing(what, lambda: connection.call_module("values", function, **arguments))


def _refusing(what: str, action: Callable[[], Any]) -> Any:
    """Name a value that cannot travel after the option that asked for it."""
    try:
        return action()
    except (values.ValueRefusedError, InvalidArgumentError) as error:
        raise InvalidArgumentError(f"{what}: {error}.") from None
    except ModuleNotFoundError as error:
        raise InvalidArgumentError(
            f"{what}: the value needs {error.name}, which is not installed here."
        ) from None
