"""A trained network as one file for elsewhere: ONNX that ends in boxes, or slim safetensors.

The ONNX graph takes and gives what the authors' own exports do, so their scripts run it. It is held
against the network with onnxruntime before it gets its name; a file that differs is never written.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import logging
import os
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from detector.agreement import (
    Agreement,
    Deployed,
    ExportError,
    check,
    drawn_pictures,
    first_line,
    steadiest,
)
from detector.checkpoint import LoadedDetector, file_sha256, load_detector
from detector.data.index import decode
from detector.files import replacing
from detector.pretrained import licence_of
from detector.slim import describe, save_slim

__all__ = ["Agreement", "ExportError", "Exported", "export"]

OPSETS: Final = (17, 20)
"""The authors' opset, and the last one that torch's exporter knows (2.4 to 2.13)."""

HALF_TOLERANCE: Final = 5e-2
"""Of scores and boxes, as `TOLERANCE`, where the weights were rounded to half precision."""

_STRIDE: Final = 32


@dataclass(frozen=True, slots=True)
class Exported:
    """A file that was written; `agreement` is None where nothing was there to run it."""

    path: Path
    size_bytes: int
    sha256: str
    agreement: Agreement | None


def export(
    checkpoint: str | os.PathLike[str],
    *,
    to: str | os.PathLike[str],
    opset: int = OPSETS[0],
    half: bool = False,
    image_size: int | tuple[int, int] | None = None,
    top_k: int = 300,
    pictures: Sequence[str | os.PathLike[str]] = (),
    licence: str | None = None,
) -> Exported:
    """Write the averaged weights of `checkpoint` as `to`, a `.onnx` or a `.safetensors` file.

    The ONNX file takes `images` (B, 3, H, W) float32 RGB in 0..1, stretched to H and W, and
    `orig_target_sizes` (B, 2) int64, width and height in pixels; it gives `labels` (B, K) int64, `boxes`
    (B, K, 4) float32 xyxy in those pixels and `scores` (B, K) float32, best first. B is free.

    Args:
        checkpoint: a run's weights, or a `.safetensors` file written here.
        to: the file; its ending says the format.
        opset: of ONNX, 17 to 20.
        half: store matrices and kernels in half precision: half the size; computed with as before.
        image_size: the network's input, pixels: a side or (height, width) (default: as trained).
        top_k: detections an image, at most.
        pictures: to compare file and network on (default: drawn ones).
        licence: of the weights that the run started from, where it is not known here.

    Raises:
        CheckpointError: `checkpoint` cannot be used.
        DataError: one of the pictures cannot be read.
        ExportError: it cannot be exported so, or the file computes something else.

    Example:
        >>> export("runs/coins/weights/best.pt", to="coins.onnx")  # doctest: +SKIP
    """
    path = Path(to)
    if path.suffix not in {".onnx", ".safetensors"}:
        raise ExportError(f"{path} must end in .onnx or .safetensors, which says the format.")
    _check_folder(path.parent)
    shown = [decode(os.fspath(picture)) for picture in pictures]
    loaded = load_detector(os.fspath(checkpoint))
    description = describe(loaded, source=_source(loaded, licence))
    agreement = None
    if path.suffix == ".onnx":
        height, width = _input_size(image_size or loaded.image_size)
        description |= {"image_size": json.dumps([height, width])}
        graph = Deployed(loaded.model, (height, width), top_k=top_k)
        content = _to_onnx(graph, opset=opset, description=description)
        shown = shown or steadiest(graph, drawn_pictures())
        agreement = check(content, graph, shown)
        if half:
            content = _halve_onnx(content)
            agreement = check(content, graph, shown, tolerance=HALF_TOLERANCE)
        with replacing(path) as file:
            file.write(content)
    else:
        state = loaded.model.state_dict()
        save_slim(path, _halved(state) if half else state, description)
    return Exported(path, path.stat().st_size, file_sha256(path), agreement)


def _to_onnx(graph: Deployed, *, opset: int, description: dict[str, str]) -> bytes:
    if not OPSETS[0] <= opset <= OPSETS[1]:
        raise ExportError(f"The opset must be from {OPSETS[0]} to {OPSETS[1]}, not {opset}.")
    onnx = _import_onnx()
    names = ["labels", "boxes", "scores"]
    buffer: Any = io.BytesIO()  # torch's annotation has forgotten it
    try:
        with _quietly():
            torch.onnx.export(
                graph.eval(),
                (torch.rand(2, 3, *graph.size), torch.tensor([[640, 480], [480, 640]])),
                buffer,
                opset_version=opset,
                input_names=["images", "orig_target_sizes"],
                output_names=names,
                dynamic_axes={
                    name: {0: "batch"} for name in ("images", "orig_target_sizes", *names)
                },
                dynamo=False,  # torch.export fixes the batch's size here, and takes ten times as long
            )
    except (RuntimeError, TypeError) as error:
        raise ExportError(
            f"torch {torch.__version__} cannot export this network: {first_line(error)}."
        ) from error
    model = onnx.load_model_from_string(buffer.getvalue())
    for key, text in description.items():
        model.metadata_props.add(key=key, value=text)
    onnx.checker.check_model(model)
    return bytes(model.SerializeToString())


def _halve_onnx(content: bytes) -> bytes:
    """Store the weights of products and convolutions as float16, and widen them when the file is loaded."""
    onnx = _import_onnx()
    model = onnx.load_model_from_string(content)
    used_by: dict[str, set[str]] = {}
    for node in model.graph.node:
        for name in node.input:
            used_by.setdefault(name, set()).add(node.op_type)
    casts = []
    for tensor in model.graph.initializer:
        if len(tensor.dims) < 2 or tensor.data_type != onnx.TensorProto.FLOAT:
            continue
        if not used_by.get(tensor.name, set()) <= {"Conv", "MatMul", "Gemm"}:
            continue
        values = onnx.numpy_helper.to_array(tensor).astype(np.float16)
        if np.isfinite(values).all():
            name = tensor.name
            tensor.CopyFrom(onnx.numpy_helper.from_array(values, f"{name}.half"))
            casts.append(
                onnx.helper.make_node("Cast", [f"{name}.half"], [name], to=onnx.TensorProto.FLOAT)
            )
    nodes = [*casts, *model.graph.node]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    onnx.checker.check_model(model)
    return bytes(model.SerializeToString())


def _halved(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Matrices and kernels in half precision, where it can hold them."""
    halved = {}
    for name, value in state.items():
        small = value.half() if value.is_floating_point() and value.dim() > 1 else value
        halved[name] = small if bool(small.isfinite().all()) else value
    return halved


def _import_onnx() -> Any:
    try:
        onnx = importlib.import_module("onnx")
        importlib.import_module("onnx.checker")
    except ImportError as error:
        raise ExportError(
            "An ONNX file needs the package onnx, and onnxruntime to be checked: "
            "pip install onnx onnxruntime."
        ) from error
    return onnx


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Without the tracer's notices on shapes that become constants: they are meant to."""
    log = logging.getLogger("torch.onnx")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(level)


def _source(loaded: LoadedDetector, licence: str | None) -> dict[str, str]:
    """The weights that the run started from, without the folder they lay in, and their licence."""
    known = dict(loaded.info.get("source") or {})
    if not known:
        model = (loaded.info.get("config") or {}).get("model", {})
        reference = model.get("weights") or model.get("backbone_weights")
        known = {
            "weights": reference
            if reference and "://" in reference
            else Path(reference or "").name,
            "licence": licence_of(reference),
        }
    return known | ({} if licence is None else {"licence": licence})


def _input_size(size: int | tuple[int, int]) -> tuple[int, int]:
    height, width = (size, size) if isinstance(size, int) else size
    if height < _STRIDE or width < _STRIDE or height % _STRIDE or width % _STRIDE:
        raise ExportError(
            f"The sides of the input must be multiples of {_STRIDE}, not {height} by {width}."
        )
    return height, width


def _check_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ExportError(f"{folder} cannot be a folder: {error.strerror}.") from error
