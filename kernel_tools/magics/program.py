"""`%remote_run`: any program on the remote, as a run like every other."""

from __future__ import annotations

from typing import Any

from IPython.core.magic import Magics, magics_class
from IPython.core.magic_arguments import argument

from kernel_tools.errors import InvalidArgumentError
from kernel_tools.magics.arguments import (
    launch_options,
    magic,
    parse_with_rest,
    program_arguments,
)


@magics_class
class ProgramMagics(Magics):  # type: ignore[misc]
    """Launching what is not the detector."""

    @magic(
        argument(
            "preset",
            choices=("custom",),
            metavar="custom",
            help="custom: what --script or --command names",
        ),
        argument(
            "--script",
            metavar="PATH",
            help="Python file of the project, run under torchrun; its folder travels",
        ),
        argument(
            "--command",
            metavar="LINE",
            help="command line, in quotes, run once in the run's work folder",
        ),
        argument(
            "--status-dir",
            metavar="DIR",
            help="folder in the work folder whose status.json (in LibreYOLO's manner) is watched"
            " (default: the run directory, which RUN_DIR names)",
        ),
        program_arguments,
    )
    def remote_run(self, line: str) -> Any:
        """Run a script or any command on the remote and return the `Run`.

        What follows ` -- ` are the program's own arguments. State, log, GPU figures and artifacts are
        there whatever it is; a trainer that writes a status file is watched with figures and curves too.

        Examples::

            %remote_run custom --script tools/train.py --nproc-per-node 2 -- --epochs 3
            %remote_run custom --command "libreyolo train data=coco128.yaml" --status-dir "runs/*/*"
        """
        from kernel_tools.launching.launch import LaunchPlan
        from kernel_tools.magics.runs import watch
        from kernel_tools.session import default_session
        from kernel_tools.views.mode import current_mode

        args, rest = parse_with_rest(self.remote_run, line)
        if (args.script is None) == (args.command is None):
            raise InvalidArgumentError(
                "%remote_run custom needs either --script or --command.",
                hint='For instance --command "python train.py"; %remote_run? shows the options.',
            )
        mode = current_mode(shell=self.shell)
        session = default_session()
        launch = session.run_command if args.script is None else session.run_script
        run = launch(
            args.command if args.script is None else args.script,
            rest,
            status_dir=args.status_dir,
            report=print,
            **launch_options(args),
        )
        return run if isinstance(run, LaunchPlan) else watch(run, mode=mode, wait=args.wait)
