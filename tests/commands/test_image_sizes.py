"""Sizes of images by their headers, as columns of a conversion."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np
import pytest
from copied import written
from image_files import saved
from PIL import Image

from raypipe.commands.copies import (
    NO_SIZE,
    CopySettings,
    header_sides,
)
from raypipe.errors import SampleError
from raypipe.stores import open_store
from raypipe.stores.memory import MemoryStore
from raypipe.transform.decode.rgb import decode

from pictures import picture  # isort: skip


def on_its_side(height: int, width: int) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6
    return saved(np.zeros((height, width, 3), np.uint8), exif=exif)


PNG = cv2.imencode(".png", np.zeros((5, 9, 3), np.uint8))[1].tobytes()
IMAGES = [picture(0, 8, 12), PNG, on_its_side(20, 30), picture(1, 7, 3)]
STORED = [(12, 8), (9, 5), (30, 20), (3, 7)]
UPRIGHT = [(12, 8), (9, 5), (20, 30), (3, 7)]


def test_an_image_whose_decoder_is_not_installed_has_no_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "pillow_heif", None)
    assert header_sides(b"\0\0\0\x18ftypheic" + bytes(12)) == NO_SIZE


# What a failed download, a truncation at the start, a pickle and a text leave in place of an image.
UNREADABLE = [
    b"no image",
    IMAGES[0][:10],
    b"<html>404</html>",
    b"\x80\x04N.",
    b"\x93NUMPY",
    b"RIFF\0\0\0\0WAVE",
]


@pytest.mark.parametrize("image", UNREADABLE)
def test_a_conversion_refuses_what_no_decoder_reads(
    image: bytes, tmp_path: Path
) -> None:
    source = MemoryStore([PNG, image], [0, 1])
    settings = CopySettings(columns={"image": "binary", "label": "int64"})
    with pytest.raises(
        SampleError, match=r"sample 1: .*Exclude such samples with --on-bad-sample skip"
    ):
        written(source, tmp_path, settings)
    part, _ = written(source, tmp_path, replace(settings, on_bad_sample="skip"))
    assert part.samples == 2 and [index for index, _ in part.skipped] == [1]
    store = open_store(tmp_path / "00000.lmdb")
    assert store.read(np.arange(1), ("image",))["image"] == [PNG]


@pytest.mark.parametrize("suffix", [".lmdb", ".parquet"])
@pytest.mark.parametrize(("exif", "expected"), [(False, STORED), (True, UPRIGHT)])
def test_a_conversion_writes_the_sizes_of_all_images(
    suffix: str, exif: bool, expected: list[tuple[int, int]], tmp_path: Path
) -> None:
    types = {"image": "binary", "label": "int64", "width": "int64", "height": "int64"}
    sized = ("width", "height")
    settings = CopySettings(columns=types, sized=sized, exif=exif, suffix=suffix)
    part, end = written(MemoryStore(IMAGES, range(4)), tmp_path, settings)
    assert part == (4, 0, sum(map(len, IMAGES)), (), None)
    assert end.shard == (0, f"00000{suffix}")
    store = open_store(tmp_path / f"00000{suffix}")
    found = store.read(np.arange(4), ("image", "width", "height"))
    assert found["image"] == IMAGES and found["width"].dtype == np.int64
    assert list(zip(found["width"], found["height"], strict=True)) == expected
    for image, (width, height) in zip(IMAGES, expected, strict=True):
        assert decode(image, exif=exif).shape == (height, width, 3)


def test_shrunk_images_have_their_new_sizes(tmp_path: Path) -> None:
    types = {"image": "binary", "width": "int64", "height": "int64"}
    source = MemoryStore(
        [picture(0, 40, 60)], None, columns={"width": [60], "height": [40]}
    )
    settings = CopySettings(columns=types, sized=("width", "height"), short_side=20)
    written(source, tmp_path, settings)
    found = open_store(tmp_path / "00000.lmdb").read(
        np.arange(1), ("image", "width", "height")
    )
    assert decode(found["image"][0]).shape == (20, 30, 3)
    assert (found["width"][0], found["height"][0]) == (30, 20)


def test_columns_of_sizes_are_added_unless_they_are_there() -> None:
    given = {"image": "binary", "height": "string"}
    assert CopySettings().of_columns(given).columns == given | {"width": "int64"}
    assert CopySettings(sizes=False).of_columns(given).columns == given
    smaller = CopySettings(short_side=8).of_columns(given)
    assert smaller.sized == ("width", "height")
