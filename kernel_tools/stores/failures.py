"""What the minio SDK and its HTTP library raise, turned into errors of ours that say what to do."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from email.utils import parsedate_to_datetime
from typing import Any, Final

from kernel_tools.errors import (
    ObjectNotFoundError,
    StoreAuthError,
    StoreError,
    StoreUnreachableError,
)

_NOT_FOUND: Final = frozenset({"NoSuchKey", "NoSuchObject", "NotFound"})
_KEY_TROUBLE: Final = {
    "InvalidAccessKeyId": "does not know the access key",
    "SignatureDoesNotMatch": "refused the signature (wrong secret key, or the host was changed on the way)",
    "AccessDenied": "denied access: the keys are right, but do not permit this",
    "AllAccessDisabled": "denied access",
    "AccountProblem": "denied access",
    "ExpiredToken": "says the session token has expired",
    "InvalidToken": "refused the session token",
    "InvalidRequest": "refused the request",
}
_HINTS: Final = {
    "SignatureDoesNotMatch": "Check MINIO_SECRET_KEY; behind a proxy MINIO_ENDPOINT must be the host that the "
    "store itself sees.",
    "AccessDenied": "Give the keys of MINIO_ACCESS_KEY read and write permission for the bucket.",
}
# S3 takes requests up to 15 minutes off; a refusal with less is about something else.
_SKEW_SECONDS: Final = 300
_REGION_TROUBLE: Final = frozenset(
    {"AuthorizationHeaderMalformed", "AuthorizationQueryParametersError", "InvalidRegion"}
)


@contextlib.contextmanager
def translated(
    *, endpoint: str, bucket: str, key: str, ask_again: Callable[[], object]
) -> Iterator[None]:
    """Run a call of the SDK; whatever it raises leaves as a `StoreError`, the original as its cause.

    Args:
        endpoint: what messages name.
        bucket: likewise.
        key: likewise.
        ask_again: a GET. The refusal of a HEAD has no body and so no reason; this brings it.
    """
    from minio.error import MinioException, S3Error
    from urllib3.exceptions import HTTPError

    try:
        yield
    except KeyboardInterrupt:
        # A new one: `%xmode Verbose` shows the variables of the frames below, and signed headers are.
        raise KeyboardInterrupt from None
    except S3Error as error:
        telling = error
        if error.code == "AccessDenied":
            try:
                ask_again()
            except S3Error as reason:
                telling = reason
            except (MinioException, HTTPError):
                pass
        raise _from_s3_error(telling, endpoint, bucket, key) from error
    except MinioException as error:  # a reply that is not S3's: a proxy's page, another service
        raise StoreUnreachableError(
            f"What answers at {endpoint} does not speak S3: {error}",
            hint="MINIO_ENDPOINT must name the store's API, not its console.",
        ) from error
    except HTTPError as error:
        told = _innermost(error)
        hint = "Check MINIO_ENDPOINT (scheme, host, port) and that the store runs."
        if "WRONG_VERSION_NUMBER" in str(error) or "record layer" in told:
            hint = f"It speaks no TLS: set MINIO_ENDPOINT to http://{endpoint.partition('://')[2]}."
        raise StoreUnreachableError(
            f"The object store at {endpoint} does not answer ({told}).", hint=hint
        ) from error
    except ValueError as error:  # the SDK's own checks of names
        raise StoreError(f"The store cannot take {key!r}: {error}.") from error


def no_object(*, endpoint: str, bucket: str, key: str) -> ObjectNotFoundError:
    """Return the error for an object that is not there."""
    return ObjectNotFoundError(
        f"There is no object {key} in bucket {bucket} of {endpoint}.",
        hint="Check the name; %stage_dataset PATH uploads a data set.",
    )


def _from_s3_error(error: Any, endpoint: str, bucket: str, key: str) -> StoreError:
    code, said = str(error.code), str(error.message)
    if code == "NoSuchBucket":
        return ObjectNotFoundError(
            f"There is no bucket {bucket} at {endpoint}.",
            hint="Check MINIO_BUCKET; the first upload creates it.",
        )
    if code in _NOT_FOUND:
        return no_object(endpoint=endpoint, bucket=bucket, key=key)
    if code in _REGION_TROUBLE or "; use region " in said:
        return StoreAuthError(
            f"{endpoint} expects another region: {said}.",
            hint="Set MINIO_REGION to the store's region.",
        )
    off = _seconds_ahead(error)
    refused = code in _KEY_TROUBLE
    if code == "RequestTimeTooSkewed" or (refused and abs(off or 0) > _SKEW_SECONDS):
        return StoreAuthError(
            f"{endpoint} refused the request: {_clock_sentence(off)}",
            hint="Set the clock (for example: sudo timedatectl set-ntp true), then try again.",
        )
    if refused:
        return StoreAuthError(
            f"{endpoint} {_KEY_TROUBLE[code]} for {key} in bucket {bucket}.",
            hint=_HINTS.get(code, "Check MINIO_ACCESS_KEY and MINIO_SECRET_KEY."),
        )
    return StoreError(f"{endpoint} answered {code} for {key}: {said}")


def _seconds_ahead(error: Any) -> float | None:
    """Return how far this machine's clock is ahead of the `Date` of a refusal; None without one."""
    try:
        theirs = parsedate_to_datetime(error.response.headers["Date"])
    except (KeyError, TypeError, ValueError, AttributeError):
        return None
    return time.time() - theirs.timestamp()


def _clock_sentence(ahead: float | None) -> str:
    if ahead is None or abs(ahead) < 1:
        return "this machine's clock and the store's differ too much."
    side = "ahead of" if ahead > 0 else "behind"
    return f"this machine's clock is {abs(round(ahead))} s {side} the store's."


def _innermost(error: BaseException) -> str:
    """Return the cause that urllib3 wrapped: `Connection refused` out of five layers."""
    while isinstance(reason := getattr(error, "reason", None), BaseException):
        error = reason
    return str(error).rpartition(": ")[2] or type(error).__name__
