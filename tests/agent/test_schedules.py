"""Generated schedules over launch, poll, stop, attach, faults and clock jumps; a stub trainer under the real agent.

Whatever the order: no illegal transition is seen, no state is terminal without evidence, one run_id has at
most one set of processes, and in the end nothing of the run works on. Unmarked tests run a tenth of the
series; `campaign` is all of it.
"""

import os
import shutil
import signal
import tempfile
import time

import pytest
from kernel_tools_agent import control, files, heart, launch, monitor, processes

hypothesis = pytest.importorskip("hypothesis")
state = pytest.importorskip("kernel_tools.state")

from hypothesis import HealthCheck, Phase, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from hypothesis.stateful import (  # noqa: E402
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from .conftest import TERMINAL, Remote, wait_until  # noqa: E402

WHOLE, PART = 500, 50
RUN = "run"
STEPS = 30
# Short, so that a schedule is; the product's own is in `heart` and longer.
STALE_SECONDS = 4.0
KILLED = ("agent", "watchdog", "trainer", "rank 0", "rank 1", "all")


class Watcher:
    """A notebook that looks at the run: what it saw, reduced as the product does."""

    def __init__(self):
        self.snapshot = state.RunSnapshot(run_id=RUN, name=RUN)
        self.offset = 0
        self.log = b""
        self.lost = False
        self.age = 0.0
        self.illegal = []

    def look(self, remote):
        if self.lost:
            self._take(state.ContactLost(self.age))
            return
        answer = remote.poll(RUN, log_offset=self.offset)
        from .conftest import log_text

        text = log_text(answer)
        assert answer["log"]["offset"] == self.offset
        self.offset += len(text.encode())
        self.log += text.encode()
        self._take(
            state.Polled(
                status=answer["status"],
                agent=answer["agent"],
                agent_alive=answer["agent_alive"],
                boot_id=answer["boot_id"],
                agent_heartbeat_age_seconds=answer["agent_heartbeat_age_seconds"],
                log_text=text,
                log_size=answer["log"]["size"],
                artifacts=answer["artifacts"],
                status_whole=answer["status_whole"],
            )
        )

    def _take(self, event):
        before = self.snapshot
        self.snapshot = state.reduce(before, event)
        if not state.may_follow(before.state, self.snapshot.state):
            self.illegal.append((before.state, self.snapshot.state))
        if isinstance(event, state.ContactLost):
            assert self.snapshot.state is before.state, "lost contact is no state"


class Runs(RuleBasedStateMachine):
    """One run, whoever does what to it."""

    def __init__(self):
        super().__init__()
        self.folder = tempfile.mkdtemp(prefix="kt-")
        self.remote = Remote(os.path.join(self.folder, "remote"))
        self.watchers = [Watcher()]
        # What rules depend on is what was asked, never what came of it: schedules must repeat.
        self.laid = self.launched = self.kill_asked = self.freeze_asked = False
        self.stopped = self.timed_out = False
        self.killed = set()
        self.frozen = []
        self.agents = set()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(heart, "STALE_SECONDS", STALE_SECONDS)
        self.patch.setattr(state, "STALE_HEARTBEAT_SECONDS", STALE_SECONDS)

    @initialize(
        ranks=st.integers(1, 2),
        fault=st.sampled_from(["", "", "raise", "kill", "exit", "crash-once", "ignore-sigterm"]),
        restarts=st.integers(0, 2),
        obey=st.sampled_from(["yes", "yes", "no"]),
        timeout=st.sampled_from([None, None, None, 1.0]),
    )
    def lay(self, ranks, fault, restarts, obey, timeout):
        self.fault, self.restarts, self.ranks = fault, restarts, ranks
        self.timeout = timeout
        self.job = self.remote.job(
            RUN,
            "--steps", str(STEPS), "--ranks", str(ranks), "--fault", fault, "--obey", obey,
            max_restarts=restarts,
            limits={"grace_seconds": 1, "stall_minutes": None, "timeout_seconds": timeout},
        )  # fmt: skip

    # What people and machines do ------------------------------------------------------------

    @rule()
    def start(self):
        """Also a launch whose reply was lost, from anywhere."""
        self.laid = True
        told = self.remote.launch_job(self.job)
        assert not (told["started"] and self.launched), "a run was started twice"
        self.launched = True

    @precondition(lambda self: not self.launched)
    @rule()
    def start_that_dies_before_its_agent(self):
        self.laid = True
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(launch, "_start", lambda run_dir: False)
            assert self.remote.launch_job(self.job)["started"] is False

    @precondition(lambda self: self.laid)
    @rule(now=st.booleans())
    def stop(self, now):
        if self.remote.stop(RUN, now=now)["asked"]:
            self.stopped = True

    @precondition(lambda self: self.laid)
    @rule(which=st.integers(0, 3))
    def look(self, which):
        self.watchers[which % len(self.watchers)].look(self.remote)

    @precondition(lambda self: len(self.watchers) < 4)
    @rule()
    def attach(self):
        self.watchers.append(Watcher())

    @rule(which=st.integers(0, 3), lost=st.booleans())
    def contact(self, which, lost):
        self.watchers[which % len(self.watchers)].lost = lost

    @rule(which=st.integers(0, 3), seconds=st.sampled_from([-3600.0, 5.0, 60.0, 1e6]))
    def laptops_clock_jumps(self, which, seconds):
        watcher = self.watchers[which % len(self.watchers)]
        watcher.age = max(0.0, watcher.age + seconds)

    @rule(seconds=st.sampled_from([-7200, 7200, 10**8]))
    def hosts_wall_clock_jumps(self, seconds):
        """For whoever looks from now on; what is decided on must not be read from it."""
        real = time.time
        self.patch.setattr(files, "utc_now", lambda: f"{real() + seconds}")
        self.patch.setattr(monitor, "utc_now", lambda: f"{real() + seconds}")

    @precondition(lambda self: self.launched and not self.kill_asked)
    @rule(who=st.sampled_from(KILLED))
    def kill(self, who):
        self.kill_asked = True
        pids = self.pids(who)
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                continue
            self.killed.add(who)

    @precondition(lambda self: self.launched and not self.freeze_asked)
    @rule(who=st.sampled_from(["agent", "trainer"]))
    def freeze(self, who):
        self.freeze_asked = True
        for pid in self.pids(who):
            try:
                os.kill(pid, signal.SIGSTOP)
            except OSError:
                continue
            self.frozen.append(pid)

    @precondition(lambda self: self.freeze_asked)
    @rule()
    def thaw(self):
        self.freeze_asked = False
        for pid in self.frozen:
            try:
                os.kill(pid, signal.SIGCONT)
            except OSError:
                continue
        self.frozen = []

    @rule(seconds=st.sampled_from([0.05, 0.3, 0.8]))
    def time_goes_by(self, seconds):
        time.sleep(seconds)

    # What must hold -------------------------------------------------------------------------

    @property
    def there(self):
        return os.path.isdir(self.remote.dir(RUN))

    def pids(self, who):
        agent = (self.remote.poll(RUN)["agent"] or {}) if self.there else {}
        if who == "all":
            return sorted(self.remote.all_processes(RUN), key=lambda pid: pid != agent.get("pid"))
        if who == "agent":
            return [agent["pid"]] if agent.get("pid") else []
        if who in {"watchdog", "trainer"}:
            pid = (agent.get(who) or {}).get("pid")
            return [pid] if pid in self.remote.all_processes(RUN) else []
        wanted = int(who.split()[1])
        alive = self.remote.processes(RUN)
        return [
            r["pid"] for r in agent.get("ranks") or () if r["rank"] == wanted and r["pid"] in alive
        ]

    @invariant()
    def every_transition_is_legal(self):
        for watcher in self.watchers:
            assert watcher.illegal == []

    @invariant()
    def one_set_of_processes(self):
        if not self.launched:
            return
        owner = files.read_json(os.path.join(self.remote.dir(RUN), "launch.lock"))
        if owner is not None:
            self.agents.add((owner["pid"], owner["start_time"]))
        assert len(self.agents) <= 1
        with open(os.path.join(self.remote.dir(RUN), "train.log"), "rb") as stream:
            started = stream.read().count(b"trainer_started")
        assert started <= 1 + self.restarts
        found = processes.of_run(self.remote.dir(RUN))
        roots = [  # a rank that was forked this moment has yet to get its RANK
            row
            for row in found.values()
            if row.parent not in found and "RANK" not in processes.environment_of(row.pid)
        ]
        assert len(roots) <= 1, "two launchers of one run"

    @invariant()
    def no_terminal_state_without_evidence(self):
        if not self.there:
            return
        for watcher in self.watchers:
            self.check(watcher.snapshot.state.value, watcher.snapshot)

    def check(self, found, snapshot):
        """Whether what was done to the run can have led to this end."""
        if found not in TERMINAL:
            return
        log = self.remote.text(RUN, "train.log")
        if found == "completed":
            assert f"step={STEPS}/{STEPS}" in log
            assert "run_ended=completed" in log
        elif found == "stopped":
            assert self.stopped
        elif found == "timed_out":
            assert self.timeout is not None
            request = control.read_stop(self.remote.dir(RUN))
            assert request is not None
            assert request.reason == "timed_out"
        else:
            faults = {"raise", "kill", "exit", "crash-once"}
            assert self.killed or self.fault in faults, snapshot.message
            if "heartbeat" in snapshot.message or snapshot.message.startswith(
                "the agent was killed"
            ):
                assert self.killed & {"agent", "all"}, snapshot.message

    def teardown(self):
        try:
            self.end()
        finally:
            self.patch.undo()
            for pid in self.remote.all_processes(RUN) if self.there else ():
                os.kill(pid, signal.SIGKILL)
            shutil.rmtree(self.folder, ignore_errors=True)

    def end(self):
        if self.frozen:
            self.thaw()
        if not self.launched:
            return
        if not self.killed:
            self.remote.stop(RUN, now=True)
            self.stopped = True
        one = Watcher()

        def over():
            one.look(self.remote)
            return one.snapshot.terminal

        wait_until(over, 60, "the run has a terminal state")
        self.check(one.snapshot.state.value, one.snapshot)
        wait_until(lambda: not self.remote.all_processes(RUN), 40, "nothing works on")
        last = self.remote.poll(RUN)["status"]["state"]
        wait_until(
            lambda: self.remote.poll(RUN)["status"]["state"] in TERMINAL, 40, f"no end: {last}"
        )
        for watcher in self.watchers:
            watcher.lost = False
            watcher.look(self.remote)
            watcher.look(self.remote)
            assert watcher.snapshot.terminal
            self.check(watcher.snapshot.state.value, watcher.snapshot)
            with open(os.path.join(self.remote.dir(RUN), "train.log"), "rb") as stream:
                assert stream.read().startswith(watcher.log)
        self.every_transition_is_legal()
        self.one_set_of_processes()


def play(examples):
    run_state_machine_as_test(
        Runs,
        settings=settings(
            max_examples=examples,
            stateful_step_count=12,
            deadline=None,
            derandomize=True,
            database=None,
            report_multiple_bugs=False,
            phases=[Phase.generate],  # what processes do is not to be shrunk, but to be read
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_tenth_of_the_schedules():
    play(PART)


@pytest.mark.campaign
@pytest.mark.slow
@pytest.mark.timeout(4 * 3600)
def test_the_whole_series():
    play(WHOLE)
