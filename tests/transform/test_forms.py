"""The form in which a transform gets its images: the one of its kind, or another that it takes instead."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torchvision import transforms as T  # noqa: N812
from torchvision.transforms import v2

from raypipe.errors import ConfigError
from raypipe.transform.sample_transform import SampleTransform

IMAGE = np.random.default_rng(0).integers(0, 256, (40, 50, 3), np.uint8)
ASKED = list[str]()


def asked(image: Any) -> Any:
    """A step that takes each form, and notes which one came."""
    ASKED.append(type(image).__module__.partition(".")[0])
    return image


def for_pil(image: Any) -> Any:
    return asked(image.convert("RGB"))


def for_tensors(image: Any) -> Any:
    return asked(image.float() / 255)


def for_pil_now_and_then(image: Any) -> Any:
    return for_pil(image) if random.random() < 0.5 else asked(image)


def drawing(image: Any, rng: np.random.Generator) -> Any:
    rng.random()
    return for_pil(image)


FORMS: dict[str, tuple[Any, str]] = {
    "old": (T.Compose([asked]), "PIL"),
    "old step": (T.Lambda(asked), "PIL"),
    "old, for tensors": (T.Compose([for_tensors]), "torch"),
    "v2": (v2.Compose([asked]), "torchvision"),
    "v2, for PIL": (v2.Compose([for_pil, v2.ToImage()]), "PIL"),
    "sequence": (torch.nn.Sequential(v2.Lambda(asked)), "torchvision"),
    "function": (asked, "numpy"),
    "function for PIL": (for_pil, "PIL"),
    "function for PIL that draws": (drawing, "PIL"),
}


@pytest.mark.parametrize("name", FORMS)
def test_a_transform_gets_the_form_that_it_takes(name: str) -> None:
    transform, form = FORMS[name]
    made = SampleTransform(transform)
    results = [made(IMAGE.copy(), (key, key)) for key in range(3)]
    assert ASKED[-3:] == [form] * 3
    assert all(np.array_equal(result, results[0]) for result in results)
    assert results[0].shape == IMAGE.shape


def test_a_branch_that_fails_changes_no_form() -> None:
    made = SampleTransform(v2.Compose([for_pil_now_and_then]))
    outcomes = set()
    for key in range(20):
        try:
            made(IMAGE.copy(), (key, key))
            outcomes.add(ASKED[-1])
        except AttributeError:
            outcomes.add("failed")
    assert outcomes == {"torchvision", "failed"}


def test_a_list_of_views_is_refused_with_the_dict_to_return() -> None:
    crop = T.RandomCrop(8)
    for transform in (
        T.Lambda(lambda image: [crop(image), crop(image)]),
        lambda image: [image[:8, :8], image[-8:, -8:]],
    ):
        with pytest.raises(ConfigError, match=r"a list; .* a dict, \{name: image, …\}"):
            SampleTransform(transform)(IMAGE.copy(), (0, 0))
    pair = T.Lambda(lambda image: {"a": crop(image), "b": [crop(image), crop(image)]})
    made = SampleTransform(pair).with_targets(IMAGE.copy(), {}, (0, 0))
    assert {name: view.shape for name, view in made.items()} == {
        "view.a": (8, 8, 3),
        "view.b": (2, 8, 8, 3),
    }
