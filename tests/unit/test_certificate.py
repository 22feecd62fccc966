"""The self-made certificate is one that OpenSSL accepts on both sides of a line, and refuses elsewhere."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest

from kernel_tools.stores.certificate import self_signed


def write(folder: Path, name: str) -> tuple[Path, Path]:
    certificate, key = self_signed(name)
    paths = folder / f"{name}.crt", folder / f"{name}.key"
    for path, text in zip(paths, (certificate, key), strict=True):
        path.write_text(text)
    return paths


def shake_hands(server: tuple[Path, Path], client: tuple[Path, Path], trusted: Path) -> None:
    """Mutual TLS in memory; raises `ssl.SSLError` where either side refuses."""
    there = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    there.load_cert_chain(*server)
    there.verify_mode = ssl.CERT_REQUIRED
    there.load_verify_locations(trusted)
    here = ssl.create_default_context(cafile=str(trusted))
    here.load_cert_chain(*client)
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = [
        here.wrap_bio(down, up, server_hostname="127.0.0.1"),
        there.wrap_bio(up, down, server_side=True),
    ]
    done = [False, False]
    for _ in range(10):
        for number, side in enumerate(sides):
            if not done[number]:
                try:
                    side.do_handshake()
                    done[number] = True
                except ssl.SSLWantReadError:
                    pass
    assert done == [True, True]
    sides[1].write(b"hello")
    assert sides[0].read() == b"hello"


def test_both_sides_of_a_line_accept_it(tmp_path: Path) -> None:
    own = write(tmp_path, "own")
    shake_hands(own, own, own[0])


def test_another_of_the_same_kind_is_refused(tmp_path: Path) -> None:
    own, forged = write(tmp_path, "own"), write(tmp_path, "forged")
    with pytest.raises(ssl.SSLError):
        shake_hands(own, forged, own[0])
    with pytest.raises(ssl.SSLError):
        shake_hands(forged, own, own[0])


def test_no_two_share_a_key() -> None:
    assert self_signed("x")[1] != self_signed("x")[1]
