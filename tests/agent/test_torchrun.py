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
    assert (end["state"], end["message"], end["exit_code"]) == (state, message, code)
    assert "distributed=True world_size=2" in remote.text(fault, "train.log")
    ranks = remote.poll(fault)["agent"]["ranks"]
    assert [row["rank"] for row in ranks] == [0, 1]
    assert ranks[1]["exit_code"] == {"none": 0, "raise": 1, "kill": -9, "exit": 5}[fault]
    assert remote.processes(fault) == []
    assert "torchelastic" not in os.listdir(remote.dir(fault))


@pytest.mark.parametrize("victim", ["torchrun", "agent"])
def test_when_a_parent_is_killed_no_worker_works_on(remote, victim):
    launch(remote, "forever")
    wait_until(lambda: "world_size=2" in log_text(remote.poll("forever")), 90, "both ranks train")
    agent = wait_until(lambda: len((a := remote.agent("forever"))["ranks"]) == 2 and a, 20)
    assert len(remote.processes("forever")) >= 3
    os.kill(agent["trainer"]["pid"] if victim == "torchrun" else agent["pid"], signal.SIGKILL)
    end = remote.wait_end("forever", 30)
    assert end["state"] == "failed"
    assert (
        end["message"]
        == {
            "torchrun": "the launcher (torchrun) was killed by signal 9: most often out of memory",
            "agent": "the agent was killed, so the run was ended",
        }[victim]
    )
    assert remote.processes("forever") == []
