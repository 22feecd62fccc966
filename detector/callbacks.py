"""`runtime.callbacks: [module:function]`: the user's own code at the end of an epoch and at checkpoints.

    from detector.events import CheckpointEvent, EpochEvent

    def push(event: EpochEvent | CheckpointEvent) -> None:
        if isinstance(event, CheckpointEvent) and event.kind == "best":
            upload(event.path)

Each is called on rank 0, in a thread of its own, with one event (frozen dataclasses of
`detector.events`). What it raises is logged with its traceback and never ends the run; training does
not wait for it, but the end of the run does, for a minute at most.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from functools import partial

from detector.config import ConfigError
from detector.events import Event, Listener, StepEvent


class _Calling:
    """A function as a handler."""

    def __init__(self, function: Callable[[Event], object]) -> None:
        self._function = function

    def __call__(self, event: Event) -> None:
        if not isinstance(event, StepEvent):
            self._function(event)

    def close(self) -> None:
        """Nothing to let go of."""


def find_callback(reference: str) -> Callable[[Event], object]:
    """Return the function that `module:function` names.

    Raises:
        ConfigError: the module cannot be imported, or has no such function.
    """
    module_name, _, path = reference.partition(":")
    try:
        found: object = importlib.import_module(module_name)
    except Exception as error:
        raise ConfigError(
            f"runtime.callbacks: the module {module_name} of {reference} cannot be imported: "
            f"{type(error).__name__}: {error}."
        ) from error
    for name in path.split("."):
        found = getattr(found, name, None)
    if not callable(found):
        raise ConfigError(f"runtime.callbacks: {module_name} has no function {path}.")
    return found


def callback_listeners(references: Sequence[str]) -> list[Listener]:
    """Return a listener for each reference.

    Raises:
        ConfigError: see `find_callback`; before any of them is started.
    """
    functions = [find_callback(reference) for reference in references]
    return [
        Listener(reference, partial(_Calling, function))
        for reference, function in zip(references, functions, strict=True)
    ]
