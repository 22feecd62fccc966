"""What a value hands a notebook: bodies by MIME type, of which the front end may want only some."""

from __future__ import annotations

import base64
from collections.abc import Collection, Mapping

from kernel_tools.views import markup


def wanted(
    bundle: Mapping[str, str], include: Collection[str] | None, exclude: Collection[str] | None
) -> dict[str, str]:
    """Return the part of a bundle that IPython asks for; no `include` means all."""
    return {
        kind: body
        for kind, body in bundle.items()
        if (not include or kind in include) and kind not in (exclude or ())
    }


def picture_bundle(image: bytes, kind: str, *, alt: str, plain: str) -> dict[str, str]:
    """Return an encoded picture as itself, as HTML with its alternative text, and in words.

    Args:
        image: the bytes of a whole file.
        kind: its MIME type, such as `image/png`.
        alt: what it shows; redacted and escaped here.
        plain: what stands where no picture can.
    """
    body = base64.b64encode(image).decode("ascii")
    return {
        "text/plain": plain,
        kind: body,
        "text/html": f'<img alt="{markup.text(alt)}" style="max-width:100%;height:auto"'
        f' src="data:{kind};base64,{body}">',
    }
