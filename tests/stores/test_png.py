"""PNGs that raypipe writes itself."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from raypipe.stores.png import stored_png
from raypipe.transform.decode.rgb import decode


@pytest.mark.parametrize("shape", [(7, 9, 3), (7, 9), (7, 9, 1), (1, 1, 3), (300, 500)])
def test_a_png_has_the_pixels_that_it_was_made_of(shape: tuple[int, ...]) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    data = stored_png(pixels)
    rows = pixels.reshape(*shape[:2], -1)
    with Image.open(io.BytesIO(data)) as image:
        assert np.array_equal(np.array(image).reshape(rows.shape), rows)
    assert np.array_equal(decode(data), np.broadcast_to(rows, (*shape[:2], 3)))
