"""A slim file for elsewhere: averaged weights as safetensors, and in its header what it takes to use them.

Classes, image size, architecture with its fingerprint, where the weights come from and under which
licence. Predictions, evaluations and `model.weights` take it as they take a checkpoint.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from detector.checkpoint import FORMAT_VERSION, CheckpointError, LoadedDetector, fingerprint
from detector.files import finite, replacing

_DESCRIPTION: Final = (
    *("format_version", "architecture", "fingerprint", "class_names", "image_size"),
    *("epoch", "optimizer_steps", "metrics", "source", "versions"),
)


def save_slim(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write tensors and their description as one safetensors file, whole or not at all.

    Args:
        path: the file.
        tensors: the network's state; those of another type than the network's own are converted when
            they are loaded.
        metadata: as `describe` gives it; a SHA-256 of the tensors is added.
    """
    held = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    content = save(held, dict(metadata) | {"format": "pt", "sha256": _tensors_sha256(held)})
    with replacing(path) as file:
        file.write(_in_order(content))


def load_slim(path: Path) -> dict[str, Any]:
    """Return what `save_slim` wrote, as the state of a checkpoint of the kind `weights`.

    Raises:
        CheckpointError: no such file, damaged, not ours, or of a newer format.
    """
    if not path.is_file():
        raise CheckpointError(f"There is no checkpoint {path}.")
    try:
        with safe_open(path, framework="pt") as file:
            described: dict[str, str] = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{path} is damaged: {str(error).splitlines()[0]}.") from error
    if "architecture" not in described:
        raise CheckpointError(
            f"{path} was not exported by this project; a run starts from it with model.weights."
        )
    if int(described["format_version"]) > FORMAT_VERSION:
        raise CheckpointError(
            f"{path} has format {described['format_version']}; this version reads up to "
            f"{FORMAT_VERSION}: update the project."
        )
    if described["sha256"] != _tensors_sha256(tensors):
        raise CheckpointError(f"{path} is damaged: its tensors are not those that were written.")
    state = {key: json.loads(text) for key, text in described.items() if key in _DESCRIPTION}
    return {**state, "kind": "weights", "model": tensors}


def describe(loaded: LoadedDetector, *, source: Mapping[str, str]) -> dict[str, str]:
    """What a file that leaves the project says about itself: JSON texts, for a header of texts.

    Args:
        loaded: the network.
        source: `weights` it started from, and their `licence`.
    """
    values = {
        "format_version": FORMAT_VERSION,
        "architecture": asdict(loaded.architecture),
        "fingerprint": fingerprint(loaded.model),
        "class_names": list(loaded.class_names),
        "image_size": loaded.image_size,
        "epoch": loaded.info.get("epoch"),
        "optimizer_steps": loaded.info.get("optimizer_steps"),
        "metrics": finite(loaded.info.get("metrics")),
        "source": dict(source),
        "versions": {"torch": str(torch.__version__)},
    }
    return {name: json.dumps(value, ensure_ascii=False) for name, value in values.items()}


def _in_order(content: bytes) -> bytes:
    """The same safetensors file with its metadata sorted: the library shuffles it at every call."""
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # the tensors stay aligned
    return len(text).to_bytes(8, "little") + text + content[end:]


def _tensors_sha256(tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        value = tensors[name]
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        digest.update(value.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
