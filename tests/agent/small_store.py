"""A small HTTP store for the agent's tests: ranges, PUT, uploads in parts; what goes wrong is set on it."""

import contextlib
import http.server
import json
import threading
import urllib.parse

SECRET_QUERY = "?X-Amz-Credential=key&X-Amz-Signature=5ec4e7516"


# Of uploads in parts.
PART_BYTES = 100_000


class Store:
    """A small HTTP server with ranges; `cut` ends the connection after so many bytes of a body."""

    def __init__(self):
        self.objects, self.requests, self.sent = {}, [], 0
        self.parts, self.puts = {}, []
        self.cut = self.refuse = self.gate = None
        self.mute = None  # the end of an object's name: it is taken, and nothing is answered
        self.ranges = True
        self.gate_at, self.reached, self.opened = None, threading.Event(), threading.Event()
        self.counting = threading.Lock()
        store = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                store.answer(self)

            def do_PUT(self):
                store.take(self)

            def do_POST(self):
                store.complete(self)

            def log_message(self, *_):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.02,))
        self.thread.start()

    def url(self, key):
        return f"http://127.0.0.1:{self.server.server_port}/bucket/{key}{SECRET_QUERY}"

    def targets(self, run_id, *, expires_at="2099-01-01T00:00:00+00:00", parts=0, spare=3):
        """What the launcher signs for a run's pushes."""

        def target(name, uploads=0):
            key = f"runs/{run_id}/{name}"
            return {
                "object": key,
                "url": self.url(key),
                "uploads": [upload(key) for _ in range(uploads)],
            }

        def upload(key):
            self.parts[str(len(self.parts))] = {}
            ending = f"&uploadId={len(self.parts) - 1}"
            return {
                "parts": [f"{self.url(key)}{ending}&partNumber={n}" for n in range(1, parts + 1)],
                "complete": self.url(key) + ending,
            }

        names = ("weights/last.pt", "weights/best.pt", "metrics.jsonl", "train.log", "status.json")
        return {
            "schema_version": 1, "expires_at": expires_at, "part_bytes": PART_BYTES,
            "life_seconds": 26 * 3600,
            "manifest": target("manifest.json"),
            "slots": {n: [target(f"{s}/{n}", 1 if parts else 0) for s in "ab"] for n in names},
            "spare": [target(f"more/{n:02}") for n in range(spare)],
        }  # fmt: skip

    def pushed(self, run_id):
        """The manifest, and the content of each file that it names."""
        manifest = json.loads(self.objects[f"runs/{run_id}/manifest.json"])
        return manifest, {row["path"]: self.objects[row["object"]] for row in manifest["files"]}

    def take(self, handler):
        key, query = self.read_target(handler)
        length = int(handler.headers["Content-Length"])
        if self.refuse is not None:
            handler.close_connection = True
            self.say_no(handler)
            return
        body = handler.rfile.read(length)
        if len(body) < length:
            return
        self.puts.append(key)
        if "uploadId" in query:
            if query["uploadId"][0] not in self.parts:
                self.say(handler, 404, b"<Error><Code>NoSuchUpload</Code></Error>", {})
                return
            self.parts[query["uploadId"][0]][int(query["partNumber"][0])] = body
        else:
            self.objects[key] = body
        if self.mute is not None and key.endswith(self.mute):
            handler.close_connection = True
            return
        self.say(handler, 200, b"", {"ETag": f'"{len(body)}"'})

    def complete(self, handler):
        key, query = self.read_target(handler)
        body = handler.rfile.read(int(handler.headers["Content-Length"]))
        parts = self.parts.pop(query["uploadId"][0], None)
        if parts is None:
            self.say(handler, 404, b"<Error><Code>NoSuchUpload</Code></Error>", {})
            return
        assert body.count(b"<Part>") == len(parts)
        self.objects[key] = b"".join(parts[number] for number in sorted(parts))
        self.say(handler, 200, b"<CompleteMultipartUploadResult/>", {})

    def read_target(self, handler):
        path, _, query = handler.path.partition("?")
        return path[len("/bucket/") :], urllib.parse.parse_qs(query)

    def say_no(self, handler):
        status, body, headers = self.refuse
        self.say(handler, status, body, headers)

    def say(self, handler, status, body, headers):
        handler.send_response_only(status)
        for name, value in headers.items():
            handler.send_header(name, value)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)

    def answer(self, handler):
        key = handler.path.split("?")[0][len("/bucket/") :]
        self.requests.append((key, handler.headers.get("Range")))
        if self.refuse is not None:
            self.say_no(handler)
            return
        if key not in self.objects:
            handler.send_error(404)
            return
        body = data = self.objects[key]
        asked = handler.headers.get("Range") if self.ranges else None
        if asked:
            first, _, last = asked[len("bytes=") :].partition("-")
            start, end = int(first), min(int(last or len(data)), len(data) - 1)
            if start >= len(data):
                handler.send_error(416)
                return
            handler.send_response(206)
            handler.send_header("Content-Range", f"bytes {start}-{end}/{len(data)}")
            body = data[start : end + 1]
        else:
            handler.send_response(200)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        if self.gate is not None:
            handler.wfile.write(body[:100])
            self.gate.wait(60)
            body = body[100:]
        if self.cut is not None:
            handler.close_connection = len(body) > self.cut
            body = body[: self.cut]
        with contextlib.suppress(OSError):
            for start in range(0, len(body), 65536):
                self.pass_gate()
                handler.wfile.write(body[start : start + 65536])
                with self.counting:
                    self.sent += len(body[start : start + 65536])

    def pass_gate(self):
        """Send nothing beyond `gate_at` bytes in all until the gate is opened."""
        if self.gate_at is not None and self.sent >= self.gate_at:
            self.reached.set()
            self.opened.wait(60)

    def open_gate(self):
        self.gate_at = None
        self.opened.set()

    def close(self):
        self.open_gate()
        if self.gate is not None:
            self.gate.set()
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()
