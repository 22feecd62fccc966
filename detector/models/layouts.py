"""Which name a parameter has in which file: the whole knowledge of other projects' names.

A rule turns our name into theirs. Reading inverts that name by name for the very model that is to be
filled, so loading and writing cannot disagree. Nothing here opens a file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from detector.models.detector import Detector
from detector.models.specs import DetectorSpec

__all__ = [
    "Layout",
    "backbone_layout",
    "detect_layout",
    "export_state",
    "names_in",
    "plain_name",
    "tied_to",
]

Layout = Literal["native", "hub", "v5", "original"]
Rules = tuple[tuple[str, str], ...]

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

_PACKED = re.compile(r"^(.*\.self_attn)\.in_proj_(weight|bias)$")
_TIED = re.compile(r"^model\.decoder\.((?:class|bbox)_embed\..*)$")


def plain_name(name: str) -> str:
    """A name in an older spelling as the tables have it."""
    return _apply(_DIALECTS, name)


def tied_to(name: str) -> str | None:
    """Under which other name transformers keeps the same tensor."""
    found = _TIED.match(name)
    return None if found is None else found[1]


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


def names_in(name: str, spec: DetectorSpec, layout: Layout) -> list[str]:
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
        names = names_in(name, spec, layout)
        parts = tensor.chunk(len(names)) if len(names) > 1 else (tensor,)
        state.update(zip(names, parts, strict=True))
    if layout in {"hub", "v5"}:
        state |= {other: tensor for name, tensor in state.items() if (other := tied_to(name))}
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


def backbone_layout(state: Mapping[str, Tensor]) -> tuple[Layout, str] | None:
    """Which layout a backbone's or a detector's state has, and what its names leave out in front."""
    whole = detect_layout(state)
    if whole is not None:
        return whole, ""
    if any(name.startswith("embedder.") for name in state):
        return "v5", "model.backbone.model."
    if any(name.startswith(("stem.", "conv1.")) for name in state):
        return "original", "backbone."
    return None
