"""Launching: whole or not at all, at most once, with nothing secret in reach."""

import concurrent.futures
import json
import os
import stat
import subprocess
import sys
import threading
import time

import pytest
from kernel_tools_agent import api, bootstrap, launch, status, trainer
from kernel_tools_agent.errors import AgentError
from kernel_tools_agent.job import Job

from .conftest import AGENT_FOLDER, load_agent, wait_until


def test_a_run_goes_from_queued_to_completed(remote):
    told = remote.launch("one", "--steps", "4", "--ranks", "2")
    assert told["run_id"] == "one"
    assert told["started"] is True
    assert told["run_dir"] == remote.dir("one")
    end = remote.wait_end("one")
    assert (end["state"], end["phase"], end["exit_code"]) == ("completed", "done", 0)
    assert (end["optimizer_steps"], end["world_size"], end["error"]) == (4, 2, None)
    assert end["started_at"].endswith("+00:00")


def test_status_is_complete_and_whole_for_a_fast_reader(remote):
    torn, states, ended = [], [], threading.Event()
    path = os.path.join(remote.dir("fast"), "status.json")

    def read():
        while not ended.is_set():
            if os.path.isdir(remote.dir("fast")):
                try:
                    with open(path, encoding="utf-8") as stream:
                        found = json.loads(stream.read())
                except (OSError, ValueError) as error:
                    torn.append(repr(error))
                    continue
                if set(found) != set(status.STATUS_KEYS):
                    torn.append(sorted(set(status.STATUS_KEYS) ^ set(found)))
                if not states or states[-1] != found["state"]:
                    states.append(found["state"])
                    if found["state"] == "completed":
                        assert os.path.exists(os.path.join(remote.dir("fast"), "artifacts.json"))
            time.sleep(0.002)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        remote.launch("fast", "--steps", "20")
        remote.wait_end("fast")
    finally:
        ended.set()
        reader.join()
    assert torn == []
    assert states[-1] == "completed"
    assert [state for state in states if state != "preparing"] in (
        ["queued", "training", "completed"],
        ["training", "completed"],
    )


def test_many_launches_at_once_start_one_trainer(remote):
    job = remote.job("once", "--steps", "3")
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        told = list(pool.map(lambda _: remote.launch_job(job), range(16)))
    assert [one["started"] for one in told].count(True) == 1
    assert {one["run_dir"] for one in told} == {remote.dir("once")}
    remote.wait_end("once")
    assert remote.text("once", "train.log").count("trainer_started") == 1
    assert [n for n in os.listdir(os.path.join(remote.root, "runs")) if n != "once"] == []


def test_launches_from_several_processes_start_one_trainer(remote, tmp_path):
    job_file = tmp_path / "job.json"
    job_file.write_text(json.dumps(remote.job("procs", "--steps", "3")))
    remote.runs.append("procs")
    program = (
        "import sys,json; sys.path.insert(0, sys.argv[1]); import conftest;"
        "print(conftest.api.launch(remote_dir=sys.argv[2], job=json.load(open(sys.argv[3])),"
        " manifest={'files': {}})['started'])"
    )
    arguments = [
        sys.executable,
        "-c",
        program,
        os.path.dirname(__file__),
        remote.root,
        str(job_file),
    ]
    children = [subprocess.Popen(arguments, stdout=subprocess.PIPE) for _ in range(4)]
    answers = sorted(child.communicate(timeout=60)[0].strip() for child in children)
    assert answers == [b"False", b"False", b"False", b"True"]
    remote.wait_end("procs")
    assert remote.text("procs", "train.log").count("trainer_started") == 1


def test_a_launch_after_the_end_starts_nothing(remote):
    remote.launch("late", "--steps", "1")
    remote.wait_end("late")
    told = remote.launch("late", "--steps", "1")
    assert (told["started"], told["state"]) == (False, "completed")
    assert remote.text("late", "train.log").count("trainer_started") == 1


def test_a_launcher_that_dies_before_starting_is_made_good_by_the_next(remote, monkeypatch):
    monkeypatch.setattr(launch, "_start", lambda run_dir: False)
    assert remote.launch("again", "--steps", "1")["started"] is False
    assert remote.status("again")["state"] == "queued"
    assert remote.poll("again")["agent"] is None
    monkeypatch.undo()
    assert remote.launch("again", "--steps", "1")["started"] is True
    assert remote.wait_end("again")["state"] == "completed"


def test_another_job_under_the_same_id_is_refused(remote):
    remote.launch("same", "--steps", "1")
    with pytest.raises(AgentError, match="exists already, with another job"):
        remote.launch("same", "--steps", "2")


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"run_id": "../x"}, "run id"),
        ({"run_id": ""}, "run id"),
        ({"kind": "shell"}, "kind"),
        ({"argv": []}, "argv"),
        ({"argv": "rm -rf"}, "argv"),
        ({"nproc_per_node": 0}, "nproc_per_node"),
        ({"artifacts": ["../../etc/passwd"]}, "artifacts"),
        ({"limits": {"timeout_seconds": "soon"}}, "limits.timeout_seconds"),
        ({"inputs": [{"name": "a", "object": "a", "dest": "/etc"}]}, "inputs.dest"),
        ({"env": {"URL": "http://s/b?X-Amz-Signature=abc"}}, "presigned URL"),
    ],
)
def test_an_invalid_job_is_refused_and_leaves_nothing(remote, change, field):
    with pytest.raises(AgentError, match=field):
        api.launch(remote_dir=remote.root, job=dict(remote.job("bad"), **change), manifest={})
    assert not os.path.isdir(os.path.join(remote.root, "runs"))


def test_secrets_reach_the_trainer_and_no_file_or_command_line(remote, tmp_path):
    secret = "s3cr3t-value-of-the-user"
    bootstrap.missing(remote.root, [])
    kept = os.path.join(remote.root, "secrets", "hush.json")
    with open(kept, "w") as stream:
        json.dump({"inputs": {}, "env": {"API_KEY": secret}}, stream)
    os.chmod(kept, 0o644)
    proof = tmp_path / "proof"
    job = remote.job(
        "hush",
        argv=[
            sys.executable,
            "-c",
            "import os,sys,time; open(sys.argv[1],'w').write(os.environ['API_KEY']); time.sleep(600)",
            str(proof),
        ],
    )
    remote.launch_job(job, secrets_file=kept)
    wait_until(lambda: proof.exists() and proof.read_text() == secret, what="the trainer has it")
    assert stat.S_IMODE(os.stat(kept).st_mode) == 0o600
    assert stat.S_IMODE(os.stat(os.path.dirname(kept)).st_mode) == 0o700
    for pid in remote.all_processes("hush"):
        with open(f"/proc/{pid}/cmdline", "rb") as stream:
            assert secret.encode() not in stream.read()
    remote.stop("hush", now=True)
    remote.wait_end("hush")
    assert not os.path.exists(kept)
    for folder, _, names in os.walk(remote.root):
        for name in names:
            with open(os.path.join(folder, name), "rb") as stream:
                assert secret.encode() not in stream.read(), name


@pytest.mark.parametrize(
    ("fields", "keywords"),
    [
        ({"artifacts": ["/etc/passwd"]}, {}),
        ({}, {"manifest": {"files": {"a.py": [420, "0" * 64]}}}),
    ],
)
def test_a_refused_launch_leaves_no_secrets(remote, fields, keywords):
    kept = os.path.join(remote.root, "secrets", "no.json")
    os.makedirs(os.path.dirname(kept))
    with open(kept, "w", encoding="utf-8") as stream:
        stream.write("{}")
    with pytest.raises(AgentError):
        remote.launch_job(remote.job("no", **fields), secrets_file="secrets/no.json", **keywords)
    assert not os.path.exists(kept)
    assert not os.path.exists(remote.dir("no"))


def test_a_launch_that_is_refused_takes_no_other_runs_secrets(remote):
    kept = os.path.join(remote.root, "secrets", "yes.json")
    os.makedirs(os.path.dirname(kept))
    with open(kept, "w", encoding="utf-8") as stream:
        stream.write("{}")
    remote.launch_job(remote.job("yes", "--steps", "1000"), secrets_file="secrets/yes.json")
    with pytest.raises(AgentError, match="another job"):
        remote.launch_job(remote.job("yes", "--steps", "1"), secrets_file="secrets/yes.json")
    with pytest.raises(AgentError, match="artifacts"):
        remote.launch_job(remote.job("yes", artifacts=["/"]), secrets_file="secrets/yes.json")
    assert os.path.exists(kept)


def test_a_missing_secrets_file_is_an_error(remote):
    with pytest.raises(AgentError, match="secrets file"):
        remote.launch_job(remote.job("none"), secrets_file="secrets/none.json")


def test_the_code_is_laid_read_only_and_linked_into_the_work_folder(remote):
    sources = {"pkg/hello.py": b"print('hello from code')\n", "configs/a.yaml": b"a: 1\n"}
    files = {path: [0o644, _sha(data)] for path, data in sources.items()}
    bootstrap.missing(remote.root, [entry[1] for entry in files.values()])
    bootstrap.receive(remote.root, bootstrap.pack(sources.values()))
    job = remote.job("code", argv=[sys.executable, "-m", "pkg.hello"])
    remote.launch_job(job, manifest={"files": files})
    assert remote.wait_end("code")["state"] == "completed"
    assert "hello from code" in remote.text("code", "train.log")
    work = os.path.join(remote.dir("code"), "work")
    assert os.path.islink(os.path.join(work, "pkg"))
    assert sorted(os.listdir(work)) == ["artifacts", "configs", "data", "pkg", "runs"]
    assert not any(os.path.islink(os.path.join(work, n)) for n in ("artifacts", "data", "runs"))
    laid = os.path.join(remote.dir("code"), "code", "pkg", "hello.py")
    assert stat.S_IMODE(os.stat(laid).st_mode) == 0o444
    assert os.path.samefile(laid, bootstrap.blob_path(remote.root, files["pkg/hello.py"][1]))


def test_code_that_was_not_sent_is_an_error_and_leaves_no_run(remote):
    manifest = {"files": {"a.py": [0o644, "0" * 64]}}
    with pytest.raises(AgentError, match="sync again"):
        remote.launch_job(remote.job("lost"), manifest=manifest)
    assert os.listdir(os.path.join(remote.root, "runs")) == []


def test_the_agent_runs_from_the_folder_that_was_laid_under_any_name(remote):
    sources = {}
    for name in os.listdir(AGENT_FOLDER):
        if name.endswith(".py"):
            with open(os.path.join(AGENT_FOLDER, name), "rb") as stream:
                sources[name] = stream.read()
    files = {name: [0o644, _sha(data)] for name, data in sources.items()}
    agent = {"hash": bootstrap.hash12(files), "files": files}
    root = bootstrap.missing(remote.root, [])["remote_dir"]
    told = bootstrap.receive(root, bootstrap.pack(sources.values()), agent)
    name = "_kernel_tools_agent_" + agent["hash"]
    load_agent(name, os.path.join(told["agent_dir"], "kernel_tools_agent"))
    remote_api = __import__(name + ".api", fromlist=["api"])
    remote.runs.append("laid")
    remote_api.launch(root, remote.job("laid", "--steps", "1"), {"files": {}})
    assert remote.wait_end("laid")["state"] == "completed"


@pytest.mark.parametrize("ending", ["SIGINT to the group", "SIGKILL to the group"])
def test_the_run_outlives_the_process_that_launched_it(remote, tmp_path, ending):
    import signal

    remote.runs.append("orphan")
    job_file = tmp_path / "job.json"
    job_file.write_text(json.dumps(remote.job("orphan", "--steps", "60")))
    program = (
        "import sys,json,time; sys.path.insert(0, sys.argv[1]); import conftest;"
        "conftest.api.launch(remote_dir=sys.argv[2], job=json.load(open(sys.argv[3])),"
        " manifest={'files': {}}); print('up', flush=True); time.sleep(600)"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", program, os.path.dirname(__file__), remote.root, str(job_file)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    assert child.stdout.readline() == b"up\n"
    os.killpg(child.pid, signal.SIGINT if "INT" in ending else signal.SIGKILL)
    child.wait()
    child.stdout.close()
    end = remote.wait_end("orphan")
    assert (end["state"], end["optimizer_steps"]) == ("completed", 60)


def test_the_agent_is_nobodys_child_and_holds_no_descriptor_of_its_launcher(remote):
    remote.launch("free", "--steps", "1000")
    remote.wait_steps("free")
    agent = remote.agent("free")
    row = launch.processes.find(agent["pid"])
    assert row.parent != os.getpid()
    assert os.getsid(agent["pid"]) == agent["pid"]
    assert os.readlink("/proc/{}/fd/0".format(agent["pid"])) == "/dev/null"
    assert os.readlink("/proc/{}/fd/1".format(agent["pid"])).endswith("agent.log")
    assert os.readlink("/proc/{}/cwd".format(agent["pid"])) == "/"


def test_the_launcher_gets_no_zombie(remote):
    remote.launch("reaped", "--steps", "1")
    remote.wait_end("reaped")
    mine = [r for r in launch.processes.table().values() if r.parent == os.getpid() and r.gone]
    assert mine == []


def _sha(data):
    import hashlib

    return hashlib.sha256(data).hexdigest()


@pytest.mark.parametrize(
    ("environment", "told"),
    [
        ({}, {"HF_HOME": "/r/huggingface"}),
        ({"HF_HOME": "/mnt/hf"}, {}),
        ({"HF_HUB_CACHE": "/mnt/hub"}, {}),
        ({"XDG_CACHE_HOME": "/mnt/cache"}, {}),
    ],
)
def test_what_the_hub_gives_is_kept_beside_the_runs_unless_the_host_says_where(
    monkeypatch, tmp_path, environment, told
):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert trainer.cache_home("/r/runs/one", environment) == told
    login = tmp_path / ".cache/huggingface/token"
    login.parent.mkdir(parents=True)
    login.write_text("of a login")
    with_login = trainer.cache_home("/r/runs/one", environment)
    assert with_login == (dict(told, HF_TOKEN_PATH=str(login)) if told else {})


@pytest.mark.parametrize(
    "hub",
    [
        "org/repo", {}, {"repository": "repo"}, {"repository": "org/repo/file"},
        {"repository": "../repo"}, {"repository": "org/repo", "path": "../x"},
        {"repository": "org/repo", "path": "/x"}, {"repository": "org/repo", "path": 1},
        {"repository": "-x/repo"}, {"repository": "org/repo\n"},
    ],
)  # fmt: skip
def test_a_job_that_names_no_place_on_the_hub_is_refused(hub):
    with pytest.raises(AgentError, match="the job's hub"):
        Job.from_json({"run_id": "one", "argv": ["x"], "hub": hub})
