"""What the trainer is started with: its command line, its environment, its working folder."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from typing import Dict, List, Mapping, Tuple

from . import host, processes
from .files import write_json
from .job import Job

# A kernel's own variables, and those of a torchrun that we may have been started under.
_NOT_INHERITED_PREFIXES = ("JPY_", "JUPYTER_TOKEN", "TORCHELASTIC_")
_NOT_INHERITED = frozenset(
    [
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "GROUP_RANK",
        "GROUP_WORLD_SIZE",
        "ROLE_NAME",
        "ROLE_RANK",
        "ROLE_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "RUN_DIR",
        "RUN_ID",
        "RUN_SUPERVISED",
        "RUN_ATTEMPT",
        "RUN_RESUME_CHECKPOINT",
    ]
)  # fmt: skip
# Where torchrun keeps its workers' error files while they run.
ELASTIC_FOLDER = "torchelastic"
# As `-m torch.distributed.run`, but without the collection of torch's objects at the very end: seconds, in
# which a run that was stopped still counts as running.
_TORCHRUN = (
    "import atexit, gc, runpy; atexit.register(gc.freeze); "
    "runpy.run_module('torch.distributed.run', run_name='__main__', alter_sys=True)"
)
# Folders of the work folder that are the run's own, whatever the code holds.
OWN_FOLDERS = ("data", "artifacts", "runs")


@dataclass(frozen=True)
class Command:
    """A program ready to be started; `environment` may hold secrets and is never written down."""

    argv: Tuple[str, ...]
    environment: Mapping[str, str] = field(repr=False)
    processes: int


def build(
    job: Job,
    *,
    run_dir: str,
    secret_env: Mapping[str, str],
    attempt: int,
    resume_checkpoint: str,
    inherited: Mapping[str, str],
) -> Command:
    """Return how to start the trainer of `job`.

    Args:
        job: the job.
        run_dir: absolute path of the run.
        secret_env: variables that stand in the secrets file only.
        attempt: 1 for the first start, then one more for each restart.
        resume_checkpoint: absolute path of a checkpoint to go on from, or "".
        inherited: the environment of the agent.
    """
    environment = clean_environment(inherited)
    environment.update(job.env)
    environment.update(secret_env)
    environment.update(cache_home(run_dir, environment))
    if job.device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    elif job.device not in ("auto", "cuda"):
        environment["CUDA_VISIBLE_DEVICES"] = job.device
    count = _processes(job, environment)
    code = os.path.join(run_dir, "code")
    paths = [code] + [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    environment.update(
        {
            processes.MARKER: run_dir,
            "RUN_ID": job.run_id,
            "RUN_SUPERVISED": "1",
            "RUN_ATTEMPT": str(attempt),
            "PYTHONPATH": os.pathsep.join(paths),
            "PYTHONUNBUFFERED": "1",
        }
    )
    if resume_checkpoint:
        environment["RUN_RESUME_CHECKPOINT"] = resume_checkpoint
    if (
        job.kind == "command"
    ):  # `python` and installed programs are those of the kernel's environment
        own = os.path.dirname(sys.executable)
        environment["PATH"] = os.pathsep.join([own, environment.get("PATH", os.defpath)])
    environment.setdefault("OMP_NUM_THREADS", str(max(1, host.cpu_count() // count)))
    # Torch's own default fragments memory at changing sizes of input.
    environment.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    return Command(tuple(_argv(job, run_dir, count, resume_checkpoint)), environment, count)


def record(command: Command, run_dir: str) -> None:
    """Write `command.json`: what was started, without any value that may be secret."""
    shown = ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "PYTORCH_CUDA_ALLOC_CONF")
    write_json(
        os.path.join(run_dir, "command.json"),
        {
            "argv": list(command.argv),
            "processes": command.processes,
            "environment": {name: command.environment.get(name) for name in shown},
        },
    )


def clean_environment(inherited: Mapping[str, str]) -> Dict[str, str]:
    """Return an environment without what belongs to the kernel or to another run."""
    environment = {
        name: value
        for name, value in inherited.items()
        if name not in _NOT_INHERITED and not name.startswith(_NOT_INHERITED_PREFIXES)
    }
    if environment.get("MPLBACKEND", "").startswith("module://"):
        del environment["MPLBACKEND"]  # the notebook's backend, useless and maybe absent here
    return environment


def cache_home(run_dir: str, environment: Mapping[str, str]) -> Dict[str, str]:
    """Return where the hub's client keeps what it loads: beside the runs, unless the host says otherwise.

    What lies in the home folder of a rented machine is often gone with its next start.
    """
    if any(environment.get(name) for name in ("HF_HOME", "HF_HUB_CACHE", "XDG_CACHE_HOME")):
        return {}
    home = os.path.join(os.path.dirname(os.path.dirname(run_dir)), "huggingface")
    told = {"HF_HOME": home}
    usual = os.path.join(os.path.expanduser("~"), ".cache", "huggingface", "token")
    if os.path.isfile(usual):  # of a login, which would be looked for in the new place
        told["HF_TOKEN_PATH"] = environment.get("HF_TOKEN_PATH") or usual
    return told


def _processes(job: Job, environment: Mapping[str, str]) -> int:
    if job.nproc_per_node != "auto":
        return int(job.nproc_per_node)
    if job.kind == "command":
        return 1
    return max(1, host.visible_cards(environment))


def _argv(job: Job, run_dir: str, count: int, resume_checkpoint: str) -> List[str]:
    if job.kind == "command":
        return list(job.argv)
    argv = list(job.argv)
    if resume_checkpoint and job.kind == "detector" and "train" in argv[:3]:
        argv += ["--resume", resume_checkpoint]
    return [
        sys.executable, "-c", _TORCHRUN, "--standalone",
        f"--nproc-per-node={count}",
        # One node: no name service is needed, and containers often have none (pytorch#150532).
        "--local-addr=127.0.0.1",
        "--log-dir", os.path.join(run_dir, ELASTIC_FOLDER),
        *argv,
    ]  # fmt: skip


def lay_work_folder(run_dir: str) -> None:
    """Make `work/`: links to the entries of `code/`, and the run's own folders to write in."""
    code, work = os.path.join(run_dir, "code"), os.path.join(run_dir, "work")
    for name in OWN_FOLDERS:
        os.makedirs(os.path.join(work, name), exist_ok=True)
    for name in sorted(os.listdir(code)):
        if name in OWN_FOLDERS:
            for inner in sorted(os.listdir(os.path.join(code, name))):
                _link(os.path.join(code, name, inner), os.path.join(work, name, inner))
        else:
            _link(os.path.join(code, name), os.path.join(work, name))


def place_in_work(run_dir: str, dest: str, target: str) -> str:
    """Link `work/<dest>` to `target`; folders of code on the way become folders of links.

    Returns:
        The absolute path of the link.
    """
    folder = os.path.join(run_dir, "work")
    parts = dest.split("/")
    for part in parts[:-1]:
        folder = os.path.join(folder, part)
        if os.path.islink(folder):
            _open_up(folder)
        os.makedirs(folder, exist_ok=True)
    link = os.path.join(folder, parts[-1])
    if os.path.islink(link) or os.path.isfile(link):
        os.unlink(link)
    elif os.path.isdir(link):
        os.rmdir(link)  # an empty folder of ours; anything else is an error worth seeing
    os.symlink(os.path.relpath(os.path.abspath(target), folder), link)
    return link


def _open_up(link: str) -> None:
    inside = os.path.realpath(link)
    os.unlink(link)
    os.mkdir(link)
    for name in os.listdir(inside):
        _link(os.path.join(inside, name), os.path.join(link, name))


def _link(target: str, link: str) -> None:
    if not os.path.lexists(link):
        folder = os.path.realpath(os.path.dirname(link))
        os.symlink(os.path.relpath(os.path.realpath(target), folder), link)
