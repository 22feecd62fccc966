"""Which crash is worth another attempt: the machine's, and the program's own until it repeats itself."""

import pytest
from kernel_tools_agent.outcome import Failure, Outcome
from kernel_tools_agent.retry import Attempt, pause_seconds, refusal

BANANA = Failure("ValueError", "banana", None, 1, raised=True)
CONFIG = Failure("detector.config.ConfigError", "no key a.b", None, 0, raised=True)
PEER = Failure("DistBackendError", "NCCL error: unhandled system error", None, 0, raised=True)
KILLED = Failure("SIGKILL", "rank 1 was killed by signal 9: most often out of memory", None, 1)
STALLED = Failure("Stalled", "stalled: no new step")


def crashed(error, *, first=0, steps=0, code=1, number=1):
    outcome = Outcome("failed", error.sentence, error, code, crashed=True)
    return Attempt(number, "t", "t", outcome, first, steps)


@pytest.mark.parametrize(
    ("attempts", "words"),
    [
        ([crashed(KILLED, code=-9)], ""),
        ([crashed(KILLED, code=-9), crashed(KILLED, code=-9), crashed(KILLED, code=-9)], ""),
        ([crashed(STALLED)] * 3, ""),
        ([crashed(PEER)] * 3, ""),
        ([crashed(BANANA)], ""),
        ([crashed(BANANA), crashed(BANANA)], "the same error came twice before the first step"),
        ([crashed(BANANA), crashed(KILLED, code=-9), crashed(BANANA)], ""),
        ([crashed(BANANA, steps=40), crashed(BANANA, first=30, steps=40)], "the same error came twice at step 40"),
        ([crashed(BANANA, steps=40), crashed(BANANA, first=30, steps=55)], ""),
        ([crashed(CONFIG)], "another attempt would end the same way"),
        ([crashed(Failure("ExitCode", "ended with exit code 2"), code=2)], "another attempt would end the same way"),
        ([crashed(Failure("ExitCode", "ended with exit code 3"), code=3)], ""),
        # a program that fails on its configuration after it has trained is no mistake of a line
        ([crashed(CONFIG, steps=10)], ""),
    ],
)  # fmt: skip
def test_the_attempts_so_far_decide(attempts, words):
    assert refusal(attempts) == words


def test_an_error_that_differs_by_a_pid_or_an_address_is_the_same():
    first = Failure("RuntimeError", "process 123 at 0x7f12 has died", None, 0, raised=True)
    second = Failure("RuntimeError", "process 456 at 0x7faa has died", None, 0, raised=True)
    assert refusal([crashed(first), crashed(second)]) != ""


def test_a_cause_is_the_machines_or_the_programs():
    causes = [crashed(one).cause for one in (KILLED, STALLED, PEER, BANANA, CONFIG)]
    assert causes == ["infrastructure"] * 3 + ["program"] * 2
    assert Attempt(1, "t", "t", Outcome("completed", "completed"), 0, 4).cause == ""


def test_the_pause_doubles_and_is_bounded():
    assert [pause_seconds(n) for n in (1, 2, 3, 4, 20)] == [1.0, 2.0, 4.0, 8.0, 30.0]
