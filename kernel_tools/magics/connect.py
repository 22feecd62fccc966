"""`%remote_connect`, `%remote_info`, `%remote_disconnect`, `%remote_sync`: the way to the remote, and the code on it."""

from __future__ import annotations

import time
from typing import Any

from IPython.core.magic import Magics, magics_class
from IPython.core.magic_arguments import argument

from kernel_tools.magics.arguments import (
    magic,
    on_argument,
    parse,
    positive_number,
    sync_arguments,
)


@magics_class
class ConnectMagics(Magics):  # type: ignore[misc]
    """Connections."""

    @magic(
        argument(
            "target",
            nargs="?",
            metavar="URL|local",
            help="a Jupyter server's URL, or local for one of ours on loopback"
            " (default: KAGGLE_PROXY_URL, then PYRUN_JUPYTER_URL, from the environment or .env)",
        ),
        argument(
            "--token-env",
            metavar="VARIABLE",
            help="the NAME of the variable that holds the server's token",
        ),
        argument(
            "--kernel-name",
            default="python3",
            metavar="SPEC",
            help="kernel to start (default: python3)",
        ),
        argument(
            "--attach",
            metavar="KERNEL_ID",
            help="use this running kernel; it is never interrupted, restarted or stopped",
        ),
        argument(
            "--client",
            choices=("pyrun", "jupyter"),
            metavar="pyrun|jupyter",
            help="library that talks to the kernel: pyrun-jupyter (noncommercial licence) or"
            " jupyter-kernel-client (BSD-3) (default: pyrun where it is installed)",
        ),
        argument(
            "--password-env",
            metavar="VARIABLE",
            help="the NAME of the variable that holds the password of the server's login page",
        ),
        argument(
            "--keep-alive",
            type=positive_number,
            metavar="MINUTES",
            help="run an empty cell that often, so that an idle session is not ended; see whether your"
            " provider's rules allow it (default: never)",
        ),
        argument("--remote-dir", metavar="DIR", help="folder of everything of ours on the remote"),
        argument("--as", dest="name", metavar="NAME", help="name of the connection, for --on"),
    )
    def remote_connect(self, line: str) -> Any:
        """Connect to a remote Jupyter kernel; later magics use it.

        Examples::

            %remote_connect local
            %remote_connect
            %remote_connect https://gpu.example.org/ --token-env GPU_TOKEN --as gpu
        """
        from kernel_tools.session import default_session

        args = parse(self.remote_connect, line)
        return default_session().connect(
            args.target,
            token_env=args.token_env,
            kernel_name=args.kernel_name,
            attach=args.attach,
            client=args.client,
            remote_dir=args.remote_dir,
            name=args.name,
            password_env=args.password_env,
            keep_alive_minutes=args.keep_alive,
        )

    @magic(
        argument(
            "--dataset",
            action="append",
            metavar="REF",
            help="a staged data set that the disk is to hold (repeatable; default: all of the project)",
        ),
        on_argument,
    )
    def remote_info(self, line: str) -> Any:
        """Show what the remote can do, each check a row: cards, versions, disk, clock, store.

        Every card multiplies two matrices, the store is asked from there, and the disk to rent is
        counted. It changes nothing there and takes no longer than a minute or so.

        Examples::

            %remote_info
            %remote_info --dataset coins
        """
        from kernel_tools.session import default_session

        args = parse(self.remote_info, line)
        return default_session().info(datasets=args.dataset, on=args.on)

    @magic(
        on_argument,
    )
    def remote_disconnect(self, line: str) -> None:
        """Let go of a connection; runs go on, and the message says which.

        Only a kernel or server that was started from here and that no run needs is stopped.
        """
        from kernel_tools.session import default_session
        from kernel_tools.views import follow

        args = parse(self.remote_disconnect, line)
        session = default_session()
        print(session.disconnect(args.on))
        follow.let_go(session.connections)

    @magic(
        argument("--dry-run", action="store_true", help="show what would travel, send nothing"),
        sync_arguments,
        on_argument,
    )
    def remote_sync(self, line: str) -> Any:
        """Bring the project's code to the remote, and report what travelled.

        Launching does the same by itself; this looks at it alone.

        Examples::

            %remote_sync --dry-run
            %remote_sync --sync-path tools --exclude "*.csv"
        """
        from kernel_tools.session import default_session
        from kernel_tools.views.answers import sync_view

        args = parse(self.remote_sync, line)
        started = time.monotonic()
        result = default_session().sync(
            sync_paths=args.sync_path,
            exclude=args.exclude,
            allow_large=args.allow_large,
            dry_run=args.dry_run,
            on=args.on,
        )
        return sync_view(result, seconds=time.monotonic() - started)
