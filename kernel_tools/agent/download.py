"""Download one object by its presigned URL: ranges, resume, SHA-256 while it streams.

No message holds the URL: its query is a credential. What is kept of an interrupted download is the
`.part` file, which the next call goes on from.
"""

from __future__ import annotations

import contextlib
import email.utils
import hashlib
import os
import re
import socket
import time
import urllib.error
import urllib.parse
import urllib.request
from http.client import HTTPException, HTTPMessage, InvalidURL
from typing import Any, Callable, Optional, Pattern

from .errors import InputError

_CHUNK_BYTES = 1 << 20
_SOCKET_SECONDS = 30.0
# Failures in a row without a byte of progress; each waits longer than the last.
_MOST_FAILURES = 6
_FIRST_WAIT_SECONDS = 0.5
_RETRY_CODES = frozenset([408, 425, 429, 500, 502, 503, 504])
_SKEW_SECONDS = 120
_CODE = re.compile(r"<Code>([A-Za-z0-9]+)</Code>")
_MESSAGE = re.compile(r"<Message>([^<]{0,300})</Message>")


class _ReplacedError(Exception):
    """The object is not the one that the partial file came from."""


def download(
    url: str,
    part: str,
    *,
    name: str,
    size_bytes: Optional[int],
    sha256: Optional[str],
    tick: Callable[[int], None],
    wait: Callable[[float], object] = time.sleep,
) -> str:
    """Bring the object into the file `part`, going on where an earlier call ended.

    Args:
        url: presigned for GET.
        part: the file to fill; kept when the network fails, removed when the content is wrong.
        name: what to call the object in messages.
        size_bytes: its size; None where it is not known.
        sha256: its hash; None where it is not known.
        tick: called with the bytes that are there; may raise to end it.
        wait: sleeps between tries.

    Returns:
        The SHA-256 of what is there now.

    Raises:
        InputError: it cannot be had, or is not what was staged.
    """
    digest, have = _resume(part, size_bytes)
    failures = 0
    while size_bytes is None or have < size_bytes or have == 0:
        before = have
        try:
            digest, have = _receive(url, part, digest, have, name, size_bytes, tick)
            break
        except _ReplacedError:
            digest, have = _restart(part)
            failures += 1
        except urllib.error.HTTPError as error:
            with error:
                if error.code not in _RETRY_CODES:
                    raise InputError(_explain(error, name)) from None
                failure = f"the store answered {error.code}"
        except (OSError, HTTPException) as error:
            failure = _network(url, error)
            digest, have = _resume(part, size_bytes)
        failures = 1 if have > before else failures + 1
        if failures > _MOST_FAILURES:
            raise InputError(f"cannot download {name}: {failure}")
        wait(min(8.0, _FIRST_WAIT_SECONDS * 2 ** (failures - 1)))
    if size_bytes is not None and have != size_bytes:
        _remove(part)
        raise InputError(
            f"{name} has {have} bytes, not the {size_bytes} that were staged: stage it again"
        )
    found = digest.hexdigest()
    if sha256 is not None and found != sha256:
        _remove(part)
        raise InputError(
            f"{name} is not what was staged: its SHA-256 is {found[:12]}.., not {sha256[:12]}..; stage it again"
        )
    return str(found)


def _receive(
    url: str,
    part: str,
    digest: Any,
    have: int,
    name: str,
    size_bytes: Optional[int],
    tick: Callable[[int], None],
) -> Any:
    headers = {"Accept-Encoding": "identity", "User-Agent": "kernel-tools-agent"}
    if have:
        headers["Range"] = f"bytes={have}-"
    request = urllib.request.Request(url, headers=headers)
    try:
        response = _opener(url).open(request, timeout=_SOCKET_SECONDS)
    except urllib.error.HTTPError as error:
        if error.code == 416 and have:  # it is shorter than what we hold
            error.close()
            raise _ReplacedError from None
        raise
    with response:
        total = _total(response.headers, response.status, have)
        if size_bytes is not None and total is not None and total != size_bytes:
            raise InputError(
                f"{name} has {total} bytes in the store, not the {size_bytes} that were staged: it was replaced; "
                "stage it again"
            )
        if have and response.status != 206:
            digest, have = _restart(part)
        with open(part, "ab") as stream:
            while True:
                chunk = response.read(_CHUNK_BYTES)
                if not chunk:
                    break
                if size_bytes is not None and have + len(chunk) > size_bytes:
                    raise InputError(f"{name} is larger than what was staged")
                stream.write(chunk)
                digest.update(chunk)
                have += len(chunk)
                tick(have)
    if total is not None and have < total:
        raise ConnectionError("the connection ended early")
    return digest, have


def _resume(part: str, size_bytes: Optional[int]) -> Any:
    """Hash what an earlier call left; begin anew where that cannot be a part of the object."""
    digest, have = hashlib.sha256(), 0
    try:
        with open(part, "rb") as stream:
            for chunk in iter(lambda: stream.read(_CHUNK_BYTES), b""):
                digest.update(chunk)
                have += len(chunk)
    except FileNotFoundError:
        return digest, 0
    if size_bytes is None or have > size_bytes:
        return _restart(part)
    return digest, have


def _restart(part: str) -> Any:
    _remove(part)
    return hashlib.sha256(), 0


def _remove(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def _total(headers: HTTPMessage, status: int, have: int) -> Optional[int]:
    if status == 206:
        match = re.match(r"bytes (\d+)-\d+/(\d+)", headers.get("Content-Range", ""))
        if match is None or int(match.group(1)) != have:
            raise _ReplacedError
        return int(match.group(2))
    length = headers.get("Content-Length")
    return int(length) if length and length.isdigit() else None


def _opener(url: str) -> urllib.request.OpenerDirector:
    host = urllib.parse.urlsplit(url).hostname or ""
    if host == "localhost" or host.startswith("127.") or host == "::1":
        return urllib.request.build_opener(urllib.request.ProxyHandler({}))
    return urllib.request.build_opener()


def _network(url: str, error: BaseException) -> str:
    reason = getattr(error, "reason", error)
    if isinstance(reason, InvalidURL):  # its text is the link
        reason = "the link is malformed"
    if isinstance(reason, (socket.timeout, TimeoutError)):
        reason = f"no answer within {_SOCKET_SECONDS:.0f} s"
    parts = urllib.parse.urlsplit(url)
    place = (parts.hostname or "?") + (f":{parts.port}" if parts.port else "")
    return f"the store at {place} cannot be reached from this machine ({reason})"


def _explain(error: urllib.error.HTTPError, name: str) -> str:
    """One sentence for a refusal; S3 says the kind in XML, and its clock in the Date header."""
    body = error.read(8192).decode("utf-8", "replace")
    code, said = _told(_CODE, body), _told(_MESSAGE, body)
    skew = _skew_seconds(error.headers.get("Date"))
    if error.code == 404 or code == "NoSuchKey":
        return f"{name} is not in the store (404): stage it again"
    if code == "RequestTimeTooSkewed" or (error.code == 403 and abs(skew) > _SKEW_SECONDS):
        side = "behind" if skew > 0 else "ahead of"
        return f"cannot download {name}: this machine's clock is {abs(skew):.0f} s {side} the store"
    if "expired" in said.lower() or code == "ExpiredToken":
        return f"the link to {name} has expired: launch again"
    if code == "SignatureDoesNotMatch":
        return (
            f"the store refused the link to {name} (SignatureDoesNotMatch): host, scheme or region differ "
            "from those it was signed with; set MINIO_PUBLIC_ENDPOINT"
        )
    return f"the store refused {name} ({error.code} {code or error.reason})"


def _told(pattern: Pattern[str], body: str) -> str:
    match = pattern.search(body)
    return "" if match is None else match.group(1)


def _skew_seconds(date: Optional[str]) -> float:
    """How far this machine's clock is behind the store's, in seconds."""
    try:
        return email.utils.parsedate_to_datetime(date or "").timestamp() - time.time()
    except (TypeError, ValueError, IndexError):
        return 0.0
