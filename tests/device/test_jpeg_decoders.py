"""Which library decodes JPEGs on a device, and that one bad image costs one image; on a CPU device."""

from __future__ import annotations

import importlib
import importlib.metadata

import numpy as np
import pytest
import torch
from conftest import picture
from PIL import Image

from raypipe.device import jpeg_decoders
from raypipe.device.jpeg_decoders import LIBRARIES, BatchDecoder, find_decoder
from raypipe.errors import ConfigError
from raypipe.transform.decode import decode

CPU = torch.device("cpu")


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
def test_each_library_gives_pixels_as_they_are_stored_and_reasons_for_the_others(
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
