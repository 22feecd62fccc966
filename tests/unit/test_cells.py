"""Cells: a long one lays the frame in the kernel and calls; a short one calls, or says that it is not there."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from kernel_tools.kernels.cells import FRAME_ABSENT, call_cell, short_call_cell

CALL = {
    "module": "_a_module_of_a_test",
    "source": "def double(x):\n    return {'double': 2 * x}\ndef fail():\n    raise ValueError('no')\n",
    "function": "double",
    "arguments": {"x": 21},
}


@pytest.fixture(autouse=True)
def fresh_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in sys.modules if n.startswith("_kernel_tools_frame_")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "_a_module_of_a_test", raising=False)


def run(cell: str, capsys: pytest.CaptureFixture[str]) -> str:
    namespace: dict[str, Any] = {}
    exec(compile(cell, "<cell>", "exec"), namespace)
    assert set(namespace) == {"__builtins__"}
    return capsys.readouterr().out


def test_a_short_cell_says_that_the_frame_is_absent_until_a_long_one_was_run(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(short_call_cell("<1>", CALL), capsys).startswith(f"<1>{FRAME_ABSENT}")
    for make in (call_cell, short_call_cell, call_cell):
        said = run(make("<2>", CALL), capsys)
        assert said.startswith("<2>{")
        assert json.loads(said.removeprefix("<2>")) == {"result": {"double": 42}}


def test_an_error_is_a_value(capsys: pytest.CaptureFixture[str]) -> None:
    said = run(call_cell("<3>", {**CALL, "function": "fail", "arguments": {}}), capsys)
    error = json.loads(said.removeprefix("<3>"))["error"]
    assert (error["type"], error["message"]) == ("ValueError", "no")
    assert "raise ValueError" not in error["message"]


def test_bytes_are_handed_over(capsys: pytest.CaptureFixture[str]) -> None:
    call = {
        "module": "_a_module_of_a_test",
        "source": "def size(data):\n    return {'size': len(data)}\n",
        "function": "size", "arguments": {}, "blob": "data",
    }  # fmt: skip
    said = run(call_cell("<4>", call, blob=b"abc"), capsys)
    assert json.loads(said.removeprefix("<4>")) == {"result": {"size": 3}}


def test_a_short_cell_is_short() -> None:
    poll = {"module": "m" * 30, "folder": "f" * 90, "api": "api", "function": "poll",
            "arguments": {"run_id": "r" * 50, "remote_dir": "d" * 60, "log_offset": 10**9}}  # fmt: skip
    assert len(short_call_cell("<" + "n" * 16 + ">", poll)) < 700
    assert len(call_cell("", poll)) > 3 * len(short_call_cell("", poll)) // 2
