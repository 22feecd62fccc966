"""What goes wrong between here, the store and the remote, each provoked for real: the message names the cause."""

from __future__ import annotations

import dataclasses
import json
import re
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from email.utils import formatdate
from pathlib import Path
from typing import Any

import pytest

from kernel_tools.agent.download import Download
from kernel_tools.agent.errors import InputError
from kernel_tools.errors import StoreAuthError, StoreError, StoreUnreachableError
from kernel_tools.settings import Secret
from kernel_tools.stores import local
from kernel_tools.stores.hub import HubStore
from kernel_tools.stores.local import LocalStore
from kernel_tools.stores.s3 import S3Store
from tests.fakes import hub_server
from tests.fakes.relay import Relay, relay_to
from tests.store.conftest import put

OFF_SECONDS = 1212
OTHER_TOKEN = "_".join(["hf", "somebodyelsestoken"])  # in pieces: a traceback shows the source


@pytest.fixture
def relay(store: LocalStore) -> Iterator[Relay]:
    with relay_to(store.endpoint) as relay:
        yield relay


def opened(store: LocalStore, endpoint: str, **options: Any) -> S3Store:
    keys = store.service.secrets
    given = {"access_key": keys["access_key"], "secret_key": keys["secret_key"]} | options
    return S3Store(endpoint, bucket=store.bucket, **given)


def sentence(caught: pytest.ExceptionInfo[Exception], store: LocalStore) -> str:
    """The message, which is one line and holds neither key nor signature."""
    text = str(caught.value)
    assert "\n" not in text
    assert not re.search(r"X-Amz-|[0-9a-f]{64}", text)
    for secret in store.service.secrets.values():
        assert secret.reveal() not in text
    return text


def with_date(seconds: float) -> Callable[[bytes], bytes]:
    """Return a change of what a store answers: another `Date`."""
    date = f"Date: {formatdate(time.time() + seconds, usegmt=True)}".encode()
    return lambda piece: re.sub(rb"Date: [^\r]+", date, piece, count=1)


@pytest.mark.parametrize(("ahead", "side"), [(OFF_SECONDS, "ahead of"), (-OFF_SECONDS, "behind")])
def test_a_clock_that_is_off_is_told_by_how_much(
    store: LocalStore, relay: Relay, monkeypatch: pytest.MonkeyPatch, ahead: int, side: str
) -> None:
    put(store, b"x", "a")
    # The requests are signed with the other clock, and the store's answer shows its own.
    relay.change_down = with_date(-ahead)
    with monkeypatch.context() as clock:
        clock.setattr(
            "minio.time.utcnow", lambda: datetime.now(timezone.utc) + timedelta(seconds=ahead)
        )
        with pytest.raises(StoreAuthError) as caught:
            opened(store, relay.endpoint).stat("a")

    found = re.search(rf"clock is (\d+) s {side} the store", sentence(caught, store))
    assert found is not None, caught.value
    assert abs(int(found[1]) - OFF_SECONDS) <= 5


def test_a_region_that_is_wrong_is_told_with_the_right_one(store: LocalStore, relay: Relay) -> None:
    """SeaweedFS takes any; this is AWS's answer, on the way."""
    body = (
        b"<Error><Code>AuthorizationHeaderMalformed</Code><Message>The authorization header is malformed;"
        b" the region 'us-east-1' is wrong; expecting 'eu-west-1'</Message></Error>"
    )
    answer = (
        b"HTTP/1.1 400 Bad Request\r\nContent-Type: application/xml\r\nConnection: close\r\n"
        b"Content-Length: %d\r\n\r\n" % len(body)
    )
    relay.change_down = lambda _piece: answer + body

    with pytest.raises(StoreAuthError) as caught:
        list(opened(store, relay.endpoint, region="us-east-1").list())

    assert "expecting 'eu-west-1'" in sentence(caught, store)
    assert "MINIO_REGION" in str(caught.value)


def test_a_host_that_is_changed_on_the_way_is_told(store: LocalStore, relay: Relay) -> None:
    put(store, b"x", "a")
    host = relay.endpoint.removeprefix("http://").encode()
    relay.change_up = lambda piece: piece.replace(b"Host: " + host, b"Host: store.internal:8333")

    with pytest.raises(StoreAuthError, match="the host was changed on the way") as caught:
        opened(store, relay.endpoint).read_range("a", offset=0, length=1)
    assert "MINIO_ENDPOINT must be the host that the store itself sees" in sentence(caught, store)


def test_a_store_without_tls_is_told(store: LocalStore) -> None:
    with pytest.raises(StoreUnreachableError) as caught:
        opened(store, store.endpoint.replace("http://", "https://")).stat("a")
    assert f"set MINIO_ENDPOINT to {store.endpoint}" in sentence(caught, store)


def test_keys_that_may_only_read_are_told_that_they_do_not_permit_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = {"accessKey": "READER0123456789", "secretKey": "only-for-reading-0123456789"}
    identity = {"name": "reader", "credentials": [reader], "actions": ["Read", "List"]}
    (tmp_path / "identities.json").write_text(json.dumps({"identities": [identity]}))
    order = local._order

    def with_reader(*given: Any, **options: Any) -> Any:
        made = order(*given, **options)
        extra = f"-s3.config={tmp_path / 'identities.json'}"
        return dataclasses.replace(made, argv=(*made.argv, extra))

    monkeypatch.setattr(local, "_order", with_reader)
    store = LocalStore.ensure(state_dir=tmp_path / "state", idle_seconds=60)
    try:
        put(store, b"x", "a")
        keys = {
            "access_key": Secret(reader["accessKey"]),
            "secret_key": Secret(reader["secretKey"]),
        }
        reading = opened(store, store.endpoint, **keys)
        assert reading.read_range("a", offset=0, length=1) == b"x"
        with pytest.raises(StoreAuthError, match="denied access: .* do not permit this") as caught:
            put(reading, b"y", "a")
        assert "read and write permission" in sentence(caught, store)
        assert store.read_range("a", offset=0, length=1) == b"x"
    finally:
        store.stop()


def bring(url: str, folder: Path) -> str:
    """Download as the remote does, with nothing there yet."""
    (folder / "part").unlink(missing_ok=True)
    one = Download(
        url, str(folder / "part"), name="coins", size_bytes=1, sha256=None, wait=lambda _: None
    )
    one.start()
    try:
        return one.finish()
    finally:
        one.close()


def test_on_the_remote_a_changed_host_an_ended_link_and_a_silent_store_are_told(
    store: LocalStore, relay: Relay, tmp_path: Path
) -> None:
    put(store, b"x", "a")
    signed = store.presign_get("a", expires_seconds=60)
    with pytest.raises(InputError, match="host, scheme or region differ.*MINIO_PUBLIC_ENDPOINT"):
        bring(signed.replace(store.endpoint, relay.endpoint), tmp_path)

    public = opened(store, store.endpoint, public_endpoint=relay.endpoint)
    bring(public.presign_get("a", expires_seconds=60), tmp_path)

    earlier = datetime.now(timezone.utc) - timedelta(seconds=120)
    ended = store._client.get_presigned_url(
        "GET", store.bucket, "a", expires=timedelta(seconds=60), request_date=earlier
    )
    with pytest.raises(InputError, match="link to coins has expired"):
        bring(ended, tmp_path)
    with pytest.raises(InputError, match="not in the store"):
        bring(store.presign_get("b", expires_seconds=60), tmp_path)

    relay.close()
    with pytest.raises(InputError, match="cannot be reached from this machine"):
        bring(public.presign_get("a", expires_seconds=60), tmp_path)


def test_on_the_remote_a_clock_that_is_off_is_told(
    store: LocalStore, relay: Relay, tmp_path: Path
) -> None:
    put(store, b"x", "a")
    relay.change_down = with_date(OFF_SECONDS)
    early = datetime.now(timezone.utc) - timedelta(hours=2)
    url = opened(store, relay.endpoint)._client.get_presigned_url(
        "GET", store.bucket, "a", expires=timedelta(seconds=60), request_date=early
    )
    with pytest.raises(InputError, match=r"clock is 12\d\d s behind the store"):
        bring(url, tmp_path)


def test_the_hub_says_what_is_wrong_and_shows_no_token(
    hub: hub_server.Hub,
) -> None:
    wrong = HubStore("org/data", token=Secret(OTHER_TOKEN), endpoint=hub.url)
    nobody = HubStore("org/data", endpoint=hub.url)
    for store, said in ((wrong, "refused HF_TOKEN"), (nobody, "asks for a token")):
        with pytest.raises(StoreAuthError, match=said) as caught:
            put(store, b"x", "a.tar")
        assert OTHER_TOKEN not in str(caught.getrepr(style="long", showlocals=True))
    right = HubStore("org/data", token=Secret(hub_server.TOKEN), endpoint=hub.url)
    put(right, b"x", "a.tar")
    assert wrong.stat("a.tar") is None  # the hub tells no stranger that there is one
    hub.fail_uploads = True
    with pytest.raises(StoreAuthError):
        put(right, b"y", "a.tar")
    assert right.read_range("a.tar", offset=0, length=1) == b"x"
    with pytest.raises(StoreError, match="--push-to hf://org/data"):
        right.presign_put("b.tar", expires_seconds=60)


def test_a_hub_that_does_not_answer_is_named(hub: hub_server.Hub) -> None:
    with relay_to(hub.url) as relay:
        store = HubStore("org/data", token=Secret(hub_server.TOKEN), endpoint=relay.endpoint)
        relay.close()
        with pytest.raises(StoreUnreachableError, match=f"hub at {relay.endpoint} does not answer"):
            store.stat("a.tar")
