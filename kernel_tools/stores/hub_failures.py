"""What `huggingface_hub` and its HTTP library raise and write, turned into errors of ours or kept quiet."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator
from typing import Any, Final

from kernel_tools.errors import (
    ObjectNotFoundError,
    StoreAuthError,
    StoreError,
    StoreUnreachableError,
)

# They write whole URLs, and a link to upload by is signed.
_TALKATIVE: Final = ("huggingface_hub", "httpx", "httpx2", "httpcore", "httpcore2", "urllib3")


def no_object(where: str, key: str) -> ObjectNotFoundError:
    """Return the error for an object that is not there."""
    return ObjectNotFoundError(
        f"There is no object {key} in {where}.",
        hint="Check the name; %stage_dataset PATH --to hf://ORG/REPO uploads a data set.",
    )


@contextlib.contextmanager
def translated(where: str, key: str, *, endpoint: str, has_token: bool) -> Iterator[None]:
    """Run a call of the client; whatever it raises leaves as a `StoreError` that holds no token.

    Args:
        where: `hf://ORG/REPO`, for messages.
        key: the object, likewise.
        endpoint: of the hub, likewise.
        has_token: whether one was sent.
    """
    from huggingface_hub import errors

    try:
        with _quiet():
            yield
    # From None: the texts and frames of the client hold the headers that it sent.
    except KeyboardInterrupt:
        raise KeyboardInterrupt from None
    except errors.GatedRepoError:
        raise StoreAuthError(
            f"{where} is gated.", hint="Accept its terms on the hub, and set HF_TOKEN."
        ) from None
    except errors.RepositoryNotFoundError:
        raise ObjectNotFoundError(
            f"There is no {where}, or none that HF_TOKEN may see.",
            hint="Check the name, and that HF_TOKEN is set.",
        ) from None
    except (errors.EntryNotFoundError, errors.RevisionNotFoundError):
        raise no_object(where, key) from None
    except errors.HfHubHTTPError as error:
        raise _refused(error, where, key, has_token) from None
    except errors.OfflineModeIsEnabled:
        raise StoreUnreachableError(
            f"HF_HUB_OFFLINE is set, so {where} cannot be asked.", hint="Unset it."
        ) from None
    except (OSError, RuntimeError) as error:
        cause = error.__cause__
        if isinstance(cause, errors.HfHubHTTPError):  # around the bytes of an upload
            raise _refused(cause, where, key, has_token) from None
        raise _unreachable(error, endpoint) from None
    except Exception as error:
        if type(error).__module__.startswith(("httpx", "httpcore", "requests", "urllib3")):
            raise _unreachable(error, endpoint) from None
        raise


def _refused(error: Any, where: str, key: str, has_token: bool) -> StoreError:
    status = getattr(error.response, "status_code", None)
    if status in {401, 403}:
        said = "refused HF_TOKEN" if has_token else "asks for a token"
        return StoreAuthError(
            f"The hub {said} for {where} ({status}).",
            hint="Set HF_TOKEN to a token that may write to it (environment or .env).",
        )
    return StoreError(f"The hub answered {status} for {key} in {where}.")


def _unreachable(error: BaseException, endpoint: str) -> StoreUnreachableError:
    return StoreUnreachableError(
        f"The hub at {endpoint} does not answer ({type(error).__name__}).",
        hint="Check the network and HF_ENDPOINT.",
    )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep the client's progress bars off the page, and its warnings, which may hold a signed link."""
    from huggingface_hub.utils import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    logs = [logging.getLogger(name) for name in _TALKATIVE]
    levels, had_bars = [log.level for log in logs], not are_progress_bars_disabled()
    for log in logs:
        log.setLevel(logging.ERROR)
    if had_bars:
        disable_progress_bars()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for log, level in zip(logs, levels, strict=True):
            log.setLevel(level)
        if had_bars:
            enable_progress_bars()
