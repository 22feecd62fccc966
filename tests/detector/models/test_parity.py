"""The network is the published one: every size equals transformers' with perturbed weights.

One size of each family is compared at a small input in every run; `-m campaign` compares all eight at
all inputs and with a second seed. What each test measured is in its properties (`--junitxml`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from detector.models.detector import Detector, DetectorOutput, build_detector
from detector.models.weights import load_weights

# Batch, height, width, classes, queries.
INPUTS = {
    "160x256": (1, 160, 256, 80, 100),
    "320x480": (1, 320, 480, 80, 100),
    "640x640": (1, 640, 640, 80, 300),
    "three of one class": (3, 320, 320, 1, 40),
}
QUICK = ("dfine_n", "rtdetrv2_r18")
FULL = ("dfine_s", "dfine_m", "dfine_l", "dfine_x", "rtdetrv2_r34", "rtdetrv2_r50")
# The deep decoders of D-FINE multiply rounding: float32 is 2e-4 from float64 there by a gain of 1.
GAIN = {"dfine_m": 0.4, "dfine_l": 0.4, "dfine_x": 0.4}
CAMPAIGN = pytest.mark.campaign
pytestmark = pytest.mark.timeout(1800)
RUNS = [
    *((name, "160x256", 0) for name in QUICK),
    *((name, "320x480", seed) for name in (*QUICK, *FULL) for seed in (0, 1)),
    *((name, case, 0) for name in (*QUICK, *FULL) for case in ("640x640", "three of one class")),
]
CASES = [
    pytest.param(
        run,
        id="-".join(map(str, run)),
        marks=[] if run[1] == "160x256" else [CAMPAIGN],
    )
    for run in RUNS
]
Record = Callable[[str, object], None]


def pair(
    name: str,
    folder: Path,
    *,
    seed: int,
    num_classes: int = 80,
    num_queries: int = 100,
    freeze_norm: bool | None = None,
    size: tuple[int, int] = (320, 480),
) -> tuple[nn.Module, Detector]:
    """transformers' perturbed model and ours with its weights, which went through a file."""
    from tests.detector.models.reference import CONSTANTS, build_reference, perturb, settle

    torch.manual_seed(seed)
    theirs = build_reference(
        name, num_classes=num_classes, num_queries=num_queries, freeze_norm=freeze_norm
    )
    gain = GAIN.get(name, 1.0)
    perturb(theirs, seed=seed + 1, gain=gain)
    settle(theirs, images(2, *size, seed=seed + 2), gain=gain)
    state = theirs.state_dict()
    for key, value in state.items():
        if value.is_floating_point() and not key.endswith((*CONSTANTS, "points_scale")):
            assert value.any(), f"{key} is zero"
            assert value.numel() == 1 or value.std() > 0, f"{key} is constant"
    file = folder / "model.safetensors"
    save_file({key: value.clone() for key, value in state.items()}, file)
    ours = build_detector(name, num_classes=num_classes, num_queries=num_queries)
    report = load_weights(ours, file)
    file.unlink()
    assert report.layout == "v5"
    assert report.reinitialised == ()
    return theirs.eval(), ours.eval()


def images(batch: int, height: int, width: int, *, seed: int) -> Tensor:
    """Soft patches of colour under noise, (B, 3, H, W) in 0..1."""
    generator = torch.Generator().manual_seed(seed)
    patches = torch.rand(batch, 3, height // 32, width // 32, generator=generator)
    patches = F.interpolate(patches, size=(height, width), mode="bilinear")
    return 0.7 * patches + 0.3 * torch.rand(batch, 3, height, width, generator=generator)


def distance(first: Tensor, second: Tensor) -> float:
    assert first.shape == second.shape
    return float((first - second).abs().max())


@torch.no_grad()
def clear_images(theirs: nn.Module, batch: int, height: int, width: int, *, seed: int) -> Tensor:
    """Those of a few more pictures whose best tokens' scores are furthest apart.

    Else two scores may well be one rounding apart, and chance would say which ranks first.
    """
    candidates = images(batch + 3, height, width, seed=seed)
    gaps = []
    for picture in candidates:
        scores = theirs(picture[None]).enc_outputs_class.amax(-1)
        best = scores[0].topk(theirs.config.num_queries + 1).values
        gaps.append((best[:-1] - best[1:]).min())
    return candidates[torch.stack(gaps).topk(batch).indices]


@torch.no_grad()
def outputs(
    theirs: nn.Module, ours: Detector, pictures: Tensor
) -> tuple[object, DetectorOutput, Tensor, Tensor]:
    """Both outputs and the (B, Q) tokens that each chose, in order."""
    scored: list[Tensor] = []
    hook = ours.selection.score_head.register_forward_hook(
        lambda _module, _inputs, output: scored.append(output)
    )
    expected, found = theirs(pictures), ours(pictures)
    hook.remove()
    count = found.encoder_logits.shape[1]
    theirs_chosen = expected.enc_outputs_class.amax(-1).topk(count, 1).indices
    ours_chosen = scored[0].amax(-1).topk(count, 1).indices
    index = ours_chosen[..., None].expand(-1, -1, found.encoder_logits.shape[-1])
    assert torch.equal(scored[0].gather(1, index), found.encoder_logits)  # these it did choose
    return expected, found, theirs_chosen, ours_chosen


@dataclass(frozen=True)
class Comparison:
    """Whether both chose the same tokens in the same order, how far apart they are, how rich."""

    same_tokens: bool
    deviations: dict[str, float]
    spreads: dict[str, float]


def compare(theirs: nn.Module, ours: Detector, pictures: Tensor) -> Comparison:
    """Compare in the type of the pictures; spreads are over the tokens or queries of a picture."""
    dtype = pictures.dtype
    expected, found, theirs_chosen, ours_chosen = outputs(
        theirs.to(dtype), ours.to(dtype), pictures
    )
    parts = {
        "logits": (expected.logits, found.final[0]),
        "boxes": (expected.pred_boxes, found.final[1]),
    }
    if found.decoded.corners is not None:
        corners = expected.intermediate_predicted_corners[:, -1]
        parts["corners"] = (corners, found.decoded.corners[-1])
    spreads = {"scores": float(expected.enc_outputs_class.std(1).mean())}
    return Comparison(
        torch.equal(theirs_chosen, ours_chosen),
        {part: distance(*both) for part, both in parts.items()},
        spreads | {part: float(both[0].std(1).mean()) for part, both in parts.items()},
    )


@pytest.fixture(scope="module")
def compared(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[torch.dtype, Comparison]:
    """One size, input and seed in both types."""
    name, case, seed = request.param
    batch, height, width, num_classes, num_queries = INPUTS[case]
    folder = tmp_path_factory.mktemp("parity")
    size = (160, 256) if case == "160x256" else (320, 480)
    theirs, ours = pair(
        name, folder, seed=seed, num_classes=num_classes, num_queries=num_queries, size=size
    )
    pictures = clear_images(theirs, batch, height, width, seed=seed + 3)
    return {
        dtype: compare(theirs, ours, pictures.to(dtype)) for dtype in (torch.float32, torch.float64)
    }


@pytest.mark.parametrize("compared", CASES, indirect=True)
def test_equals_transformers_in_float64(
    compared: dict[torch.dtype, Comparison], record_property: Record
) -> None:
    found = compared[torch.float64]
    record_property("deviations", found.deviations)
    assert found.same_tokens
    assert max(found.deviations.values()) < 1e-9, found.deviations


@pytest.mark.parametrize("compared", CASES, indirect=True)
def test_equals_transformers_in_float32(
    compared: dict[torch.dtype, Comparison], record_property: Record
) -> None:
    found = compared[torch.float32]
    record_property("deviations", found.deviations)
    assert found.same_tokens
    assert found.deviations["logits"] < 1e-4
    assert found.deviations["boxes"] < 1e-5


@pytest.mark.parametrize("compared", CASES, indirect=True)
def test_the_comparison_depends_on_the_picture(
    compared: dict[torch.dtype, Comparison],
) -> None:
    assert min(compared[torch.float64].spreads.values()) > 0.05, compared[torch.float64].spreads


@pytest.mark.parametrize(
    ("name", "seed"),
    [
        pytest.param(name, seed, marks=[] if (name in QUICK and seed == 0) else [CAMPAIGN])
        for name in (*QUICK, *FULL)
        for seed in (0, 1)
    ],
)
def test_gradients_equal_transformers(
    name: str, seed: int, tmp_path: Path, record_property: Record
) -> None:
    theirs, ours = pair(name, tmp_path, seed=seed, freeze_norm=False, size=(160, 256))
    pictures = images(2, 128, 192, seed=seed + 3).double()
    theirs, ours = theirs.double().train(), ours.double().train()
    for module in [*theirs.modules(), *ours.modules()]:
        if isinstance(module, nn.BatchNorm2d):
            module.eval()  # batch statistics of a 4x6 map only add noise to the comparison
    expected, found = theirs.model(pictures), ours(pictures)
    decoded = found.decoded
    logits, boxes = decoded.logits, decoded.boxes
    if decoded.pre_logits is not None:  # transformers counts these as one more layer
        logits = torch.cat((decoded.pre_logits[None], logits))
        boxes = torch.cat((decoded.pre_boxes[None], boxes))
    pairs = [
        (expected.intermediate_logits.transpose(0, 1), logits),
        (expected.intermediate_reference_points.transpose(0, 1), boxes),
        (expected.enc_topk_logits, found.encoder_logits),
        (expected.enc_topk_bboxes, found.encoder_boxes),
    ]
    if decoded.corners is not None:
        pairs.append((expected.intermediate_predicted_corners.transpose(0, 1), decoded.corners))
    generator = torch.Generator().manual_seed(seed + 4)
    sums: list[Tensor] = [torch.zeros((), dtype=torch.float64)] * 2
    for both in pairs:
        assert distance(both[0].detach(), both[1].detach()) < 1e-9
        # A plain sum would vanish in the layer norms: weigh every output differently.
        weight = torch.randn(both[0].shape, generator=generator, dtype=torch.float64)
        sums = [total + (part * weight).sum() for total, part in zip(sums, both, strict=True)]
    for total in sums:
        total.backward()
    wanted = translated_gradients(theirs, name, tmp_path / "gradients.safetensors")
    deviations, untrained = {}, set()
    for key, parameter in ours.named_parameters():
        if not wanted[key].any():
            untrained.add(key)
            continue
        scale = float(wanted[key].abs().max())
        deviations[key] = distance(wanted[key], parameter.grad) / scale
    record_property("deviations", {"gradients": max(deviations.values())})
    assert max(deviations.values()) < 1e-6, max(deviations, key=deviations.__getitem__)
    assert untrained == {"denoising.class_embed.weight"}  # no targets, nothing to denoise


def translated_gradients(theirs: nn.Module, name: str, file: Path) -> dict[str, Tensor]:
    """transformers' gradients under our names: they take the way of the weights."""
    from tests.detector.models.reference import CONSTANTS

    state = {key: torch.zeros_like(value) for key, value in theirs.named_buffers()}
    for key, value in theirs.named_parameters():
        if key.endswith(CONSTANTS):
            state[key] = value.detach().clone()
        else:
            state[key] = torch.zeros_like(value) if value.grad is None else value.grad
    save_file({key: value.contiguous() for key, value in state.items()}, file)
    mirror = build_detector(name, num_classes=80, num_queries=100).double()
    load_weights(mirror, file)
    return {key: parameter.detach() for key, parameter in mirror.named_parameters()}
