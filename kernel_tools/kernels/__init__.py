"""Remote kernels: one protocol, an adapter a client library, and the embedded local server."""

from __future__ import annotations

import importlib.util
from typing import Final

from kernel_tools.errors import InvalidArgumentError, MissingDependencyError
from kernel_tools.kernels.base import (
    PATIENCE,
    CellOutput,
    CellResult,
    Patience,
    RemoteErrorInfo,
    RemoteKernel,
    ServerAddress,
)
from kernel_tools.settings import Secret

CLIENTS = ("pyrun", "jupyter")
# Which package each stands for; the first that is installed is the default.
PACKAGES: Final = {"pyrun": "pyrun_jupyter", "jupyter": "jupyter_kernel_client"}

__all__ = [
    "CLIENTS",
    "CellOutput",
    "CellResult",
    "Patience",
    "RemoteErrorInfo",
    "RemoteKernel",
    "connect_kernel",
    "default_client",
]


def default_client() -> str:
    """Return `pyrun` where pyrun-jupyter is installed, else `jupyter`.

    Raises:
        MissingDependencyError: neither library is installed.
    """
    for client, package in PACKAGES.items():
        if importlib.util.find_spec(package) is not None:
            return client
    raise MissingDependencyError(
        "no library that talks to a Jupyter kernel is installed.",
        hint="pip install 'jupyter-kernel-client>=1.0,<2' (BSD-3), or, for noncommercial use, "
        "'pyrun-jupyter>=0.7.1,<0.8'.",
    )


def connect_kernel(
    url: str,
    *,
    token: Secret | str | None = None,
    password: Secret | None = None,
    kernel_name: str = "python3",
    attach: str | None = None,
    client: str | None = None,
    patience: Patience = PATIENCE,
) -> RemoteKernel:
    """Start a kernel of our own on a Jupyter server, or attach to the one named.

    Args:
        url: base URL, Kaggle's proxy URL, or a URL with `?token=`.
        token: wins over the URL's own.
        password: of the server's login page, where it has no token.
        kernel_name: specification to start.
        attach: id of a kernel that exists; it is never interrupted, restarted or ended.
        client: library that carries the line, one of `CLIENTS` (default: see `default_client`).
        patience: how long to wait for what.

    Raises:
        InvalidArgumentError: no such client or kernel specification, or no URL.
        MissingDependencyError: the client's library is not installed.
        KernelError: the server does not answer, refuses, or does not know the kernel.
    """
    from kernel_tools.kernels.opening import open_kernel

    client = default_client() if client is None else client
    address = ServerAddress.parse(url, token, password=password)
    if client == "pyrun":
        from kernel_tools.kernels.pyrun import PyrunDriver, PyrunKernel

        driver = PyrunDriver(address, patience)
        return open_kernel(PyrunKernel, driver, kernel_name=kernel_name, attach=attach)
    if client == "jupyter":
        from kernel_tools.kernels.kernel_client import ClientDriver, ClientKernel

        other = ClientDriver(address, patience)
        return open_kernel(ClientKernel, other, kernel_name=kernel_name, attach=attach)
    raise InvalidArgumentError(
        f"There is no client {client!r}.", hint=f"Use {' or '.join(CLIENTS)}."
    )
