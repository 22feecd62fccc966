"""`%stage_dataset`: data goes to object storage once and is named ever after."""

from __future__ import annotations

from typing import Any

from IPython.core.magic import Magics, magics_class
from IPython.core.magic_arguments import argument

from kernel_tools.magics.arguments import magic, on_argument, parse


@magics_class
class StageMagics(Magics):  # type: ignore[misc]
    """Data sets."""

    @magic(
        argument(
            "path",
            nargs="?",
            metavar="PATH",
            help="folder or archive (.tar .tar.gz .tgz .zip); without it, --object-name is already there",
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
        argument("--to", default="s3", metavar="s3", help="store (default: s3)"),
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
        """
        from kernel_tools.session import default_session
        from kernel_tools.views.static import dataset_view
        from kernel_tools.views.transfer import TransferDisplay

        args = parse(self.stage_dataset, line)
        progress = TransferDisplay(f"staging {args.name or args.path or args.object_name}")
        reference = default_session().stage_dataset(
            args.path,
            name=args.name,
            object_name=args.object_name,
            expected_root=args.expected_root,
            sha256=args.sha256,
            to=args.to,
            force=args.force,
            dry_run=args.dry_run,
            on=args.on,
            on_progress=progress.update,
        )
        progress.finish()
        if args.dry_run:
            return dataset_view(reference, standing="would be staged; nothing was sent")
        return reference
