"""Pictures a second of the training loader beside Pillow and torch doing the same, on one core.

    python benchmarks/loader.py [--data FOLDER] [--side 640] [--repeats 5]

Decode, stretch to a square, change light and colour half of the time, flip half of the time, batches of
16 with their boxes: ours by `TrainLoader`, the reference by torch's DataLoader with Pillow's open,
ImageEnhance, HSV and resize, in the order and with the float tensors of DETR's and D-FINE's transforms.
`lean` is the same reference at its best: resized before it is coloured, and left as uint8. On generated
1280x960 JPEGs, and on the JPEGs below FOLDER (default: $DATA). No cache, no workers, one thread, in
turn; medians of CPU time, which other work on the machine changes least. The last line is the smallest
ratio of ours to the reference.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

import cv2
import numpy as np
import torch
from PIL import Image, ImageEnhance
from torch.utils.data import DataLoader, Dataset

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from detector.config import DataConfig  # noqa: E402
from detector.data.formats.pictures import find_pictures, read_headers  # noqa: E402
from detector.data.index import Annotated, DataIndex, make_index  # noqa: E402
from detector.data.loader import TrainLoader  # noqa: E402

BATCH = 16
GENERATED, GENERATED_SIZE = 48, (1280, 960)


class Reference(Dataset):
    """The same sample, as a detector that uses Pillow makes it."""

    def __init__(self, index: DataIndex, side: int) -> None:
        self.index = index
        self.side = side

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, position: int) -> tuple[torch.Tensor, torch.Tensor]:
        rng = np.random.default_rng(position)
        with Image.open(self.index.image_paths[position]) as file:
            image = file.convert("RGB")
        boxes = torch.from_numpy(self.index.boxes[self.index.rows(position)])
        boxes = boxes / torch.from_numpy(np.tile(self.index.sizes[position], 2))
        return self.transform(image, boxes, rng)

    def transform(
        self, image: Image.Image, boxes: torch.Tensor, rng: np.random.Generator
    ) -> tuple[torch.Tensor, torch.Tensor]:
        image, boxes = flip(colour(image, rng), boxes, rng)
        return to_tensor(self.resize(image)).float() / 255, boxes

    def resize(self, image: Image.Image) -> Image.Image:
        return image.resize((self.side, self.side), Image.Resampling.BILINEAR)


class LeanReference(Reference):
    """Coloured when it is small, and left as bytes."""

    def transform(
        self, image: Image.Image, boxes: torch.Tensor, rng: np.random.Generator
    ) -> tuple[torch.Tensor, torch.Tensor]:
        image, boxes = flip(colour(self.resize(image), rng), boxes, rng)
        return to_tensor(image), boxes


def colour(image: Image.Image, rng: np.random.Generator) -> Image.Image:
    if rng.random() < 0.5:
        return image
    for enhance in (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color):
        if rng.random() < 0.5:
            image = enhance(image).enhance(rng.uniform(0.5, 1.5))
    if rng.random() < 0.5:
        hue, saturation, value = image.convert("HSV").split()
        turn = int(rng.integers(-12, 13))
        hue = hue.point(lambda level: (level + turn) % 256)
        image = Image.merge("HSV", (hue, saturation, value)).convert("RGB")
    return image


def flip(
    image: Image.Image, boxes: torch.Tensor, rng: np.random.Generator
) -> tuple[Image.Image, torch.Tensor]:
    if rng.random() < 0.5:
        return image, boxes
    boxes = torch.stack([1 - boxes[:, 2], boxes[:, 1], 1 - boxes[:, 0], boxes[:, 3]], 1)
    return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT), boxes


def to_tensor(image: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()


def collate(samples: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, list]:
    return torch.stack([image for image, _ in samples]), [boxes for _, boxes in samples]


def generate(folder: Path) -> None:
    """Write pictures with about the detail of photographs: noise of every scale."""
    width, height = GENERATED_SIZE
    for number in range(GENERATED):
        rng = np.random.default_rng(number)
        image = np.zeros((height, width, 3), np.float32)
        for octave in range(8):
            cells = rng.uniform(-1, 1, (3 * 2**octave, 4 * 2**octave, 3)).astype(np.float32)
            image += cv2.resize(cells, (width, height), interpolation=cv2.INTER_CUBIC)
        pixels = (128 + 24 * image).clip(0, 255).astype(np.uint8)
        cv2.imwrite(str(folder / f"{number:03}.jpg"), pixels, [cv2.IMWRITE_JPEG_QUALITY, 90])


def index_of(folder: Path) -> DataIndex:
    """All JPEGs below a folder, with a box each."""
    files = sorted(p for p in find_pictures(folder) if p.suffix.lower() in {".jpg", ".jpeg"})
    rows = [
        Annotated(
            str(file.relative_to(folder)),
            header.width,
            header.height,
            boxes=np.array([[1, 1, header.width / 2, header.height / 2]]),
            labels=np.zeros(1, np.int64),
        )
        for file, header in zip(files, read_headers(files), strict=True)
    ]
    return make_index(rows, name=folder.name, root=str(folder), class_names=("thing",))


def rate(batches: Iterable, images: int) -> float:
    start = time.process_time()
    for _ in batches:
        pass
    return images / (time.process_time() - start)


def measure(index: DataIndex, *, side: int, repeats: int) -> list[float]:
    """Pictures a second: ours, the reference's, the lean reference's."""
    config = DataConfig(image_size=side, photometric=0.5, cache="none")
    ours = TrainLoader(index, config=config, global_batch=BATCH)
    images = ours.steps_per_epoch * BATCH
    theirs = [
        DataLoader(
            kind(index, side), batch_size=BATCH, shuffle=True, drop_last=True, collate_fn=collate
        )
        for kind in (Reference, LeanReference)
    ]
    rates = [
        [rate(batches, images) for batches in (ours.epoch(epoch), *theirs)]
        for epoch in range(repeats + 1)
    ]
    return np.median(rates[1:], axis=0).tolist()  # the first pass warms the disk


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=os.environ.get("DATA"))
    parser.add_argument("--side", type=int, default=640)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    cv2.setNumThreads(1)
    ratios = []
    with tempfile.TemporaryDirectory() as scratch:
        generate(Path(scratch))
        folders = {f"{GENERATED} generated, {GENERATED_SIZE[0]}x{GENERATED_SIZE[1]}": Path(scratch)}
        if arguments.data is not None:
            folders[f"JPEGs below {Path(arguments.data).name}"] = Path(arguments.data)
        print(
            f"{'pictures':<28} {'ours':>8} {'reference':>10} {'lean':>8} {'ratio':>6} {'to lean':>8}"
        )
        for name, folder in folders.items():
            index = index_of(folder)
            ours, theirs, lean = measure(index, side=arguments.side, repeats=arguments.repeats)
            ratios.append(ours / theirs)
            print(
                f"{name:<28} {ours:6.1f}/s {theirs:8.1f}/s {lean:6.1f}/s {ratios[-1]:6.2f} "
                f"{ours / lean:8.2f}",
                flush=True,
            )
    print(f"ratio={min(ratios):.2f}")


if __name__ == "__main__":
    main()
