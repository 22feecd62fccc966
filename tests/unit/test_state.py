from __future__ import annotations

import dataclasses
from itertools import pairwise

import pytest

from kernel_tools.state import (
    LOG_TAIL_LINES,
    MOST_STEP_ROWS,
    STALE_HEARTBEAT_SECONDS,
    TERMINAL_STATES,
    TRANSITIONS,
    Contact,
    ContactLost,
    Polled,
    RunSnapshot,
    RunState,
    may_follow,
    reduce,
    thinned,
)

START = RunSnapshot(run_id="r", name="r")


def polled(state="training", **changes):
    event = Polled(
        status={"state": state, "message": None, "boot_id": "b1", "error": None},
        agent={"pid": 1, "boot_id": "b1"},
        agent_alive=True,
        boot_id="b1",
        agent_heartbeat_age_seconds=0.5,
        log_text="",
        log_size=0,
    )
    return dataclasses.replace(event, **changes)


@pytest.mark.parametrize("state", list(RunState))
def test_the_state_is_what_the_status_says(state):
    assert reduce(START, polled(state.value)).state is state


def test_lost_contact_ages_the_figures_and_changes_no_state():
    running = reduce(START, polled())
    for age, kind in ((1.0, "live"), (41.0, "stale"), (7200.0, "lost")):
        after = reduce(running, ContactLost(age))
        assert (after.state, after.contact.kind) == (RunState.TRAINING, kind)
    assert str(Contact.of_age(41.0)) == "stale, 41 s"


def test_an_agent_that_is_gone_with_a_stale_heartbeat_is_proof_of_failure():
    gone = polled(agent_alive=False, agent_heartbeat_age_seconds=STALE_HEARTBEAT_SECONDS + 1)
    after = reduce(START, gone)
    assert after.state is RunState.FAILED
    assert after.status["state"] == "failed"
    assert "agent process is gone" in after.status["error"]["message"]


@pytest.mark.parametrize(
    "doubtful",
    [
        {"agent_alive": False, "agent_heartbeat_age_seconds": 1.0},
        {"agent_alive": True, "agent_heartbeat_age_seconds": 9999.0},
        {"agent_alive": False, "agent_heartbeat_age_seconds": None},
        {"agent": None, "agent_alive": False},
    ],
)
def test_half_the_evidence_is_no_proof(doubtful):
    assert reduce(START, polled(**doubtful)).state is RunState.TRAINING


def test_another_boot_of_the_machine_is_proof_of_failure():
    after = reduce(START, polled(boot_id="b2"))
    assert after.state is RunState.FAILED
    assert "restarted" in after.message


def test_a_terminal_state_is_never_left():
    done = reduce(START, polled("completed"))
    assert reduce(done, polled("training")).state is RunState.COMPLETED
    assert reduce(done, polled("failed", boot_id="b2")).state is RunState.COMPLETED


def test_the_log_tail_joins_lines_that_arrive_in_pieces_and_stays_bounded():
    after = reduce(START, polled(log_text="one\ntw"))
    after = reduce(after, polled(log_text="o\nthree\n"))
    assert after.log_tail == ("one", "two", "three", "")
    many = "".join(f"{i}\n" for i in range(10 * LOG_TAIL_LINES))
    after = reduce(after, polled(log_text=many))
    assert len(after.log_tail) == LOG_TAIL_LINES + 1
    assert after.log_tail[-2] == str(10 * LOG_TAIL_LINES - 1)


def test_rows_accumulate():
    after = reduce(START, polled(metrics=({"epoch": 1},), steps=({"step": 1},)))
    after = reduce(after, polled(metrics=({"epoch": 2},)))
    assert [row["epoch"] for row in after.metrics] == [1, 2]
    assert len(after.steps) == 1


ORDER = ["queued", "preparing", "training", "validating", "training", "stopping", "stopped"]


def test_every_state_has_its_row_in_the_table_and_terminal_ones_lead_nowhere():
    assert set(TRANSITIONS) == set(RunState)
    assert [state for state in RunState if not TRANSITIONS[state]] == sorted(
        TERMINAL_STATES, key=list(RunState).index
    )


def test_a_usual_life_is_legal_and_may_be_seen_with_gaps():
    for i, earlier in enumerate(ORDER):
        for later in ORDER[i:]:
            assert may_follow(RunState(earlier), RunState(later))


@pytest.mark.parametrize(
    ("earlier", "later"),
    [
        ("training", "queued"),
        ("stopping", "training"),
        ("stopping", "preparing"),
        ("completed", "training"),
        ("failed", "completed"),
        ("preparing", "queued"),
    ],
)
def test_what_cannot_follow_is_not_taken_over(earlier, later):
    assert not may_follow(RunState(earlier), RunState(later))
    before = reduce(START, polled(earlier))
    after = reduce(before, polled(later))
    assert (after.state.value, after.status["state"]) == (earlier, earlier)


def test_a_second_attempt_prepares_again():
    assert reduce(reduce(START, polled("training")), polled("preparing")).state.value == "preparing"


def test_a_torn_status_leaves_figures_and_state_as_they_were():
    before = reduce(START, polled("training", log_text="a\n"))
    after = reduce(before, polled("queued", status_whole=False, log_text="b\n"))
    assert (after.state, after.status) == (before.state, before.status)
    assert after.log_tail == ("a", "b", "")


def test_a_torn_status_hides_no_death():
    before = reduce(START, polled("training"))
    gone = polled("queued", status_whole=False, agent_alive=False, agent_heartbeat_age_seconds=99.0)
    assert reduce(before, gone).state is RunState.FAILED


def test_lines_that_were_skipped_are_not_joined_to_those_before():
    before = reduce(START, polled(log_text="old"))
    assert reduce(before, polled(log_text="new\n", log_skipped=True)).log_tail == ("new", "")


def test_a_snapshot_holds_a_bounded_number_of_step_rows_evenly_and_the_newest():
    rows = tuple({"optimizer_steps": i} for i in range(100_001))
    kept = [row["optimizer_steps"] for row in thinned(rows)]
    assert MOST_STEP_ROWS / 2 <= len(kept) <= MOST_STEP_ROWS
    assert (kept[0], kept[-1]) == (0, 100_000)
    assert max(b - a for a, b in pairwise(kept)) <= 64
    assert thinned(rows[:10]) == rows[:10]
