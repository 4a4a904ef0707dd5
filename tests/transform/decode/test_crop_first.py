from __future__ import annotations

from typing import Any

import albumentations as A  # noqa: N812
import pytest
import torchvision
from torchvision.transforms import v2

from raypipe.transform.sample_transform import SampleTransform


class Mine(A.RandomResizedCrop):
    pass


class MyCompose(v2.Compose):
    pass


def hooked() -> Any:
    pipeline = v2.Compose([v2.RandomResizedCrop(9)])
    pipeline.transforms[0].register_forward_pre_hook(lambda module, given: None)
    return pipeline


OTHERS = {
    "nothing": None,
    "not at first": A.Compose([A.HorizontalFlip(), A.RandomResizedCrop((9, 9))]),
    "now and then": A.Compose([A.RandomResizedCrop((9, 9), p=0.5)]),
    "a pipeline now and then": A.Compose([A.RandomResizedCrop((9, 9))], p=0.5),
    "a subclass": A.Compose([Mine((9, 9))]),
    "replay": A.ReplayCompose([A.RandomResizedCrop((9, 9))]),
    "saved parameters": A.Compose(
        [A.RandomResizedCrop((9, 9))], save_applied_params=True
    ),
    "another compose": MyCompose([v2.RandomResizedCrop(9)]),
    "v1": torchvision.transforms.Compose([torchvision.transforms.RandomResizedCrop(9)]),
    "hooked": hooked(),
    "plain": lambda image: image,
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_not_surely_a_random_resized_crop_gets_the_whole_image(
    name: str,
) -> None:
    assert not SampleTransform(OTHERS[name]).crops_first
