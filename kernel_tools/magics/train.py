"""`%remote_train`: check, sync, launch, watch."""

from __future__ import annotations

from typing import Any

from IPython.core.magic import Magics, magics_class
from IPython.core.magic_arguments import argument

from kernel_tools.magics.arguments import launch_arguments, magic, parse


@magics_class
class TrainMagics(Magics):  # type: ignore[misc]
    """Launching."""

    @magic(
        argument(
            "config",
            metavar="CONFIG",
            help="configuration: a path, or a name such as coins/hgnetv2_n",
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
            %remote_train {config} --set solver.lr={lr} --max-hours 2
        """
        from kernel_tools.launch import LaunchPlan
        from kernel_tools.magics.runs import watch
        from kernel_tools.session import default_session
        from kernel_tools.views.mode import current_mode

        args = parse(self.remote_train, line)
        mode = current_mode(shell=self.shell)
        run = default_session().train(
            args.config,
            overrides=args.overrides,
            nproc_per_node=args.nproc_per_node,
            device=args.device,
            datasets=args.dataset,
            artifacts=args.artifact,
            artifact_dir=args.artifact_dir,
            sync_paths=args.sync_path,
            exclude=args.exclude,
            allow_large=args.allow_large,
            timeout=args.timeout,
            max_hours=args.max_hours,
            stall_minutes=args.stall_minutes,
            name=args.name,
            dry_run=args.dry_run,
            on=args.on,
            report=print,
        )
        return run if isinstance(run, LaunchPlan) else watch(run, mode=mode, wait=args.wait)
