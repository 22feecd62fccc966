"""A run's weights become a file here, by the trainer's own command."""

from __future__ import annotations

import hashlib
import importlib.util

import pytest

from kernel_tools.errors import InvalidArgumentError, MissingDependencyError
from kernel_tools.results import exports
from kernel_tools.results.exports import ExportError, export_weights
from kernel_tools.run import Run
from kernel_tools.runs.mirror import RunMirror
from kernel_tools.runs.registry import RunRecord


class Remote:
    """A run that has ended and has one file."""

    where = "a made-up kernel"

    def __init__(self):
        self.fetched = []

    def call(self, function, *, timeout_seconds=60.0, **_):
        assert function == "files"
        self.fetched.append("listing")
        sha256 = hashlib.sha256(b"weights").hexdigest()
        return {"files": [{"path": "weights/best.pt", "size_bytes": 7, "sha256": sha256}]}

    def get_file(self, remote_path, destination):
        self.fetched.append(remote_path)
        destination.write_bytes(b"weights")


@pytest.fixture
def run(tmp_path):
    record = RunRecord("20260101-000000-x-0001", "x", "t", "local", "/remote", str(tmp_path))
    return Run(record, link=Remote(), mirror=RunMirror(tmp_path / "mirror"))


@pytest.fixture
def asked(monkeypatch):
    """What the trainer was asked for; it writes nothing."""
    seen = []

    def export_weights(weights, *, to, kind, options=()):
        seen.append((weights.read_bytes(), to, kind, options))
        return to, "checked=onnxruntime pictures=3"

    monkeypatch.setattr(exports, "export_weights", export_weights)
    return seen


def test_the_best_weights_are_fetched_and_exported_beside_them(run, asked, tmp_path, capsys):
    beside = tmp_path / run.id / "weights" / "best.onnx"
    assert run.export() == beside
    assert asked == [(b"weights", beside, "onnx", ())]
    assert run.link.fetched == ["listing", f"/remote/runs/{run.id}/weights/best.pt"]
    assert capsys.readouterr().out == "checked=onnxruntime pictures=3\n"


def test_format_place_and_options_are_the_callers(run, asked, tmp_path):
    to = tmp_path / "slim.safetensors"
    assert run.export("safetensors", to=str(to), options=["--half"]) == to
    assert asked[0][1:] == (to, "safetensors", ["--half"])


def test_an_unknown_format_is_refused_before_anything_travels(run):
    with pytest.raises(InvalidArgumentError, match=r"no export to 'tflite'.*onnx and safetensors"):
        run.export("tflite")
    assert run.link.fetched == []


def test_where_torch_is_not_installed_it_says_what_to_type(monkeypatch, tmp_path):
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "torch" else real(name)
    )
    with pytest.raises(MissingDependencyError, match=r"needs torch, not installed here") as caught:
        export_weights(tmp_path / "best.pt", to=tmp_path / "a.safetensors", kind="safetensors")
    assert "python -m detector export --checkpoint" in str(caught.value)


def test_the_trainers_refusal_is_the_message(tmp_path):
    weights = tmp_path / "best.pt"
    with pytest.raises(ExportError, match=r"^There is no checkpoint .*best\.pt\.$"):
        export_weights(weights, to=tmp_path / "a.safetensors", kind="safetensors")
    assert list(tmp_path.iterdir()) == []
