"""The few endpoints of the Hugging Face Hub that the real client uses for repositories of data and weights.

Repositories are dictionaries; a commit is one change under a lock. Large files go by LFS and are answered
with a redirect to a signed link, as the hub does.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

TOKEN = "hf_averysecrettokenoftests"
COMMIT = hashlib.sha1(b"a commit").hexdigest()


@dataclass
class File:
    data: bytes
    lfs: bool
    date: str = field(
        default_factory=lambda: time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime())
    )


@dataclass
class Repository:
    private: bool
    files: dict[str, File] = field(default_factory=dict)


class Hub(ThreadingHTTPServer):
    """Repositories, what was uploaded but not committed, and what was asked."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories: dict[str, Repository] = {}
        self.blobs: dict[str, bytes] = {}
        self.asked: list[str] = []
        self.lock = threading.Lock()
        self.fail_uploads = False
        self.on_upload: Callable[[], None] = lambda: (
            None
        )  # while the bytes of a file are on their way

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


@contextmanager
def running() -> Iterator[Hub]:
    hub = Hub()
    thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        thread.join()
        hub.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def do_HEAD(self) -> None:
        self._route()

    def do_GET(self) -> None:
        self._route()

    def do_POST(self) -> None:
        self._route()

    def do_PUT(self) -> None:
        self._route()

    def _route(self) -> None:
        path, _, query = self.path.partition("?")
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if "chunked" in (self.headers.get("Transfer-Encoding") or ""):
            self.body = self._chunks()
        self.server.asked.append(f"{self.command} {urllib.parse.unquote(path)}")
        for pattern, answer in _ROUTES:
            found = re.fullmatch(pattern, path)
            if found:
                with self.server.lock:
                    answer(self, *map(urllib.parse.unquote, found.groups()), query=query)
                return
        self._answer(404, {"error": f"no such endpoint: {path}"})

    def _chunks(self) -> bytes:
        pieces = []
        while size := int(self.rfile.readline().split(b";")[0], 16):
            pieces.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(pieces)

    def _answer(self, status: int, body: object = b"", **headers: str) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        if not isinstance(body, bytes):
            self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _with_token(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def _repository(self, name: str) -> Repository | None:
        """Answer as the hub does where there is none, or none that the asker may see."""
        found = self.server.repositories.get(name)
        if found is None or (found.private and not self._with_token()):
            text = "Repository Not Found"
            self._answer(401, {"error": text}, X_Error_Code="RepoNotFound", X_Error_Message=text)
            return None
        return found

    def create(self, *, query: str) -> None:
        if not self._with_token():
            self._answer(401, {"error": "Invalid username or password."})
            return
        asked = json.loads(self.body)
        name = f"{asked['organization']}/{asked['name']}"
        url = {"url": f"{self.server.url}/datasets/{name}"}
        if name in self.server.repositories:
            self._answer(409, url | {"error": "You already created this dataset repo"})
            return
        private = asked.get("visibility") == "private" or asked.get("private") is True
        self.server.repositories[name] = Repository(private)
        self._answer(200, url)

    def preupload(self, name: str, *, query: str) -> None:
        if self._repository(name) is None:
            return
        files = [
            {
                "path": one["path"],
                "uploadMode": "lfs" if _is_large(one) else "regular",
                "shouldIgnore": False,
            }
            for one in json.loads(self.body)["files"]
        ]
        self._answer(200, {"files": files})

    def batch(self, name: str, *, query: str) -> None:
        if self._repository(name) is None:
            return
        objects = []
        for one in json.loads(self.body)["objects"]:
            row = {"oid": one["oid"], "size": one["size"]}
            if one["oid"] not in self.server.blobs:
                href = f"{self.server.url}/lfs/{one['oid']}?X-Amz-Signature=abcdef0123456789"
                row["actions"] = {"upload": {"href": href}}
            objects.append(row)
        self._answer(200, {"transfer": "basic", "objects": objects})

    def upload(self, oid: str, *, query: str) -> None:
        self.server.on_upload()
        if self.server.fail_uploads:
            self._answer(403, {"error": "the link has expired"})
        elif hashlib.sha256(self.body).hexdigest() != oid:
            self._answer(400, {"error": "the content is not what the link is for"})
        else:
            self.server.blobs[oid] = self.body
            self._answer(200)

    def commit(self, name: str, *, query: str) -> None:
        repository = self._repository(name)
        if repository is None:
            return
        changes = [json.loads(line) for line in self.body.splitlines()]
        for change in changes:
            value = change["value"]
            if change["key"] == "file":
                data = base64.b64decode(value["content"])
                repository.files[value["path"]] = File(data, lfs=False)
            elif change["key"] == "lfsFile":
                repository.files[value["path"]] = File(self.server.blobs[value["oid"]], lfs=True)
            elif change["key"] == "deletedFile":
                del repository.files[value["path"]]
        url = f"{self.server.url}/datasets/{name}/commit/{COMMIT}"
        self._answer(200, {"success": True, "commitOid": COMMIT, "commitUrl": url})

    def tree(self, name: str, *, query: str) -> None:
        repository = self._repository(name)
        if repository is not None:
            self._answer(200, [_row(path, file) for path, file in repository.files.items()])

    def paths_info(self, name: str, *, query: str) -> None:
        repository = self._repository(name)
        if repository is None:
            return
        paths = urllib.parse.parse_qs(self.body.decode())["paths"]
        rows = [_row(p, repository.files[p]) for p in paths if p in repository.files]
        self._answer(200, rows)

    def resolve(self, name: str, path: str, *, query: str) -> None:
        repository = self._repository(name)
        if repository is None:
            return
        file = repository.files.get(path)
        if file is None:
            self._answer(404, X_Error_Code="EntryNotFound", X_Error_Message="Entry not found")
            return
        digest = hashlib.sha256(file.data).hexdigest()
        facts = {"ETag": f'"{digest}"', "X_Repo_Commit": COMMIT}
        if not file.lfs:
            self._content(file.data, **facts)
            return
        place = f"{self.server.url}/cdn/{digest}?X-Amz-Signature=0123456789abcdef"
        size = str(len(file.data))
        self._answer(302, Location=place, X_Linked_Size=size, X_Linked_ETag=f'"{digest}"', **facts)

    def cdn(self, oid: str, *, query: str) -> None:
        if "X-Amz-Signature=0123456789abcdef" not in query:
            self._answer(403, b"<Error><Code>SignatureDoesNotMatch</Code></Error>")
        elif oid in self.server.blobs:
            self._content(self.server.blobs[oid])
        else:
            self._answer(404)

    def _content(self, data: bytes, **headers: str) -> None:
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        if asked is None:
            self._answer(200, data, Accept_Ranges="bytes", **headers)
            return
        start, end = int(asked[1]), min(int(asked[2] or len(data)), len(data) - 1)
        if start >= len(data):
            self._answer(416, Content_Range=f"bytes */{len(data)}", **headers)
            return
        span = f"bytes {start}-{end}/{len(data)}"
        self._answer(206, data[start : end + 1], Content_Range=span, **headers)


def _is_large(one: dict[str, object]) -> bool:
    """As the hub decides: by .gitattributes, whose usual ones name the archives, and by size."""
    return (
        str(one["path"]).endswith((".tar", ".tar.gz", ".zip", ".bin", ".pt"))
        or one["size"] > 10 << 20
    )  # type: ignore[operator]


def _row(path: str, file: File) -> dict[str, object]:
    row: dict[str, object] = {
        "type": "file", "path": path, "size": len(file.data),
        "oid": hashlib.sha1(file.data).hexdigest(),
        "lastCommit": {"id": COMMIT, "title": "Stage", "date": file.date},
    }  # fmt: skip
    if file.lfs:
        digest = hashlib.sha256(file.data).hexdigest()
        row["lfs"] = {"oid": digest, "size": len(file.data), "pointerSize": 134}
    return row


_REPOSITORY = "([^/]+/[^/]+)"
_ROUTES = (
    ("/api/repos/create", _Handler.create),
    (f"/api/(?:datasets|models)/{_REPOSITORY}/preupload/main", _Handler.preupload),
    (rf"/(?:datasets/)?{_REPOSITORY}\.git/info/lfs/objects/batch", _Handler.batch),
    ("/lfs/([0-9a-f]{64})", _Handler.upload),
    (f"/api/(?:datasets|models)/{_REPOSITORY}/commit/main", _Handler.commit),
    (f"/api/(?:datasets|models)/{_REPOSITORY}/tree/main", _Handler.tree),
    (f"/api/(?:datasets|models)/{_REPOSITORY}/paths-info/main", _Handler.paths_info),
    (f"/(?:datasets/)?{_REPOSITORY}/resolve/main/(.+)", _Handler.resolve),
    ("/cdn/([0-9a-f]{64})", _Handler.cdn),
)
