"""AVIF and HEIC: decoded as Pillow and pillow-heif decode them, within the limits, and one error without them."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import numpy as np
import pillow_heif
import pytest
from image_files import saved
from jpeg_headers import exif
from PIL import AvifImagePlugin, Image

from raypipe.errors import ConfigError, SampleError
from raypipe.stores import open_store
from raypipe.transform.decode.image_header import image_kind
from raypipe.transform.decode.rgb import decode, image_size

Y, X = np.mgrid[:40, :60]
PIXELS = np.stack([X * 4 % 256, Y * 6 % 256, (X + Y) % 256], 2).astype(np.uint8)


def encoded(kind: str, pixels: np.ndarray = PIXELS, orientation: int = 1) -> bytes:
    image, out = Image.fromarray(pixels), io.BytesIO()
    if kind == "AVIF":
        return saved(image, "AVIF", exif=exif(orientation))
    image.info["exif"] = exif(orientation)
    pillow_heif.from_pillow(image).save(out)
    return out.getvalue()


OPEN = {"AVIF": AvifImagePlugin.AvifImageFile, "HEIC": pillow_heif.HeifImageFile}
KINDS = pytest.mark.parametrize("kind", OPEN)


@KINDS
def test_pixels_are_those_of_the_library_and_close_to_what_was_encoded(
    kind: str,
) -> None:
    gray = PIXELS[:, :, 0]
    for image in (PIXELS, np.dstack([PIXELS, gray]), gray):
        data = encoded(kind, image)
        assert image_kind(data) == kind and image_size(data) == (40, 60)
        opened, found = OPEN[kind](io.BytesIO(data)), decode(data)
        assert np.array_equal(found, np.asarray(opened.convert("RGB")))
        if image is PIXELS:
            assert np.abs(found.astype(int) - image).mean() < 12


@KINDS
def test_orientation(kind: str) -> None:
    """That of EXIF; of HEIC it is ignored, since its container has the word."""
    data = encoded(kind, orientation=6)
    stored, upright = decode(data), decode(data, exif=True)
    assert image_size(data) == stored.shape[:2] == (40, 60)
    assert image_size(data, exif=True) == upright.shape[:2]
    assert np.array_equal(upright, np.rot90(stored, -1) if kind == "AVIF" else stored)


@KINDS
def test_whatever_is_damaged_is_a_bad_sample(kind: str) -> None:
    data, rng = encoded(kind), np.random.default_rng(0)
    for length in (12, 40, len(data) // 2, len(data) - 20):
        with pytest.raises(SampleError):
            decode(data[:length])
    for _ in range(150):
        damaged = bytearray(data)
        damaged[rng.integers(12, len(data))] ^= 1 << int(rng.integers(8))
        try:
            decode(bytes(damaged))
            image_size(bytes(damaged))
        except SampleError:
            pass


def test_without_what_decodes_it_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    heic, avif = encoded("HEIC"), encoded("AVIF")
    monkeypatch.setitem(sys.modules, "pillow_heif", None)
    monkeypatch.setattr(AvifImagePlugin, "SUPPORTED", False)
    for function in (decode, image_size):
        with pytest.raises(
            ConfigError,
            match=r"HEIC images need .*pip install 'raypipe-data\[heic\]', on every",
        ):
            function(heic)
        with pytest.raises(ConfigError, match="AVIF images need a Pillow with libavif"):
            function(avif)


def test_other_iso_files_are_no_images_and_jpegs_import_no_library() -> None:
    assert image_kind(b"\0\0\0\x18ftypmp42\0\0\0\0isommp42") is None
    code = (
        "import sys, raypipe.transform.decode.rgb; "
        "print({'torch', 'ray', 'PIL', 'albumentations', 'pillow_heif'} & set(sys.modules))"
    )
    printed = subprocess.check_output([sys.executable, "-c", code], text=True)
    assert printed == "set()\n"


def test_files_of_these_names_in_a_folder_are_samples(tmp_path: Path) -> None:
    for name, kind in (
        ("a/1.avif", "AVIF"),
        ("a/2.HEIC", "HEIC"),
        ("b/3.heif", "HEIC"),
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(encoded(kind))
    images = open_store(tmp_path).read(np.arange(3))["image"]
    assert [image_kind(image) for image in images] == ["AVIF", "HEIC", "HEIC"]
