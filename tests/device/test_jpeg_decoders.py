"""Which JPEGs a device decodes, by which library, and that one bad image costs one image; on a CPU device."""

from __future__ import annotations

import importlib
import importlib.metadata
import io
from collections.abc import Callable

import bombs
import numpy as np
import pytest
import torch
from pictures import picture
from PIL import Image

from raypipe.device import jpeg_decoders
from raypipe.device.jpeg_decoders import LIBRARIES, BatchDecoder, find_decoder, nvjpeg_pixels, without_exif
from raypipe.errors import ConfigError
from raypipe.transform.decode import decode
from raypipe.transform.jpeg import jpeg_orientation

CPU = torch.device("cpu")


def saved(format: str = "JPEG", mode: str = "RGB", orientation: int = 0, **options: object) -> bytes:
    """A file by Pillow of 24 x 40 pixels."""
    if orientation:
        options["exif"] = tags = Image.Exif()
        tags[0x0112] = orientation
    file = io.BytesIO()
    pixels = np.random.default_rng(0).integers(0, 256, (24, 40, 3), np.uint8)
    Image.fromarray(pixels).convert(mode).save(file, format, **options)
    return file.getvalue()


BY_DEVICE: dict[str, Callable[[], bytes]] = {
    "baseline": saved,
    "4:4:4": lambda: saved(subsampling=0),
    "4:2:2": lambda: saved(subsampling=1),
    "grey": lambda: saved(mode="L"),
    "progressive": lambda: saved(progressive=True),
    "progressive grey": lambda: saved(mode="L", progressive=True),
    "with restarts": lambda: saved(restart_marker_rows=1),
    "with a comment and a profile": lambda: saved(comment=b"x" * 999, icc_profile=b"y" * 70_000),
    "upright by its EXIF": lambda: saved(orientation=1),
    "without JFIF": lambda: saved()[:2] + saved()[20:],
}
BY_CPU: dict[str, Callable[[], bytes]] = {
    "CMYK": lambda: saved(mode="CMYK"),
    "RGB in JPEG": lambda: saved(keep_rgb=True),  # Adobe's marker, transform 0
    "bytes behind the end": lambda: saved() + b"\0",
    "cut short": lambda: saved()[:-2],
    "4:4:1": bombs.rare_jpeg,
    "PNG": lambda: saved("PNG"),
    "grey PNG": lambda: saved("PNG", "L"),
    "WebP": lambda: saved("WebP"),
    "GIF": lambda: saved("GIF"),
    "BMP": lambda: saved("BMP"),
    "TIFF": lambda: saved("TIFF"),
}


@pytest.mark.parametrize("kind", BY_DEVICE)
def test_what_the_device_decodes(kind: str) -> None:
    data = BY_DEVICE[kind]()
    decode(data)  # it is an image
    for exif in (False, True):
        assert nvjpeg_pixels(data, exif=exif) == nvjpeg_pixels(memoryview(data), exif=exif) == 24 * 40


@pytest.mark.parametrize("kind", BY_CPU)
def test_what_the_cpu_decodes(kind: str) -> None:
    data = BY_CPU[kind]()
    if kind != "cut short":
        decode(data)  # it is an image
    assert nvjpeg_pixels(data) is nvjpeg_pixels(data, exif=True) is None


@pytest.mark.parametrize("orientation", range(1, 9))
def test_the_cpu_decodes_what_is_to_be_turned(orientation: int) -> None:
    data = saved(orientation=orientation)
    assert jpeg_orientation(data) == orientation
    assert nvjpeg_pixels(data) == 24 * 40
    assert nvjpeg_pixels(data, exif=True) == (24 * 40 if orientation == 1 else None)


def frame(
    marker: int = 0xC0, precision: int = 8, samplings: tuple[int, ...] = (0x22, 0x11, 0x11), height: int = 2
) -> bytes:
    components = b"".join(bytes([i + 1, s, 0]) for i, s in enumerate(samplings))
    body = bytes([precision, 0, height, 0, 3, len(samplings)]) + components
    return b"\xff\xd8\xff" + bytes([marker]) + (len(body) + 2).to_bytes(2, "big") + body + b"\xff\xd9"


@pytest.mark.parametrize(
    ("data", "num_pixels"),
    [
        (frame(), 6),
        (frame(0xC2), 6),
        (frame(samplings=(0x11,)), 6),
        (frame(samplings=(0x41, 0x11, 0x11)), 6),
        (b"\xff\xd8\xff" + frame()[2:], 6),  # a fill byte
        (frame(0xC1), None),  # extended
        (frame(0xC3), None),  # lossless
        (frame(0xC9), None),  # arithmetic
        (frame(precision=12), None),
        (frame(height=0), None),  # told behind the first scan
        (frame(samplings=(0x22, 0x11, 0x11, 0x22)), None),  # CMYK
        (frame(samplings=(0x31, 0x11, 0x11)), None),
        (frame(samplings=(0x22, 0x21, 0x11)), None),
        (frame(samplings=(0x22,)), None),
        (frame()[:-1], None),
        (b"\xff\xd8\xff\xd9", None),
        (b"", None),
        (b"\x89PNG\r\n\x1a\n", None),
    ],
)
def test_the_header_says_what_nvjpeg_can_take(data: bytes, num_pixels: int | None) -> None:
    assert nvjpeg_pixels(data) == nvjpeg_pixels(memoryview(data)) == num_pixels


def test_no_prefix_or_damage_confuses_the_header_scan() -> None:
    data = picture(0)
    assert nvjpeg_pixels(data) == 40 * 48
    rng = np.random.default_rng(0)
    for length in range(len(data)):
        assert nvjpeg_pixels(data[:length]) is None
        without_exif(data[:length])
    for _ in range(2000):
        damaged = bytearray(data)
        damaged[rng.integers(2, 200)] = rng.integers(256)
        nvjpeg_pixels(damaged)
        without_exif(damaged)


def test_an_image_without_its_exif_keeps_its_pixels_and_orientation() -> None:
    data = saved(orientation=6)
    found = without_exif(memoryview(data))
    assert found is not None and len(found) == len(data) and jpeg_orientation(bytes(found)) == 1
    assert np.array_equal(decode(found, exif=True), decode(data))
    assert decode(data, exif=True).shape == (40, 24, 3)


def test_only_segments_before_the_image_lose_their_exif() -> None:
    assert without_exif(saved()) is None
    assert without_exif(saved()[:-2] + b"Exif\0\0\xff\xd9") is None
    two = saved(orientation=6)
    end = 4 + int.from_bytes(two[4:6], "big")
    found = without_exif(two[:end] + two[2:end] + two[end:])  # the segment twice
    assert found is not None and b"Exif" not in found


def tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def only(monkeypatch: pytest.MonkeyPatch, **libraries: object) -> None:
    monkeypatch.setattr(jpeg_decoders, "LIBRARIES", libraries)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "1.0")


@pytest.mark.parametrize("bad", [(), (0,), (63,), (5, 6), (1, 30, 50), tuple(range(64))])
def test_of_a_batch_that_fails_all_good_images_are_decoded(bad: tuple[int, ...]) -> None:
    calls = []

    def library(encoded: list[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
        numbers = [int(one) for one in encoded]
        calls.append(len(numbers))
        if set(numbers) & set(bad):
            raise RuntimeError(f"one of {numbers} is damaged")
        return [one + 100 for one in encoded]

    found = BatchDecoder("one", library)([torch.tensor(number) for number in range(64)], CPU)
    assert len(found) == 64
    for number, one in enumerate(found):
        assert one == (f"one of [{number}] is damaged" if number in bad else number + 100)
    assert calls[0] == 64 and len(calls) <= 1 + 2 * 6 * len(bad)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, torch.AcceleratorError])
def test_a_device_that_fails_is_not_taken_for_a_bad_image(error: type[RuntimeError]) -> None:
    def library(encoded: list[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
        raise error("CUDA error")

    with pytest.raises(error):
        BatchDecoder("one", library)([torch.tensor(0), torch.tensor(1)], CPU)


@pytest.mark.parametrize("package", LIBRARIES)
@pytest.mark.parametrize("orientation", [1, 6])
def test_each_library_gives_stored_pixels_and_reasons_for_bad_images(
    package: str, orientation: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(package)
    monkeypatch.setattr(jpeg_decoders, "LIBRARIES", {package: LIBRARIES[package]})
    decoder = find_decoder(CPU)
    assert decoder.name == f"{package} {importlib.metadata.version(package)}"
    tags = Image.Exif()
    tags[0x0112] = orientation
    turned = picture(1)[:2] + b"\xff\xe1" + (2 + len(tags.tobytes())).to_bytes(2, "big") + tags.tobytes()
    turned += picture(1)[2:]
    assert decode(turned, exif=True).shape[:2] == ((48, 40) if orientation == 6 else (40, 48))
    images = [picture(0), turned, picture(2)[:-200], b"\xff\xd8\xff\xd9", picture(4)]
    before = [tensor(each) for each in images]
    found = decoder([each.clone() for each in before], CPU)
    for row in (0, 1, 4):
        pixels = found[row]
        assert isinstance(pixels, torch.Tensor) and pixels.dtype == torch.uint8
        difference = pixels.permute(1, 2, 0).numpy().astype(int) - decode(images[row])
        assert abs(difference).max() <= 2
    assert isinstance(found[2], str) and isinstance(found[3], str)


def test_torchcodec_comes_before_torchvision_where_it_is_installed() -> None:
    pytest.importorskip("torchcodec")
    assert list(LIBRARIES) == ["torchcodec", "torchvision"]
    assert find_decoder(CPU).name.startswith("torchcodec ")


def test_a_library_that_cannot_be_used_leaves_it_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> jpeg_decoders.BatchFunction:
        raise ModuleNotFoundError("No module named 'first'")

    def too_old() -> jpeg_decoders.BatchFunction:
        return importlib.import_module("json").decode_jpeg

    def without_nvjpeg() -> jpeg_decoders.BatchFunction:
        def library(encoded: list[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
            raise RuntimeError("not compiled with nvJPEG support")

        return library

    only(monkeypatch, first=missing, second=too_old, third=without_nvjpeg, fourth=LIBRARIES["torchvision"])
    assert find_decoder(CPU).name == "fourth 1.0"
    only(monkeypatch, first=missing, second=too_old, third=without_nvjpeg)
    with pytest.raises(ConfigError) as caught:
        find_decoder(CPU)
    for reason in ("first: No module", "second: module 'json'", "third 1.0: not compiled", "decode='cpu'"):
        assert reason in str(caught.value)


def test_another_decoder_comes_in_as_one_function(monkeypatch: pytest.MonkeyPatch) -> None:
    def by_opencv() -> jpeg_decoders.BatchFunction:
        def library(encoded: list[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
            pixels = [decode(one.numpy().tobytes()) for one in encoded]
            return [torch.from_numpy(np.ascontiguousarray(each.transpose(2, 0, 1))) for each in pixels]

        return library

    only(monkeypatch, opencv=by_opencv)
    (found,) = find_decoder(CPU)([tensor(picture(0))], CPU)
    assert isinstance(found, torch.Tensor) and found.shape == (3, 40, 48)
