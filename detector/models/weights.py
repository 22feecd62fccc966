"""Public weights: which name a parameter has in which file, and how to load or write one.

The table below is the whole knowledge of other projects' names. A rule turns our name into
theirs; reading inverts that name by name for the very model that is to be filled, so loading and
writing cannot disagree. Files are only ever read as tensors (`weights_only=True`).
"""

from __future__ import annotations

import os
import pickle
import re
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from detector.models.detector import Detector
from detector.models.specs import DetectorSpec

__all__ = [
    "Layout",
    "LoadReport",
    "WeightsError",
    "export_state",
    "load_backbone",
    "load_weights",
    "read_state",
    "resolve_reference",
]

Layout = Literal["native", "hub", "v5", "original"]
Rules = tuple[tuple[str, str], ...]


class WeightsError(ValueError):
    """A weights file cannot be read or does not fit; the message is one sentence."""


# fmt: off
# Our name -> the name in the authors' .pth files (D-FINE, DEIM, RT-DETR, RT-DETRv2).
_ORIGINAL: Rules = (
    (r"^encoder\.aifi\.",                          r"encoder.encoder.0.layers.0."),
    (r"^encoder\.downsample_convs\.(\d+)\.cv",     r"encoder.downsample_convs.\1.0.cv"),
    (r"^decoder\.(layers|lqe_layers)\.",           r"decoder.decoder.\1."),
    (r"^decoder\.score_heads\.",                   r"decoder.dec_score_head."),
    (r"^decoder\.box_heads\.",                     r"decoder.dec_bbox_head."),
    (r"^decoder\.pre_box_head\.",                  r"decoder.pre_bbox_head."),
    (r"^decoder_proj\.",                           r"decoder.input_proj."),
    (r"^selection\.(proj|norm)\.",                 r"decoder.enc_output.\1."),
    (r"^selection\.score_head\.",                  r"decoder.enc_score_head."),
    (r"^selection\.box_head\.",                    r"decoder.enc_bbox_head."),
    (r"^denoising\.class_embed\.",                 r"decoder.denoising_class_embed."),
)
_ORIGINAL_HGNET: Rules = (
    (r"^(backbone\..*)\.norm\.",                   r"\1.bn."),
)
_ORIGINAL_RESNET: Rules = (
    (r"^backbone\.stem\.(\d)\.",                   r"backbone.conv1.conv1_<\1>."),
    (r"^backbone\.stages\.(\d+)\.(\d+)\.",         r"backbone.res_layers.\1.blocks.\2."),
    (r"(res_layers\.0\.blocks\.0)\.shortcut\.",    r"\1.short."),
    (r"\.shortcut\.",                              r".short.conv."),
    (r"\.convs\.0\.",                              r".branch2a."),
    (r"\.convs\.1\.",                              r".branch2b."),
    (r"\.convs\.2\.",                              r".branch2c."),
)
# What transformers 5 calls them in memory.
_V5: Rules = (
    (r"^(backbone\..*)\.conv\.",                   r"\1.convolution."),
    (r"^(backbone\..*)\.norm\.",                   r"\1.normalization."),
    (r"^backbone\.stem\.",                         r"model.backbone.model.embedder."),
    (r"^backbone\.stages\.",                       r"model.backbone.model.encoder.stages."),
    (r"^encoder\.input_proj\.(\d+)\.conv\.",       r"model.encoder_input_proj.\1.0."),
    (r"^encoder\.input_proj\.(\d+)\.norm\.",       r"model.encoder_input_proj.\1.1."),
    (r"^encoder\.aifi\.",                          r"model.encoder.aifi.0.layers.0."),
    (r"^(model\.encoder\.aifi\..*)\.norm1\.",      r"\1.self_attn_layer_norm."),
    (r"^(model\.encoder\.aifi\..*)\.norm2\.",      r"\1.final_layer_norm."),
    (r"^encoder\.(fpn|pan)_blocks\.",              r"model.encoder.\1_blocks."),
    (r"^encoder\.(lateral|downsample)_convs\.",    r"model.encoder.\1_convs."),
    (r"\.cv1\.",                                   r".conv1."),
    (r"(downsample_convs\.\d+)\.cv2\.",            r"\1.conv2."),
    (r"\.cv2\.0\.",                                r".csp_rep1."),
    (r"\.cv2\.1\.",                                r".conv2."),
    (r"\.cv3\.0\.",                                r".csp_rep2."),
    (r"\.cv3\.1\.",                                r".conv3."),
    (r"\.cv4\.",                                   r".conv4."),
    (r"^decoder_proj\.(\d+)\.conv\.",              r"model.decoder_input_proj.\1.0."),
    (r"^decoder_proj\.(\d+)\.norm\.",              r"model.decoder_input_proj.\1.1."),
    (r"^selection\.proj\.",                        r"model.enc_output.0."),
    (r"^selection\.norm\.",                        r"model.enc_output.1."),
    (r"^selection\.score_head\.",                  r"model.enc_score_head."),
    (r"^selection\.box_head\.",                    r"model.enc_bbox_head."),
    (r"^denoising\.class_embed\.",                 r"model.denoising_class_embed."),
    (r"^decoder\.score_heads\.",                   r"model.decoder.class_embed."),
    (r"^decoder\.box_heads\.",                     r"model.decoder.bbox_embed."),
    (r"^decoder\.pre_box_head\.",                  r"model.decoder.pre_bbox_head."),
    (r"^decoder\.(layers|lqe_layers|query_pos_head)\.", r"model.decoder.\1."),
    (r"^(model\.decoder\.layers\.\d+)\.norm1\.",   r"\1.self_attn_layer_norm."),
    (r"^(model\.decoder\.layers\.\d+)\.norm2\.",   r"\1.encoder_attn_layer_norm."),
    (r"^(model\.decoder\.layers\.\d+)\.norm3\.",   r"\1.final_layer_norm."),
    (r"\.cross_attn\.",                            r".encoder_attn."),
    (r"\.self_attn\.out_proj\.",                   r".self_attn.o_proj."),
)
_V5_DFINE: Rules = (
    (r"\.linear1\.",                               r".mlp.layers.0."),
    (r"\.linear2\.",                               r".mlp.layers.1."),
)
_V5_RTDETR: Rules = (
    (r"\.linear1\.",                               r".mlp.fc1."),
    (r"\.linear2\.",                               r".mlp.fc2."),
)
_V5_RESNET: Rules = (
    (r"\.embedder\.(\d)\.",                        r".embedder.embedder.\1."),
    (r"\.encoder\.stages\.(\d+)\.(\d+)\.",         r".encoder.stages.\1.layers.\2."),
    (r"(stages\.[123]\.layers\.0\.shortcut)\.",    r"\1.1."),
    (r"\.convs\.(\d)\.",                           r".layer.\1."),
)
# The hub's files were written by transformers 4: applied to the names of version 5.
_HUB: Rules = (
    (r"\.o_proj\.",                                r".out_proj."),
    (r"\.mlp\.(layers\.0|fc1)\.",                  r".fc1."),
    (r"\.mlp\.(layers\.1|fc2)\.",                  r".fc2."),
    (r"\.encoder\.aifi\.",                         r".encoder.encoder."),
)
# Spellings of older files, turned into the ones above before anything is looked up.
_DIALECTS: Rules = (
    (r"^module\.",                                 r""),
    (r"^(encoder\.input_proj\.\d+)\.0\.",          r"\1.conv."),
    (r"^(encoder\.input_proj\.\d+)\.1\.",          r"\1.norm."),
    (r"^decoder\.enc_output\.0\.",                 r"decoder.enc_output.proj."),
    (r"^decoder\.enc_output\.1\.",                 r"decoder.enc_output.norm."),
)
# fmt: on

# Constants and caches that files carry and a model computes.
_DERIVED = re.compile(
    r"(^|\.)(anchors|valid_mask|num_points_scale|n_points_scale|pos_embed\d*|project"
    r"|num_batches_tracked|up|reg_scale)$"
)
_CLASS_DEPENDENT = re.compile(
    r"^(selection\.score_head|decoder\.score_heads\.\d+|denoising\.class_embed)\."
)
_PACKED = re.compile(r"^(.*\.self_attn)\.in_proj_(weight|bias)$")
_TIED = re.compile(r"^model\.decoder\.((?:class|bbox)_embed\..*)$")


def _apply(rules: Rules, name: str) -> str:
    for pattern, replacement in rules:
        name = re.sub(pattern, replacement, name)
    return name


def _rename(name: str, spec: DetectorSpec, layout: Layout) -> str:
    """One of our names in another layout; packed projections keep their name."""
    resnet = spec.backbone.startswith("R")
    if layout == "native":
        return name
    if layout == "original":
        name = _apply(_ORIGINAL, name)
        name = _apply(_ORIGINAL_RESNET if resnet else _ORIGINAL_HGNET, name)
        return re.sub(r"<(\d)>", lambda found: str(int(found[1]) + 1), name)
    rules = _V5 + (_V5_DFINE if spec.fdr else _V5_RTDETR) + (_V5_RESNET if resnet else ())
    return _apply(rules + (_HUB if layout == "hub" else ()), name)


def _names(name: str, spec: DetectorSpec, layout: Layout) -> list[str]:
    """The names that hold one of our tensors: three where queries, keys and values are apart."""
    renamed = _rename(name, spec, layout)
    packed = _PACKED.match(renamed)
    if packed is None or layout in {"native", "original"}:
        return [renamed]
    return [f"{packed[1]}.{part}_proj.{packed[2]}" for part in "qkv"]


def export_state(detector: Detector, layout: Layout) -> dict[str, Tensor]:
    """The detector's state under another layout's names, ready to be saved."""
    spec = detector.spec
    state: dict[str, Tensor] = {}
    for name, tensor in detector.state_dict().items():
        names = _names(name, spec, layout)
        parts = tensor.chunk(len(names)) if len(names) > 1 else (tensor,)
        state.update(zip(names, parts, strict=True))
    if layout in {"hub", "v5"}:
        copies = {
            found[1]: tensor for name, tensor in state.items() if (found := _TIED.match(name))
        }
        state |= copies
    if spec.fdr and layout != "native":
        prefix = "decoder" if layout == "original" else "model.decoder"
        state[f"{prefix}.up"] = torch.tensor([spec.up])
        state[f"{prefix}.reg_scale"] = torch.tensor([spec.reg_scale])
    return state


def detect_layout(state: Mapping[str, Tensor]) -> Layout | None:
    """Which layout a whole detector's state has, by names only it uses."""
    if any(name.startswith("model.backbone.model.") for name in state):
        return "v5" if any(".aifi." in name for name in state) else "hub"
    if any(name.startswith("decoder.enc_score_head.") for name in state):
        return "original"
    return "native" if any(name.startswith("selection.score_head.") for name in state) else None


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
        if path.suffix == ".safetensors":
            state: dict[str, Tensor] = load_file(path)
            return state
        content = torch.load(path, map_location="cpu", weights_only=True)
    except (
        SafetensorError,
        pickle.UnpicklingError,
        EOFError,
        OSError,
        RuntimeError,
        zipfile.BadZipFile,
        ValueError,
        KeyError,
    ) as error:
        reason = str(error).split(". ")[0].splitlines()[0] if str(error) else type(error).__name__
        raise WeightsError(
            f"{path} cannot be read as weights ({reason.rstrip('.')}): cut short, or not a tensor file."
        ) from error
    return _state_of(content, path)


def _state_of(content: object, path: Path) -> dict[str, Tensor]:
    """Unwrap a checkpoint: ema.module (the authors'), ema.model (ours), or what else is usual."""
    for keys in (("ema", "module"), ("ema", "model"), ("ema",), ("model",), ("state_dict",)):
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
    return {_apply(_DIALECTS, str(name)): value for name, value in state.items()}


def _gather(state: Mapping[str, Tensor], names: list[str], *, missing: str) -> Tensor | None:
    """The tensor under these names, joined; a tied copy serves where the name itself is absent."""
    parts = []
    for name in names:
        tied = _TIED.match(name)
        found = state.get(name)
        if found is None and tied is not None:
            found = state.get(tied[1])
        if found is None:
            if name.endswith(".num_batches_tracked"):
                return None
            raise WeightsError(missing.format(name=name))
        parts.append(found)
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _fill(
    detector: Detector,
    state: Mapping[str, Tensor],
    wanted: Mapping[str, list[str]],
    *,
    path: Path,
    layout: str,
) -> LoadReport:
    """Copy `state` into those of our tensors that `wanted` names."""
    own = detector.state_dict()
    filled: dict[str, Tensor] = {}
    fresh: list[str] = []
    for name, names in wanted.items():
        found = _gather(
            state, names, missing=f"{path} does not fit {detector.spec.name}: it lacks {{name}}."
        )
        if found is None:
            continue
        if found.shape == own[name].shape:
            filled[name] = found
        elif _CLASS_DEPENDENT.match(name):
            fresh.append(name)
        else:
            raise WeightsError(
                f"{path} does not fit {detector.spec.name}: {names[0]} is {tuple(found.shape)}, "
                f"not {tuple(own[name].shape)}."
            )
    if fresh:
        # All or none: a head that fits by chance was trained for other classes.
        fresh = [name for name in wanted if _CLASS_DEPENDENT.match(name)]
        filled = {name: value for name, value in filled.items() if name not in set(fresh)}
        detector.reset_class_heads()
    detector.load_state_dict(filled, strict=False)
    return LoadReport(layout, len(filled), tuple(fresh))


def load_weights(detector: Detector, path: Path) -> LoadReport:
    """Fill a whole detector from a file of any known layout.

    Heads that depend on the classes start afresh when the file has other classes; the report
    names them.

    Raises:
        WeightsError: the file cannot be read, or does not fit this size: the first misfit is named.
    """
    state = read_state(path)
    layout = detect_layout(state)
    if layout is None:
        raise WeightsError(
            f"{path} is no detector's weights: it starts with {next(iter(state))}; a backbone's "
            f"file goes to model.backbone_weights."
        )
    spec = detector.spec
    wanted = {name: _names(name, spec, layout) for name in detector.state_dict()}
    report_missing = {part for names in wanted.values() for part in names}
    report = _fill(detector, state, wanted, path=path, layout=layout)
    tied = {found[1] for name in report_missing if (found := _TIED.match(name))}
    for name, tensor in state.items():
        if name.endswith((".up", ".reg_scale")):
            constant = spec.up if name.endswith(".up") else spec.reg_scale
            if abs(float(tensor.reshape(-1)[0]) - constant) > 1e-6:
                raise WeightsError(
                    f"{path} does not fit {spec.name}: {name} is {float(tensor.reshape(-1)[0]):g}, "
                    f"not {constant:g}."
                )
        elif name not in report_missing and name not in tied and not _DERIVED.search(name):
            raise WeightsError(f"{path} does not fit {spec.name}: it has {name} besides.")
    return report


def load_backbone(detector: Detector, path: Path) -> LoadReport:
    """Fill the backbone alone, from the authors' or transformers' backbone or detector file.

    Raises:
        WeightsError: as `load_weights`; a classifier's head in the file is left aside.
    """
    state = read_state(path)
    spec = detector.spec
    own = [name for name in detector.state_dict() if name.startswith("backbone.")]
    for layout, prefix in _backbone_layouts(state):
        wanted = {
            name: [part.removeprefix(prefix) for part in _names(name, spec, layout)] for name in own
        }
        return _fill(detector, state, wanted, path=path, layout=f"{layout} backbone")
    raise WeightsError(f"{path} is no backbone's weights: it starts with {next(iter(state))}.")


def _backbone_layouts(state: Mapping[str, Tensor]) -> Iterator[tuple[Layout, str]]:
    """The layout a backbone's file has, and what its names leave out in front."""
    whole = detect_layout(state)
    if whole is not None:
        yield whole, ""
    elif any(name.startswith("embedder.") for name in state):
        yield "v5", "model.backbone.model."
    elif any(name.startswith(("stem.", "conv1.")) for name in state):
        yield "original", "backbone."


def resolve_reference(reference: str) -> Path:
    """The file a `model.weights` names: a path, or `hf://ORG/NAME` fetched from the hub.

    Raises:
        WeightsError: huggingface_hub is not installed, or the hub does not give the file.
    """
    if not reference.startswith("hf://"):
        return Path(os.path.expanduser(reference))
    try:
        from huggingface_hub import hf_hub_download
    except ImportError as error:
        raise WeightsError(
            f"{reference} needs the package huggingface_hub: pip install huggingface_hub."
        ) from error
    try:
        return Path(hf_hub_download(reference.removeprefix("hf://"), "model.safetensors"))
    except Exception as error:  # the hub's errors share no base class
        raise WeightsError(
            f"{reference} cannot be fetched: {str(error).splitlines()[0]}"
        ) from error
