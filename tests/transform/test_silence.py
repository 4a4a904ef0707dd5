"""Decoders print and log nothing of what they find in a file; a program's own use of them stays as it was."""

from __future__ import annotations

import contextlib
import io
import logging
import threading

import numpy as np
import pytest
from image_files import saved
from PIL import Image

from raypipe.errors import SampleError
from raypipe.transform.decode.array import decode_array
from raypipe.transform.decode.rgb import decode, image_size
from raypipe.transform.silence import silenced

PIXELS = np.random.default_rng(0).integers(0, 256, (6, 7, 3), np.uint8)
IMAGE = Image.fromarray(PIXELS).resize((70, 60))
TIFFS = ["raw", "tiff_lzw", "tiff_deflate", "jpeg", "packbits", "group3", "group4"]
KINDS = ["PNG", "GIF", "BMP", "WEBP", "JPEG"]


def tiff(compression: str) -> bytes:
    mode = "1" if "group" in compression else "RGB"
    return saved(IMAGE, "TIFF", mode, compression=compression)


def damaged(data: bytes, number: int) -> bytes:
    rng, changed = np.random.default_rng(number), bytearray(data)
    for at in rng.integers(0, len(changed), rng.integers(1, 5)):
        changed[at] = rng.integers(256)
    return bytes(changed)


@pytest.mark.parametrize("kind", [*TIFFS, *KINDS])
def test_damage_is_told_by_its_error_alone(
    kind: str, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    good = tiff(kind) if kind in TIFFS else saved(IMAGE, kind)
    num_refused = 0
    for number in range(40):
        data = damaged(good, number)
        for look in (decode, decode_array, image_size):
            try:
                look(data)
            except SampleError:
                num_refused += 1
    assert num_refused or kind == "BMP"
    assert capfd.readouterr().err == ""
    assert not caplog.records


def test_rows_that_libtiff_calls_damaged_are_no_pixels() -> None:
    """Of facsimile codes Pillow keeps what it has, and libtiff says so on stderr."""
    good = tiff("group4")
    messages = set()
    for number in range(60):
        try:
            decode(damaged(good, number))
        except SampleError as error:
            messages.add(str(error).partition(" (")[0])
    assert "damaged TIFF: Fax4Decode: Bad code word at line" in messages


def test_loggers_are_as_before_behind_the_last_of_several_threads(
    capfd: pytest.CaptureFixture[str],
) -> None:
    bad = tiff("tiff_lzw")
    bad = bad[:200] + b"\xff" * 60 + bad[260:]
    within, done = threading.Event(), threading.Event()

    def stay() -> None:
        with silenced():
            within.set()
            done.wait()

    thread = threading.Thread(target=stay)
    thread.start()
    within.wait()
    with silenced():
        pass
    assert not logging.getLogger("PIL").propagate
    done.set()
    thread.join()
    for name in ("PIL", "tifffile"):
        assert logging.getLogger(name).propagate
        assert not logging.getLogger(name).handlers
    capfd.readouterr()
    with contextlib.suppress(OSError):
        Image.open(io.BytesIO(bad)).load()
    printed = capfd.readouterr().err
    with pytest.raises(SampleError):
        decode(bad)
    assert capfd.readouterr().err == ""
    assert printed, "libtiff speaks to others as before"
