"""Decoding on a CUDA device, by each library that is there, against libjpeg-turbo on the CPU."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from eager_cuda import HAS_CUDA
from encoded import by_libjpeg, decoded, encoded, saved

from raypipe.device import decoders
from raypipe.device.prefetcher import Batch, on_device
from raypipe.errors import ConfigError
from raypipe.plan.places import MicroBatchId
from raypipe.streaming.decoding import with_images
from raypipe.transform.encoded_map import DATA, MAP
from raypipe.transform.fields import MicroBatch

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("cuda_or_pretended")]

CUDA = torch.device("cuda")
LIBRARIES = dict(decoders.LIBRARIES)


@pytest.fixture(autouse=True, params=LIBRARIES if HAS_CUDA else ["pretended"])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each library that is installed."""
    if HAS_CUDA:
        pytest.importorskip(request.param)
    libraries = {request.param: LIBRARIES.get(request.param, by_libjpeg)}
    monkeypatch.setattr(decoders, "LIBRARIES", libraries)
    return request.param


def assert_close(ours: torch.Tensor, wanted: torch.Tensor) -> None:
    """Within what two lawful JPEG decoders differ by: an IDCT's rounding, and chroma that is not interpolated."""
    apart = (ours.cpu().int() - wanted.int()).abs()
    assert apart.float().mean() < 1.5 and apart.max() < 32


@pytest.mark.parametrize("transform", ["light", "center", "flip-crop"])
def test_the_device_and_libjpeg_agree_to_rounding(transform: str, library: str) -> None:
    images = [
        *(saved(i, subsampling=i % 3, quality=90) for i in range(12)),
        saved(12, progressive=True),
        saved(13, mode="L"),
    ]
    batch = encoded(images, transform, padding=1)
    ours, wanted = decoded(batch, CUDA), decoded(batch)
    assert (ours.image.device.type, ours.image.dtype, ours.failed) == (
        "cuda",
        torch.uint8,
        {},
    )
    assert ours.image.is_contiguous(memory_format=torch.channels_last)
    assert (ours.num_by_host, wanted.num_by_host) == (0, 14)
    assert_close(ours.image, wanted.image)
    assert not ours.image[14].any()
    assert torch.equal(decoded(batch, CUDA).image.cpu(), ours.image.cpu())


def test_what_the_device_does_not_decode_has_the_cpu_road_s_bits() -> None:
    upright = saved(
        5,
        exif=b"Exif\0\0II*\0\x08\0\0\0\x01\0\x12\x01\x03\0\x01\0\0\0\x06\0\0\0\0\0\0\0",
    )
    images = [
        saved(0),
        saved(1, "PNG"),
        saved(2, mode="CMYK"),
        saved(3, "WebP"),
        saved(4, keep_rgb=True),
        upright,
    ]
    batch = encoded(images, apply_exif=True)
    ours, wanted = decoded(batch, CUDA, exif=True), decoded(batch, exif=True)
    assert (ours.num_by_host, ours.failed) == (5, {})
    assert torch.equal(ours.image[1:].cpu(), wanted.image[1:])
    assert_close(ours.image, wanted.image)


def test_damaged_images_take_neither_the_others_nor_the_device_along() -> None:
    whole = saved(2)
    tables = whole.index(b"\xff\xc4") + 5
    no_table = whole[:tables] + b"\xff" * 16 + whole[tables + 16 :]
    images = [saved(i) for i in range(6)]
    batch = encoded(images)
    expected = decoded(batch, CUDA).image.cpu()
    images[3] = no_table
    found = decoded(encoded(images), CUDA)
    assert [*found.failed] == [3] and "damaged JPEG" in found.failed[3]
    kept = [0, 1, 2, 4, 5]
    assert (
        torch.equal(found.image.cpu()[kept], expected[kept])
        and not found.image[3].any()
    )


def test_batches_of_the_ring_have_the_images_that_were_decoded() -> None:
    decoder = decoders.DeviceDecoder(CUDA)

    def batches() -> Iterator[MicroBatch]:
        for step in range(8):
            batch = encoded([saved(step + i) for i in range(4)])
            yield MicroBatch(
                MicroBatchId("train", 0, step, 0),
                batch.index,
                batch.weight,
                batch.fields,
            )

    def decode_images(host: MicroBatch) -> MicroBatch:
        made = decoder(host.fields[DATA], host[MAP], host.weight > 0)  # type: ignore[arg-type]
        return with_images(host, made.image, made.ready)

    def means(ring: Iterator[Batch]) -> list[float]:
        return [round(batch.image.float().mean().item(), 3) for batch in ring]

    through = means(on_device(batches(), CUDA, lambda at: 0, decode=decode_images))
    alone = [decoded(batch, CUDA).image.float().mean().item() for batch in batches()]
    assert through == [round(mean, 3) for mean in alone] and len(set(through)) == 8


def test_a_device_without_a_decoder_is_told_with_each_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing(_: torch.device) -> None:
        raise ImportError("no such module")

    def wrong(device: torch.device) -> decoders.BoxDecoder:
        return lambda images, boxes: [
            torch.zeros((3, 16, 24), dtype=torch.uint8, device=device)
        ]

    monkeypatch.setattr(decoders, "LIBRARIES", {"one": missing, "other": wrong})
    with pytest.raises(
        ConfigError,
        match=r"one: no such module; other: its pixels .* transform\.decode='cpu'",
    ):
        decoders.DeviceDecoder(CUDA)


def test_groups_are_limited_by_the_pixels_of_the_largest() -> None:
    pixels = {0: 10, 1: 4, 2: 9, 3: 8, 4: 100}
    assert [*decoders._groups(pixels, 30, are_padded=True)] == [[1, 3], [2, 0], [4]]
    assert [*decoders._groups(pixels, 22)] == [[1, 3, 2], [0], [4]]
    assert (
        np.prod([len(group) for group in decoders._groups(pixels, 0, are_padded=True)])
        == 1
    )
