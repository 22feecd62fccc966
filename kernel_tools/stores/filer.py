"""Parts of an upload, handed to the embedded store's filer behind its S3 gateway.

The gateway takes the MD5 of each byte three times, the volume server a fourth: more than half of all that
SeaweedFS 4.48 computes for an upload (profiled). A part that is put where the gateway keeps its parts costs
one less, and neither a signature nor TLS. S3 begins, lists, completes and aborts the upload as ever. The
place is SeaweedFS's own affair: `takes_parts` finds out whether it still is that one.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import hashlib
import hmac
import http.client
import json
import os
import secrets
import socket
import time
from collections.abc import Mapping
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kernel_tools.settings import Secret
from kernel_tools.stores.begun import Unfinished, abort
from kernel_tools.stores.client import READ_SECONDS

if TYPE_CHECKING:
    from minio import Minio

TOKEN_SECONDS: Final = 60
# Of no known type, so that no part is tried for how well it compresses.
_CONTENT_TYPE: Final = "application/x-part"
_PROC: Final = Path("/proc/self/fd")
_TRIAL: Final = b"a part that the gateway did not see"


class Filer:
    """The filer's Unix socket. Safe to share between threads.

    Args:
        socket_path: where it listens; private to the user.
        signing_key: `jwt.filer_signing` of its security.toml.
    """

    def __init__(self, socket_path: Path, signing_key: Secret) -> None:
        self._socket_path = socket_path
        self._signing_key = signing_key

    def put_part(
        self, bucket: str, upload: Unfinished, number: int, block: bytes | memoryview
    ) -> str | None:
        """Put a part, from 1, of an upload that S3 began; return its ETag, None where it was not taken."""
        name = f"{number:04}_{secrets.token_hex(4)}.part"
        headers = {"Authorization": f"BEARER {self._token()}", "Content-Type": _CONTENT_TYPE}
        line = _Line(self._socket_path)
        try:
            line.request(
                "PUT", f"/buckets/{bucket}/.uploads/{upload.upload_id}/{name}", block, headers
            )
            answer = line.getresponse()
            answer.read()
        except (OSError, http.client.HTTPException):
            return None
        finally:
            line.close()
        if answer.status != HTTPStatus.CREATED:
            return None
        try:
            return base64.b64decode(answer.headers["Content-MD5"], validate=True).hex() or None
        except (KeyError, TypeError, binascii.Error):
            return None

    def takes_parts(self, client: Minio, bucket: str) -> bool:
        """Make a small object of one part that the gateway did not see, and tell whether it came out right.

        Args:
            client: the SDK's, of the store's S3 gateway.
            bucket: where it lies for a moment; it exists.
        """
        from minio.datatypes import Part
        from minio.error import S3Error

        key = f"trial-{secrets.token_hex(8)}"
        try:
            upload = Unfinished(key, client._create_multipart_upload(bucket, key, {}))  # noqa: SLF001
            try:
                etag = self.put_part(bucket, upload, 1, _TRIAL)
                if etag != hashlib.md5(_TRIAL, usedforsecurity=False).hexdigest():
                    return False
                client._complete_multipart_upload(  # noqa: SLF001
                    bucket, key, upload.upload_id, [Part(1, etag)]
                )
                with contextlib.closing(client.get_object(bucket, key)) as answer:
                    return bytes(answer.read()) == _TRIAL
            finally:
                client.remove_object(bucket, key)
                with contextlib.suppress(S3Error):  # NoSuchUpload: it was completed
                    abort(client, bucket, upload)
        except S3Error:
            return False

    def _token(self) -> str:
        claims = {"exp": int(time.time()) + TOKEN_SECONDS}
        signed = ".".join(_segment(part) for part in ({"alg": "HS256", "typ": "JWT"}, claims))
        key = self._signing_key.reveal().encode()
        return f"{signed}.{_base64url(hmac.digest(key, signed.encode(), 'sha256'))}"


class _Line(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=READ_SECONDS)
        self._path = path

    def connect(self) -> None:
        # By way of its folder: a socket's own path may have 107 bytes at most, and a home can be far down.
        folder = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            near = Path(f"/proc/self/fd/{folder}") / self._path.name
            self.sock = socket.socket(socket.AF_UNIX)
            self.sock.settimeout(self.timeout)
            self.sock.connect(str(near if _PROC.is_dir() else self._path))
        finally:
            os.close(folder)


def _segment(content: Mapping[str, object]) -> str:
    return _base64url(json.dumps(content).encode())


def _base64url(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()
