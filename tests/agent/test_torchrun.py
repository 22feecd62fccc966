"""The same ends under the real torchrun, which hides its workers' exit codes and starts them in sessions of their own."""

import os
import signal

import pytest

from .conftest import FOLDER, log_text, wait_until

pytest.importorskip("torch")
pytestmark = pytest.mark.slow


def launch(remote, fault):
    script = os.path.join(FOLDER, "torch_ranks.py")
    job = remote.job(fault, kind="script", argv=[script, fault], nproc_per_node=2)
    remote.launch_job(job)


@pytest.mark.parametrize(
    ("fault", "state", "message", "code"),
    [
        ("none", "completed", "completed", 0),
        ("raise", "failed", "rank 1 raised ValueError: banana", 1),
        ("kill", "failed", "rank 1 was killed by signal 9: most often out of memory", -9),
        ("exit", "failed", "rank 1 ended with exit code 5", 1),
    ],
)
def test_the_end_of_a_rank_is_named(remote, fault, state, message, code):
    launch(remote, fault)
    end = remote.wait_end(fault, 120)
    assert (end["state"], end["message"]) == (state, message)
    # Gloo's threads may abort a rank that raised, on its way out.
    aborted = {-6} if fault == "raise" else set()
    assert end["exit_code"] in {code} | aborted
    assert "distributed=True world_size=2" in remote.text(fault, "train.log")
    ranks = remote.poll(fault)["agent"]["ranks"]
    assert [row["rank"] for row in ranks] == [0, 1]
    own = {"none": 0, "raise": 1, "kill": -9, "exit": 5}[fault]
    assert ranks[1]["exit_code"] in {own} | aborted
    assert remote.processes(fault) == []
    assert "torchelastic" not in os.listdir(remote.dir(fault))


KILLED = "was killed by signal 9: most often out of memory"


@pytest.mark.parametrize(
    ("victim", "message"),
    [
        ("rank 0", f"rank 0 {KILLED}"),
        ("rank 1", f"rank 1 {KILLED}"),
        ("torchrun", f"the launcher (torchrun) {KILLED}"),
        ("agent", "the agent was killed, so the run was ended"),
        ("all", "the agent was killed, so the run was ended"),
    ],
)
def test_whoever_is_killed_nothing_works_on_and_the_cause_is_named(remote, victim, message):
    launch(remote, "forever")
    wait_until(lambda: "world_size=2" in log_text(remote.poll("forever")), 90, "both ranks train")
    agent = wait_until(lambda: len((a := remote.agent("forever"))["ranks"]) == 2 and a, 20)
    assert len(remote.processes("forever")) >= 3
    victims = {
        "rank 0": [agent["ranks"][0]["pid"]],
        "rank 1": [agent["ranks"][1]["pid"]],
        "torchrun": [agent["trainer"]["pid"]],
        "agent": [agent["pid"]],
        "all": sorted(remote.all_processes("forever"), key=lambda pid: pid != agent["pid"]),
    }[victim]
    for pid in victims:
        os.kill(pid, signal.SIGKILL)
    # Nobody looks meanwhile: the run must end by itself.
    wait_until(lambda: not remote.all_processes("forever"), 30, "nothing of the run works on")
    end = wait_until(
        lambda: (s := remote.status("forever"))["state"] == "failed" and s, 30, "the end is told"
    )
    assert end["message"] == message


def test_a_rank_in_an_endless_loop_is_found_and_named_with_the_stacks_of_all(remote):
    script = os.path.join(FOLDER, "torch_ranks.py")
    limits = {"grace_seconds": 5, "stall_minutes": 25.0 / 60}
    job = remote.job("spin", kind="script", argv=[script, "spin"], nproc_per_node=2, limits=limits)
    remote.launch_job(job)
    end = remote.wait_end("spin", 120)
    assert (end["state"], end["error"]["type"]) == ("failed", "Stalled")
    assert "rank 0 in all_reduce (distributed_c10d.py:" in end["message"]
    assert "rank 1 in spin (torch_ranks.py:" in end["message"]
    log = remote.text("spin", "train.log")
    first, second = log.index("stacks=rank 0"), log.index("stacks=rank 1")
    assert "in all_reduce" in log[first:second]
    assert " in spin" in log[second:]
    assert remote.processes("spin") == []


def test_a_stop_before_training_began_is_obeyed_at_once(remote):
    script = os.path.join(FOLDER, "torch_ranks.py")
    limits = {"grace_seconds": 600, "stall_minutes": None}
    job = remote.job(
        "imports", kind="detector", argv=[script, "forever"], nproc_per_node=2, limits=limits
    )
    remote.launch_job(job)
    wait_until(lambda: "world_size=2" in log_text(remote.poll("imports")), 90, "both ranks are up")
    remote.stop("imports")
    end = remote.wait_end("imports", 30)
    assert (end["state"], end["message"]) == (
        "stopped",
        "stopped by the user before training began",
    )
    assert remote.processes("imports") == []
