"""One service at most, shared by all clients, gone when nobody needs it."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kernel_tools.errors import ConfigurationError, ServiceError
from kernel_tools.services import service as services
from tests.services.conftest import Start, answers, is_gone, wait_for


def test_a_second_client_gets_the_same_service(start: Start) -> None:
    first, second = start(), start()

    assert first.started
    assert not second.started
    assert (first.service_pid, first.endpoint) == (second.service_pid, second.endpoint)
    assert answers(second)


def test_clients_of_many_threads_at_once_start_one_service(start: Start) -> None:
    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(lambda _: start(), range(6)))

    assert len({service.service_pid for service in found}) == 1
    assert sum(service.started for service in found) == 1


def test_two_processes_at_once_start_one_service(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib; from tests.services.conftest import order, answers\n"
        "from kernel_tools.services import service as services\n"
        "s = services.ensure('small', state_dir=pathlib.Path(sys.argv[1]), order=order, ready=answers,"
        " idle_seconds=2)\n"
        "print(s.service_pid, s.started, flush=True); sys.stdin.read()"
    )
    root = Path(__file__).resolve().parents[2]
    clients = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path)],
            cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for _ in range(3)
    ]  # fmt: skip
    found = [client.stdout.readline().split() for client in clients]
    pid = int(found[0][0])

    assert {row[0] for row in found} == {str(pid)}
    assert sorted(row[1] for row in found) == ["False", "False", "True"]

    for client in clients:  # killed, not released
        client.kill()
        client.communicate()
    assert wait_for(lambda: is_gone(pid))


def test_the_record_is_private_and_the_secret_on_no_command_line(
    start: Start, tmp_path: Path
) -> None:
    service = start()

    record = tmp_path / "state" / "services" / "small.json"
    assert stat.S_IMODE(record.stat().st_mode) == 0o600
    assert stat.S_IMODE(record.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(service.folder.stat().st_mode) == 0o700
    assert service.secrets["colour"].reveal() == "teal-and-secret"
    assert "teal" not in repr(service)
    for pid in (service.keeper_pid, service.service_pid):
        assert b"teal" not in Path(f"/proc/{pid}/cmdline").read_bytes()


def test_without_a_client_it_ends_after_the_idle_time_and_leaves_nothing(
    start: Start, tmp_path: Path
) -> None:
    service = start(idle_seconds=0.5)
    assert (service.folder / "left.sock").exists()

    service.release()

    assert wait_for(lambda: is_gone(service.keeper_pid))
    assert is_gone(service.service_pid)
    assert not (service.folder / "left.sock").exists()
    assert not (tmp_path / "state" / "services" / "small.json").exists()
    assert services.running(tmp_path / "state") == []


def test_it_stays_while_a_client_has_a_lease(start: Start) -> None:
    start(idle_seconds=0.3)
    service = start(idle_seconds=0.3)
    service.release()  # one of two

    assert not wait_for(lambda: is_gone(service.service_pid), seconds=1.5)
    assert services.running(service.state_dir) == ["small"]


def test_it_stays_while_a_run_lives_and_ends_when_the_run_has_ended(
    start: Start, tmp_path: Path
) -> None:
    run = tmp_path / "runs" / "20260101-000000-x-0000"
    run.mkdir(parents=True)
    status = run / "status.json"
    status.write_text(json.dumps({"state": "training"}))
    service = start(idle_seconds=0.3)
    service.watch_runs(tmp_path / "runs")
    service.release()

    assert not wait_for(lambda: is_gone(service.service_pid), seconds=1.5)

    status.write_text(json.dumps({"state": "completed"}))
    assert wait_for(lambda: is_gone(service.service_pid))


def test_a_run_whose_agent_has_been_silent_for_long_keeps_nothing_up(
    start: Start, tmp_path: Path
) -> None:
    run = tmp_path / "runs" / "20260101-000000-x-0000"
    run.mkdir(parents=True)
    (run / "status.json").write_text(json.dumps({"state": "training"}))
    old = time.time() - 3600
    os.utime(run / "status.json", (old, old))
    service = start(idle_seconds=0.3, runs_dirs=(tmp_path / "runs",))
    service.release()

    assert wait_for(lambda: is_gone(service.service_pid))


def test_stop_ends_one_that_ignores_sigterm_in_under_five_seconds(start: Start) -> None:
    service = start("--stubborn")

    begun = time.monotonic()
    service.stop()

    assert time.monotonic() - begun < 5.0
    assert is_gone(service.service_pid)
    assert is_gone(service.keeper_pid)
    assert not service.alive
    assert not (service.folder / "left.sock").exists()


def test_a_record_of_a_dead_service_is_replaced(start: Start) -> None:
    first = start()
    os.kill(first.keeper_pid, signal.SIGKILL)
    os.kill(first.service_pid, signal.SIGKILL)
    assert wait_for(lambda: is_gone(first.service_pid) and is_gone(first.keeper_pid))

    second = start()

    assert second.started
    assert second.service_pid != first.service_pid
    assert answers(second)


def test_a_record_whose_pid_belongs_to_another_process_now_kills_nobody(
    start: Start, tmp_path: Path
) -> None:
    first = start()
    record = tmp_path / "state" / "services" / "small.json"
    document = json.loads(record.read_text())
    first.stop()
    bystander = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=-1)
    try:
        for role in ("keeper", "service"):
            document[role]["pid"] = bystander.pid
        record.write_text(json.dumps(document))

        second = start()

        assert second.started
        assert bystander.poll() is None
    finally:
        bystander.communicate()


def test_the_service_does_not_outlive_a_killed_keeper(start: Start) -> None:
    service = start()

    os.kill(service.keeper_pid, signal.SIGKILL)

    assert wait_for(lambda: is_gone(service.service_pid))


def test_a_survivor_of_a_killed_keeper_is_ended_before_a_new_start(start: Start) -> None:
    first = start("--stubborn")
    os.kill(first.keeper_pid, signal.SIGKILL)
    assert wait_for(lambda: is_gone(first.keeper_pid))
    assert not is_gone(first.service_pid)

    second = start()

    assert is_gone(first.service_pid)
    assert second.service_pid != first.service_pid


def test_one_that_ends_at_once_is_reported_with_its_last_words(start: Start) -> None:
    with pytest.raises(ServiceError, match="the disk is on fire"):
        start("--broken")


@pytest.mark.parametrize("text", ["soon", "0", "-1", "nan"])
def test_an_idle_time_that_is_no_number_above_zero_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match="KERNEL_TOOLS_IDLE_SECONDS"):
        services.idle_seconds_from({"KERNEL_TOOLS_IDLE_SECONDS": text})


def test_the_idle_time_comes_from_the_argument_then_the_environment_then_is_ten_minutes() -> None:
    environ = {"KERNEL_TOOLS_IDLE_SECONDS": "2.5"}

    assert services.idle_seconds_from(environ, 7.0) == 7.0
    assert services.idle_seconds_from(environ) == 2.5
    assert services.idle_seconds_from({}) == 600.0
