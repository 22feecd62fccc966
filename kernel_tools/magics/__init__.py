"""The magics: thin adapters over `Session` and `Run`, and how they come into a shell and leave it.

State lives in the session, not here, so `%reload_ext` keeps every run.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_loaded: weakref.WeakKeyDictionary[Any, _Loaded] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class _Loaded:
    """What loading added to one shell."""

    instances: tuple[Any, ...]
    matcher: Callable[[Any], Any]


def families() -> tuple[Any, ...]:
    """Return the classes that hold the magics, in the order of `kernel_tools.help()`."""
    from kernel_tools.magics.connect import ConnectMagics
    from kernel_tools.magics.judge import JudgeMagics
    from kernel_tools.magics.program import ProgramMagics
    from kernel_tools.magics.remote import RemoteMagics
    from kernel_tools.magics.runs import RunMagics
    from kernel_tools.magics.stage import StageMagics
    from kernel_tools.magics.train import TrainMagics

    return (
        ConnectMagics,
        RemoteMagics,
        StageMagics,
        TrainMagics,
        ProgramMagics,
        JudgeMagics,
        RunMagics,
    )


def load(ipython: Any) -> None:
    """Register the magics and their completion; a second call changes nothing."""
    from kernel_tools.magics.completion import matcher_for

    if ipython in _loaded:
        return
    instances = tuple(family(shell=ipython) for family in families())
    for instance in instances:
        ipython.register_magics(instance)
    functions = {
        name: getattr(instance, name)
        for instance in instances
        for kind in ("line", "cell")
        for name in instance.magics[kind]
    }
    matcher = matcher_for(lambda: functions)
    ipython.Completer.custom_matchers.append(matcher)
    _loaded[ipython] = _Loaded(instances, matcher)


def unload(ipython: Any) -> None:
    """Remove what `load` added, and nothing that somebody else has put in its place."""
    added = _loaded.pop(ipython, None)
    if added is None:
        return
    manager = ipython.magics_manager
    for instance in added.instances:
        for kind, names in instance.magics.items():
            for name in names:
                current = manager.magics[kind].get(name)
                if getattr(current, "__self__", None) is instance:
                    del manager.magics[kind][name]
        if manager.registry.get(type(instance).__name__) is instance:
            del manager.registry[type(instance).__name__]
        ipython.configurables[:] = [c for c in ipython.configurables if c is not instance]
    matchers = ipython.Completer.custom_matchers
    matchers[:] = [matcher for matcher in matchers if matcher is not added.matcher]
