"""What an exported graph computes, and whether a file computes the same.

A file is run by onnxruntime on pictures, singly and in one batch, and held against the network detection
by detection. Nothing here writes a file.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import cv2
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from detector.boxes import cxcywh_to_xyxy
from detector.data.index import Image
from detector.models.detector import postprocess

TOLERANCE: Final = 1e-4
"""Of scores, and of boxes as a fraction of the picture's longer side."""

LEAST_SCORE: Final = 0.05
LEAST_COUNT: Final = 10
"""Held against each other are the detections above the first, and so many at least."""


class ExportError(RuntimeError):
    """A network cannot be exported, or the file would not compute what the network does."""


@dataclass(frozen=True, slots=True)
class Agreement:
    """How far an exported file is from the network.

    Attributes:
        pictures: how many were looked at, singly and in one batch.
        detections: how many were held against each other.
        score: the greatest difference of a score.
        box: the greatest difference of an edge, as a fraction of the picture's longer side.
    """

    pictures: int
    detections: int
    score: float
    box: float

    def __str__(self) -> str:
        return (
            f"pictures={self.pictures} detections={self.detections} "
            f"max_score_deviation={self.score:.1e} max_box_deviation={self.box:.1e}"
        )


class Detections(NamedTuple):
    """Of one picture, best first: `(K,)` labels, `(K, 4)` xyxy pixels, `(K,)` scores."""

    labels: NDArray[Any]
    boxes: NDArray[Any]
    scores: NDArray[Any]


class Deployed(nn.Module):
    """What the ONNX graph computes: the network and the choice of the best detections."""

    def __init__(self, model: nn.Module, size: tuple[int, int], *, top_k: int) -> None:
        super().__init__()
        self.model = model
        self.size = size
        # Also fills the caches of what depends on the size alone: constants in the graph.
        with torch.inference_mode():
            logits, _ = model(torch.zeros(2, 3, *size)).final
        self.classes = logits.shape[2]
        self.count = min(top_k, logits.shape[1] * self.classes)

    def forward(self, images: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(B, 3, H, W) and (B, 2) to labels (B, K), boxes (B, K, 4) and scores (B, K)."""
        logits, boxes = self.model(images).final
        scores, chosen = logits.sigmoid().flatten(1).topk(self.count, 1)
        queries = torch.div(chosen, self.classes, rounding_mode="floor")
        corners = cxcywh_to_xyxy(boxes) * sizes.to(boxes.dtype).repeat(1, 2)[:, None]
        corners = corners.gather(1, queries[..., None].expand(-1, -1, 4))
        return chosen % self.classes, corners, scores

    def prepare(self, picture: Image) -> Tensor:
        """(H, W, 3) uint8 to the network's (3, H', W') in 0..1."""
        height, width = self.size
        shrinks = picture.shape[0] > height and picture.shape[1] > width
        method = cv2.INTER_AREA if shrinks else cv2.INTER_LINEAR
        resized = cv2.resize(picture, (width, height), interpolation=method)
        return torch.from_numpy(resized.transpose(2, 0, 1).copy()).float().div_(255)

    def rounding(self, picture: Image) -> float:
        """What float32 instead of float64 changes: much where two tokens vie for the last query."""
        image, size = self.prepare(picture)[None], torch.tensor([picture.shape[1::-1]])
        (usual,) = self.expected(image, size)
        model = copy.deepcopy(self.model).double()
        with torch.inference_mode():
            logits, boxes = model(image.double()).final
        results = postprocess(logits, boxes, size, top_k=self.count)
        _, *apart = deviations(_as_arrays(results)[0], usual, side=float(size.max()))
        return max(apart)

    @torch.inference_mode()
    def expected(self, images: Tensor, sizes: Tensor) -> list[Detections]:
        """What the network itself finds, by the way that predictions take."""
        logits, boxes = self.model(images).final
        return _as_arrays(postprocess(logits, boxes, sizes, top_k=self.count))


def _as_arrays(results: list[tuple[Tensor, Tensor, Tensor]]) -> list[Detections]:
    return [
        Detections(labels.numpy(), boxes.numpy(), scores.numpy())
        for boxes, scores, labels in results
    ]


def check(
    content: bytes,
    graph: Deployed,
    pictures: Sequence[Image],
    *,
    tolerance: float = TOLERANCE,
) -> Agreement | None:
    """Run an ONNX file on pictures, one by one and all at once; None where onnxruntime is absent.

    Raises:
        ExportError: it does not run, or differs from the network by more than `tolerance` and by more than
            twice what float32 itself changes about the network's own answer.
    """
    try:
        runtime = importlib.import_module("onnxruntime")
    except ImportError:
        return None
    options = runtime.SessionOptions()
    options.log_severity_level = 3  # what it says about graph optimisation concerns nobody here
    options.intra_op_num_threads = torch.get_num_threads()
    inputs = torch.stack([graph.prepare(picture) for picture in pictures])
    sizes = torch.tensor([(picture.shape[1], picture.shape[0]) for picture in pictures])
    count, score, box = 0, 0.0, 0.0
    try:
        session = runtime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
        for chosen in (*(slice(one, one + 1) for one in range(len(pictures))), slice(None)):
            feed = {"images": inputs[chosen].numpy(), "orig_target_sizes": sizes[chosen].numpy()}
            found = session.run(["labels", "boxes", "scores"], feed)
            expected = graph.expected(inputs[chosen], sizes[chosen])
            for wanted, *given, size in zip(expected, *found, sizes[chosen], strict=True):
                compared = deviations(wanted, Detections(*given), side=float(size.max()))
                count += compared[0]
                score, box = max(score, compared[1]), max(box, compared[2])
    except ExportError:
        raise
    except Exception as error:  # onnxruntime's errors share no base class
        raise ExportError(f"onnxruntime cannot run the file: {first_line(error)}.") from error
    agreement = Agreement(len(pictures), count, score, box)
    limit = tolerance
    if max(score, box) > tolerance:  # rarely, and this takes a while
        limit = max(tolerance, *(2 * graph.rounding(picture) for picture in pictures))
    if not max(score, box) <= limit:
        raise ExportError(
            f"The file would differ from the network, so it is not written: {agreement}."
        )
    return agreement


def deviations(wanted: Detections, given: Detections, *, side: float) -> tuple[int, float, float]:
    """How many detections were compared, and the greatest deviation of a score and of an edge.

    Each of `wanted` is held against the nearest of its class in `given` that is not taken yet; where
    there is none, both deviations are infinite.
    """
    least = min(LEAST_SCORE, float(np.sort(wanted.scores)[-LEAST_COUNT:][0]))
    free = np.ones(len(given.scores), bool)
    count, score, box = 0, 0.0, 0.0
    for label, edges, value in zip(*wanted, strict=True):
        if value < least:
            continue
        apart = np.abs(given.boxes - edges).max(1) / side
        off = np.abs(given.scores - value)
        far = np.where(free & (given.labels == label), apart + off, np.inf)
        best = int(far.argmin())
        free[best] = False
        count += 1
        score = max(score, float(off[best]) if np.isfinite(far[best]) else np.inf)
        box = max(box, float(apart[best]) if np.isfinite(far[best]) else np.inf)
    return count, score, box


def drawn_pictures() -> list[Image]:
    """Pictures of shapes, of different sizes."""
    from detector.data.toy import make

    index = make("synthetic", "val", count=5, size=320)
    cuts = [(320, 320), (240, 320), (320, 200), (300, 300), (160, 320)]
    return [index.read_image(one)[:height, :width] for one, (height, width) in enumerate(cuts)]


def steadiest(graph: Deployed, pictures: Sequence[Image], *, count: int = 3) -> list[Image]:
    """Those on which the network's answer depends least on rounding: they tell most about a file."""
    return sorted(pictures, key=graph.rounding)[:count]


def first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
