"""Archives: what is honest is unpacked as it was, what is hostile is refused in one sentence."""

import bz2
import gzip
import io
import os
import stat
import struct
import tarfile
import zipfile
import zlib

import pytest
from kernel_tools_agent import unpack_writer
from kernel_tools_agent.errors import UnsafeArchiveError
from kernel_tools_agent.extract import Bounds, extract

FILES = {"ds/data.yaml": b"nc: 1\n", "ds/images/train/0001.jpg": os.urandom(3000), "ds/empty": b""}


def member(name, *, kind=tarfile.REGTYPE, data=b"x", mode=0o644, link="", **pax):
    info = tarfile.TarInfo(name)
    info.type, info.mode, info.linkname = kind, mode, link
    info.size = len(data) if kind == tarfile.REGTYPE else 0
    info.pax_headers = pax
    return info, data


def tar(*members, layout=tarfile.PAX_FORMAT):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=layout) as archive:
        for info, data in members:
            archive.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def zipped(*entries, compression=zipfile.ZIP_STORED):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as archive:
        for name, data, mode in entries:
            info = zipfile.ZipInfo(name)
            info.external_attr = mode << 16
            info.compress_type = compression
            archive.writestr(info, data)
    return buffer.getvalue()


def honest(layout=tarfile.PAX_FORMAT):
    folder = member("ds/images", kind=tarfile.DIRTYPE, data=b"", mode=0o755)
    return tar(folder, *(member(n, data=d) for n, d in FILES.items()), layout=layout)


def checksummed(header):
    header = header[:148] + b" " * 8 + header[156:]
    return header[:148] + b"%06o\0 " % sum(header) + header[156:]


def unpack(tmp_path, data, kind="tar", **bounds):
    path, folder = tmp_path / "archive", tmp_path / "jail" / "content"
    path.write_bytes(data)
    folder.mkdir(parents=True)
    declared = Bounds(archive_bytes=len(data), **bounds)
    return extract(str(path), str(folder), kind=kind, bounds=declared), folder


def tree(folder):
    found = {}
    for base, _, names in os.walk(str(folder)):
        for name in names:
            path = os.path.join(base, name)
            with open(path, "rb") as stream:
                found[os.path.relpath(path, str(folder))] = stream.read()
    return found


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (honest(), "tar"),
        (honest(tarfile.USTAR_FORMAT), "tar"),
        (honest(tarfile.GNU_FORMAT), "tar"),
        (gzip.compress(honest()), "tar.gz"),
        (gzip.compress(honest()[:700]) + gzip.compress(honest()[700:]), "tar.gz"),
        (zipped(*((n, d, 0o100644) for n, d in FILES.items())), "zip"),
        (zipped(*((n, d, 0) for n, d in FILES.items()), compression=zipfile.ZIP_DEFLATED), "zip"),
    ],
    ids=["pax", "ustar", "gnu", "gz", "gz in two members", "zip", "deflated zip"],
)
def test_an_honest_archive_comes_out_as_it_was(tmp_path, data, kind):
    size = sum(map(len, FILES.values()))
    told, folder = unpack(tmp_path, data, kind, content_bytes=size, file_count=3)
    assert told == (3, size)
    assert tree(folder) == FILES


@pytest.mark.parametrize("layout", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
def test_long_and_foreign_names_come_out(tmp_path, layout):
    name = "ds/" + "a" * 120 + "/zażółć gęślą #1 100%/фото 猫.jpg"
    _, folder = unpack(tmp_path, tar(member(name, data=b"cat"), layout=layout))
    assert tree(folder) == {name: b"cat"}


def test_a_file_over_eight_gib_is_understood_in_its_header(tmp_path):
    data = tar(member("a"), layout=tarfile.GNU_FORMAT)
    header = bytearray(data[:512])
    header[124:136] = b"\x80" + (9 << 30).to_bytes(11, "big")
    with pytest.raises(UnsafeArchiveError, match="more than the"):
        unpack(tmp_path, checksummed(bytes(header)) + data[512:], content_bytes=1 << 20)


def test_a_zip_whose_sizes_stand_behind_the_content_comes_out(tmp_path):
    _, folder = unpack(tmp_path, described_zip(False), "zip")
    assert tree(folder) == {"a": b"content"}


def test_program_bits_stay_and_nobody_may_write(tmp_path):
    data = tar(member("run.sh", mode=0o777), member("plain", mode=0o666))
    _, folder = unpack(tmp_path, data)
    assert stat.S_IMODE((folder / "run.sh").stat().st_mode) == 0o555
    assert stat.S_IMODE((folder / "plain").stat().st_mode) == 0o444


def patched_zip(data, old, new, count=-1):
    assert old in data
    return data.replace(old, new, count)


def lying_zip():
    """The directory says 5 bytes, the content is more."""
    data = bytearray(zipped(("a", b"0123456789", 0o100644)))
    directory = data.rindex(b"PK\x01\x02")
    struct.pack_into("<I", data, directory + 24, 5)
    return bytes(data)


def overlapping_zip():
    """Two directory entries share one body."""
    data = zipped(("a", b"0" * 100, 0o100644), ("b", b"0" * 100, 0o100644))
    first = data.index(b"PK\x01\x02")
    second = data.index(b"PK\x01\x02", first + 4)
    return data[: second + 42] + struct.pack("<I", 0) + data[second + 46 :]


class Unseekable(io.RawIOBase):
    """Makes `zipfile` write sizes and CRC behind the content, in a data descriptor."""

    def __init__(self):
        super().__init__()
        self.data = b""

    def writable(self):
        return True

    def write(self, data):
        self.data += bytes(data)
        return len(data)


def described_zip(lie):
    stream = Unseekable()
    with (
        zipfile.ZipFile(stream, "w") as archive,
        archive.open(zipfile.ZipInfo("a"), "w") as member_stream,
    ):
        member_stream.write(b"content")
    data = stream.data
    crc = zlib.crc32(b"content")
    assert data.count(struct.pack("<I", crc)) == 2  # descriptor and directory
    return data.replace(struct.pack("<I", crc), struct.pack("<I", crc ^ 1)) if lie else data


def sized(number):
    """A header whose size field is base 256."""
    header = bytearray(tar(member("a"), layout=tarfile.GNU_FORMAT)[:512])
    header[124:136] = number
    return checksummed(bytes(header)) + bytes(1024)


def signed(number, place=124):
    """A header with a number field that is no octal one."""
    header = bytearray(tar(member("a"), layout=tarfile.GNU_FORMAT)[:512])
    header[place : place + len(number)] = number
    return checksummed(bytes(header)) + bytes(1024)


HUGE = bytearray(tar(member("a", comment="c" * 600)))
HUGE[124:136] = b"%011o\0" % (1 << 33)

HOSTILE = {
    "parent": (tar(member("../evil")), "tar"),
    "parent inside": (tar(member("ds/../../evil")), "tar"),
    "parent in pax": (tar(member("x", path="../evil")), "tar"),
    "parent in long name": (tar(member("a/" * 60 + "../" * 70 + "evil"), layout=tarfile.GNU_FORMAT), "tar"),
    "absolute": (tar(member("/tmp/evil")), "tar"),
    "drive letter": (tar(member("C:/evil")), "tar"),
    "backslash": (tar(member("..\\evil")), "tar"),
    "symbolic link": (tar(member("l", kind=tarfile.SYMTYPE, link="/etc")), "tar"),
    "link then through it": (
        tar(member("l", kind=tarfile.SYMTYPE, link=".."), member("l/evil")),
        "tar",
    ),
    "hard link": (tar(member("l", kind=tarfile.LNKTYPE, link="/etc/passwd")), "tar"),
    "long link": (tar(member("l", kind=tarfile.SYMTYPE, link="x" * 200), layout=tarfile.GNU_FORMAT), "tar"),
    "link in pax": (tar(member("l", linkpath="/etc/passwd")), "tar"),
    "character device": (tar(member("d", kind=tarfile.CHRTYPE)), "tar"),
    "block device": (tar(member("d", kind=tarfile.BLKTYPE)), "tar"),
    "fifo": (tar(member("f", kind=tarfile.FIFOTYPE)), "tar"),
    "sparse": (checksummed(tar(member("s"))[:156] + b"S" + tar(member("s"))[157:512]) + bytes(1024), "tar"),
    "sparse in pax": (tar(member("s", **{"GNU.sparse.major": "1"})), "tar"),
    "unknown kind": (checksummed(tar(member("s"))[:156] + b"Z" + tar(member("s"))[157:512]) + bytes(1024), "tar"),
    "duplicate": (tar(member("a"), member("a", data=b"other")), "tar"),
    "case collision": (tar(member("ds/A.jpg"), member("ds/a.JPG")), "tar"),
    "folder case collision": (tar(member("DS/a"), member("ds/b")), "tar"),
    "composed and decomposed": (tar(member("caf\u00e9"), member("cafe\u0301")), "tar"),
    "file is a folder": (tar(member("a"), member("a/b")), "tar"),
    "folder is a file": (tar(member("a/b"), member("a")), "tar"),
    "folder over file": (tar(member("a"), member("a", kind=tarfile.DIRTYPE, data=b"")), "tar"),
    "right to left": (tar(member("photo\u202egpj.exe")), "tar"),
    "zero width": (tar(member("a\u200bb")), "tar"),
    "full width dots": (tar(member("\uff0e\uff0e/evil")), "tar"),
    "two dot leader": (tar(member("\u2025/evil")), "tar"),
    "full width slash": (tar(member("..\uff0fevil")), "tar"),
    "new line": (tar(member("a\nb")), "tar"),
    "escape": (tar(member("a\x1b[2Jb")), "tar"),
    "no utf-8": (tar(member("a\udcff"), layout=tarfile.GNU_FORMAT), "tar"),
    "zero byte in pax": (tar(member("x", path="a\0b")), "tar"),
    "setuid": (tar(member("su", mode=0o4755)), "tar"),
    "setgid": (tar(member("sg", mode=0o2755)), "tar"),
    "no name": (tar(member("")), "tar"),
    "only dot": (tar(member(".")), "tar"),
    "too deep": (tar(member("d/" * 60 + "f")), "tar"),
    "name too long": (tar(member("n" * 300)), "tar"),
    "huge header": (checksummed(bytes(HUGE[:512])) + bytes(HUGE[512:]), "tar"),
    "truncated": (honest()[:-12000] + b"", "tar"),
    "no end mark": (honest().rstrip(b"\0"), "tar"),
    "trailing garbage": (honest() + b"garbage", "tar"),
    "second archive after the end": (honest() + honest(), "tar"),
    "flipped header": (b"X" + honest()[1:], "tar"),
    "flipped later header": (honest()[:513] + b"X" + honest()[514:], "tar"),
    "not a tar": (b"hello" * 1000, "tar"),
    "empty file": (b"", "tar"),
    "gzip called tar": (gzip.compress(honest()), "tar"),
    "zip called tar": (zipped(("a", b"x", 0o100644)), "tar"),
    "tar called gzip": (honest(), "tar.gz"),
    "bzip2 called gzip": (bz2.compress(honest()), "tar.gz"),
    "gzip truncated": (gzip.compress(honest())[:-20], "tar.gz"),
    "gzip wrong checksum": (gzip.compress(honest())[:-8] + b"\0" * 8, "tar.gz"),
    "gzip trailing garbage": (gzip.compress(honest()) + b"garbage", "tar.gz"),
    "gzip damaged": (gzip.compress(honest())[:40] + b"\xff" * 40 + gzip.compress(honest())[80:], "tar.gz"),
    "tar called zip": (honest(), "zip"),
    "zip parent": (zipped(("../evil", b"x", 0o100644)), "zip"),
    "zip absolute": (zipped(("/evil", b"x", 0o100644)), "zip"),
    "zip backslash": (zipped(("..\\evil", b"x", 0o100644)), "zip"),
    "zip link": (zipped(("l", b"/etc/passwd", 0o120777)), "zip"),
    "zip fifo": (zipped(("f", b"", 0o010644)), "zip"),
    "zip setuid": (zipped(("su", b"x", 0o104755)), "zip"),
    "zip case collision": (zipped(("A", b"x", 0o100644), ("a", b"x", 0o100644)), "zip"),
    "zip zero byte": (patched_zip(zipped(("abc", b"x", 0o100644)), b"abc", b"a\0c"), "zip"),
    "zip encrypted": (patched_zip(zipped(("a", b"x", 0o100644)), b"PK\x01\x02\x14\x03\x14\0\0\0", b"PK\x01\x02\x14\x03\x14\0\1\0"), "zip"),
    "zip lzma": (zipped(("a", b"x" * 99, 0o100644), compression=zipfile.ZIP_LZMA), "zip"),
    "zip wrong size": (lying_zip(), "zip"),
    "zip other name in its local header": (
        patched_zip(zipped(("abcd", b"x", 0o100644)), b"abcd", b"abce", 1), "zip",
    ),
    "zip data descriptor lies": (described_zip(True), "zip"),
    "zip control characters": (zipped(("a\x1bb", b"x", 0o100644)), "zip"),
    "zip decomposed collision": (
        zipped(("caf\u00e9", b"x", 0o100644), ("cafe\u0301", b"x", 0o100644)), "zip",
    ),
    "zip duplicate": (
        patched_zip(zipped(("aa", b"x", 0o100644), ("ab", b"y", 0o100644)), b"ab", b"aa"), "zip",
    ),
    "zip device": (zipped(("d", b"", 0o020644)), "zip"),
    "zip drive letter": (zipped(("C:/evil", b"x", 0o100644)), "zip"),
    "zip name too long": (zipped(("n" * 300, b"x", 0o100644)), "zip"),
    "zip folder with content": (zipped(("a/", b"x", 0o040755)), "zip"),
    "minus in a size": (signed(b"-0000000001\0"), "tar"),
    "minus in a size of a bomb": (gzip.compress(signed(b"-0000000001\0") + bytes(64 << 20)), "tar.gz"),
    "plus in a size": (signed(b"+0000000001\0"), "tar"),
    "underscore in a size": (signed(b"0000_000_01\0"), "tar"),
    "minus in a mode": (signed(b"-000644\0", 100), "tar"),
    "negative size": (sized(b"\xff" * 12), "tar"),
    "size beyond any disk": (sized(b"\x80" + (1 << 60).to_bytes(11, "big")), "tar"),
    "size in pax that is no number": (tar(member("a", size="1e3")), "tar"),
    "size in pax beyond the end": (tar(member("a", size="99999")), "tar"),
    "zip overlap": (overlapping_zip(), "zip"),
    "zip truncated": (zipped(("a", b"x" * 999, 0o100644))[:-30], "zip"),
    "zip trailing garbage": (zipped(("a", b"x", 0o100644)) + b"garbage", "zip"),
    "zip leading garbage": (b"#!/bin/sh\n" + zipped(("a", b"x", 0o100644)), "zip"),
    "zip damaged content": (patched_zip(zipped(("a", b"content", 0o100644)), b"content", b"CONTENT"), "zip"),
    "unknown format": (honest(), "rar"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize("name", sorted(HOSTILE))
def test_a_hostile_archive_is_refused_in_one_sentence(tmp_path, name):
    data, kind = HOSTILE[name]
    with pytest.raises(UnsafeArchiveError) as caught:
        unpack(tmp_path, data, kind)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 1500
    assert os.listdir(str(tmp_path / "jail")) == ["content"]
    assert sorted(os.listdir(str(tmp_path))) == ["archive", "jail"]
    for base, folders, names in os.walk(str(tmp_path / "jail")):
        assert not any(os.path.islink(os.path.join(base, n)) for n in folders + names)


@pytest.mark.parametrize("kind", ["tar.gz", "zip"])
def test_a_bomb_is_refused_by_ratio_before_it_is_written(tmp_path, kind):
    content = bytes(300 << 20)
    if kind == "zip":
        data = zipped(("bomb", content, 0o100644), compression=zipfile.ZIP_DEFLATED)
    else:
        data = gzip.compress(tar(member("bomb", data=content)), 1)
    with pytest.raises(UnsafeArchiveError, match="plausible for its size"):
        unpack(tmp_path, data, kind)
    assert os.listdir(str(tmp_path / "jail" / "content")) == []


def test_more_than_was_declared_is_refused(tmp_path):
    with pytest.raises(UnsafeArchiveError, match="more than the 3005 bytes that are declared"):
        unpack(tmp_path, honest(), content_bytes=3005)


def test_more_folders_than_are_plausible_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(unpack_writer, "_MOST_FOLDERS", 20)
    folders = [member(f"d{n}/", kind=tarfile.DIRTYPE, data=b"") for n in range(30)]
    with pytest.raises(UnsafeArchiveError, match="more folders than are plausible"):
        unpack(tmp_path, tar(*folders))


def test_more_files_than_were_declared_are_refused(tmp_path):
    with pytest.raises(UnsafeArchiveError, match="more files"):
        unpack(tmp_path, honest(), file_count=2)


def test_unpacking_can_be_ended_in_between(tmp_path):
    class Enough(Exception):
        pass

    def tick(done):
        raise Enough

    (tmp_path / "a").write_bytes(honest())
    (tmp_path / "c").mkdir()
    with pytest.raises(Enough):
        extract(str(tmp_path / "a"), str(tmp_path / "c"), kind="tar", bounds=Bounds(9), tick=tick)
