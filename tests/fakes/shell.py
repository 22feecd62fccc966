"""A shell in this process, with displays captured and nothing written to the user's history."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from IPython.core.displaypub import CapturingDisplayPublisher
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config


class Published(CapturingDisplayPublisher):
    """Keeps every `display_data` and `update_display_data`, in order."""


@pytest.fixture
def shell() -> Iterator[InteractiveShell]:
    InteractiveShell.clear_instance()
    config = Config()
    config.HistoryManager.enabled = False
    config.InteractiveShell.colors = "nocolor"
    one = InteractiveShell.instance(config=config)
    one.display_pub = Published(parent=one)
    yield one
    InteractiveShell.clear_instance()


def published(shell: InteractiveShell) -> list[dict[str, Any]]:
    """Return what was displayed: `data`, `update` and `transient` of each message."""
    return list(shell.display_pub.outputs)
