"""The parts that need the compiled extension are skipped where it is not built, and say so."""

from __future__ import annotations

import bombs
import cv2
import numpy as np
import pytest
import simplejpeg
from image_files import saved

from raypipe.transform.decode.jpeg import (
    decode_box,
    open_for_crop,
    why_no_kernel,
)
from raypipe.transform.decode.rgb import decode

needs_extension = pytest.mark.skipif(
    bool(why_no_kernel()), reason=f"no kernel: {why_no_kernel()}"
)
RNG = np.random.default_rng(0)


def noise(height: int, width: int) -> np.ndarray:
    """Pixels that use every coefficient, so that nothing can be left out unseen."""
    return RNG.integers(0, 256, (height, width, 3), np.uint8)


@needs_extension
def test_an_unfinished_progressive_file_is_smoothed_as_a_whole() -> None:
    """libjpeg guesses what is missing from the neighbors, which a crop has other ones of."""
    smooth = cv2.resize(noise(6, 6), (96, 96))
    data = saved(smooth, progressive=True, subsampling="4:4:4")
    scans = [at for at in range(len(data)) if data[at : at + 2] == b"\xff\xda"]
    for kept in range(1, 4):
        part = data[: scans[kept]] + b"\xff\xd9"
        box = decode_box(part, (30, 40, 20, 10))
        assert np.array_equal(box, decode(part)[30:50, 40:50])


# --- which images


PHOTO = cv2.resize(noise(12, 16), (160, 120))


@needs_extension
def test_only_jpegs_that_may_be_cropped_are_opened() -> None:
    jpeg = simplejpeg.encode_jpeg(PHOTO, 90, "RGB", "420")
    found = open_for_crop(jpeg, exif=False)
    assert found is not None and found[0] == (120, 160)
    for other in (
        saved(PHOTO, "PNG"),
        b"",
        jpeg[:30],
        b"\xff\xd8\xff",
        bombs.rare_jpeg(),
    ):
        assert open_for_crop(other, exif=False) is None
    declared = jpeg.index(b"\xff\xc0")
    # 65,500 x 65,500
    bomb = jpeg[: declared + 5] + b"\xff\xdc\xff\xdc" + jpeg[declared + 9 :]
    assert open_for_crop(bomb, exif=False) is None
    many = bombs.jpeg_of_scans(13000, 13000, 17)
    assert open_for_crop(many, exif=False) is None
