"""A small service to start, and helpers that wait instead of sleeping."""

from __future__ import annotations

import os
import signal
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kernel_tools.services import keeper, ports
from kernel_tools.services import service as services
from kernel_tools.services.service import Service, ServiceOrder

SERVER = """
import http.server, os, pathlib, signal, sys
if "--stubborn" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if "--broken" in sys.argv:
    sys.exit("the disk is on fire")
pathlib.Path("left.sock").touch()
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(os.environ["COLOUR"].encode())
    def log_message(self, *_): pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def order(folder: Path, *flags: str, runs_dirs: tuple[Path, ...] = ()) -> ServiceOrder:
    (port,) = ports.free(1)
    return ServiceOrder(
        argv=(sys.executable, "-S", "-c", SERVER, str(port), *flags),
        env={"COLOUR": "teal-and-secret"},
        cwd=folder,
        endpoint=f"http://127.0.0.1:{port}",
        secrets={"colour": "teal-and-secret"},
        runs_dirs=runs_dirs,
        leftovers=(folder / "left.sock",),
    )


def answers(service: Service) -> bool:
    try:
        with urllib.request.urlopen(service.endpoint, timeout=2) as response:
            return response.read() == b"teal-and-secret"
    except (urllib.error.URLError, OSError):
        return False


def wait_for(condition: Callable[[], bool], *, seconds: float = 15.0) -> bool:
    """Return whether the condition came true before the deadline."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def is_gone(pid: int) -> bool:
    return keeper.process_start(pid) is None


Start = Callable[..., Service]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start (or take up) the small service in this test's own state folder."""
    begun: list[Service] = []

    def start(*flags: str, idle_seconds: float = 30.0, runs_dirs: tuple[Path, ...] = ()) -> Service:
        service = services.ensure(
            "small",
            state_dir=tmp_path / "state",
            order=lambda folder: order(folder, *flags, runs_dirs=runs_dirs),
            ready=answers,
            idle_seconds=idle_seconds,
        )
        begun.append(service)
        return service

    yield start
    for service in begun:
        for pid in (service.keeper_pid, service.service_pid):
            if not is_gone(pid):
                os.kill(pid, signal.SIGKILL)
