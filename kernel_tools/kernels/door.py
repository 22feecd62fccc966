"""How a request gets past a Jupyter server's door: token, password or basic authentication.

A door holds credentials, so nothing of it is printed. It knows no kernels.
"""

from __future__ import annotations

import base64
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote, urlencode, urlsplit, urlunsplit

from kernel_tools.errors import KernelAuthError
from kernel_tools.kernels.base import ServerAddress, error_of_status
from kernel_tools.redact import register_secret

if TYPE_CHECKING:
    from requests import PreparedRequest, Response


LOOPBACK: Final = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True, slots=True)
class Door:
    """One way in: what every request to the server carries.

    Attributes:
        cookies: from the login page, where the server has a password.
        seconds: for one read of an answer.
    """

    address: ServerAddress = field(repr=False)
    seconds: float
    cookies: dict[str, str] = field(default_factory=dict, repr=False)

    @classmethod
    def opened(cls, address: ServerAddress, seconds: float) -> Door:
        """Log in where there is a password, as the server's login page does.

        Raises:
            KernelAuthError: the password is wrong.
        """
        if address.password is None:
            return cls(address, seconds)
        page = cls(address, seconds).send("GET", "login", allow_redirects=False)
        outside = cls(address, seconds, _cookies(page))
        answer = outside.send(
            "POST",
            "login",
            data={
                "password": address.password.reveal(),
                "_xsrf": outside.cookies.get("_xsrf", ""),
            },
            allow_redirects=False,
        )
        if answer.status_code >= 500:
            raise error_of_status(answer.status_code, f"the login at {address.shown}")
        if answer.status_code not in {302, 303}:
            raise KernelAuthError(
                f"The Jupyter server at {address.shown} does not take the password.",
                hint="Correct it where --password-env points, and %remote_connect again.",
            )
        cookies = {**outside.cookies, **_cookies(answer)}
        for value in cookies.values():
            register_secret(value)
        return cls(address, seconds, cookies)

    def url(self, path: str, *, socket: bool = False) -> str:
        """Return the whole URL. The token stands in it: some proxies accept it only there."""
        parts = urlsplit(self.address.base_url)
        scheme = parts.scheme.replace("http", "ws") if socket else parts.scheme
        # Basic authentication travels as a header; in a URL no client library understands it.
        place = parts.netloc.rpartition("@")[2]
        token = self.address.token
        query = "" if token is None else urlencode({"token": token.reveal()})
        return urlunsplit((scheme, place, f"{parts.path}/{path}", query, ""))

    def headers(self) -> dict[str, str]:
        """Return what a request or a WebSocket's opening must carry to be let in."""
        headers = {}
        parts = urlsplit(self.address.base_url)
        if parts.username:
            pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
            headers["Authorization"] = f"Basic {base64.b64encode(pair.encode()).decode()}"
        elif self.address.token is not None:
            headers["Authorization"] = f"token {self.address.token.reveal()}"
        if self.cookies:
            headers["Cookie"] = "; ".join(f"{name}={value}" for name, value in self.cookies.items())
            headers["X-XSRFToken"] = self.cookies.get("_xsrf", "")
        return headers

    def send(self, method: str, path: str, **arguments: Any) -> Response:
        """Send one request; what `requests` raises is raised."""
        import requests

        def authorize(request: PreparedRequest) -> PreparedRequest:
            # As `auth`, so that nothing is taken from ~/.netrc instead.
            request.headers.update(self.headers())
            return request

        return requests.request(
            method,
            self.url(path),
            auth=authorize,
            timeout=self.seconds,
            **arguments,
        )


def reach_loopback_directly(address: ServerAddress) -> None:
    """Ask no proxy of the environment for a tunnel's end on this machine.

    No client library has an option for it on its WebSockets, so it is said where all of them look.
    """
    if urlsplit(address.base_url).hostname not in LOOPBACK:
        return
    known = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    hosts = [host for host in known.replace(" ", "").split(",") if host]
    if "*" not in hosts and not set(LOOPBACK) <= set(hosts):
        os.environ["no_proxy"] = ",".join(dict.fromkeys((*hosts, *LOOPBACK)))


def _cookies(answer: Response) -> dict[str, str]:
    return {str(name): str(value) for name, value in answer.cookies.items()}
