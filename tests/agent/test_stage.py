"""Inputs: downloaded once, verified, unpacked whole or not at all, linked where the job wants them."""

import hashlib
import json
import os
import sys
import threading

import pytest
from kernel_tools_agent import intake, stage
from kernel_tools_agent.download import Download, anew_once
from kernel_tools_agent.errors import InputError
from kernel_tools_agent.job import Job
from kernel_tools_agent.partfile import PART_BYTES

from .archives import tar_of
from .conftest import wait_until
from .test_extract import HOSTILE


def sha(data):
    return hashlib.sha256(data).hexdigest()


COINS = tar_of({"coins/data.yaml": b"nc: 1\n", "coins/images/0001.png": b"png" * 1000})
SHOW = "import os; [print(os.path.join(b, n)) for b, _, s in os.walk('data', followlinks=True) for n in sorted(s)]"


def dataset(data, dest="data/coins", **fields):
    entry = {
        "kind": "dataset", "name": "coins", "object": "datasets/coins.tar", "size_bytes": len(data),
        "sha256": sha(data), "dest": dest, "format": "tar",
    }  # fmt: skip
    entry.update(fields)
    return entry


def run(remote, store, run_id, inputs, wait=True, **fields):
    secrets = {"inputs": {one["object"]: store.url(one["object"]) for one in inputs}, "env": {}}
    os.makedirs(os.path.join(remote.root, "secrets"), exist_ok=True)
    with open(os.path.join(remote.root, "secrets", run_id + ".json"), "w") as stream:
        json.dump(secrets, stream)
    job = remote.job(run_id, argv=[sys.executable, "-c", SHOW], inputs=inputs, **fields)
    remote.launch_job(job, secrets_file=f"secrets/{run_id}.json")
    return remote.wait_end(run_id) if wait else None


def datasets(remote):
    folder = os.path.join(remote.root, "datasets")
    return sorted(name for name in os.listdir(folder) if not name.startswith(".lock"))


def test_a_data_set_is_there_when_the_trainer_starts(remote, store):
    store.objects["datasets/coins.tar"] = COINS
    end = run(remote, store, "stage", [dataset(COINS, file_count=2, content_bytes=3006)])
    assert end["state"] == "completed"
    log = remote.text("stage", "train.log")
    assert log.startswith("remote_dataset_ready=data/coins\n")
    assert "data/coins/data.yaml\ndata/coins/images/0001.png\n" in log
    assert datasets(remote) == [sha(COINS)]
    with open(os.path.join(remote.root, "datasets", sha(COINS), "marker.json")) as stream:
        marker = json.load(stream)
    assert (marker["sha256"], marker["size_bytes"]) == (sha(COINS), len(COINS))
    assert (marker["file_count"], marker["content_bytes"]) == (2, 3006)
    (row,) = remote.poll("stage")["agent"]["inputs"]
    assert (row["name"], row["state"], row["bytes"]) == ("coins", "ready", len(COINS))


def test_what_is_there_is_not_downloaded_again(remote, store):
    store.objects["datasets/coins.tar"] = COINS
    run(remote, store, "first", [dataset(COINS)])
    run(remote, store, "second", [dataset(COINS, dest="data/other")])
    assert len(store.requests) == 1
    assert "data/other/data.yaml" in remote.text("second", "train.log")


@pytest.mark.parametrize(
    ("files", "dest"),
    [
        ({"coins-v2/data.yaml": b"1"}, "data/coins"),
        ({"data/coins/data.yaml": b"1"}, "data/coins"),
        ({"data.yaml": b"1", "images/a": b"2"}, "data/coins"),
        ({"__MACOSX/x": b"", "whatever/data.yaml": b"1"}, "data/coins"),
        ({"data.yaml": b"1"}, "data/coins"),
        ({"deep/data.yaml": b"1"}, "data/a/b/coins"),
    ],
    ids=["other top", "whole path", "several tops", "desktop junk", "one file", "deeper dest"],
)
def test_the_expected_root_holds_the_content_whatever_the_archives_top(remote, store, files, dest):
    data = tar_of(files)
    store.objects["datasets/coins.tar"] = data
    assert run(remote, store, "root", [dataset(data, dest=dest)])["state"] == "completed"
    assert os.path.isfile(os.path.join(remote.dir("root"), "work", dest, "data.yaml"))


def test_a_plain_file_goes_to_its_destination_among_the_code(remote, store):
    store.objects["weights/b0.pt"] = b"weights"
    entry = {
        "kind": "file", "name": "b0", "object": "weights/b0.pt", "size_bytes": 7, "sha256": None,
        "dest": "data/pre/b0.pt", "format": "file",
    }  # fmt: skip
    assert run(remote, store, "file", [entry])["state"] == "completed"
    with open(os.path.join(remote.dir("file"), "work", "data", "pre", "b0.pt"), "rb") as stream:
        assert stream.read() == b"weights"


def test_several_inputs_come_together(remote, store):
    inputs = []
    for number in range(6):
        data = tar_of({f"d/{number}": b"x" * number})
        name = f"set{number}.tar"
        store.objects[name] = data
        inputs.append(dataset(data, dest="data/" + str(number), object=name, name=name))
    assert run(remote, store, "many", inputs)["state"] == "completed"
    assert len(datasets(remote)) == 6


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sha256": "0" * 64}, "is not what was staged"),
        ({"size_bytes": 5}, "was replaced"),
        ({"file_count": 1}, "more files"),
        ({"format": "zip"}, "not a zip"),
        ({"object": "absent.tar"}, "not in the store"),
    ],
)
def test_what_is_not_right_fails_and_leaves_nothing(remote, store, change, message):
    store.objects["datasets/coins.tar"] = COINS
    end = run(remote, store, "wrong", [dataset(COINS, **change)])
    assert end["state"] == "failed"
    assert message in end["message"]
    assert end["error"]["type"] in ("InputError", "UnsafeArchiveError")
    assert datasets(remote) == []
    assert "X-Amz" not in remote.text("wrong", "status.json") + remote.text("wrong", "train.log")
    assert "5ec4e7516" not in remote.text("wrong", "agent.log")


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_no_hostile_archive_leaves_anything_in_the_folder_of_data_sets(store, tmp_path):
    run_dir = tmp_path / "remote" / "runs" / "r"
    (run_dir / "work").mkdir(parents=True)
    for name, (data, kind) in sorted(HOSTILE.items())[::4]:
        store.objects["o"] = data
        entry = dataset(data, object="o", format=kind)
        job = Job.from_json({"run_id": "r", "kind": "command", "argv": ["true"], "inputs": [entry]})
        with pytest.raises(InputError) as caught:
            stage.stage_inputs(
                str(run_dir), job, urls={"o": store.url("o")}, log=lambda line: None,
                progress=lambda rows: None, should_stop=lambda: False, stall_seconds=60,
            )  # fmt: skip
        assert "\n" not in str(caught.value), name
        left = os.listdir(str(tmp_path / "remote" / "datasets"))
        assert [entry for entry in left if not entry.startswith(".lock")] == [], name
    assert sorted(os.listdir(str(tmp_path))) == ["remote"]
    assert os.listdir(str(run_dir / "work")) == []


def test_a_stop_while_inputs_come_ends_the_run(remote, store):
    store.objects["datasets/coins.tar"] = COINS
    store.gate = threading.Event()
    run(remote, store, "halt", [dataset(COINS)], wait=False)
    wait_until(lambda: store.requests)
    remote.stop("halt")
    store.gate.set()
    end = remote.wait_end("halt")
    assert (end["state"], end["message"]) == (
        "stopped",
        "stopped by the user before the trainer started",
    )


def download(url, part, **options):
    def bring():
        with Download(url, part, **options) as coming:
            return coming.finish()

    return anew_once(bring)


def fetch(store, tmp_path, data, **fields):
    arguments = {
        "name": "coins", "size_bytes": len(data), "sha256": sha(data),
        "wait": lambda seconds: None,
    }  # fmt: skip
    arguments.update(fields)
    return download(store.url("o"), str(tmp_path / "part"), **arguments)


def test_a_connection_that_breaks_again_and_again_is_resumed(store, tmp_path):
    data = os.urandom(1_000_000)
    store.objects["o"], store.cut = data, 150_000
    assert fetch(store, tmp_path, data) == sha(data)
    assert (tmp_path / "part").read_bytes() == data
    assert store.sent <= 1.3 * len(data)
    assert store.requests[1][1].startswith("bytes=")


def interrupted(store, tmp_path, data, at):
    """Leave what a download leaves whose line broke after `at` bytes, and was then refused."""

    def wait(_seconds):
        store.refuse = (403, b"", {})

    store.cut = at
    with pytest.raises(InputError, match="refused"):
        fetch(store, tmp_path, data, connections=1, wait=wait)
    store.cut = store.refuse = None
    store.sent, store.requests = 0, []


def test_an_earlier_part_is_gone_on_from_to_the_byte(store, tmp_path):
    data = os.urandom(100_000)
    store.objects["o"] = data
    interrupted(store, tmp_path, data, 60_000)
    assert fetch(store, tmp_path, data) == sha(data)
    assert store.requests == [("o", "bytes=60000-99999")]


def test_a_whole_earlier_part_costs_no_request(store, tmp_path):
    data = os.urandom(100_000)
    store.objects["o"] = data
    fetch(store, tmp_path, data)
    store.requests = []
    assert fetch(store, tmp_path, data) == sha(data)
    assert store.requests == []


def test_an_earlier_part_that_was_damaged_comes_anew(store, tmp_path):
    data = os.urandom(100_000)
    store.objects["o"] = data
    interrupted(store, tmp_path, data, 60_000)
    with (tmp_path / "part").open("r+b") as stream:
        stream.write(b"damaged")
    assert fetch(store, tmp_path, data) == sha(data)


def test_an_earlier_part_of_something_else_is_not_used(store, tmp_path):
    old, data = os.urandom(100_000), os.urandom(90_000)
    store.objects["o"] = old
    interrupted(store, tmp_path, old, 60_000)
    store.objects["o"] = data
    assert fetch(store, tmp_path, data) == sha(data)
    assert store.sent == 90_000


@pytest.mark.parametrize("known", [True, False], ids=["known", "size and hash unknown"])
@pytest.mark.parametrize("ranges", [True, False], ids=["ranges", "no ranges"])
@pytest.mark.parametrize(
    "size", [0, 1, 3 * PART_BYTES + 17], ids=["empty", "one byte", "four parts"]
)
def test_any_object_of_any_store_arrives(store, tmp_path, size, ranges, known):
    data = os.urandom(size)
    store.objects["o"], store.ranges = data, ranges
    fields = {} if known else {"size_bytes": None, "sha256": None}
    assert fetch(store, tmp_path, data, **fields) == sha(data)
    assert (tmp_path / "part").read_bytes() == data
    assert store.sent <= len(data) * (1 if ranges else 2) + 1


def test_a_line_that_is_cut_every_three_megabytes_costs_little(store, tmp_path):
    data = os.urandom(40_000_000)
    store.objects["o"], store.cut = data, 3_000_000
    waits = []
    assert fetch(store, tmp_path, data, wait=waits.append) == sha(data)
    assert store.sent <= 1.3 * len(data)
    assert waits == []  # each connection brought something


def test_several_ranges_come_at_a_time(store, tmp_path):
    data = os.urandom(4 * PART_BYTES)
    store.objects["o"] = data
    gate = store.gate = threading.Event()
    found = []
    thread = threading.Thread(target=lambda: found.append(fetch(store, tmp_path, data)))
    thread.start()
    try:
        wait_until(lambda: len(store.requests) == 4, what="four requests are under way")
    finally:
        gate.set()
        thread.join()
    assert found == [sha(data)]


def test_a_store_that_is_down_is_named_and_not_its_link(store, tmp_path):
    url = store.url("o")
    port = store.server.server_port
    store.close()
    waits = []
    with pytest.raises(InputError) as caught:
        download(
            url, str(tmp_path / "part"), name="coins", size_bytes=1, sha256=None,
            wait=waits.append,
        )  # fmt: skip
    assert f"the store at 127.0.0.1:{port} cannot be reached" in str(caught.value)
    assert "X-Amz" not in str(caught.value)
    assert waits == [0.5, 1.0, 2.0, 4.0, 8.0, 8.0]
    store.close = lambda: None


XML = b"<Error><Code>%s</Code><Message>%s</Message></Error>"


@pytest.mark.parametrize(
    ("status", "code", "message", "date", "words"),
    [
        (403, b"AccessDenied", b"Request has expired", None, "has expired: launch again"),
        (403, b"SignatureDoesNotMatch", b"no", None, "MINIO_PUBLIC_ENDPOINT"),
        (403, b"SignatureDoesNotMatch", b"no", "Mon, 01 Jan 2035 00:00:00 GMT", "PUBLIC_ENDPOINT"),
        (403, b"AccessDenied", b"Access Denied.", None, "403 AccessDenied"),
        (403, b"RequestTimeTooSkewed", b"", "Mon, 01 Jan 2035 00:00:00 GMT", "s behind the store"),
        (403, b"AccessDenied", b"", "Mon, 01 Jan 2001 00:00:00 GMT", "s ahead of the store"),
        (404, b"NoSuchKey", b"", None, "not in the store (404)"),
    ],
)
def test_a_refusal_is_explained(store, tmp_path, status, code, message, date, words):
    store.refuse = (status, XML % (code, message), {"Date": date} if date else {})
    with pytest.raises(InputError) as caught:
        fetch(store, tmp_path, b"x")
    assert words in str(caught.value)
    assert "Signature=" not in str(caught.value)


class Waiting:
    """An input that another process brings; it is here after some looks."""

    error, unpacked, queued = None, 0, True

    def __init__(self, looks):
        self.input, self.ended, self.looks = self, self, looks
        self.name = "coins"

    def wait(self, _seconds):
        self.looks -= 1
        return self.looks < 0

    def row(self):
        return {"name": self.name, "bytes": 0, "state": "waiting", "percent": 0.0}


def test_waiting_for_another_process_that_brings_the_same_is_no_stall():
    other = Waiting(5)
    stage._wait([other], lambda _rows: None, lambda: False, 0.0)
    assert other.looks == -1
    other = Waiting(5)
    other.queued = False
    with pytest.raises(InputError, match="stalled: no byte of coins"):
        stage._wait([other], lambda _rows: None, lambda: False, 0.0)


def test_a_part_file_has_no_name_any_more_when_the_next_may_take_it(tmp_path, monkeypatch):
    monkeypatch.setattr(threading.Thread, "start", lambda _self: None)
    part = tmp_path / ".part-x"
    for path in (part, tmp_path / ".part-x.map"):
        path.write_bytes(b"x")
    intake._discard_aside(str(part))
    assert list(tmp_path.iterdir()) == []


def test_a_store_that_hiccups_is_asked_again(store, tmp_path):
    store.objects["o"] = b"data"
    store.refuse = (503, b"", {})

    def wait(_seconds):
        store.refuse = None

    assert fetch(store, tmp_path, b"data", wait=wait) == sha(b"data")


def test_a_killed_unpacking_leaves_no_data_set_and_the_next_cleans_up(remote, store):
    store.objects["datasets/coins.tar"] = COINS
    left = os.path.join(remote.root, "datasets", f".new-{sha(COINS)}-dead", "content")
    os.makedirs(left)
    half = os.path.join(remote.root, "datasets", sha(COINS), "content")
    os.makedirs(half)  # without a marker: not a data set
    assert run(remote, store, "clean", [dataset(COINS)])["state"] == "completed"
    assert datasets(remote) == [sha(COINS)]
    assert len(store.requests) == 1


def test_a_disk_that_is_too_small_is_said_before_the_download(remote, store, tmp_path):
    store.objects["datasets/coins.tar"] = COINS
    end = run(remote, store, "small", [dataset(COINS, content_bytes=1 << 60)])
    assert end["state"] == "failed"
    assert end["message"].startswith("the disk is too small for coins: it needs ")
    assert store.requests == []


def test_staged_files_are_read_only(remote, store):
    store.objects["datasets/coins.tar"] = COINS
    run(remote, store, "ro", [dataset(COINS)])
    path = os.path.join(remote.dir("ro"), "work", "data", "coins", "data.yaml")
    assert os.stat(path).st_mode & 0o222 == 0


def test_the_datasets_folder_can_be_elsewhere(remote, tmp_path):
    job = stage.Job.from_json(remote.job("x", datasets_dir=str(tmp_path / "big")))
    assert stage.datasets_dir("/r/runs/x", job) == str(tmp_path / "big")
    job = stage.Job.from_json(remote.job("x"))
    assert stage.datasets_dir("/r/runs/x", job) == "/r/datasets"


def test_on_kaggle_data_goes_where_the_quota_does_not_count(tmp_path, monkeypatch):
    run_dir = str(tmp_path / "remote/runs/r")
    job = Job.from_json(
        {"schema_version": 1, "run_id": "r", "name": "r", "kind": "command", "argv": ["true"]}
    )
    assert stage.datasets_dir(run_dir, job) == str(tmp_path / "remote/datasets")
    working, scratch = tmp_path / "working", tmp_path / "scratch"
    working.mkdir()
    monkeypatch.setattr(stage.disk, "KAGGLE_WORKING", str(working))
    monkeypatch.setattr(stage.disk, "KAGGLE_SCRATCH", str(scratch))
    assert stage.datasets_dir(run_dir, job) == str(scratch / "remote_kernel_tools/datasets")
