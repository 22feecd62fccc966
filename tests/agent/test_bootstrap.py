"""Code arrives verified, once, and is laid where it belongs and nowhere else."""

import hashlib
import os
import stat
import zlib

import pytest
from kernel_tools_agent import bootstrap


def sha(data):
    return hashlib.sha256(data).hexdigest()


@pytest.fixture
def root(tmp_path):
    return bootstrap.missing(str(tmp_path / "r"), [])["remote_dir"]


def test_missing_prepares_the_folder_and_names_what_is_absent(tmp_path):
    told = bootstrap.missing(str(tmp_path / "new" / "r"), [sha(b"a"), sha(b"a"), sha(b"b")])
    assert told["missing"] == [sha(b"a"), sha(b"b")]
    assert told["remote_dir"] == str(tmp_path / "new" / "r")
    assert stat.S_IMODE(os.stat(os.path.join(told["remote_dir"], "secrets")).st_mode) == 0o700


def test_what_was_received_is_not_missing_and_not_stored_twice(root):
    archive = bootstrap.pack([b"a", b"", b"b" * 100000])
    assert bootstrap.receive(root, archive)["stored"] == 3
    assert bootstrap.receive(root, archive)["stored"] == 0
    assert bootstrap.missing(root, [sha(b"a"), sha(b""), sha(b"b" * 100000)])["missing"] == []
    path = bootstrap.blob_path(root, sha(b"a"))
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o444
    assert path.endswith(os.path.join("blobs", sha(b"a")[:2], sha(b"a")))


def test_a_damaged_blob_is_asked_for_again(root):
    bootstrap.receive(root, bootstrap.pack([b"good"]))
    path = bootstrap.blob_path(root, sha(b"good"))
    os.chmod(path, 0o644)
    with open(path, "wb") as stream:
        stream.write(b"bad")
    assert bootstrap.missing(root, [sha(b"good")])["missing"] == [sha(b"good")]


def test_every_flipped_or_missing_byte_of_a_pack_is_refused(root):
    archive = bootstrap.pack([b"some code\n" * 5, b"more"])
    raw = zlib.decompress(archive)
    for position in range(len(bootstrap.MAGIC), len(raw)):
        damaged = bytearray(raw)
        damaged[position] ^= 1
        with pytest.raises(ValueError, match=r"damaged|cut short"):
            bootstrap.receive(root, zlib.compress(bytes(damaged)))
    for length in range(0, len(archive) - 1, 3):
        if length:
            with pytest.raises(ValueError, match=r"damaged|cut short"):
                bootstrap.receive(root, archive[:length])
    for _, _, names in os.walk(os.path.join(root, "blobs")):
        assert not [name for name in names if name.endswith(".tmp")]


def test_links_share_the_blob_and_programs_are_copies(root, tmp_path):
    bootstrap.receive(root, bootstrap.pack([b"plain", b"#!/bin/sh\n"]))
    files = {"a/plain.py": [0o644, sha(b"plain")], "a/run.sh": [0o755, sha(b"#!/bin/sh\n")]}
    bootstrap.lay_tree(root, files, str(tmp_path / "tree"))
    plain, program = tmp_path / "tree" / "a" / "plain.py", tmp_path / "tree" / "a" / "run.sh"
    assert os.path.samefile(str(plain), bootstrap.blob_path(root, sha(b"plain")))
    assert not os.path.samefile(str(program), bootstrap.blob_path(root, sha(b"#!/bin/sh\n")))
    assert stat.S_IMODE(program.stat().st_mode) == 0o555


def test_where_links_are_impossible_the_tree_is_copies(root, tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError("links are not supported here")

    bootstrap.receive(root, bootstrap.pack([b"plain"]))
    monkeypatch.setattr(os, "link", refuse)
    bootstrap.lay_tree(root, {"p.py": [0o644, sha(b"plain")]}, str(tmp_path / "tree"))
    assert (tmp_path / "tree" / "p.py").read_bytes() == b"plain"
    assert stat.S_IMODE((tmp_path / "tree" / "p.py").stat().st_mode) == 0o444


@pytest.mark.parametrize("path", ["../x", "/x", "a/../x", "a//b", "./a", "a\\b", ""])
def test_a_path_that_leaves_the_tree_is_refused(root, tmp_path, path):
    bootstrap.receive(root, bootstrap.pack([b"x"]))
    with pytest.raises(ValueError, match="leaves its folder"):
        bootstrap.lay_tree(root, {path: [0o644, sha(b"x")]}, str(tmp_path / "tree"))
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("digest", ["", "../../etc/passwd", "g" * 64, "A" * 64])
def test_what_is_no_digest_is_refused(root, digest):
    with pytest.raises(ValueError, match="not a SHA-256"):
        bootstrap.blob_path(root, digest)


def test_the_agents_folder_appears_once_and_whole(root):
    files = {"api.py": [0o644, sha(b"x = 1\n")]}
    manifest = {"hash": bootstrap.hash12(files), "files": files}
    archive = bootstrap.pack([b"x = 1\n"])
    first = bootstrap.receive(root, archive, manifest)
    assert bootstrap.receive(root, b"", manifest) == {"stored": 0, "agent_dir": first["agent_dir"]}
    assert os.listdir(first["agent_dir"]) == ["kernel_tools_agent"]


def test_the_file_runs_alone_as_text(tmp_path):
    with open(bootstrap.__file__, encoding="utf-8") as stream:
        names = {"__name__": "sent_inline"}
        exec(compile(stream.read(), "bootstrap", "exec"), names)  # how it is first sent
    assert names["missing"](str(tmp_path), [])["missing"] == []


def test_a_verified_blob_is_not_read_again_until_somebody_writes_to_it(root, monkeypatch):
    bootstrap.receive(root, bootstrap.pack([b"good"]))
    good = sha(b"good")
    path = bootstrap.blob_path(root, good)
    with monkeypatch.context() as patch:
        patch.setattr(bootstrap.hashlib, "sha256", lambda _: pytest.fail("it was read"))
        assert bootstrap.missing(root, [good])["missing"] == []
    os.chmod(path, 0o644)
    with open(path, "r+b") as stream:
        stream.write(b"GOOD")
    assert bootstrap.missing(root, [good])["missing"] == [good]


def test_after_a_crash_of_the_machine_everything_is_read_again(root, monkeypatch):
    bootstrap.receive(root, bootstrap.pack([b"good"]))
    path = bootstrap.blob_path(root, sha(b"good"))
    os.chmod(path, 0o644)
    with open(path, "wb"):
        pass  # torn: the name is there, the bytes were not written through
    bootstrap._mark_verified(path)
    monkeypatch.setattr(bootstrap, "_boot_time", lambda: os.stat(path).st_ctime + 1)
    assert bootstrap.missing(root, [sha(b"good")])["missing"] == [sha(b"good")]


def test_listings_stand_for_what_they_name(root):
    names = [sha(b"a"), sha(b"b")]
    listing = b"".join(map(bytes.fromhex, names))
    told = bootstrap.missing(root, [], [sha(listing)])
    assert (told["missing"], told["unknown"]) == ([], [sha(listing)])
    bootstrap.receive(root, bootstrap.pack([b"a", listing]))
    told = bootstrap.missing(root, [], [sha(listing)])
    assert (told["missing"], told["unknown"]) == ([sha(b"b")], [])
