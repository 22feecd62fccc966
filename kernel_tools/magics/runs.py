"""`%remote_status|logs|wait|attach|runs|fetch|stop`: what to do with a run that was launched."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from IPython.core.magic import Magics, magics_class
from IPython.core.magic_arguments import argument

from kernel_tools.errors import KernelToolsError
from kernel_tools.magics.arguments import (
    count,
    magic,
    on_argument,
    parse,
    positive_number,
    run_argument,
)

if TYPE_CHECKING:
    from kernel_tools.run import Run
    from kernel_tools.views.mode import Mode


def watch(
    run: Run,
    *,
    mode: Mode,
    wait: bool | None = None,
    timeout_seconds: float | None = None,
    check: bool = True,
) -> Run:
    """Show a run as the mode asks, and block where it or `wait` says so. Returns the run.

    Ctrl-C detaches: a person gets the run back, a program that executes the notebook its interrupt.
    """
    from kernel_tools.views import Mode, follow

    if not (mode is not Mode.INTERACTIVE if wait is None else wait):
        follow.show(run, mode=mode)
        return run
    try:
        follow.follow(run, mode=mode, timeout_seconds=timeout_seconds, check=check)
    except KeyboardInterrupt:
        if mode is not Mode.INTERACTIVE:
            raise
    return run


@magics_class
class RunMagics(Magics):  # type: ignore[misc]
    """Runs."""

    @magic(
        run_argument,
        on_argument,
    )
    def remote_status(self, line: str) -> Any:
        """Ask how a run stands, and show it.

        Examples::

            %remote_status
            %remote_status 3f2a
        """
        from kernel_tools.views.summary import RunView

        args = parse(self.remote_status, line)
        run = _run(args)
        run.status()
        return RunView(run.snapshot)

    @magic(
        run_argument,
        argument(
            "-n",
            "--lines",
            type=count,
            default=50,
            metavar="N",
            help="how many lines (default: 50)",
        ),
        on_argument,
    )
    def remote_logs(self, line: str) -> None:
        """Print the last lines of a run's log.

        Examples::

            %remote_logs -n 20
        """
        args = parse(self.remote_logs, line)
        text = _run(args).logs(args.lines)
        print(text or "Nothing has been logged yet.")

    @magic(
        run_argument,
        argument(
            "--timeout",
            type=positive_number,
            metavar="SECONDS",
            help="give up waiting after so long",
        ),
        argument("--no-check", action="store_true", help="do not raise where the run failed"),
        on_argument,
    )
    def remote_wait(self, line: str) -> Any:
        """Block until a run has ended; raise if it failed. Ctrl-C ends the waiting, not the run.

        Examples::

            %remote_wait
            %remote_wait --timeout 600
        """
        from kernel_tools.views.mode import current_mode

        args = parse(self.remote_wait, line)
        return watch(
            _run(args),
            mode=current_mode(shell=self.shell),
            wait=True,
            timeout_seconds=args.timeout,
            check=not args.no_check,
        )

    @magic(
        argument(
            "run",
            metavar="RUN",
            help="run id, or a part that fits one run; %%remote_runs lists them",
        ),
        on_argument,
    )
    def remote_attach(self, line: str) -> Any:
        """Take up a run again, from any notebook: its panel, its log, its figures.

        Examples::

            run = %remote_attach 20260102-030405-coins-3f2a
            %remote_attach 3f2a
        """
        from kernel_tools.session import default_session
        from kernel_tools.views.mode import current_mode

        args = parse(self.remote_attach, line)
        run = default_session().attach(args.run, on=args.on)
        return watch(run, mode=current_mode(shell=self.shell), wait=False)

    @magic(
        on_argument,
    )
    def remote_runs(self, line: str) -> Any:
        """List the runs of this project and of the connected remote, newest first."""
        from kernel_tools.session import default_session
        from kernel_tools.views.answers import runs_table

        args = parse(self.remote_runs, line)
        return runs_table(default_session().runs(on=args.on))

    @magic(
        argument(
            "words",
            nargs="*",
            metavar="RUN",
            help="run ids, or parts that fit one run each (default: all runs of this session that"
            " do not only judge another's weights)",
        ),
        on_argument,
    )
    def remote_compare(self, line: str) -> Any:
        """Compare runs: what was told them differently, their figures and their curves.

        Examples::

            %remote_compare
            %remote_compare 3f2a 90c1 a7e4
        """
        from kernel_tools.session import default_session

        args = parse(self.remote_compare, line)
        return default_session().compare(*args.words, on=args.on)

    @magic(
        argument(
            "words",
            nargs="*",
            metavar="RUN|GLOB",
            help="run id (default: the last run), then patterns relative to the run's folder"
            " (default: weights, evaluation, rows, log, and what --artifact named)",
        ),
        argument("--to", metavar="DIR", help="folder (default: <artifact-dir>/<run id>)"),
        argument(
            "--from",
            dest="source",
            choices=("kernel", "store"),
            default="kernel",
            help="kernel|store: the run's machine, or what the run has pushed to the store, which is"
            " there when the machine is gone (default: kernel)",
        ),
        argument(
            "--push-to",
            metavar="hf://ORG/REPO",
            help="then put the best weights into this model repository of the hub, made private, with"
            " HF_TOKEN of this machine (default: where the launch's --push-to could not)",
        ),
        on_argument,
    )
    def remote_fetch(self, line: str) -> Any:
        """Bring files of a run here, each verified by its SHA-256 and whole or not at all.

        Examples::

            %remote_fetch
            %remote_fetch "weights/*.pt" --to models
            %remote_fetch 3f2a summary.json
            %remote_fetch 3f2a --from store
            %remote_fetch 3f2a --push-to hf://my-name/coins-detector
        """
        from kernel_tools.session import default_session
        from kernel_tools.settings import find_project_dir
        from kernel_tools.views.answers import files_table

        args = parse(self.remote_fetch, line)
        run_id, globs = split_run(args.words)
        find = default_session().stored_run if args.source == "store" else default_session().run
        run = find(run_id, on=args.on)
        fetched = run.fetch(*globs, to=args.to)
        try:
            where = default_session().push_weights(
                run.id, to=args.push_to, source=args.source, on=args.on
            )
        except KernelToolsError as error:
            if args.push_to is not None:
                raise
            where = None  # what was asked for here is done; what the launch asked for is not
            print(f"weights_not_pushed={error}")
        if where is not None:
            print(f"weights_pushed={where}")
        return files_table(fetched, relative_to=find_project_dir())

    @magic(
        run_argument,
        argument(
            "--now",
            action="store_true",
            help="kill it instead of asking; loses the steps since the last checkpoint",
        ),
        on_argument,
    )
    def remote_stop(self, line: str) -> None:
        """Ask a run to save a checkpoint at its next step and end.

        Examples::

            %remote_stop
            %remote_stop 3f2a --now
        """
        args = parse(self.remote_stop, line)
        print(_run(args).stop(now=args.now))


def split_run(words: list[str]) -> tuple[str | None, list[str]]:
    """Tell a leading run id from patterns: a pattern holds a `/`, `*`, `?` or `.`, an id none."""
    if words and not set(words[0]) & set("/*?.["):
        return words[0], words[1:]
    return None, words


def _run(args: Any) -> Run:
    from kernel_tools.session import default_session

    return default_session().run(args.run, on=args.on)
