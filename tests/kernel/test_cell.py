"""`%%remote`: a cell there, its output as it comes, values there and back, and what Ctrl-C may do."""

from __future__ import annotations

import os
import re
import signal
import threading
import time

import numpy as np
import pytest

from kernel_tools.connecting import remote_cell
from kernel_tools.connecting.connection import Connection
from kernel_tools.errors import (
    InvalidArgumentError,
    KernelConnectionError,
    KernelLostError,
    RemoteExecutionError,
)
from kernel_tools.kernels import connect_kernel
from kernel_tools.kernels.rpc import AgentClient
from tests.faults.proxy import Fault, FaultProxy, Schedule
from tests.kernel.relay import Relay


def connection_to(kernel, folder, reconnect=None):
    return Connection(
        "there", "url", kernel, AgentClient(kernel, str(folder / "remote")), reconnect or (lambda: kernel)
    )  # fmt: skip


@pytest.fixture
def there(kernel, tmp_path):
    return connection_to(kernel, tmp_path)


def run(connection, code, **options):
    said = []
    options = {"push": {}, "bring": (), "on_output": said.append, **options}
    brought = remote_cell.execute(connection, code, **options)
    return said, brought


def text_of(said, kind="stdout"):
    return "".join(output.text for output in said if output.kind == kind)


def test_output_comes_while_the_cell_still_runs(kernel, there, tmp_path):
    gate = tmp_path / "gate"
    seen = []

    def on_output(output):
        seen.append(output.text)
        gate.touch()  # the cell goes on only when its first line was seen here

    code = (
        "import os, sys, time\nprint('first', flush=True)\n"
        f"deadline = time.time() + 30\nwhile not os.path.exists({str(gate)!r}):\n"
        "    assert time.time() < deadline\n    time.sleep(0.01)\nprint('second')"
    )
    run(there, code, on_output=on_output)
    assert "".join(seen) == "first\nsecond\n"
    assert seen[0] == "first\n"


def test_both_streams_and_displays_come_in_order(there):
    said, _ = run(
        there,
        "import sys\nprint('out', flush=True)\nprint('err', file=sys.stderr, flush=True)\n"
        "from IPython.display import display, HTML\ndisplay(HTML('<b>shown</b>'))\n6 * 7",
    )
    assert text_of(said) == "out\n"
    assert text_of(said, "stderr") == "err\n"
    shown = [output.data for output in said if output.kind == "display"]
    assert shown[0]["text/html"] == "<b>shown</b>"
    assert shown[1]["text/plain"] == "42"


def test_an_error_brings_the_remote_traceback(there):
    said = []
    with pytest.raises(RemoteExecutionError, match="ZeroDivisionError on the remote") as caught:
        run(
            there,
            "def broken():\n    return 1 / 0\nprint('before')\nbroken()",
            on_output=said.append,
        )
    assert text_of(said) == "before\n"
    shown = "\n".join(caught.value._render_traceback_())
    assert "broken" in shown
    assert shown.splitlines()[-1].startswith(
        "RemoteExecutionError: ZeroDivisionError on the remote"
    )


def test_values_travel_there_and_back(there):
    weights = np.arange(400_000, dtype=np.float64)
    _, brought = run(
        there,
        "total = float(weights.sum()); doubled = weights * 2; told = {'names': names, 'n': (1, 2)}",
        push={"weights": weights, "names": ["a", "b"]},
        bring=["total", "doubled", "told"],
    )
    assert brought["total"] == float(weights.sum())
    assert brought["doubled"].tobytes() == (weights * 2).tobytes()
    assert brought["told"] == {"names": ["a", "b"], "n": (1, 2)}
    left = run(
        there, "import os; print(os.listdir(folder))", push={"folder": f"{there.remote_dir}/values"}
    )
    assert text_of(left[0]) == "[]\n"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"bring": ["nowhere"]}, "-o nowhere: there is no variable 'nowhere' on the remote kernel"),
        ({"bring": ["opened"]}, "-o opened: a _io.TextIOWrapper cannot travel"),
        ({"push": {"here": object()}}, "--push here: a builtins.object cannot travel"),
        ({"bring": ["os.environ"]}, "'os.environ' is no name of a variable"),
    ],
)  # fmt: skip
def test_what_cannot_travel_is_said_in_one_sentence(there, options, says):
    with pytest.raises(InvalidArgumentError) as caught:
        run(there, "import os; opened = open(os.devnull)", **options)
    assert says in str(caught.value)


def test_a_secret_that_is_printed_in_two_halves_is_masked(there):
    from kernel_tools.redact import MASK, register_secret

    canary = "canary-" + "printed-there"
    register_secret(canary)
    half = len(canary) // 2
    code = (
        "import sys, time\n"
        f"sys.stdout.write({canary[:half]!r}); sys.stdout.flush()\n"
        f"sys.stdout.write({canary[half:]!r} + '\\n'); sys.stdout.flush()"
    )
    said, _ = run(there, code)
    assert canary not in text_of(said)
    assert MASK in text_of(said)


class Interrupts:
    """SIGINT for this process, once, when the cell has said something."""

    def __init__(self):
        self.said = []

    def __call__(self, output):
        self.said.append(output)
        if len(self.said) == 1:
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()


LONG = "import time\nprint('began', flush=True)\nfor _ in range(1200): time.sleep(0.05)\n"


def test_ctrl_c_interrupts_a_kernel_of_ours_and_shows_where_it_was(server, client, tmp_path):
    kernel = connect_kernel(server.url, token=server.token, client=client)
    try:
        with pytest.raises(RemoteExecutionError, match="KeyboardInterrupt") as caught:
            run(connection_to(kernel, tmp_path), LONG, on_output=Interrupts())
        plain = re.sub(r"\x1b\[[0-9;]*m", "", "".join(caught.value.traceback))
        assert "time.sleep(0.05)" in plain
        assert kernel.execute("print('next')").stdout == "next\n"
    finally:
        kernel.close(stop_kernel=True)


def test_ctrl_c_on_somebody_elses_kernel_only_ends_the_waiting(server, client, tmp_path, capsys):
    theirs = server.rest("kernels", "POST", {"name": "python3"})["id"]
    try:
        kernel = connect_kernel(server.url, token=server.token, attach=theirs, client=client)
        done = tmp_path / "done"
        code = (
            "import time\nprint('began', flush=True)\ntime.sleep(1.5)\n"
            f"open({str(done)!r}, 'w').close()"
        )
        with pytest.raises(KeyboardInterrupt):
            run(connection_to(kernel, tmp_path), code, on_output=Interrupts())
        said = capsys.readouterr().err
        assert "Stopped waiting; the cell goes on" in said
        assert "never interrupted" in said
        deadline = time.monotonic() + 20
        while not done.exists():
            assert time.monotonic() < deadline, "it was interrupted"
            time.sleep(0.05)
        kernel.close(stop_kernel=True)
        assert theirs in server.kernel_ids()
    finally:
        server.rest(f"kernels/{theirs}", "DELETE")


def test_a_line_that_breaks_is_one_error_and_the_cell_runs_once(server, client, tmp_path):
    relay = Relay(server.port)
    url = server.url.replace(str(server.port), str(relay.port))
    kernel = connect_kernel(url, token=server.token, client=client)
    log = tmp_path / "log"
    try:
        code = f"import time\nopen({str(log)!r}, 'a').write('x')\nprint('began', flush=True)\ntime.sleep(1)"
        with pytest.raises(
            KernelConnectionError, match="may still run there, and was not sent again"
        ):
            run(connection_to(kernel, tmp_path), code, on_output=lambda _: relay.cut())
        assert kernel.execute("print(1)").stdout == "1\n"
        assert log.read_text() == "x"
    finally:
        kernel.close(stop_kernel=True)
        relay.close()


def test_a_cell_whose_end_was_lost_does_not_wait_for_ever(server, client, tmp_path):
    proxy = FaultProxy(server.port, lambda *_: None)
    url = server.url.replace(str(server.port), str(proxy.port))
    kernel = connect_kernel(url, token=server.token, client=client)
    try:
        connection = connection_to(kernel, tmp_path)
        run(connection, "1")
        proxy.start(Schedule(0, (Fault("half-open down", 0),)))
        with pytest.raises(KernelConnectionError, match="not sent again"):
            run(connection, "kept = 1", probe_seconds=0.5)
        assert kernel.execute("print(kept)").stdout == "1\n"
    finally:
        kernel.close(stop_kernel=True)
        proxy.close()


def test_a_kernel_that_is_gone_is_replaced_and_the_cell_not_run_unasked(server, client, tmp_path):
    def connect():
        return connect_kernel(server.url, token=server.token, client=client)

    connection = connection_to(connect(), tmp_path, connect)
    server.rest(f"kernels/{connection.kernel.kernel_id}", "DELETE")
    with pytest.raises(KernelLostError, match="there is a new one now"):
        run(connection, "kept = 1")
    said, _ = run(connection, "print('kept' in globals())")
    assert text_of(said) == "False\n"
    connection.close()


def test_a_kernel_that_dies_in_the_cell_is_said_so_at_once(server, fresh_kernel, tmp_path):
    began = time.monotonic()
    with pytest.raises(KernelConnectionError) as caught:
        run(connection_to(fresh_kernel, tmp_path), "import os; os.kill(os.getpid(), 9)")
    assert time.monotonic() - began < 20
    assert "ended or was restarted" in f"{caught.value} {caught.value.__cause__}"
