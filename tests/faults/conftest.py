from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.faults.world import World
from tests.kernel.conftest import start_server, stop_server


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("faults")
    process, server = start_server(folder / "server")
    world = World.made(server, folder)
    yield world
    world.close()
    stop_server(process, server)
