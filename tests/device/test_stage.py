"""The last stage on the device, of facts about the batches alone; tests/streaming/test_endings.py has streams."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torchvision.transforms import v2

from raypipe.config import AugmentConfig
from raypipe.device.prefetcher import Batch, on_device
from raypipe.device.stage import DeviceStage
from raypipe.errors import ConfigError
from raypipe.plan.places import MicroBatchId, Split
from raypipe.transform.device_input import IMAGES, DeviceInput
from raypipe.transform.ending import Ending
from raypipe.transform.fields import LABEL, MicroBatch

CPU = torch.device("cpu")

IMAGENET = Ending(
    "Normalize", "float32", AugmentConfig.mean, AugmentConfig.std, normalizes=True
)
NORMALIZE = Ending("Normalize", "float32", (0.5,) * 3, (0.25,) * 3, normalizes=True)
FLOATS = Ending("ToDtype", "float32", (0.0,) * 3, (1.0,) * 3, normalizes=False)
NORMALIZING = torch.nn.Sequential(v2.Normalize([0.5] * 3, [0.25] * 3))


def batch(split: Split = "train", step: int = 0) -> Batch:
    image = np.random.default_rng(step).integers(0, 256, (4, 6, 6, 3), np.uint8)
    fields: Any = {"image": image, LABEL: np.arange(4)}
    position = MicroBatchId(split, 0, step, 0)
    host = MicroBatch(position, np.arange(4), np.ones(4, np.float32), fields)
    (on_cpu,) = on_device([host], CPU, lambda at: 7 + at.step)
    return on_cpu


def stage(batches: DeviceInput, augment: Any = None, tells: bool = False) -> Any:
    return DeviceStage(augment, CPU, None, batches, tells)


def test_without_an_ending_and_augmentation_a_batch_stays_as_it_is() -> None:
    given = batch()
    assert stage(IMAGES)(given, 1.0) is given and stage(IMAGES).augment is None


@pytest.mark.parametrize(
    ("ending", "augment"),
    [
        (NORMALIZE, None),
        (NORMALIZE, AugmentConfig()),
        (FLOATS, AugmentConfig(module=NORMALIZING)),
    ],
    ids=["an ending alone", "an ending and augmentation", "a module"],
)
def test_both_splits_are_normalized_by(ending: Ending, augment: Any) -> None:
    splits: list[Split] = ["train", "val"]
    finish = stage(IMAGES._replace(endings=dict.fromkeys(splits, ending)), augment)
    for split in splits:
        given = batch(split)
        expected = (given.image.float() / 255 - 0.5) / 0.25
        image = finish(given, 1.0).image
        torch.testing.assert_close(image, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("made_by", ["the device", "the library"])
def test_a_differentiable_validation_is_normalized_once(
    made_by: str,
) -> None:
    of_val = NORMALIZE
    given = batch("val")
    expected = (given.image.float() / 255 - 0.5) / 0.25
    if made_by == "the library":
        of_val = replace(NORMALIZE, because="a step follows it")
        given = given.with_fields({"image": expected})
    endings: dict[Split, Ending] = {"train": IMAGENET, "val": of_val}
    augment = AugmentConfig(differentiable=True)
    found = stage(IMAGES._replace(endings=endings), augment)(given, 1.0)
    torch.testing.assert_close(found.image, expected, rtol=1e-5, atol=1e-5)
    assert found.pixels is not None and found.augment is not None
    torch.testing.assert_close(found.augment(found.pixels), found.image)


def test_rank_0_says_once_where_the_ending_is_done(
    capsys: pytest.CaptureFixture[str],
) -> None:
    of_stream = IMAGES._replace(endings={"train": NORMALIZE})
    for tells in (True, False):
        finish = stage(of_stream, tells=tells)
        for step in range(3):
            finish(batch(step=step), 1.0)
        lines = capsys.readouterr().out
        assert lines.count("is done on the device; uint8 travels") == tells


def test_two_normalizations_are_refused_at_once() -> None:
    of_stream = IMAGES._replace(endings={"train": NORMALIZE})
    with pytest.raises(ConfigError, match="leave one of them out"):
        stage(of_stream, AugmentConfig(mean=(0.1,) * 3, std=(0.9,) * 3))


def test_a_pipeline_and_a_module_that_end_with_other_numbers_are_refused() -> None:
    augment = AugmentConfig(module=NORMALIZING)
    equal = stage(IMAGES._replace(endings={"train": NORMALIZE}), augment)
    assert equal.augment.normalizes
    other = stage(IMAGES._replace(endings={"train": IMAGENET}), augment)
    with pytest.raises(ConfigError, match=r"and transform\.train with Normalize"):
        _ = other.augment
