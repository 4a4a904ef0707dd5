"""Streams whose images travel as planes: the same bits by any way, and RGB for whoever looks at them."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import without_ray
from bucketed import spec_of as in_buckets
from signalled import own_processes

from raypipe.commands.preview_tiles import Preview
from raypipe.config import AugmentConfig, PlanConfig, PoolConfig, TransformConfig
from raypipe.device.prefetcher import Batch, on_device
from raypipe.kernel import yuv420
from raypipe.streaming.digest import iterate_digests, plain_settings
from raypipe.streaming.handover import loader
from raypipe.streaming.hashes import batch_hash
from raypipe.streaming.inline import inline_batches
from raypipe.streaming.maker import MicroBatchMaker
from raypipe.streaming.opening import open_stream
from raypipe.streaming.pipeline import splits
from raypipe.streaming.plain import plain_loaders
from raypipe.streaming.row import batches_of, block_row
from raypipe.streaming.spec import StreamSpec

CPU = torch.device("cpu")
VIEWS = {"global": {"transform": "light", "count": 2, "size": 15}, "whole": "resize"}
KINDS: dict[str, dict[str, Any]] = {
    "light": {},
    "odd": {"size": 13, "train": "heavy"},
    "sizes": {"size": {0: 9, 1: 12}},
    "views": {"train_transform": VIEWS},
    "plain": {
        "train_transform": lambda image: image[:17, :15].copy(),
        "val_transform": "center",
    },
}


def spec_of(
    stores: dict[str, Path], wire: str = "yuv420", pool: Any = None, **options: Any
) -> StreamSpec:
    transforms = {
        name: options.pop(name)
        for name in ("train_transform", "val_transform")
        if name in options
    }
    return open_stream(
        stores["train"],
        stores["val"],
        plan=PlanConfig(epochs=2, micro_batch_size=6, global_batch_size=12),
        transform=TransformConfig(
            **{"train": "light", "val": "center", "size": 12, "wire": wire, **options}
        ),
        pool=pool or PoolConfig(engine="inline"),
        **transforms,
    )


def in_rgb(spec: StreamSpec) -> list[dict[str, np.ndarray]]:
    """The images of a stream, of planes in memory."""
    return [batch.in_rgb().arrays() for batch in without_ray.host_batches(spec)]


def images_of(batch: Batch) -> dict[str, np.ndarray]:
    images = {f"view.{name}": view for name, view in batch.views.items()} or {
        "image": batch.image
    }
    return {name: image.movedim(-3, -1).numpy() for name, image in images.items()}


@pytest.fixture(params=[*KINDS])
def kind(request: pytest.FixtureRequest) -> dict[str, Any]:
    return KINDS[request.param]


def test_a_batch_has_the_images_of_the_rgb_wire_but_for_their_color(
    stores: dict[str, Path], kind: dict[str, Any]
) -> None:
    spec, in_color = spec_of(stores, **kind), spec_of(stores, "rgb", **kind)
    host = in_rgb(spec)
    batches, others = (
        list(without_ray.every_batch(loader(each))) for each in (spec, in_color)
    )
    assert len(batches) == len(others) == len(host)
    for batch, other, expected in zip(batches, others, host, strict=True):
        assert (
            batch.fields.keys() == other.fields.keys()
            and batch.image.dtype == torch.uint8
        )
        first = (
            batch.image
            if batch.image.is_contiguous(memory_format=torch.channels_last)
            else None
        )
        assert first is not None or batch.views
        assert torch.equal(batch.target, other.target) and torch.equal(
            batch.weight, other.weight
        )
        for name, image in images_of(batch).items():
            of_rgb = images_of(other)[name]
            assert np.array_equal(image, expected[name])
            assert np.array_equal(image, yuv420.rgb(*yuv420.numpy_planes(of_rgb))), (
                "padding is black"
            )


def test_blocks_in_one_memory_or_of_unlike_sizes_hold_equal_bits(
    stores: dict[str, Path],
) -> None:
    of_views, of_buckets = (
        spec_of(stores, **KINDS["views"]),
        in_buckets(wire="yuv420", size=9),
    )
    for spec, forms in ((of_views, {"array"}), (of_buckets, {"array", "flat"})):
        expected, maker = without_ray.digests(spec), MicroBatchMaker(spec)
        block = [
            at
            for at in spec.plan.micro_batches(spec.plan.start())
            if at.epoch == 0 and at.split == "train"
        ][:6]
        batches, _, arrays = maker.block(block)
        row = block_row(batches, arrays)
        assert set(json.loads(row["forms"].tobytes()).values()) == forms
        assert [batch_hash(batch) for batch in batches_of(row)] == expected[
            : len(block)
        ]


def test_any_number_of_ranks_threads_and_any_start_have_the_same_bits(
    stores: dict[str, Path], kind: dict[str, Any]
) -> None:
    spec = spec_of(stores, **kind)
    expected, start = without_ray.digests(spec), spec.plan.start()
    ranks = [
        [batch_hash(each) for each in inline_batches(spec, start, rank, 2)]
        for rank in range(2)
    ]
    assert [digest for pair in zip(*ranks, strict=True) for digest in pair] == expected
    threads = replace(spec, pool=PoolConfig(engine="inline", max_actors=2))
    resumed = [
        batch_hash(each) for each in inline_batches(threads, spec.plan.cursor_at(5))
    ]
    assert resumed == expected[10:]


def test_planes_are_half_the_bytes_and_part_of_fingerprint_and_digest(
    stores: dict[str, Path],
) -> None:
    planes, rgb = spec_of(stores), spec_of(stores, "rgb")
    batch, other = (next(without_ray.host_batches(each)) for each in (planes, rgb))
    assert (
        2 * (batch["image"].nbytes + batch["chroma.image"].nbytes)
        == other["image"].nbytes
    )
    assert planes.plan.fingerprint != rgb.plan.fingerprint
    told = plain_settings(planes, workers=1, actors=1, from_step=0, to_step=1)
    assert (
        told["transform.wire"] == "yuv420" and told["plan"] == planes.plan.fingerprint
    )
    changed = batch["chroma.image"].copy()
    changed[-1, -1, -1, -1] ^= 1
    spoilt = replace(batch, fields={**batch.fields, "chroma.image": changed})
    assert batch_hash(spoilt) != batch_hash(batch)


def test_a_ring_makes_the_same_images(stores: dict[str, Path]) -> None:
    spec = spec_of(stores, size={0: 9, 1: 12})
    moved = on_device(without_ray.host_batches(spec), CPU, lambda at: 0, ring=True)
    for batch, expected in zip(moved, in_rgb(spec), strict=True):
        assert np.array_equal(images_of(batch)["image"], expected["image"])


def test_augmentation_plain_loaders_and_checks_take_them_for_rgb(
    stores: dict[str, Path],
) -> None:
    spec = spec_of(stores)
    train, val = plain_loaders(loader(spec, augment=AugmentConfig(preset="standard")))
    for split in (train, val):
        assert {tuple(batch["image"].shape[1:]) for batch in split} == {(3, 12, 12)}


def test_a_preview_shows_rgb(stores: dict[str, Path]) -> None:
    plan, transform = (
        PlanConfig(micro_batch_size=6),
        TransformConfig(size=12, wire="yuv420"),
    )
    shown = Preview(
        open_stream(stores["train"], plan=plan, transform=transform), AugmentConfig()
    )
    batch = shown._maker.batch(next(iter(shown.plan.micro_batches(shown.plan.start()))))
    images, _, _ = shown.stages(batch)
    assert np.array_equal(images["transformed"], batch.in_rgb()["image"])
    assert np.abs(images["augmented"].astype(int) - images["transformed"]).max() <= 1


@pytest.mark.cluster
@pytest.mark.usefixtures("ray_cluster")
def test_two_ranks_with_killed_actors_have_the_digest_of_one(
    stores: dict[str, Path],
) -> None:
    spec, rng, kills = (
        spec_of(stores, pool=PoolConfig(min_actors=2, cpus_per_actor=0.5)),
        random.Random(0),
        [],
    )
    alone, ended = without_ray.digests(spec), threading.Event()

    def hurt() -> None:
        while len(kills) < 2 and not ended.wait(rng.uniform(0.1, 0.5)):
            if actors := list(own_processes("MapWorker(MapBatches(Transform")):
                os.kill(rng.choice(actors), signal.SIGKILL)
                kills.append(1)

    for workers in (1, 2):
        iterators = splits(spec, spec.plan.start(), max_actors=2, world_size=workers)
        killer = threading.Thread(target=hurt)
        killer.start()
        try:
            digests = [
                one.digest
                for one in iterate_digests(spec.plan, spec.plan.start(), iterators)
            ]
        finally:
            ended.set()
            killer.join()
            ended.clear()
        assert digests == alone, workers
