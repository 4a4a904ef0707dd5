"""What is made at once is what each sample is made alone: on any node, by any number of threads, of any file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import albumentations as A  # noqa: N812
import cv2
import numpy as np
import pytest
import simplejpeg
from image_files import saved
from jpeg_headers import exif
from micro_batches import EncodedSample, MicroBatchTransform
from torchvision.transforms import v2

from raypipe import kernel
from raypipe.config import TransformConfig
from raypipe.kernel import extension
from raypipe.transform.decode import jpeg
from raypipe.transform.sample_maker import SampleMaker

RNG = np.random.default_rng(11)


def pixels(height: int, width: int) -> np.ndarray:
    return cv2.resize(
        RNG.integers(0, 256, (7, 9, 3), np.uint8),
        (width, height),
        interpolation=cv2.INTER_CUBIC,
    )


FILES = [
    *(
        saved(pixels(*size), "JPEG", quality=90)
        for size in [(120, 90), (64, 300), (48, 48), (333, 257)]
    ),
    saved(pixels(90, 120), "JPEG", subsampling="4:4:4", progressive=True),
    saved(pixels(90, 121), "JPEG", "L"),
    saved(pixels(91, 120), "JPEG", "CMYK"),
    saved(pixels(100, 70), "JPEG", exif=exif(6)),
    saved(pixels(80, 100), "PNG"),
    saved(pixels(80, 101), "WEBP"),
    saved(pixels(200, 200), "JPEG")[:-700],  # cut short
    b"\xff\xd8\xff not a JPEG",
    b"",
    saved(pixels(700, 500), "JPEG", quality=95),
    saved(pixels(33, 35), "JPEG", restart_marker_rows=1),
    simplejpeg.encode_jpeg(pixels(64, 72), 85, "RGB", "422"),
]
# As stores have them: bytes, and views of their memory.
SAMPLES = [
    EncodedSample(memoryview(data) if number % 2 else data, number)
    for number, data in enumerate(FILES)
]
INDICES = np.arange(len(FILES))
KEYS = RNG.integers(0, 1 << 63, (len(FILES), 2)).astype(np.uint64)
GOOD = SAMPLES[0], SAMPLES[3]


@contextmanager
def without_kernel() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        for module in (kernel, extension, jpeg):
            patched.setattr(module, "why_no_kernel", lambda: "not built")
        yield


def substitutes(row: int) -> Any:
    return [(GOOD[row % 2], 100 + row % 2, (row, 1))]


def made(
    transform: Any,
    threads: int = 1,
    alone: bool = False,
    size: int = 32,
    apply_exif: bool = False,
) -> Any:
    """The arrays of a micro-batch by field, and its bad samples."""
    settings = TransformConfig(size=size, apply_exif=apply_exif)
    with pytest.MonkeyPatch.context() as patched:
        if alone:
            patched.setattr(SampleMaker, "fast", nothing_fast)
        maker = MicroBatchTransform(transform, settings, threads=threads)
        batch, bad = maker.run(SAMPLES, INDICES, KEYS, substitutes)
    fields: dict[str, Any] = batch.fields
    return {name: (part.tobytes(), part.shape) for name, part in fields.items()}, bad


def nothing_fast(self: SampleMaker, samples: Any, *_: Any) -> np.ndarray:
    return np.zeros(len(samples.labels), bool)


OTHERS: dict[str, Any] = {
    "native": A.Compose(
        [
            A.D4(),
            A.RandomResizedCrop((32, 40)),
            A.CoarseDropout(p=0.8),
            A.Posterize(p=0.5),
        ]
    ),
    "with a rest": A.Compose(
        [A.RandomResizedCrop((32, 32)), A.GaussNoise(p=1), A.HorizontalFlip()]
    ),
    "affine": A.Compose(
        [
            A.Affine(rotate=(-40, 40), shear=(-9, 9), border_mode=4, p=1),
            A.Resize(32, 32),
        ]
    ),
    "library": A.Compose([A.InvertImg(p=0.5), A.RandomResizedCrop((32, 32))]),
    "torchvision": v2.Compose(
        [v2.RandomResizedCrop(32), v2.RandomHorizontalFlip(), v2.ColorJitter(0.2)]
    ),
    "without antialias": v2.Compose(
        [v2.RandomResizedCrop((24, 30), antialias=False), v2.RandAugment()]
    ),
    "views": {
        "a": {"transform": "heavy", "count": 3},
        "b": {"transform": "center", "size": 16},
    },
}
PRESETS = ["light", "heavy", "center", "resize", "small", "simclr", "dino"]


@pytest.mark.parametrize(
    ("name", "apply_exif"),
    [*((name, False) for name in (*PRESETS, *OTHERS)), ("light", True)],
)
def test_a_micro_batch_is_the_same_with_and_without_the_kernel(
    name: str, apply_exif: bool
) -> None:
    transform = OTHERS.get(name, name)
    made_of = partial(made, transform, apply_exif=apply_exif)
    expected = made_of()
    assert {record["index"] for record in expected[1]} == {10, 11, 12}
    assert made_of(threads=2) == expected and made_of(threads=4) == expected
    assert made_of(alone=True) == expected
    with without_kernel():
        assert made_of() == expected
        assert made_of(alone=True) == expected


def test_images_too_small_for_a_crop_are_bad_samples_others_are_made() -> None:
    arrays, bad = made("flip-crop", size=64)
    small = {2, 14}  # of 48 and 33 pixels, and 64 - 2 x 4 there must be
    assert {record["index"] for record in bad} == {10, 11, 12} | small
    errors = {record["index"]: record["error"] for record in bad}
    assert all("exceeds image dimensions" in errors[index] for index in small)
    with without_kernel():
        assert made("flip-crop", size=64) == (arrays, bad)
