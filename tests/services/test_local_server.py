"""The embedded Jupyter server: the caller's Python, isolated, quiet, on loopback, behind its token."""

from __future__ import annotations

import json
import os
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kernel_tools.kernels.local import LocalServer
from tests.services.conftest import is_gone, wait_for
from tests.services.listening import children, listeners


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MINIO_SECRET_KEY", "hush-hush-hush")
        patch.setenv("JPY_PARENT_PID", "1")
        patch.setenv("MPLBACKEND", "module://nowhere")
        server = LocalServer.ensure(state_dir=tmp_path_factory.mktemp("s"), idle_seconds=60)
    yield server
    server.stop()


def ask(
    server: LocalServer, path: str, *, method: str = "GET", token: bool = True
) -> tuple[int, Any]:
    headers = {"Authorization": f"token {server.token.reveal()}"} if token else {}
    request = urllib.request.Request(server.url + path, method=method, headers=headers)
    if method == "POST":
        request.data = b"{}"
    try:
        with urllib.request.urlopen(request, timeout=20) as response:
            body = response.read()
            return response.status, json.loads(body) if body else None
    except urllib.error.HTTPError as error:
        error.close()
        return error.code, None


@pytest.fixture(scope="module")
def kernel(server: LocalServer) -> Iterator[Any]:
    """A client of a kernel of that server, by its connection file: independent of our own adapters."""
    from jupyter_client.blocking import BlockingKernelClient

    _, started = ask(server, "/api/kernels", method="POST")
    client = BlockingKernelClient()
    client.load_connection_file(
        str(server.service.folder / "runtime" / f"kernel-{started['id']}.json")
    )
    client.start_channels()
    client.wait_for_ready(timeout=60)
    yield client
    client.stop_channels()


def evaluate(client: Any, expression: str) -> Any:
    reply = client.execute_interactive(
        "", user_expressions={"value": f"__import__('json').dumps({expression})"}, timeout=30
    )
    shown = reply["content"]["user_expressions"]["value"]
    return json.loads(eval(shown["data"]["text/plain"]))


def test_the_kernel_is_the_callers_python_in_the_root_folder(
    server: LocalServer, kernel: Any
) -> None:
    assert evaluate(kernel, "__import__('sys').executable") == sys.executable
    assert evaluate(kernel, "__import__('os').getcwd()") == str(server.root_dir)


def test_the_kernel_keeps_no_history_and_has_its_own_ipython_folder(
    server: LocalServer, kernel: Any
) -> None:
    assert evaluate(kernel, "get_ipython().history_manager.enabled") is False
    folder = evaluate(kernel, "get_ipython().ipython_dir")
    assert Path(folder).is_relative_to(server.service.folder)


def test_no_secret_and_no_mark_of_the_caller_reaches_the_kernel(
    server: LocalServer, kernel: Any
) -> None:
    environ = evaluate(kernel, "dict(__import__('os').environ)")

    assert server.token.reveal() not in environ.values()
    assert "MINIO_SECRET_KEY" not in environ
    assert environ.get("JPY_PARENT_PID") == str(server.service.service_pid)
    assert environ.get("MPLBACKEND") != "module://nowhere"


def test_the_token_is_on_no_command_line_and_in_no_environment(server: LocalServer) -> None:
    token = server.token.reveal().encode()
    for pid in [server.service.keeper_pid, *children(server.service.service_pid)]:
        assert token not in Path(f"/proc/{pid}/cmdline").read_bytes()
        assert token not in Path(f"/proc/{pid}/environ").read_bytes()
    assert token not in (server.service.folder / "service.log").read_bytes()


def test_every_file_with_the_token_is_private(server: LocalServer) -> None:
    token = server.token.reveal().encode()
    services = server.service.folder.parent
    holders = [p for p in services.rglob("*") if p.is_file() and token in p.read_bytes()]

    assert services / f"{server.service.name}.json" in holders
    assert {p.name: oct(p.stat().st_mode & 0o077) for p in holders} == {
        p.name: "0o0" for p in holders
    }


@pytest.mark.parametrize("path", ["/api/kernels", "/api/contents", "/api/status", "/api/me"])
def test_nothing_answers_without_the_token(server: LocalServer, path: str) -> None:
    assert ask(server, path, token=False)[0] == 403


@pytest.mark.parametrize("path", ["/api/terminals", "/lab", "/tree", "/lsp/status"])
def test_no_extension_and_no_terminal_is_there(server: LocalServer, path: str) -> None:
    assert ask(server, path)[0] == 404


def test_there_is_one_kernelspec_that_needs_no_search_path(server: LocalServer) -> None:
    _, found = ask(server, "/api/kernelspecs")

    assert found["default"] == "python3"
    assert found["kernelspecs"]["python3"]["spec"]["argv"][0] == sys.executable


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_server_and_kernel_listen_on_loopback_only(server: LocalServer, kernel: Any) -> None:
    processes = children(server.service.service_pid)
    found = [listener for pid in processes for listener in listeners(pid)]

    assert len(processes) >= 2
    assert len(found) >= 6  # the server, and five channels of the kernel
    assert {address for address, _ in found} == {"127.0.0.1"}


def test_a_second_connect_takes_up_the_same_server(server: LocalServer) -> None:
    again = LocalServer.ensure(state_dir=server.service.state_dir, idle_seconds=60)

    assert again.url == server.url
    assert again.token.reveal() == server.token.reveal()
    assert not again.service.started


def test_stopped_it_leaves_no_process(tmp_path: Path) -> None:
    server = LocalServer.ensure(state_dir=tmp_path, idle_seconds=60)
    ask(server, "/api/kernels", method="POST")
    processes = [server.service.keeper_pid, *children(server.service.service_pid)]
    assert len(processes) >= 3

    server.stop()

    assert wait_for(lambda: all(is_gone(pid) for pid in processes), seconds=8)
    assert os.listdir(server.service.folder / "runtime") == ["jupyter_cookie_secret"]
