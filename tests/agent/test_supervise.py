"""What the agent does with a trainer: every way to end, by itself or by others, and nothing left after it."""

import contextlib
import hashlib
import json
import os
import signal
import sys

import pytest
from kernel_tools_agent import api, launch, processes

from .conftest import log_text, wait_until

LONG = ("--steps", "100000")


def kill(pid):
    os.kill(pid, signal.SIGKILL)


def rank_pid(remote, run_id, rank):
    """Pid of a rank of the stub, found as the agent finds it."""

    def found():
        for row in remote.poll(run_id)["agent"]["ranks"]:
            if row["rank"] == rank and row["pid"]:
                return row["pid"]
        return None

    return wait_until(found, what=f"rank {rank} is known")


def test_a_trainer_that_raises_names_rank_type_and_place(remote):
    remote.launch("raise", "--ranks", "2", "--fault", "raise", "--fault-rank", "1", "--steps", "3")
    end = remote.wait_end("raise")
    assert (end["state"], end["message"]) == ("failed", "rank 1 raised ValueError: banana")
    assert (end["error"]["type"], end["error"]["rank"], end["exit_code"]) == ("ValueError", 1, 1)
    assert 'raise ValueError("banana")' in end["error"]["traceback"]
    with open(os.path.join(remote.dir("raise"), "errors", "rank1.json")) as stream:
        assert json.load(stream)["message"] == "banana"


def test_a_program_that_leaves_no_reason_is_explained_by_its_traceback(remote):
    job = remote.job("plain", argv=[sys.executable, "-c", "import nonsense_module"])
    remote.launch_job(job)
    end = remote.wait_end("plain")
    assert end["state"] == "failed"
    assert (
        end["message"]
        == "the trainer raised ModuleNotFoundError: No module named 'nonsense_module'"
    )


def test_a_program_that_is_not_there_fails_with_its_name(remote):
    remote.launch_job(remote.job("absent", argv=["no-such-program"]))
    end = remote.wait_end("absent")
    assert (end["state"], end["error"]["type"]) == ("failed", "AgentError")
    assert end["message"].startswith("cannot start no-such-program")


def test_a_killed_command_is_said_to_be_killed(remote):
    remote.launch_job(remote.job("shot", argv=["sh", "-c", "kill -9 $$"]))
    end = remote.wait_end("shot")
    assert end["state"] == "failed"
    assert end["message"] == "the command was killed by signal 9: most often out of memory"
    assert (end["error"]["type"], end["exit_code"]) == ("SIGKILL", -9)


def test_a_command_without_a_status_still_has_state_log_and_artifacts(remote):
    job = remote.job("sh", argv=["sh", "-c", "echo out; echo err >&2; echo 1 > artifacts/a.txt"])
    job["artifacts"] = ["artifacts/*.txt"]
    remote.launch_job(job)
    end = remote.wait_end("sh")
    assert (end["state"], end["phase"], end["progress"]) == ("completed", "done", 1.0)
    assert remote.text("sh", "train.log") == "out\nerr\nrun_ended=completed completed\n"
    listed = remote.poll("sh")["artifacts"]["files"]
    assert "work/artifacts/a.txt" in [entry["path"] for entry in listed]


def test_a_stop_is_obeyed_at_a_step_boundary_and_leaves_no_process(remote):
    remote.launch("stop", *LONG, "--ranks", "2")
    remote.wait_steps("stop")
    assert remote.stop("stop") == {"state": "training", "asked": True}
    end = remote.wait_end("stop")
    assert (end["state"], end["message"], end["exit_code"]) == (
        "stopped",
        "stopped by the user",
        75,
    )
    assert remote.text("stop", "weights/last.pt").startswith("weights of step ")
    wait_until(lambda: not remote.all_processes("stop"))


def test_a_second_stop_keeps_the_first_reason(remote):
    remote.launch("twice", *LONG, "--step-seconds", "0.3")
    remote.wait_steps("twice", 1)
    remote.stop("twice", message="first")
    assert remote.stop("twice", message="second")["asked"] is True
    assert remote.wait_end("twice")["message"] == "first"


def test_a_stop_after_the_end_asks_nothing(remote):
    remote.launch("over", "--steps", "1")
    remote.wait_end("over")
    assert remote.stop("over") == {"state": "completed", "asked": False}
    assert not os.path.exists(os.path.join(remote.dir("over"), "control", "stop.json"))


def test_a_stop_before_the_start_keeps_the_trainer_from_starting(remote, monkeypatch):
    monkeypatch.setattr(launch, "_start", lambda run_dir: False)
    remote.launch("early", "--steps", "1")
    assert remote.stop("early")["asked"] is True
    monkeypatch.undo()
    remote.launch("early", "--steps", "1")
    end = remote.wait_end("early")
    assert end["state"] == "stopped"
    assert end["message"] == "stopped by the user before the trainer started"
    assert "trainer_started" not in remote.text("early", "train.log")


def test_a_trainer_that_ignores_the_request_is_ended_by_sigterm(remote):
    limits = {"grace_seconds": 0.2, "stall_minutes": None}
    remote.launch("deaf", *LONG, "--obey", "no", limits=limits)
    remote.wait_steps("deaf")
    remote.stop("deaf")
    end = remote.wait_end("deaf")
    assert end["state"] == "stopped"
    assert end["message"] == "stopped by the user; the trainer ended at SIGTERM"
    assert remote.processes("deaf") == []


def test_a_trainer_that_ignores_sigterm_is_killed(remote):
    limits = {"grace_seconds": 0.2, "stall_minutes": None}
    job = remote.job("stone", limits=limits)
    job["argv"] = ["sh", "-c", "trap '' TERM; echo up; while true; do sleep 0.1; done"]
    remote.launch_job(job)
    wait_until(lambda: "up" in log_text(remote.poll("stone")))
    remote.stop("stone")
    end = remote.wait_end("stone")
    assert end["state"] == "stopped"
    assert end["message"].endswith("; the trainer did not end in time and was killed")
    assert remote.processes("stone") == []


def test_stop_now_kills(remote):
    remote.launch("now", *LONG, "--ranks", "2", "--obey", "no")
    remote.wait_steps("now")
    remote.stop("now")
    assert remote.stop("now", now=True)["asked"] is True
    end = remote.wait_end("now", 10)
    assert (end["state"], end["message"]) == ("stopped", "stopped by the user")
    assert remote.processes("now") == []


@pytest.mark.parametrize(
    ("limit", "words"),
    [({"timeout_seconds": 0.5}, "--timeout"), ({"max_hours": 0.5 / 3600}, "--max-hours")],
)
def test_a_limit_ends_the_run_as_timed_out_and_says_which(remote, limit, words):
    limits = dict({"grace_seconds": 5, "stall_minutes": None}, **limit)
    remote.launch("limit", *LONG, limits=limits)
    end = remote.wait_end("limit")
    assert end["state"] == "timed_out"
    assert words in end["message"]
    assert end["exit_code"] == 75


def test_a_stall_is_a_failure_and_leaves_the_stacks_in_the_log(remote):
    limits = {"grace_seconds": 5, "stall_minutes": 3.0 / 60}
    remote.launch("stall", *LONG, "--fault", "hang", "--ranks", "1", limits=limits)
    end = remote.wait_end("stall")
    assert (end["state"], end["error"]["type"]) == ("failed", "Stalled")
    assert "--stall-minutes" in end["message"]
    assert "most recent call first" in remote.text("stall", "train.log")
    assert remote.processes("stall") == []


def test_what_a_trainer_leaves_behind_is_ended(remote):
    remote.launch("daemon", *LONG, "--fault", "leave-daemon")
    remote.wait_steps("daemon", 3)
    agent = remote.agent("daemon")["pid"]

    def daemons():  # the agent adopts orphans; this one carries no marker
        rows = processes.table().values()
        return [
            row
            for row in rows
            if row.parent == agent and not row.gone and not processes.environment_of(row.pid)
        ]

    row = wait_until(daemons, what="the daemon is there")[0]
    remote.stop("daemon")
    assert remote.wait_end("daemon")["state"] == "stopped"
    assert not processes.alive(row.pid, row.started)


def test_when_the_agent_is_killed_the_run_is_ended_and_failed(remote):
    remote.launch("headless", *LONG, "--ranks", "2")
    remote.wait_steps("headless")
    kill(remote.agent("headless")["pid"])
    end = remote.wait_end("headless", 30)
    assert (end["state"], end["error"]["type"]) == ("failed", "AgentKilled")
    assert remote.processes("headless") == []
    wait_until(lambda: not remote.all_processes("headless"))
    assert remote.poll("headless")["artifacts"]["files"] != []


def test_a_killed_watchdog_is_replaced(remote):
    remote.launch("guard", *LONG)
    remote.wait_steps("guard")
    first = remote.agent("guard")["watchdog"]["pid"]
    kill(first)

    def replaced():
        now = remote.poll("guard")["agent"]["watchdog"]["pid"]
        return now if now != first else None

    second = wait_until(replaced)
    assert processes.find(second) is not None
    remote.stop("guard")
    assert remote.wait_end("guard")["state"] == "stopped"


@pytest.mark.slow  # the evidence is a heartbeat that is stale
def test_after_agent_and_watchdog_are_killed_one_contact_ends_the_rest(remote):
    remote.launch("buried", *LONG, "--obey", "no")
    remote.wait_steps("buried")
    agent = remote.agent("buried")
    os.kill(agent["pid"], signal.SIGSTOP)
    kill(agent["watchdog"]["pid"])
    kill(agent["pid"])
    for one in (agent, agent["watchdog"]):  # a signal takes its time
        wait_until(lambda one=one: not processes.alive(one["pid"], one["start_time"]))
    document = remote.poll("buried")  # the only one
    assert (document["status"]["state"], document["agent_alive"]) == ("training", False)
    wait_until(lambda: not remote.all_processes("buried"), 60)
    end = remote.status("buried")
    assert (end["state"], end["error"]["type"]) == ("failed", "AgentKilled")
    assert remote.text("buried", "train.log").count("run_ended=failed") == 1


@pytest.mark.slow
def test_a_run_whose_processes_were_all_killed_is_failed_in_the_list_and_at_the_next_contact(
    remote,
):
    remote.launch("massacre", *LONG, "--ranks", "2")
    remote.wait_steps("massacre")
    rank_pid(remote, "massacre", 1)
    agent = remote.agent("massacre")
    os.kill(agent["pid"], signal.SIGSTOP)
    for pid in remote.all_processes("massacre"):
        with contextlib.suppress(ProcessLookupError):  # torchrun was quicker
            kill(pid)
    wait_until(lambda: not remote.all_processes("massacre"), 5)
    (row,) = api.list_runs(remote.root)["runs"]
    assert row["state"] == "training"  # silence for a moment proves nothing
    end = wait_until(lambda: (s := remote.status("massacre"))["state"] == "failed" and s, 30)
    assert end["message"] == "the agent was killed, so the run was ended"
    (row,) = api.list_runs(remote.root)["runs"]
    assert row["state"] == "failed"


def test_a_sigterm_to_the_agent_stops_the_run_in_order(remote):
    remote.launch("host", *LONG)
    remote.wait_steps("host")
    os.kill(remote.agent("host")["pid"], signal.SIGTERM)
    end = remote.wait_end("host")
    assert end["state"] == "stopped"
    assert "SIGTERM" in end["message"]


def test_a_crash_is_tried_again_from_the_last_checkpoint(remote):
    remote.launch("retry", "--steps", "3", "--fault", "crash-once", max_restarts=1)
    end = remote.wait_end("retry")
    assert (end["state"], end["attempt"]) == ("completed", 2)
    log = remote.text("retry", "train.log")
    assert log.count("trainer_started") == 2
    assert "resumed_from={}/weights/last.pt".format(remote.dir("retry")) in log
    assert "attempt_failed=1" in log


def test_without_restarts_a_crash_is_final(remote):
    remote.launch("crash", "--steps", "3", "--fault", "crash-once")
    end = remote.wait_end("crash")
    assert (end["state"], end["attempt"]) == ("failed", 1)
    assert end["message"] == "the trainer ended with exit code 1"


def test_a_stopped_run_is_not_started_again(remote):
    remote.launch("enough", *LONG, max_restarts=3)
    remote.wait_steps("enough")
    remote.stop("enough")
    assert remote.wait_end("enough")["attempt"] == 1


def test_every_artifact_is_listed_with_its_hash(remote):
    remote.launch("list", "--steps", "2", artifacts=["artifacts/x.pt"])
    remote.wait_end("list")
    manifest = remote.poll("list")["artifacts"]
    assert manifest["unmatched"] == []
    paths = [entry["path"] for entry in manifest["files"]]
    assert sorted(paths) == [
        "job.json", "receipt.json", "steps.jsonl", "train.log", "weights/last.pt", "work/artifacts/x.pt",
    ]  # fmt: skip
    for entry in manifest["files"]:
        with open(os.path.join(remote.dir("list"), entry["path"]), "rb") as stream:
            data = stream.read()
        assert entry["size_bytes"] == len(data)
        assert entry["sha256"] == hashlib.sha256(data).hexdigest()


def test_an_artifact_that_is_not_there_is_said(remote):
    remote.launch("lack", "--steps", "1", artifacts=["artifacts/none-*.pt"])
    end = remote.wait_end("lack")
    assert end["state"] == "completed"
    assert end["message"] == "completed; nothing matched the artifact artifacts/none-*.pt"
    assert "remote_artifact_missing=artifacts/none-*.pt" in remote.text("lack", "train.log")
    assert remote.poll("lack")["artifacts"]["unmatched"] == ["artifacts/none-*.pt"]


def test_the_receipt_names_what_ran(remote):
    remote.launch("paper", "--steps", "2", "--ranks", "2", artifacts=["artifacts/x.pt"])
    remote.wait_end("paper")
    receipt = json.loads(remote.text("paper", "receipt.json"))
    assert (receipt["state"], receipt["world_size"], receipt["optimizer_steps"]) == (
        "completed",
        2,
        2,
    )
    assert receipt["job"]["argv"][2:] == ["--steps", "2", "--ranks", "2"]
    assert receipt["versions"]["python"].count(".") == 2
    assert len(receipt["code_sha256"]) == 64
    assert [a["path"] for a in receipt["artifacts"]][-1] == "work/artifacts/x.pt"


def test_the_heartbeat_comes_and_tells_the_ranks(remote):
    remote.launch("beat", *LONG, "--ranks", "2")
    pids = {rank_pid(remote, "beat", rank) for rank in (0, 1)}
    first = remote.agent("beat")["heartbeat_monotonic"]
    wait_until(lambda: remote.agent("beat")["heartbeat_monotonic"] > first + 1, 6)
    document = remote.poll("beat")
    assert document["agent_alive"] is True
    assert document["agent_heartbeat_age_seconds"] < 4
    assert document["agent"]["phase"] == "train"
    assert pids <= {pid for pid, _ in document["agent"]["processes"]}
    assert document["agent"]["boot_id"] == document["boot_id"]


def test_the_trainer_gets_the_environment_it_was_promised(remote):
    program = "import os,json; print(json.dumps(dict(os.environ, cwd=os.getcwd())))"
    job = remote.job("env", argv=[sys.executable, "-c", program], env={"MINE": "1"}, device="0,2")
    remote.launch_job(job)
    remote.wait_end("env")
    told = json.loads(remote.text("env", "train.log").split("\n")[0])
    run_dir = remote.dir("env")
    assert told["RUN_DIR"] == run_dir
    assert (told["RUN_ID"], told["RUN_SUPERVISED"], told["MINE"]) == ("env", "1", "1")
    assert told["PYTHONPATH"].split(os.pathsep)[0] == os.path.join(run_dir, "code")
    assert (told["PYTHONUNBUFFERED"], told["CUDA_VISIBLE_DEVICES"]) == ("1", "0,2")
    assert told["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    assert int(told["OMP_NUM_THREADS"]) >= 1
    assert told["cwd"] == os.path.join(run_dir, "work")


def test_a_zombie_counts_as_gone():
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    try:
        row = wait_until(lambda: (processes.find(pid) or row_gone).gone and processes.find(pid))
        assert row.state == "Z"
        assert processes.alive(pid, row.started) is False
    finally:
        os.waitpid(pid, 0)


class row_gone:
    gone = False


def test_a_pid_with_another_start_time_is_another_process():
    me = processes.find(os.getpid())
    assert processes.alive(me.pid, me.started) is True
    assert processes.alive(me.pid, str(int(me.started) + 1)) is False


def test_an_error_that_repeats_itself_before_any_step_is_not_tried_a_third_time(remote):
    job = remote.job("same", argv=[sys.executable, "-c", "raise ValueError('banana')"])
    job["max_restarts"] = 5
    remote.launch_job(job)
    end = remote.wait_end("same")
    assert (end["state"], end["attempt"]) == ("failed", 2)
    assert end["message"] == (
        "the trainer raised ValueError: banana"
        " (not tried again: the same error came twice before the first step)"
    )
    rows = json.loads(remote.text("same", "receipt.json"))["attempts"]
    assert [(row["attempt"], row["cause"]) for row in rows] == [(1, "program"), (2, "program")]


def test_a_wrong_configuration_is_not_tried_a_second_time(remote):
    job = remote.job("typo", argv=[sys.executable, "-c", "import nonsense_module"])
    job["max_restarts"] = 5
    remote.launch_job(job)
    end = remote.wait_end("typo")
    assert (end["state"], end["attempt"]) == ("failed", 1)
    assert "not tried again: another attempt would end the same way" in end["message"]


def test_what_the_machine_does_is_tried_again_and_a_stop_in_between_is_obeyed(remote):
    job = remote.job("pause", argv=["sh", "-c", "kill -9 $$"], max_restarts=20)
    remote.launch_job(job)
    wait_until(lambda: "attempt_failed=3 cause=infrastructure" in log_text(remote.poll("pause")))
    remote.stop("pause")
    end = remote.wait_end("pause")
    assert (end["state"], end["attempt"]) == ("stopped", 3)
    assert end["message"] == "stopped by the user before attempt 4 started"
    rows = remote.poll("pause")["agent"]["attempts"]
    assert [row["cause"] for row in rows] == ["infrastructure"] * 3


def test_the_last_attempt_is_counted_in_the_message(remote):
    remote.launch_job(remote.job("shot", argv=["sh", "-c", "kill -9 $$"], max_restarts=1))
    end = remote.wait_end("shot")
    assert end["message"].endswith("most often out of memory (attempt 2 of 2)")


def test_a_stall_names_where_the_trainer_stood_and_a_restart_may_go_better(remote):
    limits = {"grace_seconds": 5, "stall_minutes": 3.0 / 60}
    remote.launch("stuck", *LONG, "--fault", "hang", "--ranks", "2", limits=limits)
    end = remote.wait_end("stuck")
    assert "rank 0 in train (stub_trainer.py:" in end["message"]
    log = remote.text("stuck", "train.log")
    assert "stacks=rank 1 pid=" in log
    assert (
        "has no faulthandler for SIGUSR1" in log
    )  # rank 1 of the stub goes on and listens to nothing
