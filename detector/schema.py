"""What a configuration may hold: sections, keys, types, defaults and limits, as tables.

The defaults are D-FINE's recipe for fine-tuning on some thousand pictures.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import yaml


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Which network. The number of classes comes from the data."""

    backbone_name: str = "hgnetv2_n"  # hgnetv2_n s m l x (D-FINE), resnet18 34 50 (RT-DETRv2)
    num_queries: int = 300  # boxes predicted a picture; more than the most objects in one
    num_denoising: int = 100  # noised ground truths a picture while training; 0 = off
    weights: str | None = None  # start from this: PATH (.safetensors, .pth, .pt), or hf://ORG/NAME
    backbone_weights: str | None = None  # or from this backbone's, the rest from scratch
    # held fixed, batch-norm statistics included; norms = every batch norm; auto = what the authors
    # hold fixed of this size, where the backbone starts from a file
    freeze: Literal["auto", "none", "stem", "backbone_norms", "norms", "backbone"] = "auto"


@dataclass(frozen=True, slots=True)
class DataConfig:
    """Which pictures, and what is done to them on the way to the network."""

    # auto = what `root` holds; coins, digits and synthetic are drawn in memory where `root` is null
    format: Literal["auto", "yolo", "coco", "voc", "pennfudan", "coins", "digits", "synthetic"] = (
        "auto"
    )
    root: str | None = None  # folder (or data.yaml) of a data set; where its archive unpacks to
    archive_object: str | None = None  # the staged archive's name in the store (--object-name)
    archive_sha256: str | None = None  # and what it must hash to (--sha256)
    train_annotations: str | None = None  # COCO: a JSON file of another name, from `root`
    val_annotations: str | None = None  # likewise, of the held-out pictures
    train_images: str | None = None  # COCO: the folder that its picture names start from
    val_images: str | None = None  # likewise, of the held-out pictures
    classes: tuple[str, ...] = ()  # keep these classes only; empty = all
    image_size: int = 640  # side of the square that a picture is stretched to, pixels
    train_samples: int | None = None  # at most so many training pictures
    eval_samples: int | None = None  # at most so many held-out pictures
    seed: int = 0  # of a set or a split that is drawn; the order of pictures follows runtime.seed
    # loader processes a rank; 0 = in the training process; null = as many as there are cores for, on a GPU
    workers: int | None = None
    cache: Literal["auto", "ram", "none"] = "auto"  # decoded pictures; auto = where they fit
    horizontal_flip: float = 0.5  # probability
    vertical_flip: float = 0.0  # probability, for pictures without an up
    photometric: float = 0.0  # probability of a change of light and colour
    zoom_out: float = 0.0  # probability of a smaller picture on a larger black canvas
    iou_crop: float = 0.0  # probability of a crop around at least one object
    mosaic: float = 0.0  # probability of four pictures in one
    mixup: float = 0.0  # probability of another picture blended in
    mix_until: float = 0.5  # the part of the run in which mosaic and mixup happen
    strong_until: float = 0.9  # the part of the run before the last epochs, which only flip
    multi_scale: float = 0.0  # 0.25 = each step at a side of 75 % to 125 % of image_size
    max_unreadable: float = 0.01  # part of the pictures that may turn out broken while it trains


@dataclass(frozen=True, slots=True)
class SolverConfig:
    """How the weights are changed. Steps are optimizer steps."""

    epochs: int = 72  # times through the training pictures
    batch_size: int = 16  # GLOBAL, of one optimizer step: divided over ranks and micro-batches
    accumulate: int = 1  # micro-batches a step and rank, one after the other, to save memory
    lr: float = 2e-4  # learning rate after the warm-up
    backbone_lr_factor: float = 0.5  # times lr for the backbone; 1 where nothing is pretrained
    stage_lr_decay: float = 1.0  # a stage of the backbone learns at this times the next one's rate
    weight_decay: float = 1e-4  # of AdamW; none on norms and biases
    warmup_steps: int = 500  # over which the rate rises; at most half the run
    # of the rate, after the warm-up
    schedule: Literal["flat_cosine", "cosine", "step", "constant"] = "flat_cosine"
    flat_fraction: float = 0.5  # flat_cosine: the part of the run before the descent
    final_lr_factor: float = 0.05  # times lr at the very end
    milestones: tuple[float, ...] = (0.7, 0.9)  # step: the parts of the run after which it drops
    step_factor: float = 0.1  # step: what each drop multiplies the rate with
    clip_norm: float = 0.1  # longest gradient that a step follows; 0 = any
    loss: Literal["vfl", "mal"] = "vfl"  # of the scores: varifocal, or DEIM's matchability-aware
    ema_decay: float = 0.999  # of the averaged weights, which are judged and kept
    ema_warmup: float = 10.0  # the average spans about the last 1 / ema_warmup of the steps so far
    max_steps: int | None = None  # end after so many optimizer steps
    max_skipped_steps: int = 20  # in a row, then the run fails with advice
    patience: int | None = None  # end after so many evaluations without a better best_metric
    save_interval: int | None = None  # also keep epoch_<N>.pt every so many epochs
    checkpoint_steps: int | None = None  # also save last.pt every so many optimizer steps


@dataclass(frozen=True, slots=True)
class RuntimeConfig:
    """Where and how the processes run."""

    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto = cuda where there is a card
    seed: int = 0  # of first weights, order of pictures, augmentation
    amp: bool = True  # on CUDA only: fp16 below compute capability 8.0, else bf16
    amp_init_scale: float = 8192.0  # fp16: lower it where optimizer_steps stays 0
    output_dir: str | None = None  # null = runs; where RUN_DIR is set, becomes a link to it
    max_hours: float | None = None  # end with a checkpoint after so long
    timeout_seconds: float = 600.0  # a rank that waits longer for the others gives up
    callbacks: tuple[str, ...] = ()  # module:function, called with each event (callbacks.py)


@dataclass(frozen=True, slots=True)
class LoggingConfig:
    """What is said while it trains."""

    log_interval: int = 10  # optimizer steps between two rows of steps.jsonl
    # where the rows go too; a tracker that is not installed, fails or hangs never hurts the run
    sinks: tuple[Literal["tensorboard", "wandb", "mlflow"], ...] = ()


@dataclass(frozen=True, slots=True)
class EvaluationConfig:
    """When and how the weights are judged."""

    interval: int = 1  # epochs; the last epoch is always evaluated
    batch_size: int = 16  # a rank
    # what makes best.pt the best
    best_metric: Literal["mAP@0.50:0.95", "AP50", "AP75"] = "mAP@0.50:0.95"
    predictions: int = 64  # pictures in evaluation/predictions.json


@dataclass(frozen=True, slots=True)
class Config:
    """The whole of it; `source` is the file it came from."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    solver: SolverConfig = field(default_factory=SolverConfig)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    source: str = ""

    def as_dict(self) -> dict[str, dict[str, Any]]:
        """Return the sections as plain values, in declaration order (`source` left out)."""
        plain = dataclasses.asdict(self)
        plain.pop("source")
        for section in plain.values():
            for key, value in section.items():
                if isinstance(value, tuple):
                    section[key] = list(value)
        return plain

    def to_yaml(self) -> str:
        """Return the resolved configuration as YAML that `load_config` reads back."""
        return yaml.safe_dump(self.as_dict(), sort_keys=False, allow_unicode=True)


SECTIONS: Final[dict[str, type]] = {
    "model": ModelConfig,
    "data": DataConfig,
    "solver": SolverConfig,
    "runtime": RuntimeConfig,
    "logging": LoggingConfig,
    "evaluation": EvaluationConfig,
}
_SEEDS: Final = (0, 2**63 - 1)  # what torch.manual_seed takes
# Least and greatest allowed value of a number (None: no bound). A greatest value stands where more can
# only be a slip that would end deep inside: memory, processes, a date.
LIMITS: Final[dict[str, tuple[float, float | None]]] = {
    "model.num_queries": (1, 100_000),
    "model.num_denoising": (0, 5_000),
    "data.image_size": (32, 8192),
    "data.train_samples": (1, None),
    "data.eval_samples": (1, None),
    "data.workers": (0, 256),
    "data.horizontal_flip": (0, 1),
    "data.vertical_flip": (0, 1),
    "data.photometric": (0, 1),
    "data.zoom_out": (0, 1),
    "data.iou_crop": (0, 1),
    "data.mosaic": (0, 1),
    "data.mixup": (0, 1),
    "data.mix_until": (0, 1),
    "data.strong_until": (0, 1),
    "data.multi_scale": (0, 0.5),
    "data.max_unreadable": (0, 1),
    "data.seed": _SEEDS,
    "solver.epochs": (1, 10**9),
    "solver.batch_size": (1, None),
    "solver.accumulate": (1, 10_000),
    "solver.lr": (0, None),
    "solver.backbone_lr_factor": (0, None),
    "solver.stage_lr_decay": (0, 1),
    "solver.weight_decay": (0, None),
    "solver.warmup_steps": (0, None),
    "solver.flat_fraction": (0, 1),
    "solver.final_lr_factor": (0, 1),
    "solver.milestones": (0, 1),
    "solver.step_factor": (0, 1),
    "solver.clip_norm": (0, None),
    "solver.ema_decay": (0, 1),
    "solver.ema_warmup": (0, None),
    "solver.max_steps": (1, 10**12),
    "solver.max_skipped_steps": (1, None),
    "solver.patience": (1, None),
    "solver.save_interval": (1, None),
    "solver.checkpoint_steps": (1, None),
    "runtime.seed": _SEEDS,
    "runtime.amp_init_scale": (1, None),
    "runtime.max_hours": (0, None),
    "runtime.timeout_seconds": (1, 10**7),
    "logging.log_interval": (1, None),
    "evaluation.interval": (1, None),
    "evaluation.batch_size": (1, None),
    "evaluation.predictions": (0, None),
}


def option_names() -> tuple[str, ...]:
    """Return every key as `section.key`, in declaration order (for completion and tests)."""
    return tuple(
        f"{section}.{item.name}"
        for section, kind in SECTIONS.items()
        for item in dataclasses.fields(kind)
    )
