"""Which weights, which configuration, which data: found where the run left them, or refused in words."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from kernel_tools.datasets.reference import DatasetReference
from kernel_tools.errors import FetchError, InvalidArgumentError
from kernel_tools.launching.judging import (
    Judging,
    Weights,
    configuration_of,
    find_weights,
    inputs_of,
    is_of_a_run,
    source_of,
)
from kernel_tools.launching.launch import LaunchOptions
from kernel_tools.settings import Settings

TRAIN = ("-m", "detector", "train", "--config", "configs/coins/hgnetv2_n.yaml")
INPUT = {
    "kind": "dataset", "name": "coins", "object": "datasets/coins/1.tar", "size_bytes": 10,
    "sha256": "ab" * 32, "dest": "data/coins", "format": "tar", "file_count": 3, "content_bytes": 9,
}  # fmt: skip


class Run:
    """A run that left these weights."""

    id = "20260102-030405-coins-3f2a"

    def __init__(self, *, best="weights/best.pt", last="weights/last.pt", argv=TRAIN, config=None):
        self.record = SimpleNamespace(
            argv=argv, remote_dir="/remote", name="coins/hgnetv2_n", images_root="/data/coins"
        )
        self.link = self
        self.told = {"checkpoints": {"best": best, "last": last}, "state": "training"}
        self.config = config

    def status(self):
        return self.told

    def call(self, function, *, patterns, run_id, **_):
        assert (function, run_id) == ("files", self.id)
        return {"files": [{"path": p} for p in patterns if p == "weights/epoch_3.pt"]}

    def bring(self, path):
        if self.config is None:
            raise FetchError(f"{path} fits nothing.")
        return self.config

    def document(self, path):
        assert path == "job.json"
        return {"argv": list(self.record.argv or TRAIN), "inputs": [INPUT]}


UP = f"../../{Run.id}"


@pytest.mark.parametrize(
    ("run", "path"),
    [(Run(), "weights/best.pt"), (Run(best=None), "weights/last.pt")],
)
def test_by_default_the_best_weights_else_the_last(run, path):
    assert find_weights(None, run) == Weights(f"{UP}/{path}")


@pytest.mark.parametrize("name", ["epoch_3", "epoch_3.pt", "weights/epoch_3.pt"])
def test_weights_of_a_run_are_named_in_short(name):
    assert find_weights(name, Run()) == Weights(f"{UP}/weights/epoch_3.pt")


@pytest.mark.parametrize("name", ["epoch_4", "weights/*.pt", "models/none.pt"])
def test_weights_that_are_not_there_are_refused(name):
    with pytest.raises(InvalidArgumentError, match="best, last, epoch_<N>, or a file's path"):
        find_weights(name, Run())


def test_a_run_without_weights_yet_says_so():
    with pytest.raises(InvalidArgumentError, match=r"has no weights yet \(training\)"):
        find_weights(None, Run(best=None, last=None))


def test_a_file_here_travels(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in ("models", "weights"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "epoch_3.pt").write_bytes(b"")
    assert find_weights("models/epoch_3.pt", None) == Weights(
        "given/epoch_3.pt", Path("models/epoch_3.pt")
    )
    assert find_weights(str(tmp_path / "models/epoch_3.pt"), None).travels is not None
    # Below `weights/` the run's are meant, whatever lies here.
    assert find_weights("weights/epoch_3.pt", Run()).travels is None


def test_an_absolute_path_that_is_not_here_is_the_remotes():
    assert find_weights("/models/best.pt", None) == Weights("/models/best.pt")
    assert not is_of_a_run("/models/best.pt")
    assert is_of_a_run("best.pt")


@pytest.mark.parametrize(
    ("argv", "made_by"),
    [
        (TRAIN, Run.id),
        (("train.py",), Run.id),
        (
            ("-m", "detector", "eval", "--checkpoint", "../../other-run/weights/best.pt"),
            "other-run",
        ),
        (("-m", "detector", "visualize", "--checkpoint", "given/best.pt"), None),
        (("-m", "detector", "eval", "--checkpoint", "/models/best.pt"), None),
        ((), Run.id),  # recorded nowhere here: its job tells
    ],
)
def test_the_run_that_made_the_weights_is_known(argv, made_by):
    assert source_of(Run(argv=argv)) == made_by


def test_a_run_without_a_configuration_says_what_to_type():
    with pytest.raises(InvalidArgumentError, match="%remote_eval CONFIG"):
        configuration_of(Run())


def test_the_data_of_a_run_are_found_again():
    store = SimpleNamespace(name="s3", bucket="dataset")
    (unknown,) = inputs_of(Run(), (), store)
    assert (unknown.store, unknown.bucket, unknown.source_path) == ("s3", "dataset", None)
    assert (unknown.object, unknown.expected_root) == ("datasets/coins/1.tar", "data/coins")
    known = DatasetReference(
        name="mine", object="o", size_bytes=10, sha256="ab" * 32, expected_root="data/x", format="tar",
        file_count=3, content_bytes=9, store="local", bucket="b", source_path="/data/coins",
    )  # fmt: skip
    (again,) = inputs_of(Run(), (known,), store)
    assert (again.name, again.expected_root, again.source_path) == (
        "mine",
        "data/coins",
        "/data/coins",
    )


@pytest.fixture
def asked(tmp_path):
    (tmp_path / "pyproject.toml").write_text("[project]\nname = 'x'\n")

    def ask(config=None, checkpoint=None, *, run=None, references=(), again=(), **options):
        judging = Judging(
            "eval", config, checkpoint, ("data.eval_samples=2",), (), {}, LaunchOptions(**options)
        )
        settings = Settings(project_dir=tmp_path, environ={}, dotenv={})
        return judging.request(
            run, references=references, again=again, project_dir=tmp_path, settings=settings
        )

    return ask


def reference(root):
    return DatasetReference(
        name="coins", object="o", size_bytes=1, sha256="cd" * 32, expected_root=root, format="tar",
        file_count=1, content_bytes=1, store="local", bucket="b", source_path="/data/coins",
    )  # fmt: skip


def test_the_configuration_of_the_run_says_where_in_its_data_it_looks(asked, tmp_path):
    config = tmp_path / "config.yaml"
    config.write_text("data:\n  format: yolo\n  root: data/coins/inner\n")
    request = asked(run=Run(config=config), again=[reference("data/coins")])
    assert request.argv == (
        "-m", "detector", "eval", "--config", "configs/config.yaml", "--set", "data.eval_samples=2",
        "--checkpoint", f"{UP}/weights/best.pt",
    )  # fmt: skip
    assert request.extra_files == {"configs/config.yaml": config}
    assert [one.expected_root for one in request.references] == ["data/coins"]
    assert request.name == "eval-coins/hgnetv2_n"
    assert request.images_root == "/data/coins"


def test_another_configuration_looks_at_the_same_data(asked):
    request = asked("coins/hgnetv2_n", run=Run(), again=[reference("data/coins")])
    assert "data.root=data/coins" in request.argv
    assert [one.expected_root for one in request.references] == ["data/coins"]


def test_data_that_are_named_stand_for_those_of_the_run(asked, tmp_path):
    config = tmp_path / "config.yaml"
    config.write_text("data:\n  format: yolo\n  root: data/coins\n")
    request = asked(run=Run(config=config), references=[reference("data/other")])
    assert "data.root=data/other" in request.argv
    assert [one.expected_root for one in request.references] == ["data/other"]


def test_weights_from_here_may_be_larger_than_code(asked, tmp_path):
    (tmp_path / "best.pt").write_bytes(b"")
    request = asked("coins/hgnetv2_n", str(tmp_path / "best.pt"), name="mine")
    assert request.options.allow_large
    assert request.extra_files["given/best.pt"] == tmp_path / "best.pt"
    assert request.argv[-2:] == ("--checkpoint", "given/best.pt")
    assert request.name == "mine"
