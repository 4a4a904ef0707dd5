"""Masks, boxes and keypoints follow a program as Albumentations has them follow its transforms, with the numbers
that were drawn."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

os.environ.setdefault("NO_ALBUMENTATIONS_UPDATE", "1")
import albumentations as A  # noqa: N812

from raypipe.kernel import Op, Program, Step, follow, native_step
from raypipe.transform.sample_transform import SampleTransform
from raypipe.transform.targets import marked

KEYS = np.random.default_rng(3).integers(0, 1 << 63, (12, 2)).astype(np.uint64)
SIZES = [(37, 53), (64, 48), (101, 33), (29, 29), (30, 121)]


def targets_of(
    rng: np.random.Generator, height: int, width: int
) -> dict[str, np.ndarray]:
    """A mask; boxes, some at the border, whole or slivers; keypoints, some outside of the image."""
    corners = np.sort(rng.uniform(0, 1, (6, 2, 2)), axis=1) * (width - 2, height - 2)
    boxes = [
        *np.column_stack(
            [corners[:, 0], np.maximum(corners[:, 1], corners[:, 0] + 1.5)]
        ).tolist(),
        [0, 0, width, height],
        [0, 0, 7.25, 5.5],
        [width - 9.5, height - 6, width, height],
        [width - 1.25, 0, width, height],
        [3.25, 4.5, 9.75, 11.75],
    ]
    boxes = np.clip(boxes, 0, (width, height) * 2)
    points = rng.uniform(-0.3, 1.3, (7, 2)) * (width, height)
    points = np.vstack(
        [
            points,
            [(0, 0), (width - 1, height - 1), (width, height), (-0.5, 3), (2.5, 1.25)],
        ]
    )
    return {
        "mask": rng.integers(0, 9, (height, width), np.uint8),
        "bboxes": np.column_stack([boxes, np.arange(len(boxes))]).astype(np.float32),
        "keypoints": np.column_stack([points, np.arange(len(points))]).astype(
            np.float32
        ),
    }


def of_library(step: Step, original: Any, op: Op, numbers: list[int]) -> list[Any]:
    """What the library calls an operation; an affine map has one value in each of its ranges."""
    match op:
        case Op.CROP:
            top, left, height, width = numbers
            return [A.Crop(left, top, left + width, top + height)]
        case Op.RESIZE:
            # the scale of a SmallestMaxSize is not the ratio of rounded sides
            return [
                original
                if isinstance(original, A.SmallestMaxSize)
                else A.Resize(numbers[0], numbers[1])
            ]
        case Op.PAD:
            top, bottom, left, right, border = numbers[:5]
            return [
                A.Pad(
                    (left, top, right, bottom),
                    fill_mask=step.mask_fill,
                    border_mode=border,
                )
            ]
        case Op.TURN:
            kinds = (4, A.Transpose), (2, A.VerticalFlip), (1, A.HorizontalFlip)
            return [kind(p=1) for bit, kind in kinds if numbers[0] & bit]
        case Op.DROPOUT:
            holes = np.array(numbers[4 : 4 + 4 * numbers[3]]).reshape(-1, 4)[
                :, [1, 0, 3, 2]
            ]
            dropout = A.CoarseDropout(fill_mask=step.mask_fill, p=1)
            dropout.get_params_dependent_on_data = lambda params, data: {
                "holes": holes,
                "seed": 1,
            }
            return [dropout]
    assert op == Op.AFFINE
    return [original]


def by_library(
    transforms: list[Any], size: tuple[int, int], targets: dict[str, np.ndarray]
) -> dict[str, Any]:
    pipeline = A.Compose(
        transforms or [A.NoOp(p=1)],
        bbox_params=A.BboxParams("pascal_voc", min_width=1, min_height=1),
        keypoint_params=A.KeypointParams("xy", remove_invisible=False),
    )
    return pipeline(image=np.zeros((*size, 3), np.uint8), **targets)


def affine(**options: Any) -> Any:
    return A.Affine(**{"p": 1.0} | options)


PIPELINES: dict[str, list[Any]] = {
    "random resized crop": [A.RandomResizedCrop((31, 27), scale=(0.1, 0.9))],
    "random crop": [A.RandomCrop(23, 19)],
    "center crop": [A.CenterCrop(22, 21)],
    "resize": [A.Resize(45, 31)],
    "smallest": [A.SmallestMaxSize(35)],
    "smallest of both": [A.SmallestMaxSize(max_size_hw=(41, 33))],
    "pad": [A.Pad((3, 5, 8, 1), fill_mask=255)],
    "pad with the edge": [A.Pad((3, 0, 8, 1), border_mode=1)],
    "flips": [A.HorizontalFlip(), A.VerticalFlip()],
    "turns": [A.Transpose(), A.RandomRotate90(), A.D4()],
    "shift": [affine(translate_px={"x": 7, "y": -5}, fill_mask=255)],
    "share of a shift": [affine(translate_percent={"x": -0.21, "y": 0.13})],
    "scale": [affine(scale={"x": 0.7, "y": 1.4}, fill_mask=9)],
    "rotate": [affine(rotate=(33, 33), fill_mask=255)],
    "shear": [affine(shear={"x": 17, "y": -9}, border_mode=1)],
    "all of it": [
        affine(scale=(1.2, 1.2), rotate=(-71, -71), shear=(8, 8), translate_px=(4, 4))
    ],
    "dropout": [A.CoarseDropout((1, 5), (0.2, 0.6), (0.3, 0.7), p=0.9)],
    "dropout of masks, too": [
        A.CoarseDropout((1, 3), (4, 20), (5, 25), fill_mask=77, p=1)
    ],
    "several": [
        A.D4(),
        A.RandomResizedCrop((40, 40)),
        A.Pad(4, fill_mask=255),
        A.RandomCrop(33, 35),
        A.ColorJitter(),
    ],
}


@pytest.mark.parametrize("name", PIPELINES)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_targets_are_where_the_library_has_them(
    name: str, size: tuple[int, int]
) -> None:
    steps = [
        native_step(type(original).__name__, vars(original))
        for original in PIPELINES[name]
    ]
    program = Program([step for step in steps if step])
    assert len(program.steps) == len(steps)
    originals = dict(zip(map(id, program.steps), PIPELINES[name], strict=True))
    params, sizes = program.draw(KEYS, np.array([size] * len(KEYS)))
    num_boxes = 0
    for number, (row, size_behind) in enumerate(
        zip(params, sizes.tolist(), strict=True)
    ):
        targets = targets_of(np.random.default_rng(number), *size)
        before = {target: value.copy() for target, value in targets.items()}
        transforms = [
            transform
            for step, op, numbers in program.applied(row)
            if op != Op.JITTER
            for transform in of_library(step, originals[id(step)], op, numbers)
        ]
        expected = by_library(transforms, size, targets)
        moved = follow(program.applied(row), size, targets)
        assert all(
            np.array_equal(targets[target], value) for target, value in before.items()
        )
        assert expected["image"].shape[:2] == tuple(size_behind) == moved["mask"].shape
        # Of an affine map, places between two pixels are rounded by other arithmetic.
        differing = (moved["mask"] != expected["mask"]).mean()
        assert differing <= (0.05 if "Affine" in str(transforms) else 0)
        np.testing.assert_allclose(
            moved["keypoints"], expected["keypoints"], atol=2e-4 * max(size)
        )
        assert moved["bboxes"][:, 4].tolist() == expected["bboxes"][:, 4].tolist()
        # Behind a dropout the library's boxes are of whole pixels, those that no hole has touched, too.
        atol = 1 if "Dropout" in str(transforms) else 2e-4 * max(size)
        np.testing.assert_allclose(moved["bboxes"], expected["bboxes"], atol=atol)
        num_boxes += len(moved["bboxes"])
    assert num_boxes > len(KEYS), "hardly a box is left"


def fixed_steps() -> list[Any]:
    """Steps of every native geometric kind, without chance; each takes an image of at least 13 x 13 pixels."""
    return [
        A.Resize(45, 31),
        A.Resize(224, 224),
        A.SmallestMaxSize(35),
        A.SmallestMaxSize(max_size_hw=(41, 33)),
        A.CenterCrop(13, 13),
        A.Pad((3, 5, 8, 1)),
        A.HorizontalFlip(p=1),
        A.VerticalFlip(p=1),
        A.Transpose(p=1),
        affine(translate_px={"x": 7, "y": -5}),
        affine(scale={"x": 0.7, "y": 1.4}, rotate=(33, 33)),
        affine(scale=(1.3, 1.3), shear=(8, 8)),
    ]


def by_transform(
    steps: list[Any], size: tuple[int, int], targets: dict[str, np.ndarray]
) -> dict[str, Any]:
    transform = SampleTransform(A.Compose(steps), targets=("boxes", "keypoints"))
    assert transform.program is not None
    image = np.zeros((*size, 3), np.uint8)
    return transform.with_targets(image, targets, (1, 2)).targets


@pytest.mark.parametrize("seed", range(40))
def test_compositions_move_points_as_the_library_wherever_they_end(seed: int) -> None:
    rng = np.random.default_rng(seed)
    pool = fixed_steps()
    steps = [
        A.Resize(37, 41),
        *(pool[number] for number in rng.integers(len(pool), size=rng.integers(1, 5))),
    ]
    size = SIZES[seed % len(SIZES)]
    height, width = size
    points = np.vstack([rng.uniform(-0.3, 1.3, (9, 2)), [(0, 0)]]) * (width, height)
    corners = rng.uniform(0, 0.4, (4, 2)) * (width, height)
    boxes = np.hstack(
        [corners, corners + rng.uniform(0.3, 0.6, (4, 2)) * (width, height)]
    )
    targets = {
        "bboxes": np.column_stack([boxes, np.arange(4)]).astype(np.float32),
        "keypoints": np.column_stack([points, np.arange(10)]).astype(np.float32),
    }
    # not native: from it on, the library moves points
    still = A.GaussNoise(std_range=(0, 0), p=1)
    for variant in (steps, [*steps, still], [steps[0], still, *steps[1:]]):
        moved = by_transform([*variant, A.Resize(50, 50)], size, targets)
        resized = by_library([*steps, A.Resize(50, 50)], size, targets)
        np.testing.assert_allclose(moved["keypoints"], resized["keypoints"], atol=0.02)
        np.testing.assert_allclose(moved["bboxes"], resized["bboxes"], atol=0.02)


def test_a_point_in_the_image_stays_in_it_through_resizes() -> None:
    rng = np.random.default_rng(0)
    points = np.column_stack(
        [rng.uniform(0, (24, 18), (150, 2)), np.zeros(150)]
    ).astype(np.float32)
    moved = by_transform(
        [A.Resize(224, 224)],
        (18, 24),
        {"bboxes": np.empty((0, 5)), "keypoints": points},
    )
    assert (marked(moved["keypoints"], (224, 224))[:, 2] == 0).all()


def test_nothing_follows_where_there_is_nothing() -> None:
    program = Program(
        [
            step
            for step in (
                native_step("D4", {}),
                native_step("CoarseDropout", {"p": 1.0}),
            )
            if step
        ]
    )
    empty = {
        "bboxes": np.empty((0, 5), np.float32),
        "keypoints": np.empty((0, 3), np.float32),
    }
    params, _ = program.draw(KEYS, np.array([(9, 7)] * len(KEYS)))
    for row in params:
        moved = follow(program.applied(row), (9, 7), empty)
        assert {name: value.shape for name, value in moved.items()} == {
            "bboxes": (0, 5),
            "keypoints": (0, 3),
        }
