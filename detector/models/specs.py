"""The published sizes as data: nothing here builds a network.

D-FINE: arXiv:2410.13842 and the configurations of its authors. RT-DETRv2: arXiv:2407.17140.
HGNetV2: PP-HGNetV2 of PaddleClas. All of them are Apache-2.0.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass

__all__ = ["ALIASES", "HGNETV2", "RESNET", "SPECS", "DetectorSpec", "find_spec"]


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage of HGNetV2: `light` layers are a pointwise and a depthwise convolution."""

    inputs: int
    middle: int
    outputs: int
    blocks: int
    downsample: bool
    light: bool
    kernel: int
    layers: int


@dataclass(frozen=True, slots=True)
class HGNetV2Spec:
    """Stem widths (first layer, last layer) and four stages."""

    stem: tuple[int, int]
    stages: tuple[Stage, Stage, Stage, Stage]

    @property
    def channels(self) -> tuple[int, ...]:
        """Output channels of the four stages."""
        return tuple(stage.outputs for stage in self.stages)


@dataclass(frozen=True, slots=True)
class ResNetSpec:
    """ResNet-vd: blocks a stage, and whether a block is a bottleneck."""

    blocks: tuple[int, int, int, int]
    bottleneck: bool

    @property
    def channels(self) -> tuple[int, ...]:
        """Output channels of the four stages."""
        return tuple(width * (4 if self.bottleneck else 1) for width in (64, 128, 256, 512))


@dataclass(frozen=True, slots=True)
class DetectorSpec:
    """Everything that fixes a detector's architecture but its classes and its queries.

    Attributes:
        name: as in SPECS; part of a checkpoint's fingerprint.
        backbone: key of HGNETV2 or RESNET.
        affine: HGNetV2's learnable scale and shift after each activation.
        strides: of the levels that encoder and decoder see, finest first.
        encoder_dim, encoder_ffn: widths of the hybrid encoder.
        elan: fusion by RepNCSPELAN4 and SCDown (D-FINE), else by CSPRepLayer (RT-DETR).
        blocks: RepVGG blocks in each CSP layer.
        expansion: width of those blocks relative to the encoder's.
        decoder_dim, decoder_ffn, layers: widths and depth of the decoder.
        points: sampled points a head takes on each level.
        fdr: fine-grained distribution refinement, with Gate, LQE and pre_box_head (D-FINE).
        reg_scale: curvature of the distribution's bins.
        freeze_stem, freeze_norm: what the authors hold fixed when they start from public weights.
    """

    name: str
    backbone: str
    affine: bool = False
    strides: tuple[int, ...] = (8, 16, 32)
    encoder_dim: int = 256
    encoder_ffn: int = 1024
    elan: bool = True
    blocks: int = 3
    expansion: float = 1.0
    decoder_dim: int = 256
    decoder_ffn: int = 1024
    layers: int = 6
    points: tuple[int, ...] = (3, 6, 3)
    fdr: bool = True
    reg_scale: float = 4.0
    freeze_stem: bool = False
    freeze_norm: bool = False
    heads: int = 8
    bins: int = 32
    up: float = 0.5

    @property
    def channels(self) -> tuple[int, ...]:
        """Channels of the backbone's levels that the encoder takes, finest first."""
        backbone = HGNETV2[self.backbone] if self.backbone in HGNETV2 else RESNET[self.backbone]
        return backbone.channels[-len(self.strides) :]


def _hgnet(stem: tuple[int, int], *stages: tuple[int, int, int, int, int, int]) -> HGNetV2Spec:
    """Rows are (inputs, middle, outputs, blocks, kernel, layers); light from the third stage on."""
    built = [
        Stage(inputs, middle, outputs, blocks, index > 0, index > 1, kernel, layers)
        for index, (inputs, middle, outputs, blocks, kernel, layers) in enumerate(stages)
    ]
    return HGNetV2Spec(stem, (built[0], built[1], built[2], built[3]))


# fmt: off
HGNETV2: dict[str, HGNetV2Spec] = {
    "B0": _hgnet((16, 16), (16, 16,  64, 1, 3, 3), ( 64,  32, 256, 1, 3, 3), ( 256,  64,  512, 2, 5, 3), ( 512, 128, 1024, 1, 5, 3)),
    "B1": _hgnet((24, 32), (32, 32,  64, 1, 3, 3), ( 64,  48, 256, 1, 3, 3), ( 256,  96,  512, 2, 5, 3), ( 512, 192, 1024, 1, 5, 3)),
    "B2": _hgnet((24, 32), (32, 32,  96, 1, 3, 4), ( 96,  64, 384, 1, 3, 4), ( 384, 128,  768, 3, 5, 4), ( 768, 256, 1536, 1, 5, 4)),
    "B3": _hgnet((24, 32), (32, 32, 128, 1, 3, 5), (128,  64, 512, 1, 3, 5), ( 512, 128, 1024, 3, 5, 5), (1024, 256, 2048, 1, 5, 5)),
    "B4": _hgnet((32, 48), (48, 48, 128, 1, 3, 6), (128,  96, 512, 1, 3, 6), ( 512, 192, 1024, 3, 5, 6), (1024, 384, 2048, 1, 5, 6)),
    "B5": _hgnet((32, 64), (64, 64, 128, 1, 3, 6), (128, 128, 512, 2, 3, 6), ( 512, 256, 1024, 5, 5, 6), (1024, 512, 2048, 2, 5, 6)),
}

RESNET: dict[str, ResNetSpec] = {
    "R18": ResNetSpec((2, 2, 2, 2), bottleneck=False),
    "R34": ResNetSpec((3, 4, 6, 3), bottleneck=False),
    "R50": ResNetSpec((3, 4, 6, 3), bottleneck=True),
}

SPECS: dict[str, DetectorSpec] = {spec.name: spec for spec in (
    DetectorSpec("dfine_n", "B0", affine=True, strides=(16, 32), encoder_dim=128, encoder_ffn=512, blocks=2, expansion=0.34, decoder_dim=128, decoder_ffn=512, layers=3, points=(6, 6)),
    DetectorSpec("dfine_s", "B0", affine=True, blocks=1, expansion=0.5, layers=3),
    DetectorSpec("dfine_m", "B2", affine=True, blocks=2, layers=4),
    DetectorSpec("dfine_l", "B4", freeze_stem=True, freeze_norm=True),
    DetectorSpec("dfine_x", "B5", encoder_dim=384, encoder_ffn=2048, reg_scale=8.0, freeze_stem=True, freeze_norm=True),
    DetectorSpec("rtdetrv2_r18", "R18", elan=False, expansion=0.5, layers=3, points=(4, 4, 4), fdr=False),
    DetectorSpec("rtdetrv2_r34", "R34", elan=False, expansion=0.5, layers=4, points=(4, 4, 4), fdr=False),
    DetectorSpec("rtdetrv2_r50", "R50", elan=False, points=(4, 4, 4), fdr=False, freeze_stem=True, freeze_norm=True),
)}
# fmt: on

ALIASES: dict[str, str] = {
    **{f"hgnetv2_{size}": f"dfine_{size}" for size in "nsmlx"},
    **{f"resnet{depth}": f"rtdetrv2_r{depth}" for depth in (18, 34, 50)},
}


def find_spec(name: str) -> DetectorSpec:
    """The published size of that name or alias.

    Raises:
        ValueError: no such size; the sentence names the nearest one and all of them.
    """
    known = [*SPECS, *ALIASES]
    if (resolved := ALIASES.get(name, name)) in SPECS:
        return SPECS[resolved]
    near = difflib.get_close_matches(name, known, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise ValueError(f"There is no model {name!r}.{hint} Known: {', '.join(known)}.")
