"""Two connections in one notebook: each magic acts on the one that is named. And code that is edited while
a run goes on changes nothing for that run.
"""

from __future__ import annotations

import hashlib
import shutil
import time
from pathlib import Path

import pytest

from kernel_tools.run import Run
from kernel_tools.runs.mirror import RunMirror
from kernel_tools.runs.registry import RunRecord
from kernel_tools.session import Session
from tests.fakes.shell import shell  # noqa: F401 - a fixture

STUB = Path(__file__).parent.parent / "agent" / "stub_trainer.py"


@pytest.fixture
def project(tmp_path):
    folder = tmp_path / "project"
    (folder / "src").mkdir(parents=True)
    (folder / "pyproject.toml").write_text("[project]\nname = 'p'\n")
    shutil.copy(STUB, folder / "src/stub_trainer.py")
    (folder / "src/code.py").write_text("version = 1\n")
    return folder


@pytest.fixture
def session(project, monkeypatch):
    one = Session(project)
    monkeypatch.setattr("kernel_tools.session.default_session", lambda: one)
    yield one
    for connection in one.connections:
        one.disconnect(connection.name)


def test_each_magic_acts_on_the_connection_named(
    server, client, session, shell, tmp_path, monkeypatch, capsys  # noqa: F811
):  # fmt: skip
    monkeypatch.setenv("BOX_TOKEN", server.token)
    shell.run_line_magic("load_ext", "kernel_tools")
    for name in ("one", "two"):
        shell.run_line_magic(
            "remote_connect",
            f"{server.url} --token-env BOX_TOKEN --client {client} --as {name} --remote-dir {tmp_path / name}",
        )
    ids = [connection.kernel.kernel_id for connection in session.connections]
    assert len(set(ids)) == 2

    def cell(line, code):
        shell.run_cell_magic("remote", line, code)
        return capsys.readouterr().out

    cell("--on one", "where = 'first'")
    cell("--on two", "where = 'second'")
    assert cell("--on one", "print(where)") == "first\n"
    assert cell("--on two", "print(where)") == "second\n"
    assert cell("", "print(where)") == "second\n", "the last one made is the default"
    shell.user_ns["sent"] = {"a": 1}
    cell("--on one --push sent -o back", "back = [sent, where]")
    assert shell.user_ns["back"] == [{"a": 1}, "first"]
    shell.run_line_magic("remote_sync", "--on one --sync-path src")
    assert (tmp_path / "one/blobs").is_dir()
    assert not list((tmp_path / "two").glob("blobs/*/*"))
    assert shell.run_line_magic("remote_runs", "--on two") is not None
    shell.run_line_magic("remote_disconnect", "--on one")
    capsys.readouterr()
    assert ids[0] not in server.kernel_ids()
    assert ids[1] in server.kernel_ids()
    assert cell("", "print(where)") == "second\n"
    shell.run_line_magic("unload_ext", "kernel_tools")


def tree_of(folder):
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_code_that_is_edited_and_synced_again_changes_no_running_job(
    server, client, session, project, tmp_path, monkeypatch
):
    from kernel_tools.sync import build_plan

    monkeypatch.setenv("BOX_TOKEN", server.token)
    connection = session.connect(
        server.url, token_env="BOX_TOKEN", client=client, remote_dir=str(tmp_path / "remote")
    )

    def launch(run_id):
        plan = build_plan(project, sync_paths=["src"], exclude=["detector", "configs"])
        manifest = connection.sync(plan).manifest
        job = {
            "schema_version": 1, "run_id": run_id, "name": run_id, "kind": "command",
            "created_at": "2026-01-01T00:00:00+00:00",
            "argv": [server.python, "src/stub_trainer.py", "--steps", "400", "--step-seconds", "0.05"],
            "limits": {"grace_seconds": 5, "stall_minutes": None},
        }  # fmt: skip
        connection.call("launch", job=job, manifest=manifest, secrets_file=None)
        record = RunRecord(run_id, run_id, "t", "box", connection.remote_dir, str(tmp_path / "a"))
        return Run(record, link=connection, mirror=RunMirror(tmp_path / "mirror" / run_id))

    first = launch("20260101-000000-first-0001")
    code = tmp_path / "remote/runs" / first.id / "code"
    deadline = time.monotonic() + 60
    while first.refresh().state.value != "training":
        assert time.monotonic() < deadline
        time.sleep(0.1)
    before = tree_of(code)
    (project / "src/code.py").write_text("version = 2\n")
    (project / "src/new.py").write_text("new = True\n")
    second = launch("20260101-000000-second-0002")
    try:
        assert first.refresh().state.value == "training"
        assert tree_of(code) == before
        assert (code / "src/code.py").read_text() == "version = 1\n"
        newer = tmp_path / "remote/runs" / second.id / "code/src"
        assert (newer / "code.py").read_text() == "version = 2\n"
        assert (newer / "new.py").exists()
        (project / "src/new.py").unlink()
        third = launch("20260101-000000-third-0003")
        third.stop(now=True)
        assert not (tmp_path / "remote/runs" / third.id / "code/src/new.py").exists()
        assert tree_of(code) == before
    finally:
        for run in (first, second):
            run.stop(now=True)
            run.wait(60, check=False)
