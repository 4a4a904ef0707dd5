"""Descriptions of Albumentations' pipelines: whole, or none."""

from __future__ import annotations

from typing import Any

import albumentations
import numpy as np
import pytest

from raypipe.transform.albumentations import described


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
    albumentations.Compose(
        [
            albumentations.SelectiveChannelTransform(
                [albumentations.Solarize(p=1)], channels=[2], p=1
            )
        ]
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
