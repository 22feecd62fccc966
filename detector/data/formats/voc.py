"""Pascal VOC: an XML file a picture.

    Annotations/*.xml + JPEGImages/ + ImageSets/Main/train.txt    VOC's own, also as VOCdevkit/VOC2012
    train/*.xml beside the pictures (valid/ for val)               Roboflow's
    Annotations/train/*.xml + JPEGImages/train/                    (also annotations/ and images/)

Written after http://host.robots.ox.ac.uk/pascal/VOC/voc2012/htmldoc/ : pixels count from 1 and the last
one is inside, so a box is (xmin - 1, ymin - 1, xmax, ymax). `difficult` objects are regions to ignore.
Expat parses, and a file that declares an entity is refused before any is expanded.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from xml.etree.ElementTree import Element, TreeBuilder
from xml.parsers import expat

from detector.data.formats.pictures import (
    SUFFIXES,
    Object,
    annotate,
    find_pictures,
    read_headers,
    relative,
    sentences,
)
from detector.data.index import DataError, DataIndex, Split, listed, make_index, nearest

ANNOTATIONS: Final = ("Annotations", "annotations")
PICTURES: Final = ("JPEGImages", "images", "Images")
SPLIT_FOLDERS: Final[Mapping[Split, tuple[str, ...]]] = {
    "train": ("train",),
    "val": ("val", "valid"),
}
# Lists of ImageSets/Main, best first. VOC2007 is commonly trained on trainval and judged on test.
LISTS: Final[Mapping[Split, tuple[str, ...]]] = {
    "train": ("train", "trainval"),
    "val": ("val", "valid", "test"),
}
CLASS_LISTS: Final = ("classes.txt", "labels.txt")
LARGEST_FILE: Final = 16 << 20  # a picture with ten thousand objects has 4 MB


@dataclass(frozen=True, slots=True)
class Page:
    """What one XML file says.

    Attributes:
        size: stated width and height; None where absent or 0.
        filename: stated name of the picture, empty where absent.
        objects: class name, difficult, and box xyxy in pixels from 0 with exclusive far edges.
    """

    size: tuple[int, int] | None
    filename: str
    objects: tuple[tuple[str, bool, tuple[float, float, float, float]], ...]


def find_homes(root: Path) -> list[Path]:
    """Folders with VOC's own layout: the root, `VOCdevkit`, or years below one of them."""
    for base in (root, root / "VOCdevkit"):
        candidates = [base, *sorted(base.glob("VOC2*"))]
        homes = [home for home in candidates if _subfolder(home, ANNOTATIONS) is not None]
        if homes:
            return homes
    return []


def is_voc(root: Path) -> bool:
    """True where the folder looks like one of the layouts above."""
    if any(
        next(_pages(folder), None) for home in find_homes(root) for folder in _annotations(home)
    ):
        return True
    folders = (root / name for names in SPLIT_FOLDERS.values() for name in names)
    return any(next(_pages(folder), None) for folder in folders if folder.is_dir())


def read(root: Path, split: Split, *, limit: int | None = None) -> DataIndex:
    """Read one split of the folder `root`, at most its first `limit` pictures by name.

    Class names are those of `classes.txt` (or `labels.txt`) where there is one, else all that the
    data set's files have, sorted: the same for every split.

    Raises:
        DataError: in one sentence, naming the file.
    """
    homes = find_homes(root)
    pairs = _listed_pairs(homes, split) if homes else None
    if pairs is None:
        pairs = _folder_pairs(root, homes, split)
    notes: Counter[str] = Counter()
    chosen = sorted(pairs, key=lambda pair: relative(pair[0], root))[:limit]
    pages = {xml: read_page(xml) for _, xml in chosen if xml is not None}
    names = _class_names(root, homes, pages)
    label = {name: number for number, name in enumerate(names)}
    rows = []
    for (picture, xml), header in zip(
        chosen, read_headers([picture for picture, _ in chosen]), strict=True
    ):
        page = Page(None, "", ()) if xml is None else pages[xml]
        notes["pictures without an XML file, taken as background"] += xml is None
        objects = []
        for name, difficult, box in page.objects:
            if name not in label:
                raise DataError(
                    f"{xml}: class {name!r} is not in {_class_list(root)}{nearest(name, names)}."
                )
            notes["boxes start at pixel 0 although VOC counts from 1; taken as the edge"] += (
                min(box) < 0
            )
            notes["difficult objects: not trained on, ignored in evaluation"] += difficult
            objects.append(Object(box, label[name], difficult))
        rows.append(
            annotate(
                relative(picture, root),
                header,
                objects,
                place=str(xml),
                notes=notes,
                stated=page.size,
            )
        )
    return make_index(
        rows,
        name=f"{root.resolve().name}/{split}",
        root=str(root),
        class_names=names,
        notes=sentences(notes),
    )


def read_page(path: Path) -> Page:
    """Read one XML file.

    Raises:
        DataError: it is no annotation of VOC's, or has numbers that make no sense.
    """
    tree = _parse(path)
    if tree.tag != "annotation":
        raise DataError(f"{path} is no VOC annotation: its root is <{tree.tag}>.")
    objects = []
    for number, entry in enumerate(tree.findall("object"), start=1):
        place = f"{path}, object {number}"
        name = (entry.findtext("name") or "").strip()
        if not name:
            raise DataError(f"{place} has no <name>.")
        bounds = entry.find("bndbox")  # of the object itself: its <part> children have their own
        if bounds is None:
            raise DataError(f"{place} ({name}) has no <bndbox>.")
        x1, y1, x2, y2 = (
            _number(bounds, edge, f"{place} ({name})") for edge in ("xmin", "ymin", "xmax", "ymax")
        )
        for low, high, axis in ((x1, x2, "x"), (y1, y2, "y")):
            if low > high:
                raise DataError(
                    f"{place} ({name}): {axis}min {low:g} is beyond {axis}max {high:g}; swap them."
                )
        difficult = (entry.findtext("difficult") or "0").strip() not in {"0", "", "Unspecified"}
        objects.append((name, difficult, (x1 - 1.0, y1 - 1.0, x2, y2)))
    return Page(_size(tree, path), (tree.findtext("filename") or "").strip(), tuple(objects))


def _parse(path: Path) -> Element:
    """The elements of a file; one that declares entities is refused before any is expanded."""
    builder = TreeBuilder()
    parser = expat.ParserCreate()
    parser.StartElementHandler = builder.start
    parser.EndElementHandler = builder.end
    parser.CharacterDataHandler = builder.data

    def refuse(name: str, *_: object) -> None:
        raise DataError(
            f"{path} declares the entity {name!r}, which no annotation needs; remove it."
        )

    parser.EntityDeclHandler = refuse
    try:
        if path.stat().st_size > LARGEST_FILE:
            raise DataError(f"{path} is larger than {LARGEST_FILE >> 20} MB: no annotation.")
        parser.Parse(path.read_bytes(), True)
        return builder.close()
    except (OSError, ValueError, LookupError, AssertionError, expat.ExpatError) as error:
        if isinstance(error, DataError):
            raise
        detail = " ".join(str(error).split())
        raise DataError(
            f"{path} is not readable XML: {detail}; correct it, or export it anew."
        ) from error


def _number(parent: Element, tag: str, place: str) -> float:
    text = parent.findtext(tag)
    if text is None:
        raise DataError(f"{place}: <bndbox> has no <{tag}>.")
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise DataError(f"{place}: <{tag}> is {text.strip()[:40]!r}, not a number.")
    return value


def _size(tree: Element, path: Path) -> tuple[int, int] | None:
    """The stated size; tools that do not know it write 0."""
    size = tree.find("size")
    if size is None:
        return None
    sides = []
    for tag in ("width", "height"):
        text = (size.findtext(tag) or "0").strip()
        try:
            side = float(text)
        except ValueError:
            side = math.nan
        if not math.isfinite(side) or side < 0:
            raise DataError(f"{path}: <size> has {tag} {text[:40]!r}, not a number of pixels.")
        sides.append(int(side))
    return (sides[0], sides[1]) if all(sides) else None


Pairs = list[tuple[Path, Path | None]]
"""Pictures with their XML files; None: a picture without objects."""


def _listed_pairs(homes: list[Path], split: Split) -> Pairs | None:
    """As ImageSets/Main says; None where no home has that folder."""
    pairs: Pairs = []
    sets = [home / "ImageSets" / "Main" for home in homes]
    if not any(folder.is_dir() for folder in sets):
        return None
    looked = []
    for home, folder in zip(homes, sets, strict=True):
        lists = [folder / f"{name}.txt" for name in LISTS[split]]
        if split == "train" and any(
            (folder / f"{name}.txt").is_file() for name in ("val", "valid")
        ):
            lists = lists[:1]  # trainval holds what is judged on
        looked += lists
        path = next((path for path in lists if path.is_file()), None)
        if path is not None:
            pairs += _list_pairs(home, path)
    if not pairs:
        raise DataError(
            f"There is no list of pictures for {split!r}: looked for "
            f"{' or '.join(str(path) for path in looked)}; write one, a picture's name a line."
        )
    return pairs


def _list_pairs(home: Path, path: Path) -> Pairs:
    try:
        lines = path.read_bytes().decode("utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} is not a readable list of pictures: {error}.") from error
    xmls, pictures = _subfolder(home, ANNOTATIONS), _subfolder(home, PICTURES)
    if xmls is None or pictures is None:
        raise DataError(f"{home} has no folder {' or '.join(PICTURES)} with the pictures.")
    by_stem = {picture.stem: picture for picture in find_pictures(pictures)}
    pairs: Pairs = []
    for line in lines:
        stem = Path(line.split()[0]).name if line.split() else ""
        if Path(stem).suffix.lower() in SUFFIXES:
            stem = Path(stem).stem
        if not stem:
            continue
        xml = xmls / f"{stem}.xml"
        if not xml.is_file():
            raise DataError(f"{path} lists {stem}, but there is no {xml}.")
        if stem not in by_stem:
            raise DataError(f"{path} lists {stem}, but there is no such picture in {pictures}.")
        pairs.append((by_stem[stem], xml))
    return list(dict.fromkeys(pairs))


def _folder_pairs(root: Path, homes: list[Path], split: Split) -> Pairs:
    """As folders named after the splits say."""
    for name in SPLIT_FOLDERS[split]:
        for xmls, pictures in _split_folders(root, homes, name):
            stems: dict[str, list[Path]] = {}
            for picture in find_pictures(pictures):
                stems.setdefault(picture.stem, []).append(picture)
            if not xmls.is_dir() or not stems:
                continue
            pairs: dict[Path, Path | None] = {p: None for many in stems.values() for p in many}
            found = False
            for xml in _pages(xmls):
                candidates = stems.get(xml.stem) or stems.get(
                    Path(read_page(xml).filename).stem, []
                )
                beside = [picture for picture in candidates if picture.parent == xml.parent]
                chosen = beside or candidates
                if len(chosen) != 1:
                    raise DataError(
                        f"{xml} has {len(chosen)} pictures of its name in {pictures}; there must be "
                        "one."
                    )
                pairs[chosen[0]] = xml
                found = True
            if found:
                return list(pairs.items())
    raise DataError(
        f"{root} has XML files but does not say which are for {split!r}: write "
        f"ImageSets/Main/{split}.txt, a picture's name a line, or use folders train and valid."
    )


def _split_folders(root: Path, homes: list[Path], name: str) -> Iterator[tuple[Path, Path]]:
    """Places of XML files and of pictures."""
    folder = root / name
    for pictures in PICTURES:
        for xmls in ANNOTATIONS:
            yield folder / xmls, folder / pictures
    yield folder, folder
    for home in homes:
        for xml_folder in _annotations(home):
            for picture_folder in PICTURES:
                yield xml_folder / name, home / picture_folder / name


def _class_names(root: Path, homes: list[Path], pages: Mapping[Path, Page]) -> tuple[str, ...]:
    path = _class_list(root)
    if path is not None:
        try:
            lines = path.read_bytes().decode("utf-8-sig").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"{path} is not a readable list of classes: {error}.") from error
        names = [line.strip() for line in lines if line.strip()]
        twice = [name for name, count in Counter(names).items() if count > 1]
        if twice or not names:
            raise DataError(
                f"{path} names {listed(twice)} twice." if twice else f"{path} is empty."
            )
        return tuple(names)
    everywhere = [folder for home in homes for folder in _annotations(home)]
    everywhere += [root / name for names in SPLIT_FOLDERS.values() for name in names]
    found = {name for page in pages.values() for name, _, _ in page.objects}
    for folder in everywhere:
        for xml in _pages(folder) if folder.is_dir() else ():
            if xml not in pages:
                found.update(name for name, _, _ in read_page(xml).objects)
    if not found:
        raise DataError(f"{root}: none of its XML files has an object.")
    return tuple(sorted(found))


def _class_list(root: Path) -> Path | None:
    return next((root / name for name in CLASS_LISTS if (root / name).is_file()), None)


def _annotations(home: Path) -> list[Path]:
    folder = _subfolder(home, ANNOTATIONS)
    return [] if folder is None else [folder]


def _subfolder(home: Path, names: tuple[str, ...]) -> Path | None:
    return next((home / name for name in names if (home / name).is_dir()), None)


def _pages(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.rglob("*.xml")):
        if not path.name.startswith("."):
            yield path
