"""Pipelines of torchvision v2 with masks, boxes and keypoints, equal to a call by hand with tv_tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torchvision import tv_tensors
from torchvision.transforms import v2

from raypipe.errors import ConfigError
from raypipe.transform.sample_transform import SampleTransform
from raypipe.transform.targets import OUTSIDE, marked

SIZE = 40, 50
IMAGE = np.random.default_rng(0).integers(0, 256, (*SIZE, 3), np.uint8)
MASK = np.arange(2000, dtype=np.uint8).reshape(SIZE) % 7
BOXES = np.array([[5, 6, 25, 30, 3], [1, 1, 4, 4, 1], [30, 20, 50, 40, 2]], np.float32)
POINTS = np.array([[5, 6, 0], [48, 38, 1]], np.float32)
FLOAT = {tv_tensors.Image: torch.float32, tv_tensors.Mask: torch.int64, "others": None}


def labels_too(image: Any, target: Any) -> Any:
    """A user's step, as scripts for detection have them."""
    assert isinstance(target["labels"], torch.Tensor)
    return image, {**target, "parts": [[1], [2, 3]]}


FLIPS = [v2.RandomHorizontalFlip(0.5), v2.RandomVerticalFlip(0.5)]
PIPELINES: dict[str, tuple[Any, list[str]]] = {
    "segmentation": (
        v2.Compose([v2.RandomResizedCrop(20), *FLIPS]),
        ["mask"],
    ),
    "segmentation with dtypes": (
        v2.Compose([v2.ToImage(), v2.RandomCrop(24), v2.ToDtype(FLOAT, scale=True)]),
        ["mask"],
    ),
    "detection": (
        v2.Compose(
            [
                v2.RandomPhotometricDistort(p=1),
                v2.RandomZoomOut(fill=3),
                v2.RandomIoUCrop(),
                *FLIPS,
                v2.Resize((30, 30)),
                v2.SanitizeBoundingBoxes(min_size=2),
                labels_too,
                v2.ToPureTensor(),
            ]
        ),
        ["boxes"],
    ),
    "boxes of another format": (
        v2.Compose([*FLIPS, v2.ConvertBoundingBoxFormat("CXCYWH")]),
        ["boxes"],
    ),
    "all in a Sequential": (
        nn.Sequential(v2.RandomAffine(20, (0.1, 0.1)), v2.CenterCrop((30, 40))),
        ["mask", "boxes", "keypoints"],
    ),
    "a step alone": (v2.RandomRotation(90, expand=True), ["mask", "keypoints"]),
}


def given() -> dict[str, Any]:
    return {"mask": MASK.copy(), "bboxes": BOXES.copy(), "keypoints": POINTS.copy()}


def by_hand(pipeline: Any, keywords: list[str], seed: int) -> Any:
    target: Any = {}
    if "mask" in keywords:
        target["masks"] = tv_tensors.Mask(torch.from_numpy(MASK))
    if "bboxes" in keywords:
        target["boxes"] = tv_tensors.BoundingBoxes(
            torch.from_numpy(BOXES[:, :4]), format="XYXY", canvas_size=SIZE
        )
        target["labels"] = torch.from_numpy(BOXES[:, 4]).long()
    if "keypoints" in keywords:
        target["points"] = tv_tensors.KeyPoints(POINTS[:, :2], canvas_size=SIZE)
    image = tv_tensors.Image(torch.from_numpy(IMAGE).permute(2, 0, 1))
    torch.manual_seed(seed)
    if isinstance(pipeline, nn.Sequential):
        return pipeline((image, target))
    return pipeline(image, target)


@pytest.mark.parametrize("name", PIPELINES)
def test_targets_move_as_by_a_call_by_hand(name: str) -> None:
    pipeline, targets = PIPELINES[name]
    transform = SampleTransform(pipeline, targets=tuple(targets))
    keywords = ["bboxes" if target == "boxes" else target for target in targets]
    assert not transform.crops_first
    for seed in range(8):
        targets_of_sample = {name: given()[name] for name in keywords}
        made = transform.with_targets(IMAGE.copy(), targets_of_sample, (seed, 0))
        image, target = by_hand(pipeline, keywords, seed)
        found = made["image"]
        assert np.array_equal(found, image.permute(1, 2, 0))
        if "mask" in keywords:
            assert made["mask"].dtype == np.uint8
            assert np.array_equal(made["mask"], target["masks"])
        if "bboxes" in keywords:
            boxes = target["boxes"]
            if isinstance(boxes, tv_tensors.BoundingBoxes):
                boxes = v2.functional.convert_bounding_box_format(
                    boxes, new_format=tv_tensors.BoundingBoxFormat.XYXY
                )
            rows = torch.cat([boxes, target["labels"][:, None]], 1).numpy()
            is_kept = (rows[:, 2:4] - rows[:, :2] >= 0.999).all(1)
            np.testing.assert_allclose(made["bboxes"], rows[is_kept], atol=1e-4)
        if "keypoints" in keywords:
            rows = np.column_stack([target["points"], POINTS[:, 2]])
            assert np.array_equal(made["keypoints"], rows)


def test_the_image_may_come_back_as_a_pil_image() -> None:
    pipeline = v2.Compose([v2.Resize((20, 25)), v2.ToPILImage()])
    transform = SampleTransform(pipeline, targets=("boxes", "mask"))
    targets = {"bboxes": BOXES.copy(), "mask": MASK.copy()}
    made = transform.with_targets(IMAGE.copy(), targets, (0, 0))
    assert np.array_equal(made["bboxes"][:, :4], BOXES[:, :4] / 2)
    assert made["image"].shape == (20, 25, 3) and made["mask"].shape == (20, 25)


def test_a_number_in_a_mask_is_a_class_or_none() -> None:
    def mask_with(nothing: int) -> np.ndarray:
        def ignored(image: Any, target: Any) -> Any:
            mask = target["mask"].long()
            return image, {"mask": torch.where(mask == 6, nothing, mask)}

        transform = SampleTransform(v2.Compose([ignored]), targets=("mask",))
        given = {"mask": MASK.copy()}
        return transform.with_targets(IMAGE.copy(), given, (0, 0))["mask"]

    assert np.array_equal(mask_with(-1), np.where(MASK == 6, 255, MASK))
    for number in (-100, 300):
        with pytest.raises(ConfigError, match=f"from .*{number}.*classes are 0 to"):
            mask_with(number)


def test_keypoints_outside_are_marked_and_none_may_vanish() -> None:
    crop = SampleTransform(v2.CenterCrop(20), targets=("keypoints",))
    points = {"keypoints": POINTS.copy()}
    made = crop.with_targets(IMAGE.copy(), points, (0, 0))["keypoints"]
    assert marked(made, (20, 20))[:, 2].tolist() == [OUTSIDE, OUTSIDE - 1]

    def fewer(image: Any, target: Any) -> Any:
        return image, {"keypoints": target["keypoints"][:1]}

    removing = SampleTransform(v2.Compose([fewer]), targets=("keypoints",))
    with pytest.raises(ConfigError, match="return both, with all keypoints"):
        removing.with_targets(IMAGE.copy(), points, (0, 0))


def test_a_pipeline_that_forgets_the_target_is_an_error() -> None:
    forgets = SampleTransform(
        v2.Compose([lambda *inputs: inputs[0]]), targets=("mask",)
    )
    with pytest.raises(ConfigError, match="returned a Image for an image and its mask"):
        forgets.with_targets(IMAGE.copy(), {"mask": MASK.copy()}, (0, 0))
