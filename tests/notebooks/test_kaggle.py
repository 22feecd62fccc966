"""`kaggle_two_t4`, executed against a server at an address like Kaggle's, a real store and two CPU ranks."""

from __future__ import annotations

import json
import re

import pytest

from tests.notebooks.conftest import OBJECT, ROOT, papermill, pictures, texts

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SMALL = (
    "--set model.backbone_name=hgnetv2_n --set data.image_size=96 --set solver.batch_size=4"
    " --set data.workers=0 --set evaluation.batch_size=4 --set logging.log_interval=1"
)


def test_it_proves_two_ranks_trains_from_the_store_and_brings_pictures_home(kaggle, tmp_path):
    executed = tmp_path / "executed.ipynb"
    done = papermill(
        ROOT / "notebooks/kaggle_two_t4.ipynb", executed, cwd=kaggle.project,
        device="cpu", epochs=1, sha256=kaggle.sha256, settings=SMALL,
    )  # fmt: skip
    said = texts(executed)
    assert done.returncode == 0, said[-3000:]

    proof = re.search(r"^world_size=(\d+) optimizer_steps=(\d+)$", said, re.MULTILINE)
    assert proof.groups() == ("2", "4")
    assert re.search(r"cpu +ok +no CUDA card; a product of matrices is right", said)
    assert re.search(r"store from there +ok +s3/\S+ answers", said)
    assert "PROBLEM" not in said
    assert OBJECT in said
    assert kaggle.sha256[:12] in said

    (run,) = (kaggle.project / "artifacts/remote").glob("*-vehicles3-resnet50-*")
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["world_size"], summary["optimizer_steps"]) == (2, 3)
    assert {"best.pt", "last.pt"} <= {path.name for path in (run / "weights").iterdir()}
    assert "remote_dataset_ready=data/vehicles3" in (run / "train.log").read_text()
    assert pictures(executed) == 1 + 4
    assert "Run vehicles3/resnet50: completed" in said

    left = executed.read_text() + done.stdout + done.stderr
    assert [secret for secret in kaggle.secrets if secret in left] == []
    assert "widgets" not in json.loads(executed.read_text())["metadata"]
    assert kaggle.server.kernel_ids() == set()
