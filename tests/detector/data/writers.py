"""Writes an index out in each format, as a tool that exports it would."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

import cv2

from detector.data.index import DataIndex

VOC_OBJECT = """  <object>
    <name>{name}</name>
    <difficult>{difficult}</difficult>
    <bndbox><xmin>{x1!r}</xmin><ymin>{y1!r}</ymin><xmax>{x2!r}</xmax><ymax>{y2!r}</ymax></bndbox>
  </object>
"""


def write_picture(path: Path, image: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    assert cv2.imwrite(str(path), image[..., ::-1])


def names(index: DataIndex) -> list[str]:
    return [Path(file).name for file in index.files]


def boxes(index: DataIndex, position: int) -> list[tuple[list[float], int, bool]]:
    """Boxes of a picture as float64, with label and crowd."""
    rows = index.rows(position)
    return [
        (box, label, crowd)
        for box, label, crowd in zip(
            index.boxes[rows].astype(float).tolist(),
            index.labels[rows].tolist(),
            index.iscrowd[rows].tolist(),
            strict=True,
        )
    ]


def write_yolo(root: Path, splits: dict[str, DataIndex]) -> Path:
    for split, index in splits.items():
        for position, name in enumerate(names(index)):
            write_picture(root / f"images/{split}/{name}", index.read_image(position))
            width, height = index.sizes[position].tolist()
            rows = [
                f"{label} {(x1 + x2) / 2 / width:.9f} {(y1 + y2) / 2 / height:.9f} "
                f"{(x2 - x1) / width:.9f} {(y2 - y1) / height:.9f}\n"
                for (x1, y1, x2, y2), label, _ in boxes(index, position)
            ]
            file = root / f"labels/{split}/{Path(name).stem}.txt"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text("".join(rows))
    first = next(iter(splits.values()))
    (root / "data.yaml").write_text(
        "".join(f"{split}: images/{split}\n" for split in splits)
        + f"names: {json.dumps(list(first.class_names))}\n"
    )
    return root


def coco_document(index: DataIndex, ids: list[int], *, area: bool = True) -> dict[str, Any]:
    """The index as COCO's JSON, with `ids` as its category ids and picture ids from 1000 on."""
    annotations = [
        {
            "id": 0,
            "image_id": 1000 + position,
            "category_id": ids[label],
            "bbox": [x1, y1, x2 - x1, y2 - y1],
            "iscrowd": int(crowd),
            **({"area": (x2 - x1) * (y2 - y1)} if area else {}),
        }
        for position in range(len(index))
        for (x1, y1, x2, y2), label, crowd in boxes(index, position)
    ]
    for number, annotation in enumerate(annotations):
        annotation["id"] = number + 1
    return {
        "images": [
            {"id": 1000 + position, "file_name": name, "width": width, "height": height}
            for position, (name, (width, height)) in enumerate(
                zip(names(index), index.sizes.tolist(), strict=True)
            )
        ],
        "annotations": annotations,
        "categories": [
            {"id": id_, "name": name} for id_, name in zip(ids, index.class_names, strict=True)
        ],
    }


def write_coco(root: Path, splits: dict[str, DataIndex], ids: list[int]) -> Path:
    (root / "annotations").mkdir(parents=True)
    for split, index in splits.items():
        for position, name in enumerate(names(index)):
            write_picture(root / f"{split}2017/{name}", index.read_image(position))
        document = json.dumps(coco_document(index, ids, area=split == "train"))
        (root / f"annotations/instances_{split}2017.json").write_text(document)
    return root


def voc_page(index: DataIndex, position: int) -> str:
    width, height = index.sizes[position].tolist()
    objects = "".join(
        VOC_OBJECT.format(
            name=escape(index.class_names[label]),
            difficult=int(crowd),
            x1=x1 + 1,
            y1=y1 + 1,
            x2=x2,
            y2=y2,
        )
        for (x1, y1, x2, y2), label, crowd in boxes(index, position)
    )
    return (
        f"<annotation>\n  <filename>{escape(names(index)[position])}</filename>\n"
        f"  <size><width>{width}</width><height>{height}</height><depth>3</depth></size>\n"
        f"{objects}</annotation>\n"
    )


def write_voc(root: Path, splits: dict[str, DataIndex]) -> Path:
    for folder in ("Annotations", "ImageSets/Main"):
        (root / folder).mkdir(parents=True)
    for split, index in splits.items():
        for position, name in enumerate(names(index)):
            write_picture(root / f"JPEGImages/{split}_{name}", index.read_image(position))
            page = voc_page(index, position)
            (root / f"Annotations/{split}_{Path(name).stem}.xml").write_text(page)
        stems = "".join(f"{split}_{Path(name).stem}\n" for name in names(index))
        (root / f"ImageSets/Main/{split}.txt").write_text(stems)
    return root


def write_voc_folders(root: Path, splits: dict[str, DataIndex]) -> Path:
    """As Roboflow exports it: XML beside the pictures, a folder a split, `valid` for val."""
    for split, index in splits.items():
        folder = root / ("valid" if split == "val" else split)
        for position, name in enumerate(names(index)):
            write_picture(folder / name, index.read_image(position))
            (folder / f"{Path(name).stem}.xml").write_text(voc_page(index, position))
    return root


def write_pennfudan(root: Path, masks: list[Any]) -> Path:
    """Pictures of the masks' sizes, `FudanPed00001.png` and so on, with the masks `(H, W)` uint8."""
    (root / "PedMasks").mkdir(parents=True)
    for number, mask in enumerate(masks, start=1):
        stem = f"FudanPed{number:05}"
        write_picture(root / f"PNGImages/{stem}.png", cv2.merge([mask] * 3))
        assert cv2.imwrite(str(root / f"PedMasks/{stem}_mask.png"), mask)
    return root
