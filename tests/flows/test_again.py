"""What crashed goes on, what was stopped is resumed, what ended is run again bit for bit; any command is a run."""

from __future__ import annotations

import os
import signal

import pytest

from kernel_tools.errors import FetchError, InvalidArgumentError

from .conftest import CONFIG, LONG, TINY, notebook_kernel, processes_of_run, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

THREE = (*TINY[:-2], "solver.epochs=3", "logging.log_interval=1")


def weights(run):
    import torch

    (last,) = run.fetch("weights/last.pt")
    return torch.load(last.path, weights_only=True)


def tensors(state, path=""):
    """Every tensor of a checkpoint by its place."""
    import torch

    if isinstance(state, torch.Tensor):
        yield path, state
    elif isinstance(state, dict):
        for key, value in state.items():
            yield from tensors(value, f"{path}/{key}")
    elif isinstance(state, list | tuple):
        for number, value in enumerate(state):
            yield from tensors(value, f"{path}/{number}")


def test_a_receipt_gives_the_same_weights_bit_for_bit(session):
    import torch

    first = session.train(CONFIG, overrides=TINY, nproc_per_node=2, device="cpu")
    first.wait(300)
    receipt = first.receipt
    assert (receipt.state, receipt.world_size, receipt.optimizer_steps) == ("completed", 2, 4)
    assert receipt.cost is None
    assert receipt.versions["torch"] == torch.__version__
    assert {"weights/last.pt", "train.log", "config.yaml"} <= {a["path"] for a in receipt.artifacts}
    (path,) = first.fetch("receipt.json")
    said = []
    second = session.run_again(path.path, report=said.append)
    second.wait(300)
    assert not [line for line in said if line.startswith("code_differs")]
    assert second.receipt.code_sha256 != receipt.code_sha256  # it holds the configuration, too
    one, other = dict(tensors(weights(first))), dict(tensors(weights(second)))
    assert sorted(one) == sorted(other)
    assert [place for place, tensor in one.items() if not torch.equal(tensor, other[place])] == []


@pytest.mark.campaign
def test_a_killed_rank_costs_an_attempt_and_the_run_completes(session):
    run = session.train(CONFIG, overrides=THREE, nproc_per_node=2, max_restarts=1)
    wait_for(lambda: (run.snapshot.figure("completed_epochs") or 0) >= 1, seconds=200)
    os.kill(run.snapshot.agent["ranks"][1]["pid"], signal.SIGKILL)
    run.wait(300)
    status = run.status()
    assert (status["state"], status["attempt"], status["optimizer_steps"]) == ("completed", 2, 12)
    assert status["resumed_from"].endswith("weights/last.pt")
    assert [row["epoch"] for row in run.metrics()] == [1, 2, 3]
    assert "cause=infrastructure rank 1 was killed by signal 9" in run.logs(1000)
    assert [row["state"] for row in run.receipt.document["attempts"]] == ["failed", "completed"]


def test_a_wrong_start_is_not_paid_for_twice(session):
    run = session.train(
        CONFIG, overrides=[*TINY, "data.format=yolo", "data.root=data/nowhere"], max_restarts=3
    )
    run.wait(120, check=False)
    assert (run.state.value, run.status()["attempt"]) == ("failed", 1)
    assert "not tried again" in run.snapshot.message


@pytest.mark.campaign
def test_a_stopped_run_is_resumed_by_its_id_alone(session):
    run = session.train(CONFIG, overrides=LONG, nproc_per_node=1)
    wait_for(lambda: (run.snapshot.figure("optimizer_steps") or 0) >= 2, seconds=120)
    with pytest.raises(InvalidArgumentError, match="still goes on"):
        session.train(resume=run.id)
    with pytest.raises(FetchError, match="no receipt yet"):
        run.receipt  # noqa: B018
    run.stop()
    run.wait(120)
    assert "ChildFailedError" not in run.logs(1000)
    done = run.status()["optimizer_steps"]
    more = session.train(
        resume=run.id[-4:], overrides=["solver.epochs=1"], nproc_per_node=1, dry_run=True
    )
    assert more.job.resume == {"checkpoint": f"runs/{run.id}/weights/last.pt", "run_id": run.id}
    again = session.train(resume=run.id, nproc_per_node=1)
    wait_for(lambda: (again.snapshot.figure("optimizer_steps") or 0) > done, seconds=120)
    assert again.status()["resumed_from"] == more.job.resume["checkpoint"].join(
        (session.connection().remote_dir + "/", "")
    )
    again.stop(now=True)
    again.wait(60, check=False)
    wait_for(lambda: not processes_of_run(again.id))


@pytest.mark.campaign
def test_a_checkpoint_of_this_machine_is_resumed(session):
    first = session.train(CONFIG, overrides=TINY, nproc_per_node=1)
    first.wait(300)
    first.fetch()
    folder = str(first.fetch("weights/last.pt")[0].path.parent.parent)
    second = session.train(
        CONFIG, overrides=[*TINY, "solver.epochs=2"], resume=folder, nproc_per_node=1
    )
    second.wait(300)
    assert second.status()["optimizer_steps"] == 8
    assert [row["epoch"] for row in second.metrics()] == [1, 2]


def test_any_command_and_script_is_a_run_in_a_notebook(session, project):
    (project / "tools").mkdir(exist_ok=True)
    (project / "tools/hello.py").write_text(
        "import os, sys\n"
        "print('ranks', os.environ['WORLD_SIZE'], sys.argv[1:], flush=True)\n"
        "os.environ['RANK'] == '0' and open('artifacts/a.txt', 'w').write('made')\n"
    )
    with notebook_kernel(project) as cell:
        cell("%load_ext kernel_tools")
        cell("%remote_connect local")
        cell(
            "run = %remote_run custom --script tools/hello.py --nproc-per-node 2"
            " --artifact 'artifacts/*.txt' --wait -- --epochs '3 4'"
        )
        said = cell("print(run.logs(), run.fetch('work/artifacts/a.txt')[0].path.read_text())")
        assert "ranks 2 ['--epochs', '3 4']" in said
        assert said.split()[-1] == "made"
        cell("run = %remote_run custom --command 'python -c \"print(6*7)\"' --wait")
        assert "42" in cell("print(run.logs())")
        assert cell("run.stop()").strip().endswith("has ended: completed.")
        assert "receipt of" in cell("run.receipt")
