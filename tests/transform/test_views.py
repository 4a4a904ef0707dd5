"""Several views of one image: which transform makes each crop, under which key, from one decoding."""

from __future__ import annotations

from typing import Any

import albumentations as A  # noqa: N812
import numpy as np
import pytest
from micro_batches import EncodedSample, slow_one
from pictures import picture
from torchvision.transforms import v2

from raypipe.config import TransformConfig
from raypipe.errors import ConfigError
from raypipe.plan.order import Domain, mix64
from raypipe.transform.decode import array as arrays
from raypipe.transform.decode.rgb import decode
from raypipe.transform.presets import build_transform
from raypipe.transform.sample_maker import SampleMaker
from raypipe.transform.sample_transform import SampleTransform
from raypipe.transform.transform_steps import brief
from raypipe.transform.views import VIEW_PRESETS, view_key

CROP = A.Compose(
    [A.RandomResizedCrop((16, 16)), A.HorizontalFlip(p=0.5), A.GaussNoise(p=1)]
)
KEY = (5, 2**64 - 1)
IMAGE = decode(picture(3))


def rotate(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """It writes into what it is given."""
    image[:] = 255 - image
    return np.rot90(image, int(rng.integers(4)))[:24, :24]


PIPELINES: dict[str, Any] = {
    "albumentations, crop first": CROP,
    "albumentations, by steps": [
        {"HorizontalFlip": {"p": 0.5}},
        {"RandomCrop": {"height": 16, "width": 16}},
    ],
    "torchvision": v2.Compose([v2.RandomResizedCrop(16), v2.ColorJitter(0.5)]),
    "a function": rotate,
    "a preset": "heavy",
}


def views(
    transform: Any, key: tuple[int, int] = KEY, size: int = 16
) -> dict[str, np.ndarray]:
    maker = SampleMaker(transform, TransformConfig(size=size))
    made = slow_one(maker, EncodedSample(picture(3)), key)
    assert made.pop("label") == 0
    return made


def key_of(name: str, number: int) -> tuple[int, int]:
    k0, k1 = mix64(view_key(name, number) ^ np.array(KEY, np.uint64)).tolist()
    return k0, k1


@pytest.mark.parametrize("name", PIPELINES)
def test_each_crop_is_its_transform_of_the_image_under_its_own_key(name: str) -> None:
    made = views({"near": (PIPELINES[name], 3), "far": PIPELINES[name]})
    alone = SampleTransform(build_transform(PIPELINES[name], 16))
    for number in range(3):
        assert np.array_equal(
            made["view.near"][number], alone(IMAGE.copy(), key_of("near", number))
        )
    assert np.array_equal(made["view.far"], alone(IMAGE.copy(), key_of("far", 0)))
    assert [*made] == ["view.near", "view.far"] and made["view.far"].ndim == 3
    assert len({crop.tobytes() for crop in made["view.near"]}) > 1


def test_the_keys_never_change_and_no_two_are_alike() -> None:
    assert view_key("local", 3).tolist() == [12154066742170009729, 9942966765103378721]
    names = ["a", "b", "ab", "ba", "é", "abcd", "abcdefgh", "a\0"]
    keys = {
        tuple(view_key(name, number).tolist()) for name in names for number in range(50)
    }
    assert len(keys) == 50 * len(names)
    assert len({word for key in keys for word in key}) == 100 * len(names)
    assert (
        view_key("a", 0, Domain.VIEW_ON_DEVICE, 7).tolist()
        != view_key("a", 0, Domain.VIEW_ON_DEVICE, 8).tolist()
    )


def test_domains_of_keys_are_all_different() -> None:
    assert len(Domain) == len(Domain.__members__)


def test_a_crop_does_not_depend_on_how_many_there_are_nor_on_other_views() -> None:
    few, many = views({"a": (CROP, 2)}), views({"z": "light", "a": (CROP, 5)})
    assert np.array_equal(few["view.a"], many["view.a"][:2])
    assert np.array_equal(
        few["view.a"], views({"a": {"transforms": [CROP, CROP]}})["view.a"]
    )
    assert not np.array_equal(few["view.a"], views({"b": (CROP, 2)})["view.b"])
    assert not np.array_equal(few["view.a"], views({"a": (CROP, 2)}, (6, 0))["view.a"])


def test_the_image_is_decoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(
        arrays,
        "decode",
        lambda *args, **kw: calls.append(args) or decode(*args, **kw),
    )
    content = SampleMaker("dino", TransformConfig(), size=28)
    slow_one(content, EncodedSample(picture(3)), KEY)
    assert len(calls) == 1


def test_presets_have_the_crops_of_their_papers() -> None:
    dino, pair = views("dino", size=224), views("simclr", size=32)
    assert {name: made.shape for name, made in {**dino, **pair}.items()} == {
        "view.global": (2, 224, 224, 3),
        "view.local": (8, 96, 96, 3),
        "view.pair": (2, 32, 32, 3),
    }
    built = build_transform("dino", 224)
    scales = {
        name: [tuple(each.steps[0].scale) for each in view.transforms]
        for name, view in built.items()
    }
    assert scales == {"global": [(0.4, 1.0)] * 2, "local": [(0.05, 0.4)]}
    names = [
        [type(step).__name__ for step in each.steps]
        for each in built["global"].transforms
    ]
    assert names[1] == [*names[0], "Solarize"] and names[0][-1] == "GaussianBlur"
    assert [each.steps[4].p for each in built["global"].transforms] == [1.0, 0.1]
    for preset in VIEW_PRESETS:
        build_transform(preset, 64)


def test_settings_say_the_same_in_yaml_and_in_python() -> None:
    yaml = {
        "a": {"transform": "light", "count": 2, "size": 24},
        "b": {"transform": "center"},
    }
    python = {"a": {"transforms": ("light", "light"), "size": 24}, "b": "center"}
    one, other = views(yaml), views(python)
    assert all(np.array_equal(one[name], other[name]) for name in ("view.a", "view.b"))
    assert one["view.a"].shape == (2, 24, 24, 3) and one["view.b"].shape == (16, 16, 3)
    assert brief(yaml) == "views a, b"


@pytest.mark.parametrize(
    ("transform", "message"),
    [
        ({}, "a mapping without views"),
        ({"a b": "light"}, "'a b' is not a valid name of a view"),
        (
            {"HorizontalFlip": {"p": 0.5}},
            "view 'HorizontalFlip': there is no 'p'; choose from transform.*are a list",
        ),
        ({"a": {"count": 2}}, "view 'a': it needs a transform"),
        (
            {"a": {"transforms": ["light"], "count": 1}},
            "view 'a': it needs a transform",
        ),
        ({"a": {"transforms": []}}, "view 'a': transforms must be a list"),
        (
            {"a": ("light", 0)},
            "view 'a': count must be a whole number of at least 1, got 0",
        ),
        ({"a": {"transform": "light", "size": 1.5}}, "view 'a': size must be"),
        ({"a": ("dino", 2)}, "view 'a': its transform makes views itself"),
        ({"a": "hevy"}, "view 'a': no transform preset 'hevy'; did you mean heavy"),
        (
            {"a": [{"Blurr": {}}]},
            "view 'a': transform step 1: Albumentations has no transform 'Blurr'",
        ),
    ],
)
def test_settings_that_are_wrong_are_refused_before_anything_starts(
    transform: Any, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        build_transform(transform, 16)


def pair(image: np.ndarray, rng: np.random.Generator) -> dict[str, Any]:
    tops = rng.integers(0, 20, 3).tolist()
    return {
        "whole": image[:40, :40],
        "parts": [image[top : top + 8, :8] for top in tops],
    }


def test_a_function_may_return_its_views_by_name() -> None:
    made = views(pair)
    assert {name: part.shape for name, part in made.items()} == {
        "view.whole": (40, 40, 3),
        "view.parts": (3, 8, 8, 3),
    }
    assert np.array_equal(made["view.parts"], views(pair)["view.parts"])
    assert not np.array_equal(made["view.parts"], views(pair, (1, 2))["view.parts"])


@pytest.mark.parametrize(
    ("made", "message"),
    [
        ({}, "a mapping without views"),
        ({"image": IMAGE}, "returned a dict; it must return uint8 HWC"),
        ({"a": IMAGE.astype(int)}, "returned int64 of shape .* for view 'a'"),
        ({"a": [IMAGE[:8], IMAGE[:9]]}, "returned a list for view 'a'"),
        ({1: IMAGE}, "for view 1: it must be"),
    ],
)
def test_a_function_that_returns_anything_else_is_refused(
    made: Any, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        views(lambda image: made)


def test_crops_of_unlike_sizes_and_views_in_views_are_refused() -> None:
    with pytest.raises(
        ConfigError,
        match=r"crops of view.a differ, uint8 .12, 12, 3., uint8 .16, 16, 3.",
    ):
        views(
            {"a": {"transforms": [CROP, [{"RandomCrop": {"height": 12, "width": 12}}]]}}
        )
    with pytest.raises(ConfigError, match=r"a transform of view.a made several images"):
        views({"a": pair})
    sizes = iter([8, 9])
    content = SampleMaker({"a": lambda image: image[: next(sizes)]}, TransformConfig())
    slow_one(content, EncodedSample(picture(3)), KEY)
    with pytest.raises(
        ConfigError,
        match=r"made view.a uint8 \(9, 48, 3\), where view.a uint8 \(8, 48, 3\) is",
    ):
        slow_one(content, EncodedSample(picture(3)), KEY)
