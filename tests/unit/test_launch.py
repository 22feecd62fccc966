from __future__ import annotations

from pathlib import Path

import pytest

from kernel_tools.errors import ConfigurationError, InvalidArgumentError, NotConnectedError
from kernel_tools.project import Project
from kernel_tools.session import Session

COINS = "coins/hgnetv2_n"


@pytest.fixture
def session(tmp_path):
    (tmp_path / "pyproject.toml").write_text("[project]\nname = 'x'\n")
    return Session(tmp_path)


def argv_of(plan):
    return list(plan.job.argv)


def test_a_dry_run_needs_no_connection_and_tells_what_would_run(session):
    plan = session.train(
        COINS, overrides=["solver.epochs=2"], nproc_per_node=2, name="try", dry_run=True
    )
    assert argv_of(plan) == [
        "-m", "detector", "train", "--config", "configs/coins/hgnetv2_n.yaml", "--set", "solver.epochs=2",
    ]  # fmt: skip
    assert plan.job.nproc_per_node == 2
    assert plan.job.run_id.split("-")[2] == "try"
    assert "would sync: " in str(plan)


@pytest.mark.parametrize(
    ("config", "overrides", "named"),
    [
        (COINS, ["solver.epochs=banana"], "solver.epochs"),
        (COINS, ["solver.epoch=3"], "solver.epochs"),
        (COINS, ["sovler.epochs=3"], "solver"),
        ("coins/hgnetv2_q", [], "hgnetv2_n"),
    ],
)
def test_a_configuration_that_does_not_fit_is_refused_here_in_one_sentence(
    session, config, overrides, named
):
    with pytest.raises(ConfigurationError) as caught:
        session.train(config, overrides=overrides, dry_run=True)
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


def test_options_are_checked_before_anything_else(session):
    with pytest.raises(InvalidArgumentError, match="device"):
        session.train(COINS, device="gpu")


def test_without_a_connection_nothing_is_launched(session):
    with pytest.raises(NotConnectedError, match="%remote_connect"):
        session.train(COINS)


def test_the_projects_configuration_wins_over_the_packed_one(session):
    own = session.project_dir / "configs/coins"
    own.mkdir(parents=True)
    (own / "hgnetv2_n.yaml").write_text("solver:\n  epochs: banana\n")
    with pytest.raises(ConfigurationError, match="banana"):
        session.train(COINS, dry_run=True)


def test_a_configuration_from_elsewhere_travels_by_itself(session, tmp_path_factory):
    path = tmp_path_factory.mktemp("elsewhere") / "mine.yaml"
    path.write_text("data:\n  format: coins\n")
    plan = session.train(str(path), dry_run=True)
    assert "configs/mine.yaml" in argv_of(plan)
    assert {f.path: f.source for f in plan.sync.files}["configs/mine.yaml"] == path


def test_a_configuration_from_elsewhere_is_not_mistaken_for_one_of_the_same_name(
    session, tmp_path_factory
):
    (session.project_dir / "configs").mkdir()
    (session.project_dir / "configs/mine.yaml").write_text("data:\n  format: digits\n")
    path = tmp_path_factory.mktemp("elsewhere") / "mine.yaml"
    path.write_text("data:\n  format: coins\n")
    plan = session.train(str(path), dry_run=True)
    assert {f.path: f.source for f in plan.sync.files}["configs/mine.yaml"] == path


def test_a_packed_configuration_travels_beside_the_projects_own(session):
    (session.project_dir / "configs").mkdir()
    (session.project_dir / "configs/mine.yaml").write_text("data:\n  format: digits\n")
    plan = session.train(COINS, dry_run=True)
    assert {"configs/mine.yaml", "configs/coins/hgnetv2_n.yaml"} <= {
        f.path for f in plan.sync.files
    }


def test_a_credential_in_a_configuration_is_not_quoted(session, monkeypatch):
    monkeypatch.setenv("MY_TOKEN", "canary-value-9")
    with pytest.raises(ConfigurationError, match="solver.epochs") as caught:
        session.train(COINS, overrides=["solver.epochs=${MY_TOKEN}"], dry_run=True)
    assert "canary" not in str(caught.value)


def test_named_environment_travels_outside_the_job(session, monkeypatch, tmp_path):
    monkeypatch.setenv("COCO128_DIR", str(tmp_path / "canary-folder"))
    plan = session.train("coco128/hgnetv2_n", dry_run=True)
    assert "canary-folder" not in str(plan.job.to_json())


def test_an_unset_variable_of_a_configuration_is_named(session, monkeypatch):
    monkeypatch.delenv("COCO128_DIR", raising=False)
    with pytest.raises(ConfigurationError, match="COCO128_DIR"):
        session.train("coco128/hgnetv2_n", dry_run=True)


def test_an_unknown_data_set_is_refused_with_the_way_to_stage_it(session):
    with pytest.raises(Exception, match="stage_dataset"):
        session.train(COINS, datasets=["nothing"], dry_run=True)


def test_relative_folders_are_found_from_the_notebooks_folder_too(session, monkeypatch):
    project = Project(session.project_dir)
    (project.folder / "data/x").mkdir(parents=True)
    (project.folder / "notebooks").mkdir()
    monkeypatch.chdir(project.folder / "notebooks")
    assert project.resolve("data/x") == project.folder / "data/x"
    assert project.resolve("../data/x").resolve() == project.folder / "data/x"
    assert project.resolve("../data/x").is_absolute()
    assert project.resolve(Path("/absolute")) == Path("/absolute")
