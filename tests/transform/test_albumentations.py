"""Pipelines of Albumentations, and of AlbumentationsX: their native steps, draws and descriptions."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import albumentations
import numpy as np
import pytest

from raypipe.packages import installed_version
from raypipe.transform.albumentations import described, find_program
from raypipe.transform.sample_transform import SampleTransform

# it has other arguments, and describes and moves more than the library that it succeeds
IS_SUCCESSOR = installed_version("albumentationsx") is not None


class Own(albumentations.ImageOnlyTransform):
    def apply(self, img: np.ndarray, **_: Any) -> np.ndarray:
        return img // 2


def halved(image: np.ndarray, **_: Any) -> np.ndarray:
    return image // 2


WHOLE = [
    albumentations.Compose(
        [
            albumentations.RandomCrop(8, 8),
            albumentations.ColorJitter(),
            albumentations.Normalize(),
        ]
    ),
    albumentations.Compose(
        [
            albumentations.OneOf(
                [
                    albumentations.GaussianBlur(),
                    albumentations.Sequential(
                        [albumentations.Solarize(), albumentations.Affine()]
                    ),
                ]
            )
        ]
    ),
    albumentations.Compose(
        [albumentations.CoarseDropout(), albumentations.GaussNoise()],
        bbox_params=albumentations.BboxParams("coco"),
    ),
]
PARTLY = [
    albumentations.Compose([Own(p=1)]),
    albumentations.Compose(
        [albumentations.OneOf([Own(), albumentations.HorizontalFlip()])]
    ),
    albumentations.Compose([albumentations.Lambda(image=halved, p=1)]),
    pytest.param(
        albumentations.Compose(
            [
                albumentations.SelectiveChannelTransform(
                    [albumentations.Solarize(p=1)], channels=[2], p=1
                )
            ]
        ),
        marks=pytest.mark.skipif(IS_SUCCESSOR, reason="AlbumentationsX describes it"),
    ),
]


@pytest.mark.parametrize("pipeline", WHOLE)
def test_a_pipeline_of_the_librarys_steps_is_described(pipeline: Any) -> None:
    description = described(pipeline)
    assert description is not None
    assert described(albumentations.from_dict(description)) == description


@pytest.mark.parametrize("pipeline", PARTLY)
def test_a_pipeline_whose_description_lacks_a_part_has_none(pipeline: Any) -> None:
    assert described(pipeline) is None


def test_the_ranges_of_native_blurs_are_those_of_the_pipeline() -> None:
    steps = [
        albumentations.RandomCrop(8, 8),
        albumentations.MotionBlur((5, 9), p=1),
        albumentations.GaussianBlur((3, 5), (0.6, 0.9), p=1),
    ]
    program, remaining_steps = find_program(albumentations.Compose(steps))
    assert program and not remaining_steps
    _, motion, blur = map(vars, program.steps)
    assert motion["blur_limit"] == (5, 9) and blur["blur_limit"] == (3, 5)
    assert blur["sigma_limit"] == (0.6, 0.9)


def test_a_step_whose_arguments_have_other_names_is_left_to_the_library() -> None:
    pipeline = albumentations.Compose(
        [albumentations.RandomCrop(8, 8), albumentations.Solarize(p=1)]
    )
    vars(pipeline.transforms[1])["of_a_later_release"] = vars(
        pipeline.transforms[1]
    ).pop("threshold_range")
    program, remaining_steps = find_program(pipeline)
    assert program and len(program.steps) == len(remaining_steps) == 1


@pytest.mark.parametrize("is_own", [False, True])
def test_a_pipeline_draws_the_same_in_any_thread(is_own: bool) -> None:
    pipeline = albumentations.Compose(
        [albumentations.GaussNoise(p=0.9), albumentations.HorizontalFlip()]
    )

    def by_function(image: np.ndarray) -> np.ndarray:
        return pipeline(image=image)["image"]

    def made(transform: SampleTransform, number: int) -> bytes:
        return transform(image.copy(), (number, number)).tobytes()

    image = np.random.default_rng(0).integers(0, 256, (9, 9, 3), np.uint8)
    transform = SampleTransform(by_function if is_own else pipeline)
    here = [made(transform, number) for number in range(6)]
    assert len(set(here)) == 6
    for _ in range(2):
        with ThreadPoolExecutor(1) as executor:
            there = [
                executor.submit(made, transform, number).result()
                for number in reversed(range(6))
            ]
        assert there == here[::-1]
