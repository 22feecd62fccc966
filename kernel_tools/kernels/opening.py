"""How a kernel is found: one of our own, the one named, or the only idle one of a server that refuses.

A start is safe to repeat: it happens in a session under a name of ours, so that a reply which was lost
is found again instead of leaving a kernel behind that nobody knows.
"""

from __future__ import annotations

import contextlib
import secrets
from typing import TypeVar

from kernel_tools.errors import (
    InvalidArgumentError,
    KernelAuthError,
    KernelConnectionError,
    KernelError,
    KernelLostError,
    KernelRefusedError,
)
from kernel_tools.kernels.driver import SESSION_PREFIX, KernelRow, ServerDriver
from kernel_tools.kernels.held import HeldKernel, retried

K = TypeVar("K", bound=HeldKernel)


def open_kernel(kind: type[K], driver: ServerDriver, *, kernel_name: str, attach: str | None) -> K:
    """Start a kernel of our own, or attach to the one named; `kind` is the adapter's class.

    Where the server refuses to start one (403, 405), its only idle kernel is borrowed, and `notice`
    says so.

    Raises:
        InvalidArgumentError: no such kernel specification.
        KernelAuthError, KernelConnectionError, KernelLostError: as their names say.
    """
    patience = driver.patience
    try:
        rows = retried(driver.kernels, patience.connect, unanswered_seconds=patience.first)
    except KernelLostError:
        raise KernelLostError(
            f"There is no Jupyter server at {driver.address.shown} (404).",
            hint="Is the URL whole, or has its session ended? Get a new one and %remote_connect again.",
        ) from None
    if attach is None:
        kernel = _start(kind, driver, kernel_name)
    else:
        kernel = _attach(kind, driver, attach, rows)
    try:
        kernel.greet()
    except BaseException:
        with contextlib.suppress(KernelError):
            kernel.close(stop_kernel=True)
        raise
    return kernel


def _attach(kind: type[K], driver: ServerDriver, kernel_id: str, rows: tuple[KernelRow, ...]) -> K:
    for row in rows:
        if row.id == kernel_id:
            return kind(driver, kernel_id, kernel_name=row.name)
    there = ", ".join(f"{row.id} ({row.name}, {row.state})" for row in rows) or "none"
    raise KernelLostError(
        f"The server at {driver.address.shown} has no kernel {kernel_id}.",
        hint=f"Its kernels: {there}.",
    )


def _start(kind: type[K], driver: ServerDriver, kernel_name: str) -> K:
    mark = SESSION_PREFIX + secrets.token_hex(8)
    tried = False

    def start() -> str:
        nonlocal tried
        if tried:
            for kernel_id in driver.kernels_of(mark):
                return kernel_id
        tried = True
        return driver.start_kernel(kernel_name, mark)

    try:
        kernel_id = retried(start, driver.patience.start)
    except (KernelAuthError, KernelRefusedError) as refusal:
        # 403 is also what an expired URL is answered with; then the list is refused as well.
        return _borrow(kind, driver, refusal, driver.kernels())
    except KernelConnectionError:
        raise
    except KernelError:
        names = driver.kernel_names()
        if names and kernel_name not in names:
            raise InvalidArgumentError(
                f"The server has no kernel named {kernel_name!r}.",
                hint=f"It has: {', '.join(names)}.",
            ) from None
        raise
    return kind(driver, kernel_id, kernel_name=kernel_name, mark=mark)


def _borrow(
    kind: type[K], driver: ServerDriver, refusal: KernelError, rows: tuple[KernelRow, ...]
) -> K:
    # Older servers leave "starting" on kernels that have long been idle.
    idle = [row for row in rows if row.state in {"idle", "starting"}]
    if len(idle) != 1:
        there = ", ".join(f"{row.id} ({row.state})" for row in rows) or "none"
        raise KernelAuthError(
            f"The server at {driver.address.shown} does not let us start a kernel, and has "
            f"{len(idle)} idle ones to choose from.",
            hint=f"Name the one to use: %remote_connect URL --attach KERNEL_ID. Its kernels: {there}.",
        ) from refusal
    notice = (
        "The server does not let us start a kernel; its only idle one is used and will never be "
        "interrupted, restarted or ended from here."
    )
    return kind(driver, idle[0].id, kernel_name=idle[0].name, notice=notice)
