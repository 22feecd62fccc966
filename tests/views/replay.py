"""A long training told fast, and its end as slowly as a real one: epochs, step rows and log lines.

`python replay.py EPOCHS LINES_AN_EPOCH SECONDS SLOW_SECONDS`, as any command in a run's work folder;
in the slow seconds come twenty lines a second.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

EPOCHS, LINES, SECONDS, SLOW_SECONDS = (int(word) for word in sys.argv[1:])
SLOW_LINES = 20  # a second
FOLDER, RUN = Path("out"), Path(os.environ["RUN_DIR"])


def tell(epoch, line):
    """One step: a row, a line of log."""
    step = (epoch - 1) * LINES + line
    row = {
        "epoch": epoch, "step": line, "optimizer_steps": step, "loss": 20 / step**0.3, "lr": 1e-4,
        "grad_norm": 1.25, "images_per_second": 123.456, "data_seconds": 0.0123, "step_seconds": 0.25,
    }  # fmt: skip
    steps.write(json.dumps(row) + "\n")
    print(f"epoch={epoch} step={line}/{LINES} loss={row['loss']:.4f} lr=1.00e-04 data_time=0.012")
    return row["loss"]


def show(epoch, line, loss, metrics):
    """What a status file says now and then."""
    for file in (steps, epochs, sys.stdout):
        file.flush()
    told = {
        "state": "running", "total_epochs": EPOCHS, "current_epoch": epoch, "completed_epochs": epoch - 1,
        "progress": epoch / EPOCHS, "step": line, "steps_per_epoch": LINES, "optimizer_steps": epoch * LINES,
        "skipped_steps": 0, "world_size": 2, "metrics": metrics, "train_loss": loss, "lr": 1e-4,
    }  # fmt: skip
    (FOLDER / "status.new").write_text(json.dumps(told))
    os.replace(FOLDER / "status.new", FOLDER / "status.json")


FOLDER.mkdir()
started = time.monotonic()
with (RUN / "steps.jsonl").open("a") as steps, (FOLDER / "metrics.jsonl").open("a") as epochs:
    for epoch in range(1, EPOCHS + 1):
        for line in range(1, LINES + 1):
            loss = tell(epoch, line)
        metrics = {"AP50": epoch / (epoch + 40), "mAP@0.50:0.95": epoch / (epoch + 90)}
        epochs.write(json.dumps({"epoch": epoch, "metrics": metrics}) + "\n")
        show(epoch, LINES, loss, metrics)
        time.sleep(max(0.0, started + SECONDS * epoch / EPOCHS - time.monotonic()))
    for second in range(SLOW_SECONDS):
        for line in range(SLOW_LINES):
            loss = tell(EPOCHS + 1, second * SLOW_LINES + line + 1)
        show(EPOCHS, LINES, loss, metrics)
        time.sleep(1.0)
