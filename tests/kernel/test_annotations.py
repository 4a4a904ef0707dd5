"""Masks, boxes and keypoints follow a program as Albumentations has them follow its transforms."""

from __future__ import annotations

from typing import Any

import albumentations as A  # noqa: N812
import numpy as np
import pytest

from raypipe.kernel import Program, follow, native_step
from raypipe.transform.sample_transform import SampleTransform
from raypipe.transform.targets import marked

SIZES = [(37, 53), (64, 48), (101, 33), (29, 29), (30, 121)]


def by_library(
    transforms: list[Any], size: tuple[int, int], targets: dict[str, np.ndarray]
) -> dict[str, Any]:
    pipeline = A.Compose(
        transforms,
        bbox_params=A.BboxParams("pascal_voc", min_width=1, min_height=1),
        keypoint_params=A.KeypointParams("xy", remove_invisible=False),
    )
    return pipeline(image=np.zeros((*size, 3), np.uint8), **targets)


def affine(**options: Any) -> Any:
    return A.Affine(**{"p": 1.0, "fill_mask": 255} | options)


def fixed_steps() -> list[Any]:
    """Steps of every native geometric kind, without chance; each takes an image of at least 13 x 13 pixels."""
    return [
        A.Resize(45, 31),
        A.Resize(224, 224),
        A.SmallestMaxSize(35),
        A.SmallestMaxSize(max_size_hw=(41, 33)),
        A.CenterCrop(13, 13),
        A.Pad((3, 5, 8, 1), fill_mask=255),
        A.HorizontalFlip(p=1),
        A.VerticalFlip(p=1),
        A.Transpose(p=1),
        affine(translate_px={"x": 7, "y": -5}),
        affine(translate_percent={"x": -0.21, "y": 0.13}),
        affine(scale={"x": 0.7, "y": 1.4}, rotate=(33, 33)),
        affine(scale=(1.3, 1.3), shear=(8, 8)),
    ]


def by_transform(
    steps: list[Any], size: tuple[int, int], targets: dict[str, np.ndarray]
) -> dict[str, Any]:
    names = ("mask", "boxes", "keypoints")
    transform = SampleTransform(A.Compose(steps), targets=names)
    assert transform.program is not None
    image = np.zeros((*size, 3), np.uint8)
    return transform.with_targets(image, targets, (1, 2))


def targets_of(seed: int, size: tuple[int, int]) -> dict[str, np.ndarray]:
    """A mask; boxes, of which one is the image's and one a sliver at its edge; keypoints, some outside."""
    rng = np.random.default_rng(seed)
    height, width = size
    points = np.vstack([rng.uniform(-0.3, 1.3, (9, 2)), [(0, 0)]]) * (width, height)
    corners = rng.uniform(0, 0.4, (4, 2)) * (width, height)
    boxes = np.hstack(
        [corners, corners + rng.uniform(0.3, 0.6, (4, 2)) * (width, height)]
    )
    edges = [[0, 0, width, height], [width - 1.25, 0, width, height]]
    return {
        "mask": rng.integers(0, 9, size, np.uint8),
        "bboxes": np.column_stack([[*boxes, *edges], np.arange(6)]).astype(np.float32),
        "keypoints": np.column_stack([points, np.arange(10)]).astype(np.float32),
    }


@pytest.mark.parametrize("seed", range(60))
def test_compositions_move_targets_as_the_library_wherever_they_end(seed: int) -> None:
    rng = np.random.default_rng(seed)
    pool = fixed_steps()
    chosen = rng.integers(len(pool), size=rng.integers(1, 5))
    steps = [A.Resize(37, 41), *(pool[number] for number in chosen)]
    size = SIZES[seed % len(SIZES)]
    # not native: from it on, the library moves targets
    still = A.GaussNoise(std_range=(0, 0), p=1)
    for variant in (steps, [*steps, still], [steps[0], still, *steps[1:]]):
        targets = targets_of(seed, size)
        moved = by_transform([*variant, A.Resize(50, 50)], size, targets)
        resized = by_library([*steps, A.Resize(50, 50)], size, targets_of(seed, size))
        np.testing.assert_allclose(moved["keypoints"], resized["keypoints"], atol=0.02)
        np.testing.assert_allclose(moved["bboxes"], resized["bboxes"], atol=0.02)
        # Places between two pixels are rounded by other arithmetic.
        differing = (moved["mask"] != resized["mask"]).mean()
        assert differing <= (0.05 if "Affine" in str(steps) else 0)


def test_a_dropout_hides_targets_as_the_librarys_does() -> None:
    step = native_step("CoarseDropout", {"p": 1.0, "fill_mask": 77})
    assert step is not None
    program = Program([step])
    size = SIZES[1]
    keys = np.arange(24, dtype=np.uint64).reshape(12, 2)
    params, _ = program.draw(keys, np.array([size] * 12))
    for seed, row in enumerate(params):
        ((_, _, numbers),) = program.applied(row)
        edges = np.array(numbers[4 : 4 + 4 * numbers[3]]).reshape(-1, 4)
        holes = {"holes": edges[:, [1, 0, 3, 2]], "seed": 1}
        dropout = A.CoarseDropout(fill_mask=77, p=1)
        dropout.get_params_dependent_on_data = lambda holes=holes, **_: holes
        moved = follow(program.applied(row), size, targets_of(seed, size))
        expected = by_library([dropout], size, targets_of(seed, size))
        assert np.array_equal(moved["mask"], expected["mask"])
        assert np.array_equal(moved["keypoints"], expected["keypoints"])
        # The library's boxes are of whole pixels, those that no hole has touched, too.
        np.testing.assert_allclose(moved["bboxes"], expected["bboxes"], atol=1)


def test_a_point_in_the_image_stays_in_it_through_resizes() -> None:
    rng = np.random.default_rng(0)
    points = np.column_stack([rng.uniform(0, (24, 18), (150, 2)), np.zeros(150)])
    given = {"bboxes": np.empty((0, 5)), "keypoints": points.astype(np.float32)}
    moved = by_transform([A.Resize(224, 224)], (18, 24), given)
    assert moved["bboxes"].shape == (0, 5)
    assert (marked(moved["keypoints"], (224, 224))[:, 2] == 0).all()
