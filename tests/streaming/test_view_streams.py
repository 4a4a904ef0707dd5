"""Streams of views: the same bits by any way, and what a rank gets of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import without_ray
from small_streams import spec_of

from raypipe.config import (
    AugmentConfig,
    PlanConfig,
    RunConfig,
    TransformConfig,
)
from raypipe.device.augment import DeviceAugment
from raypipe.errors import ConfigError
from raypipe.launch.run_checks import num_classes_of
from raypipe.plan.order import Domain
from raypipe.streaming.handover import loader
from raypipe.streaming.spec import StreamSpec
from raypipe.transform.views import view_key

Stores = dict[str, Path]

VIEWS = {
    "global": {"transform": "light", "count": 2, "size": 16},
    "local": ("light", 3),
    "whole": "resize",
}
CPU = torch.device("cpu")


def views_of(stores: Stores, **config: Any) -> StreamSpec:
    return spec_of(
        stores["train"],
        stores["val"],
        plan=PlanConfig(epochs=2, micro_batch_size=6, global_batch_size=12),
        transform=TransformConfig(val="center", size=12, **config),
        train_transform=VIEWS,
    )


@pytest.fixture(scope="module")
def spec(stores: Stores) -> StreamSpec:
    return views_of(stores)


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


def test_what_does_not_go_with_views_is_refused_before_the_run(
    stores: Stores, spec: StreamSpec
) -> None:
    for name in ("mixup_alpha", "cutmix_alpha"):
        with pytest.raises(
            ConfigError, match=f"augment.{name} mixes images, and no views: set it to 0"
        ):
            loader(spec, augment=AugmentConfig(**{name: 0.2}))
    with pytest.raises(
        ConfigError, match=r"transform.train makes views, and transform.targets.mask"
    ):
        views_of(stores, targets={"mask": "seg"})
    with pytest.raises(
        ConfigError, match=r"transform.train makes views, and a run trains a classifier"
    ):
        num_classes_of(RunConfig(), spec)
