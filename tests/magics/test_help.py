"""Help is on one screen, and says of every magic what it does and what it takes."""

from __future__ import annotations

import pytest

import kernel_tools
from kernel_tools.guide import magic_lines
from kernel_tools.magics import families

MAGICS = [
    pytest.param(function, kind, name, id=name)
    for family in families()
    for kind in ("line", "cell")
    for name, function in vars(family).items()
    if name in family.magics[kind] and hasattr(function, "parser")
]


def test_the_overview_is_one_screen(capsys):
    assert kernel_tools.help() is None
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 30
    assert max(map(len, lines)) <= 88


def test_the_overview_names_every_magic_once(loaded, capsys):
    kernel_tools.help()
    page = capsys.readouterr().out
    names = [f"%{name}" for name in loaded.magics_manager.magics["line"]]
    ours = {name for name in names if name.startswith(("%remote_", "%stage_", "%store_"))} | {
        "%%remote"
    }
    assert {one.name for one in magic_lines()} >= ours
    for name in ours:
        assert sum(line.startswith(f"  {name} ") for line in page.splitlines()) == 1


@pytest.mark.parametrize(("function", "kind", "name"), MAGICS)
def test_a_magics_help_begins_with_the_call_and_explains_every_option(function, kind, name):
    page = function.__doc__
    first, blank, sentence = page.splitlines()[:3]
    assert first.startswith(f"{'%%' if kind == 'cell' else '%'}{name} ")
    assert blank == ""
    assert sentence.endswith((".", ",")) or len(sentence) > 60
    assert max(map(len, page.splitlines())) <= 100
    for action in function.parser._actions:
        assert action.help, action.dest
        for option in action.option_strings:
            assert f"{option} " in page or f"{option}," in page or f"{option}\n" in page


@pytest.mark.parametrize(("function", "kind", "name"), MAGICS)
def test_what_takes_arguments_has_examples(function, kind, name):
    options = [action for action in function.parser._actions if action.dest not in {"on", "run"}]
    assert "Examples:\n" in function.__doc__ or not options


def test_a_launchs_options_stand_in_groups(loaded, capsys):
    loaded.run_cell("%remote_train?")
    page = capsys.readouterr().out
    order = [
        "Arguments:",
        "Options:",
        "Where it runs and on what:",
        "Limits:",
        "How it is launched:",
    ]
    places = [page.index(f"\n{title}\n") for title in order]
    assert places == sorted(places)
