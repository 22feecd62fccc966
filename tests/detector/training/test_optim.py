from __future__ import annotations

import pytest
import torch
from torch import nn

from detector.config import SolverConfig
from detector.ema import WeightAverage
from detector.optim import build_optimizer, count_steps, lr_factor, set_lr


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
        self.head = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
        self.frozen = nn.Linear(2, 2).requires_grad_(False)


def groups_of(model: nn.Module, solver: SolverConfig) -> dict[str, tuple[float, float]]:
    """Return (rate, weight decay) of every parameter by name."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {
        names[id(parameter)]: (group["lr"], group["weight_decay"])
        for group in build_optimizer(model, solver).param_groups
        for parameter in group["params"]
    }


def test_norms_and_biases_are_not_decayed_and_the_backbone_has_its_own_rate() -> None:
    solver = SolverConfig(lr=1e-3, backbone_lr_factor=0.5, weight_decay=0.1)
    assert groups_of(Net(), solver) == {
        "backbone.0.weight": (5e-4, 0.1),
        "backbone.0.bias": (5e-4, 0.0),
        "backbone.1.weight": (5e-4, 0.0),
        "backbone.1.bias": (5e-4, 0.0),
        "head.0.weight": (1e-3, 0.1),
        "head.0.bias": (1e-3, 0.0),
        "head.1.weight": (1e-3, 0.0),
        "head.1.bias": (1e-3, 0.0),
    }


def test_every_trainable_parameter_of_the_detector_is_in_one_group() -> None:
    from detector.models.detector import build_detector

    model = build_detector("hgnetv2_n", num_classes=2)
    grouped = [
        p for group in build_optimizer(model, SolverConfig()).param_groups for p in group["params"]
    ]
    assert len(grouped) == len({id(p) for p in grouped})
    assert {id(p) for p in grouped} == {id(p) for p in model.parameters() if p.requires_grad}


def factors(total: int, **solver: object) -> list[float]:
    config = SolverConfig(**solver)  # type: ignore[arg-type]
    return [lr_factor(step, total_steps=total, solver=config) for step in range(total)]


def test_warm_up_is_linear_and_ends_at_the_base_rate() -> None:
    assert factors(100, warmup_steps=4, schedule="constant")[:6] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_warm_up_takes_at_most_half_of_a_short_run() -> None:
    assert factors(4, warmup_steps=500, schedule="constant") == [0.5, 1.0, 1.0, 1.0]


def test_flat_cosine_is_flat_then_descends_to_the_final_rate() -> None:
    rates = factors(
        100, warmup_steps=0, schedule="flat_cosine", flat_fraction=0.6, final_lr_factor=0.1
    )
    assert rates[:61] == [1.0] * 61
    assert rates[80] == pytest.approx(0.55)
    assert rates[99] == pytest.approx(0.1, abs=2e-3)
    assert rates[61:] == sorted(rates[61:], reverse=True)


def test_cosine_descends_from_the_end_of_the_warm_up() -> None:
    rates = factors(100, warmup_steps=20, schedule="cosine", final_lr_factor=0.0)
    assert rates[20] == 1.0
    assert rates[60] == pytest.approx(0.5)


def test_step_drops_at_each_milestone() -> None:
    rates = factors(100, warmup_steps=2, schedule="step", milestones=(0.5, 0.8), step_factor=0.1)
    assert rates[:2] == [0.5, 1.0]
    assert rates[49:51] == [1.0, 0.1]
    assert rates[79:81] == pytest.approx([0.1, 0.01])


def test_earlier_stages_of_the_backbone_learn_more_slowly() -> None:
    from detector.models.detector import build_detector

    model = build_detector("hgnetv2_n", num_classes=2)
    solver = SolverConfig(lr=1e-3, backbone_lr_factor=0.5, stage_lr_decay=0.5)
    rates = {name: rate for name, (rate, _) in groups_of(model, solver).items()}
    stages = len(model.backbone.stages)
    for stage in range(stages):
        found = {r for name, r in rates.items() if name.startswith(f"backbone.stages.{stage}.")}
        assert found == {5e-4 * 0.5 ** (stages - 1 - stage)}
    assert {r for name, r in rates.items() if "backbone.stem." in name} == {5e-4 * 0.5**stages}
    assert {r for name, r in rates.items() if not name.startswith("backbone.")} == {1e-3}


@pytest.mark.parametrize(
    ("freeze", "still", "moving"),
    [
        ("none", (), ("backbone.stem", "backbone.stages", "encoder", "decoder")),
        ("stem", ("backbone.stem",), ("backbone.stages", "encoder", "decoder")),
        ("backbone", ("backbone",), ("encoder", "decoder")),
    ],
)
def test_what_is_frozen_neither_learns_nor_changes_its_statistics(
    freeze: str, still: tuple[str, ...], moving: tuple[str, ...]
) -> None:
    from detector.config import ModelConfig
    from detector.freezing import hold_fixed
    from detector.models.detector import build_detector

    model = build_detector("hgnetv2_n", num_classes=2, num_queries=10)
    assert hold_fixed(model, ModelConfig(freeze=freeze)) == still
    optimizer = build_optimizer(model, SolverConfig(lr=1e-2))
    before = {key: value.clone() for key, value in model.state_dict().items()}
    model.train()
    output = model(torch.rand(2, 3, 64, 64))
    (output.logits.square().sum() + output.boxes.square().sum()).backward()
    optimizer.step()
    changed = [key for key, value in model.state_dict().items() if not value.equal(before[key])]
    assert not [key for key in changed if key.startswith(still)] if still else True
    for part in moving:
        assert [key for key in changed if key.startswith(f"{part}.")], part


@pytest.mark.parametrize("freeze", ["norms", "backbone_norms"])
def test_frozen_norms_hold_their_statistics_and_the_rest_learns(freeze: str) -> None:
    from detector.config import ModelConfig
    from detector.freezing import hold_fixed
    from detector.models.detector import build_detector

    model = build_detector("hgnetv2_n", num_classes=2, num_queries=10)
    hold_fixed(model, ModelConfig(freeze=freeze))
    before = {key: value.clone() for key, value in model.named_buffers()}
    model.train()
    model(torch.rand(2, 3, 64, 64))
    changed = [key for key, value in model.named_buffers() if not value.equal(before[key])]
    assert not [key for key in changed if freeze == "norms" or key.startswith("backbone.")]
    assert bool(changed) == (freeze == "backbone_norms")
    assert all(
        p.requires_grad for n, p in model.backbone.named_parameters() if n.endswith("conv.weight")
    )


def test_past_its_end_a_schedule_stays_at_the_final_rate() -> None:
    solver = SolverConfig(warmup_steps=0, final_lr_factor=0.1)
    assert lr_factor(500, total_steps=100, solver=solver) == pytest.approx(0.1)


def test_set_lr_keeps_the_ratio_of_the_groups() -> None:
    optimizer = build_optimizer(Net(), SolverConfig(lr=1e-3, backbone_lr_factor=0.5))
    assert set_lr(optimizer, 0.1) == pytest.approx(1e-4)
    assert sorted({round(group["lr"], 9) for group in optimizer.param_groups}) == [5e-5, 1e-4]


def test_only_steps_that_the_scaler_lets_through_are_counted() -> None:
    model = nn.Linear(1, 1)
    optimizer = build_optimizer(model, SolverConfig())
    counter = count_steps(optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for value in (float("inf"), 1.0, float("nan"), 1.0):
        optimizer.zero_grad()
        scaler.scale((model(torch.ones(1, 1)) * value).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert counter.count == 2


def test_the_average_of_a_short_run_forgets_its_start() -> None:
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    ema = WeightAverage(model, decay=0.9999, warmup=10)
    nn.init.ones_(model.weight)
    for _ in range(30):
        ema.update(model)
    assert float(ema.model.weight) > 0.999


def test_the_average_of_a_long_run_is_as_slow_as_asked() -> None:
    ema = WeightAverage(nn.Linear(1, 1), decay=0.99, warmup=10)
    assert [ema.decay(n) for n in (1, 10, 90, 5000)] == pytest.approx([1 / 11, 0.5, 0.9, 0.99])


def test_the_average_follows_statistics_and_copies_counters() -> None:
    model = nn.BatchNorm1d(1)
    ema = WeightAverage(model, decay=0.5, warmup=0)
    model(torch.tensor([[2.0], [4.0]]))
    ema.update(model)
    assert float(ema.model.running_mean) == pytest.approx(float(model.running_mean) / 2)
    assert int(ema.model.num_batches_tracked) == 1
    assert not ema.model.training
