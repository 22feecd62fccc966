"""Ctrl-C in the midst of a call: `%xmode Verbose` must find no URL and no key to show."""

from __future__ import annotations

import contextlib
import traceback
from types import SimpleNamespace

import pytest

from kernel_tools.datasets.reference import DatasetReference
from kernel_tools.kernels.base import PATIENCE, ServerAddress
from kernel_tools.kernels.driver import ServerDriver
from kernel_tools.launching.launch import LaunchOptions, LaunchRequest, launch
from kernel_tools.preflight import look
from kernel_tools.runs.registry import Registry
from kernel_tools.stores.base import ObjectInfo
from kernel_tools.stores.failures import translated

CANARY = "canary-in-a-frame"


class Driver(ServerDriver):
    def open_line(self, kernel_id):
        raise NotImplementedError


def in_a_library(url):
    """Stands for a client library: its frame holds the secret when the interrupt arrives."""
    assert url
    raise KeyboardInterrupt


@pytest.mark.parametrize("library", ["kernel", "store"])
def test_an_interrupt_leaves_the_librarys_frames_behind(library):
    guard: contextlib.AbstractContextManager[None]
    if library == "kernel":
        address = ServerAddress.parse("http://127.0.0.1:1", None)
        guard = Driver(address, PATIENCE).named("a cell")
    else:
        guard = translated(endpoint="e", bucket="b", key="k", ask_again=lambda: None)
    with pytest.raises(KeyboardInterrupt) as caught, guard:
        in_a_library(CANARY)
    told = traceback.TracebackException.from_exception(caught.value, capture_locals=True)
    assert "in_a_library" not in "".join(told.format())


class InterruptedLine:
    """A connection whose user presses Ctrl-C when the secrets are about to travel."""

    name, where, remote_dir, local = "box", "a box", "/remote", False

    def sync(self, _plan):
        return SimpleNamespace(
            lines=list, warnings=(), paths=(), files=0, bytes=0, uploaded=0, manifest={}
        )

    def put_secrets(self, _name, payload):
        in_a_library(repr(payload))


class SigningStore:
    """Hands out links that hold the canary."""

    name, bucket = "s3", "dataset"

    def presign_get(self, key, *, expires_seconds):
        return f"http://127.0.0.1/{key}?X-Amz-Signature={CANARY}&{expires_seconds}"

    presign_put = presign_get

    def begin_upload(self, _key):
        return "1"

    def presign_part(self, key, _upload_id, _number, *, expires_seconds):
        return self.presign_get(key, expires_seconds=expires_seconds)

    presign_completion = presign_part

    def stat(self, key):
        return ObjectInfo(key, 1)


def frames_after(function, *args, **options):
    with pytest.raises(KeyboardInterrupt) as caught:
        function(*args, **options)
    told = traceback.TracebackException.from_exception(caught.value, capture_locals=True)
    return "".join(told.format())


@pytest.mark.parametrize("way", ["launch", "info"])
def test_an_interrupt_while_links_travel_shows_none(way, tmp_path):
    store = SigningStore()
    reference = DatasetReference(
        "coins", "coins.tar", 1, "0" * 64, "data/coins", "tar", 1, 1, "s3", "dataset", None
    )
    request = LaunchRequest(
        ("x",),
        "command",
        LaunchOptions(),
        references=(reference,),
        secret_environment={"T": CANARY},
    )
    calls = {
        "info": (look, (), {"store": lambda: store, "references": [reference]}),
        "launch": (
            launch, (request,),
            {"store": store, "registry": Registry(tmp_path), "project_dir": tmp_path, "push_to": store},
        ),
    }  # fmt: skip
    function, arguments, options = calls[way]
    line = InterruptedLine()
    if way == "info":
        arguments = (line,)
    else:
        options["connection"] = line
    assert CANARY not in frames_after(function, *arguments, **options)
    assert CANARY in frames_after(function.__wrapped__, *arguments, **options)
