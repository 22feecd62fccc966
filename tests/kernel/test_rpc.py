"""Calls to the agent over a real kernel: once laid, found again, repeated when the line drops."""

from __future__ import annotations

import json
import stat
import time
from pathlib import Path

import pytest

from kernel_tools.errors import AgentError, KernelConnectionError, KernelToolsError
from kernel_tools.kernels import connect_kernel
from kernel_tools.kernels.cells import call_cell
from kernel_tools.kernels.rpc import AgentClient
from kernel_tools.sync import build_plan, sync
from tests.kernel.relay import Relay


@pytest.fixture
def agent(kernel, tmp_path) -> AgentClient:
    return AgentClient(kernel, str(tmp_path / "remote"))


def test_the_first_call_lays_the_agent_and_later_ones_find_it(agent, kernel, tmp_path):
    assert agent.call("list_runs") == {"runs": []}
    folder = tmp_path / "remote/agent" / agent.agent_hash / "kernel_tools_agent"
    before = {p: p.stat().st_mtime_ns for p in folder.glob("*.py")}
    again = AgentClient(kernel, str(tmp_path / "remote"))
    assert again.call("list_runs") == {"runs": []}
    assert {p: p.stat().st_mtime_ns for p in folder.glob("*.py")} == before


def test_the_agent_sees_the_machine(agent):
    seen = agent.call("inspect_remote")
    assert seen["cpu_count"] >= 1
    assert seen["python"].startswith("3.")


def test_a_relative_remote_dir_is_resolved_once_where_the_kernel_stands(kernel, tmp_path):
    kernel.execute(f"import os; os.chdir({str(tmp_path)!r})").check()
    client = AgentClient(kernel, "remote_kernel_tools")
    assert client.remote_dir == str(tmp_path / "remote_kernel_tools")
    kernel.execute("os.chdir('/')").check()
    client.ensure_agent()
    assert client.remote_dir == str(tmp_path / "remote_kernel_tools")


def test_what_the_agent_refuses_is_an_agent_error(agent):
    with pytest.raises(KernelToolsError) as caught:
        agent.call("poll", run_id="20260101-000000-none-0000")
    assert "20260101-000000-none-0000" in str(caught.value)


def test_what_the_agent_fails_at_is_an_agent_error_with_the_remote_traceback(agent):
    with pytest.raises(AgentError, match="TypeError") as caught:
        agent.call("poll", no_such_argument=1)
    assert any("Traceback" in line for line in caught.value.__cause__.traceback)


def test_calls_leave_no_trace_in_the_users_namespace_or_history(agent, kernel):
    kernel.execute("mine = 1").check()
    names = kernel.execute("print(sorted(n for n in globals() if not n.startswith('_')))").stdout
    inputs = kernel.execute("print(len(In))").stdout
    agent.call("list_runs")
    agent.call("list_runs")
    assert (
        kernel.execute("print(sorted(n for n in globals() if not n.startswith('_')))").stdout
        == names
    )
    grown = int(kernel.execute("print(len(In))").stdout) - int(inputs)
    assert grown <= 2, "more than the two cells of this test"
    assert "kernel_tools" not in kernel.execute("print([i for i in In if 'exec(' in i])").stdout


def test_someone_elses_history_does_not_hold_our_cells(server, client, tmp_path):
    kernel_id = server.rest("kernels", "POST", {"name": "python3"})["id"]
    try:
        kernel = connect_kernel(server.url, token=server.token, attach=kernel_id, client=client)
        AgentClient(kernel, str(tmp_path / "remote")).call("list_runs")
        kernel.put_file(b"x", str(tmp_path / "there"))
        assert "exec(" not in kernel.execute("print([i for i in In if 'zlib' in i])").stdout
        kernel.close(stop_kernel=True)
    finally:
        server.rest(f"kernels/{kernel_id}", "DELETE")


def test_other_output_in_between_does_not_disturb_a_reply(agent, kernel):
    agent.call("list_runs")
    kernel.execute(
        "import threading, time\n"
        "def chatter():\n"
        "    for _ in range(200): print('noise', flush=True); time.sleep(0.005)\n"
        "threading.Thread(target=chatter, daemon=True).start()"
    ).check()
    for _ in range(10):
        assert agent.call("list_runs") == {"runs": []}


def test_a_reply_that_is_lost_is_asked_for_again(server, client, tmp_path):
    relay = Relay(server.port)
    url = server.url.replace(str(server.port), str(relay.port))
    kernel = connect_kernel(url, token=server.token, client=client)
    try:
        agent = AgentClient(kernel, str(tmp_path / "remote"))
        agent.call("list_runs")
        for _ in range(5):
            before = relay.connections
            relay.cut_at_next_answer()
            assert agent.call("list_runs") == {"runs": []}
            assert relay.connections > before
    finally:
        kernel.close(stop_kernel=True)
        relay.close()


def test_a_line_that_stays_down_ends_within_the_deadline(server, client, tmp_path):
    relay = Relay(server.port)
    url = server.url.replace(str(server.port), str(relay.port))
    kernel = connect_kernel(url, token=server.token, client=client)
    agent = AgentClient(kernel, str(tmp_path / "remote"))
    agent.call("list_runs")
    relay.close()
    start = time.monotonic()
    with pytest.raises(KernelConnectionError):
        agent.call("list_runs", timeout_seconds=2)
    assert time.monotonic() - start < 10
    direct = connect_kernel(server.url, token=server.token, attach=kernel.kernel_id, client=client)
    direct.close(stop_kernel=False)
    server.rest(f"kernels/{kernel.kernel_id}", "DELETE")
    kernel.close(stop_kernel=False)


def test_secrets_travel_as_a_file_for_the_owner_alone(agent, kernel, tmp_path):
    path = Path(agent.put_secrets("run-1", {"env": {"NAME": "canary-of-secrets"}}))
    assert json.loads(path.read_text()) == {"env": {"NAME": "canary-of-secrets"}}
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert "canary-of-secrets" not in kernel.execute("print(In)").stdout


def test_a_sync_over_the_real_line(kernel, tmp_path):
    project = tmp_path / "project"
    (project / "src").mkdir(parents=True)
    (project / "src/a.py").write_text("a = 1\n")
    (project / "src/noise.bin").write_bytes(bytes(range(256)) * 8000)
    plan = build_plan(project, sync_paths=["src"])
    first = sync(kernel, plan, str(tmp_path / "remote"))
    assert first.uploaded == first.files
    assert sync(kernel, plan, str(tmp_path / "remote")).uploaded == 0
    digest = first.manifest["files"]["src/a.py"][1]
    assert (tmp_path / "remote/blobs" / digest[:2] / digest).read_text() == "a = 1\n"


def test_a_sync_whose_replies_are_lost_ends_whole(server, client, tmp_path):
    relay = Relay(server.port)
    url = server.url.replace(str(server.port), str(relay.port))
    kernel = connect_kernel(url, token=server.token, client=client)
    project = tmp_path / "project"
    (project / "src").mkdir(parents=True)
    (project / "src/noise.bin").write_bytes(bytes(range(256)) * 1000)
    try:
        plan = build_plan(project, sync_paths=["src"])
        agent = AgentClient(kernel, str(tmp_path / "remote"))
        missing = agent.missing

        def missing_then_cut(digests):
            answer = missing(digests)
            relay.cut_at_next_answer()
            return answer

        agent.missing = missing_then_cut
        report = sync(agent, plan)
        assert report.uploaded == report.files
        agent.missing = missing
        assert sync(agent, plan).uploaded == 0
        assert not list((tmp_path / "remote").rglob("*.pack"))
    finally:
        kernel.close(stop_kernel=True)
        relay.close()


def test_a_cell_is_python_that_ipython_keeps_out_of_its_history():
    cell = call_cell("<n>", {"module": "m", "function": "f", "arguments": {}})
    compile(cell, "<cell>", "exec")
    assert "get_ipython().run_line_magic(" in cell
    assert "paste" in cell
