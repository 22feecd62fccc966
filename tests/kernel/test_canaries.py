"""The token is a canary: it stands in no output, file, log, history, process list or traceback.

Each way to fail is gone once, with every variable of every frame shown, as `%xmode Verbose` would.
"""

from __future__ import annotations

import os
import sqlite3
import sys
import traceback
from pathlib import Path

import psutil
import pytest

from kernel_tools.errors import (
    FetchError,
    InvalidArgumentError,
    KernelAuthError,
    KernelConnectionError,
    KernelLostError,
    KernelTimeoutError,
    KernelToolsError,
    RemoteExecutionError,
)
from kernel_tools.kernels import connect_kernel
from kernel_tools.session import Session
from tests.faults.proxy import Fault, FaultProxy, Schedule

DEAF = "opened then reset"


@pytest.fixture
def proxy(server):
    proxy = FaultProxy(server.port, lambda *_: None)
    yield proxy
    proxy.close()


@pytest.fixture
def url(server, proxy):
    return server.url.replace(str(server.port), str(proxy.port))


@pytest.fixture
def ours(server, client, url):
    kernel = connect_kernel(url, token=server.token, client=client)
    yield kernel
    kernel.close(stop_kernel=True)


def told(error: BaseException) -> str:
    """All that anybody could be shown of an error: the chain, and what stands in its frames here."""
    parts = [str(error), repr(error), "".join(getattr(error, "_render_traceback_", list)())]
    seen: BaseException | None = error
    while seen is not None:
        parts += [repr(seen), str(seen), repr(vars(seen))]
        seen = seen.__cause__ or (None if seen.__suppress_context__ else seen.__context__)
    parts += traceback.format_exception(error)
    return "\n".join(parts)


def ways_to_fail(proxy, kernel, url, token, client, folder):
    """Every error path: what is done, and what it raises."""

    def again(**changes):
        proxy.start(Schedule(0, ()))
        kernel.hang_up()
        for name, value in changes.items():
            setattr(proxy, name, value)

    def always(*kinds):
        again(schedule=Schedule(0, tuple(Fault(kind, 0, 999) for kind in kinds)))

    yield lambda: kernel.execute("1 / 0").check(), RemoteExecutionError
    yield (
        lambda: kernel.execute("import time; time.sleep(2)", timeout_seconds=0.2),
        KernelTimeoutError,
    )
    yield lambda: kernel.get_file("/nowhere/x", folder / "x"), FetchError
    yield lambda: kernel.put_file(b"x", "/proc/nowhere/x"), KernelToolsError
    yield lambda: kernel.put_file(Path("nowhere"), "/tmp/x"), InvalidArgumentError
    yield lambda: connect_kernel(url, token="not-" + token[4:], client=client), KernelAuthError
    yield (
        lambda: connect_kernel(url + "/elsewhere", token=token, client=client),
        KernelLostError,
    )
    yield (
        lambda: connect_kernel(url, token=token, client=client, kernel_name="cobol"),
        InvalidArgumentError,
    )
    yield (
        lambda: connect_kernel(url, token=token, client=client, attach="no-such-kernel"),
        KernelLostError,
    )
    yield (
        lambda: connect_kernel(url.replace(f":{proxy.port}", ":9"), token=token, client=client),
        KernelConnectionError,
    )
    yield (
        lambda: (always("status"), kernel.state()),
        KernelConnectionError,
    )
    yield lambda: (always("login page"), kernel.state()), KernelConnectionError
    yield lambda: (always("http reset"), kernel.state()), KernelConnectionError
    yield lambda: (always(DEAF), kernel.execute("1", timeout_seconds=1)), KernelConnectionError
    yield (
        lambda: (always("opening refused"), kernel.execute("1", timeout_seconds=1)),
        KernelConnectionError,
    )
    yield (
        lambda: (always("cut down"), kernel.execute("1", timeout_seconds=5)),
        KernelConnectionError,
    )
    yield lambda: (again(expired=True), kernel.execute("1", timeout_seconds=5)), KernelAuthError
    yield (
        lambda: (again(), kernel.execute("1").check(), again(expired=True), kernel.interrupt()),
        (KernelAuthError),
    )


def test_no_error_shows_the_token(server, client, proxy, url, ours, tmp_path, capfd):
    paths = list(ways_to_fail(proxy, ours, url, server.token, client, tmp_path))
    for number, (action, kind) in enumerate(paths):
        with pytest.raises(kind) as caught:
            action()
        text = told(caught.value)
        for secret in (server.token, server.jwe):
            assert secret not in text, f"way {number}: {caught.value}"
        assert len(str(caught.value).splitlines()) == 1
    proxy.expired = False
    proxy.start(Schedule(0, ()))
    said = capfd.readouterr()
    assert server.token not in said.out + said.err
    assert server.jwe not in said.out + said.err


def test_ctrl_c_leaves_no_frame_with_the_token(server, client, url, monkeypatch):
    """In the thread of the notebook; whose variables `%xmode Verbose` would show."""
    kernel = connect_kernel(url, token=server.token, client=client)

    def interrupted(*_args, **_keywords):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("threading.Event.wait", interrupted)
        with pytest.raises(KeyboardInterrupt) as caught:
            kernel.state()
    shown = traceback.TracebackException.from_exception(caught.value, capture_locals=True)
    text = "".join(shown.format())
    assert server.token not in text.replace(repr(server), "")
    kernel.close(stop_kernel=True)


def files_that_hold(secret: str, *folders: Path) -> list[str]:
    paths = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    return [str(path) for path in paths if secret.encode() in path.read_bytes()]


def test_a_session_leaves_the_token_nowhere(server, client, url, tmp_path, monkeypatch, capfd):
    project, remote = tmp_path / "project", tmp_path / "remote"
    (project / "src").mkdir(parents=True)
    (project / "pyproject.toml").write_text("[project]\nname = 'p'\n")
    (project / "src/a.py").write_text("a = 1\n")
    (project / ".env").write_text(f"BOX_TOKEN={server.token}\nPYRUN_JUPYTER_URL={url}\n")
    state = tmp_path / "state"
    monkeypatch.setenv("KERNEL_TOOLS_STATE_DIR", str(state))
    session = Session(project)
    connection = session.connect(token_env="BOX_TOKEN", client=client, remote_dir=str(remote))
    said = []
    values = session.execute(
        "seen = sorted(f'{k}={v}' for k, v in __import__('os').environ.items())\nprint(In)",
        push={"here": [1]}, bring=["here"], on_output=said.append,
    )  # fmt: skip
    assert values == {"here": [1]}
    session.sync(sync_paths=["src"])
    connection.put_secrets("run-1", {"env": {}})
    shown = [repr(connection), repr(session), connection.where, repr(said)]
    shown += [str(connection._repr_mimebundle_())]
    for process in psutil.process_iter(["cmdline"]):
        words = " ".join(process.info["cmdline"] or [])
        assert server.token not in words
    where = connection.kernel.execute(
        "print(get_ipython().history_manager.hist_file)"
    ).stdout.strip()
    session.disconnect()
    captured = capfd.readouterr()
    for secret in (server.token, server.jwe):
        assert secret not in "\n".join(shown)
        assert secret not in captured.out + captured.err
        kept = files_that_hold(secret, project, remote, state)
        assert kept == [str(project / ".env")]
    if os.path.exists(where):
        with sqlite3.connect(where) as database:
            rows = [row for (row,) in database.execute("SELECT source_raw FROM history")]
        database.close()
        assert not any(server.token in row or server.jwe in row for row in rows)
    assert server.token not in " ".join(sys.argv)
