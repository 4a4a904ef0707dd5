"""Arrays of any dtype and channels, from the store to the device: every value stays what it is."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
import without_ray
from tars import by_suffix, write_members

import raypipe
from raypipe.commands.checked_samples import check_samples
from raypipe.commands.copies import header_sides
from raypipe.commands.inspection import describe
from raypipe.config import AugmentConfig, PlanConfig, PoolConfig, TransformConfig
from raypipe.device.augment import DeviceAugment
from raypipe.device.prefetcher import on_device
from raypipe.errors import ConfigError, SampleError
from raypipe.stores import MemoryStore, open_store
from raypipe.streaming.hashes import batch_hash
from raypipe.streaming.opening import open_stream
from raypipe.streaming.spec import StreamSpec

from pictures import picture  # isort: skip

CPU = torch.device("cpu")
NUM = 12
INLINE = PoolConfig(engine="inline")


def some(dtype: str, index: int, *shape: int) -> np.ndarray:
    values = np.random.default_rng(index).random(shape)
    return (
        values * (np.iinfo(dtype).max if np.dtype(dtype).kind in "ui" else 1000)
    ).astype(dtype)


def npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=False)
    return file.getvalue()


def store_of(dtype: str, channels: int) -> MemoryStore:
    images = [npy(some(dtype, i, 24, 20, channels)) for i in range(NUM)]
    return MemoryStore(images, np.arange(NUM) % 3, ["a", "b", "c"])


def spec_of(
    store: Any,
    train: Any = "none",
    val: Any = None,
    shuffle: Any = "auto",
    decode: Any = "array",
) -> StreamSpec:
    config = TransformConfig(decode=decode, train="none", size=16)
    plan = PlanConfig(
        epochs=1,
        micro_batch_size=4,
        shuffle=shuffle,
        val_interval=int(val is not None),
    )
    return open_stream(
        store, val, plan=plan, transform=config, pool=INLINE, train_transform=train
    )


@pytest.mark.parametrize(
    ("dtype", "channels"), [("uint16", 4), ("float32", 5), ("uint8", 1), ("int16", 2)]
)
def test_each_value_reaches_the_batch_in_its_dtype(dtype: str, channels: int) -> None:
    spec = spec_of(store_of(dtype, channels))
    num = 0
    for batch in without_ray.every_batch(raypipe.loader(spec)):
        assert batch.image.dtype == getattr(torch, dtype) and batch.image.shape == (
            4,
            channels,
            24,
            20,
        )
        for row, index in enumerate(batch.index.tolist()):
            found = batch.image[row].permute(1, 2, 0).numpy()
            np.testing.assert_array_equal(found, some(dtype, index, 24, 20, channels))
            num += 1
    assert num == NUM


@pytest.mark.parametrize("preset", ["light", "center", "resize", "flip-crop", "small"])
@pytest.mark.parametrize(
    ("dtype", "channels"), [("uint16", 4), ("float32", 4), ("uint16", 6)]
)
def test_presets_that_move_pixels_take_any_channels_and_are_seeded(
    preset: str, dtype: str, channels: int
) -> None:
    spec = spec_of(store_of(dtype, channels), train=preset)
    batches = list(without_ray.host_batches(spec))
    assert all(
        batch["image"].shape == (4, 16, 16, channels) and batch["image"].dtype == dtype
        for batch in batches
    )
    # nothing went by 8 bits, or was cut off at 1
    assert max(batch["image"].max() for batch in batches) > 255
    assert without_ray.digests(spec) == list(map(batch_hash, batches))
    made = {
        index: pixels
        for batch in batches
        for index, pixels in zip(batch.index.tolist(), batch["image"], strict=True)
    }
    if preset == "resize":
        for index, pixels in made.items():
            whole = cv2.resize(
                some(dtype, index, 24, 20, channels),
                (16, 16),
                interpolation=cv2.INTER_LINEAR,
            )
            np.testing.assert_array_equal(pixels, whole)


def test_uint8_rgb_as_an_array_has_the_pixels_and_digests_of_rgb() -> None:
    store = MemoryStore([picture(i) for i in range(NUM)], [0] * NUM)
    for train in ("center", "flip-crop", "small"):
        as_array, as_rgb = (
            spec_of(store, train=train, decode=how) for how in ("array", "cpu")
        )
        assert without_ray.digests(as_array) == without_ray.digests(as_rgb)


@pytest.mark.parametrize(
    "odd",
    [
        some("uint16", 0, 24, 20, 3),
        some("float32", 0, 24, 20, 4),
        some("uint16", 0, 24, 21, 4),
    ],
)
def test_a_sample_of_another_dtype_or_shape_ends_the_run_by_its_name(
    odd: np.ndarray,
) -> None:
    store = store_of("uint16", 4)
    store._images[7] = npy(odd)
    with pytest.raises(
        ConfigError, match=rf"sample 7.*{odd.dtype} .*uint16 \(24, 20, 4\) is expected"
    ):
        list(without_ray.host_batches(spec_of(store, shuffle="off")))


def test_a_damaged_array_is_substituted_and_one_in_a_validation_is_black() -> None:
    store = store_of("uint16", 4)
    store._images[7] = store._images[7][:-1]
    batches = list(without_ray.host_batches(spec_of(store, val=store)))
    train, val = (
        [batch for batch in batches if batch.position.split == split]
        for split in ("train", "val")
    )
    assert sum(batch.num_bad for batch in train) == 1 and 7 not in np.concatenate(
        [each.index for each in train]
    )
    (black,) = (
        batch["image"][batch.weight == 0] for batch in val if (batch.weight == 0).any()
    )
    assert black.shape == (1, 16, 16, 4) and not black.any()


def test_views_and_functions_of_another_dtype_go_with_arrays() -> None:
    store = store_of("uint16", 4)
    views = {
        "crop": {"transform": "light", "count": 2, "size": 8},
        "whole": {"transform": "none"},
    }
    augment = AugmentConfig(mean=(0.5,) * 4, std=(1.0,) * 4)
    loader = raypipe.loader(spec_of(store, train=views), augment=augment)
    seen = next(next(loader.epochs()).train)
    assert seen.views["crop"].shape == (4, 2, 4, 8, 8)
    whole = torch.from_numpy(some("uint16", int(seen.index[0]), 24, 20, 4))
    expected = whole.permute(2, 0, 1).float() / 65535 - 0.5
    torch.testing.assert_close(seen.views["whole"][0], expected)

    spec = spec_of(store, train=lambda image: image[..., 0] / np.float32(65535))
    image = next(without_ray.host_batches(spec))["image"]
    assert image.shape == (4, 24, 20, 1) and image.dtype == np.float32
    assert image.max() <= 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"apply_exif": True},
            r"transform\.apply_exif must be False with transform\.decode='array'",
        ),
        (
            {"train": "heavy"},
            r"preset 'heavy' needs uint8 RGB, and transform\.decode is 'array'",
        ),
        ({"train": "randaugment"}, r"preset 'randaugment' needs uint8 RGB"),
        ({"train": "dino"}, r"preset 'dino' needs uint8 RGB"),
        (
            {"train": {"a": {"transform": "tv-light"}}},
            r"view 'a': the preset 'tv-light' needs uint8 RGB",
        ),
    ],
)
def test_what_needs_rgb_is_refused_by_both_settings(
    settings: Any, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        config = TransformConfig(decode="array", **settings)
        open_stream(store_of("uint16", 4), transform=config)


def test_images_need_as_many_channels_as_the_mean() -> None:
    spec = spec_of(store_of("uint16", 4))
    with pytest.raises(
        ConfigError, match=r"4 channels, and augment\.mean and augment\.std are of 3"
    ):
        next(without_ray.every_batch(raypipe.loader(spec, augment=AugmentConfig())))


@pytest.mark.parametrize("ring", [False, True])
@pytest.mark.parametrize("dtype", ["uint16", "float32", "int16", "uint32", "float64"])
def test_the_device_scales_integers_by_their_largest_and_leaves_floats(
    dtype: str, ring: bool
) -> None:
    spec = spec_of(store_of(dtype, 4))
    (batch, *_) = on_device(without_ray.host_batches(spec), CPU, lambda _: 1, ring=ring)
    image = batch.image
    kept = image.numpy().copy()
    mean, std = (0.1, 0.2, 0.3, 0.4), (0.5, 1.0, 2.0, 4.0)
    largest = np.iinfo(dtype).max if np.dtype(dtype).kind in "ui" else 1
    shape = (1, 4, 1, 1)
    expected = (kept / largest - np.reshape(mean, shape)) / np.reshape(std, shape)
    augment = DeviceAugment(AugmentConfig(mean=mean, std=std), CPU)
    out, _ = augment(image, batch.target, np.ones(4, bool), seed=3)
    assert out.dtype == torch.float32
    assert out.is_contiguous(memory_format=torch.channels_last)
    np.testing.assert_allclose(out.numpy(), expected, rtol=1e-5, atol=1e-5)
    mixing = AugmentConfig(
        mean=mean, std=std, preset="light", mixup_alpha=1.0, cutmix_alpha=1.0
    )
    out, mixed = DeviceAugment(mixing, CPU)(
        image, batch.target, np.ones(4, bool), seed=3
    )
    assert mixed is not None and out.isfinite().all()
    np.testing.assert_array_equal(image.numpy(), kept)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"preset": "standard"},
            "augment.preset='standard' changes red, green and blue, and augment.mean has 4",
        ),
        (
            {"ops": [{"op": "ColorJitter", "saturation": 0.2, "p": 0.001}]},
            "ColorJitter.*on 4 channels, of which augment.mean is",
        ),
        (
            {"ops": [{"op": "RandAugment", "n": 1, "m": 5}]},
            "RandAugment needs red, green and blue",
        ),
        (
            {"ops": [{"op": "RandomGrayscale", "p": 1.0}]},
            "RandomGrayscale needs red, green and blue",
        ),
        ({"std": (1.0,)}, "augment.mean must be as many numbers as augment.std, 1"),
    ],
)
def test_operations_of_rgb_are_refused_for_other_channels(
    settings: Any, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        DeviceAugment(
            AugmentConfig(**{"mean": (0.5,) * 4, "std": (0.5,) * 4} | settings), CPU
        )


def folder_of(root: Path) -> Path:
    for i in range(4):
        path = root / f"class{i % 2}" / f"{i}.npy"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(npy(some("uint16", i, 6, 5, 4)))
    return root


def test_npy_files_are_samples_where_there_is_no_image(tmp_path: Path) -> None:
    root = folder_of(tmp_path / "arrays")
    samples = [
        {"npy": npy(some("uint16", i, 6, 5, 4)), "cls": b"%d" % (i % 2)}
        for i in range(4)
    ]
    write_members(tmp_path / "w.tar", by_suffix(samples))
    stores = [open_store(address) for address in (root, tmp_path / "w.tar")]
    for store, order in zip(stores, ([0, 2, 1, 3], range(4)), strict=True):
        assert store.read(np.arange(4), ("image",))["image"] == [
            npy(some("uint16", i, 6, 5, 4)) for i in order
        ]
        assert store.read(np.arange(4), ("label",))["label"].tolist() == [
            i % 2 for i in order
        ]
    before = None
    for extra in (
        "x.jpg",
        "x.npy",
    ):
        # beside an image an array is none, as it was before there were arrays
        (root / "class0" / extra).write_bytes(picture(1))
        store = open_store(root)
        assert len(store) == 1 and before in (None, store.fingerprint)
        before = store.fingerprint


def test_arrays_are_inspected_as_they_are_stored() -> None:
    store = store_of("uint16", 4)
    store._images[3] = store._images[3][:-1]
    samples = list(check_samples(store, np.arange(NUM)))
    assert [sample.index for sample in samples if sample.error] == [
        3
    ] and "truncated" in samples[3].error
    found = describe(store)
    assert (
        found["formats"] == {"npy": NUM}
        and found["height_px"][0] == 24
        and found["bad_samples"] == 1
    )
    image = store._images[0]
    assert header_sides(image) == {"width": 20, "height": 24}
    with pytest.raises(SampleError, match="damaged"):
        header_sides(image[:90])
