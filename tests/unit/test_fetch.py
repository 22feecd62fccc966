"""Which files come by default: the usual ones, and what a launch named."""

from __future__ import annotations

from kernel_tools.fetch import DEFAULT_FILES, fetch_files


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
