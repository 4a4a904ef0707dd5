from __future__ import annotations

import pickle
import random
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import albumentations as A  # noqa: N812
import cv2
import numpy as np
import pytest
import torch
import torchvision
from albumentations.pytorch import ToTensorV2
from micro_batches import (
    Candidate,
    EncodedSample,
    MicroBatchTransform,
    run,
    samples_of,
    transform_of,
)
from ray import cloudpickle
from torchvision.transforms import v2

from raypipe.config import TransformConfig
from raypipe.errors import ConfigError, SampleError
from raypipe.streaming.maker import NUM_SUBSTITUTES
from raypipe.transform.decode.rgb import encode_jpeg
from raypipe.transform.fields import MicroBatch
from raypipe.transform.sample_transform import SampleTransform
from raypipe.transform.samples import NO_LABEL, WRONG_LABEL

NO_VALUE = "no value: it is missing, cannot be read, or has over 512 MiB"
RNG = np.random.default_rng(0)
IMAGES = [
    cv2.resize(RNG.integers(0, 256, (5, 7, 3), dtype=np.uint8), (int(w), int(h)))
    for h, w in RNG.integers(40, 80, (12, 2))
]
FORWARD = range(len(IMAGES))
NOISE = RNG.integers(0, 256, (48, 48, 3), dtype=np.uint8)


def make_keys(num: int, seed: int = 0) -> np.ndarray:
    return (
        np.random.SeedSequence(seed).generate_state(2 * num, np.uint64).reshape(num, 2)
    )


def noisy_with_rng(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return image ^ rng.integers(0, 256, image.shape, dtype=np.uint8)


def noisy_with_generator(
    image: np.ndarray, *, generator: np.random.Generator
) -> np.ndarray:
    return noisy_with_rng(image, generator)


def noisy_by_globals(image: np.ndarray) -> np.ndarray:
    mask = np.full(image.shape, random.randrange(256), np.uint8)
    mask ^= np.random.randint(0, 256, image.shape).astype(np.uint8)
    mask ^= torch.randint(0, 256, image.shape, dtype=torch.uint8).numpy()
    return image ^ mask ^ cv2.randu(np.zeros(image.shape, np.uint8), 0, 256)


def by_globals_of_a_step(image: np.ndarray, **_: Any) -> np.ndarray:
    return noisy_by_globals(image)


ALBUMENTATIONS = {
    "one of": lambda: A.OneOf(
        [A.HorizontalFlip(p=1), A.MotionBlur(p=1), A.InvertImg(p=1)], p=0.9
    ),
    "some of": lambda: A.SomeOf(
        [A.HorizontalFlip(p=1), A.VerticalFlip(p=1), A.GaussNoise(p=1)], n=2, p=0.9
    ),
    "random order": lambda: A.RandomOrder(
        [A.HorizontalFlip(p=0.5), A.GaussNoise(p=0.5)], n=2
    ),
    "nested": lambda: A.Sequential(
        [A.OneOf([A.Compose([A.GaussNoise(p=1)]), A.RandomRotate90(p=1)], p=1)], p=0.8
    ),
}
OTHERS: dict[str, Callable[[], Any]] = {
    "torchvision v2": lambda: v2.Compose(
        [
            v2.RandomResizedCrop(32),
            v2.RandomHorizontalFlip(),
            v2.ColorJitter(0.2, 0.2, 0.2, 0.1),
        ]
    ),
    "torchvision v2 single": lambda: v2.RandomResizedCrop((24, 24), antialias=True),
    "torchvision v1": lambda: torchvision.transforms.Compose(
        [
            torchvision.transforms.RandomResizedCrop(32),
            torchvision.transforms.RandomChoice(
                [torch.nn.Identity(), v2.RandomVerticalFlip(1.0)]
            ),
        ]
    ),
    "module": lambda: torch.nn.Sequential(v2.RandomCrop(30), v2.RandAugment()),
    "a step alone": lambda: A.GaussNoise(p=1),
    "plain with rng": lambda: noisy_with_rng,
    "plain with generator": lambda: noisy_with_generator,
    "plain": lambda: noisy_by_globals,
    "plain in albumentations": lambda: A.Compose(
        [A.HorizontalFlip(), A.OneOf([A.Lambda(by_globals_of_a_step)])]
    ),
}
ALL = {
    **{name: (lambda m=m: A.Compose([m()])) for name, m in ALBUMENTATIONS.items()},
    **OTHERS,
}


def results(transform: SampleTransform, order: Any, seed: int = 0) -> list[Any]:
    """Pixels for every image of IMAGES, made in the given order, listed by image."""
    keys, made = make_keys(len(IMAGES), seed), {}
    for at in order:
        made[at] = transform(IMAGES[at].copy(), tuple(keys[at])).tolist()
    return [made[at] for at in FORWARD]


@pytest.mark.parametrize("name", ALL)
def test_result_depends_on_pixels_transform_and_key_and_never_on_history(
    name: str,
) -> None:
    transform = SampleTransform(ALL[name]())
    expected = results(transform, FORWARD)
    assert results(transform, reversed(FORWARD)) == expected
    shuffled = np.random.default_rng(3).permutation(len(IMAGES)).tolist()
    assert results(transform, shuffled) == expected
    for other in (ALL[name](), pickle.loads(cloudpickle.dumps(ALL[name]()))):
        assert results(SampleTransform(other), FORWARD) == expected
    assert results(transform, FORWARD, seed=1) != expected


@pytest.mark.parametrize(
    ("transform", "message"),
    [
        (
            lambda image: image.astype("int32"),
            r"int32 of shape \(48, 48, 3\); it must return uint8 HWC .* floats",
        ),
        (
            lambda image: image[:, :, 0],
            r"uint8 of shape \(48, 48\); it must return uint8 HWC",
        ),
        (lambda image: image[:0], r"uint8 of shape \(0, 48, 3\)"),
        (lambda image: {"image": image}, "a dict; it must return uint8 HWC"),
        (lambda image: image[:, :, :2] / 255, r"float64 of shape \(48, 48, 2\)"),
        (
            v2.Lambda(lambda image: image.int()),
            r"int32 of shape \(3, 48, 48\); it must return uint8 CHW",
        ),
        (v2.Compose([v2.ToPILImage(), v2.Grayscale(1)]), "a PIL image of mode L; it"),
        (v2.Grayscale(1), r"uint8 of shape \(1, 48, 48\)"),
    ],
)
def test_a_result_of_the_wrong_kind_is_a_config_error(
    transform: Any, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        SampleTransform(transform)(NOISE.copy(), (1, 2))
    with pytest.raises(ConfigError, match=message):
        # not a bad sample, whatever the policy
        batch(transform_of(transform), [encode_jpeg(NOISE)])


def test_what_cannot_be_called_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="the transform is a list"):
        SampleTransform([A.HorizontalFlip()])  # type: ignore[arg-type]


# --- micro-batches

FLIP = A.Compose([A.RandomCrop(32, 32), A.HorizontalFlip(p=0.5), A.GaussNoise(p=0.5)])
JPEGS = [encode_jpeg(image) for image in IMAGES]
KEYS = make_keys(100, seed=7)
STRICT = TransformConfig(max_bad_fraction=0)


def batch(
    transform: MicroBatchTransform,
    images: Sequence[bytes | None],
    *more: Any,
    **options: Any,
) -> tuple[MicroBatch, list[dict[str, Any]]]:
    """A micro-batch of images, under KEYS, and the records of its bad samples."""
    return run(transform, samples_of(images), KEYS, *more, **options)


def substitutes(row: int) -> Iterator[Candidate]:
    """Of each row, the first two are bad as well."""
    for number in range(NUM_SUBSTITUTES):
        index = 50 + (row + number) % 12
        k0, k1 = KEYS[index].tolist()
        yield (
            EncodedSample(b"bad" if number < 2 else JPEGS[index - 50], index * 10),
            index,
            (k0, k1),
        )


def test_a_micro_batch_is_one_array_of_its_samples_in_order() -> None:
    found, bad = batch(transform_of(FLIP), JPEGS[:8])
    assert found["image"].shape == (8, 32, 32, 3) and found["image"].dtype == np.uint8
    assert found["image"].flags.c_contiguous
    assert (
        found["label"].tolist() == list(range(0, 24, 3))
        and found["label"].dtype == np.int64
    )
    assert found.index.tolist() == list(range(20, 28)) and found.index.dtype == np.int64
    assert found.weight.tolist() == [1] * 8 and found.weight.dtype == np.float32
    assert bad == []
    one_by_one = transform_of(FLIP)
    for at in (5, 2, 7, 0):
        alone, _ = run(one_by_one, samples_of(JPEGS[at : at + 1]), KEYS[at : at + 1])
        np.testing.assert_array_equal(alone["image"][0], found["image"][at])


def test_padding_is_black_and_weighs_nothing_and_is_never_decoded() -> None:
    found, bad = batch(transform_of(FLIP), JPEGS[:3], padding=2)
    assert found.weight.tolist() == [1, 1, 1, 0, 0]
    assert found["label"].tolist() == [0, 3, 6, 0, 0]
    assert found.index.tolist() == [20, 21, 22, -1, -1]
    assert not found["image"][3:].any() and found["image"][:3].any()
    assert bad == []


@pytest.mark.parametrize(
    "transform", [FLIP, v2.Resize((32, 32)), None], ids=["A", "v2", "none"]
)
def test_padding_alone_has_the_shape_that_the_others_have(transform: Any) -> None:
    good, _ = batch(transform_of(transform), JPEGS[:1])
    found, _ = batch(
        transform_of(
            transform, probe=lambda: map(EncodedSample, [b"", None, JPEGS[0]])
        ),
        [],
        padding=4,
    )
    assert (
        found["image"].shape == (4, *good["image"].shape[1:])
        and not found["image"].any()
    )
    assert found["label"].tolist() == [0] * 4 and found.index.tolist() == [-1] * 4


def test_padding_alone_of_unknown_size_is_a_config_error() -> None:
    for transform in (None, A.Compose([A.HorizontalFlip()])):
        with pytest.raises(ConfigError, match="no readable sample"):
            batch(
                transform_of(transform, probe=lambda: [EncodedSample(b"")]),
                [],
                padding=2,
            )


def test_a_sample_of_another_size_is_a_config_error_with_both_sizes() -> None:
    images = [np.zeros((20, 30, 3), np.uint8), np.zeros((20, 31, 3), np.uint8)]
    with pytest.raises(
        ConfigError,
        match=r"x.lmdb sample 21: .*\(20, 31, 3\).*\(20, 30, 3\).*crop or resize",
    ):
        batch(
            transform_of(None, store_address="x.lmdb"), [encode_jpeg(i) for i in images]
        )


def test_substitution_is_the_same_every_time_and_recorded() -> None:
    given = [JPEGS[0], None, JPEGS[2], b"", JPEGS[4]]
    named: dict[str, Any] = {"store_address": "x.lmdb", "sample_name": "key {}".format}
    transform = transform_of(FLIP, **named)
    (first, bad), again = (batch(transform, given, substitutes) for _ in range(2))
    for other, others_bad in (
        again,
        batch(transform_of(FLIP, **named), given, substitutes),
    ):
        np.testing.assert_array_equal(first["image"], other["image"])
        assert bad == others_bad
    assert first.index.tolist() == [20, 53, 22, 55, 24]
    assert first["label"].tolist() == [0, 530, 6, 550, 12]
    assert first.weight.tolist() == [1] * 5
    reasons = {21: (53, NO_VALUE), 23: (55, "empty value (0 bytes)")}
    assert bad == [
        {
            "store": "x.lmdb",
            "index": i,
            "name": f"key {i}",
            "substitute": by,
            "error": error,
            "fault": "store",
        }
        for i, (by, error) in reasons.items()
    ]
    alone, _ = run(transform_of(FLIP), samples_of(JPEGS[3:4]), KEYS[53:54])
    # pixels under its own key
    np.testing.assert_array_equal(first["image"][1], alone["image"][0])


def test_an_excluded_sample_is_a_bad_one_and_no_substitute() -> None:
    excluded = {21: "it crashed", 50: "so did this"}

    def stand_ins(row: int) -> Iterator[Candidate]:
        return (
            (EncodedSample(JPEGS[0]), 50 + number, (1, 2))
            for number in range(NUM_SUBSTITUTES)
        )

    found, bad = batch(transform_of(None), [JPEGS[0]] * 3, stand_ins, excluded=excluded)
    assert found.index.tolist() == [20, 51, 22]
    assert [(r["index"], r["substitute"], r["error"]) for r in bad] == [
        (21, 51, "it crashed")
    ]


def test_a_label_that_is_none_makes_a_bad_sample() -> None:
    samples = [EncodedSample(JPEGS[0], NO_LABEL), EncodedSample(JPEGS[1], -1)]
    found, ((record),) = run(transform_of(FLIP, exact=True), samples, KEYS)
    assert found["label"].tolist() == [0, -1] and record["error"] == WRONG_LABEL


def test_bad_substitutes_end_after_some_attempts() -> None:
    asked = []

    def hopeless(row: int) -> Iterator[Candidate]:
        for number in range(NUM_SUBSTITUTES):
            asked.append((row, number))
            yield EncodedSample(b"worse"), 90 + number, (0, 0)

    message = f"x.lmdb sample 21: {NO_VALUE}; 8 substitutes were bad as well, the last"
    with pytest.raises(SampleError, match=message):
        batch(transform_of(FLIP, store_address="x.lmdb"), [JPEGS[0], None], hopeless)
    assert asked == [(1, attempt) for attempt in range(NUM_SUBSTITUTES)]


def test_a_validation_keeps_the_row_of_a_bad_sample_at_weight_zero() -> None:
    given = [None, JPEGS[1], JPEGS[2][:-50], JPEGS[3]]
    found, bad = batch(
        transform_of(FLIP, store_address="x", exact=True), given, substitutes
    )
    assert found.weight.tolist() == [0, 1, 0, 1]
    assert found.index.tolist() == [20, 21, 22, 23]
    assert found["label"].tolist() == [0, 3, 0, 9]  # one that cannot be read has none
    images = found["image"]
    assert not images[[0, 2]].any() and images[1].any() and images[3].any()
    assert [(record["index"], record["substitute"]) for record in bad] == [
        (20, None),
        (22, None),
    ]
    assert bad[1]["error"].startswith("truncated JPEG")
    nothing_good, _ = batch(
        transform_of(FLIP, exact=True, probe=lambda: map(EncodedSample, JPEGS)),
        [None, b""],
    )
    assert (
        nothing_good["image"].shape == (2, 32, 32, 3) and not nothing_good.weight.any()
    )


@pytest.mark.parametrize("exact", [False, True])
def test_raise_names_store_index_and_reason(exact: bool) -> None:
    transform = transform_of(
        FLIP,
        STRICT,
        store_address="x.lmdb",
        sample_name="key {}".format,
        exact=exact,
    )
    with pytest.raises(
        SampleError,
        match=r"^x.lmdb sample 21 \(key 21\): not an image: starts with 6e 6f .*max_bad_fraction",
    ):
        batch(transform, [JPEGS[0], b"no"], substitutes)


def test_an_exception_of_a_users_transform_is_a_named_bad_sample() -> None:
    def picky(image: np.ndarray) -> np.ndarray:
        if image.shape == IMAGES[1].shape:
            raise LookupError("not this one")
        return image[:32, :32]

    _, (bad,) = batch(transform_of(picky), JPEGS[:3], substitutes)
    assert bad["fault"] == "transform"
    assert re.search(
        r"^the transform failed at .*test_batch\.py:\d+ in picky: LookupError: not th",
        bad["error"],
    )
    too_small = transform_of(A.Compose([A.RandomCrop(500, 500)]), STRICT)
    with pytest.raises(
        SampleError,
        match=r"sample 20: the transform failed at .*: Crop size .* exceeds image dimensions",
    ):
        batch(too_small, JPEGS[:1])


@pytest.mark.parametrize(
    ("transform", "expected"),
    [
        (lambda image: image / 255, NOISE / 255),
        (lambda image: torch.from_numpy(image).permute(2, 0, 1) / 255, NOISE / 255),
        (lambda image: torch.from_numpy(image).permute(2, 0, 1), NOISE),
        (lambda image: image[:, :, :1].astype(np.float16), NOISE[:, :, :1]),
        (A.Compose([A.ToFloat(), ToTensorV2()]), NOISE / 255),
        (
            torchvision.transforms.Compose([torchvision.transforms.ToTensor()]),
            NOISE / 255,
        ),
    ],
)
def test_floats_and_tensors_are_taken_as_they_are(
    transform: Any, expected: np.ndarray
) -> None:
    made = SampleTransform(transform)(NOISE.copy(), (1, 2))
    assert made.dtype == (
        np.float32 if expected.dtype.kind == "f" or made.shape[2] == 1 else np.uint8
    )
    np.testing.assert_allclose(made, expected, atol=1e-6)
