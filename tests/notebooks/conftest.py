"""What a notebook needs to be executed as its reader would: a project, a remote, a store, papermill.

The remote is a real Jupyter server whose address has the shape of Kaggle's proxy, the store a real
SeaweedFS, the data set a few drawn pictures in an archive of the seed's name.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat
import pytest
import yaml
from PIL import Image, ImageDraw

from kernel_tools.stores.local import LocalStore
from tests.kernel.conftest import JupyterServer, start_server, stop_server

ROOT = Path(__file__).resolve().parents[2]
OBJECT = "datasets/vehicles3/roboflow-v2-release/vehicles3-roboflow-v2-release.tar.gz"
COLOURS = {"car": "crimson", "bus": "gold", "truck": "royalblue"}


@dataclass(frozen=True)
class Kaggle:
    """The parts that stand in for Kaggle and for the user's MinIO."""

    server: JupyterServer
    store: LocalStore
    project: Path
    sha256: str

    @property
    def secrets(self) -> tuple[str, ...]:
        """What must be found in no executed notebook."""
        key = self.store.service.secrets["secret_key"].reveal()
        return self.server.token, self.server.jwe, key


@pytest.fixture
def kaggle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Kaggle]:
    project = tmp_path / "project"
    project.mkdir()
    (project / "pyproject.toml").write_text("[project]\nname = 'a-users-project'\n")
    archive = vehicles(tmp_path / "vehicles3-release")
    process, server = start_server(tmp_path / "server")
    store = LocalStore.ensure(state_dir=tmp_path / "store", idle_seconds=120)
    store.put(archive, OBJECT)
    keys = store.service.secrets
    for name, value in {
        "KAGGLE_PROXY_URL": server.url_with_token,
        "MINIO_ENDPOINT": store.service.endpoint,
        "MINIO_ACCESS_KEY": keys["access_key"].reveal(),
        "MINIO_SECRET_KEY": keys["secret_key"].reveal(),
        "MINIO_BUCKET": store.bucket,
        "IPYTHONDIR": str(tmp_path / "ipython"),
    }.items():
        monkeypatch.setenv(name, value)
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    yield Kaggle(server, store, project, digest)
    store.stop()
    stop_server(process, server)


def vehicles(folder: Path) -> Path:
    """Draw a YOLO folder of three classes; return it as the archive that the notebook names."""
    for split, count in (("train", 12), ("val", 4)):
        for number in range(count):
            name = list(COLOURS)[number % 3]
            picture = folder / f"images/{split}/{number:03d}.png"
            label = folder / f"labels/{split}/{number:03d}.txt"
            for path in (picture, label):
                path.parent.mkdir(parents=True, exist_ok=True)
            image = Image.new("RGB", (96, 96), "gray")
            left = 8 + 3 * number
            ImageDraw.Draw(image).rectangle((left, 30, left + 40, 60), fill=COLOURS[name])
            image.save(picture)
            box = ((left + 20) / 96, 45 / 96, 40 / 96, 30 / 96)
            label.write_text(f"{number % 3} " + " ".join(f"{one:.6f}" for one in box) + "\n")
    told = {"path": ".", "train": "images/train", "val": "images/val", "names": list(COLOURS)}
    (folder / "data.yaml").write_text(yaml.safe_dump(told))
    path = folder.with_suffix(".tar.gz")
    with tarfile.open(path, "w:gz") as archive:
        archive.add(folder, arcname=folder.name)
    return path


def papermill(
    notebook: Path, to: Path, *, cwd: Path, **parameters: Any
) -> subprocess.CompletedProcess[str]:
    """Execute a notebook as a batch job does."""
    words = ["-y", yaml.safe_dump(parameters)] if parameters else []
    return subprocess.run(
        [sys.executable, "-m", "papermill", "--no-progress-bar", "-k", "python3", str(notebook), str(to), *words],
        cwd=cwd, env=dict(os.environ), capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip


def texts(path: Path) -> str:
    """Return what an executed notebook's outputs say, as text."""
    said = []
    for output in outputs(path):
        said += [output.get("text", ""), output.get("data", {}).get("text/plain", "")]
        said.append(str(output.get("evalue", "")))
    return "\n".join(said)


def pictures(path: Path) -> int:
    """Return how many pictures an executed notebook shows."""
    kinds = [" ".join(output.get("data", {})) for output in outputs(path)]
    return sum("image/" in kind for kind in kinds)


def outputs(path: Path) -> list[Any]:
    """Return every output of an executed notebook."""
    cells = nbformat.read(path, as_version=4).cells
    return [output for cell in cells for output in cell.get("outputs", [])]
