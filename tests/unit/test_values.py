"""Values go into a file and come back as they were; what would need a pickle is refused."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import zipfile

import numpy as np
import pandas as pd
import pytest

from kernel_tools.kernels import values
from kernel_tools.kernels.cells import module_source
from kernel_tools.kernels.values import ValueRefusedError, read, write


@pytest.fixture
def through(tmp_path):
    def there_and_back(value):
        write(value, str(tmp_path / "value"))
        return read(str(tmp_path / "value"))

    return there_and_back


@pytest.mark.parametrize(
    "value",
    [
        None, True, 0, -(2**70), 0.1, float("inf"), "zażółć\n", b"\0\xff", [], [1, [2.5, None]], (), (1, "a"),
        {}, {"a": {"b": [1]}}, {1: "int", ("t", 2): "tuple", None: 0}, {1, 2}, frozenset({"a"}),
    ],
    ids=repr,
)  # fmt: skip
def test_plain_values_come_back_with_their_types(through, value):
    back = through(value)
    assert back == value
    assert type(back) is type(value)


def test_no_number_comes_back_as_none(through):
    assert through(float("nan")) != through(float("nan"))


@pytest.mark.parametrize(
    "array",
    [
        np.arange(12, dtype=np.float32).reshape(3, 4), np.array([], dtype=np.int8), np.array(7),
        np.array(["a", "bc"]), np.array(["2026-01-01", "NaT"], dtype="datetime64[s]"),
        np.array([(1, 2.5)], dtype=[("a", "i4"), ("b", "f8")]), np.array([1 + 2j]),
        np.asfortranarray(np.arange(6).reshape(2, 3)),
    ],
    ids=lambda array: f"{array.dtype}-{array.shape}",
)  # fmt: skip
def test_arrays_come_back_bit_for_bit(through, array):
    back = through({"in": [array]})["in"][0]
    assert back.dtype == array.dtype
    assert back.shape == array.shape
    assert back.tobytes() == array.tobytes()


def test_numpy_numbers_keep_their_type(through):
    back = through(np.float32(0.1))
    assert type(back) is np.float32
    assert back == np.float32(0.1)


def test_tensors_come_back_as_arrays(through):
    import torch

    back = through({"weights": torch.ones(2, 3, requires_grad=True)})["weights"]
    assert type(back) is np.ndarray
    assert back.shape == (2, 3)
    assert through(torch.tensor([1.5], dtype=torch.bfloat16)).tolist() == [1.5]


def test_frames_come_back_with_their_columns_types_and_index(through):
    frame = pd.DataFrame(
        {
            "i": [1, 2, 3],
            "f": [0.5, None, 1.5],
            "s": ["a", None, "c"],
            "b": [True, False, True],
            "n": pd.array([1, None, 3], dtype="Int64"),
            "c": pd.Categorical(["x", "y", "x"], categories=["y", "x"], ordered=True),
            "t": pd.to_datetime(["2026-01-01", None, "2026-01-03"]),
            "z": pd.to_datetime(["2026-01-01"] * 3).tz_localize("Europe/Warsaw"),
            "o": pd.Series([{"a": 1}, [2], "three"], dtype=object),
        },
        index=pd.Index(["p", "q", "r"], name="row"),
    )
    pd.testing.assert_frame_equal(through(frame), frame)


@pytest.mark.parametrize(
    "value",
    [
        pd.DataFrame(),
        pd.DataFrame({"a": [1]}, index=[5]),
        pd.DataFrame([[1, 2]], columns=["same", "same"]),
        pd.DataFrame({("a", 1): [1], ("a", 2): [2]}),
        pd.Series([1.5, 2.5], name="s").set_axis(
            pd.MultiIndex.from_tuples([("a", 1), ("b", 2)], names=["x", "y"])
        ),
    ],
    ids=["empty", "index", "twice", "levels of columns", "levels of index"],
)
def test_odd_frames_come_back(through, value):
    back = through(value)
    (pd.testing.assert_frame_equal if back.ndim == 2 else pd.testing.assert_series_equal)(
        back, value
    )


class Unknown:
    pass


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (Unknown(), "Unknown cannot travel"),
        ([1, {"deep": Unknown()}], "Unknown cannot travel"),
        (np.array([Unknown()], dtype=object), "without a pickle"),
        (pd.DataFrame({"a": [Unknown()]}), "Unknown cannot travel"),
        (np.ma.masked_array([1]), "MaskedArray cannot travel"),
        (lambda: 0, "function cannot travel"),
    ],
)
def test_what_would_need_a_pickle_is_refused(tmp_path, value, says):
    with pytest.raises(ValueRefusedError, match=says):
        write(value, str(tmp_path / "value"))


def test_a_pickle_that_is_smuggled_in_is_not_read(tmp_path):
    evil = tmp_path / "evil.npy"
    np.save(evil, np.array([Unknown()], dtype=object), allow_pickle=True)
    with zipfile.ZipFile(tmp_path / "value", "w") as archive:
        archive.writestr("value.json", json.dumps({"is": "array", "file": "1.npy"}))
        archive.write(evil, "1.npy")
    with pytest.raises(ValueError, match="allow_pickle=False"):
        read(str(tmp_path / "value"))


def test_the_file_is_for_its_owner_alone(tmp_path):
    write([1], str(tmp_path / "value"))
    assert stat.S_IMODE(os.stat(tmp_path / "value").st_mode) == 0o600


def test_plain_values_need_neither_numpy_nor_pandas(tmp_path):
    code = (
        "import sys; source = sys.stdin.read(); names = {}; exec(source, names);"
        f"names['write']({{'a': [1, (2,)]}}, {str(tmp_path / 'value')!r});"
        "assert not {'numpy', 'pandas'} & set(sys.modules)"
    )
    subprocess.run(
        [sys.executable, "-c", code], input=module_source("values"), text=True, check=True
    )
    assert values.read(str(tmp_path / "value")) == {"a": [1, (2,)]}
