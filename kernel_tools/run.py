"""Run: what a user holds. It watches one remote run and never owns it.

Losing the object, the kernel or the laptop changes nothing on the remote. Watching is in `watch.py`,
fetching in `fetch.py`, drawing in `views/`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from kernel_tools.errors import FetchError, RunFailed
from kernel_tools.redact import redact
from kernel_tools.results.fetch import BringsFiles, Fetched, fetch_files, read_document
from kernel_tools.runs.mirror import RunMirror
from kernel_tools.runs.registry import RunRecord
from kernel_tools.runs.watch import CallsAgent, RunWatcher, StopWanted
from kernel_tools.state import RunSnapshot, RunState

if TYPE_CHECKING:
    from kernel_tools.receipt import Receipt
    from kernel_tools.results.evaluation import Evaluation
    from kernel_tools.views.figures import Figure
    from kernel_tools.views.pictures import Picture


@dataclass(frozen=True, slots=True, repr=False)
class StopAnswer:
    """What came of a stop, in one sentence where it is shown.

    Attributes:
        run_id: of which run.
        state: as last seen.
        asked: True where the run was told.
        pending: True where it cannot be reached, and will be told later.
    """

    run_id: str
    state: RunState
    asked: bool = False
    pending: bool = False

    def __repr__(self) -> str:
        if self.pending:
            return (
                f"{self.run_id} cannot be reached, so it goes on for now; it is asked to stop as soon as"
                " it answers, as long as this session lives."
            )
        if self.state.terminal:
            return f"{self.run_id} has ended: {self.state.value}."
        return (
            f"{self.run_id} was asked to stop ({self.state.value});"
            f" %remote_wait {self.run_id} --no-check waits for it."
        )


class AgentLink(CallsAgent, BringsFiles, Protocol):
    """What a run needs of the connection it is reached through."""


class Run:
    """A remote run: `status()`, `logs()`, `wait()`, `stop()`, `fetch()`, `metrics()`, `plot()`."""

    def __init__(self, record: RunRecord, *, link: AgentLink, mirror: RunMirror) -> None:
        self.record = record
        self.link = link
        self._mirror = mirror
        self._watcher = RunWatcher(record, link=link, mirror=mirror)

    # What is known ---------------------------------------------------------------------------

    @property
    def id(self) -> str:
        """`YYYYMMDD-HHMMSS-<name>-<4 hex>`."""
        return self.record.run_id

    @property
    def state(self) -> RunState:
        """The state as last seen."""
        return self.snapshot.state

    @property
    def snapshot(self) -> RunSnapshot:
        """Everything as last seen; frozen."""
        return self._watcher.snapshot

    def status(self) -> dict[str, Any]:
        """Return `status.json` as it is now, with `contact` beside it; asks the remote once.

        A lost line is no error here: the last figures come back, and `contact` says how old they are.
        """
        snapshot = self._watcher.refresh_or_age()
        return {**snapshot.status, "state": snapshot.state.value, "contact": str(snapshot.contact)}

    def logs(self, n: int = 50) -> str:
        """Return the last `n` lines of the log, redacted.

        While a very long log is still on its way here, at most the last 200.
        """
        snapshot = self._watcher.refresh_or_age()
        text = "\n".join(snapshot.log_tail) if self._watcher.behind else self._mirror.log_tail()
        lines = text.rstrip("\n").split("\n")
        return redact("\n".join(lines[-n:])) if n > 0 else ""

    def log_path(self) -> Path:
        """Return the local log file: always a gapless prefix of the remote one."""
        return self._mirror.log_path

    def behind_the_remote(self) -> bool:
        """Return whether the log here still lacks lines that were there at the last look."""
        return self._watcher.behind

    def metrics(self) -> tuple[Mapping[str, Any], ...]:
        """Return `metrics.jsonl`, one row an epoch, so far."""
        return self._watcher.refresh_or_age().metrics

    # Watching --------------------------------------------------------------------------------

    def watch(self) -> Run:
        """Watch in the background, unless the run has ended; returns self."""
        self._watcher.start()
        return self

    def reconnected(self) -> None:
        """Watch on after the connection was made anew."""
        self._watcher.reconnected()

    def refresh(self) -> RunSnapshot:
        """Ask the remote now.

        Raises:
            KernelError, AgentError: it does not answer, or does not know the run.
        """
        return self._watcher.refresh()

    def subscribe(self, callback: Callable[[RunSnapshot], None]) -> Callable[[], None]:
        """Call `callback(snapshot)` from the watching thread on every change; returns the way out."""
        return self._watcher.subscribe(callback)

    def detach(self) -> None:
        """Stop watching; the run goes on."""
        self._watcher.close()

    def wait(self, timeout: float | None = None, *, check: bool = True) -> Run:
        """Block until the run has ended; `timeout` in seconds. Ctrl-C ends the waiting, never the run.

        Raises:
            RunFailed: it ended as failed or timed out (unless `check=False`).
            WaitTimeoutError: it goes on after `timeout`.
            KernelAuthError: the URL or token has expired, so that nothing more can be seen from here.
            AgentError: the remote answers, and does not know the run.
        """
        try:
            self._watcher.wait(timeout)
        except KeyboardInterrupt:
            print(
                f"Detached: {self.id} goes on. %remote_attach {self.id} comes back to it, "
                f"%remote_stop {self.id} ends it.",
                file=sys.stderr,
            )
            raise
        if check:
            self.raise_for_state()
        return self

    def raise_for_state(self) -> None:
        """Raise `RunFailed` if the run has ended as failed or timed out."""
        snapshot = self.snapshot
        if snapshot.state not in {RunState.FAILED, RunState.TIMED_OUT}:
            return
        error = snapshot.figure("error")
        cause = snapshot.message or "no reason was recorded"
        if error and str(error.get("message") or "") not in cause:
            cause = f"{cause}: {error['message']}"
        raise RunFailed(
            f"{self.id} {snapshot.state.value.replace('_', ' ')}: {cause.rstrip('.')}.",
            hint=f"%remote_logs {self.id} shows its last lines.",
            run_id=self.id,
            state=snapshot.state.value,
            remote_error=error,
        )

    # Acting ----------------------------------------------------------------------------------

    def stop(self, *, now: bool = False, message: str = "stopped by the user") -> StopAnswer:
        """Ask for an end at the next step boundary, with a checkpoint; `now` kills instead.

        Returns at once; `wait()` waits for the end. Each case is defined: a second stop changes nothing
        but that `now` is added; a stop before the trainer starts keeps it from starting; one after the
        end asks nothing; one while contact is lost is said as soon as contact is back, as long as this
        object lives, and the run goes on until then.

        Raises:
            KernelAuthError, AgentError: the remote answers, and refuses.
        """
        if self.snapshot.terminal:
            return StopAnswer(self.id, self.state)  # whether the line is up or not
        if not self._watcher.stop(StopWanted(message, now)):
            return StopAnswer(self.id, self.state, pending=True)
        return StopAnswer(self.id, self._watcher.refresh_or_age().state, asked=True)

    @property
    def receipt(self) -> Receipt:
        """What ran, on what, with which hashes; there once the run has ended.

        Raises:
            FetchError: the run goes on, or left none.
        """
        from kernel_tools.receipt import Receipt

        path = self._mirror.folder / "receipt.json"
        if not (self.snapshot.terminal and path.is_file()):
            try:
                path = self.bring("receipt.json")
            except FetchError as error:
                raise FetchError(
                    f"{self.id} has no receipt yet ({self.state.value}).",
                    hint="It is written when the run has ended.",
                ) from error
        return Receipt.from_json(read_document(path))

    def fetch(
        self,
        *globs: str,
        to: str | Path | None = None,
        on_file: Callable[[str, int], None] | None = None,
    ) -> tuple[Fetched, ...]:
        """Bring files of the run directory here, each verified by SHA-256 and whole or not at all.

        Args:
            globs: patterns relative to the run directory (default: weights, figures, log, and
                what `--artifact` named).
            to: folder (default: `<artifact_dir>/<run_id>`).
            on_file: told each path and its size in bytes before it travels.

        Raises:
            FetchError: a named pattern fits nothing, or a file does not arrive whole.
        """
        return fetch_files(
            self.link,
            remote_dir=self.record.remote_dir,
            run_id=self.id,
            globs=globs,
            folder=self._folder if to is None else Path(to),
            artifacts=self.record.artifacts,
            on_file=on_file,
        )

    def bring(self, path: str) -> Path:
        """Bring one small file of the run directory beside the mirror of its log; return it.

        Raises:
            FetchError: there is no such file.
        """
        (file,) = self.fetch(path, to=self._mirror.folder)
        return file.path

    def document(self, path: str) -> Mapping[str, Any]:
        """Return a JSON document of the run directory, such as `job.json`.

        Raises:
            FetchError: there is none, or it is no JSON.
        """
        return read_document(self.bring(path))

    def export(
        self,
        kind: str = "onnx",
        *,
        to: str | Path | None = None,
        weights: str = "best",
        options: Sequence[str] = (),
    ) -> Path:
        """Write the run's weights as one file for elsewhere; print how it was checked, return its path.

        The weights are fetched first where they are not here, or where the run still writes them. The
        export itself runs on this machine.

        Args:
            kind: `onnx`, or `safetensors` for a slim file of the averaged weights.
            to: the file (default: beside the weights, such as `best.onnx`).
            weights: `best`, `last` or `epoch_<N>`.
            options: further words for `python -m detector export`, such as `["--half"]`.

        Raises:
            InvalidArgumentError: there is no such format.
            FetchError: the run has no such weights.
            MissingDependencyError: torch or onnx is not installed here; it says what to type.
            ExportError: the trainer refused; its sentence is the message.
        """
        from kernel_tools.results.exports import FORMATS, check_kind, export_weights

        check_kind(kind)
        path = self._folder / "weights" / f"{weights}.pt"
        if not (self.snapshot.terminal and path.is_file()):
            (fetched,) = self.fetch(f"weights/{weights}.pt")
            path = fetched.path
        destination = path.with_suffix(FORMATS[kind]) if to is None else Path(to)
        written, said = export_weights(path, to=destination, kind=kind, options=options)
        print(redact(said))
        return written

    # Showing ---------------------------------------------------------------------------------

    def plot(self) -> Figure:
        """Return the curves of loss and metrics as a figure that shows itself."""
        from kernel_tools.views.figures import plot_metrics

        return plot_metrics(self._watcher.refresh_or_age())

    def evaluation(self) -> Evaluation:
        """Return the run's last evaluation: figures, classes, curves, confusion; it shows itself.

        Raises:
            FetchError: there is none yet.
        """
        from kernel_tools.results.evaluation import FILES, read_evaluation

        files = self.fetch(*(f"evaluation/{name}" for name in FILES))
        return read_evaluation(files[0].path.parent, run_id=self.id)

    def pictures(self) -> tuple[Picture, ...]:
        """Return the pictures that the run drew (`%remote_visualize`); each shows itself.

        Raises:
            FetchError: it drew none, or they do not arrive whole.
        """
        from kernel_tools.views.pictures import read_picture

        return tuple(read_picture(file.path) for file in self.fetch("visualizations/*.png"))

    def show_predictions(
        self, n: int = 4, *, images_root: str | Path | None = None, worst_first: bool = False
    ) -> Figure:
        """Return photographs of the validation set with ground truth and predictions drawn in.

        Args:
            n: how many.
            images_root: the data set's folder here (default: where it was staged from).
            worst_first: begin with the pictures that went worst.

        Raises:
            FetchError: the photographs, or the predictions, are not to be had.
        """
        from kernel_tools.views.figures import show_predictions

        root = images_root or self.record.images_root
        if root is None or not Path(root).is_dir():
            raise FetchError(
                "the data set's photographs are not on this machine.",
                hint="Name their folder: run.show_predictions(images_root='data/...').",
            )
        (predictions,) = self.fetch("evaluation/predictions.json")
        return show_predictions(predictions.path, Path(root), n, worst_first=worst_first)

    @property
    def _folder(self) -> Path:
        return Path(self.record.artifact_dir) / self.id

    def __repr__(self) -> str:
        snapshot = self.snapshot
        steps, ranks = snapshot.figure("optimizer_steps"), snapshot.figure("world_size")
        known = f", world_size={ranks}, optimizer_steps={steps}" if steps is not None else ""
        return f"<Run {self.id}: {snapshot.state.value}{known}>"

    def _repr_mimebundle_(
        self, include: Sequence[str] | None = None, exclude: Sequence[str] | None = None
    ) -> dict[str, str]:
        from kernel_tools.views.summary import summary_mimebundle

        return summary_mimebundle(self.snapshot, include=include, exclude=exclude)
