"""Weights from the hub: the real client against a server on loopback that speaks what it asks for."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

import pytest

from detector.hub import HubError, HubReference, fetch

pytestmark = pytest.mark.slow  # each question is a process of its own

ROOT = Path(__file__).resolve().parents[2]
COMMIT = hashlib.sha1(b"a commit").hexdigest()
TOKEN = "hf_averysecrettoken"
ASK = """
import sys
from detector.hub import HubError, HubReference, fetch
try:
    print(fetch(HubReference.parse(sys.argv[1])))
except HubError as error:
    sys.exit(f"error: {error}")
"""


class Hub(ThreadingHTTPServer):
    """Public repositories of files, and what was asked of them."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.gated: set[str] = set()
        self.asked: list[str] = []
        self.tokens: set[str | None] = set()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(self.path.partition("?")[0])
        self.server.asked.append(f"{self.command} {path}")
        self.server.tokens.add(self.headers.get("Authorization"))
        listing = path.startswith("/api/models/")
        parts = path.removeprefix("/api/models").strip("/").split("/")
        name = "/".join(parts[:2])
        files = self.server.repositories.get(name)
        revision = parts[3] if len(parts) > 3 else "main"
        if name in self.server.gated:
            self.answer(403, X_Error_Code="GatedRepo", X_Error_Message="gated")
        elif files is None:
            self.answer(401, X_Error_Code="RepoNotFound", X_Error_Message="Repository not found")
        elif revision not in {"main", "v1", COMMIT}:
            self.answer(404, X_Error_Code="RevisionNotFound", X_Error_Message="no revision")
        elif listing:
            siblings = [{"rfilename": file} for file in files]
            body = json.dumps({"id": name, "sha": COMMIT, "siblings": siblings}).encode()
            self.answer(200, body, Content_Type="application/json")
        elif (file := "/".join(parts[4:])) not in files:
            self.answer(404, X_Error_Code="EntryNotFound", X_Error_Message="Entry not found")
        else:
            etag = hashlib.sha256(files[file]).hexdigest()
            self.answer(200, files[file], ETag=f'"{etag}"', X_Repo_Commit=COMMIT)


@pytest.fixture
def server():
    hub = Hub()
    thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield hub
    hub.shutdown()
    thread.join()
    hub.server_close()


@pytest.fixture
def ask(server, tmp_path):
    """Fetch in a process of its own, as the client reads its environment when it is imported."""

    def ask(reference: str, **environment: str) -> subprocess.CompletedProcess[str]:
        shared = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
        own = {
            "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
            "HF_HOME": str(tmp_path / "hf"),
            "PYTHONPATH": str(ROOT),
            **environment,
        }
        return subprocess.run(
            [sys.executable, "-c", ASK, reference],
            env=shared | own,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    return ask


def sentence(done) -> str:
    assert done.returncode == 1, done.stdout
    lines = done.stderr.splitlines()
    assert [line for line in lines if "Traceback" in line] == []
    assert lines[-1].startswith("error: ")
    return lines[-1]


def test_the_usual_file_comes_into_the_cache_once(server, ask, tmp_path):
    server.repositories["org/dfine"] = {"model.safetensors": b"weights", "other.pth": b"x"}
    done = ask("hf://org/dfine")
    path = Path(done.stdout.strip())
    assert path.read_bytes() == b"weights", done.stderr
    assert path.is_relative_to(tmp_path / "hf")
    downloads = [one for one in server.asked if one.startswith("GET /org/dfine/resolve")]
    assert len(downloads) == 1
    again = ask("hf://org/dfine")
    assert Path(again.stdout.strip()) == path
    assert [o for o in server.asked if o.startswith("GET /org/dfine/resolve")] == downloads


def test_a_revision_and_a_file_may_be_named(server, ask):
    server.repositories["org/dfine"] = {"deep/a.pth": b"a", "b.pth": b"b"}
    assert Path(ask("hf://org/dfine@v1/deep/a.pth").stdout.strip()).read_bytes() == b"a"
    assert any("/resolve/v1/" in one for one in server.asked)
    assert (
        sentence(ask("hf://org/dfine@v9/b.pth"))
        == "error: org/dfine on the hub has no revision v9."
    )
    assert sentence(ask("hf://org/dfine/c.pth")) == "error: org/dfine on the hub has no file c.pth."


def test_without_the_usual_file_the_only_one_is_taken(server, ask):
    server.repositories["org/one"] = {"README.md": b"", "best.pth": b"best"}
    server.repositories["org/two"] = {"a.pth": b"", "b.pth": b""}
    server.repositories["org/none"] = {"README.md": b""}
    assert Path(ask("hf://org/one").stdout.strip()).read_bytes() == b"best"
    assert "has 2 weights files; name one, such as hf://org/two/a.pth" in sentence(
        ask("hf://org/two")
    )
    assert "has no weights file" in sentence(ask("hf://org/none"))


def test_what_is_cached_needs_no_network_and_what_is_not_says_so(server, ask):
    server.repositories["org/dfine"] = {"model.safetensors": b"weights"}
    assert ask("hf://org/dfine").returncode == 0
    offline = {"HF_HUB_OFFLINE": "1"}
    assert Path(ask("hf://org/dfine", **offline).stdout.strip()).read_bytes() == b"weights"
    assert "cannot be reached from here" in sentence(ask("hf://org/other", **offline))


def test_a_repository_that_is_not_there_or_gated_says_what_to_do(server, ask):
    server.gated.add("org/gated")
    assert "There is no public org/gone on the hub" in sentence(ask("hf://org/gone"))
    assert "is gated: accept its terms there and set HF_TOKEN" in sentence(ask("hf://org/gated"))


def test_the_token_is_sent_and_never_shown(server, ask):
    server.repositories["org/dfine"] = {"model.safetensors": b"weights"}
    assert ask("hf://org/dfine", HF_TOKEN=TOKEN).returncode == 0
    assert f"Bearer {TOKEN}" in server.tokens
    for token in (TOKEN, f"{TOKEN}\x07"):  # the second cannot be sent, and clients quote it then
        done = ask("hf://org/gone", HF_TOKEN=token)
        assert sentence(done)
        assert TOKEN not in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("text", "reference"),
    [
        ("hf://org/name", HubReference("org/name")),
        ("hf://org/name@v1", HubReference("org/name", "v1")),
        ("hf://org/name@refs%2Fpr%2F1/a/b.pth", HubReference("org/name", "refs/pr/1", "a/b.pth")),
        ("hf://org/name/b.pth", HubReference("org/name", None, "b.pth")),
    ],
)
def test_references_are_read(text, reference):
    assert HubReference.parse(text) == reference


@pytest.mark.parametrize("text", ["hf://org", "hf:///a/b", "hf://a/b@", "hf://a b/c", "hf://../a"])
def test_what_is_no_reference_is_refused(text):
    with pytest.raises(HubError, match="is no place on the hub: write hf://ORG/NAME"):
        HubReference.parse(text)


def test_without_the_package_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(HubError, match="pip install huggingface_hub"):
        fetch(HubReference("org/name"))
