"""One function decides how to show things."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kernel_tools.errors import ConfigurationError
from kernel_tools.views import Mode, current_mode


def kernel(*, takes_input):
    request = {"content": {"allow_stdin": takes_input}}
    return SimpleNamespace(kernel=object(), get_parent=lambda: request)


PERSON, PROGRAM, TERMINAL = kernel(takes_input=True), kernel(takes_input=False), SimpleNamespace()


@pytest.mark.parametrize(
    ("explicit", "variable", "shell", "mode"),
    [
        (None, None, PERSON, Mode.INTERACTIVE),
        (None, None, PROGRAM, Mode.BATCH),
        (None, None, TERMINAL, Mode.PLAIN),
        (None, "plain", PERSON, Mode.PLAIN),
        (None, "Interactive", PROGRAM, Mode.INTERACTIVE),
        ("batch", "plain", PERSON, Mode.BATCH),
        (None, "", PERSON, Mode.INTERACTIVE),
    ],
)
def test_explicit_then_variable_then_shell(explicit, variable, shell, mode):
    environ = {} if variable is None else {"KERNEL_TOOLS_MODE": variable}
    assert current_mode(explicit, shell=shell, environ=environ) is mode


def test_without_ipython_it_is_plain():
    assert current_mode(environ={}) is Mode.PLAIN


def test_a_kernel_without_a_request_counts_as_a_person():
    silent = SimpleNamespace(kernel=object(), get_parent=lambda: None)
    assert current_mode(shell=silent, environ={}) is Mode.INTERACTIVE


def test_an_unknown_mode_is_refused_with_the_known_ones():
    with pytest.raises(ConfigurationError, match="interactive, batch, plain"):
        current_mode(environ={"KERNEL_TOOLS_MODE": "fancy"})
