"""`%remote_eval` and `%remote_visualize`: judge weights on the remote, and show here what came out."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from IPython.core.magic import Magics, magics_class
from IPython.core.magic_arguments import argument

from kernel_tools.magics.arguments import (
    compose,
    count,
    launch_arguments,
    launch_options,
    magic,
    parse,
)

if TYPE_CHECKING:
    from kernel_tools.run import Run
    from kernel_tools.views.static import Shows


def score(text: str) -> float:
    """Parse a number from 0 to 1 (an argparse type)."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to 1")
    return value


weights_arguments = compose(
    argument(
        "config",
        nargs="?",
        metavar="CONFIG",
        help="configuration (default: the one that the weights were trained with)",
    ),
    argument(
        "--run",
        metavar="RUN",
        help="whose weights: run id, or a part that fits one run (default: the last run)",
    ),
    argument(
        "--checkpoint",
        metavar="best|last|epoch_N|PATH",
        help="which weights; PATH is a file here, which travels, or an absolute path on the remote"
        " (default: the run's best, else its last)",
    ),
)


@magics_class
class JudgeMagics(Magics):  # type: ignore[misc]
    """Looking at weights."""

    @magic(
        weights_arguments,
        argument(
            "--calibrate",
            action="store_true",
            help="also count what scores are worth, for %%remote_visualize --calibration RUN",
        ),
        launch_arguments,
    )
    def remote_eval(self, line: str) -> Any:
        """Evaluate weights on the held-out pictures, and show figures, classes, curve and confusion.

        It is a run of its own, on the data of the run whose weights it looks at. Where a person looks on
        it returns at once, and the figures appear below its panel when it has ended. In a notebook that a
        program executes it blocks, and a failed evaluation fails the cell. `run.evaluation()` has the
        figures as values.

        Examples::

            %remote_eval
            run = %remote_eval --run 3f2a --checkpoint last --nproc-per-node 2
            %remote_eval coins/hgnetv2_n --checkpoint models/best.pt --dataset coins
        """
        from kernel_tools.session import default_session

        args = parse(self.remote_eval, line)
        run = default_session().evaluate(args.config, calibrate=args.calibrate, **_launch(args))
        return self._follow(run, args, figures_of, "The figures appear here when it has ended.")

    @magic(
        weights_arguments,
        argument(
            "--count", type=count, default=8, metavar="N", help="how many pictures (default: 8)"
        ),
        argument(
            "--min-score",
            type=score,
            default=0.5,
            metavar="S",
            help="least score of a prediction that is drawn (default: 0.5)",
        ),
        argument(
            "--calibration",
            metavar="RUN|FILE",
            help="an evaluation with --calibrate, or its file: p=<precision> is written beside raw=<score>",
        ),
        launch_arguments,
    )
    def remote_visualize(self, line: str) -> Any:
        """Draw ground truth and predictions on held-out pictures, and show them.

        As `%remote_eval`, it is a run of its own; `run.pictures()` brings the pictures as values.

        Examples::

            %remote_visualize
            %remote_visualize --run 3f2a --count 4 --min-score 0.3
            %remote_visualize --calibration 3f2a
        """
        from kernel_tools.session import default_session

        args = parse(self.remote_visualize, line)
        run = default_session().visualize(
            args.config,
            count=args.count,
            min_score=args.min_score,
            calibration=args.calibration,
            **_launch(args),
        )
        return self._follow(run, args, pictures_of, "The pictures appear here when it has ended.")

    def _follow(self, run: Any, args: argparse.Namespace, parts: Any, waiting: str) -> Any:
        from kernel_tools.launching.launch import LaunchPlan
        from kernel_tools.magics.runs import watch
        from kernel_tools.views import follow
        from kernel_tools.views.mode import current_mode

        if isinstance(run, LaunchPlan):
            return run
        mode = current_mode(shell=self.shell)
        watch(run, mode=mode, wait=args.wait)
        follow.present(run, parts, mode=mode, waiting=waiting)
        return run


def figures_of(run: Run) -> Sequence[Shows]:
    """Bring an evaluation's figures, ready to be shown."""
    from kernel_tools.views.judged import evaluation_parts

    return evaluation_parts(run.evaluation())


def pictures_of(run: Run) -> Sequence[Shows]:
    """Bring the pictures that a run drew."""
    return run.pictures()


def _launch(args: argparse.Namespace) -> dict[str, Any]:
    return {
        "run": args.run,
        "checkpoint": args.checkpoint,
        "overrides": args.overrides,
        "report": print,
        **launch_options(args),
    }
