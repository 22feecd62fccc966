"""What every adapter must do, against a real server. Each case runs on each client library."""

from __future__ import annotations

import contextlib
import hashlib
import os
import sqlite3
import stat
import threading
import time
import traceback
from pathlib import Path

import pytest

from kernel_tools.errors import (
    FetchError,
    InvalidArgumentError,
    KernelAuthError,
    KernelConnectionError,
    KernelError,
    KernelLostError,
    KernelTimeoutError,
    RemoteExecutionError,
)
from kernel_tools.kernels import RemoteKernel, connect_kernel
from tests.kernel.relay import Relay


def wait_until(condition, seconds: float = 20.0):
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.02)
    return value


@pytest.fixture
def relay(server):
    relay = Relay(server.port)
    yield relay
    relay.close()


@pytest.fixture
def relayed(server, client, relay):
    """A kernel of our own behind a line that can be cut."""
    url = server.url.replace(str(server.port), str(relay.port))
    kernel = connect_kernel(url, token=server.token, client=client)
    yield kernel
    kernel.close(stop_kernel=True)


@pytest.fixture
def someone_elses(server):
    """A kernel that a person started in the browser."""
    kernel_id = server.rest("kernels", "POST", {"name": "python3"})["id"]
    yield kernel_id
    server.rest(f"kernels/{kernel_id}", "DELETE")


# Connecting


def test_it_is_a_remote_kernel_that_names_itself_without_its_token(server, kernel):
    assert isinstance(kernel, RemoteKernel)
    assert kernel.owned
    assert kernel.kernel_id in server.kernel_ids()
    for text in (repr(kernel), kernel.description):
        assert kernel.kernel_id[:8] in text
        assert server.jwe not in text
        assert server.token not in text


def test_a_token_in_the_query_is_enough(server, client):
    kernel = connect_kernel(server.url_with_token, client=client)
    try:
        assert kernel.execute("print(6 * 7)").stdout == "42\n"
        assert server.token not in repr(kernel)
    finally:
        kernel.close(stop_kernel=True)


def test_a_wrong_token_is_an_auth_error_with_advice_and_without_the_secret(server, client):
    wrong = "wrong-" + "token-of-nobody"
    with pytest.raises(KernelAuthError, match="wrong or has expired") as caught:
        connect_kernel(server.url, token=wrong, client=client)
    text = "".join(traceback.format_exception(caught.value))
    assert wrong not in text
    assert server.jwe not in text


def test_nobody_listening_is_a_connection_error_soon_and_without_the_secret(server, client):
    url = server.url.replace(str(server.port), "9")
    start = time.monotonic()
    with pytest.raises(KernelConnectionError) as caught:
        connect_kernel(url, token=server.token, client=client)
    assert time.monotonic() - start < 15
    text = "".join(traceback.format_exception(caught.value))
    assert server.token not in text
    assert server.jwe not in text


def test_an_unknown_specification_names_those_that_exist(server, client):
    before = server.kernel_ids()
    with pytest.raises(InvalidArgumentError, match="It has: .*python3"):
        connect_kernel(server.url, token=server.token, kernel_name="cobol", client=client)
    assert server.kernel_ids() == before


def test_what_is_no_url_is_refused(client):
    with pytest.raises(InvalidArgumentError, match="http://"):
        connect_kernel("kaggle.com/k/1", client=client)


def test_attaching_to_a_kernel_that_is_gone_is_a_lost_kernel(server, client):
    with pytest.raises(KernelLostError):
        connect_kernel(server.url, token=server.token, attach="no-such-kernel", client=client)


# Executing


def test_a_cell_gives_its_output_and_its_error(kernel):
    result = kernel.execute("import sys; print('out'); print('err', file=sys.stderr); 1 / 0")
    assert result.stdout == "out\n"
    assert result.stderr == "err\n"
    assert result.error is not None
    assert (result.error.ename, result.error.evalue) == ("ZeroDivisionError", "division by zero")
    assert result.error.traceback
    with pytest.raises(RemoteExecutionError, match="ZeroDivisionError"):
        result.check()


def test_the_namespace_lives_on_between_cells(kernel):
    kernel.execute("kept = 41").check()
    assert kernel.execute("print(kept + 1)").stdout == "42\n"


def test_a_timeout_of_ours_interrupts_nothing(fresh_kernel, tmp_path):
    done = tmp_path / "done"
    code = f"import time; time.sleep(1.5); open({str(done)!r}, 'w').close()"
    with pytest.raises(KernelTimeoutError, match="may still run"):
        fresh_kernel.execute(code, timeout_seconds=0.3)
    wait_until(done.exists)
    assert fresh_kernel.execute("print('next')").stdout == "next\n"


def test_a_timeout_that_the_cell_itself_raises_is_its_error(kernel):
    result = kernel.execute("raise TimeoutError('theirs')")
    assert result.error is not None
    assert (result.error.ename, result.error.evalue) == ("TimeoutError", "theirs")


def test_calls_of_several_threads_take_turns(kernel):
    results: dict[int, str] = {}

    def call(number: int) -> None:
        results[number] = kernel.execute(f"print({number})").stdout

    threads = [threading.Thread(target=call, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {number: f"{number}\n" for number in range(6)}


def test_an_interrupt_reaches_a_cell_that_another_thread_waits_for(fresh_kernel):
    results = []
    code = "print('started', flush=True)\nimport time\nfor _ in range(600): time.sleep(0.05)"
    waiting = threading.Thread(target=lambda: results.append(fresh_kernel.execute(code)))
    waiting.start()
    state = "execution_state"
    probe = f"kernels/{fresh_kernel.kernel_id}"
    wait_until(lambda: _rest_of(fresh_kernel, probe)[state] == "busy")
    time_limit = time.monotonic() + 20
    while waiting.is_alive() and time.monotonic() < time_limit:
        fresh_kernel.interrupt()
        waiting.join(0.5)
    assert results[0].error.ename == "KeyboardInterrupt"


def _rest_of(kernel, path):
    import requests

    address = kernel._driver.address
    answer = requests.get(
        f"{address.base_url}/api/{path}", params={"token": address.token.reveal()}, timeout=10
    )
    return answer.json()


# Other people's kernels


def test_a_kernel_that_is_not_ours_is_neither_interrupted_nor_ended(server, client, someone_elses):
    kernel = connect_kernel(server.url, token=server.token, attach=someone_elses, client=client)
    assert not kernel.owned
    kernel.execute("theirs = 1").check()
    with pytest.raises(KernelError, match="never interrupted"):
        kernel.interrupt()
    with pytest.raises(KernelTimeoutError):
        kernel.execute("import time; time.sleep(0.8); theirs += 1", timeout_seconds=0.2)
    assert kernel.execute("print(theirs)").stdout == "2\n"
    kernel.close(stop_kernel=True)
    assert someone_elses in server.kernel_ids()


def test_closing_ends_our_kernel_only_when_asked(server, client):
    kernel = connect_kernel(server.url, token=server.token, client=client)
    kernel.close(stop_kernel=False)
    assert kernel.kernel_id in server.kernel_ids()
    with pytest.raises(KernelError, match="closed from here"):
        kernel.execute("1")
    kernel.close(stop_kernel=True)
    assert kernel.kernel_id not in server.kernel_ids()
    kernel.close(stop_kernel=True)


def test_a_kernel_of_ours_keeps_no_history(server, fresh_kernel):
    fresh_kernel.execute("canary_of_history = 1").check()
    database = Path(
        fresh_kernel.execute("print(get_ipython().history_manager.hist_file)").stdout.strip()
    )
    fresh_kernel.close(stop_kernel=True)
    if database.exists():
        with sqlite3.connect(database) as rows:
            stored = [source for (source,) in rows.execute("SELECT source_raw FROM history")]
        rows.close()
        assert not any("canary_of_history" in source for source in stored)


# A line that breaks


def test_a_line_cut_between_cells_is_opened_again(relayed, relay):
    relayed.execute("kept = 1").check()
    relay.cut()
    assert relayed.execute("print(kept)").stdout == "1\n"


def test_a_line_cut_during_a_cell_is_an_error_and_the_cell_runs_once(relayed, relay, tmp_path):
    log = tmp_path / "log"
    code = f"import time\nopen({str(log)!r}, 'a').write('x')\ntime.sleep(1)"
    cutter = threading.Thread(target=lambda: (wait_until(log.exists), relay.cut()))
    cutter.start()
    with pytest.raises(KernelConnectionError):
        relayed.execute(code)
    cutter.join()
    relayed.execute("1").check()
    assert log.read_text() == "x"


def test_a_kernel_that_was_deleted_is_lost(server, client):
    kernel = connect_kernel(server.url, token=server.token, client=client)
    server.rest(f"kernels/{kernel.kernel_id}", "DELETE")
    with pytest.raises(KernelLostError):
        kernel.execute("1", timeout_seconds=1)
    with pytest.raises(KernelLostError):
        kernel.execute("1", timeout_seconds=1)
    kernel.close(stop_kernel=True)


def test_a_kernel_that_the_server_restarts_goes_on_with_an_empty_namespace(server, fresh_kernel):
    fresh_kernel.execute("kept = 1").check()
    server.rest(f"kernels/{fresh_kernel.kernel_id}/restart", "POST")
    # The server listens to the new kernel a moment after it runs: what is printed till then is lost.
    deadline, printed = time.monotonic() + 30, ""
    while not printed:
        assert time.monotonic() < deadline
        with contextlib.suppress(KernelError):
            printed = fresh_kernel.execute("print('kept' in globals())", timeout_seconds=5).stdout
    assert printed == "False\n"


# Files


@pytest.mark.parametrize("size", [0, 1, 2 * 1024 * 1024, 9_000_001])
def test_files_travel_both_ways_whole(kernel, tmp_path, size):
    data = os.urandom(size)
    seen: list[tuple[int, int]] = []
    remote = tmp_path / "remote/there.bin"
    kernel.put_file(data, str(remote), on_progress=lambda *step: seen.append(step))
    assert remote.read_bytes() == data
    assert seen[-1] == (size, size)
    assert seen == sorted(seen)
    seen.clear()
    kernel.get_file(
        str(remote), tmp_path / "back/here.bin", on_progress=lambda *step: seen.append(step)
    )
    assert (tmp_path / "back/here.bin").read_bytes() == data
    assert seen[-1] == (size, size)
    assert [p.name for p in (tmp_path / "back").iterdir()] == ["here.bin"]
    assert [p.name for p in (tmp_path / "remote").iterdir()] == ["there.bin"]


def test_a_file_is_written_with_the_mode_asked_for(kernel, tmp_path):
    kernel.put_file(b"{}", str(tmp_path / "secret.json"), mode=0o600)
    assert stat.S_IMODE((tmp_path / "secret.json").stat().st_mode) == 0o600


def test_an_upload_cut_in_the_middle_goes_on_and_ends_whole(relayed, relay, tmp_path):
    data = os.urandom(12_000_000)
    relay.cut_after(7_000_000)
    relayed.put_file(data, str(tmp_path / "there.bin"))
    assert (
        hashlib.sha256((tmp_path / "there.bin").read_bytes()).digest()
        == hashlib.sha256(data).digest()
    )
    assert [p.name for p in tmp_path.iterdir()] == ["there.bin"]


def test_a_download_cut_in_the_middle_goes_on_and_does_not_start_again(relayed, relay, tmp_path):
    data = os.urandom(12_000_000)
    (tmp_path / "there.bin").write_bytes(data)
    seen: list[int] = []

    def progress(done: int, _total: int) -> None:
        seen.append(done)
        if len(seen) == 2:
            relay.cut()

    relayed.get_file(str(tmp_path / "there.bin"), tmp_path / "here/here.bin", on_progress=progress)
    assert (tmp_path / "here/here.bin").read_bytes() == data
    assert seen == sorted(set(seen)), "a chunk came twice"
    assert [p.name for p in (tmp_path / "here").iterdir()] == ["here.bin"]


def test_a_file_that_is_not_there_is_a_fetch_error_and_leaves_nothing(kernel, tmp_path):
    with pytest.raises(FetchError, match="No such file"):
        kernel.get_file(str(tmp_path / "nowhere.bin"), tmp_path / "here/here.bin")
    assert list((tmp_path / "here").iterdir()) == []


def test_a_place_that_cannot_be_written_is_an_error_that_says_so(kernel, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(KernelError, match="upload of .*file/below failed"):
        kernel.put_file(b"x", str(tmp_path / "file/below"))


def test_a_local_file_that_is_not_there_is_an_argument_error(kernel, tmp_path):
    with pytest.raises(InvalidArgumentError, match="no file"):
        kernel.put_file(tmp_path / "nowhere", str(tmp_path / "there"))


def test_transfers_leave_no_name_in_the_users_namespace(kernel, tmp_path):
    names = "print(sorted(n for n in globals() if 'tools' in n or 'pyrun' in n))"
    kernel.put_file(b"x", str(tmp_path / "there"))
    assert kernel.execute(names).stdout == "[]\n"
