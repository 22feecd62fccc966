"""Receive code into a content-addressed folder and lay trees from it. One file, no import of ours.

It is also sent inline, before anything of ours is on the host, so it must stay self-contained.

    <remote_dir>/blobs/<aa>/<sha256>            every file once, mode 0444
    <remote_dir>/agent/<hash12>/kernel_tools_agent/*.py
    <remote_dir>/secrets/                       mode 0700

A pack is `zlib(MAGIC + entries)`, an entry being 32 bytes SHA-256, 8 bytes big-endian length, content.
It carries no names, so it can write nowhere but into `blobs/`.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import struct
import time
import zlib
from typing import Any, Dict, Iterable, List, Mapping, Optional, Sequence, Union

MAGIC = b"kernel-tools-pack-1\n"
_ENTRY = struct.Struct(">32sQ")
# Code is kilobytes; what is larger than this unpacked is no code (a wrong or hostile pack).
_MOST_BYTES = 1 << 30
_HEX = frozenset("0123456789abcdef")
# The time that a blob bears once its content was seen to be right; any write gives it another.
_VERIFIED_TIME = 1000000000.0

# {"detector/train.py": [mode, sha256], ...}
Manifest = Mapping[str, Sequence[Union[int, str]]]


def pack(contents: Iterable[bytes], *, level: int = 6) -> bytes:
    """Return the pack of these files' contents, for `receive`."""
    compressor = zlib.compressobj(level)
    parts = [compressor.compress(MAGIC)]
    for content in contents:
        head = _ENTRY.pack(hashlib.sha256(content).digest(), len(content))
        parts.append(compressor.compress(head))
        parts.append(compressor.compress(content))
    parts.append(compressor.flush())
    return b"".join(parts)


def missing(
    remote_dir: str, digests: Sequence[str], listings: Sequence[str] = ()
) -> Dict[str, Any]:
    """Return which blobs are absent or damaged; prepares `remote_dir` where it is new.

    Args:
        remote_dir: root of everything of ours.
        digests: blobs that are asked for by name.
        listings: blobs that hold the names of others, 32 bytes each, which are asked for as well.

    Returns:
        {"missing": [sha256, ...], "unknown": listings that are absent themselves, "remote_dir":
        absolute path, "boot_id": str}
    """
    root = os.path.abspath(os.path.expanduser(remote_dir))
    for name in ("blobs", "agent", "runs", "datasets"):
        os.makedirs(os.path.join(root, name), exist_ok=True)
    secrets = os.path.join(root, "secrets")
    os.makedirs(secrets, mode=0o700, exist_ok=True)
    os.chmod(secrets, 0o700)
    booted = _boot_time()
    unknown = [name for name in listings if not _present(root, name, booted)]
    asked = list(digests)
    for name in listings:
        if name not in unknown:
            with open(blob_path(root, name), "rb") as stream:
                names = stream.read()
            asked += [names[at : at + 32].hex() for at in range(0, len(names), 32)]
    absent = [digest for digest in dict.fromkeys(asked) if not _present(root, digest, booted)]
    return {"missing": absent, "unknown": unknown, "remote_dir": root, "boot_id": _boot_id()}


def receive(
    remote_dir: str, archive: bytes, agent_manifest: Optional[Mapping[str, Any]] = None
) -> Dict[str, Any]:
    """Store the files of a pack, each verified, and lay the agent's own folder from them.

    Args:
        remote_dir: as `missing` returned it.
        archive: a pack; empty where nothing was missing.
        agent_manifest: {"hash": hash12, "files": {"api.py": [mode, sha256], ...}}

    Returns:
        {"stored": files written, "agent_dir": folder that holds `kernel_tools_agent`, or None}

    Raises:
        ValueError: the pack is damaged; what was verified before stays stored.
    """
    root = os.path.abspath(os.path.expanduser(remote_dir))
    stored = _unpack(root, archive) if archive else 0
    agent_dir = None
    if agent_manifest is not None:
        agent_dir = os.path.join(root, "agent", str(agent_manifest["hash"]))
        target = os.path.join(agent_dir, "kernel_tools_agent")
        if not os.path.isdir(target):
            os.makedirs(agent_dir, exist_ok=True)
            temporary = os.path.join(agent_dir, ".new-" + os.urandom(6).hex())
            try:
                lay_tree(root, agent_manifest["files"], temporary)
                with contextlib.suppress(OSError):  # another receive was first: the same content
                    os.rename(temporary, target)
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
    return {"stored": stored, "agent_dir": agent_dir}


def lay_tree(remote_dir: str, files: Manifest, dest: str) -> None:
    """Build `dest` from blobs: hard links where the mode and the host allow it, else copies; read-only.

    Raises:
        ValueError: a path leaves `dest`.
        FileNotFoundError: a blob is absent.
    """
    folders = set()
    for path, (mode, digest) in sorted(files.items()):
        parts = path.split("/")
        if path.startswith("/") or "\\" in path or any(part in ("", ".", "..") for part in parts):
            raise ValueError(f"a path in the manifest leaves its folder: {path!r}")
        target = os.path.join(dest, *parts)
        folder = os.path.dirname(target)
        if folder not in folders:
            os.makedirs(folder, exist_ok=True)
            folders.add(folder)
        _lay(blob_path(remote_dir, str(digest)), target, 0o555 if int(mode) & 0o111 else 0o444)


def blob_path(remote_dir: str, digest: str) -> str:
    """Return where the content with that SHA-256 lives. Raises ValueError for anything but a digest."""
    if len(digest) != 64 or not _HEX.issuperset(digest):
        raise ValueError(f"not a SHA-256: {digest[:80]!r}")
    return os.path.join(remote_dir, "blobs", digest[:2], digest)


def _lay(blob: str, target: str, mode: int) -> None:
    if mode == 0o444:  # a link shares the blob's mode, so only plain files can be links
        try:
            os.link(blob, target)
        except FileNotFoundError:
            raise
        except OSError:
            pass
        else:
            return
    shutil.copyfile(blob, target)
    os.chmod(target, mode)


def _present(root: str, digest: str, booted: float) -> bool:
    """Whether the blob is there and whole; a damaged one is removed, so that it is sent again.

    One that was verified since the machine started bears our time, and needs no reading: a write would
    have changed it, and what is not written through is lost by a crash of the machine alone.
    """
    path = blob_path(root, digest)
    try:
        status = os.stat(path)
        if status.st_mtime == _VERIFIED_TIME and status.st_ctime > booted:
            return True
        with open(path, "rb") as stream:
            whole = hashlib.sha256(stream.read()).hexdigest() == digest
    except OSError:
        return False
    if whole:
        _mark_verified(path)
    else:
        os.unlink(path)
    return whole


def _mark_verified(path: str) -> None:
    with contextlib.suppress(OSError):
        os.utime(path, (_VERIFIED_TIME, _VERIFIED_TIME))


def _boot_time() -> float:
    """When the machine started, by its own clock; "never yet" where it does not say."""
    try:
        with open("/proc/uptime", encoding="ascii") as stream:
            return time.time() - float(stream.read().split()[0])
    except (OSError, ValueError):
        return float("inf")


def _unpack(root: str, archive: bytes) -> int:
    decompressor = zlib.decompressobj()
    try:
        data = decompressor.decompress(archive, _MOST_BYTES)
    except zlib.error as error:
        raise ValueError(f"the code arrived damaged: {error}") from error
    if not decompressor.eof or not data.startswith(MAGIC):
        raise ValueError("the code arrived damaged or cut short; sync again")
    view = memoryview(data)
    position = len(MAGIC)
    stored = 0
    while position < len(data):
        if position + _ENTRY.size > len(data):
            raise ValueError("the code arrived cut short; sync again")
        digest, length = _ENTRY.unpack_from(data, position)
        position += _ENTRY.size
        content = view[position : position + length]
        position += length
        if len(content) != length or hashlib.sha256(content).digest() != digest:
            raise ValueError("a file of the code arrived damaged; sync again")
        stored += _store(root, digest.hex(), content)
    return stored


def _store(root: str, digest: str, content: memoryview) -> int:
    path = blob_path(root, digest)
    if os.path.exists(path):
        return 0
    os.makedirs(os.path.dirname(path), exist_ok=True)
    temporary = f"{path}.{os.urandom(6).hex()}.tmp"
    try:
        # No fsync, which cost 5 ms a file: after a crash `missing` hashes anew, so a torn one is sent again.
        with open(temporary, "wb") as stream:
            stream.write(content)
        os.chmod(temporary, 0o444)
        _mark_verified(temporary)
        os.replace(temporary, path)
    finally:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
    return 1


def _boot_id() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as stream:
            return stream.read().strip()
    except OSError:
        return ""


def hash12(files: Manifest) -> str:
    """Return the twelve hex digits that name a tree: the hash of its sorted (path, SHA-256)."""
    lines: List[str] = [f"{path} {entry[1]}\n" for path, entry in sorted(files.items())]
    return hashlib.sha256("".join(lines).encode("utf-8")).hexdigest()[:12]
