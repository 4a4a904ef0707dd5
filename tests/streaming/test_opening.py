"""The sizes of training and validation images, as a stream's description has them."""

from __future__ import annotations

import logging
from typing import Any

import albumentations as A  # noqa: N812  as its users do
import numpy as np
import pyarrow as pa
import pytest
from without_ray import host_batches

from raypipe.config import PlanConfig, PoolConfig, TransformConfig
from raypipe.errors import ConfigError, RaypipeError
from raypipe.stores.base import Columns
from raypipe.stores.memory import MemoryStore
from raypipe.streaming.maker import try_samples
from raypipe.streaming.opening import open_stream
from raypipe.streaming.spec import StreamSpec

from pictures import picture  # isort: skip

STORE = MemoryStore([picture(number) for number in range(8)], range(8))
CROP = A.Compose([A.RandomCrop(8, 8)])
STEPS = [{"RandomCrop": {"height": 8, "width": 8}}]
LARGER = [{"Resize": {"height": 12, "width": 12}}]


def corner(image: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(image[:8, :8])


def corners(size: int) -> Any:
    """Pays no attention to the size."""
    return corner


def spec(val: Any = STORE, **options: Any) -> StreamSpec:
    plan = PlanConfig(epochs=1, micro_batch_size=4)
    return open_stream(
        STORE, val, plan=plan, pool=PoolConfig(engine="inline"), **options
    )


class Odd(MemoryStore):
    """A user's store with a mistake: what `read` returns of the 8 values, or its groups."""

    def __init__(self, made: Any = None, groups: Any = None) -> None:
        super().__init__([picture(number) for number in range(8)], range(8))
        self._made, self.groups = made, groups

    def read(
        self, indices: np.ndarray, columns: tuple[str, ...] = ("image", "label")
    ) -> Any:
        read = super().read(indices, columns)
        return self._made(read) if self._made else read


@pytest.mark.parametrize(
    ("store", "problem"),
    [
        (
            Odd(lambda read: tuple(read.values())),
            "must return raypipe.stores.Columns of image, label, .* and returned tuple",
        ),
        (
            Odd(lambda read: {"image": read["image"]}),
            "image, label, with 4 values of each, and returned dict",
        ),
        (
            Odd(lambda read: Columns(read.images[1:], read.table)),
            "4 values of each, and returned {'image': 3, 'label': 4}",
        ),
        (
            Odd(lambda read: Columns(["a.jpg"] * len(read.images), read.table)),
            "encoded, as bytes, and is a str",
        ),
        (
            Odd(lambda read: Columns(read.images, pa.table({"label": ["cat"] * 4}))),
            "labels of string, which are not classes",
        ),
        (Odd(groups=np.array([0, 4])), "ascend from 0 to its 8 samples"),
        (Odd(groups=np.array([0, 6, 4, 8])), "ascend from 0 to its 8 samples"),
        (["a.tar", "b.tar"], "a list is not a store: it lacks address"),
    ],
)
def test_a_mistake_in_a_users_store_is_one_line(store: Any, problem: str) -> None:
    plan, pool = PlanConfig(epochs=1, micro_batch_size=4), PoolConfig(engine="inline")
    with pytest.raises(RaypipeError, match=problem):
        list(host_batches(open_stream(store, plan=plan, pool=pool)))


@pytest.mark.parametrize(
    ("transform", "name"),
    [
        (CROP, "a Compose"),
        (corner, "a function"),
        (None, "None"),
        ("none", "none"),
        (STEPS, "RandomCrop"),
        ({"crop": (CROP, 2)}, "views crop"),
    ],
)
def test_a_train_transform_with_a_size_of_its_own_needs_a_val_transform(
    transform: Any, name: str
) -> None:
    with pytest.raises(
        ConfigError, match=rf"is {name}, and val_transform is not set: .* 224 px"
    ):
        spec(train_transform=transform)
    for options in (
        {"val_transform": None},
        {"transform": TransformConfig(size=8)},
        {"val": None},
    ):
        assert spec(train_transform=transform, **options).plan.num_train == 8


@pytest.mark.parametrize(
    "transform", ["light", "simclr", f"{__name__}:corners", {"a": ("light", 2)}]
)
def test_one_that_follows_the_size_of_the_settings_needs_none(transform: Any) -> None:
    assert spec(train_transform=transform).transforms["val"] == "center"


@pytest.mark.parametrize(
    "options",
    [
        {"transform": TransformConfig(train=STEPS)},
        {"train_transform": CROP, "val_transform": "center"},
        {"train_transform": f"{__name__}:corners"},
        {"transform": TransformConfig(val=STEPS)},
    ],
)
def test_a_size_that_nobody_wrote_down_ends_the_run_before_its_first_step(
    options: dict[str, Any],
) -> None:
    made, sizes = (
        spec(**options),
        r"differ: transform\.train makes (8 x 8|224 x 224), transform\.val makes ",
    )
    with pytest.raises(
        ConfigError, match=rf"{sizes}.*; '(center|light)' .* 224 by default: set"
    ):
        next(host_batches(made))
    with pytest.raises(ConfigError, match=sizes):  # on the driver of jobs/train.py
        try_samples(made, 8)


@pytest.mark.parametrize(
    ("options", "warns"),
    [
        (
            {"train_transform": CROP, "val_transform": A.Compose([A.Resize(12, 12)])},
            True,
        ),
        ({"transform": TransformConfig(train=STEPS, size=12)}, True),
        ({"transform": TransformConfig(train=STEPS, val=LARGER)}, True),
        ({"transform": TransformConfig(size={0: 8, 1: 12})}, False),
        ({"train_transform": CROP, "transform": TransformConfig(size=8)}, False),
        (
            {
                "train_transform": {"a": (CROP, 2)},
                "val_transform": A.Compose([A.Resize(12, 12)]),
            },
            False,
        ),
    ],
)
def test_sizes_that_are_written_down_may_differ(
    options: dict[str, Any], warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert len(list(host_batches(spec(**options)))) == 4
    found = [record.getMessage() for record in caplog.records]
    words = "sizes of images differ: transform.train makes 8 x 8, transform.val makes 12 x 12 (height x width)"
    assert found == [words] * warns


@pytest.mark.parametrize(
    "options",
    [{"transform": TransformConfig(size={0: 8, 1: 12})}, {"train_transform": "simclr"}],
    ids=str,
)
def test_a_validation_that_cannot_be_made_is_found_before_the_first_step(
    options: dict[str, Any],
) -> None:
    val = MemoryStore([picture(0), picture(1, 30, 30)], [0, 1])
    with pytest.raises(ConfigError, match=r"made image uint8 \(30, 30, 3\), where"):
        next(host_batches(spec(val, val_transform=None, **options)))


def test_damaged_first_samples_of_a_validation_are_passed_over() -> None:
    val = MemoryStore([b"", *(picture(number) for number in range(7))], range(8))
    with pytest.raises(ConfigError, match="sizes of images differ"):
        next(
            host_batches(
                spec(val, transform=TransformConfig(train=STEPS, max_bad_fraction=1))
            )
        )


def test_stores_of_other_classes_are_refused_unless_nobody_asks() -> None:
    def store(*classes: str) -> MemoryStore:
        return MemoryStore([picture(i) for i in range(8)], [0, 1] * 4, classes or None)

    options: Any = {"plan": PlanConfig(micro_batch_size=4), "train_transform": "light"}
    with pytest.raises(
        ConfigError,
        match=r"has 2 classes, and .* 2 with other names or in another order",
    ):
        open_stream(store("a", "b"), store("b", "a"), **options)
    for val, target in (
        (store("a", "b"), "label"),
        (store(), "label"),
        (store("b", "a"), None),
    ):
        assert (
            open_stream(store("a", "b"), val, target_column=target, **options).stores[
                "val"
            ]
            is val
        )


@pytest.mark.parametrize("split", ["train", "val"])
def test_a_transform_that_would_be_dropped_is_an_error(split: str) -> None:
    store = MemoryStore([b""] * 4, [0] * 4)
    config = TransformConfig(**{split: "heavy"})
    given = {f"{split}_transform": "none"}
    with pytest.raises(
        ConfigError, match=rf"{split}_transform and TransformConfig.*: leave one out"
    ):
        open_stream(store, store, transform=config, **given)
