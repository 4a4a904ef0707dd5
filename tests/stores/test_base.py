"""Suffixes of images: one list, of what the decoders read."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from raypipe.errors import ConfigError, SampleError
from raypipe.stores import open_store
from raypipe.stores.base import IMAGE_SUFFIXES
from raypipe.transform.decode.rgb import decode

PIXELS = np.arange(300, dtype=np.uint8).reshape(10, 10, 3)


def written_by_pillow() -> dict[str, tuple[str, bytes]]:
    """Every suffix that Pillow knows, with its format and a file of it, where Pillow writes such."""
    Image.init()
    files: dict[str, tuple[str, bytes]] = {}
    for suffix, kind in Image.registered_extensions().items():
        out = io.BytesIO()
        try:
            Image.fromarray(PIXELS).save(out, kind)
        except (KeyError, OSError, ValueError):  # it only reads these, or not RGB
            continue
        files[suffix] = kind, out.getvalue()
    return files


FILES = written_by_pillow()


def is_decoded(data: bytes) -> bool:
    try:
        return decode(data).shape == PIXELS.shape
    except (SampleError, ConfigError):
        return False


@pytest.mark.parametrize("suffix", FILES)
def test_a_suffix_is_an_images_if_a_decoder_reads_its_files(
    suffix: str, tmp_path: Path
) -> None:
    _, data = FILES[suffix]
    assert (suffix in IMAGE_SUFFIXES) == is_decoded(data)
    for name in (f"a/1{suffix}", f"b/2{suffix.upper()}", "b/3.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(data)
    store = open_store(tmp_path, target_column="folder")
    assert len(store) == (3 if suffix in IMAGE_SUFFIXES else 1)


def test_suffixes_of_all_decoded_formats_were_tried() -> None:
    kinds = {kind for suffix, (kind, _) in FILES.items() if suffix in IMAGE_SUFFIXES}
    assert kinds >= {"JPEG", "PNG", "WEBP", "GIF", "TIFF", "BMP"}
