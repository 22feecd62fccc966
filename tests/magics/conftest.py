from __future__ import annotations

from typing import Any

import pytest

from tests.fakes.runs import FakeRun, FakeSession, ended, snapshot
from tests.fakes.shell import shell  # noqa: F401 - a fixture


@pytest.fixture
def loaded(shell: Any) -> Any:  # noqa: F811
    """A shell with the extension in it."""
    shell.run_line_magic("load_ext", "kernel_tools")
    yield shell
    shell.run_line_magic("unload_ext", "kernel_tools")


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> FakeSession:
    """The session that the magics find, with a run that is training and then completes."""
    one = FakeSession(FakeRun(snapshot(), ended()))
    monkeypatch.setattr("kernel_tools.session.default_session", lambda: one)
    return one
