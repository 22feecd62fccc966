"""The minio SDK's client: endpoints in their normal form, timeouts, retries. Imports the SDK only when asked."""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit, urlunsplit

from kernel_tools.errors import ConfigurationError, MissingDependencyError
from kernel_tools.settings import Secret

if TYPE_CHECKING:
    from minio import Minio
    from urllib3 import BaseHTTPResponse

# What S3-compatible stores sign with unless told otherwise (Garage: must equal its configuration).
DEFAULT_REGION: Final = "us-east-1"
CONNECT_SECONDS: Final = 5.0
READ_SECONDS: Final = 120.0


def open_client(endpoint: str, access_key: Secret, secret_key: Secret, region: str | None) -> Minio:
    """Return the SDK's client, with our timeouts and retries.

    Raises:
        MissingDependencyError: the minio SDK is not installed.
    """
    try:
        import certifi
        import urllib3
        from minio import Minio
    except ImportError as error:
        raise MissingDependencyError(
            "An object store needs the minio SDK, which is not installed.",
            hint='Type: pip install "minio>=7.2.15,<8"',
        ) from error
    parts = urlsplit(endpoint)
    pool = urllib3.PoolManager(
        timeout=urllib3.Timeout(connect=CONNECT_SECONDS, read=READ_SECONDS),
        maxsize=10,
        cert_reqs="CERT_REQUIRED",
        ca_certs=os.environ.get("SSL_CERT_FILE") or certifi.where(),
        retries=urllib3.Retry(
            total=3, connect=2, backoff_factor=0.2, status_forcelist=(500, 502, 503, 504)
        ),
    )
    if region is None and not (parts.hostname or "").endswith(".amazonaws.com"):
        region = DEFAULT_REGION
    return Minio(
        endpoint=parts.netloc,
        access_key=access_key.reveal(),
        secret_key=secret_key.reveal(),
        secure=parts.scheme == "https",
        region=region,
        http_client=pool,
    )


def signed_put(
    client: Minio,
    *,
    bucket: str,
    key: str,
    query: Mapping[str, str],
    content_sha256: str,
    headers: Mapping[str, str] | None = None,
    body: memoryview | None = None,
) -> BaseHTTPResponse:
    """Make a PUT that the SDK has no call for, and return whatever the store answers.

    Signed in the head: a presigned URL would stand in the warnings of the HTTP library.

    Args:
        client: the SDK's.
        bucket: of the object.
        key: the object.
        query: what is asked of it.
        content_sha256: of the body, or `UNSIGNED-PAYLOAD`.
        headers: beside those of every request.
        body: what is sent; None for nothing.
    """
    from minio.signer import sign_v4_s3

    now = datetime.now(timezone.utc)
    region = client._get_region(bucket)  # noqa: SLF001
    url = client._base_url.build(  # noqa: SLF001
        method="PUT", region=region, bucket_name=bucket, object_name=key, query_params=dict(query)
    )
    signed = sign_v4_s3(
        method="PUT", url=url, region=region, content_sha256=content_sha256, date=now,
        credentials=client._provider.retrieve(),  # noqa: SLF001
        headers={
            "Host": url.netloc,
            "x-amz-content-sha256": content_sha256,
            "x-amz-date": f"{now:%Y%m%dT%H%M%SZ}",
            **(headers or {}),
        },
    )  # fmt: skip
    http = client._http  # noqa: SLF001
    answer: BaseHTTPResponse = http.urlopen("PUT", urlunsplit(url), body=body, headers=signed)
    return answer


def normal_endpoint(endpoint: str, variable: str) -> str:
    """Return `scheme://host[:port]`.

    Raises:
        ConfigurationError: it is malformed; names the variable.
    """
    text = endpoint.strip()
    if "://" not in text:
        host = text.partition(":")[0]
        text = f"{'http' if is_loopback(host) else 'https'}://{text}"
    parts = urlsplit(text)
    if (
        parts.scheme not in {"http", "https"}
        or not parts.hostname
        or parts.path not in {"", "/"}
        or parts.username
    ):
        raise ConfigurationError(
            f"{variable} must be a host with an optional port and scheme.",
            hint="For example https://minio.example.org:9000",
        )
    return f"{parts.scheme}://{parts.netloc}"


def is_loopback(host: str) -> bool:
    """Tell whether a host is this machine."""
    return host in {"127.0.0.1", "localhost", "::1"}
