"""Pictures that came back: their own words, small in the notebook, whole on the disk."""

from __future__ import annotations

import base64
import io

import numpy as np
import pytest
from PIL import Image

from detector.data.index import encode_png
from detector.visualize import described
from kernel_tools.errors import FetchError
from kernel_tools.views.pictures import WIDEST, read_picture


def drawing(path, *, width=400, text=None):
    png = encode_png(np.full((60, width, 3), 120, np.uint8))
    path.write_bytes(png if text is None else described(png, text))
    return path


def test_a_picture_says_what_it_shows(tmp_path):
    picture = read_picture(drawing(tmp_path / "a.png", text='düne "1" <b>: left, right'))
    assert picture.alt == 'düne "1" <b>: left, right'
    bundle = picture._repr_mimebundle_()
    assert set(bundle) == {"text/plain", "text/html", "image/jpeg"}
    assert 'alt="düne &quot;1&quot; &lt;b&gt;: left, right"' in bundle["text/html"]
    assert Image.open(io.BytesIO(base64.b64decode(bundle["image/jpeg"]))).size == (400, 60)


def test_a_wide_picture_is_scaled_and_its_file_left_whole(tmp_path):
    picture = read_picture(drawing(tmp_path / "wide.png", width=2 * WIDEST))
    assert Image.open(io.BytesIO(picture.jpeg)).size == (WIDEST, 30)
    with Image.open(picture.path) as whole:
        assert whole.size == (2 * WIDEST, 60)
    assert picture.alt == "wide.png"


def test_what_is_no_picture_is_one_sentence(tmp_path):
    (tmp_path / "a.png").write_text("text")
    with pytest.raises(FetchError, match=r"a\.png is no picture"):
        read_picture(tmp_path / "a.png")
