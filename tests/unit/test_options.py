"""The table of options is the schema: same keys, and defaults that read back as the schema's own."""

from __future__ import annotations

from dataclasses import replace

from detector.config import Config, load_config, option_names
from detector.options import list_options


def test_it_holds_every_key_in_order():
    assert tuple(one.key for one in list_options()) == option_names()


def test_written_as_overrides_its_defaults_are_the_defaults(tmp_path):
    path = tmp_path / "empty.yaml"
    path.write_text("")
    given = [f"{one.key}={one.default}" for one in list_options()]
    assert replace(load_config(path, given), source="") == Config()


def test_a_choice_is_offered_with_its_default_among_the_choices():
    for one in list_options():
        if one.choices and not one.type.startswith("list"):
            assert one.default in one.choices
