"""`%stage_dataset`, `%store_ls`, `%store_rm`: data goes to object storage once, and leaves it when it may."""

from __future__ import annotations

import argparse
from typing import Any

from IPython.core.magic import Magics, magics_class
from IPython.core.magic_arguments import argument

from kernel_tools.errors import InvalidArgumentError
from kernel_tools.magics.arguments import magic, on_argument, parse, positive_number

store_argument = argument(
    "--to",
    default="s3",
    metavar="s3|hf://ORG/REPO",
    help="store: s3, the one that is configured or embedded, or a data set repository of the hub,"
    " private where it is made (default: s3)",
)
price_argument = argument(
    "--price",
    type=positive_number,
    metavar="$",
    help="of a GB (10^9 bytes) and month, to count with (default: 0.023, S3's list price)",
)


@magics_class
class StageMagics(Magics):  # type: ignore[misc]
    """Data sets."""

    @magic(
        argument(
            "paths",
            nargs="*",
            metavar="PATH",
            help="folders or archives (.tar .tar.gz .tgz .zip), each a data set; without one,"
            " --object-name is already there",
        ),
        argument(
            "--name", metavar="NAME", help="what --dataset calls it (default: the folder's name)"
        ),
        argument(
            "--object-name",
            metavar="OBJECT",
            help="key in the bucket (default: from name and hash)",
        ),
        argument(
            "--expected-root",
            metavar="ROOT",
            help="where it will lie in the work folder (default: data/<the archive's top folder>)",
        ),
        argument("--sha256", metavar="HASH", help="what the archive must hash to"),
        argument(
            "--config",
            metavar="CONFIG",
            help="take object, hash and root from this configuration's data.archive_object,"
            " data.archive_sha256 and data.root",
        ),
        store_argument,
        argument("--force", action="store_true", help="stage it although the checks object"),
        argument("--dry-run", action="store_true", help="pack and hash, upload nothing"),
        on_argument,
    )
    def stage_dataset(self, line: str) -> Any:
        """Pack, hash and upload a data set once; return a reference to it.

        The same content is never uploaded twice.

        Examples::

            %stage_dataset data/coins
            %stage_dataset data/vehicles3.tar.gz --name vehicles3 --expected-root data/vehicles3
            %stage_dataset --config vehicles3/hgnetv2_s
            %stage_dataset data/coins --to hf://my-name/coins
        """
        from kernel_tools.session import default_session
        from kernel_tools.views.store import dataset_view, rent_view
        from kernel_tools.views.transfer import TransferDisplay

        args = parse(self.stage_dataset, line)
        if len(args.paths) > 1:
            _refuse_for_several(args)
        references = []
        for path in args.paths or [None]:
            label = args.name or path or args.object_name or args.config
            progress = TransferDisplay(f"staging {label}")
            references.append(
                default_session().stage_dataset(
                    path,
                    name=args.name,
                    object_name=args.object_name,
                    expected_root=args.expected_root,
                    sha256=args.sha256,
                    config=args.config,
                    to=args.to,
                    force=args.force,
                    dry_run=args.dry_run,
                    on=args.on,
                    on_progress=progress.update,
                )
            )
            progress.finish()
        if len(references) == 1 and not args.dry_run:
            return references[0]
        standing = "would be staged; nothing was sent" if args.dry_run else "is staged"
        views = [dataset_view(reference, standing=standing) for reference in references]
        return views[0] if len(views) == 1 else rent_view(views, references)

    @magic(
        argument(
            "prefix",
            nargs="?",
            default="",
            metavar="NAME",
            help="a run, a data set, or the beginning of objects' names (default: all)",
        ),
        store_argument,
        price_argument,
        on_argument,
    )
    def store_ls(self, line: str) -> Any:
        """List what the store holds: whose it is, how large, what it costs a month, what a run needs.

        Examples::

            %store_ls
            %store_ls runs/
            %store_ls coins --price 0.015
        """
        from kernel_tools.session import default_session
        from kernel_tools.views.store import inventory_view

        args = parse(self.store_ls, line)
        found = default_session().store_objects(args.prefix, to=args.to, on=args.on)
        return inventory_view(found, price=args.price)

    @magic(
        argument(
            "names",
            nargs="+",
            metavar="NAME",
            help="objects, runs, data sets, or the beginning of objects' names with a final /",
        ),
        argument(
            "--yes", action="store_true", help="remove them; without it only what would go is shown"
        ),
        store_argument,
        price_argument,
        on_argument,
    )
    def store_rm(self, line: str) -> Any:
        """Show what would be removed from the store, and with --yes remove it.

        What a run needs that has not ended is never removed.

        Examples::

            %store_rm coins
            %store_rm 20260102-030405-coins-3f2a --yes
        """
        from kernel_tools.session import default_session
        from kernel_tools.views.store import inventory_view

        args = parse(self.store_rm, line)
        doomed = default_session().remove_objects(
            args.names, dry_run=not args.yes, to=args.to, on=args.on
        )
        return inventory_view(doomed, price=args.price, removing=True)


def _refuse_for_several(args: argparse.Namespace) -> None:
    for option in ("name", "object_name", "expected_root", "sha256", "config"):
        if getattr(args, option) is not None:
            raise InvalidArgumentError(
                f"--{option.replace('_', '-')} is for one data set; {len(args.paths)} were given.",
                hint="Stage that one by itself.",
            )
