"""nvJPEG against libjpeg, on a CUDA device."""

import io
from collections.abc import Iterator, Sequence
from dataclasses import replace

import cv2
import numpy as np
import pytest
import torch
from micro_batches import cuts_to_decode, run, samples_of, to_decode, transform_of, with_fields
from PIL import Image

from raypipe.config import TransformConfig
from raypipe.device import jpeg_decoders
from raypipe.device.device_decode import DecodedMicroBatch, DeviceDecoder
from raypipe.device.prefetcher import decoded_on_device
from raypipe.plan.places import MicroBatchId
from raypipe.transform.fields import MicroBatch

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("cuda_or_pretended")]

SIZE = 96
LIBRARIES = dict(jpeg_decoders.LIBRARIES)
BOX = (0, 0, 240, 320)


@pytest.fixture(autouse=True, params=LIBRARIES)
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """By each library that is installed."""
    pytest.importorskip(request.param)
    monkeypatch.setattr(jpeg_decoders, "LIBRARIES", {request.param: LIBRARIES[request.param]})
    return request.param


def smooth(seed: int) -> np.ndarray:
    """(240, 320, 3), whose colour changes by a few levels per pixel: see `assert_close`."""
    return cv2.resize(np.random.default_rng(seed).integers(0, 256, (5, 6, 3), np.uint8), (320, 240))


def saved(seed: int, format: str = "JPEG", mode: str = "RGB", **options: object) -> bytes:
    file = io.BytesIO()
    Image.fromarray(smooth(seed)).convert(mode).save(file, format, **options)
    return file.getvalue()


def micro_batch(images: Sequence[bytes | None], preset: str = "light") -> MicroBatch:
    """Of images, and padding."""
    keys = np.random.default_rng(0).integers(0, 2**64, (len(images), 2), np.uint64)
    transform = transform_of(preset, TransformConfig(size=SIZE, decode="gpu"))
    return run(transform, samples_of(images), keys, indices=[-1 if data is None else 0 for data in images])[0]


def encoded(images: Sequence[bytes | None], preset: str = "light") -> dict[str, np.ndarray]:
    return to_decode(micro_batch(images, preset))


def both(batch: dict[str, np.ndarray]) -> tuple[DecodedMicroBatch, DecodedMicroBatch]:
    return DeviceDecoder(SIZE, "cuda").decode(**batch), DeviceDecoder(SIZE, "cpu").decode(**batch)


def assert_close(ours: torch.Tensor, wanted: torch.Tensor) -> None:
    """Within what two lawful JPEG decoders differ by.

    The standard leaves the IDCT a rounding of a level or so, which YCbCr → RGB multiplies by up to 1.8. nvJPEG
    repeats chroma samples where libjpeg interpolates: up to half a chroma step, so large only at sharp edges
    of colour, of which these images have none.
    """
    difference = (ours.cpu().int() - wanted.int()).abs()
    assert difference.float().mean() < 1.5 and difference.max() < 32


@pytest.mark.parametrize("preset", ["light", "center", "resize"])
def test_nvjpeg_and_libjpeg_agree(preset: str) -> None:
    images = [
        *(saved(i, subsampling=i % 3, quality=90) for i in range(12)),
        saved(12, progressive=True),
        saved(13, mode="L"),
        None,
    ]
    ours, wanted = both(encoded(images, preset))
    assert ours.image.device.type == "cuda" and ours.image.dtype == torch.uint8
    assert ours.image.is_contiguous(memory_format=torch.channels_last)
    assert (ours.num_fallback, ours.failed) == (0, {})
    assert_close(ours.image, wanted.image)
    assert (ours.image[13, 0] == ours.image[13, 2]).all()
    assert not ours.image[14].any()


def test_the_host_decodes_the_rest_to_the_same_pixels() -> None:
    images = [saved(0), saved(1, "PNG"), saved(2, mode="CMYK"), saved(3, "WebP"), saved(4, keep_rgb=True)]
    ours, wanted = both(encoded(images))
    assert ours.num_fallback == wanted.num_fallback == 4 and not ours.failed
    # Decoded by the same code; only the resize is another, in float32.
    assert (ours.image[1:].cpu().int() - wanted.image[1:].int()).abs().max() <= 1
    assert_close(ours.image, wanted.image)


def test_a_broken_jpeg_takes_neither_the_others_nor_the_device_along() -> None:
    good, whole = [saved(0), saved(1)], saved(2)
    at = whole.index(b"\xff\xc4") + 5
    no_table = whole[:at] + b"\xff" * 16 + whole[at + 16 :]
    scan = whole.index(b"\xff\xda") + 14
    garbage = whole[:scan] + np.random.default_rng(0).integers(0, 255, 2000, np.uint8).tobytes() + b"\xff\xd9"
    samples = [(data, BOX, False) for data in (good[0], no_table, whole[:-400], garbage, good[1])]
    ours, wanted = both(cuts_to_decode(samples))
    torch.cuda.synchronize()
    assert 2 in ours.failed and not {0, 4} & set(ours.failed)
    assert not ours.image[list(ours.failed)].any()  # `garbage` may pass: nvJPEG need not notice it
    assert_close(ours.image[[0, 4]], wanted.image[[0, 4]])
    again, _ = both(cuts_to_decode(samples[:1]))
    assert torch.equal(again.image[0], ours.image[0])


def test_among_many_only_the_broken_ones_come_to_the_host() -> None:
    """A call fails as a whole: which ones nvJPEG refuses is found by halves, and changes no other image."""
    progressive = saved(5, progressive=True)
    at = progressive.rindex(b"\xff\xc4") + 5  # behind the first scan, up to which a header goes
    broken = progressive[:at] + b"\xff" * 16 + progressive[at + 16 :]
    images = [saved(i, subsampling=i % 3) for i in range(32)]
    whole = DeviceDecoder(SIZE, "cuda").decode(**cuts_to_decode([(data, BOX, False) for data in images]))
    images[3] = images[17] = broken
    found = DeviceDecoder(SIZE, "cuda").decode(**cuts_to_decode([(data, BOX, False) for data in images]))
    others = [row for row in range(32) if row not in (3, 17)]
    assert torch.equal(found.image[others], whole.image[others])
    assert set(found.failed) <= {3, 17} and not found.image[list(found.failed)].any()
    assert found.num_fallback == len(found.failed)


def test_images_are_not_turned_by_their_exif() -> None:
    tags = Image.Exif()
    tags[0x0112] = 6
    ours = DeviceDecoder(SIZE, "cuda").decode(
        **cuts_to_decode(
            [(saved(0), BOX, False), (saved(0, exif=tags), BOX, False), (saved(1, exif=tags), BOX, False)]
        )
    )
    assert ours.num_fallback == 0 and not ours.failed
    assert torch.equal(ours.image[0], ours.image[1])


def test_the_libraries_give_the_same_images_to_a_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torchcodec")
    batch = encoded([saved(i, subsampling=i % 3) for i in range(8)])
    found = []
    for name, by in LIBRARIES.items():
        monkeypatch.setattr(jpeg_decoders, "LIBRARIES", {name: by})
        found.append(DeviceDecoder(SIZE, "cuda").decode(**batch).image)
    assert_close(found[0], found[1].cpu())


def test_a_repetition_gives_the_same_pixels_while_the_consumer_is_busy() -> None:
    """The memory of a batch that is let go while its consumer's stream still has to read it is not written to."""
    decoder = DeviceDecoder(SIZE, "cuda")
    batches = [encoded([saved(10 * b + i) for i in range(10)]) for b in range(4)]
    quiet = []
    for batch in batches:
        quiet.append(int(decoder.decode(**batch).image.long().sum()))
    sums = []
    for turn in range(40):
        image = decoder.decode(**batches[turn % 4]).image
        torch.cuda._sleep(20_000_000)  # about 10 ms before the stream comes to read it
        sums.append(image.long().sum())
        del image
    assert [int(s) for s in sums] == [quiet[turn % 4] for turn in range(40)]


def test_a_consumer_on_its_own_stream_gets_every_micro_batch_whole() -> None:
    images = [micro_batch([saved(10 * b + i) for i in range(10)]) for b in range(4)]

    def host_batches() -> Iterator[MicroBatch]:
        for step in range(16):
            at, label = MicroBatchId("train", 0, step, 0), np.full(10, step)
            yield replace(with_fields(images[step % 4], {"label": label}), position=at)

    def consumed(stream: torch.cuda.Stream) -> list[tuple[torch.Tensor, ...]]:
        kept = []
        with torch.cuda.stream(stream):
            for batch in decoded_on_device(host_batches(), DeviceDecoder(SIZE, "cuda"), lambda at: 0):
                torch.cuda._sleep(20_000_000)
                kept.append((batch.image.clone(), batch.target.clone(), batch.weight.clone()))
        torch.cuda.synchronize()
        return kept

    own, again = consumed(torch.cuda.Stream()), consumed(torch.cuda.default_stream())
    for step, (found, repeated) in enumerate(zip(own, again, strict=True)):
        assert (found[1] == step).all() and (found[2] == 1).all()
        assert torch.equal(found[0], own[step % 4][0]) and torch.equal(found[0], repeated[0])


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_a_device_that_is_not_the_current_one_decodes_the_same() -> None:
    batch = encoded([saved(i) for i in range(8)])
    second = DeviceDecoder(SIZE, "cuda:1").decode(**batch).image
    first = DeviceDecoder(SIZE, "cuda:0").decode(**batch).image
    assert second.device.index == 1 and torch.equal(first.cpu(), second.cpu())
