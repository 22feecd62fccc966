"""Servers that refuse, kernels that are not ours, URLs that expire, and programs that forget to let go."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from kernel_tools.connecting.connection import Connection
from kernel_tools.errors import KernelAuthError, KernelError, MissingDependencyError
from kernel_tools.kernels import connect_kernel, default_client
from kernel_tools.kernels.keep_alive import KeepAlive
from kernel_tools.kernels.rpc import AgentClient
from tests.faults.proxy import Fault, FaultProxy, Schedule
from tests.kernel.conftest import start_server, stop_server
from tests.kernel.test_kernel import wait_until


@pytest.fixture(scope="module")
def box(server, tmp_path_factory):
    """A server whose kernels are those of these tests alone."""
    process, own = start_server(tmp_path_factory.mktemp("box"), python=server.python)
    yield own
    stop_server(process, own)


@pytest.fixture
def proxy(box):
    proxy = FaultProxy(box.port, lambda *_: None)
    yield proxy
    proxy.close()


@pytest.fixture
def url(box, proxy):
    return box.url.replace(str(box.port), str(proxy.port))


@pytest.fixture
def theirs(box):
    """The server's only idle kernel, which somebody started in the browser."""
    for kernel_id in box.kernel_ids():
        box.rest(f"kernels/{kernel_id}", "DELETE")
    kernel_id = box.rest("kernels", "POST", {"name": "python3"})["id"]
    direct = connect_kernel(box.url, token=box.token, attach=kernel_id)
    direct.execute("theirs = 1").check()
    direct.close(stop_kernel=False)
    yield kernel_id
    box.rest(f"kernels/{kernel_id}", "DELETE")


@pytest.mark.parametrize("status", [403, 405])
def test_a_server_that_refuses_a_start_lends_its_only_idle_kernel(
    box, client, proxy, url, theirs, status
):
    proxy.refuses_start = status
    before = box.kernel_ids()
    kernel = connect_kernel(url, token=box.token, client=client)
    assert (kernel.kernel_id, kernel.owned) == (theirs, False)
    assert "does not let us start a kernel" in kernel.notice
    assert "never be interrupted, restarted or ended" in kernel.notice
    assert kernel.execute("print(theirs)").stdout == "1\n"
    with pytest.raises(KernelError, match="never interrupted"):
        kernel.interrupt()
    kernel.close(stop_kernel=True)
    assert box.kernel_ids() == before
    asked = {method for method, path in proxy.counters.methods if theirs in path}
    assert asked <= {"GET"}


def test_among_several_idle_kernels_none_is_chosen(box, client, proxy, url, theirs):
    second = box.rest("kernels", "POST", {"name": "python3"})["id"]
    try:
        direct = connect_kernel(box.url, token=box.token, attach=second)
        direct.execute("1", timeout_seconds=60).check()
        direct.close(stop_kernel=False)
        wait_until(lambda: box.rest(f"kernels/{second}")["execution_state"] in {"idle", "starting"})
        proxy.refuses_start = 403
        with pytest.raises(KernelAuthError, match="2 idle ones.*--attach") as caught:
            connect_kernel(url, token=box.token, client=client)
        assert theirs in str(caught.value)
        assert second in str(caught.value)
    finally:
        box.rest(f"kernels/{second}", "DELETE")


def test_a_start_whose_reply_is_lost_leaves_one_kernel(box, client, proxy, url):
    before = box.kernel_ids()
    proxy.start(Schedule(0, (Fault("reply lost", 1),)))
    kernel = connect_kernel(url, token=box.token, client=client)
    assert proxy.counters.happened == ["reply lost at 1"]
    assert box.kernel_ids() - before == {kernel.kernel_id}
    kernel.close(stop_kernel=True)
    assert box.kernel_ids() == before


def test_a_proxy_that_says_404_for_a_moment_costs_no_kernel(box, client, proxy, url):
    kernel = connect_kernel(url, token=box.token, client=client)
    try:
        kernel.execute("kept = 1").check()
        kernel.hang_up()
        proxy.start(Schedule(0, (Fault("opening refused", 0), Fault("status", 1, status=404))))
        assert kernel.execute("print(kept)").stdout == "1\n"
    finally:
        kernel.close(stop_kernel=True)


def test_an_expired_url_is_said_once_and_never_asked_again(box, client, proxy, url, tmp_path):
    kernel = connect_kernel(url, token=box.token, client=client)
    agent = AgentClient(kernel, str(tmp_path / "remote"))
    connection = Connection("there", "url", kernel, agent, lambda: kernel)
    connection.call("list_runs")
    proxy.expired = True
    kernel.hang_up()
    says = "the URL or token has expired: get a new one and %remote_connect again; the run goes on"
    began, asked = time.monotonic(), proxy.counters.requests
    with pytest.raises(KernelAuthError, match=says):
        connection.call("list_runs")
    assert time.monotonic() - began < 5
    assert proxy.counters.requests - asked <= 3, "a refusal was retried"
    asked = proxy.counters.requests
    for _ in range(3):
        with pytest.raises(KernelAuthError, match=says):
            connection.call("list_runs")
        with pytest.raises(KernelAuthError, match=says):
            connection.get_file("x", tmp_path / "x")
    assert proxy.counters.requests == asked
    proxy.expired = False
    kernel.close(stop_kernel=True)


def test_a_busy_kernel_gets_no_pile_of_cells(box, client, theirs, tmp_path):
    """A poll that goes unanswered is not repeated behind the cell that somebody runs for an hour."""
    other = connect_kernel(box.url, token=box.token, attach=theirs, client=client)
    kernel = connect_kernel(box.url, token=box.token, attach=theirs, client=client)
    count, end = tmp_path / "count", tmp_path / "end"
    with pytest.raises(KernelError):
        other.execute(
            "import os, time\ndeadline = time.time() + 60\n"
            f"while not os.path.exists({str(end)!r}) and time.time() < deadline: time.sleep(0.02)",
            timeout_seconds=0.5,
        )
    cell = f"open({str(count)!r}, 'a').write('x')"
    for _ in range(4):
        with pytest.raises(KernelError):
            kernel.execute(cell, timeout_seconds=0.5)
    end.touch()
    kernel.execute("1", timeout_seconds=30).check()
    assert count.read_text() == "x"
    other.close(stop_kernel=False)
    kernel.close(stop_kernel=False)


def test_keep_alive_runs_empty_cells_until_it_ends(kernel):
    class Kept:
        closed = False

        def __init__(self):
            self.cells = []
            self.kernel = self

        def execute(self, code, *, timeout_seconds):
            self.cells.append(code)
            return kernel.execute(code, timeout_seconds=timeout_seconds)

    kept = Kept()
    keeper = KeepAlive(kept, 0.02)
    deadline = time.monotonic() + 20
    while len(kept.cells) < 3:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    keeper.end()
    assert all(cell.splitlines()[-1] == "pass" for cell in kept.cells)


def test_a_program_that_forgets_to_disconnect_ends(box, client):
    code = (
        "import sys; from kernel_tools.kernels import connect_kernel\n"
        "kernel = connect_kernel(sys.argv[1], token=sys.stdin.read(), client=sys.argv[2])\n"
        "print(kernel.execute('print(6 * 7)').stdout, kernel.kernel_id)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, box.url, client],
        input=box.token, capture_output=True, text=True, timeout=60, check=False,
        cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert (done.returncode, done.stdout.split()[0], done.stderr) == (0, "42", "")
    box.rest(f"kernels/{done.stdout.split()[1]}", "DELETE")


# Which library


@pytest.mark.parametrize(
    ("absent", "chosen"), [((), "pyrun"), (("pyrun_jupyter",), "jupyter")], ids=["both", "one"]
)
def test_the_default_is_pyrun_where_it_is_installed(monkeypatch, absent, chosen):
    from importlib.util import find_spec

    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: None if name in absent else find_spec(name)
    )
    assert default_client() == chosen


def test_without_any_library_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match="jupyter-kernel-client.*pyrun-jupyter"):
        default_client()
