"""Ways into a server: password, basic authentication, HTTPS, a tunnel's end; and which URLs are understood."""

from __future__ import annotations

import subprocess
import traceback

import pytest

from kernel_tools.errors import KernelAuthError, KernelConnectionError, KernelLostError
from kernel_tools.kernels import connect_kernel
from kernel_tools.kernels.base import ServerAddress
from kernel_tools.settings import Secret
from kernel_tools.stores.certificate import self_signed
from tests.faults.proxy import Fault, FaultProxy, Schedule
from tests.kernel.conftest import start_server, stop_server

PASSWORD = "canary-" + "of-the-login-page"


@pytest.fixture(scope="module")
def with_password(server, tmp_path_factory):
    """A rented box's server: a password and no token."""
    code = "import sys; from jupyter_server.auth import passwd; print(passwd(sys.stdin.read(), 'sha1'))"
    hashed = subprocess.run(
        [server.python, "-c", code], input=PASSWORD, capture_output=True, text=True, check=True
    ).stdout.strip()
    process, box = start_server(
        tmp_path_factory.mktemp("password"),
        f"--PasswordIdentityProvider.hashed_password={hashed}",
        python=server.python,
    )
    yield box
    stop_server(process, box)


def test_a_password_lets_in_cells_files_and_interrupts(with_password, client, tmp_path):
    kernel = connect_kernel(with_password.url, password=Secret(PASSWORD), client=client)
    try:
        assert kernel.execute("print(6 * 7)").stdout == "42\n"
        kernel.put_file(b"x" * 3_000_000, str(tmp_path / "there"))
        assert (tmp_path / "there").stat().st_size == 3_000_000
        kernel.interrupt()
        kernel.hang_up()
        assert kernel.execute("print(1)", timeout_seconds=30).stdout == "1\n"
    finally:
        kernel.close(stop_kernel=True)


def test_a_wrong_password_is_an_auth_error_that_shows_it_nowhere(with_password, client):
    wrong = "canary-" + "of-a-wrong-password"
    with pytest.raises(KernelAuthError, match="does not take the password") as caught:
        connect_kernel(with_password.url, password=Secret(wrong), client=client)
    told = traceback.TracebackException.from_exception(caught.value)
    assert wrong not in "".join(told.format())


def test_https_with_a_certificate_that_the_machine_trusts(server, client, tmp_path, monkeypatch):
    certificate, key = self_signed("a rented box")
    trusted = tmp_path / "certificate.pem"
    trusted.write_text(certificate)
    (tmp_path / "key.pem").write_text(key)
    monkeypatch.setenv("SSL_CERT_FILE", str(trusted))
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(trusted))
    process, box = start_server(
        tmp_path / "server",
        f"--ServerApp.certfile={trusted}",
        f"--ServerApp.keyfile={tmp_path / 'key.pem'}",
        python=server.python,
        scheme="https",
    )
    try:
        kernel = connect_kernel(box.url, token=box.token, client=client)
        assert kernel.execute("print(6 * 7)").stdout == "42\n"
        kernel.hang_up()
        assert kernel.execute("print(1)").stdout == "1\n"
        kernel.close(stop_kernel=True)
    finally:
        stop_server(process, box)


def test_a_tunnels_end_is_asked_past_the_proxies_of_the_environment(server, client, monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    url = server.url.replace("127.0.0.1", "localhost")
    kernel = connect_kernel(url, token=server.token, client=client)
    assert kernel.execute("print(1)").stdout == "1\n"
    kernel.close(stop_kernel=True)


def test_a_netrc_is_not_sent_instead_of_the_token(server, client, monkeypatch, tmp_path):
    netrc = tmp_path / "netrc"
    netrc.write_text("machine 127.0.0.1 login somebody password else\n")
    netrc.chmod(0o600)
    monkeypatch.setenv("NETRC", str(netrc))
    kernel = connect_kernel(server.url, token=server.token, client=client)
    kernel.close(stop_kernel=True)


def test_a_page_that_is_not_jupyters_is_said_to_be_one(server, client):
    proxy = FaultProxy(server.port, lambda *_: None)
    proxy.start(Schedule(0, (Fault("login page", 0, 99),)))
    try:
        url = server.url.replace(str(server.port), str(proxy.port))
        with pytest.raises(KernelConnectionError, match="a page that is not Jupyter's"):
            connect_kernel(url, token=server.token, client=client)
    finally:
        proxy.close()


def test_a_base_url_that_leads_elsewhere_says_so(server, client):
    with pytest.raises(KernelLostError, match="no Jupyter server at"):
        connect_kernel(server.url + "/elsewhere", token=server.token, client=client)


@pytest.mark.parametrize(
    ("pasted", "base", "token"),
    [
        ("https://kkb.kaggle.net/k/12/eyJ.a.b/proxy", "https://kkb.kaggle.net/k/12/eyJ.a.b/proxy", None),
        ("https://kkb.kaggle.net/k/12/eyJ.a.b/proxy/lab", "https://kkb.kaggle.net/k/12/eyJ.a.b/proxy", None),
        ("https://kkb.kaggle.net/proxy?token=abcdef", "https://kkb.kaggle.net/proxy", "abcdef"),
        ("http://localhost:8888/?token=abcdef", "http://localhost:8888", "abcdef"),
        ("http://localhost:8888/lab/tree/a.ipynb", "http://localhost:8888", None),
        ("https://box.example/user/me/lab?token=abcdef", "https://box.example/user/me", "abcdef"),
    ],
)  # fmt: skip
def test_the_urls_that_people_paste_are_understood(pasted, base, token):
    address = ServerAddress.parse(pasted)
    assert address.base_url == base
    assert (address.token.reveal() if address.token else None) == token


def test_a_user_in_the_url_travels_as_a_header():
    from kernel_tools.kernels.door import Door

    door = Door(ServerAddress.parse("https://me:p%40ss-word@box.example/x?token=abcdef"), 1.0)
    assert door.url("api") == "https://box.example/x/api?token=abcdef"
    assert door.url("api", socket=True) == "wss://box.example/x/api?token=abcdef"
    assert door.headers() == {"Authorization": "Basic bWU6cEBzcy13b3Jk"}
