"""Tab offers what the parser takes, and never opens a connection."""

from __future__ import annotations

import dataclasses
import json
from types import SimpleNamespace

import pytest
from IPython.core.completer import provisionalcompleter

from kernel_tools.datasets.reference import DatasetReference
from kernel_tools.magics.completion import candidates

FIELDS = [field.name for field in dataclasses.fields(DatasetReference)]


def tab(shell, line):
    with provisionalcompleter():
        return {
            line[: c.start] + c.text + line[c.end :]
            for c in shell.Completer.completions(line, len(line))
        }


@pytest.mark.parametrize("prefix", ["%remote_train ", "run = %remote_train "])
def test_options_complete_from_the_parser(loaded, prefix):
    assert tab(loaded, f"{prefix}coins --stall") == {f"{prefix}coins --stall-minutes"}


def kinds(shell, line):
    """What stands beside each completion, by its text."""
    with provisionalcompleter():
        return {c.text: c.type for c in shell.Completer.completions(line, len(line))}


def test_every_long_option_is_offered(loaded):
    parser = loaded.magics_manager.magics["line"]["remote_train"].parser
    offered = {one.text for one in candidates(parser, "coins --")}
    assert offered == {o for o in parser._option_string_actions if o.startswith("--")}


def test_what_an_option_takes_stands_beside_it(loaded):
    parser = loaded.magics_manager.magics["line"]["remote_train"].parser
    beside = {one.text: one.kind for one in candidates(parser, "coins --")}
    assert beside["--max-hours"] == "H"
    assert beside["--dry-run"] == "option"


def test_choices_complete_behind_their_option(loaded):
    assert tab(loaded, "%remote_connect local --client py") == {
        "%remote_connect local --client pyrun"
    }
    assert tab(loaded, "%remote_connect --client=j") == {"%remote_connect --client=jupyter"}


def test_configurations_complete(loaded):
    assert "%remote_train coins/hgnetv2_n" in tab(loaded, "%remote_train coins/")


def test_configuration_keys_complete(loaded):
    assert tab(loaded, "%remote_train coins --set solver.ep") == {
        "%remote_train coins --set solver.epochs="
    }


@pytest.mark.parametrize(
    ("key", "kind"),
    [
        ("solver.epochs", "int = 72"),
        ("solver.lr", "float = 0.0002"),
        ("runtime.amp", "bool = true"),
        ("data.root", "text or null = null"),
        ("solver.loss", "choice = vfl"),
        ("solver.milestones", "list of float = [0.7, 0.9]"),
    ],
)
def test_a_configuration_key_says_its_type_and_default(loaded, key, kind):
    beside = kinds(loaded, f"%remote_train coins --set {key}")
    assert beside[min(beside, key=len)] == kind


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("solver.loss=", {"vfl", "mal"}),
        ("runtime.amp=", {"true", "false"}),
        ("solver.lr=", {"0.0002"}),
        ("model.backbone_name=res", {"resnet18", "resnet34", "resnet50"}),
    ],
)
def test_values_of_a_configuration_key_complete(loaded, key, values):
    line = f"%remote_train coins --set {key}"
    stem = line.rpartition("=")[0]
    assert tab(loaded, line) == {f"{stem}={value}" for value in values}


@pytest.mark.parametrize(
    "line",
    [
        "%remote_attach 2026",
        "%remote_fetch 2026",
        "%remote_train --resume 2026",
        "%remote_eval --run 2026",
        "%remote_compare 2026",
    ],
)
def test_runs_complete(loaded, session, line):
    session.registry = SimpleNamespace(run_ids=lambda: ("20260102-030405-coins-3f2a",))
    assert tab(loaded, line) == {line.replace("2026", "20260102-030405-coins-3f2a")}


def test_data_sets_complete(loaded, session, tmp_path):
    session.project_dir = tmp_path
    (tmp_path / ".kernel_tools").mkdir()
    known = {"schema_version": 1, "datasets": {"coins": dict.fromkeys(FIELDS)}}
    (tmp_path / ".kernel_tools/datasets.json").write_text(json.dumps(known))
    session.registry = SimpleNamespace(run_ids=tuple)
    for line in ("%remote_train coins/hgnetv2_n --dataset co", "%store_ls co"):
        assert tab(loaded, line) == {f"{line}ins"}


def test_variables_complete_by_name_and_show_no_value(loaded, session, monkeypatch):
    monkeypatch.setenv("GPU_BOX_TOKEN", "hunter2")
    session.settings = lambda: SimpleNamespace(dotenv={"GPU_BOX_PASSWORD": "hunter2"})
    assert kinds(loaded, "%remote_connect --token-env GPU_BOX") == {
        "GPU_BOX_TOKEN": "variable",
        "GPU_BOX_PASSWORD": "variable",
    }


def test_the_notebooks_variables_complete_behind_push(loaded):
    loaded.user_ns["pictures_of_mine"] = []
    parser = loaded.magics_manager.magics["cell"]["remote"].parser
    assert [one.text for one in candidates(parser, "--push pictures_")] == ["pictures_of_mine"]


def test_connections_complete(loaded, session):
    session.connections = (SimpleNamespace(name="gpu"), SimpleNamespace(name="local"))
    assert tab(loaded, "%remote_status --on g") == {"%remote_status --on gpu"}


def test_a_source_that_fails_offers_nothing(loaded, session):
    session.registry = None
    loaded.Completer.use_jedi = False
    parser = loaded.magics_manager.magics["line"]["remote_attach"].parser
    assert candidates(parser, "2026") == []


def test_other_lines_are_left_alone(loaded):
    assert not any("--stall-minutes" in text for text in tab(loaded, "%timeit --st"))
