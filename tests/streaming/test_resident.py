"""A small dataset on the device: the order, keys and seeds of a stream with its plan, cropped and flipped."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import kornia.augmentation as K  # noqa: N812
import numpy as np
import pytest
import torch
from PIL import Image

import raypipe
from raypipe.config import AugmentConfig, PlanConfig, PoolConfig, TransformConfig
from raypipe.device.prefetcher import Batch
from raypipe.errors import ConfigError, ResourceError, StoreError
from raypipe.stores.memory import MemoryStore
from raypipe.streaming.resident import resident

PLAN = PlanConfig(epochs=3, micro_batch_size=8, global_batch_size=16, seed=5)


def png(pixels: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def store_of(
    num: int = 70, sides: tuple[int, int] = (10, 12), **columns: Any
) -> MemoryStore:
    rng = np.random.default_rng(0)
    images = [png(rng.integers(1, 256, (*sides, 3), np.uint8)) for _ in range(num)]
    return MemoryStore(images, np.arange(num) % 7, columns=columns)


def test_order_keys_and_seeds_are_those_of_a_stream_with_the_plan() -> None:
    store = store_of()
    data = resident(store, plan=PLAN)
    spec = raypipe.open_stream(
        store,
        plan=PLAN,
        transform=TransformConfig(train="none"),
        pool=PoolConfig(engine="inline"),
    )
    assert data.plan.fingerprint == spec.plan.fingerprint and len(data) == 70
    for epoch in raypipe.loader(spec).epochs():
        for streamed, found in zip(epoch.train, data.epoch(epoch.number), strict=True):
            assert found.position == streamed.position and found.seed == streamed.seed
            assert (
                found.ends_step == streamed.ends_step
                and (found.index == streamed.index).all()
            )
            assert torch.equal(found.target, streamed.target) and torch.equal(
                found.image, streamed.image
            )
            assert found.image.is_contiguous(memory_format=torch.channels_last)


def test_crops_and_flips_are_pieces_of_padded_images_drawn_by_key() -> None:
    data = resident(store_of(), plan=PLAN, border=2, flip=0.5)
    assert data.images.shape == (70, 3, 10, 12)
    padded = torch.nn.functional.pad(data.images, (2, 2, 2, 2))
    places, flips = set(), 0
    for batch in (batch for number in range(3) for batch in data.epoch(number)):
        for row, index in enumerate(batch.index.tolist()):
            pieces = {
                (y, x, turned): piece.flip(2) if turned else piece
                for y in range(5)
                for x in range(5)
                for turned in (False, True)
                for piece in [padded[index, :, y : y + 10, x : x + 12]]
            }
            (found,) = (
                place
                for place, piece in pieces.items()
                if torch.equal(piece, batch.image[row])
            )
            places.add(found[:2])
            flips += found[2]
    assert len(places) == 25 and flips / (3 * 64) == pytest.approx(0.5, abs=0.12)
    none = resident(store_of(), plan=PLAN, border=2)
    again = resident(store_of(), plan=PLAN, border=2, flip=1.0)
    for one, other in zip(none.epoch(1), again.epoch(1), strict=True):
        assert torch.equal(one.image.flip(3), other.image)


@pytest.mark.parametrize("world_size", [1, 2])
def test_ranks_share_an_epoch_and_a_resume_is_its_rest(world_size: int) -> None:
    whole = {
        batch.position: batch
        for batch in resident(store_of(), plan=PLAN, border=1, flip=0.5).epoch(1)
    }
    found: dict[Any, Batch] = {}
    for rank in range(world_size):
        data = resident(
            store_of(), plan=PLAN, border=1, flip=0.5, rank=rank, world_size=world_size
        )
        mine = list(data.epoch(1))
        assert all(batch.position.micro % world_size == rank for batch in mine)
        assert sum(batch.ends_step for batch in mine) == data.plan.steps_per_epoch
        rest = list(data.epoch(1, step=2))
        assert [batch.position for batch in rest] == [
            at.position for at in mine if at.position.step >= 2
        ]
        found |= {batch.position: batch for batch in rest} | {
            at.position: at for at in mine
        }
    assert found.keys() == whole.keys()
    assert all(torch.equal(found[at].image, batch.image) for at, batch in whole.items())
    with pytest.raises(ConfigError, match=r"use 1, 2 workers"):
        resident(store_of(), plan=PLAN, world_size=3)
    with pytest.raises(
        ConfigError, match=r"epoch 3, step 0 is not in a plan of 3 epochs of 4 steps"
    ):
        next(data.epoch(3))


def test_a_module_and_a_configuration_augment_it_as_a_loader_does() -> None:
    data = resident(
        store_of(),
        plan=PLAN,
        augment=torch.nn.Sequential(K.RandomInvert(p=0.5), K.RandomAffine(20.0)),
    )
    plain = resident(store_of(), plan=PLAN)
    module = torch.nn.Sequential(K.RandomInvert(p=0.5), K.RandomAffine(20.0))
    for batch, raw in zip(data.epoch(2), plain.epoch(2), strict=True):
        torch.manual_seed(batch.seed)
        assert torch.equal(batch.image, module(raw.image.float() * (1 / 255)))
    config = AugmentConfig(mixup_alpha=0.4, preset="light")
    mixed = resident(store_of(), plan=PLAN, augment=config, dtype=torch.bfloat16)
    batch = next(mixed.epoch(0))
    assert batch.mix is not None and batch.image.dtype == torch.bfloat16
    whole = list(mixed.whole(32))
    assert [len(batch.image) for batch in whole] == [32, 32, 6] and whole[2].mix is None
    assert np.concatenate([batch.index for batch in whole]).tolist() == list(range(70))
    assert torch.equal(
        torch.cat([batch.target for batch in whole]), torch.arange(70) % 7
    )


def test_images_are_resized_where_a_size_is_given_and_else_must_agree() -> None:
    store = store_of()
    images = store.read(np.arange(3), ("image",))["image"]
    odd = MemoryStore([*images, png(np.zeros((9, 9, 3), np.uint8))], range(4))
    plan = PlanConfig(epochs=1, micro_batch_size=2)
    with pytest.raises(
        ConfigError, match=r"sample 3: .*\(9, 9, 3\).*size=32\) resizes"
    ):
        resident(odd, plan=plan)
    assert resident(odd, plan=plan, size=16).images.shape == (4, 3, 16, 16)


def test_what_cannot_be_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    broken = MemoryStore([png(np.zeros((4, 4, 3), np.uint8)), b"nothing"], range(2))
    plan = PlanConfig(epochs=1, micro_batch_size=2)
    with pytest.raises(
        StoreError, match=r"sample 1.* cannot be used: .*`raypipe verify`"
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
    from raypipe.streaming.resident import _empty

    with pytest.raises(
        ResourceError, match=r"70 images of 12x10 take 0\.0 GB of the GPU's memory"
    ):
        _empty(70, (10, 12, 3), 2, torch.device("cuda", 0))


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
    assert data.targets is None and data.epoch(0).__next__().image.dtype == torch.uint8
