"""A value as a file, for both ends: JSON, NumPy arrays, pandas frames. Never a pickle, in either direction.

Travels as text, so: Python 3.8, standard library, self-contained; NumPy and pandas only where the value
is one of theirs. The file is a zip: `value.json`, a tree, and `<n>.npy` for each array in it.
"""

from __future__ import annotations

import contextlib
import json
import os
import zipfile
from importlib import import_module
from typing import Any

_PLAIN = (type(None), bool, int, float, str)


class ValueRefusedError(Exception):
    """The value, or the name, is none that can travel."""


def give(name: str, path: str) -> dict[str, Any]:
    """Write the variable of the user's namespace to `path`, for its owner alone; return its size."""
    from IPython.core.getipython import get_ipython

    namespace = get_ipython().user_ns
    if name not in namespace:
        raise ValueRefusedError(f"there is no variable {name!r} on the remote kernel")
    path = os.path.abspath(os.path.expanduser(path))
    os.makedirs(os.path.dirname(path), exist_ok=True)
    write(namespace[name], path)
    return {"size": os.path.getsize(path)}


def take(name: str, path: str) -> dict[str, Any]:
    """Put the value in `path` into the user's namespace."""
    from IPython.core.getipython import get_ipython

    get_ipython().user_ns[name] = read(os.path.abspath(os.path.expanduser(path)))
    return {}


def discard(path: str) -> dict[str, Any]:
    """Remove a value's file, if it is there."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(os.path.abspath(os.path.expanduser(path)))
    return {}


def write(value: Any, path: str) -> None:
    """Write a value.

    Raises:
        ValueRefusedError: it, or something in it, is no JSON, array or frame.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as stream, zipfile.ZipFile(stream, "w") as archive:
        tree = _Writer(archive).tree(value)
        archive.writestr("value.json", json.dumps(tree))


def read(path: str) -> Any:
    """Return the value that `write` wrote."""
    with zipfile.ZipFile(path) as archive:
        tree = json.loads(archive.read("value.json").decode("utf-8"))
        return _Reader(archive).value(tree)


class _Writer:
    """Turns values into the tree; lists and plain values stand for themselves, the rest is tagged."""

    def __init__(self, archive: zipfile.ZipFile) -> None:
        self._archive = archive
        self._count = 0

    def tree(self, value: Any) -> Any:
        kind = type(value)
        if kind in _PLAIN:
            return value
        if kind is list:
            return [self.tree(one) for one in value]
        if kind in (tuple, set, frozenset):
            return {"is": kind.__name__, "items": [self.tree(one) for one in value]}
        if isinstance(value, dict):
            return {"is": "dict", "items": [[self.tree(k), self.tree(v)] for k, v in value.items()]}
        if kind is bytes:
            return {"is": "bytes", "file": self._file(value)}
        home = kind.__module__.split(".")[0]
        if home == "numpy":
            return self._numpy(value)
        if home == "pandas":
            return self._pandas(value)
        if home == "torch" and hasattr(value, "detach"):
            return self._tensor(value)
        raise ValueRefusedError(
            f"a {kind.__module__}.{kind.__name__} cannot travel: only JSON values, NumPy arrays and "
            "pandas frames do"
        )

    def _numpy(self, value: Any) -> Any:
        np = import_module("numpy")
        if isinstance(value, np.generic):
            return {"is": "scalar", "file": self._array(np.asarray(value))}
        if type(value) is not np.ndarray:
            raise ValueRefusedError(
                f"a numpy {type(value).__name__} cannot travel: make it an array"
            )
        return {"is": "array", "file": self._array(value)}

    def _tensor(self, value: Any) -> Any:
        value = value.detach().cpu()
        try:
            array = value.numpy()
        except TypeError:  # bfloat16, which NumPy does not have
            array = value.float().numpy()
        return {"is": "array", "file": self._array(array)}

    def _pandas(self, value: Any) -> Any:
        pd = import_module("pandas")
        if isinstance(value, pd.DataFrame):
            columns = [self._column(value.iloc[:, n].array) for n in range(value.shape[1])]
            return {
                "is": "frame", "data": columns,
                "columns": self._index(value.columns), "index": self._index(value.index),
            }  # fmt: skip
        if isinstance(value, pd.Series):
            return {
                "is": "series", "data": self._column(value.array), "index": self._index(value.index),
                "name": self.tree(value.name),
            }  # fmt: skip
        if isinstance(value, pd.Index):
            return {"is": "index", "index": self._index(value)}
        if isinstance(value, pd.Timestamp):
            return {"is": "timestamp", "text": value.isoformat(), "zone": str(value.tz or "")}
        raise ValueRefusedError(f"a pandas {type(value).__name__} cannot travel")

    def _index(self, index: Any) -> Any:
        pd = import_module("pandas")
        if isinstance(index, pd.RangeIndex):
            span = [int(index.start), int(index.stop), int(index.step)]
            return {"range": span, "name": self.tree(index.name)}
        if isinstance(index, pd.MultiIndex):
            levels = [self._column(index.get_level_values(n).array) for n in range(index.nlevels)]
            return {"levels": levels, "names": [self.tree(name) for name in index.names]}
        return {"data": self._column(index.array), "name": self.tree(index.name)}

    def _column(self, values: Any) -> Any:
        np, pd = import_module("numpy"), import_module("pandas")
        kind = values.dtype
        if isinstance(kind, pd.CategoricalDtype):
            return {
                "codes": self._array(np.asarray(values.codes)), "ordered": bool(kind.ordered),
                "categories": self._index(kind.categories),
            }  # fmt: skip
        if isinstance(kind, pd.DatetimeTZDtype):
            moments = np.asarray(values.tz_convert("UTC").tz_localize(None))
            return {"moments": self._array(moments), "zone": str(kind.tz)}
        if isinstance(kind, np.dtype) and not kind.hasobject:
            return {"array": self._array(np.asarray(values))}
        cells = [None if one is pd.NA else one for one in values]
        return {"cells": self.tree(cells), "dtype": str(kind)}

    def _array(self, array: Any) -> str:
        np = import_module("numpy")
        if array.dtype.hasobject:
            raise ValueRefusedError("an array of Python objects cannot travel without a pickle")
        name = self._next()
        with self._archive.open(name, "w", force_zip64=True) as stream:
            np.lib.format.write_array(stream, np.asarray(array), allow_pickle=False)
        return name

    def _file(self, data: bytes) -> str:
        name = self._next()
        self._archive.writestr(name, data)
        return name

    def _next(self) -> str:
        self._count += 1
        return f"{self._count}.npy"


class _Reader:
    """The way back."""

    def __init__(self, archive: zipfile.ZipFile) -> None:
        self._archive = archive

    def value(self, tree: Any) -> Any:
        if isinstance(tree, list):
            return [self.value(one) for one in tree]
        if not isinstance(tree, dict):
            return tree
        return getattr(self, "_" + tree["is"])(tree)

    def _dict(self, tree: Any) -> Any:
        return {self.value(key): self.value(value) for key, value in tree["items"]}

    def _tuple(self, tree: Any) -> Any:
        return tuple(self.value(tree["items"]))

    def _set(self, tree: Any) -> Any:
        return set(self.value(tree["items"]))

    def _frozenset(self, tree: Any) -> Any:
        return frozenset(self.value(tree["items"]))

    def _bytes(self, tree: Any) -> Any:
        return self._archive.read(tree["file"])

    def _array(self, tree: Any) -> Any:
        return self._npy(tree["file"])

    def _scalar(self, tree: Any) -> Any:
        return self._npy(tree["file"])[()]

    def _series(self, tree: Any) -> Any:
        pd = import_module("pandas")
        index, name = self._labels(tree["index"]), self.value(tree["name"])
        return pd.Series(self._column(tree["data"]), index=index, name=name)

    def _frame(self, tree: Any) -> Any:
        pd = import_module("pandas")
        index = self._labels(tree["index"])
        parts = {n: self._column(one) for n, one in enumerate(tree["data"])}
        frame = pd.DataFrame(parts, index=index)
        frame.columns = self._labels(tree["columns"])
        return frame

    def _index(self, tree: Any) -> Any:
        return self._labels(tree["index"])

    def _timestamp(self, tree: Any) -> Any:
        pd = import_module("pandas")
        moment = pd.Timestamp(tree["text"])
        return moment.tz_convert(tree["zone"]) if tree["zone"] else moment

    def _labels(self, tree: Any) -> Any:
        pd = import_module("pandas")
        if "range" in tree:
            return pd.RangeIndex(*tree["range"], name=self.value(tree["name"]))
        if "levels" in tree:
            levels: list[Any] = [self._column(one) for one in tree["levels"]]
            return pd.MultiIndex.from_arrays(levels, names=self.value(tree["names"]))
        return pd.Index(self._column(tree["data"]), name=self.value(tree["name"]))

    def _column(self, tree: Any) -> Any:
        pd = import_module("pandas")
        if "codes" in tree:
            return pd.Categorical.from_codes(
                self._npy(tree["codes"]),
                categories=self._labels(tree["categories"]),
                ordered=tree["ordered"],
            )
        if "moments" in tree:
            moments = pd.DatetimeIndex(self._npy(tree["moments"]))
            return moments.tz_localize("UTC").tz_convert(tree["zone"])
        if "array" in tree:
            return self._npy(tree["array"])
        return pd.array(self.value(tree["cells"]), dtype=tree["dtype"])

    def _npy(self, name: str) -> Any:
        np = import_module("numpy")
        with self._archive.open(name) as stream:
            return np.lib.format.read_array(stream, allow_pickle=False)
