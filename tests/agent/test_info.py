"""What a machine says of itself: real processes, a real store on loopback; only cards are played."""

import email.utils
import json
import os
import socket
import textwrap
import time

import pytest
from kernel_tools_agent import api, host, info

from .small_store import SECRET_QUERY

# A torch that has cards, as far as the proof asks for them; `{fails}` is done at the product.
TORCH = """
import time
__version__ = "2.4.0"
float32, float16 = "float32", "float16"
class version: cuda = "12.1"
class Properties: total_memory = 15 << 30
class Ones:
    def __init__(self, device): self.device = device
    def __matmul__(self, other):
        {fails}
        return self
    def __eq__(self, number): self.right = number == 1000; return self
    def all(self): return self.right
def ones(*shape, device, dtype): return Ones(device)
class cuda:
    is_available = staticmethod(lambda: True)
    device_count = staticmethod(lambda: 2)
    get_device_name = staticmethod(lambda place: "Tesla T4")
    get_device_properties = staticmethod(lambda place: Properties)
    mem_get_info = staticmethod(lambda place: (14 << 30, 15 << 30))
    get_device_capability = staticmethod(lambda place: (7, 5))
    get_arch_list = staticmethod(lambda: ["sm_80", "sm_90"])
"""


@pytest.fixture(autouse=True)
def nothing_answered_yet():
    info._answered.clear()


@pytest.fixture
def torch(tmp_path, monkeypatch):
    """Let the proof find another torch: takes its source."""

    def lay(source):
        folder = tmp_path / "modules"
        folder.mkdir()
        (folder / "torch.py").write_text(textwrap.dedent(source))
        monkeypatch.setenv("PYTHONPATH", str(folder))

    return lay


@pytest.fixture
def no_proof(monkeypatch):
    monkeypatch.setattr(
        info, "_prove", lambda: {"torch": None, "places": [], "proof_problem": "not asked"}
    )


def ask(tmp_path, question="q", **keywords):
    return api.info(remote_dir=str(tmp_path / "remote"), question=question, **keywords)


def lay_probes(tmp_path, *probes, name="info-q.json"):
    folder = tmp_path / "remote" / "secrets"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(json.dumps({"probes": list(probes)}))
    return str(path)


def test_it_tells_what_the_machine_is(tmp_path, no_proof):
    told = ask(tmp_path, packages=["json", "no_such_module", "no.such.parent"])
    assert told["missing"] == ["no_such_module", "no.such.parent"]
    assert told["cpu_count"] == host.cpu_count() >= 1
    assert 0 < told["memory_available_bytes"] <= told["memory_bytes"]
    rooms = told["disk"]
    assert rooms["runs"]["free_bytes"] > 0
    assert rooms["datasets"]["folder"] == str(tmp_path / "remote" / "datasets")
    assert rooms["datasets"]["place"] == rooms["runs"]["place"]
    assert abs(told["asked_at"] - time.time()) < 60
    assert json.loads(json.dumps(told)) == told
    assert not (tmp_path / "remote").exists()


def test_the_same_question_is_worked_out_once(tmp_path, no_proof):
    first = ask(tmp_path)
    assert ask(tmp_path) is first
    assert ask(tmp_path, question="another") is not first


def test_data_sets_that_are_here_are_told(tmp_path, no_proof):
    here, absent = "a" * 64, "b" * 64
    folder = tmp_path / "remote" / "datasets" / here
    folder.mkdir(parents=True)
    (folder / "marker.json").write_text("{}")
    assert ask(tmp_path, datasets=[here, absent])["staged"] == [here]


def test_each_card_is_tried_and_one_that_fails_is_told_beside_one_that_works(tmp_path, torch):
    torch(TORCH.format(
        fails="if self.device == 'cuda:1': raise RuntimeError("
        "'CUDA error: no kernel image is available\\nmore lines')"
    ))  # fmt: skip
    told = ask(tmp_path)
    assert told["torch"] == {"torch": "2.4.0", "cuda": "12.1", "cards": 2, "problem": ""}
    first, second = told["places"]
    assert (first["place"], first["name"], first["problem"]) == ("cuda:0", "Tesla T4", "")
    assert (first["memory_free"], first["memory_total"]) == (14 << 30, 15 << 30)
    assert second["problem"] == "CUDA error: no kernel image is available"
    assert (second["capability"], second["built_for"]) == ("sm_75", ["sm_80", "sm_90"])
    assert told["proof_problem"] == ""


def test_a_card_that_hangs_ends_the_trying_and_nothing_is_left_running(
    tmp_path, torch, monkeypatch
):
    monkeypatch.setattr(info, "PROOF_SECONDS", 3.0)
    torch(TORCH.format(fails="self.device == 'cuda:1' and time.sleep(600)"))
    began = time.monotonic()
    told = ask(tmp_path)
    assert time.monotonic() - began < 30
    assert [row["place"] for row in told["places"]] == ["cuda:0"]
    assert told["proof_problem"] == "no answer within 3 s"


@pytest.mark.parametrize(
    ("source", "torch_row", "problem"),
    [
        ("raise ImportError('No module named torch', name='torch')", "", ""),
        ("raise OSError('libcudart.so.12: cannot open')", "libcudart.so.12: cannot open", ""),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", None,
         "its process ended with SIGSEGV"),
    ],
)  # fmt: skip
def test_a_torch_that_is_absent_or_broken_is_told(tmp_path, torch, source, torch_row, problem):
    torch(source)
    told = ask(tmp_path)
    assert (told["places"], told["proof_problem"]) == ([], problem)
    assert (told["torch"] or {}).get("problem") == torch_row
    assert (told["torch"] or {"torch": None})["torch"] is None


def test_a_product_that_is_wrong_is_a_problem(tmp_path, torch):
    torch(TORCH.replace("number == 1000", "False").format(fails=""))
    first = ask(tmp_path)["places"][0]
    assert "is not 1000 everywhere" in first["problem"]


def test_the_store_is_asked_by_a_link_that_is_gone_afterwards(tmp_path, store, no_proof):
    store.objects["coins.tar"] = b"x" * 1000
    here = {"name": "s3/bucket", "object": "coins.tar", "url": store.url("coins.tar")}
    absent = {"name": "s3/other", "object": None, "url": store.url("nothing")}
    path = lay_probes(tmp_path, here, absent)
    stale = lay_probes(tmp_path, name="info-of-before.json")
    os.utime(stale, (1, 1))
    other = lay_probes(tmp_path, name="20260101-000000-run-0000.json")
    told = ask(tmp_path, probes_file=path)
    assert [(row["name"], row["problem"], row["read"]) for row in told["stores"]] == [
        ("s3/bucket", "", True),
        ("s3/other", "", False),
    ]
    assert sorted(store.requests) == [("coins.tar", "bytes=0-0"), ("nothing", "bytes=0-0")]
    assert not os.path.exists(path)
    assert not os.path.exists(stale)
    assert os.path.exists(other)
    assert SECRET_QUERY.partition("Signature=")[2] not in json.dumps(told)


def closed_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def test_what_keeps_the_store_away_is_named(store):
    refused = info.reach(f"http://127.0.0.1:{closed_port()}/b/k{SECRET_QUERY}", None)
    assert (refused["problem"], refused["ahead_seconds"]) == ("Connection refused", None)
    malformed = info.reach("nonsense" + SECRET_QUERY, None)
    assert malformed["problem"] == "the link is malformed"
    store.refuse = (403, b"<Error><Code>SignatureDoesNotMatch</Code></Error>", {})
    assert "set MINIO_PUBLIC_ENDPOINT" in info.reach(store.url("coins.tar"), None)["problem"]
    store.refuse = (403, b"<Error><Code>AccessDenied</Code></Error>", {})
    assert info.reach(store.url("coins.tar"), None)["problem"] == ""
    assert info.reach(store.url("coins.tar"), "coins.tar")["problem"] == (
        "the store refused coins.tar (403 AccessDenied)"
    )
    expired = b"<Error><Code>AccessDenied</Code><Message>Request has expired</Message></Error>"
    store.refuse = (403, expired, {})
    assert "has expired" in info.reach(store.url("coins.tar"), None)["problem"]
    store.refuse = (404, b"<Error><Code>NoSuchKey</Code></Error>", {})
    assert (
        "coins.tar is not in the store (404)"
        in (info.reach(store.url("coins.tar"), "coins.tar")["problem"])
    )


@pytest.mark.parametrize("off", [-312, 0, 312])
def test_the_clock_is_held_against_the_stores_date(store, off):
    date = email.utils.formatdate(time.time() - off, usegmt=True)
    store.refuse = (404, b"<Error><Code>NoSuchKey</Code></Error>", {"Date": date})
    assert info.reach(store.url("nothing"), None)["ahead_seconds"] == pytest.approx(off, abs=3)


def test_a_store_that_swallows_everything_is_left_after_its_time(tmp_path, no_proof, monkeypatch):
    monkeypatch.setattr(info, "STORE_SECONDS", 1.0)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/b/k{SECRET_QUERY}"
        path = lay_probes(tmp_path, {"name": "s3/bucket", "object": None, "url": url})
        (row,) = ask(tmp_path, probes_file=path)["stores"]
    assert row["problem"] == "no answer within 1 s"
