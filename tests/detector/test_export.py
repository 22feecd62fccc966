"""Exported files: they hold what the network holds, compute what it computes, or are not written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from detector import export as export_module
from detector.__main__ import main
from detector.agreement import Detections, deviations
from detector.boxes import iou
from detector.checkpoint import (
    Architecture,
    CheckpointError,
    LoadedDetector,
    header,
    load_detector,
    save_checkpoint,
)
from detector.data.augment import resize
from detector.data.index import decode
from detector.export import ExportError, export
from detector.models.detector import build_detector
from detector.models.weights import WeightsError, load_weights
from detector.predict import Predictor
from tests.detector.models.reference import perturb

Checkpoint = Callable[..., Path]
METRICS = {"mAP@0.50:0.95": 0.25, "AP75": float("nan")}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """Weights of a run with every weight and statistic perturbed, so that no part is idle."""
    folder = tmp_path_factory.mktemp("weights")

    def write(
        name: str = "hgnetv2_n", *, classes: int = 3, size: int = 64, weights: str | None = None
    ) -> Path:
        path = folder / f"{name}-{classes}-{size}-{bool(weights)}.pt"
        if not path.exists():
            torch.manual_seed(0)
            architecture = Architecture(name, classes, 100, 100)
            model = architecture.build()
            perturb(model, 0)
            names = tuple(f"class {label}" for label in range(classes))
            state = header("weights", architecture, model, class_names=names)
            config = {"data": {"image_size": size}, "model": {"weights": weights}}
            state |= {"model": model.state_dict(), "epoch": 2, "optimizer_steps": 7}
            save_checkpoint(path, state | {"metrics": METRICS, "config": config})
        return path

    return write


# --- slim safetensors ----------------------------------------------------------------------------


def described(path: Path) -> dict[str, Any]:
    with safe_open(path, framework="pt") as file:
        return file.metadata()


def test_a_slim_file_loads_bit_for_bit_with_all_that_it_takes(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    source = load_detector(checkpoint())
    done = export(checkpoint(), to=tmp_path / "new" / "slim.safetensors")
    assert done.path == tmp_path / "new" / "slim.safetensors"
    assert done.size_bytes == done.path.stat().st_size
    assert sorted(file.name for file in done.path.parent.iterdir()) == ["slim.safetensors"]
    loaded = load_detector(done.path)
    ours, theirs = loaded.model.state_dict(), source.model.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert loaded.class_names == ("class 0", "class 1", "class 2")
    assert loaded.image_size == 64
    assert loaded.architecture == source.architecture
    assert (loaded.info["epoch"], loaded.info["optimizer_steps"]) == (2, 7)
    assert loaded.info["metrics"] == {"mAP@0.50:0.95": 0.25, "AP75": None}
    assert not loaded.model.training


def test_an_exported_file_is_exported_again_the_same(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    file = checkpoint(weights="hf://ustc-community/dfine-nano-coco")
    first = export(file, to=tmp_path / "a.safetensors")
    second = export(first.path, to=tmp_path / "b.safetensors")
    assert first.sha256 == second.sha256


@pytest.mark.parametrize(
    ("weights", "given", "source"),
    [
        (None, None, {"weights": "", "licence": "none: trained from nothing"}),
        (
            "hf://ustc-community/dfine-nano-coco",
            None,
            {"weights": "hf://ustc-community/dfine-nano-coco", "licence": "Apache-2.0"},
        ),
        (
            "/home/somebody/secret place/coco.pth",
            None,
            {"weights": "coco.pth", "licence": "unknown: that of the weights it started from"},
        ),
        ("coco.pth", "MIT", {"weights": "coco.pth", "licence": "MIT"}),
    ],
)
def test_the_source_of_the_weights_and_its_licence_travel_along(
    weights: str | None,
    given: str | None,
    source: dict[str, str],
    checkpoint: Checkpoint,
    tmp_path: Path,
) -> None:
    loaded = load_detector(checkpoint())
    info = {**loaded.info, "config": {"model": {"weights": weights}}}
    asked = LoadedDetector(
        loaded.model, loaded.architecture, loaded.class_names, loaded.image_size, info
    )
    assert export_module._source(asked, given) == source


def test_the_description_is_plain_json(checkpoint: Checkpoint, tmp_path: Path) -> None:
    metadata = described(export(checkpoint(), to=tmp_path / "a.safetensors").path)
    assert json.loads(metadata["class_names"]) == ["class 0", "class 1", "class 2"]
    assert json.loads(metadata["architecture"])["backbone_name"] == "hgnetv2_n"
    assert json.loads(metadata["image_size"]) == 64
    assert len(json.loads(metadata["fingerprint"])) == 64
    assert metadata["format_version"] == "1"
    assert metadata["format"] == "pt"
    assert json.loads(metadata["versions"])["torch"] == str(torch.__version__)


def test_half_precision_halves_the_file_and_rounds_the_weights(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    whole = export(checkpoint(), to=tmp_path / "whole.safetensors")
    half = export(checkpoint(), to=tmp_path / "half.safetensors", half=True)
    assert half.size_bytes < 0.52 * whole.size_bytes
    stored = load_file(half.path)
    assert stored["encoder.aifi.linear1.weight"].dtype == torch.float16
    assert stored["encoder.aifi.linear1.bias"].dtype == torch.float32
    exact = load_file(whole.path)["encoder.aifi.linear1.weight"]
    loaded = load_detector(half.path).model.state_dict()["encoder.aifi.linear1.weight"]
    assert loaded.dtype == torch.float32
    assert torch.equal(loaded, exact.half().float())


def test_what_half_precision_cannot_hold_stays_whole() -> None:
    kept = export_module._halved({"large": torch.full((2, 2), 1e6), "count": torch.tensor([[3]])})
    assert kept["large"].dtype == torch.float32
    assert kept["count"].dtype == torch.int64


def test_a_run_starts_from_a_slim_file(checkpoint: Checkpoint, tmp_path: Path) -> None:
    slim = export(checkpoint(), to=tmp_path / "slim.safetensors").path
    same = build_detector("hgnetv2_n", num_classes=3)
    report = load_weights(same, slim)
    assert (report.layout, report.reinitialised) == ("native", ())
    source = load_detector(checkpoint()).model.state_dict()
    assert all(torch.equal(value, source[name]) for name, value in same.state_dict().items())
    other = build_detector("hgnetv2_n", num_classes=5)
    assert "selection.score_head.weight" in load_weights(other, slim).reinitialised


def test_predictions_take_a_slim_file(checkpoint: Checkpoint, tmp_path: Path) -> None:
    slim = export(checkpoint(), to=tmp_path / "slim.safetensors").path
    picture = np.random.default_rng(0).integers(0, 256, (48, 80, 3), dtype=np.uint8)
    (ours,), (theirs,) = (Predictor(path)(picture) for path in (slim, checkpoint()))
    assert np.array_equal(ours.boxes, theirs.boxes)
    assert np.array_equal(ours.scores, theirs.scores)
    assert ours.names == theirs.names


@pytest.mark.parametrize("kept", [0, 7, 100, 20_000, 1_000_000, -1])
def test_a_cut_slim_file_is_refused(kept: int, checkpoint: Checkpoint, tmp_path: Path) -> None:
    path = export(checkpoint(), to=tmp_path / "slim.safetensors").path
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(CheckpointError, match=r"slim\.safetensors is damaged: .+\.$") as caught:
        load_detector(path)
    assert "\n" not in str(caught.value)
    with pytest.raises(WeightsError, match="cannot be read as weights"):
        load_weights(build_detector("hgnetv2_n", num_classes=3), path)


def test_a_changed_bit_and_a_foreign_file_are_refused(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    path = export(checkpoint(), to=tmp_path / "slim.safetensors").path
    content = bytearray(path.read_bytes())
    content[-1000] ^= 4
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="its tensors are not those that were written"):
        load_detector(path)
    save_file({"a": torch.zeros(1)}, path)
    with pytest.raises(CheckpointError, match=r"a run starts from it with model\.weights"):
        load_detector(path)
    save_file({"a": torch.zeros(1)}, path, {"architecture": "{}", "format_version": "9"})
    with pytest.raises(CheckpointError, match="has format 9"):
        load_detector(path)
    with pytest.raises(CheckpointError, match="There is no checkpoint"):
        load_detector(tmp_path / "gone.safetensors")


# --- ONNX ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def onnx_file(
    checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., tuple[Path, Path]]:
    """Weights and the ONNX file made of them, once for all tests."""
    folder = tmp_path_factory.mktemp("onnx")

    def make(name: str, classes: int, size: tuple[int, int], **options: Any) -> tuple[Path, Path]:
        weights = checkpoint(name, classes=classes, size=size[0])
        path = folder / f"{name}-{classes}-{size}-{sorted(options)}.onnx"
        if not path.exists():
            done = export(weights, to=path, image_size=size, **options)
            assert done.agreement is not None
            assert done.agreement.detections >= 30
        return weights, path

    return make


def run(path: Path, images: np.ndarray, sizes: list[tuple[int, int]]) -> list[Detections]:
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    feed = {"images": images, "orig_target_sizes": np.array(sizes, np.int64)}
    labels, boxes, scores = session.run(["labels", "boxes", "scores"], feed)
    return [Detections(*one) for one in zip(labels, boxes, scores, strict=True)]


def network(weights: Path, images: np.ndarray, sizes: list[tuple[int, int]]) -> list[Detections]:
    """Plainly: every query's best classes in the picture's pixels, best first."""
    model = load_detector(weights).model
    with torch.inference_mode():
        logits, boxes = model(torch.from_numpy(images)).final
    found = []
    for scores, cxcywh, size in zip(logits.sigmoid().numpy(), boxes.numpy(), sizes, strict=True):
        order = np.argsort(-scores.reshape(-1), kind="stable")[:300]
        queries, labels = np.divmod(order, scores.shape[1])
        centre, half = cxcywh[queries, :2], cxcywh[queries, 2:] / 2
        pixels = np.concatenate([centre - half, centre + half], 1) * np.array([*size, *size])
        found.append(Detections(labels, pixels, scores.reshape(-1)[order]))
    return found


def assert_same(wanted: Detections, given: Detections, *, side: float) -> int:
    """Each detection above 0.05 has one of its class that overlaps it, alike in score and place."""
    taken: set[int] = set()
    above = int((wanted.scores > 0.05).sum())
    for label, box, score in list(zip(*wanted, strict=True))[:above]:
        overlap = iou(torch.tensor(given.boxes, dtype=torch.float64), torch.tensor(box).double())
        # A network that is not trained may turn a box inside out: it overlaps nothing, not even itself.
        real = box[2] > box[0] and box[3] > box[1]
        near = [
            int(k)
            for k in np.flatnonzero(
                (given.labels == label) & ((overlap.numpy() > 0.99) | (not real))
            )
            if int(k) not in taken
        ]
        best = min(
            near,
            key=lambda k: np.abs(given.boxes[k] - box).max() / side + abs(given.scores[k] - score),
        )
        taken.add(best)
        assert abs(float(given.scores[best]) - float(score)) < 1e-4
        assert np.abs(given.boxes[best] - box).max() / side < 1e-4
    assert int((given.scores > 0.05 + 1e-4).sum()) <= above
    return above


@pytest.mark.slow
@pytest.mark.shared
@pytest.mark.parametrize(
    ("name", "classes", "size"),
    [
        ("hgnetv2_n", 80, (320, 320)),
        ("resnet18", 80, (320, 320)),
        ("hgnetv2_n", 3, (256, 384)),
    ],
)
def test_onnx_finds_in_photographs_what_the_network_finds(
    name: str,
    classes: int,
    size: tuple[int, int],
    onnx_file: Callable[..., tuple[Path, Path]],
    coco128: Path,
) -> None:
    weights, path = onnx_file(name, classes, size)
    photographs = [decode(str(file)) for file in sorted(coco128.rglob("*.jpg"))[:3]]
    sizes = [photograph.shape[1::-1] for photograph in photographs]
    images = np.stack(
        [
            resize(photograph, max(size))[: size[0], : size[1]].transpose(2, 0, 1)
            for photograph in photographs
        ]
    ).astype(np.float32)
    images /= 255
    wanted = network(weights, images, sizes)
    together = run(path, images, sizes)
    alone = [run(path, images[k : k + 1], sizes[k : k + 1])[0] for k in range(3)]
    for given in (together, alone):
        counts = [
            assert_same(one, other, side=max(extent))
            for one, other, extent in zip(wanted, given, sizes, strict=True)
        ]
        assert min(counts) >= 10


@pytest.mark.slow
def test_an_onnx_file_says_what_it_takes_gives_and_is(
    onnx_file: Callable[..., tuple[Path, Path]],
) -> None:
    import onnx

    _, path = onnx_file("hgnetv2_n", 3, (256, 384))
    model = onnx.load(path)
    assert [one.version for one in model.opset_import if one.domain == ""] == [17]

    def shape(value: Any) -> list[Any]:
        return [axis.dim_param or axis.dim_value for axis in value.type.tensor_type.shape.dim]

    graph = model.graph
    assert {one.name: shape(one) for one in graph.input} == {
        "images": ["batch", 3, 256, 384],
        "orig_target_sizes": ["batch", 2],
    }
    assert [one.name for one in graph.output] == ["labels", "boxes", "scores"]
    assert all(shape(one)[0] == "batch" for one in graph.output)
    metadata = {one.key: json.loads(one.value) for one in model.metadata_props}
    assert metadata["class_names"] == ["class 0", "class 1", "class 2"]
    assert metadata["image_size"] == [256, 384]


@pytest.mark.slow
def test_half_an_onnx_file_still_answers_nearly_the_same(
    onnx_file: Callable[..., tuple[Path, Path]],
) -> None:
    _, whole = onnx_file("hgnetv2_n", 3, (256, 384))
    _, half = onnx_file("hgnetv2_n", 3, (256, 384), half=True)
    assert half.stat().st_size < 0.65 * whole.stat().st_size


@pytest.mark.slow
def test_a_file_that_computes_something_else_is_not_written(
    checkpoint: Checkpoint,
    onnx_file: Callable[..., tuple[Path, Path]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    import onnx

    weights, other = onnx_file("hgnetv2_n", 3, (256, 384))
    model = onnx.load(other)
    (bias,) = (one for one in model.graph.initializer if one.name.endswith("score_heads.2.bias"))
    moved = onnx.numpy_helper.to_array(bias) + np.float32(0.01)
    bias.CopyFrom(onnx.numpy_helper.from_array(moved, bias.name))
    target = tmp_path / "a.onnx"
    target.write_bytes(b"what was there")
    for content, sentence in (
        (model.SerializeToString(), "would differ from the network, so it is not written"),
        (b"no graph", "onnxruntime cannot run the file"),
    ):
        monkeypatch.setattr(export_module, "_to_onnx", lambda *_, made=content, **__: made)
        with pytest.raises(ExportError, match=sentence) as caught:
            export(weights, to=target, image_size=(256, 384))
        assert "\n" not in str(caught.value)
        assert target.read_bytes() == b"what was there"
        assert list(tmp_path.iterdir()) == [target]


def test_without_onnx_or_onnxruntime_it_says_so(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(ExportError, match="pip install onnx onnxruntime"):
        export(checkpoint(), to=tmp_path / "a.onnx")
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    monkeypatch.setattr(export_module, "_to_onnx", lambda *_, **__: b"made elsewhere")
    assert export(checkpoint(), to=tmp_path / "a.onnx").agreement is None
    assert (tmp_path / "a.onnx").read_bytes() == b"made elsewhere"


@pytest.mark.parametrize(
    ("name", "options", "sentence"),
    [
        ("a.pt", {}, r"a\.pt must end in \.onnx or \.safetensors"),
        ("a.onnx", {"opset": 16}, "opset must be from 17 to 20, not 16"),
        ("a.onnx", {"image_size": 100}, "multiples of 32, not 100 by 100"),
        ("a.onnx", {"image_size": (64, 0)}, "multiples of 32, not 64 by 0"),
    ],
)
def test_what_cannot_be_is_refused(
    name: str, options: Any, sentence: str, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    with pytest.raises(ExportError, match=sentence):
        export(checkpoint(), to=tmp_path / name, **options)
    assert list(tmp_path.iterdir()) == []


def test_detections_are_held_against_their_nearest_of_the_class() -> None:
    boxes = np.array([[0.0, 0, 10, 10], [0, 0, 10, 10], [5, 5, 20, 20]])
    wanted = Detections(np.array([0, 1, 1]), boxes, np.array([0.9, 0.8, 0.3]))
    order = [2, 1, 0]
    given = Detections(wanted.labels[order], wanted.boxes[order] + 0.5, wanted.scores[order] - 0.01)
    count, score, box = deviations(wanted, given, side=100)
    assert (count, score, box) == (3, pytest.approx(0.01), pytest.approx(0.005))
    other = Detections(np.array([0, 0, 1]), given.boxes, given.scores)
    assert deviations(wanted, other, side=100)[1:] == (np.inf, np.inf)


# --- the command ---------------------------------------------------------------------------------


def test_the_command_says_what_it_wrote(
    checkpoint: Checkpoint, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    to = tmp_path / "a.safetensors"
    assert main(["export", "--checkpoint", str(checkpoint()), "--to", str(to)]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"saved={to} size_mb={to.stat().st_size / 1e6:.2f} sha256=")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--to", "a.zip"], "must end in .onnx or .safetensors"),
        (["--to", "a.onnx", "--check", "gone.jpg"], "gone.jpg cannot be read"),
        (["--to", "taken/a.onnx"], "taken cannot be a folder"),
    ],
)
def test_the_command_refuses_in_one_sentence(
    words: list[str],
    sentence: str,
    checkpoint: Checkpoint,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").write_text("")
    assert main(["export", "--checkpoint", str(checkpoint()), *words]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert sentence in line
