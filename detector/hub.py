"""Weights on the Hugging Face Hub: `hf://ORG/NAME[@REVISION][/FILE]` to a file in the hub's cache.

The only module that imports huggingface_hub. The cache is where HF_HOME says, a private or gated
repository needs HF_TOKEN, and no sentence from here shows the token.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote

PREFIX: Final = "hf://"
USUAL_FILE: Final = "model.safetensors"
WEIGHTS_SUFFIXES: Final = (".safetensors", ".pth", ".pt", ".bin")

_NAME = r"[A-Za-z0-9][\w.-]*"
_REFERENCE: Final = re.compile(
    rf"hf://(?P<repository>{_NAME}/{_NAME})(?:@(?P<revision>[^/@]+))?(?:/(?P<file>[^@]+))?"
)


class HubError(ValueError):
    """The hub does not give the file; the message is one sentence."""


@dataclass(frozen=True, slots=True)
class HubReference:
    """Which file of which repository.

    Attributes:
        repository: `ORG/NAME`.
        revision: a branch, tag or commit; None for the default branch.
        file: its path in the repository; None for the one weights file it has.
    """

    repository: str
    revision: str | None = None
    file: str | None = None

    @classmethod
    def parse(cls, text: str) -> HubReference:
        """Read `hf://ORG/NAME[@REVISION][/FILE]`; a slash in a revision is written %2F.

        Raises:
            HubError: it is not of that form.
        """
        found = _REFERENCE.fullmatch(text)
        if found is None:
            raise HubError(
                f"{text} is no place on the hub: write hf://ORG/NAME, hf://ORG/NAME@REVISION or "
                "hf://ORG/NAME/FILE."
            )
        revision = found["revision"]
        return cls(found["repository"], revision and unquote(revision), found["file"])

    def __str__(self) -> str:
        revision = f"@{self.revision}" if self.revision else ""
        return f"{PREFIX}{self.repository}{revision}" + (f"/{self.file}" if self.file else "")


def fetch(reference: HubReference) -> Path:
    """Return the file in the hub's cache, downloaded where it is not there yet.

    Without a name it is `model.safetensors`, else the one weights file that the repository has.

    Raises:
        HubError: huggingface_hub is not installed, the hub cannot be reached, or has no such file.
    """
    try:
        import huggingface_hub as hub
        from huggingface_hub import errors
    except ImportError:
        raise HubError(
            f"{reference} needs the package huggingface_hub: pip install huggingface_hub."
        ) from None
    where = f"{reference.repository} on the hub"
    try:
        return _download(hub, errors, reference)
    except HubError:
        raise
    # From None, since the cause's text may hold the token; a subclass stands before its base.
    except errors.GatedRepoError:
        raise HubError(f"{where} is gated: accept its terms there and set HF_TOKEN.") from None
    except errors.RepositoryNotFoundError:
        raise HubError(
            f"There is no public {where}; if it is a private one, set HF_TOKEN to a token that may "
            "read it."
        ) from None
    except errors.RevisionNotFoundError:
        raise HubError(f"{where} has no revision {reference.revision}.") from None
    except errors.LocalEntryNotFoundError:
        raise HubError(
            f"{reference} is not in the cache, and the hub cannot be reached from here: check the "
            "network and HF_HUB_OFFLINE, or give the path of a file."
        ) from None
    except errors.EntryNotFoundError:
        raise HubError(f"{where} has no file {reference.file}.") from None
    except Exception as error:  # noqa: BLE001 - what a connection raises depends on the client's version
        raise HubError(f"{reference} cannot be fetched: {_safe_line(error, hub)}.") from None


def _download(hub: Any, errors: Any, reference: HubReference) -> Path:
    if reference.file is not None:
        return _one(hub, reference, reference.file)
    try:
        return _one(hub, reference, USUAL_FILE)
    except errors.LocalEntryNotFoundError:
        raise
    except errors.EntryNotFoundError:
        info = hub.HfApi().model_info(reference.repository, revision=reference.revision)
        files = [sibling.rfilename for sibling in info.siblings or ()]
        return _one(hub, reference, _choose(reference, files))


def _one(hub: Any, reference: HubReference, file: str) -> Path:
    return Path(hub.hf_hub_download(reference.repository, file, revision=reference.revision))


def _choose(reference: HubReference, files: Sequence[str]) -> str:
    """The one weights file among those of a repository."""
    found = [file for file in files if file.endswith(WEIGHTS_SUFFIXES)]
    if not found:
        raise HubError(
            f"{reference.repository} on the hub has no weights file: nothing that ends in "
            f"{', '.join(WEIGHTS_SUFFIXES)}."
        )
    if len(found) > 1:
        raise HubError(
            f"{reference.repository} on the hub has {len(found)} weights files; name one, such as "
            f"{HubReference(reference.repository, reference.revision, found[0])}."
        )
    return found[0]


def _safe_line(error: BaseException, hub: Any) -> str:
    line = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
    for token in {os.environ.get("HF_TOKEN"), hub.get_token()} - {None, ""}:
        line = line.replace(str(token), "***").replace(str(token).strip(), "***")
    return line
