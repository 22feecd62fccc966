"""What a recipe reaches from scratch, and how soon: ours beside transformers' D-FINE N, trained plainly.

    python benchmarks/recipes.py [coins digits] [--seed 0] [--ours-only] [--json FILE]

The reference: D-FINE N of transformers with its own losses, freshly initialised; batch 8, 192 px, AdamW at
8e-4, 50 warm-up steps, clip 0.1, as many queries as ours, no augmentation but a flip where the set has one; 200 steps for coins,
400 for digits. Ours: the packed configuration as it is. Both get the same held-out pictures, the same
evaluator and two threads, one after the other, each in a process of its own. Time is CPU time of the
whole process, evaluations included; the last line of each set gives ours over the reference's.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

THREADS = 2
# Threads that wait asleep: spinning would count as CPU time.
THREADING = {"OMP_NUM_THREADS": str(THREADS), "OMP_WAIT_POLICY": "PASSIVE"}
STEPS = {"coins": 200, "digits": 400}
BATCH, RATE, WARMUP, CLIP = 8, 8e-4, 50, 0.1
BUDGET = 1.7
"""CPU-seconds that ours may take, as a multiple of the reference's."""
WANTED = {"coins": (0.95, 0.75), "digits": (0.85, 0.65)}
"""Least AP50 and mAP@0.50:0.95 of ours."""


@dataclass(frozen=True, slots=True)
class Point:
    """Held-out figures after some CPU-seconds."""

    cpu_seconds: float
    steps: int
    ap50: float
    mean_ap: float

    def line(self, who: str) -> str:
        return (
            f"{who:>10} {self.steps:5d} steps {self.cpu_seconds:6.0f} CPU-s  "
            f"AP50 {self.ap50:.3f}  mAP {self.mean_ap:.3f}"
        )


def config_of(name: str, seed: int) -> tuple[str, list[str]]:
    return f"{name}/hgnetv2_n", [f"runtime.seed={seed}"]


def reference(name: str, seed: int) -> Iterator[Point]:
    """Train transformers' model; a point a quarter."""
    import torch

    from detector.config import load_config
    from detector.data.index import build_index
    from detector.data.loader import EvalLoader, TrainLoader
    from detector.evaluate import Evaluator
    from detector.models.detector import postprocess
    from tests.detector.models.reference import build_reference

    torch.set_num_threads(THREADS)
    torch.manual_seed(seed)
    path, overrides = config_of(name, seed)
    flip = "data.horizontal_flip=" + ("0.5" if name == "coins" else "0")
    plain = [
        "data.photometric=0",
        "data.zoom_out=0",
        "data.iou_crop=0",
        "data.vertical_flip=0",
        flip,
    ]
    config = load_config(path, [*overrides, *plain])
    train, val = build_index(config.data, "train"), build_index(config.data, "val")
    batches = TrainLoader(
        train, config=config.data, global_batch=BATCH, rank=0, world_size=1, seed=seed
    )
    model = build_reference(
        "dfine_n",
        num_classes=train.num_classes,
        num_queries=config.model.num_queries,
        freeze_norm=False,
    )
    optimizer = torch.optim.AdamW(model.parameters(), RATE, weight_decay=1e-4)

    def judge() -> tuple[float, float]:
        model.eval()
        evaluator = Evaluator(val)
        with torch.no_grad():
            for batch in EvalLoader(
                val, config=config.data, batch_size=BATCH, rank=0, world_size=1
            ):
                output = model(batch.images.float() / 255)
                evaluator.add(
                    batch.image_ids,
                    postprocess(output.logits, output.pred_boxes, batch.original_sizes),
                )
        model.train()
        metrics = evaluator.summarize().metrics
        return metrics["AP50"], metrics["mAP@0.50:0.95"]

    model.train()
    steps = epoch = 0
    while steps < STEPS[name]:
        for batch in batches.epoch(epoch):
            for group in optimizer.param_groups:
                group["lr"] = RATE * min(1.0, (steps + 1) / WARMUP)
            labels = [
                {
                    "class_labels": batch.targets.labels[i, :count],
                    "boxes": batch.targets.boxes[i, :count],
                }
                for i, count in enumerate(batch.targets.counts.tolist())
            ]
            optimizer.zero_grad()
            loss = model(batch.images.float() / 255, labels=labels).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            steps += 1
            if steps % (STEPS[name] // 4) == 0:
                yield Point(time.process_time(), steps, *judge())
            if steps == STEPS[name]:
                break
        epoch += 1


def ours(name: str, seed: int, overrides: list[str]) -> list[Point]:
    """Train with the command that users type; a point an evaluation."""
    path, seeded = config_of(name, seed)
    with tempfile.TemporaryDirectory() as folder:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        began = time.monotonic()
        subprocess.run(
            [
                *(sys.executable, "-m", "detector", "train", "--config", path),
                *("--set", f"runtime.output_dir={folder}", *seeded, *overrides),
            ],
            check=True,
            cwd=ROOT,
            env=os.environ | THREADING,
            stdout=subprocess.DEVNULL,
        )
        wall = time.monotonic() - began
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        total = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        (rows,) = Path(folder).glob("*/metrics.jsonl")
        epochs = [json.loads(line) for line in rows.read_text().splitlines()]
    points = []
    for row in epochs:
        metrics = row.get("metrics") or row
        if metrics.get("AP50") is not None:
            share = row["optimizer_steps"] / epochs[-1]["optimizer_steps"]
            points.append(
                Point(
                    share * total, row["optimizer_steps"], metrics["AP50"], metrics["mAP@0.50:0.95"]
                )
            )
    assert math.isclose(points[-1].cpu_seconds, total)
    print(f"{'ours':>10} {wall:.0f} s on the wall")
    return points


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("sets", nargs="*", default=list(STEPS), metavar="coins|digits")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ours-only", action="store_true", help="no reference, no ratio")
    parser.add_argument("--set", nargs="*", default=[], dest="overrides", help="try another recipe")
    parser.add_argument("--json", type=Path, help="write the curves there")
    parser.add_argument("--reference", choices=STEPS, help=argparse.SUPPRESS)  # the child process
    arguments = parser.parse_args()
    if arguments.reference:
        for point in reference(arguments.reference, arguments.seed):
            print(
                json.dumps([point.cpu_seconds, point.steps, point.ap50, point.mean_ap]), flush=True
            )
        return
    curves: dict[str, dict[str, list[Point]]] = {}
    missed = False
    for name in arguments.sets:
        curves[name] = {}
        if not arguments.ours_only:
            child = subprocess.run(
                [sys.executable, __file__, "--reference", name, "--seed", str(arguments.seed)],
                check=True,
                capture_output=True,
                text=True,
                cwd=ROOT,
                env=os.environ | THREADING,
            )
            rows = [json.loads(line) for line in child.stdout.splitlines() if line.startswith("[")]
            curves[name]["reference"] = [Point(*row) for row in rows]
            for point in curves[name]["reference"]:
                print(point.line("reference"), flush=True)
        curves[name]["ours"] = ours(name, arguments.seed, arguments.overrides)
        for point in curves[name]["ours"]:
            print(point.line("ours"), flush=True)
        last, (ap50, mean_ap) = curves[name]["ours"][-1], WANTED[name]
        missed |= last.ap50 < ap50 or last.mean_ap < mean_ap
        print(f"{name}: AP50 {last.ap50:.3f} of {ap50}, mAP {last.mean_ap:.3f} of {mean_ap}")
        if not arguments.ours_only:
            ratio = last.cpu_seconds / curves[name]["reference"][-1].cpu_seconds
            missed |= ratio > BUDGET
            print(f"{name}: cpu_ratio={ratio:.2f} (at most {BUDGET})")
    if arguments.json:
        arguments.json.write_text(
            json.dumps(
                {
                    name: {who: [asdict(point) for point in points] for who, points in both.items()}
                    for name, both in curves.items()
                }
            )
        )
    sys.exit(int(missed))


if __name__ == "__main__":
    main()
