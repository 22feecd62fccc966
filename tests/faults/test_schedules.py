"""Seeded schedules of faults over connect, sync, launch, poll and fetch, on both client libraries.

Whatever the line does: a run starts once, its log arrives whole and once, files arrive as they are, and
no kernel but ours is touched. The unmarked tests are the first of the series; `campaign` is all of it.
"""

from __future__ import annotations

import pytest

from kernel_tools.kernels import CLIENTS
from tests.faults.world import Play

QUICK, WHOLE = 10, 200
# Seeds that failed once, and what was wrong then.
ONCE_FAILED: dict[int, str] = {}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def seeds(numbers):
    return [pytest.param(seed, client) for seed in numbers for client in CLIENTS]


def play_through(world, client, seed, folder):
    play = Play(world, client, folder, seed)
    try:
        play.check(play.run())
    finally:
        play.close()


@pytest.mark.parametrize(("seed", "client"), seeds([*range(QUICK), *ONCE_FAILED]))
def test_a_schedule_of_faults_changes_nothing_but_the_time_it_takes(world, client, seed, tmp_path):
    play_through(world, client, seed, tmp_path)


@pytest.mark.campaign
@pytest.mark.parametrize(("seed", "client"), seeds(range(QUICK, WHOLE)))
def test_the_whole_series(world, client, seed, tmp_path):
    play_through(world, client, seed, tmp_path)
