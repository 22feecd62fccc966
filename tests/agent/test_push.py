"""Pushing: what is due when, two objects a file in turn, the manifest last, and what is said when it fails."""

import glob
import json
import os
import shutil
import socket
import struct
import sys
import threading
import time

import pytest
from kernel_tools_agent import api, complete_set, processes, push
from kernel_tools_agent.complete_set import CompleteSet, Ledger
from kernel_tools_agent.errors import PushError, StopRequestedError
from kernel_tools_agent.job import Job, PushPolicy
from kernel_tools_agent.presigned import Line, describe_failure, reach
from kernel_tools_agent.push import Pusher, Standing, due
from kernel_tools_agent.targets import _targets

from .conftest import wait_until
from .small_store import PART_BYTES

NOTHING = Standing(0, None, None)


@pytest.mark.parametrize(
    ("policy", "now", "pushed", "seconds", "reason"),
    [
        (PushPolicy(1, None), Standing(0, (1, 1), None), NOTHING, 0, ""),
        (PushPolicy(1, None), Standing(1, None, None), NOTHING, 0, ""),
        (PushPolicy(1, None), Standing(1, (1, 1), None), NOTHING, 0, "epoch 1"),
        (PushPolicy(3, None), Standing(2, (1, 1), None), NOTHING, 0, ""),
        (PushPolicy(3, None), Standing(4, (1, 1), None), Standing(1, (0, 0), None), 0, "epoch 4"),
        (PushPolicy(9, None), Standing(2, (1, 1), (2, 2)), NOTHING, 0, "best of epoch 2"),
        (PushPolicy(9, None), Standing(2, (1, 1), (2, 2)), Standing(1, (1, 1), (2, 2)), 0, ""),
        (PushPolicy(None, 10), Standing(2, (1, 1), None), NOTHING, 599, ""),
        (PushPolicy(None, 10), Standing(2, (1, 1), None), NOTHING, 600, "10 min"),
        (PushPolicy(None, 10), NOTHING, NOTHING, 1200, "20 min"),
    ],
)
def test_a_push_is_due_at_every_best_every_n_epochs_and_every_m_minutes(
    policy, now, pushed, seconds, reason
):
    assert due(policy, now, pushed, seconds) == reason


class Run:
    """A run directory, and pushes of it."""

    def __init__(self, folder, store, **options):
        self.folder, self.store = folder, store
        self.targets = _targets(store.targets("r", **options))
        (folder / "control").mkdir(parents=True)
        (folder / "weights").mkdir()
        self.used = set()

    def write(self, path, data):
        (self.folder / path).write_bytes(data)

    def push(self, *paths, documents=None, check=lambda: None, ledger=None):
        one = CompleteSet(
            str(self.folder), "r", reason="epoch 1", ended=documents is not None, ledger=ledger
        )
        sent = []
        one.send(
            self.targets, paths, documents=documents or {}, used=self.used, check=check,
            on_file=sent.append,
        )  # fmt: skip
        return sent, one


@pytest.fixture
def run(tmp_path, store):
    return Run(tmp_path / "run", store)


LAST, LOG = "weights/last.pt", "train.log"


def test_what_is_pushed_is_named_by_the_manifest_with_size_and_hash(run, store):
    run.write(LAST, b"weights")
    run.write(LOG, b"line\n")
    run.push(LAST, LOG, documents={"status.json": b"{}"})
    manifest, files = store.pushed("r")
    assert files == {LAST: b"weights", LOG: b"line\n", "status.json": b"{}"}
    assert manifest["ended"]
    assert [(row["size_bytes"], len(row["sha256"])) for row in manifest["files"]] == [
        (7, 64), (5, 64), (2, 64),
    ]  # fmt: skip
    assert store.puts[-1] == "runs/r/manifest.json"


def test_what_has_not_changed_is_not_sent_again(run, store):
    run.write(LAST, b"weights")
    run.write(LOG, b"line\n")
    run.push(LAST, LOG)
    run.write(LOG, b"line\nline\n")
    assert run.push(LAST, LOG)[0] == [LOG]
    assert store.pushed("r")[1] == {LAST: b"weights", LOG: b"line\nline\n"}


def test_a_push_that_is_cut_off_anywhere_leaves_the_set_before_it_whole(run, store):
    run.write(LAST, b"weights")
    run.write(LOG, b"log")
    run.push(LAST, LOG)
    cut = 0
    while True:
        run.write(LAST, b"newer weights %d" % cut)
        run.write(LOG, b"newer log %d" % cut)
        left = [cut]

        def check(left=left):
            if not left[0]:
                raise StopRequestedError
            left[0] -= 1

        try:
            run.push(LAST, LOG, check=check)
            break
        except StopRequestedError:
            assert store.pushed("r")[1] == {LAST: b"weights", LOG: b"log"}
        cut += 1
    assert cut >= 4
    assert store.pushed("r")[1] == {LAST: b"newer weights %d" % cut, LOG: b"newer log %d" % cut}


def stop_once(condition):
    def check():
        if condition():
            raise StopRequestedError

    return check


def test_a_manifest_that_arrived_without_an_answer_stands_whole_until_the_next(run, store):
    for data in (b"1", b"2"):
        run.write(LAST, b"weights " + data)
        run.write(LOG, b"log " + data)
        store.mute = "manifest.json" if data == b"2" else None
        before = len(store.puts)
        arrived = stop_once(lambda n=before: "runs/r/manifest.json" in store.puts[n:])
        if data == b"1":
            run.push(LAST, LOG)
        else:
            with pytest.raises(StopRequestedError):
                run.push(LAST, LOG, check=arrived)
    store.mute = None
    assert store.pushed("r")[1] == {LAST: b"weights 2", LOG: b"log 2"}
    run.write(LAST, b"weights 3")
    run.write(LOG, b"log 3")
    before = len(store.puts)
    with pytest.raises(StopRequestedError):
        run.push(LAST, LOG, check=stop_once(lambda: len(store.puts) > before))
    assert store.pushed("r")[1] == {LAST: b"weights 2", LOG: b"log 2"}
    run.push(LAST, LOG)
    assert store.pushed("r")[1] == {LAST: b"weights 3", LOG: b"log 3"}


def test_a_full_disk_does_not_keep_a_checkpoint_from_the_store(run, store, monkeypatch):
    def full(*_arguments, **_options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(complete_set, "write_json", full)
    ledger = Ledger(str(run.folder))
    for data in (b"1", b"2", b"3"):
        run.write(LAST, data)
        run.push(LAST, ledger=ledger)
        assert store.pushed("r")[1] == {LAST: data}
    slots = [key for key in store.puts if key.endswith(LAST)]
    assert slots == [f"runs/r/{slot}/{LAST}" for slot in "aba"]


def test_a_file_that_cannot_be_read_is_left_out_and_the_rest_arrives(run, store):
    run.write(LAST, b"weights")
    sent, one = run.push("weights", LAST)  # a folder opens as a file does, and cannot be read
    assert (sent, one.left_out) == ([LAST], ["weights"])
    assert store.pushed("r")[1] == {LAST: b"weights"}


def test_a_name_that_is_no_utf_8_travels_and_is_known_again(run, store):
    name = os.fsdecode(b"na\xffme")
    run.write(name, b"x")
    run.push(name)
    assert store.pushed("r")[1] == {name: b"x"}
    assert run.push(name)[0] == []


def test_the_manifest_stays_small_however_many_files_are_left_out(run, store):
    names = [f"extra{number:03}" for number in range(150)]
    for name in names:
        run.write(name, b"x")
    _, one = run.push(*names)
    assert len(one.left_out) == 147
    assert store.pushed("r")[0]["left_out"] == names[3:103]


def test_a_defect_in_one_push_does_not_end_those_to_come(remote, run, monkeypatch, capsys):
    monkeypatch.setattr(push, "_AGAIN_SECONDS", 0.0)
    monkeypatch.setattr(push, "_LOOK_SECONDS", 0.01)
    job = Job.from_json(remote.job("r", push={"epochs": None, "minutes": 1e-9}))
    pusher, tries = Pusher(str(run.folder), job), []

    def fail_first(*_arguments, **_options):
        tries.append(1)
        if len(tries) == 1:
            raise RuntimeError("a defect")
        return ""

    monkeypatch.setattr(pusher, "_push", fail_first)
    pusher.start()
    wait_until(lambda: len(tries) > 1, what="another push")
    pusher.stop()
    assert "RuntimeError: a defect" in capsys.readouterr().err


def test_all_addresses_of_a_store_share_the_time_of_one_connection(monkeypatch):
    silent, good = socket.socket(), socket.create_server(("127.0.0.1", 0))
    silent.bind(("127.0.0.1", 0))
    silent.listen(0)
    waiting = [socket.socket() for _ in range(4)]  # with its queue full it answers nobody
    for one in waiting:
        one.setblocking(False)
        one.connect_ex(silent.getsockname())
    rows = [(socket.AF_INET, socket.SOCK_STREAM, 0, "", silent.getsockname())] * 5
    rows.append((*rows[0][:4], good.getsockname()))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: rows)
    begun = time.monotonic()
    line = reach(("store", 1), 0.5)
    assert time.monotonic() - begun < 1.0
    assert (line.getpeername(), line.gettimeout()) == (good.getsockname(), 0.5)
    for one in (*waiting, line, silent, good):
        one.close()


@pytest.fixture
def ended(tmp_path, store, remote):
    """A run with links to the store, whose end is to be pushed, and the pusher of it."""
    run = Run(tmp_path / "end" / "runs" / "r", store)
    (tmp_path / "end" / "secrets").mkdir()
    (tmp_path / "end" / "secrets" / "r.json").write_text(json.dumps({"push": store.targets("r")}))
    run.write(LAST, b"weights")
    job = Job.from_json(remote.job("r", push={"epochs": 1, "minutes": None}))
    return run, Pusher(str(run.folder), job)


def test_a_log_that_cannot_be_written_does_not_keep_the_end_from_the_store(
    ended, store, monkeypatch
):
    def full(*_arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(push, "append_line", full)
    assert ended[1].push_all() == ""
    assert store.pushed("r")[1] == {LAST: b"weights"}


def test_an_end_whose_files_could_not_be_listed_still_names_what_was_pushed(ended, store):
    run, pusher = ended
    assert pusher.push_all() == ""
    assert pusher.push_end([], {"state": "failed"}) == ""
    manifest, files = store.pushed("r")
    assert (manifest["ended"], files[LAST]) == (True, b"weights")
    assert json.loads(files["status.json"]) == {"state": "failed"}


def test_a_connection_that_is_reset_while_it_is_made_is_called_so():
    listener = socket.create_server(("127.0.0.1", 0))
    url = f"https://127.0.0.1:{listener.getsockname()[1]}/o"

    def reset():
        peer, _ = listener.accept()
        peer.recv(1)
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        peer.close()

    thread = threading.Thread(target=reset)
    thread.start()
    with pytest.raises(OSError) as caught:
        Line("").send("PUT", url, b"x", {"Content-Length": "1"})
    thread.join()
    listener.close()
    assert "Connection reset by peer" in describe_failure(url, caught.value)


def test_more_files_than_there_are_objects_are_named_as_left_out(run):
    names = [f"extra{number}" for number in range(5)]
    for name in names:
        run.write(name, b"x")
    sent, one = run.push(*names)
    assert (sent, one.left_out) == (names[:3], names[3:])


def test_a_large_checkpoint_goes_in_parts_and_a_begun_upload_serves_once(tmp_path, store):
    run = Run(tmp_path / "run", store, parts=4)
    first, second, third = (os.urandom(3 * PART_BYTES + n) for n in (1, 2, 3))
    for data in (first, second, third):
        run.write(LAST, data)
        run.push(LAST)
        assert store.pushed("r")[1] == {LAST: data}
    assert len(run.used) == 2
    assert store.puts.count("runs/r/a/" + LAST) == 4 + 1  # four parts, then one PUT
    assert store.puts.count("runs/r/b/" + LAST) == 4
    run.used = set()  # another process, which does not know what has served
    run.write(LAST, first)
    run.push(LAST)
    assert store.pushed("r")[1] == {LAST: first}


def test_expired_links_are_named_with_what_renews_them(run, store):
    store.refuse = (
        403,
        b"<Error><Code>AccessDenied</Code><Message>Request has expired</Message></Error>",
        {},
    )
    run.write(LAST, b"w" * 1_000_000)
    with pytest.raises(
        PushError, match="the link to weights/last.pt has expired: %remote_attach"
    ) as caught:
        run.push(LAST)
    assert "X-Amz" not in str(caught.value)


SCRIPT = """
import json, os, sys, time
run = os.environ["RUN_DIR"]
open(run + "/weights/last.pt", "wb").write(b"weights of epoch 1")
open(run + "/metrics.jsonl", "w").write('{"epoch": 1}\\n')
status = json.load(open(run + "/status.json"))
status.update(state="training", completed_epochs=1)
json.dump(status, open(run + "/status.new", "w"))
os.replace(run + "/status.new", run + "/status.json")
print("epoch=1", flush=True)
while not os.path.exists(run + "/go"):
    time.sleep(0.02)
sys.exit(int(sys.argv[1]))
"""


def launch(remote, store, run_id, exit_code, **targets):
    secrets = {"inputs": {}, "env": {}, "push": store.targets(run_id, spare=20, **targets)}
    os.makedirs(os.path.join(remote.root, "secrets"), exist_ok=True)
    path = os.path.join(remote.root, "secrets", run_id + ".json")
    with open(path, "w") as stream:
        json.dump(secrets, stream)
    argv = [sys.executable, "-c", SCRIPT, str(exit_code)]
    job = remote.job(run_id, argv=argv, push={"epochs": 1, "minutes": None})
    remote.launch_job(job, secrets_file=f"secrets/{run_id}.json")


def go(remote, run_id):
    with open(os.path.join(remote.dir(run_id), "go"), "w"):
        pass


def milestone(remote, store, run_id):
    key = f"runs/{run_id}/manifest.json"
    wait_until(lambda: key in store.objects, what="the milestone is in the store")


def test_a_milestone_then_the_end_of_a_crash_are_in_the_store(remote, store):
    launch(remote, store, "crash", 3)
    milestone(remote, store, "crash")
    manifest, files = store.pushed("crash")
    assert (manifest["reason"], manifest["ended"]) == ("epoch 1", False)
    assert files[LAST] == b"weights of epoch 1"
    go(remote, "crash")
    assert remote.wait_end("crash")["state"] == "failed"
    manifest, files = store.pushed("crash")
    assert (manifest["reason"], manifest["ended"]) == ("the end", True)
    assert json.loads(files["status.json"])["state"] == "failed"
    assert json.loads(files["status.json"])["exit_code"] == 3
    listed = {row["path"]: row["sha256"] for row in json.loads(files["artifacts.json"])["files"]}
    pushed = {row["path"]: row["sha256"] for row in manifest["files"]}
    assert {path: pushed[path] for path in listed} == listed
    assert remote.agent("crash")["push"]["life_seconds"] == 26 * 3600
    log = remote.text("crash", "train.log")
    assert "pushed=epoch 1 files=" in log
    assert "remote_artifact_uploaded=weights/last.pt\n" not in log  # it was there already
    assert "remote_artifact_uploaded=train.log\n" in log
    reasons = [row["reason"] for row in remote.poll("crash")["agent"]["pushes"]]
    assert reasons == ["epoch 1", "the end", "the end"]


def test_after_the_death_of_everything_the_last_milestone_stands(remote, store):
    launch(remote, store, "gone", 0)
    milestone(remote, store, "gone")
    for pid in remote.all_processes("gone"):
        os.kill(pid, 9)
    wait_until(lambda: not remote.all_processes("gone"), what="nothing is left")
    shutil.rmtree(remote.root)
    manifest, files = store.pushed("gone")
    assert (manifest["ended"], files[LAST]) == (False, b"weights of epoch 1")


def test_the_watchdog_pushes_the_end_where_the_agent_was_killed(remote, store):
    launch(remote, store, "orphan", 0)
    milestone(remote, store, "orphan")
    os.kill(remote.agent("orphan")["pid"], 9)
    assert remote.wait_end("orphan")["state"] == "failed"
    manifest, files = store.pushed("orphan")
    assert manifest["ended"]
    assert json.loads(files["status.json"])["error"]["type"] == "AgentKilled"


def test_a_store_that_refuses_is_told_at_the_end_and_the_state_stands(remote, store):
    store.refuse = (
        403,
        b"<Error><Code>AccessDenied</Code><Message>Request has expired</Message></Error>",
        {},
    )
    launch(remote, store, "late", 0, expires_at="2001-01-01T00:00:00+00:00")
    go(remote, "late")
    end = remote.wait_end("late")
    assert end["state"] == "completed"
    assert "not everything is in the store: the link to " in end["message"]
    assert "has expired: %remote_attach renews the links" in end["message"]
    assert "push_failed=" in remote.text("late", "train.log")


def test_newer_links_that_a_contact_laid_are_used(remote, store):
    store.refuse = (403, b"<Error><Message>Request has expired</Message></Error>", {})
    launch(remote, store, "renew", 0, expires_at="2001-01-01T00:00:00+00:00")
    wait_until(lambda: "push_failed=" in remote.text("renew", "train.log"), what="a push failed")
    store.refuse = None
    path = os.path.join(remote.root, "secrets", "renew.push.json")
    with open(path, "w") as stream:
        json.dump(store.targets("renew", spare=20), stream)
    assert api.renewed(remote_dir=remote.root, run_id="renew") == {"kept": True}
    go(remote, "renew")
    assert remote.wait_end("renew")["state"] == "completed"
    assert store.pushed("renew")[0]["ended"]
    assert glob.glob(os.path.join(remote.root, "secrets", "renew*")) == []
    with open(path, "w") as stream:  # laid by a contact that had not yet seen the end
        json.dump(store.targets("renew", spare=20), stream)
    assert api.renewed(remote_dir=remote.root, run_id="renew") == {"kept": False}
    assert glob.glob(os.path.join(remote.root, "secrets", "renew*")) == []


def test_no_link_is_found_anywhere_but_in_the_secrets_folder(remote, store):
    launch(remote, store, "quiet", 0)
    milestone(remote, store, "quiet")
    seen = []
    for pid in remote.all_processes("quiet"):
        for name in ("cmdline", "environ"):
            with open(f"/proc/{pid}/{name}", "rb") as stream:
                seen.append(stream.read())
    assert len(seen) >= 6
    assert processes.alive(remote.agent("quiet")["pid"], remote.agent("quiet")["start_time"])
    mode = os.stat(os.path.join(remote.root, "secrets", "quiet.json")).st_mode & 0o777
    assert mode == 0o600
    go(remote, "quiet")
    remote.wait_end("quiet")
    for base, _, names in os.walk(remote.root):
        for name in names:
            with open(os.path.join(base, name), "rb") as stream:
                seen.append(stream.read())
    assert not any(b"X-Amz" in text or b"5ec4e7516" in text for text in seen)
