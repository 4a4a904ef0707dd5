"""Streams of images of several sizes, made in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from without_ray import digests, host_batches

from raypipe.errors import ConfigError
from raypipe.streaming.digest import plain_settings
from raypipe.streaming.spec import StreamSpec
from raypipe.transform.fields import MicroBatch
from raypipe.transform.sizes import pixel_range

import bucketed  # isort: skip

SIZES = {0: 8, 1: 12, 2: 16}


def spec_of(size: Any = SIZES, **options: Any) -> StreamSpec:
    """Of three epochs of 6 steps of two micro-batches, without buckets."""
    plan = {"epochs": len(SIZES), "buckets": []}
    return bucketed.spec_of(plan=plan, size=size, **options)


def sides(batches: list[MicroBatch]) -> set[tuple[str, int, tuple[int, ...]]]:
    return {
        (batch.position.split, batch.position.epoch, batch["image"].shape[1:3])
        for batch in batches
    }


def test_images_grow_over_the_epochs_and_validations_have_the_last_size() -> None:
    spec = spec_of()
    expected = {("train", epoch, (size, size)) for epoch, size in SIZES.items()}
    assert sides(list(host_batches(spec))) == expected | {
        ("val", epoch, (16, 16)) for epoch in SIZES
    }
    assert pixel_range(spec.transform) == (min(SIZES.values()) ** 2, 16 * 16)


def test_each_epoch_has_the_bits_of_a_stream_of_its_size_alone() -> None:
    found = digests(spec_of())
    alone = [digests(spec_of(size=size)) for size in SIZES.values()]
    per_epoch, num_val = 12, len(found) // 3 - 12
    for epoch in range(3):
        first = epoch * (per_epoch + num_val)
        assert (
            found[first : first + per_epoch] == alone[epoch][first : first + per_epoch]
        )
    for step in (5, 6, 13):
        tail = digests(spec_of(), step)
        assert tail == found[len(found) - len(tail) :]


def test_a_schedule_is_part_of_the_fingerprint_and_of_the_settings() -> None:
    plain, growing, other = (
        spec_of(size=size) for size in (16, SIZES, {**SIZES, 2: 20})
    )
    assert (
        len({plain.plan.fingerprint, growing.plan.fingerprint, other.plan.fingerprint})
        == 3
    )
    assert spec_of(size={0: 16}).plan.fingerprint == plain.plan.fingerprint
    told = plain_settings(growing, workers=1, actors=1, from_step=0, to_step=1)
    assert told["transform.size"] == {"0": 8, "1": 12, "2": 16}


def test_a_transform_of_one_size_is_refused_for_training_alone() -> None:
    steps = [{"Resize": {"height": 8, "width": 8}}]
    with pytest.raises(ConfigError, match="Resize, which is made once, and transform"):
        spec_of(train=steps)
    assert sides(list(host_batches(spec_of(val=steps)))) >= {("val", 0, (8, 8))}


def test_a_function_of_the_user_is_called_with_each_size_and_must_make_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sized_transforms.py").write_text(
        "import cv2\n"
        "def follows(size):\n    return lambda image: cv2.resize(image, (size, size))\n"
        "def stays(size):\n    return lambda image: cv2.resize(image, (8, 8))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    follows, stays = (
        spec_of(train=f"sized_transforms:{name}") for name in ("follows", "stays")
    )
    assert {
        (epoch, side)
        for split, epoch, side in sides(list(host_batches(follows)))
        if split == "train"
    } == {(epoch, (size, size)) for epoch, size in SIZES.items()}
    with pytest.raises(
        ConfigError, match=r"made an image of \(8, 8\), .* it must be \(12, 12\)"
    ):
        next(batch for batch in host_batches(stays) if batch.position.epoch == 1)
