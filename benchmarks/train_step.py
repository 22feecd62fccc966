"""One training step and one inference: ours beside transformers', in one process, in turns.

    python benchmarks/train_step.py [--quick] [--pairs 30] [--threads 2] [--json PATH]

Both have the same random weights, the same targets and the same settings: 320 px, batch 2, float32,
300 queries, denoising and batch norm in training mode. That both compute the same is checked first.
The ratio of a pair is transformers' time to ours; a table gives medians and quartiles over pairs,
by the clock and, for a busy machine, by the processor time of the whole process. The last lines
hold the ratios against their targets; the exit code is 1 when one is missed.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Waiting threads sleep: on a busy machine their spinning would be counted as work.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from detector.losses import Criterion  # noqa: E402
from detector.models.deploy import deployed  # noqa: E402
from detector.models.detector import Detector, build_detector, postprocess  # noqa: E402
from detector.models.weights import load_weights  # noqa: E402
from detector.targets import Targets  # noqa: E402
from tests.detector.models.reference import build_reference, perturb  # noqa: E402

SIDE, BATCH, CLASSES, QUERIES = 320, 2, 80, 300
# model: (training, inference), the least median ratio that is promised.
TARGETS = {"dfine_s": (1.15, 1.10), "rtdetrv2_r18": (1.05, 1.10)}
TRAIN, WITH_OPTIMIZER = "train", "train+adamw"
INFERENCE, DEPLOYED = "inference", "deployed"  # as trained, and folded by `deployed`


@dataclass(frozen=True, slots=True)
class Spent:
    """Seconds of one action, by the clock and by the process's processor time."""

    wall: float
    cpu: float


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table; times are medians in milliseconds, ratios theirs to ours."""

    model: str
    mode: str
    boxes: int
    pairs: int
    theirs_ms: float
    ours_ms: float
    ratio: float
    lower_quartile: float
    upper_quartile: float
    cpu_ratio: float

    def __str__(self) -> str:
        return (
            f"{self.model:<13} {self.mode:<12} {self.boxes or '-':>5} {self.theirs_ms:>9.0f} "
            f"{self.ours_ms:>8.0f} {self.ratio:>7.3f} {self.lower_quartile:>7.3f} "
            f"{self.upper_quartile:>7.3f} {self.cpu_ratio:>9.3f}"
        )


HEADER = (
    f"{'model':<13} {'mode':<12} {'boxes':>5} {'theirs ms':>9} {'ours ms':>8} {'ratio':>7} "
    f"{'25 %':>7} {'75 %':>7} {'cpu ratio':>9}"
)


def build_pair(name: str) -> tuple[nn.Module, Detector]:
    """transformers' detector with random weights, and ours with the same ones."""
    torch.manual_seed(0)
    theirs = build_reference(name, num_classes=CLASSES, num_queries=QUERIES)
    perturb(theirs, seed=1)
    ours = build_detector(name, num_classes=CLASSES, num_queries=QUERIES)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.safetensors"
        save_file({key: value.clone() for key, value in theirs.state_dict().items()}, file)
        load_weights(ours, file)
    return theirs, ours


def draw_targets(boxes: int) -> tuple[Targets, list[dict[str, Tensor]]]:
    """The same random boxes as ours and as theirs."""
    generator = torch.Generator().manual_seed(boxes)
    centres = torch.rand(BATCH, boxes, 2, generator=generator) * 0.6 + 0.2
    sides = torch.rand(BATCH, boxes, 2, generator=generator) * 0.3 + 0.05
    drawn = torch.cat((centres, sides), 2)
    labels = torch.randint(CLASSES, (BATCH, boxes), generator=generator)
    theirs = [{"class_labels": rows, "boxes": box} for rows, box in zip(labels, drawn, strict=True)]
    return Targets.pad(list(drawn), list(labels)), theirs


def check_equal(theirs: nn.Module, ours: Detector, images: Tensor) -> str:
    """Raise unless outputs agree in float64, and RT-DETR's losses too; say how well they do.

    D-FINE's losses differ by design: transformers pairs boxes and distributions of different layers.
    """
    theirs, ours, images = theirs.double().eval(), ours.double().eval(), images.double()
    with torch.no_grad():
        expected, (logits, boxes) = theirs(images), ours(images).final
    gap = max(
        float((expected.logits - logits).abs().max()),
        float((expected.pred_boxes - boxes).abs().max()),
    )
    said = f"outputs within {gap:.0e}"
    if not ours.spec.fdr:
        targets, labels = draw_targets(20)
        targets = targets._replace(boxes=targets.boxes.double())
        labels = [{**row, "boxes": row["boxes"].double()} for row in labels]
        count, theirs.config.num_denoising = theirs.config.num_denoising, 0
        with torch.no_grad():
            # Without denoising, whose noise is drawn differently, and with the norms at rest.
            for module in [*theirs.train().modules(), *ours.train().modules()]:
                if isinstance(module, nn.BatchNorm2d):
                    module.eval()
            wanted = theirs(images, labels=labels).loss
            found = Criterion(CLASSES)(ours(images), targets)["total"]
        theirs.config.num_denoising = count
        off = abs(float(found / wanted) - 1)
        said += f", loss within {off:.0e} of {float(wanted):.2f}"
        gap = max(gap, off)
    if gap > 1e-6:
        raise SystemExit(f"The two {ours.spec.name} do not compute the same: {said}.")
    theirs.float()
    ours.float()
    return said


def spend(action: Callable[[], object]) -> Spent:
    wall, cpu = time.perf_counter(), time.process_time()
    action()
    return Spent(time.perf_counter() - wall, time.process_time() - cpu)


def in_turns(
    theirs: Callable[[], list[Spent]], ours: Callable[[], list[Spent]], pairs: int
) -> list[list[tuple[Spent, Spent]]]:
    """For each of an action's figures its pairs; who goes first alternates, two pairs are warm-up."""
    measured = []
    for index in range(-2, pairs):
        gc.collect()
        second = ours() if index % 2 else None
        first = theirs()
        second = second or ours()
        if index >= 0:
            measured.append(list(zip(first, second, strict=True)))
    return [list(figure) for figure in zip(*measured, strict=True)]


def summarise(model: str, mode: str, boxes: int, pairs: list[tuple[Spent, Spent]]) -> Row:
    ratios = [theirs.wall / ours.wall for theirs, ours in pairs]
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return Row(
        model,
        mode,
        boxes,
        len(pairs),
        1000 * statistics.median(theirs.wall for theirs, _ in pairs),
        1000 * statistics.median(ours.wall for _, ours in pairs),
        middle,
        low,
        high,
        statistics.median(theirs.cpu / ours.cpu for theirs, ours in pairs),
    )


def step(model: nn.Module, loss: Callable[[], Tensor]) -> Callable[[], list[Spent]]:
    """One training step of it: seconds without and with the optimizer."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)

    def once() -> list[Spent]:
        model.zero_grad(set_to_none=True)
        train = spend(lambda: loss().backward())
        update = spend(optimizer.step)
        return [train, Spent(train.wall + update.wall, train.cpu + update.cpu)]

    return once


def measure_training(
    theirs: nn.Module, ours: Detector, images: Tensor, boxes: int, pairs: int
) -> list[Row]:
    targets, labels = draw_targets(boxes)
    criterion = Criterion(CLASSES)
    theirs.train()
    ours.train()
    figures = in_turns(
        step(theirs, lambda: theirs(images, labels=labels).loss),
        step(ours, lambda: criterion(ours(images, targets), targets)["total"]),
        pairs,
    )
    return [
        summarise(ours.spec.name, mode, boxes, figure)
        for mode, figure in zip((TRAIN, WITH_OPTIMIZER), figures, strict=True)
    ]


def their_postprocess() -> Callable[..., Any]:
    from transformers.models.rt_detr.image_processing_pil_rt_detr import RTDetrImageProcessorPil

    return RTDetrImageProcessorPil().post_process_object_detection


def measure_inference(
    theirs: nn.Module, ours: Detector, images: Tensor, mode: str, pairs: int
) -> Row:
    """From images to the 300 best boxes in pixels."""
    sizes = torch.tensor([[SIDE, SIDE]] * BATCH)
    finish = their_postprocess()
    theirs.eval()
    network = deployed(ours) if mode == DEPLOYED else ours.eval()

    @torch.inference_mode()
    def detect_theirs() -> object:
        return finish(theirs(images), threshold=0.0, target_sizes=sizes)

    @torch.inference_mode()
    def detect_ours() -> object:
        return postprocess(*network(images).final, sizes)

    (figure,) = in_turns(lambda: [spend(detect_theirs)], lambda: [spend(detect_ours)], pairs)
    return summarise(ours.spec.name, mode, 0, figure)


def verdict(rows: list[Row]) -> bool:
    """Print each ratio against its target; whether all are met."""
    met = True
    for row in rows:
        training, inference = TARGETS[row.model]
        target = training if row.boxes else inference
        met &= row.ratio >= target
        boxes = f" {row.boxes} boxes" if row.boxes else ""
        print(
            f"{row.model} {row.mode}{boxes}: {row.ratio:.3f}, target {target:.2f}, "
            f"{'met' if row.ratio >= target else 'MISSED'}"
        )
    return met


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", choices=list(TARGETS), action="append", help="default: both")
    parser.add_argument("--boxes", type=int, nargs="+", default=[5, 20, 60], help="per image")
    parser.add_argument("--pairs", type=int, default=30, help="measured steps of each side")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="5 pairs and 20 boxes only")
    parser.add_argument("--json", type=Path, help="write rows and settings there")
    options = parser.parse_args()
    pairs, boxes = (5, [20]) if options.quick else (options.pairs, options.boxes)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(options.threads)
    images = torch.rand(BATCH, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(0))
    rows: list[Row] = []
    for name in options.model or TARGETS:
        theirs, ours = build_pair(name)
        print(f"# {name}: {check_equal(theirs, ours, images)}", flush=True)
        print(HEADER, flush=True)
        measured = []
        for mode in (INFERENCE, DEPLOYED):
            measured.append(measure_inference(theirs, ours, images, mode, 2 * pairs))
            print(measured[-1], flush=True)
        for count in boxes:
            training = measure_training(theirs, ours, images, count, pairs)
            print(*training, sep="\n", flush=True)
            measured += training
        rows += measured
    if options.json:
        settings = {"threads": options.threads, "side": SIDE, "batch": BATCH, "queries": QUERIES}
        table = {"torch": torch.__version__, **settings, "rows": [asdict(row) for row in rows]}
        options.json.write_text(json.dumps(table, indent=2) + "\n")
    return 0 if verdict(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
