"""A connection that was let go of, or whose services died, does nothing behind the user's back."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from kernel_tools.connecting.connection import Connection
from kernel_tools.errors import KernelConnectionError, KernelLostError, NotConnectedError
from kernel_tools.run import Run
from kernel_tools.runs.mirror import RunMirror
from kernel_tools.runs.registry import RunRecord
from kernel_tools.session import Session
from kernel_tools.settings import Settings
from kernel_tools.stores.local import LocalStore


class Kernel:
    description, notice, owned = "a made-up kernel", "", True

    def __init__(self):
        self.closed = 0

    def close(self, *, stop_kernel):
        assert stop_kernel
        self.closed += 1


class Client:
    """An agent whose kernel tells it is gone once it was closed, as a real one does."""

    remote_dir = "/remote"

    def __init__(self, kernel):
        self.kernel = kernel
        self.calls = []

    def call(self, function, **_):
        self.calls.append(function)
        if self.kernel.closed:
            raise KernelLostError("closed from here")
        return {"runs": []}


class Server:
    def __init__(self):
        self.service = SimpleNamespace(alive=True)
        self.released = 0

    def release(self):
        self.released += 1

    def release_or_stop(self):
        self.release()
        return False


def connection(name="local", *, server=None):
    def started():
        raise AssertionError("a kernel was started that nobody asked for")

    kernel = Kernel()
    target = "url" if server is None else "local"
    return Connection(name, target, kernel, Client(kernel), started, server)


@pytest.fixture
def session(tmp_path, monkeypatch):
    """A session whose connections are made up: one for each name that is asked for."""
    monkeypatch.setattr(
        "kernel_tools.session.open_connection",
        lambda target, name=None, **_: connection(name or target, server=Server()),
    )
    return Session(tmp_path)


def run_on(session, link, run_id, tmp_path):
    record = RunRecord(run_id, "x", "t", link.name, "/remote", "artifacts/remote")
    run = Run(record, link=link, mirror=RunMirror(tmp_path / run_id))
    session._runs.hold(run)
    return run


def test_a_closed_connection_starts_no_kernel_for_a_run_that_asks_on():
    closed = connection()
    closed.close()
    with pytest.raises(NotConnectedError, match="disconnected; its runs go on"):
        closed.call("poll")
    with pytest.raises(NotConnectedError):
        closed.get_file("/remote/x", Path("x"))
    assert closed.client.calls == []


def test_a_local_server_that_died_is_started_again_once():
    dead, fresh = Server(), Server()
    held, new = connection(server=dead), connection(server=fresh)
    made = [new]
    held.reopen = new.reopen = made.pop
    dead.service.alive = False
    assert held.call("list_runs") == {"runs": []}
    assert held.call("list_runs") == {"runs": []}
    assert (held.server, held.kernel, held.client) == (fresh, new.kernel, new.client)
    assert (dead.released, fresh.released) == (1, 0)


def test_a_kernel_that_was_attached_is_not_replaced_when_its_server_died():
    server = Server()
    held = connection(server=server)
    server.service.alive = False
    with pytest.raises(KernelConnectionError, match="the runs go on"):
        held.call("poll")
    assert held.client.calls == []


def test_a_store_that_died_is_started_again(monkeypatch, tmp_path):
    def store(*, alive):
        one = LocalStore.__new__(LocalStore)
        one.service = SimpleNamespace(alive=alive, released=[])
        one.service.release = lambda: one.service.released.append(1)
        return one

    dead, fresh = store(alive=False), store(alive=True)
    held = connection()
    held._store = dead
    monkeypatch.setattr("kernel_tools.connecting.connection.open_store", lambda *_, **__: fresh)
    settings = Settings({}, {}, tmp_path)
    assert held.store(settings) is fresh
    assert held.store(settings) is fresh
    assert dead.service.released == [1]


def test_connecting_again_gives_the_runs_their_line_back(session, tmp_path):
    first = session.connect("local")
    server = first.server
    run = run_on(session, first, "one", tmp_path)
    session.disconnect()
    assert (first.closed, first.kernel.closed, server.released) == (True, 1, 1)
    again = session.connect("local")
    assert run.link is again
    assert not again.closed
    assert again.call("list_runs") == {"runs": []}
    assert server.released == 1  # its lease was given back when it was closed
    run.detach()


def test_a_connection_that_is_named_is_the_one_that_is_asked(session, tmp_path):
    near, far = session.connect("near"), session.connect("far")
    one, two = (run_on(session, near, "one", tmp_path), run_on(session, far, "two", tmp_path))
    assert session.run() is two
    assert session.run(on="near") is one
    assert session.run("one", on="near") is one
    with pytest.raises(NotConnectedError, match="'nowhere'"):
        session.run(on="nowhere")
    with pytest.raises(NotConnectedError, match="'nowhere'"):
        session.run("one", on="nowhere")


def test_what_goes_on_elsewhere_does_not_run_here(session, tmp_path):
    near, far = session.connect("near"), session.connect("far")
    run_on(session, far, "two", tmp_path)
    near.server.service.alive = False  # it cannot be asked, so what is known here is told
    assert "none of its runs" in session.disconnect("near")
    assert "two" not in session.disconnect("far")  # that one was asked: it has no live run
