"""A trainer without torch for a run that is watched: a status file, rows, a log with markup in it.

It goes on until it is asked to end, as any command that `%remote_run custom --command` starts.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from pathlib import Path

EVIL = "<img src=x onerror=alert(1)>"
FOLDER = Path("out")
STOP = Path(os.environ["RUN_DIR"], "control/stop.json")

FOLDER.mkdir()
step = 0
while not STOP.exists():
    step += 1
    rows = {"epoch": step, "metrics": {"AP50": 1 - math.exp(-step / 40), EVIL: 0.5}}
    with (FOLDER / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(rows) + "\n")
    told = {
        "state": "running", "total_epochs": 1000, "current_epoch": step, "completed_epochs": step - 1,
        "progress": step / 1000, "step": step % 50, "steps_per_epoch": 50, "optimizer_steps": step,
        "skipped_steps": 1, "world_size": 2, "distributed": True, "device": "cuda",
        "gpu_names": [EVIL, EVIL], "lr": 1e-4, "train_loss": 20 / step, "images_per_second": 21.3,
        "eta_seconds": 3600, "best_metric": 0.5, "best_metric_name": EVIL, "best_epoch": 1,
        "metrics": rows["metrics"],
    }  # fmt: skip
    (FOLDER / "status.new").write_text(json.dumps(told))
    os.replace(FOLDER / "status.new", FOLDER / "status.json")
    print(
        f"epoch={step} step={step % 50}/50 loss={20 / step:.4f} {EVIL} images_per_second=21.30",
        flush=True,
    )
    time.sleep(0.2)
sys.exit(75)  # what was asked for: it could go on
