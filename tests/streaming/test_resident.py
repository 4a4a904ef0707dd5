"""A small dataset on the device: the stream with `transform.decode: device`, whose images are decoded once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from image_files import saved
from small_streams import spec_of
from without_ray import every_batch

import raypipe
from raypipe.config import AugmentConfig, PlanConfig, TransformConfig
from raypipe.errors import ConfigError, ResourceError, StoreError
from raypipe.stores.memory import MemoryStore
from raypipe.streaming.hashes import batch_hash
from raypipe.streaming.resident import _empty, resident

PLAN = PlanConfig(epochs=3, micro_batch_size=8, global_batch_size=16, seed=5)
FLIP = {"HorizontalFlip": {"p": 0.5}}


def store_of(
    num: int = 70, sides: tuple[int, int] = (10, 12), **columns: Any
) -> MemoryStore:
    rng = np.random.default_rng(0)
    pixels = rng.integers(1, 256, (num, *sides, 3), np.uint8)
    images = [saved(image, "PNG") for image in pixels]
    return MemoryStore(images, np.arange(num) % 7, columns=columns)


def mixed_sizes() -> MemoryStore:
    wide, high = store_of(36), store_of(34, (21, 9))
    images = [*wide._images, *high._images]
    return MemoryStore(images, np.arange(70) % 7)


def box(name: str, height: int, width: int) -> dict[str, Any]:
    return {name: {"height": height, "width": width}}


def decoded_stream(
    store: MemoryStore, steps: Any, val: MemoryStore | None = None
) -> raypipe.StreamSpec:
    """A stream that decodes each image on the device."""
    return spec_of(
        store,
        val,
        plan=PLAN,
        transform=TransformConfig(decode="device"),
        train_transform=steps,
        val_transform=[box("Resize", 16, 16)] if val else "",
    )


PAD = {"Pad": {"padding": 2}}
CASES = {
    "as stored": ({}, store_of, [box("CenterCrop", 10, 12)]),
    "flip": ({"flip": 0.5}, store_of, [box("CenterCrop", 10, 12), FLIP]),
    "crops": (
        {"border": 2, "flip": 0.5},
        store_of,
        [PAD, box("RandomCrop", 10, 12), FLIP],
    ),
    "resized": ({"size": 16}, mixed_sizes, [box("Resize", 16, 16)]),
    "all": (
        {"size": 16, "border": 2, "flip": 0.5},
        mixed_sizes,
        [box("Resize", 16, 16), PAD, box("RandomCrop", 16, 16), FLIP],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_digest_is_that_of_the_stream_with_decode_device(case: str) -> None:
    options, make, steps = CASES[case]
    data = resident(make(), plan=PLAN, **options)
    spec = decoded_stream(make(), steps)
    assert data.plan.fingerprint == spec.plan.fingerprint and len(data) == 70
    num = 0
    for expected, found in zip(
        raypipe.loader(spec).epochs(), data.loader.epochs(), strict=True
    ):
        for one, other in zip(expected.train, found.train, strict=True):
            assert other.position == one.position and other.seed == one.seed
            assert batch_hash(other) == batch_hash(one)
            assert other.ends_step == one.ends_step
            assert other.image.is_contiguous(memory_format=torch.channels_last)
            num += 1
    assert num == 3 * 8


def test_validation_augmentation_and_recorded_digests_are_those_too(
    tmp_path: Path,
) -> None:
    config = AugmentConfig(preset="light", mixup_alpha=0.4)
    options, make, steps = CASES["all"]
    spec = decoded_stream(make(), steps, store_of(19))
    streamed = raypipe.loader(
        spec, augment=config, run_dir=tmp_path / "stream", log_digest=True
    )
    data = resident(
        make(),
        val=store_of(19),
        plan=PLAN,
        augment=config,
        run_dir=tmp_path / "resident",
        log_digest=True,
        **options,
    )
    hashes = []
    for loader, name in ((streamed, "stream"), (data.loader, "resident")):
        of_run = [batch_hash(batch) for batch in every_batch(loader)]
        loader.close()
        records = (tmp_path / name / "digests").glob("epoch-*.jsonl")
        lines = [
            line
            for path in sorted(records)
            for line in path.read_text().splitlines()
            if "start" not in line
        ]
        assert len(lines) == 3 * (8 + 4)
        hashes.append((of_run, lines))
    assert hashes[0] == hashes[1] and len(hashes[0][0]) == 3 * (8 + 4)


def test_a_rank_has_its_share_and_an_epoch_may_begin_at_a_step() -> None:
    data = resident(store_of(), plan=PLAN, rank=1, world_size=2)
    places = [batch.position for batch in data.epoch(1, step=2)]
    assert [(place.step, place.micro) for place in places] == [(2, 1), (3, 1)]
    with pytest.raises(
        ConfigError, match=r"epoch 3, step 0 is not in a plan of 3 epochs of 4 steps"
    ):
        next(data.epoch(3))


def test_images_are_resized_where_a_size_is_given_and_else_must_agree() -> None:
    plan = PlanConfig(epochs=1, micro_batch_size=2)
    with pytest.raises(
        ConfigError, match=r"sample 36 has \(21, 9\) pixels.*size=32\) resizes"
    ):
        resident(mixed_sizes(), plan=plan)
    assert resident(mixed_sizes(), plan=plan, size=16).images.shape == (70, 3, 16, 16)


def test_what_cannot_be_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = MemoryStore(
        [saved(np.zeros((4, 4, 3), np.uint8), "PNG"), b"nothing"], range(2)
    )
    plan = PlanConfig(epochs=1, micro_batch_size=2)
    with pytest.raises(
        StoreError, match=r"sample 1 cannot be used, .*`raypipe verify`"
    ):
        resident(broken, plan=plan)
    with pytest.raises(
        ConfigError,
        match=r"border must be at least 0, and flip from 0 to 1, got 0 and 2",
    ):
        resident(store_of(), plan=plan, flip=2)
    with pytest.raises(ConfigError, match=r"plan\.buckets need a stream"):
        resident(
            store_of(), plan=PlanConfig(epochs=1, micro_batch_size=2, buckets=["8x8"])
        )
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (20_000, 1 << 30))
    with pytest.raises(
        ResourceError, match=r"70 images of 12x10 take 0\.0 GB of the GPU's memory"
    ):
        _empty(71, (10, 12), torch.device("cuda", 0))


def test_samples_that_are_left_out_are_neither_read_nor_drawn() -> None:
    store = store_of(use=np.arange(70) % 2)
    store._images[0] = b"nothing"
    data = resident(store, plan=PLAN, filter="use == 1", border=1)
    assert len(data) == 35 and data.images.shape == (70, 3, 10, 12)
    indices = np.concatenate([batch.index for batch in data.epoch(0)])
    assert (indices % 2 == 1).all() and not data.images[0].any()
    (whole,) = data.whole(64)
    assert whole.index.tolist() == list(range(1, 70, 2)) and whole.target.tolist() == [
        i % 7 for i in range(1, 70, 2)
    ]


def test_a_store_without_a_target_has_none() -> None:
    data = resident(store_of(), plan=PLAN, target_column=None)
    assert data.targets is None and next(data.epoch(0)).image.dtype == torch.uint8
