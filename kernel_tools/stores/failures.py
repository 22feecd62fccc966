"""What the minio SDK and its HTTP library raise, turned into errors of ours that say what to do."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
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
    "AccessDenied": "denied access",
    "AllAccessDisabled": "denied access",
    "AccountProblem": "denied access",
    "ExpiredToken": "says the session token has expired",
    "InvalidToken": "refused the session token",
    "InvalidRequest": "refused the request",
}
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
        raise StoreUnreachableError(
            f"The object store at {endpoint} does not answer ({_innermost(error)}).",
            hint="Check MINIO_ENDPOINT (scheme, host, port) and that the store runs.",
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
    code = str(error.code)
    if code == "NoSuchBucket":
        return ObjectNotFoundError(
            f"There is no bucket {bucket} at {endpoint}.",
            hint="Check MINIO_BUCKET; the first upload creates it.",
        )
    if code in _NOT_FOUND:
        return no_object(endpoint=endpoint, bucket=bucket, key=key)
    if code == "RequestTimeTooSkewed":
        return StoreAuthError(
            f"{endpoint} refused the request: {_clock_sentence(error)}",
            hint="Set the clock (for example: sudo timedatectl set-ntp true), then try again.",
        )
    if code in _REGION_TROUBLE:
        return StoreAuthError(
            f"{endpoint} expects another region: {error.message}",
            hint="Set MINIO_REGION to the store's region.",
        )
    if code in _KEY_TROUBLE:
        return StoreAuthError(
            f"{endpoint} {_KEY_TROUBLE[code]} for {key} in bucket {bucket}.",
            hint="Check MINIO_ACCESS_KEY and MINIO_SECRET_KEY, and what they permit.",
        )
    return StoreError(f"{endpoint} answered {code} for {key}: {error.message}")


def _clock_sentence(error: Any) -> str:
    """Say how far this machine's clock is off, from the `Date` of the refusal."""
    with contextlib.suppress(Exception):
        theirs = parsedate_to_datetime(error.response.headers["Date"])
        off = datetime.fromtimestamp(time.time(), timezone.utc) - theirs
        seconds = round(off.total_seconds())
        side = "ahead of" if seconds > 0 else "behind"
        return f"this machine's clock is {abs(seconds)} s {side} the store's."
    return "this machine's clock and the store's differ too much."


def _innermost(error: BaseException) -> str:
    """Return the cause that urllib3 wrapped: `Connection refused` out of five layers."""
    while isinstance(reason := getattr(error, "reason", None), BaseException):
        error = reason
    return str(error).rpartition(": ")[2] or type(error).__name__
