"""Requests by presigned URL: one connection kept open, the host's proxies, failures in one sentence.

No message holds the URL: its query is a credential.
"""

from __future__ import annotations

import base64
import contextlib
import email.utils
import http.client
import re
import socket
import ssl
import time
import urllib.parse
import urllib.request
from typing import IO, Any, Callable, Dict, Mapping, Optional, Pattern, Tuple, Union

SOCKET_SECONDS = 30.0
# Failures in a row without progress; each waits longer than the last.
MOST_FAILURES = 6
_FIRST_WAIT_SECONDS = 0.5
_LONGEST_WAIT_SECONDS = 8.0
_PASSING = frozenset([408, 425, 429, 500, 502, 503, 504])
_REDIRECTS = frozenset([301, 302, 303, 307, 308])
_MOST_REDIRECTS = 5
_SKEW_SECONDS = 120
_CODE = re.compile(r"<Code>([A-Za-z0-9]+)</Code>")
_MESSAGE = re.compile(r"<Message>([^<]{0,300})</Message>")
_MOST_ERROR_BYTES = 8192
_SEND_BYTES = 256 << 10

Body = Union[bytes, IO[bytes], None]
# What a line that breaks may raise; OSError holds refused, reset, timed out and TLS.
LINE_ERRORS = (OSError, http.client.HTTPException)


class RefusedError(Exception):
    """The store answered, and not with what was asked for. Its text is without any URL."""

    def __init__(self, status: int, reason: str, body: str, date: Optional[str]) -> None:
        self.status = status
        self.code = _told(_CODE, body)
        self._said = _told(_MESSAGE, body)
        self._reason = reason
        self.date = date
        self._skew = _skew_seconds(date)
        super().__init__(f"the store answered {status}")

    @property
    def passing(self) -> bool:
        """Whether the same request may be answered better a little later."""
        return self.status in _PASSING

    @property
    def expired(self) -> bool:
        """Whether the link's time is over."""
        return "expired" in self._said.lower() or self.code == "ExpiredToken"

    def sentence(self, doing: str, name: str, *, again: str) -> str:
        """Say what is wrong.

        Args:
            doing: "download" or "upload".
            name: of the object, for people.
            again: what brings a new link or object.
        """
        if doing == "download" and (self.status == 404 or self.code == "NoSuchKey"):
            return f"{name} is not in the store (404): stage it again"
        if self.code == "SignatureDoesNotMatch":  # no clock can cause that
            return (
                f"the store refused the link to {name} (SignatureDoesNotMatch): host, scheme or region differ "
                "from those it was signed with; set MINIO_PUBLIC_ENDPOINT"
            )
        if self.code == "RequestTimeTooSkewed" or (
            self.status == 403 and abs(self._skew) > _SKEW_SECONDS
        ):
            side = "behind" if self._skew > 0 else "ahead of"
            return f"cannot {doing} {name}: this machine's clock is {abs(self._skew):.0f} s {side} the store"
        if self.expired:
            return f"the link to {name} has expired: {again}"
        return f"the store refused {name} ({self.status} {self.code or self._reason})"


class Line:
    """One connection to the store of a URL; opened when needed, used again where the store allows."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._connection: Optional[http.client.HTTPConnection] = None
        self._place = ""

    def get(self, headers: Mapping[str, str]) -> http.client.HTTPResponse:
        """Ask for the object, through redirects. Raises RefusedError, or one of LINE_ERRORS."""
        for _ in range(_MOST_REDIRECTS):
            response = self._ask("GET", self._url, None, headers)
            if response.status not in _REDIRECTS:
                return _checked(response)
            place = urllib.parse.urljoin(self._url, response.getheader("Location") or "")
            response.read(_MOST_ERROR_BYTES)
            self.close()
            self._url = place
        raise http.client.HTTPException("the store redirects without an end")

    def send(
        self, method: str, url: str, body: Body, headers: Mapping[str, str]
    ) -> http.client.HTTPResponse:
        """Send a body; its length must be among the headers. Raises RefusedError, or one of LINE_ERRORS."""
        return _checked(self._ask(method, url, body, headers))

    def close(self) -> None:
        """Let go of the connection."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def abort(self) -> None:
        """End what another thread waits for on this line."""
        connection = self._connection
        sock = None if connection is None else connection.sock
        if sock is not None:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def _ask(
        self, method: str, url: str, body: Body, headers: Mapping[str, str]
    ) -> http.client.HTTPResponse:
        parts = urllib.parse.urlsplit(url)
        place = f"{parts.scheme}://{parts.netloc}"
        if self._connection is not None and place != self._place:
            self.close()
        kept = self._connection is not None
        try:
            return self._exchange(method, parts, body, headers)
        except (http.client.RemoteDisconnected, BrokenPipeError, ConnectionResetError):
            self.close()
            if not kept or not (body is None or isinstance(body, bytes)):
                raise
            # The store had closed the connection that was kept open meanwhile.
            return self._exchange(method, parts, body, headers)

    def _exchange(
        self, method: str, parts: urllib.parse.SplitResult, body: Body, headers: Mapping[str, str]
    ) -> http.client.HTTPResponse:
        proxy = _proxy_of(parts)
        if self._connection is None:
            self._connection = _connect(parts, proxy)
            self._place = f"{parts.scheme}://{parts.netloc}"
        target = parts.path or "/"
        if parts.query:
            target += "?" + parts.query
        sent: Dict[str, str] = {"User-Agent": "kernel-tools-agent", "Accept-Encoding": "identity"}
        if proxy is not None and parts.scheme == "http":
            target = f"http://{parts.netloc}{target}"
            sent.update(_proxy_login(proxy))
        sent.update(headers)
        try:
            if self._connection.sock is None:
                self._connection.connect()  # here: nothing that fails in it has an answer to read
            try:
                self._connection.request(method, target, body=body, headers=sent)
            except (BrokenPipeError, ConnectionResetError):
                if body is None:
                    raise
                # A refusal may have come before all was sent: then it is there to be read.
            return self._connection.getresponse()
        except BaseException:
            self.close()
            raise


def describe_failure(url: str, error: BaseException) -> str:
    """Say why the store of `url` cannot be reached."""
    parts = urllib.parse.urlsplit(url)
    place = (parts.hostname or "?") + (f":{parts.port}" if parts.port else "")
    return f"the store at {place} cannot be reached from this machine ({cause_of(error)})"


def cause_of(error: BaseException) -> str:
    """Return what broke a line, in a few words without the link."""
    reason: Any = getattr(error, "reason", None) or error
    if isinstance(reason, http.client.InvalidURL):  # its text is the link
        reason = "the link is malformed"
    elif isinstance(reason, (socket.timeout, TimeoutError)):
        reason = f"no answer within {SOCKET_SECONDS:.0f} s"
    elif isinstance(error, OSError) and error.strerror:
        reason = error.strerror
    return str(reason)


def wait_after(failures: int, wait: Callable[[float], object]) -> None:
    """Wait before another try; twice as long after each failure."""
    wait(min(_LONGEST_WAIT_SECONDS, _FIRST_WAIT_SECONDS * 2.0 ** (failures - 1)))


def _checked(response: http.client.HTTPResponse) -> http.client.HTTPResponse:
    if response.status < 300:
        return response
    body = response.read(_MOST_ERROR_BYTES).decode("utf-8", "replace")
    response.close()
    raise RefusedError(response.status, response.reason, body, response.getheader("Date"))


def _proxy_of(parts: urllib.parse.SplitResult) -> Optional[urllib.parse.SplitResult]:
    """The proxy that the host's environment names for this URL; none for loopback."""
    host = parts.hostname or ""
    if host == "localhost" or host.startswith("127.") or host == "::1":
        return None
    named = urllib.request.getproxies().get(parts.scheme)
    if not named or urllib.request.proxy_bypass(host):
        return None
    return urllib.parse.urlsplit(named if "://" in named else "http://" + named)


def _proxy_login(proxy: urllib.parse.SplitResult) -> Dict[str, str]:
    if proxy.username is None:
        return {}
    login = "{}:{}".format(
        urllib.parse.unquote(proxy.username), urllib.parse.unquote(proxy.password or "")
    )
    return {"Proxy-Authorization": "Basic " + base64.b64encode(login.encode()).decode()}


def _connect(
    parts: urllib.parse.SplitResult, proxy: Optional[urllib.parse.SplitResult]
) -> http.client.HTTPConnection:
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise http.client.InvalidURL("")
    nearest = parts if proxy is None else proxy
    host, port = nearest.hostname or "", nearest.port
    connection: http.client.HTTPConnection
    if parts.scheme == "http":
        connection = http.client.HTTPConnection(
            host, port, timeout=SOCKET_SECONDS, blocksize=_SEND_BYTES
        )
    else:
        connection = http.client.HTTPSConnection(
            host,
            port,
            timeout=SOCKET_SECONDS,
            blocksize=_SEND_BYTES,
            context=ssl.create_default_context(),
        )
    connection._create_connection = reach  # type: ignore[attr-defined] # noqa: SLF001
    if proxy is not None and parts.scheme == "https":
        connection.set_tunnel(parts.hostname, parts.port or 443, _proxy_login(proxy))
    return connection


def reach(
    address: Tuple[str, int], timeout: float, source_address: Optional[Tuple[str, int]] = None
) -> socket.socket:
    """Like `socket.create_connection`, with `timeout` for all addresses of the host together.

    S3 of AWS has eight: a network that swallows everything would take half an hour of a run's end.
    """
    found = socket.getaddrinfo(*address, 0, socket.SOCK_STREAM)
    deadline = time.monotonic() + timeout
    failure = OSError("the name has no address")
    for number, (family, kind, protocol, _, place) in enumerate(found):
        share = (deadline - time.monotonic()) / (len(found) - number)
        line: Optional[socket.socket] = None
        try:
            line = socket.socket(family, kind, protocol)
            line.settimeout(max(share, 0.01))
            if source_address is not None:
                line.bind(source_address)
            line.connect(place)
            line.settimeout(timeout)
        except OSError as error:
            failure = error
            if line is not None:
                line.close()
        else:
            return line
    raise failure


def _told(pattern: Pattern[str], body: str) -> str:
    match = pattern.search(body)
    return "" if match is None else match.group(1)


def _skew_seconds(date: Optional[str]) -> float:
    """How far this machine's clock is behind the store's, in seconds."""
    try:
        return email.utils.parsedate_to_datetime(date or "").timestamp() - time.time()
    except (TypeError, ValueError, IndexError):
        return 0.0
