"""A real jupyter_server with real ipykernels, at a base URL shaped like Kaggle's proxy.

Every test that uses `server` runs against the newest and, in the long series, against the versions of
Kaggle's image.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from kernel_tools.kernels import CLIENTS, RemoteKernel, connect_kernel
from tests.kernel.kaggle_image import python_of_kaggle


@dataclass(frozen=True)
class JupyterServer:
    """What a test may use of the server that was started for it."""

    port: int
    token: str
    jwe: str
    root: Path
    python: str = sys.executable
    scheme: str = "http"

    @property
    def url(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.port}/k/123/{self.jwe}/proxy"

    @property
    def url_with_token(self) -> str:
        return f"{self.url}/lab?token={self.token}"

    def rest(self, path: str, method: str = "GET", body: dict | None = None):
        request = urllib.request.Request(
            f"{self.url}/api/{path}",
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Authorization": f"token {self.token}"},
        )
        with urllib.request.urlopen(request, timeout=20) as answer:
            text = answer.read()
        return json.loads(text) if text else None

    def kernel_ids(self) -> set[str]:
        return {kernel["id"] for kernel in self.rest("kernels")}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start_server(
    root: Path, *extra: str, python: str = sys.executable, scheme: str = "http"
) -> tuple[subprocess.Popen, JupyterServer]:
    server = JupyterServer(
        free_port(), secrets.token_hex(16), secrets.token_urlsafe(40), root, python, scheme
    )
    home = root / "home"
    home.mkdir(parents=True)
    environ = {
        **{k: v for k, v in os.environ.items() if not k.startswith("JUPYTER")},
        "HOME": str(home),
        "IPYTHONDIR": str(home / "ipython"),
        "JUPYTER_CONFIG_DIR": str(home / "config"),
        "JUPYTER_RUNTIME_DIR": str(home / "runtime"),
        "JUPYTER_TOKEN": server.token,
        "OMP_NUM_THREADS": "1",
    }
    log = (root / "server.log").open("wb")
    process = subprocess.Popen(
        [
            python, "-m", "jupyter_server", "--no-browser", "--allow-root",
            "--ServerApp.ip=127.0.0.1", f"--ServerApp.port={server.port}", "--ServerApp.port_retries=0",
            f"--ServerApp.base_url=/k/123/{server.jwe}/proxy", f"--ServerApp.root_dir={root}", *extra,
        ],
        cwd=root, env=environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
    )  # fmt: skip
    log.close()
    deadline = time.monotonic() + 60
    while True:
        with contextlib.suppress(OSError):
            server.rest("status")
            return process, server
        if process.poll() is not None or time.monotonic() > deadline:
            raise AssertionError((root / "server.log").read_text()[-2000:])
        time.sleep(0.05)


def stop_server(process: subprocess.Popen, server: JupyterServer) -> None:
    with contextlib.suppress(OSError):
        for kernel_id in server.kernel_ids():
            server.rest(f"kernels/{kernel_id}", "DELETE")
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(10)


# The versions of Kaggle's image belong to the long series: their environment is installed from PyPI first.
@pytest.fixture(
    scope="session", params=["newest", pytest.param("kaggle", marks=pytest.mark.campaign)]
)
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[JupyterServer]:
    python = sys.executable
    if request.param == "kaggle":
        try:
            python = python_of_kaggle()
        except (RuntimeError, OSError) as error:
            pytest.skip(f"Kaggle's versions cannot be had here: {error}")
    process, running = start_server(tmp_path_factory.mktemp("jupyter"), python=python)
    yield running
    stop_server(process, running)


@pytest.fixture(scope="session", params=CLIENTS)
def client(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="session")
def kernel(server: JupyterServer, client: str) -> Iterator[RemoteKernel]:
    """A kernel of our own, shared by the tests that leave it as it was."""
    ours = connect_kernel(server.url, token=server.token, client=client)
    yield ours
    ours.close(stop_kernel=True)


@pytest.fixture
def fresh_kernel(server: JupyterServer, client: str) -> Iterator[RemoteKernel]:
    """A kernel of our own for one test alone."""
    ours = connect_kernel(server.url, token=server.token, client=client)
    yield ours
    ours.close(stop_kernel=True)
