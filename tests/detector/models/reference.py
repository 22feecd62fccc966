"""Detectors of transformers with our sizes and perturbed weights: the yardstick for parity."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from torch import Tensor, nn

from detector.models.specs import HGNETV2, RESNET, SPECS, DetectorSpec

CONSTANTS = (".reg_scale", ".up")


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


def build_reference(
    name: str, *, num_classes: int, num_queries: int, freeze_norm: bool | None = None
) -> nn.Module:
    """transformers' detector of that size, untied heads, freshly initialised.

    Its backbone's norms are frozen as the authors have it unless `freeze_norm` says otherwise.
    """
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
        "freeze_backbone_batch_norms": spec.freeze_norm if freeze_norm is None else freeze_norm,
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
def perturb(model: nn.Module, seed: int, *, gain: float = 1.0) -> None:
    """Move every weight and statistic: much of a fresh model is zero where wiring would show.

    By a gain of 1 a matrix of zeros comes to keep the size of what it is applied to.
    """
    generator = torch.Generator().manual_seed(seed)

    def noise(tensor: Tensor) -> Tensor:
        drawn = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
        return drawn.to(tensor.dtype)

    for name, parameter in model.named_parameters():
        if not name.endswith(CONSTANTS):
            if parameter.dim() < 2:
                scale = 0.05 * gain
            else:
                size = gain if parameter.any() else max(gain, 0.5)
                scale = size * parameter[0].numel() ** -0.5
            parameter.add_(scale * noise(parameter))
    for name, buffer in model.named_buffers():
        if name.endswith("running_var"):
            buffer.mul_(1 + 0.2 * noise(buffer).abs())
        elif name.endswith("running_mean") or (
            name.endswith((".weight", ".bias")) and buffer.dim() == 1
        ):
            buffer.add_(0.05 * noise(buffer))


@torch.no_grad()
def settle(model: nn.Module, pictures: Tensor, *, gain: float = 1.0) -> None:
    """Give every batch norm the statistics of what reaches it, as training would have.

    Untouched, the maps of a fresh network shrink from layer to layer until the biases drown the
    picture: outputs would then say nothing of the backbone, and rounding would rank its tokens. But
    a chain of layers that norm and clip at zero is chaotic, unlike a trained one, and multiplies
    rounding: smaller maps, lifted before the backbone's ReLUs, keep it calm.
    """

    def take(norm: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        variance, mean = torch.var_mean(inputs[0].double(), (0, 2, 3))
        norm.running_mean.copy_(mean)
        norm.running_var.copy_(variance)

    hooks = []
    for name, module in model.named_modules():
        if hasattr(module, "running_var"):
            hooks.append(module.register_forward_pre_hook(take))
            module.weight.mul_(0.5 if ".backbone." in name else 0.5 * gain)
            if ".backbone." in name:
                module.bias.add_(1)
    model.eval()(pictures)
    for hook in hooks:
        hook.remove()
