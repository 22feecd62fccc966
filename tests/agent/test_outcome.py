"""The end state from the evidence: a table of what can be seen and what it means."""

import pytest
from kernel_tools_agent.control import StopRequest
from kernel_tools_agent.outcome import (
    Evidence,
    Failure,
    Reason,
    judge,
    parse_report,
    parse_tracebacks,
)

# As torchrun 2.13 prints it.
REPORT = """
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
=======================================================
detector FAILED
-------------------------------------------------------
Failures:
[1]:
  time      : 2026-11-30_15:54:30
  host      : localhost
  rank      : 0 (local_rank: 0)
  exitcode  : -15 (pid: 14782)  (SIGTERM)
  error_file: <N/A>
  traceback : Signal 15 (SIGTERM) received by PID 14782
-------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-30_15:54:29
  host      : localhost
  rank      : 1 (local_rank: 1)
  exitcode  : -9 (pid: 14783)  (SIGKILL)
  error_file: <N/A>
  traceback : Signal 9 (SIGKILL) received by PID 14783
=======================================================
"""

RANK_TRACEBACK = """\
[rank1]: Traceback (most recent call last):
step=3/10 of another rank between the lines
[rank1]:   File "train.py", line 3, in <module>
[rank1]: ValueError: banana: split
"""

STOP = StopRequest("stopped", "stopped by the user")
LIMIT = StopRequest("timed_out", "the limit of 1 h (--max-hours) was reached")
PEER = Failure("RuntimeError", "Connection closed by peer [127.0.0.1]", "tb", 0, raised=True)
BANANA = Failure("ValueError", "banana", "tb", 1, raised=True)


def reason(rank, name, code, error=None, at=0.0, message=""):
    return Reason(rank, name, code, message, error, at)


def done(*reasons, code=1, **more):
    return Evidence(kind="detector", exit_code=code, reasons=tuple(reasons), **more)


@pytest.mark.parametrize(
    ("evidence", "state", "message", "code"),
    [
        (done(code=0), "completed", "completed", 0),
        (done(reason(0, "completed", 0), reason(1, "completed", 0), code=0), "completed", "completed", 0),
        # torchrun answers 1 where its workers answered 75
        (
            done(reason(0, "stopped", 75), reason(1, "stopped", 75), stop=STOP, reported=((0, 75), (1, 75))),
            "stopped", "stopped by the user", 75,
        ),
        (done(reason(0, "timed_out", 75), stop=LIMIT), "timed_out", LIMIT.message, 75),
        # finished before it saw the request
        (done(reason(0, "completed", 0), code=0, stop=STOP), "completed", "completed", 0),
        # asked by the host, not by us
        (
            done(reason(0, "stopped", 75, message="stopped by SIGTERM")),
            "stopped", "stopped by SIGTERM", 75,
        ),
        # a failure while it was stopping is a failure
        (
            done(reason(1, "failed", 1, BANANA), reason(0, "stopped", 75), stop=STOP),
            "failed", "rank 1 raised ValueError: banana", 1,
        ),
        # the echo comes first, the cause is named
        (
            done(reason(0, "failed", 1, PEER, at=1.0), reason(1, "failed", 1, BANANA, at=2.0)),
            "failed", "rank 1 raised ValueError: banana", 1,
        ),
        (
            done(reason(0, "failed", 1, PEER), reported=((1, -9), (0, 1))),
            "failed", "rank 1 was killed by signal 9: most often out of memory", -9,
        ),
        (
            done(reported=((1, -9),), out_of_memory=True),
            "failed", "rank 1 was killed by signal 9: out of memory (the system's killer ended it)", -9,
        ),
        (done(reported=((0, -11),)), "failed", "rank 0 was killed by signal 11 (SIGSEGV)", -11),
        (
            done(reason(0, "failed", 1, PEER), reported=((1, 5), (0, 1))),
            "failed", "rank 1 ended with exit code 5", 1,
        ),
        (
            done(code=-9),
            "failed", "the launcher (torchrun) was killed by signal 9: most often out of memory", -9,
        ),
        # torchrun was killed, the ranks were then told to end by us
        (
            done(reason(0, "stopped", 75), code=-9),
            "failed", "the launcher (torchrun) was killed by signal 9: most often out of memory", 75,
        ),
        # a rank ended without a word, torchrun told the other to stop
        (
            done(reason(0, "stopped", 75), reported=((1, 5), (0, 75))),
            "failed", "rank 1 ended with exit code 5", 75,
        ),
        (done(log_errors=(BANANA,)), "failed", "rank 1 raised ValueError: banana", 1),
        (done(code=7), "failed", "the trainer ended with exit code 7", 7),
        (done(code=75), "stopped", "the trainer stopped by itself and can be resumed", 75),
        (
            done(code=-9, stop=STOP, forced="SIGKILL"),
            "stopped",
            "stopped by the user; the trainer did not end in time and was killed", -9,
        ),
        (done(code=0, stop=LIMIT, forced="SIGTERM"), "timed_out",
         LIMIT.message + "; the trainer ended at SIGTERM", 0),
        (
            done(code=-9, forced="SIGKILL", own_failure=Failure("Stalled", "stalled: no step")),
            "failed", "stalled: no step", -9,
        ),
        # all said completed, then one died on its way out
        (done(reason(0, "completed", 0), code=1), "failed", "the trainer ended with exit code 1", 0),
    ],
)  # fmt: skip
def test_the_evidence_decides(evidence, state, message, code):
    outcome = judge(evidence)
    assert (outcome.state, outcome.message) == (state, message)
    if code != 0 or state == "completed":
        assert outcome.exit_code == code
    assert (outcome.error is not None) == (state == "failed")


def test_torchruns_report_names_the_root_cause_first():
    assert parse_report("noise\n" + REPORT) == ((1, -9), (0, -15))


def test_a_log_without_a_report_has_none():
    assert parse_report("step=1/2\nrank      : 1 (local_rank: 1)\n") == ()


def test_a_ranks_traceback_is_read_from_between_the_lines():
    (error,) = parse_tracebacks(RANK_TRACEBACK)
    assert (error.type, error.message, error.rank) == ("ValueError", "banana: split", 1)
    assert "step=3/10" not in error.traceback


def test_torchruns_own_traceback_is_no_error_of_the_trainer():
    own = 'Traceback (most recent call last):\n  File "run.py"\n' + REPORT.lstrip()
    assert parse_tracebacks(own) == ()


def test_an_exception_without_a_message_is_read():
    (error,) = parse_tracebacks(
        'Traceback (most recent call last):\n  File "x"\nKeyboardInterrupt\n'
    )
    assert (error.type, error.message) == ("KeyboardInterrupt", "")
    assert error.sentence == "the trainer raised KeyboardInterrupt"


@pytest.mark.parametrize("place", ["rank_errors", "log_errors"])
def test_a_rank_that_raised_and_then_aborted_is_told_by_what_it_raised(place):
    end = judge(done(code=1, reported=((1, -6), (0, -15)), **{place: (BANANA,)}))
    assert (end.state, end.error) == ("failed", BANANA)
    end = judge(done(code=1, reported=((0, -6), (1, -15)), **{place: (BANANA,)}))
    assert end.message == "rank 0 was killed by signal 6 (SIGABRT)"


def test_a_trainer_that_ends_well_after_a_stop_without_a_word_was_stopped():
    assert judge(done(code=0, stop=STOP)).state == "stopped"
    assert judge(done(code=0, stop=STOP, claim="completed")).state == "completed"
    assert judge(done(reason(0, "completed", 0), code=0, stop=STOP)).state == "completed"
