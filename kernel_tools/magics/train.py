"""`%remote_train`: check, sync, launch, watch."""

from __future__ import annotations

import argparse
from typing import Any

from IPython.core.magic import Magics, magics_class
from IPython.core.magic_arguments import argument

from kernel_tools.errors import InvalidArgumentError
from kernel_tools.magics.arguments import launch_arguments, launch_options, magic, parse


@magics_class
class TrainMagics(Magics):  # type: ignore[misc]
    """Launching."""

    @magic(
        argument(
            "config",
            nargs="?",
            metavar="CONFIG",
            help="configuration: a path, or a name such as coins/hgnetv2_n"
            " (with --resume RUN by default that run's own)",
        ),
        argument(
            "--resume",
            metavar="RUN|PATH",
            help="go on from the last checkpoint of that run, or from that file here or on the hub"
            " (hf://ORG/REPO)",
        ),
        argument(
            "--from-receipt",
            metavar="FILE|RUN",
            help="run again what a receipt.json, or a run that has ended, tells",
        ),
        launch_arguments,
    )
    def remote_train(self, line: str) -> Any:
        """Train on the remote and return the `Run`.

        Where a person looks on it returns at once and a live panel follows the run. In a notebook that
        a program executes it blocks, and a failed run fails the cell. The run itself needs neither.

        Examples::

            %remote_train coins/hgnetv2_n --dataset coins
            run = %remote_train coins/hgnetv2_n --nproc-per-node 2 --set solver.epochs=20
            %remote_train {config} --set solver.lr={lr} --max-hours 2 --max-restarts 3
            %remote_train --resume 3f2a
            %remote_train --from-receipt artifacts/remote/20260102-030405-coins-3f2a/receipt.json
        """
        from kernel_tools.launching.launch import LaunchPlan
        from kernel_tools.magics.runs import watch
        from kernel_tools.session import default_session
        from kernel_tools.views.mode import current_mode

        args = parse(self.remote_train, line)
        mode = current_mode(shell=self.shell)
        if args.from_receipt is not None:
            options = _changed(args, self.remote_train.parser)  # type: ignore[attr-defined]
            run = default_session().run_again(args.from_receipt, report=print, **options)
        elif args.config is None and args.resume is None:
            raise InvalidArgumentError(
                "CONFIG is needed, or --resume RUN, or --from-receipt FILE.",
                hint="For instance %remote_train coins/hgnetv2_n; %remote_train? shows its options.",
            )
        else:
            run = default_session().train(
                args.config,
                overrides=args.overrides,
                resume=args.resume,
                report=print,
                **launch_options(args),
            )
        return run if isinstance(run, LaunchPlan) else watch(run, mode=mode, wait=args.wait)


def _changed(args: argparse.Namespace, parser: argparse.ArgumentParser) -> dict[str, Any]:
    """The options that were given beside `--from-receipt`; the others are the receipt's."""
    for name in ("config", "resume", "overrides", "dataset"):
        if getattr(args, name):
            said = {"config": args.config, "overrides": "--set"}.get(name, f"--{name}")
            raise InvalidArgumentError(
                f"{said} does not go with --from-receipt, which runs the same again.",
                hint="For another training leave it out; %remote_train? shows the options.",
            )
    names = {"dataset": "datasets", "artifact": "artifacts", "sync_path": "sync_paths"}
    given = launch_options(args)
    for action in parser._actions:  # noqa: SLF001 - argparse has no public list
        name = names.get(action.dest, action.dest)
        if name in given and getattr(args, action.dest) == action.default:
            del given[name]
    return given
