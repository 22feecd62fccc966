"""`%%remote`: a cell of the notebook that runs on the remote kernel."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from IPython.core.magic import Magics, magics_class
from IPython.core.magic_arguments import argument

from kernel_tools.errors import InvalidArgumentError
from kernel_tools.magics.arguments import cell_magic, on_argument, parse

if TYPE_CHECKING:
    from kernel_tools.kernels.base import CellOutput


@magics_class
class RemoteMagics(Magics):  # type: ignore[misc]
    """Cells there."""

    @cell_magic(
        argument(
            "-o",
            "--output",
            action="append",
            default=[],
            metavar="NAME",
            help="bring this variable here when the cell has ended: JSON values, NumPy arrays (tensors"
            " become arrays), pandas frames; never a pickle (repeatable)",
        ),
        argument(
            "--push",
            action="append",
            default=[],
            metavar="NAME",
            help="send this variable of the notebook there before the cell runs (repeatable)",
        ),
        on_argument,
    )
    def remote(self, line: str, cell: str) -> None:
        """Run the cell on the remote kernel; its output appears as it comes.

        An error shows the remote's traceback. Ctrl-C interrupts it where the kernel is ours; in a kernel
        that is somebody else's it only ends the waiting. Long work belongs into a run: it needs no kernel.

        Examples::

            %%remote
            !nvidia-smi

            %%remote --push names -o counts
            counts = {name: len(list(Path(name).glob("*"))) for name in names}
        """
        from kernel_tools.session import default_session

        args = parse(self.remote, line)
        namespace: dict[str, Any] = self.shell.user_ns
        for name in args.push:
            if name not in namespace:
                raise InvalidArgumentError(f"--push {name}: there is no variable {name!r} here.")
        brought = default_session().execute(
            cell,
            push={name: namespace[name] for name in args.push},
            bring=args.output,
            on=args.on,
            on_output=show,
        )
        namespace.update(brought)


def show(output: CellOutput) -> None:
    """Show a piece of a remote cell's output as if it were this cell's."""
    if output.kind in {"stdout", "stderr"}:
        stream = sys.stdout if output.kind == "stdout" else sys.stderr
        stream.write(output.text)
        stream.flush()
        return
    from IPython.display import clear_output, publish_display_data

    if output.kind == "clear":
        clear_output(wait=True)
    else:
        publish_display_data(dict(output.data), dict(output.metadata))
