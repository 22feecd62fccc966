"""Checkpoints: plain values only (`weights_only=True` loads them), written whole, hashed, versioned.

Two kinds: `training` holds everything that a resume needs, `weights` the averaged weights alone. Beside
each lies `<name>.sha256`. The slim files for elsewhere are in `slim`. A file of another architecture is
refused in one sentence.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import zipfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, Final, cast

import torch
from torch import nn

from detector.files import replacing, sync_folder, write_text
from detector.models.detector import Detector, build_detector

FORMAT_VERSION: Final = 1


class CheckpointError(RuntimeError):
    """A checkpoint is absent, damaged, or made for something else."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """What must be known to build the network that a checkpoint belongs to."""

    backbone_name: str
    num_classes: int
    num_queries: int
    num_denoising: int

    def build(self) -> Detector:
        """Return a fresh network."""
        return build_detector(
            self.backbone_name,
            num_classes=self.num_classes,
            num_queries=self.num_queries,
            num_denoising=self.num_denoising,
        )

    def __str__(self) -> str:
        return (
            f"{self.backbone_name} with {self.num_classes} classes, {self.num_queries} queries and "
            f"num_denoising={self.num_denoising}"
        )


@dataclass(frozen=True, slots=True)
class LoadedDetector:
    """A network ready to predict."""

    model: Detector
    architecture: Architecture
    class_names: tuple[str, ...]
    image_size: int
    info: Mapping[str, Any]  # epoch, optimizer_steps, metrics, config; of a slim file `source` too


def fingerprint(model: nn.Module) -> str:
    """Return a SHA-256 over the names, shapes and types of everything in the state dict."""
    lines = [
        f"{name} {tuple(value.shape)} {value.dtype}"
        for name, value in sorted(model.state_dict().items())
    ]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def header(
    kind: str, architecture: Architecture, model: nn.Module, *, class_names: tuple[str, ...]
) -> dict[str, Any]:
    """Return the entries that every checkpoint starts with."""
    return {
        "format_version": FORMAT_VERSION,
        "kind": kind,
        "architecture": asdict(architecture),
        "fingerprint": fingerprint(model),
        "class_names": list(class_names),
        "torch_version": str(torch.__version__),
    }


def save_checkpoint(path: Path, state: Mapping[str, Any], *, previous: Path | None = None) -> str:
    """Write `state` and its SHA-256; return the hash. What stood there before goes to `previous`.

    At any moment `path` is whole: the new file takes the name only when it is on disk.

    Raises:
        CheckpointError: it cannot be written; `path` is what it was.
    """
    if previous is not None and path.exists():
        _move_aside(path, previous)
    try:
        return _write(path, state)
    except OSError as error:
        rest = "the one before is whole, go on from it" if path.exists() else "start again"
        raise CheckpointError(
            f"{path} cannot be written: {error.strerror or error}; {rest} when there is room."
        ) from error


def _write(path: Path, state: Mapping[str, Any]) -> str:
    with replacing(path) as file:
        hashing = _HashingFile(file)
        try:
            torch.save(dict(state), cast("IO[bytes]", hashing))
        except RuntimeError as error:  # torch's own words for what our file said
            raise hashing.failure or error from error
        digest = hashing.digest.hexdigest()
    write_text(_sidecar(path), f"{digest}  {path.name}\n")
    return digest


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Return the state in `path`, on the CPU.

    Raises:
        CheckpointError: no such file, damaged, not ours, or of a newer format.
    """
    if not path.is_file():
        raise CheckpointError(f"There is no checkpoint {path}.")
    if not _is_whole(path):
        raise CheckpointError(
            f"{path} is damaged or no checkpoint: neither its parts nor a SHA-256 beside it fit."
        )
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise CheckpointError(
            f"{path} is damaged or no checkpoint: {_first_line(error)}"
        ) from error
    if not isinstance(state, dict) or "format_version" not in state:
        raise CheckpointError(f"{path} was not written by this project.")
    if state["format_version"] > FORMAT_VERSION:
        raise CheckpointError(
            f"{path} has format {state['format_version']}; this version reads up to "
            f"{FORMAT_VERSION}: update the project."
        )
    return state


def load_or_fall_back(path: Path, previous: Path) -> tuple[dict[str, Any], Path]:
    """Return the state in `path`, or in `previous` where `path` is damaged or gone; and which it was.

    Raises:
        CheckpointError: neither can be read.
    """
    try:
        return load_checkpoint(path), path
    except CheckpointError:
        if not previous.is_file():
            raise
        return load_checkpoint(previous), previous


def check_architecture(
    state: Mapping[str, Any], model: nn.Module, architecture: Architecture, *, path: Path
) -> None:
    """Refuse a state of another network.

    Raises:
        CheckpointError: in one sentence, what the file holds and what is asked for.
    """
    theirs = Architecture(**state["architecture"])
    if theirs != architecture:
        raise CheckpointError(
            f"{path} holds {theirs}, but the configuration asks for {architecture}."
        )
    if state["fingerprint"] != fingerprint(model):
        raise CheckpointError(
            f"{path} holds {theirs} of another version of the network; its layers do not fit this one."
        )


def load_detector(path: Path | str, *, device: torch.device | str = "cpu") -> LoadedDetector:
    """Return the averaged weights in `path` (of any kind) as a network in evaluation mode.

    Raises:
        CheckpointError: as `load_checkpoint` and `check_architecture` do.
    """
    path = Path(path)
    if path.suffix == ".safetensors":
        from detector.slim import load_slim  # which builds on this module

        state = load_slim(path)
    else:
        state = load_checkpoint(path)
    architecture = Architecture(**state["architecture"])
    model = architecture.build()
    check_architecture(state, model, architecture, path=path)
    weights = state["model"] if state["kind"] == "weights" else state["ema"]["model"]
    model.load_state_dict(weights)
    model.to(device).eval().requires_grad_(False)
    kept = ("epoch", "optimizer_steps", "metrics", "config", "source")
    return LoadedDetector(
        model=model,
        architecture=architecture,
        class_names=tuple(state["class_names"]),
        image_size=int(state.get("image_size") or state["config"]["data"]["image_size"]),
        info={key: state.get(key) for key in kept},
    )


def previous_of(path: Path) -> Path:
    """Return where the checkpoint before `path` is kept: `last.previous.pt`."""
    return path.with_name(f"{path.stem}.previous{path.suffix}")


def newest_checkpoint(output_dir: Path) -> Path | None:
    """Return `weights/last.pt` of the newest run under `output_dir` that has one."""
    found = [path for path in output_dir.resolve().glob("*/weights/last*.pt") if path.is_file()]
    runs = {path.parent: path.stat().st_mtime for path in found}
    return max(runs, key=lambda folder: runs[folder]) / "last.pt" if runs else None


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


class _HashingFile(io.RawIOBase):
    """A file that is only written to, from front to end, as torch does; hashed on the way."""

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__()
        self.digest = hashlib.sha256()
        self.failure: OSError | None = None
        self._file = file

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self.digest.update(data)
        try:
            return self._file.write(data)
        except OSError as error:
            self.failure = error
            raise


def _move_aside(path: Path, previous: Path) -> None:
    """Give the file a second name; the first stays until the new file takes it."""
    spare = previous.with_name(f".{previous.name}.link")
    with contextlib.suppress(FileNotFoundError):
        spare.unlink()
    try:
        os.link(path, spare)
    except OSError:  # no hard links on this file system
        return
    os.replace(spare, previous)
    with contextlib.suppress(OSError):
        write_text(
            _sidecar(previous), f"{_noted_hash(path) or file_sha256(path)}  {previous.name}\n"
        )
    sync_folder(previous.parent)


def _sidecar(path: Path) -> Path:
    return path.with_name(f"{path.name}.sha256")


def _noted_hash(path: Path) -> str | None:
    try:
        return _sidecar(path).read_text(encoding="ascii").split()[0]
    except (OSError, IndexError, UnicodeDecodeError):
        return None


def _is_whole(path: Path) -> bool:
    """True where the hash fits, or where every part's CRC does.

    A process killed between the renames of the two files leaves a whole file with the hash of the one
    before, or with none.
    """
    noted = _noted_hash(path)
    if noted is not None and noted == file_sha256(path):
        return True
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.testzip() is None
    except (zipfile.BadZipFile, OSError, EOFError):
        return False


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
