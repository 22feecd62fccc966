"""A folder's tar is a function of its content; an archive's root is read, not guessed."""

from __future__ import annotations

import hashlib
import io
import json
import os
import struct
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from kernel_tools.datasets.archive import (
    archive_format,
    archive_stem,
    inspect_archive,
    roots_of,
    scan_folder,
)
from kernel_tools.datasets.stream import VerifyingReader, blocks_of, hash_blocks
from kernel_tools.errors import StagingError


def make(folder: Path, **files: bytes) -> Path:
    for name, data in files.items():
        path = folder / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return folder


def tar_of(folder: Path) -> bytes:
    return b"".join(blocks_of(scan_folder(folder).open()))


def test_the_same_content_gives_the_same_bytes_whatever_the_disk_says(tmp_path: Path) -> None:
    one = make(tmp_path / "1" / "set", a=b"x" * 700, b__c=b"", b__d=b"y")
    two = make(tmp_path / "2" / "set", b__d=b"y", b__c=b"", a=b"x" * 700)
    os.utime(two / "a", (1, 1))
    (two / "a").chmod(0o755)
    (two / "empty").mkdir()
    make(two, _dot_DS_Store=b"litter", _dot_git__config=b"litter")

    assert tar_of(one) == tar_of(two)
    assert hashlib.sha256(tar_of(one)).hexdigest() == (
        # Frozen: another hash would send every data set of every user again.
        "d09a48dcb561a6fe7bf5f0d8cb5427971dcd5ca6f3d58f8d102b32c35b54eece"
    )


def test_another_content_another_name_and_another_top_give_other_bytes(tmp_path: Path) -> None:
    folders = [
        make(tmp_path / "1" / "set", a=b"x"),
        make(tmp_path / "2" / "set", a=b"y"),
        make(tmp_path / "3" / "set", b=b"x"),
        make(tmp_path / "4" / "other", a=b"x"),
    ]
    assert len({tar_of(folder) for folder in folders}) == 4


def test_members_are_sorted_and_carry_no_owner_time_or_mode(tmp_path: Path) -> None:
    folder = make(tmp_path / "set", b=b"2", a__z=b"1", C=b"3")
    plan = scan_folder(folder)

    with tarfile.open(fileobj=io.BytesIO(tar_of(folder))) as tar:
        members = tar.getmembers()

    assert [member.name for member in members] == ["set/C", "set/a/z", "set/b"]
    assert {(m.mtime, m.uid, m.gid, m.uname, m.gname, m.mode) for m in members} == {
        (0, 0, 0, "", "", 0o644)
    }
    assert plan.facts.file_count == 3
    assert plan.facts.content_bytes == 3
    assert plan.facts.root == "data/set"


@pytest.mark.parametrize("name", ["x" * 150, "Grüße/日本語.jpg", "d/" * 60 + "f"])
def test_long_and_foreign_names_are_carried_and_the_size_is_exact(
    tmp_path: Path, name: str
) -> None:
    path = tmp_path / "set" / name
    path.parent.mkdir(parents=True)
    path.write_bytes(b"1234567")
    plan = scan_folder(tmp_path / "set")
    data = b"".join(blocks_of(plan.open()))

    assert plan.size_bytes == len(data)
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        assert tar.getnames() == [f"set/{name}"]


def test_links_are_followed(tmp_path: Path) -> None:
    make(tmp_path / "elsewhere", photo=b"light", deep__photo=b"more")
    folder = make(tmp_path / "set", a=b"x")
    (folder / "link").symlink_to(tmp_path / "elsewhere" / "photo")
    (folder / "images").symlink_to(tmp_path / "elsewhere" / "deep")

    with tarfile.open(fileobj=io.BytesIO(tar_of(folder))) as tar:
        assert tar.getnames() == ["set/a", "set/images/photo", "set/link"]
        assert all(member.isreg() for member in tar)


def test_a_circle_of_links_is_refused(tmp_path: Path) -> None:
    folder = make(tmp_path / "set", a=b"x", deep__b=b"y")
    (folder / "deep" / "up").symlink_to(folder)

    with pytest.raises(StagingError, match="a link to a folder above itself"):
        scan_folder(folder)


def test_a_broken_link_is_named(tmp_path: Path) -> None:
    folder = make(tmp_path / "set", a=b"x")
    (folder / "lost").symlink_to(tmp_path / "nowhere")

    with pytest.raises(StagingError, match="lost cannot be read"):
        scan_folder(folder)


@pytest.mark.skipif(sys.platform == "win32", reason="no FIFO there")
def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    folder = make(tmp_path / "set", a=b"x")
    os.mkfifo(folder / "pipe")

    with pytest.raises(StagingError, match="neither a file nor a folder"):
        scan_folder(folder)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems refuse such names themselves")
@pytest.mark.parametrize("name", [b"caf\xe9.jpg", b"a\\b.jpg", b"a\nb.jpg"])
def test_names_that_cannot_travel_are_refused(tmp_path: Path, name: bytes) -> None:
    folder = make(tmp_path / "set", a=b"x")
    with open(os.path.join(os.fsencode(folder), name), "wb"):
        pass

    with pytest.raises(StagingError, match="Rename it"):
        scan_folder(folder)


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "set" / "deep").mkdir(parents=True)
    with pytest.raises(StagingError, match="holds no file"):
        scan_folder(tmp_path / "set")


@pytest.mark.parametrize("change", [b"", b"longer than before"])
def test_a_file_that_changes_its_size_while_read_is_refused(tmp_path: Path, change: bytes) -> None:
    plan = scan_folder(make(tmp_path / "set", a=b"before"))
    (tmp_path / "set" / "a").write_bytes(change)

    with pytest.raises(StagingError, match="changed while it was being read"):
        list(blocks_of(plan.open()))


@pytest.mark.parametrize("size", [1, 511, 10_000, -1])
def test_the_stream_is_the_same_in_pieces_of_any_size_and_from_any_place(
    tmp_path: Path, size: int
) -> None:
    folder = make(tmp_path / "set", a=b"", b=b"x" * 512, c=os.urandom(1_300), d=b"")
    whole = tar_of(folder)
    stream = scan_folder(folder).open()
    parts = []
    while part := stream.read(size):
        parts.append(part)

    assert b"".join(parts) == whole
    assert all(len(part) == size for part in parts[:-1])
    for place in (0, 700, 1_024, 2_000, len(whole) - 5, len(whole)):
        assert stream.seek(place) == place
        assert stream.read(600) == whole[place : place + 600]
    assert stream.seek(0, io.SEEK_END) == len(whole)


def notebook(*outputs: object) -> bytes:
    cell = {"cell_type": "code", "source": "print(key)", "outputs": list(outputs)}
    return json.dumps({"cells": [cell], "nbformat": 4}).encode()


def test_a_notebook_with_outputs_stays_here_unless_forced(tmp_path: Path) -> None:
    folder = make(tmp_path / "set", **{"look.ipynb": notebook(), "odd.ipynb": b"no notebook"})
    assert scan_folder(folder).facts.file_count == 2

    (folder / "look.ipynb").write_bytes(notebook({"text": "hf_secret"}))
    with pytest.raises(StagingError, match=r"set/look.ipynb would travel .* outputs .* --force"):
        scan_folder(folder)
    assert scan_folder(folder, force=True).facts.file_count == 2


@pytest.mark.parametrize("kind", ["tar", "tar.gz", "zip"])
def test_a_notebook_with_outputs_in_an_archive_is_found(tmp_path: Path, kind: str) -> None:
    folder = make(tmp_path / "set", **{"look.ipynb": notebook({"text": "hf_secret"})})
    path = tmp_path / f"a.{kind}"
    if kind == "zip":
        with zipfile.ZipFile(path, "w") as archive:
            archive.write(folder / "look.ipynb", "set/look.ipynb")
    else:
        with tarfile.open(path, "w" if kind == "tar" else "w:gz") as tar:
            tar.add(folder, "set")

    with path.open("rb") as file, pytest.raises(StagingError, match="set/look.ipynb"):
        inspect_archive(file, kind=kind, what="it")
    with path.open("rb") as file:
        assert inspect_archive(file, kind=kind, what="it", force=True).file_count == 1


def test_a_verifying_reader_withholds_the_end_of_wrong_bytes() -> None:
    digest = hashlib.sha256(b"right").hexdigest()
    right = VerifyingReader(io.BytesIO(b"right"), size_bytes=5, sha256=digest, what="it")
    wrong = VerifyingReader(io.BytesIO(b"wrong"), size_bytes=5, sha256=digest, what="it")

    assert right.read(3) + right.read(2) == b"right"
    assert wrong.read(3) == b"wro"
    with pytest.raises(StagingError, match="it changed while it was being uploaded"):
        wrong.read(2)


@pytest.mark.parametrize(
    ("names", "root"),
    [
        (["a/x", "a/y/z"], "data/a"),
        (["./a/x"], "data/a"),
        (["data/a/x", "data/a/y"], "data/a"),
        (["data/a/x", "data/b/y"], "data/data"),
        (["data/x"], "data/data"),
        (["a/x", "b/y"], None),
        (["x"], None),
        (["a/x", "readme"], None),
    ],
)
def test_the_root_is_read_from_the_names(names: list[str], root: str | None) -> None:
    assert roots_of(names)[1] == root


@pytest.mark.parametrize(
    ("name", "kind", "stem"),
    [
        ("a.tar", "tar", "a"),
        ("a.v2.TAR.GZ", "tar.gz", "a.v2"),
        ("a.tgz", "tar.gz", "a"),
        ("a.zip", "zip", "a"),
    ],
)
def test_formats_go_by_the_suffix(name: str, kind: str, stem: str) -> None:
    assert (archive_format(name), archive_stem(name)) == (kind, stem)


def test_an_unknown_kind_of_file_names_the_known_ones() -> None:
    with pytest.raises(StagingError, match=r"\.tar \.tar\.gz \.tgz \.zip"):
        archive_format("data.7z")


def test_credentials_in_an_archive_are_found(tmp_path: Path) -> None:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as tar:
        for name in ("set/a.jpg", "set/.env.local", "set/deep/server.key"):
            tar.addfile(tarfile.TarInfo(name))
    data.seek(0)
    with pytest.raises(StagingError, match=r"set/\.env\.local and 1 more"):
        inspect_archive(data, kind="tar", what="it")
    data.seek(0)
    assert inspect_archive(data, kind="tar", what="it", force=True).file_count == 3


def test_a_hash_counts_what_it_has_seen() -> None:
    seen: list[int] = []
    assert hash_blocks([b"ab", b"c"], on_bytes=seen.append) == (
        hashlib.sha256(b"abc").hexdigest(),
        3,
    )
    assert seen == [2, 3]


def tarred(*members: tuple[tarfile.TarInfo, bytes], kind: str = "tar") -> io.BytesIO:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w" if kind == "tar" else "w:gz") as tar:
        for info, content in members:
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    data.seek(0)
    return data


def one(name: str, content: bytes = b"x", **fields: object) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    for field, value in fields.items():
        setattr(info, field, value)
    return info, content


@pytest.mark.parametrize(
    ("members", "why"),
    [
        ([one("set/l", b"", type=tarfile.SYMTYPE, linkname="a")], "a symbolic link"),
        ([one("../evil")], "leaves the folder"),
        ([one("set/A.jpg"), one("set/a.jpg")], "two entries that are one"),
        ([one("set/su", mode=0o4755)], "set-user-id"),
        ([one("set/f", b"", type=tarfile.FIFOTYPE)], "a FIFO"),
        ([one("set/a\nb")], "control characters"),
    ],
)
@pytest.mark.parametrize("kind", ["tar", "tar.gz"])
def test_what_the_remote_would_refuse_is_refused_before_it_is_uploaded(
    members: list[tuple[tarfile.TarInfo, bytes]], why: str, kind: str
) -> None:
    with pytest.raises(StagingError, match=f"it would not be unpacked as a {kind}: .*{why}"):
        inspect_archive(tarred(*members, kind=kind), kind=kind, what="it", force=True)


@pytest.mark.parametrize("cut", [1, 600, 9000])
def test_an_archive_that_was_cut_short_is_refused_before_it_is_uploaded(cut: int) -> None:
    whole = tarred(one("set/a", os.urandom(50_000)), kind="tar.gz").getvalue()
    with pytest.raises(StagingError, match="no sound|would not be unpacked"):
        inspect_archive(io.BytesIO(whole[:-cut]), kind="tar.gz", what="it")


def test_a_zip_that_lies_about_its_sizes_costs_no_time() -> None:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        archive.writestr("set/a", b"0123456789")
    lying = bytearray(data.getvalue())
    struct.pack_into("<I", lying, lying.rindex(b"PK\x01\x02") + 24, 0xFFFFFFF0)
    assert (
        inspect_archive(io.BytesIO(bytes(lying)), kind="zip", what="it").content_bytes == 0xFFFFFFF0
    )
    link = zipfile.ZipInfo("set/l")
    link.external_attr = 0o120777 << 16
    with zipfile.ZipFile(data, "w") as archive:
        archive.writestr(link, "/etc/passwd")
    with pytest.raises(StagingError, match="would not be unpacked as a zip: .* a symbolic link"):
        inspect_archive(data, kind="zip", what="it")


@pytest.mark.parametrize("more", [b"x", b"PK\x05\x06" + bytes(10)])
def test_a_zip_with_something_after_its_end_is_refused_before_it_is_uploaded(more: bytes) -> None:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        archive.writestr("set/a", b"0123456789")
    assert inspect_archive(io.BytesIO(data.getvalue()), kind="zip", what="it").file_count == 1
    with pytest.raises(StagingError, match="after its end|no sound"):
        inspect_archive(io.BytesIO(data.getvalue() + more), kind="zip", what="it")
