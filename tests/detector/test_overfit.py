"""The whole of it learns: eight photographs by heart, through the commands that a user types."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

PICTURES, MOST_BOXES = 8, 10
STEPS = 320
CONFIG = {
    "model": {"backbone_name": "hgnetv2_n", "num_queries": 50, "num_denoising": 50},
    "data": {"format": "yolo", "image_size": 320, "horizontal_flip": 0.0},
    "solver": {
        "epochs": STEPS,
        "batch_size": PICTURES,  # all of them in every step: from a part of them it learns much later
        "flat_fraction": 0.7,
        "lr": 0.0008,
        "backbone_lr_factor": 1.0,
        "warmup_steps": 20,
    },
    "evaluation": {"interval": 80, "best_metric": "AP50"},
}


def few_photographs(source: Path, to: Path) -> None:
    """A YOLO folder of the first pictures with few boxes, the same in train and val."""
    names = yaml.safe_load((source / "data.yaml").read_text())["names"]
    chosen = 0
    for label in sorted(source.glob("labels/*/*.txt")):
        if not 1 <= len(label.read_text().split("\n")) - 1 <= MOST_BOXES:
            continue
        (picture,) = source.glob(f"images/*/{label.stem}.*")
        for split in ("train", "val"):
            for folder, file in (("images", picture), ("labels", label)):
                (to / folder / split).mkdir(parents=True, exist_ok=True)
                shutil.copy(file, to / folder / split)
        chosen += 1
        if chosen == PICTURES:
            break
    assert chosen == PICTURES
    listing = {"train": "images/train", "val": "images/val", "names": names}
    (to / "data.yaml").write_text(yaml.safe_dump(listing))


@pytest.mark.campaign
@pytest.mark.shared
@pytest.mark.timeout(3600)
def test_overfits_eight_photographs(coco128: Path, tmp_path: Path) -> None:
    """D-FINE N from nothing in 320 steps, with AP50 judged on the pictures it was shown."""
    few_photographs(coco128, tmp_path / "eight")
    data = CONFIG["data"] | {"root": str(tmp_path / "eight")}
    config = tmp_path / "eight.yaml"
    config.write_text(yaml.safe_dump(CONFIG | {"data": data}))
    run = tmp_path / "run"

    def detector(command: str, *arguments: str) -> None:
        subprocess.run(
            [sys.executable, "-m", "detector", command, "--config", str(config), *arguments],
            env={**os.environ, "RUN_DIR": str(run)},
            cwd=tmp_path,
            check=True,
        )

    detector("train")
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["optimizer_steps"] == STEPS
    assert rows[-1]["metrics"]["AP50"] >= 0.9
    best = run / "weights" / "best.pt"
    detector("visualize", "--checkpoint", str(best), "--output", str(tmp_path / "drawn"))
    assert len(list((tmp_path / "drawn").rglob("*.png"))) == PICTURES
