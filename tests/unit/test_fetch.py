"""Which files come by default: the usual ones, and what a launch named."""

from __future__ import annotations

import hashlib

import pytest

from kernel_tools.results.fetch import DEFAULT_FILES, fetch_files, fits


class Remote:
    """Lists nothing, and remembers what it was asked for."""

    def __init__(self):
        self.patterns = []

    def call(self, _function, **arguments):
        self.patterns.append(arguments["patterns"])
        return {"files": []}


def patterns_asked(folder, globs):
    remote = Remote()
    fetch_files(
        remote, remote_dir="/r", run_id="x", globs=globs, folder=folder, artifacts=["out/*.onnx"]
    )
    return remote.patterns


def test_named_artifacts_come_with_the_usual_files(tmp_path):
    assert patterns_asked(tmp_path, ()) == [[*DEFAULT_FILES, "work/out/*.onnx"]]


@pytest.mark.parametrize(
    "pattern", ["weights", "weights/*.pt", "**/*.pt", "artifacts/out.pt", "artifacts"]
)
def test_a_folder_and_a_path_in_the_work_folder_are_patterns_too(tmp_path, pattern):
    paths = ["weights/last.pt", "work/artifacts/out.pt"]
    listed = [path for path in paths if fits(path, pattern) or fits(path, f"work/{pattern}")]
    assert listed

    class Machine:
        def call(self, _function, **_arguments):
            digest = hashlib.sha256(b"x").hexdigest()
            return {"files": [{"path": p, "size_bytes": 1, "sha256": digest} for p in listed]}

        def get_file(self, _remote_path, destination):
            destination.write_bytes(b"x")

    fetched = fetch_files(Machine(), remote_dir="/r", run_id="x", globs=[pattern], folder=tmp_path)
    assert [one.path for one in fetched] == [tmp_path / path for path in listed]
