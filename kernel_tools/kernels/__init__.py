"""Remote kernels: one protocol, an adapter a client library, and the embedded local server."""

from __future__ import annotations

from kernel_tools.errors import InvalidArgumentError
from kernel_tools.kernels.base import CellResult, RemoteErrorInfo, RemoteKernel
from kernel_tools.settings import Secret

CLIENTS = ("pyrun", "jupyter")

__all__ = ["CLIENTS", "CellResult", "RemoteErrorInfo", "RemoteKernel", "connect_kernel"]


def connect_kernel(
    url: str,
    *,
    token: Secret | str | None = None,
    kernel_name: str = "python3",
    attach: str | None = None,
    client: str = "pyrun",
) -> RemoteKernel:
    """Start a kernel of our own on a Jupyter server, or attach to the one named.

    Args:
        url: base URL, Kaggle's proxy URL, or a URL with `?token=`.
        token: wins over the URL's own.
        kernel_name: specification to start.
        attach: id of a kernel that exists; it is never interrupted, restarted or ended.
        client: library that carries the line, one of `CLIENTS`.

    Raises:
        InvalidArgumentError: no such client or kernel specification, or no URL.
        MissingDependencyError: the client's library is not installed.
        KernelError: the server does not answer, refuses, or does not know the kernel.
    """
    if client == "pyrun":
        from kernel_tools.kernels.pyrun import PyrunKernel

        return PyrunKernel.connect(url, token=token, kernel_name=kernel_name, attach=attach)
    if client == "jupyter":
        from kernel_tools.kernels.kernel_client import ClientKernel

        return ClientKernel.connect(url, token=token, kernel_name=kernel_name, attach=attach)
    raise InvalidArgumentError(
        f"There is no client {client!r}.", hint=f"Use {' or '.join(CLIENTS)}."
    )
