from __future__ import annotations

from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

from raypipe import open_store
from raypipe.config import PlanConfig, TransformConfig
from raypipe.plan.places import MicroBatchId
from raypipe.stores.memory import MemoryStore
from raypipe.streaming.maker import MicroBatchMaker
from raypipe.streaming.memory.content import Contents
from raypipe.streaming.opening import open_stream
from raypipe.streaming.spec import StreamSpec

from pictures import CLASSES, picture  # isort: skip
from rewritten import rewrite  # isort: skip

IMAGES = [picture(number) for number in range(12)]
LABELS = [number % 5 for number in range(12)]


def contents(
    stream: str = "s",
    images: list[bytes] | None = None,
    plan: dict[str, Any] | None = None,
    transform: dict[str, Any] | None = None,
    **others: Any,
) -> Contents:
    """Contents of a stream, with changes of its settings."""
    store = MemoryStore(images or IMAGES, LABELS, CLASSES)
    order = {"epochs": 2, "micro_batch_size": 4, "seed": 3, **(plan or {})}
    pixels = {"train": "light", "val": "center", "size": 16, **(transform or {})}
    spec = open_stream(
        store,
        store,
        plan=PlanConfig(**order),  # type: ignore[arg-type]
        transform=TransformConfig(**pixels),
        **others,
    )
    return contents_of(spec, stream)


def contents_of(spec: StreamSpec, stream: str = "s") -> Contents:
    return Contents(MicroBatchMaker(spec).sample_makers, stream)


def keys(contents: Contents) -> list[bytes]:
    """Keys of the first micro-batches of each epoch, and of a validation."""
    places = [("train", 0, 0), ("train", 0, 1), ("train", 1, 0), ("val", 0, 0)]
    return [
        contents.keys([MicroBatchId(split, epoch, step, 0)])[0]  # type: ignore[arg-type]
        for split, epoch, step in places
    ]


def test_streams_of_one_content_have_the_same_keys() -> None:
    expected = keys(contents())
    assert len(set(expected)) == 4
    assert keys(contents("another", plan={"epochs": 7})) == expected
    # a larger step only changes where an epoch ends
    larger = contents(plan={"global_batch_size": 8})
    assert larger.keys([MicroBatchId("train", 0, 0, 1)]) == expected[1:2]


def test_a_validation_has_the_same_keys_in_every_epoch() -> None:
    stream = contents()
    first, last = (
        stream.keys([MicroBatchId("val", epoch, step, 0) for step in range(3)])
        for epoch in (0, 1)
    )
    assert first == last and len(set(first)) == 3


@pytest.mark.parametrize(
    "changes",
    [
        {"plan": {"seed": 4}},
        {"plan": {"micro_batch_size": 2}},
        {"transform": {"size": 20}},
        {"transform": {"train": "small"}},
        {"transform": {"train": [{"RandomCrop": {"height": 16, "width": 16}}]}},
        {"transform": {"strength": 0.5}},
        {"transform": {"max_bad_fraction": 0.0}},
        {"images": IMAGES[::-1]},
        {"target_column": None},
        {"val_transform": lambda image: image[:9, :9], "stream": "another"},
    ],
    ids=" ".join,
)
def test_another_content_has_other_keys(changes: dict[str, Any]) -> None:
    theirs = keys(contents(**changes))
    differs = [a != b for a, b in zip(keys(contents()), theirs, strict=True)]
    if "val_transform" in changes:
        assert differs[3]
    else:
        assert all(differs[:3])


def test_a_store_that_was_written_in_place_has_other_keys(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "0.png").write_bytes(IMAGES[0])

    def of_folder() -> list[bytes]:
        store = open_store(tmp_path)
        plan = PlanConfig(micro_batch_size=2)
        made = contents_of(open_stream(store, store, plan=plan))
        assert made.first("val").is_public
        return made.keys([MicroBatchId("val", 0, 0, 0)])

    before = of_folder()
    assert of_folder() == before
    rewrite(tmp_path / "b" / "0.png", IMAGES[0][-9:], bytes(9))
    assert of_folder() != before


def test_arguments_of_a_librarys_pipeline_are_part_of_the_key() -> None:
    A = pytest.importorskip("albumentations")

    def key(*steps: Any) -> str:
        pipeline = A.Compose([A.RandomCrop(16, 16), *steps])
        return contents(train_transform=pipeline, val_transform=None).of_training()

    same, again = key(A.ToGray(p=0.3)), key(A.ToGray(p=0.3))
    assert same == again != ""
    assert key(A.ToGray(p=0.4)) != same
    # one of which raypipe knows no program
    blur = [key(A.GlassBlur(sigma=sigma)) for sigma in (0.7, 0.7, 0.8)]
    assert blur[0] == blur[1] != ""
    assert blur[2] != blur[0]


def corner(image: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(cv2.flip(image, 1)[:9, :9])


def test_a_users_code_belongs_only_to_its_stream() -> None:
    streams = [
        contents(stream, train_transform=corner, val_transform=corner)
        for stream in ("one", "one", "two")
    ]
    first, again, other = map(keys, streams)
    assert first == again and not set(first) & set(other)
    assert not streams[0].first("train").is_public


class Own(MemoryStore):
    """A store of a class that only its author knows."""


def test_a_store_of_the_users_class_belongs_only_to_its_stream() -> None:
    store = Own(IMAGES, LABELS, CLASSES)
    spec = open_stream(store, plan=PlanConfig(micro_batch_size=4))
    assert not contents_of(spec).first("train").is_public


def test_keys_of_samples_count_only_where_a_step_is_random() -> None:
    def first(train: str, seed: int = 3) -> list[bytes]:
        stream = contents(
            plan={"shuffle": "off", "seed": seed}, transform={"train": train}
        )
        return [
            stream.keys([MicroBatchId("train", epoch, 0, 0)])[0] for epoch in (0, 1)
        ]

    fixed, again = first("center")
    assert fixed == again
    assert first("center", seed=9) == [fixed, fixed]
    once, twice = first("light")
    assert once != twice
