"""Public weights: read a file of any known layout as tensors only, and fill a network with it.

A file that does not fit changes nothing: everything is looked up and held against the network before
the first value is copied. Which name is which stands in `layouts`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from safetensors.torch import load_file
from torch import Tensor

from detector.models.detector import Detector
from detector.models.layouts import (
    Layout,
    backbone_layout,
    detect_layout,
    export_state,
    names_in,
    plain_name,
    tied_to,
)
from detector.models.specs import DetectorSpec

__all__ = [
    "Layout",
    "LoadReport",
    "WeightsError",
    "export_state",
    "load_backbone",
    "load_weights",
    "read_state",
]

# Constants and caches that files carry and a model computes.
_DERIVED: Final = re.compile(
    r"(^|\.)(anchors|valid_mask|num_points_scale|n_points_scale|pos_embed\d*|project"
    r"|num_batches_tracked|up|reg_scale)$"
)
_CLASS_DEPENDENT: Final = re.compile(
    r"^(selection\.score_head|decoder\.score_heads\.\d+|denoising\.class_embed)\."
)
# Where checkpoints keep the weights: the averaged ones first (the authors', then ours), and the usual.
_INSIDE: Final = (("ema", "module"), ("ema", "model"), ("ema",), ("model",), ("state_dict",))


class WeightsError(ValueError):
    """A weights file cannot be read or does not fit; the message is one sentence."""


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What a file gave: its layout, and our parameters that were left freshly initialised."""

    layout: str
    loaded: int
    reinitialised: tuple[str, ...]


def read_state(path: Path) -> dict[str, Tensor]:
    """The tensors of a .safetensors, .pth or .pt file; of a checkpoint the EMA's, if it has one.

    Raises:
        WeightsError: no such file, not such a file, a cut one, or one that needs code to load.
    """
    if not path.is_file():
        raise WeightsError(f"There is no weights file {path}.")
    try:
        if _is_safetensors(path):
            state: dict[str, Tensor] = load_file(path)
            return state
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        reason = str(error).split(". ")[0].splitlines()[0] if str(error) else type(error).__name__
        raise WeightsError(
            f"{path} cannot be read as weights ({reason.rstrip('.')}): cut short, or not a tensor file."
        ) from error
    return _state_of(content, path)


def _state_of(content: object, path: Path) -> dict[str, Tensor]:
    """Unwrap a checkpoint."""
    for keys in _INSIDE:
        inner: object = content
        for key in keys:
            inner = inner.get(key) if isinstance(inner, dict) else None
        if isinstance(inner, dict) and any(isinstance(value, Tensor) for value in inner.values()):
            content = inner
            break
    if not isinstance(content, dict):
        raise WeightsError(f"{path} holds a {type(content).__name__}, not a table of tensors.")
    state = {name: value for name, value in content.items() if isinstance(value, Tensor)}
    if not state:
        raise WeightsError(f"{path} holds no tensors.")
    return {plain_name(str(name)): value for name, value in state.items()}


def _is_safetensors(path: Path) -> bool:
    """By its ending, or by its beginning: the length of a header, and the header's brace."""
    if path.suffix == ".safetensors":
        return True
    with open(path, "rb") as file:
        return file.read(9)[8:] == b"{"


def load_weights(detector: Detector, path: Path) -> LoadReport:
    """Fill a whole detector from a file of any known layout.

    Heads that depend on the classes start afresh when the file has other classes; the report
    names them.

    Raises:
        WeightsError: the file cannot be read, or does not fit this size: the first misfit is named, and
            the detector is as it was.
    """
    state = read_state(path)
    layout = detect_layout(state)
    if layout is None:
        raise WeightsError(
            f"{path} is no detector's weights: it starts with {next(iter(state))}; a backbone's "
            f"file goes to model.backbone_weights."
        )
    wanted = {name: names_in(name, detector.spec, layout) for name in detector.state_dict()}
    filled, fresh = _match(detector, state, wanted, path=path)
    _check_rest(state, wanted, detector.spec, path=path)
    return _fill(detector, filled, fresh, layout=layout)


def load_backbone(detector: Detector, path: Path) -> LoadReport:
    """Fill the backbone alone, from the authors' or transformers' backbone or detector file.

    Raises:
        WeightsError: as `load_weights`; a classifier's head in the file is left aside.
    """
    state = read_state(path)
    found = backbone_layout(state)
    if found is None:
        raise WeightsError(f"{path} is no backbone's weights: it starts with {next(iter(state))}.")
    layout, prefix = found
    wanted = {
        name: [part.removeprefix(prefix) for part in names_in(name, detector.spec, layout)]
        for name in detector.state_dict()
        if name.startswith("backbone.")
    }
    filled, fresh = _match(detector, state, wanted, path=path)
    return _fill(detector, filled, fresh, layout=f"{layout} backbone")


def _match(
    detector: Detector,
    state: Mapping[str, Tensor],
    wanted: Mapping[str, list[str]],
    *,
    path: Path,
) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Values for those of our tensors that `wanted` names, and which of them must start afresh."""
    own = detector.state_dict()
    misfit = f"{path} does not fit {detector.spec.name}"
    filled: dict[str, Tensor] = {}
    other_classes = False
    for name, names in wanted.items():
        absent = [part for part in names if _find(state, part) is None]
        if absent and name.endswith(".num_batches_tracked"):
            continue
        if absent:
            raise WeightsError(f"{misfit}: it lacks {absent[0]}.")
        parts = [value for part in names if (value := _find(state, part)) is not None]
        found = parts[0] if len(parts) == 1 else torch.cat(parts)
        if found.shape == own[name].shape:
            filled[name] = found
        elif _CLASS_DEPENDENT.match(name):
            other_classes = True
        else:
            raise WeightsError(
                f"{misfit}: {names[0]} is {tuple(found.shape)}, not {tuple(own[name].shape)}."
            )
    if not other_classes:
        return filled, ()
    # All or none: a head that fits by chance was trained for other classes.
    fresh = tuple(name for name in wanted if _CLASS_DEPENDENT.match(name))
    return {name: value for name, value in filled.items() if name not in fresh}, fresh


def _find(state: Mapping[str, Tensor], name: str) -> Tensor | None:
    """The tensor of that name; a tied copy serves where the name itself is absent."""
    other = tied_to(name)
    return state.get(name, None if other is None else state.get(other))


def _check_rest(
    state: Mapping[str, Tensor],
    wanted: Mapping[str, list[str]],
    spec: DetectorSpec,
    *,
    path: Path,
) -> None:
    """Refuse other constants than the network's, and tensors that it has no place for."""
    known = {part for names in wanted.values() for part in names}
    known |= {other for name in known if (other := tied_to(name))}
    constants = {"up": spec.up, "reg_scale": spec.reg_scale}
    for name, tensor in state.items():
        last = name.rpartition(".")[2]
        if last in constants and name not in known:
            value = float(tensor.reshape(-1)[0])
            if abs(value - constants[last]) > 1e-6:
                raise WeightsError(
                    f"{path} does not fit {spec.name}: {name} is {value:g}, not {constants[last]:g}."
                )
        elif name not in known and not _DERIVED.search(name):
            raise WeightsError(f"{path} does not fit {spec.name}: it has {name} besides.")


def _fill(
    detector: Detector, filled: Mapping[str, Tensor], fresh: tuple[str, ...], *, layout: str
) -> LoadReport:
    if fresh:
        detector.reset_class_heads()
    detector.load_state_dict(dict(filled), strict=False)
    return LoadReport(layout, len(filled), fresh)
