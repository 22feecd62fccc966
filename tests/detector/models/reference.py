"""Detectors of transformers with our sizes and perturbed weights: the yardstick for parity."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from torch import Tensor, nn

from detector.models.specs import HGNETV2, RESNET, SPECS, DetectorSpec


def _hgnet_config(spec: DetectorSpec):
    from transformers import HGNetV2Config

    backbone = HGNETV2[spec.backbone]
    stages = backbone.stages
    return HGNetV2Config(
        stem_channels=[3, *backbone.stem],
        stage_in_channels=[stage.inputs for stage in stages],
        stage_mid_channels=[stage.middle for stage in stages],
        stage_out_channels=[stage.outputs for stage in stages],
        stage_num_blocks=[stage.blocks for stage in stages],
        stage_downsample=[stage.downsample for stage in stages],
        stage_light_block=[stage.light for stage in stages],
        stage_kernel_size=[stage.kernel for stage in stages],
        stage_numb_of_layers=[stage.layers for stage in stages],
        use_learnable_affine_block=spec.affine,
        hidden_sizes=list(backbone.channels),
        out_indices=list(range(5 - len(spec.strides), 5)),
    )


def _resnet_config(spec: DetectorSpec):
    from transformers import RTDetrResNetConfig

    backbone = RESNET[spec.backbone]
    return RTDetrResNetConfig(
        depths=list(backbone.blocks),
        hidden_sizes=list(backbone.channels),
        layer_type="bottleneck" if backbone.bottleneck else "basic",
        out_indices=[2, 3, 4],
    )


def build_reference(name: str, *, num_classes: int, num_queries: int) -> nn.Module:
    """transformers' detector of that size, untied heads, freshly initialised."""
    from transformers import (
        DFineConfig,
        DFineForObjectDetection,
        RTDetrV2Config,
        RTDetrV2ForObjectDetection,
    )

    spec = SPECS[name]
    levels = len(spec.strides)
    common = {
        "num_labels": num_classes,
        "num_queries": num_queries,
        "encoder_hidden_dim": spec.encoder_dim,
        "encoder_ffn_dim": spec.encoder_ffn,
        "encoder_in_channels": list(spec.channels),
        "feat_strides": list(spec.strides),
        "encode_proj_layers": [levels - 1],
        "hidden_expansion": spec.expansion,
        "d_model": spec.decoder_dim,
        "decoder_ffn_dim": spec.decoder_ffn,
        "decoder_layers": spec.layers,
        "decoder_in_channels": [spec.encoder_dim] * levels,
        "num_feature_levels": levels,
        "tie_word_embeddings": False,
        "freeze_backbone_batch_norms": spec.freeze_norm,
    }
    if spec.fdr:
        config = DFineConfig(
            backbone_config=_hgnet_config(spec),
            depth_mult=spec.blocks / 3,
            decoder_n_points=list(spec.points),
            reg_scale=spec.reg_scale,
            **common,
        )
        return DFineForObjectDetection(config)
    config = RTDetrV2Config(
        backbone_config=_resnet_config(spec),
        decoder_n_points=spec.points[0],
        decoder_n_levels=levels,
        **common,
    )
    return RTDetrV2ForObjectDetection(config)


@torch.no_grad()
def perturb(model: nn.Module, seed: int) -> None:
    """Move every weight and statistic: much of a fresh model is zero where wiring would show."""
    generator = torch.Generator().manual_seed(seed)

    def noise(tensor: Tensor) -> Tensor:
        return torch.randn(tensor.shape, generator=generator, dtype=torch.float64)

    for name, parameter in model.named_parameters():
        if name.endswith(("reg_scale", ".up")):
            continue
        parameter.add_(0.02 * noise(parameter).to(parameter.dtype))
    for name, buffer in model.named_buffers():
        if name.endswith("running_var"):
            buffer.add_(0.2 * noise(buffer).abs().to(buffer.dtype))
        elif name.endswith("running_mean") or (
            name.endswith((".weight", ".bias")) and buffer.dim() == 1
        ):
            buffer.add_(0.05 * noise(buffer).to(buffer.dtype))
