"""Ctrl-C where links and keys are in the variables: `%xmode Verbose` would show them with the frames."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def without_frames(function: Callable[P, R]) -> Callable[P, R]:
    """Let an interrupt leave a function without the frames below it; its arguments must show nothing."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except KeyboardInterrupt:
            raise KeyboardInterrupt from None

    return call
