"""Tab offers what the parser takes, and never opens a connection."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from IPython.core.completer import provisionalcompleter

from kernel_tools.magics.completion import candidates


def tab(shell, line):
    with provisionalcompleter():
        return {
            line[: c.start] + c.text + line[c.end :]
            for c in shell.Completer.completions(line, len(line))
        }


@pytest.mark.parametrize("prefix", ["%remote_train ", "run = %remote_train "])
def test_options_complete_from_the_parser(loaded, prefix):
    assert tab(loaded, f"{prefix}coins --stall") == {f"{prefix}coins --stall-minutes"}


def test_every_long_option_is_offered(loaded):
    parser = loaded.magics_manager.magics["line"]["remote_train"].parser
    offered = set(candidates(parser, "coins --"))
    assert offered == {o for o in parser._option_string_actions if o.startswith("--")}


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


def test_runs_complete(loaded, session):
    session.registry = SimpleNamespace(run_ids=lambda: ("20260102-030405-coins-3f2a",))
    assert tab(loaded, "%remote_attach 2026") == {"%remote_attach 20260102-030405-coins-3f2a"}
    assert tab(loaded, "%remote_fetch 2026") == {"%remote_fetch 20260102-030405-coins-3f2a"}


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
