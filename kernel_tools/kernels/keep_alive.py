"""An empty cell now and then, so that a session that looks idle is not ended. Only when asked for.

A run that is watched is polled once a second and needs none of this. Whether a provider's rules allow it
is for its user to know.
"""

from __future__ import annotations

import threading
import weakref
from typing import Final, Protocol

from kernel_tools.errors import KernelToolsError
from kernel_tools.kernels.base import RemoteKernel
from kernel_tools.kernels.cells import KEPT_OUT_OF_HISTORY

CELL: Final = KEPT_OUT_OF_HISTORY + "pass\n"
ANSWER_SECONDS: Final = 60.0


class HasKernel(Protocol):
    """What is kept alive; a `Connection` is one."""

    kernel: RemoteKernel
    closed: bool


class KeepAlive:
    """A daemon thread that runs `pass` on whatever kernel the connection has; ends with it.

    Args:
        connection: held weakly.
        seconds: between two cells.
    """

    def __init__(self, connection: HasKernel, seconds: float) -> None:
        self._over = threading.Event()
        thread = threading.Thread(
            target=_keep, args=(weakref.ref(connection), seconds, self._over),
            name="kernel_tools keep-alive", daemon=True,
        )  # fmt: skip
        thread.start()

    def end(self) -> None:
        """Run no more."""
        self._over.set()


def _keep(reference: weakref.ref[HasKernel], seconds: float, over: threading.Event) -> None:
    while not over.wait(seconds):
        connection = reference()
        if connection is None or connection.closed:
            return
        kernel = connection.kernel
        del connection
        try:
            kernel.execute(CELL, timeout_seconds=ANSWER_SECONDS)
        except KernelToolsError:
            continue  # whoever asks for something will be told
