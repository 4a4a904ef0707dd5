"""Streams of views: the same bits by any way, and what a rank gets of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import without_ray

from raypipe.config import (
    AugmentConfig,
    PlanConfig,
    PoolConfig,
    RunConfig,
    TransformConfig,
)
from raypipe.device.augment import DeviceAugment, Normalize
from raypipe.device.prefetcher import on_device
from raypipe.errors import ConfigError
from raypipe.launch.run_checks import num_classes_of
from raypipe.plan.order import Domain
from raypipe.streaming.handover import loader
from raypipe.streaming.hashes import batch_hash
from raypipe.streaming.inline import inline_batches
from raypipe.streaming.maker import MicroBatchMaker
from raypipe.streaming.opening import open_stream
from raypipe.streaming.plain import plain_loaders
from raypipe.streaming.row import batches_of, block_row
from raypipe.streaming.spec import StreamSpec
from raypipe.transform.samples import read_samples
from raypipe.transform.views import view_key

VIEWS = {
    "global": {"transform": "light", "count": 2, "size": 16},
    "local": ("light", 3),
    "whole": "resize",
}
CPU = torch.device("cpu")


def spec_of(
    stores: dict[str, Path], transform: Any = VIEWS, pool: Any = None, **config: Any
) -> StreamSpec:
    return open_stream(
        stores["train"],
        stores["val"],
        plan=PlanConfig(epochs=2, micro_batch_size=6, global_batch_size=12),
        transform=TransformConfig(val="center", **{"size": 12, **config}),
        train_transform=transform,
        pool=PoolConfig(engine="inline", **(pool or {})),
    )


@pytest.fixture(scope="module")
def spec(stores: dict[str, Path]) -> StreamSpec:
    return spec_of(stores)


@pytest.fixture(scope="module")
def expected(spec: StreamSpec) -> list[bytes]:
    return without_ray.digests(spec)


def test_any_number_of_ranks_threads_and_any_start_have_the_same_bits(
    spec: StreamSpec, expected: list[bytes]
) -> None:
    start = spec.plan.start()
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
    assert len(set(expected)) > 32, "but for the validations', they all differ"


def test_a_block_is_its_micro_batches_whether_the_actor_or_a_reader_reads(
    spec: StreamSpec, expected: list[bytes]
) -> None:
    maker = MicroBatchMaker(spec)
    block = [at for at in spec.plan.micro_batches(spec.plan.start()) if at.micro == 0][
        :3
    ]
    reads = [read_samples(spec.stores["train"], spec.plan.indices(at)) for at in block]
    batches, _, arrays = maker.block(block, reads)
    assert arrays
    row = block_row(batches, arrays)
    assert {
        "view.global",
        "view.whole",
        "label",
    } <= arrays.keys() and "image" not in row
    assert row["view.global"].shape == (1, 3, 6, 2, 16, 16, 3) and row[
        "view.whole"
    ].shape == (1, 3, 6, 12, 12, 3)
    assert [batch_hash(batch) for batch in batches_of(row)] == expected[:6:2]
    assert [*next(batches_of(row)).arrays("view")] == [*VIEWS]


def test_the_digest_knows_names_and_shapes_of_views(spec: StreamSpec) -> None:
    batch = next(without_ray.host_batches(spec))
    views = batch.arrays("view")
    other = {"other": views["whole"]}
    flat = {name: view.reshape(6, -1) for name, view in views.items()}
    rest = {
        name: values
        for name, values in batch.fields.items()
        if not name.startswith("view.")
    }
    found = [
        batch_hash(
            replace(
                batch,
                fields={
                    **rest,
                    **{f"view.{name}": view for name, view in made.items()},
                },
            )
        )
        for made in (views, other, flat, {})
    ]
    assert len(set(found)) == 4


def test_a_batch_has_each_view_and_its_image_is_the_first_crop(
    spec: StreamSpec,
) -> None:
    epoch = next(loader(spec).epochs())
    batch = next(epoch.train)
    assert {name: tuple(view.shape) for name, view in batch.views.items()} == {
        "global": (6, 2, 3, 16, 16),
        "local": (6, 3, 3, 12, 12),
        "whole": (6, 3, 12, 12),
    }
    assert (
        torch.equal(batch.image, batch.views["global"][:, 0])
        and batch.image.dtype == torch.uint8
    )
    assert batch.image.data_ptr() == batch.views["global"].data_ptr()
    host = next(without_ray.host_batches(spec))
    for name, view in batch.views.items():
        assert np.array_equal(view.movedim(-3, -1).numpy(), host[f"view.{name}"])
    val = next(epoch.val)
    assert val.views == {} and val.image.shape == (6, 3, 12, 12)


def test_the_ring_carries_views_beside_validations_of_one_image(
    spec: StreamSpec,
) -> None:
    through = list(
        on_device(without_ray.host_batches(spec), CPU, lambda at: 0, keep=60, ring=True)
    )
    for batch, host in zip(through, without_ray.host_batches(spec), strict=True):
        assert batch.views.keys() == host.arrays("view").keys()
        assert batch.target.tolist() == host["label"].tolist()
        for name, view in batch.views.items():
            assert np.array_equal(view.movedim(-3, -1).numpy(), host[f"view.{name}"])
        if not host.arrays("view"):
            assert np.array_equal(batch.image.movedim(-3, -1).numpy(), host["image"])


def test_each_crop_is_augmented_under_a_seed_of_its_own_and_normalised(
    spec: StreamSpec,
) -> None:
    config = AugmentConfig(preset="strong", mean=(0.3, 0.4, 0.5))
    plain, augmented = (
        next(next(loader(spec, augment=a).epochs()).train) for a in (None, config)
    )
    augment = DeviceAugment(config, CPU)
    counts = np.ones(6, bool)
    for name, view in plain.views.items():
        crops = [view] if view.ndim == 4 else view.unbind(1)
        found = augmented.views[name]
        for number, crop in enumerate(crops):
            seed = (
                int(view_key(name, number, Domain.VIEW_ON_DEVICE, plain.seed)[0]) >> 1
            )
            alone, _ = augment(crop, plain.target, counts, seed=seed)
            assert torch.equal(alone, found if view.ndim == 4 else found[:, number])
    assert torch.equal(augmented.image, augmented.views["global"][:, 0])


def test_without_operations_views_are_normalised_in_validations_too(
    stores: dict[str, Path],
) -> None:
    config, both = AugmentConfig(), spec_of(stores)
    both = replace(both, transforms={"train": VIEWS, "val": VIEWS})
    normalize = Normalize(config, CPU)
    raw, found = (
        next(loader(both).epochs()),
        next(loader(both, augment=config).epochs()),
    )
    for plain, batch in (
        (next(raw.train), next(found.train)),
        (next(raw.val), next(found.val)),
    ):
        for name, view in batch.views.items():
            each = (
                plain.views[name].unsqueeze(1) if view.ndim == 4 else plain.views[name]
            )
            wanted = torch.stack([normalize(crop) for crop in each.unbind(1)], 1)
            assert torch.equal(view, wanted[:, 0] if view.ndim == 4 else wanted)


def returns_views(image: np.ndarray) -> dict[str, np.ndarray]:
    return {"left": image[:8, :8], "right": image[:8, -8:]}


def test_what_does_not_go_with_views_is_refused_before_the_run(
    stores: dict[str, Path], spec: StreamSpec
) -> None:
    for name in ("mixup_alpha", "cutmix_alpha"):
        with pytest.raises(
            ConfigError, match=f"augment.{name} mixes images, and no views: set it to 0"
        ):
            loader(spec, augment=AugmentConfig(**{name: 0.2}))
    with pytest.raises(
        ConfigError, match=r"transform.train makes views, and transform.targets.mask"
    ):
        spec_of(stores, targets={"mask": "seg"})
    with pytest.raises(
        ConfigError, match=r"transform.train makes views, and a run trains a classifier"
    ):
        num_classes_of(RunConfig(), spec)


def test_a_function_of_views_is_a_stream_and_is_not_mixed_either(
    stores: dict[str, Path],
) -> None:
    function = spec_of(stores, returns_views)
    batch = next(next(loader(function).epochs()).train)
    assert {name: tuple(view.shape) for name, view in batch.views.items()} == {
        "left": (6, 3, 8, 8),
        "right": (6, 3, 8, 8),
    }
    with pytest.raises(ConfigError, match="mixes images, and no views"):
        next(
            next(
                loader(function, augment=AugmentConfig(mixup_alpha=0.2)).epochs()
            ).train
        )


def test_plain_loaders_have_views_by_name(spec: StreamSpec) -> None:
    train, val = plain_loaders(loader(spec))
    batches = list(train)
    assert {"image", "target", "weight", "views"} == batches[0].keys()
    assert "views" not in next(iter(val))
