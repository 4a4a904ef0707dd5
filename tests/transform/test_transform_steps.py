from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import albumentations as A  # noqa: N812
import cv2
import numpy as np
import pytest
import yaml

from raypipe.errors import ConfigError
from raypipe.transform.sample_transform import SampleTransform
from raypipe.transform.transform_steps import brief, build_steps

RNG = np.random.default_rng(0)
IMAGE = cv2.resize(RNG.integers(0, 256, (9, 13, 3), np.uint8), (100, 70))
KEYS = [(number, 3 * number) for number in range(12)]

STEPS: list[dict[str, Any]] = [
    {"RandomResizedCrop": {"size": [24, 32], "scale": [0.2, 1.0]}},
    {"HorizontalFlip": {"p": 0.5}},
    {
        "OneOf": {
            "transforms": [
                {"MotionBlur": {"p": 1}},
                {"Sequential": {"transforms": [{"CLAHE": None}]}},
            ],
            "p": 0.7,
        }
    },
    {"GaussNoise": {"std_range": [1e-05, 0.2]}},
]


def pipeline() -> A.Compose:
    """The same in Python."""
    one_of = A.OneOf([A.MotionBlur(p=1), A.Sequential([A.CLAHE()])], p=0.7)
    return A.Compose(
        [
            A.RandomResizedCrop((24, 32), (0.2, 1)),
            A.HorizontalFlip(p=0.5),
            one_of,
            A.GaussNoise((1e-05, 0.2)),
        ]
    )


def results(transform: Any, keys: list[tuple[int, int]] = KEYS) -> list[bytes]:
    apply = SampleTransform(transform)
    return [apply(IMAGE.copy(), key).tobytes() for key in keys]


def build(steps: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return build_steps(steps)


# What is built


def test_steps_make_the_pixels_of_the_same_pipeline_in_python() -> None:
    assert results(build(STEPS)) == results(pipeline())
    assert len(set(results(pipeline()))) == len(KEYS)


def test_one_compose_is_the_pipeline_itself() -> None:
    made = build([{"Compose": {"transforms": [{"VerticalFlip": {"p": 1}}], "p": 0.5}}])
    assert made.p == 0.5 and type(made.transforms[0]) is A.VerticalFlip
    assert results(made) == results(A.Compose([A.VerticalFlip(p=1)], p=0.5))


def test_what_begins_with_a_random_resized_crop_is_decoded_by_its_crop() -> None:
    assert SampleTransform(build(STEPS)).crops_first
    assert not SampleTransform(build(STEPS[1:])).crops_first


# Those that need a size or the like to be made at all.
ARGUMENTS: dict[str, dict[str, Any]] = {
    "CenterCrop": {"height": 9, "width": 9},
    "RandomCrop": {"height": 9, "width": 9},
    "AtLeastOneBBoxRandomCrop": {"height": 9, "width": 9},
    "CropNonEmptyMaskIfExists": {"height": 9, "width": 9},
    "RandomSizedBBoxSafeCrop": {"height": 9, "width": 9},
    "RandomSizedCrop": {"min_max_height": [9, 20], "size": [9, 9]},
    "RandomResizedCrop": {"size": [9, 9]},
    "Resize": {"height": 9, "width": 9},
    "LongestMaxSize": {"max_size": 9},
    "SmallestMaxSize": {"max_size": 9},
    "CropAndPad": {"px": 3},
    "Crop": {"x_max": 9, "y_max": 9},
    "PiecewiseAffine": {"nb_rows": 2, "nb_cols": 2},
    "GridElasticDeform": {"num_grid_xy": [4, 4], "magnitude": 5},
    "Pad3D": {"padding": 3},
    "PadIfNeeded3D": {"min_zyx": [9, 9, 9]},
    "RandomCrop3D": {"size": [9, 9, 9]},
    "CenterCrop3D": {"size": [9, 9, 9]},
    "TextImage": {"font_path": "font.ttf"},
    "ConstrainedCoarseDropout": {"mask_indices": [1]},
}
COMPOSITIONS = {
    name
    for name, kind in vars(A).items()
    if isinstance(kind, type) and issubclass(kind, A.BaseCompose)
}
NAMES = sorted(
    name
    for name, kind in vars(A).items()
    if isinstance(kind, type) and issubclass(kind, A.BasicTransform | A.BaseCompose)
)
REFUSED = {
    *(
        "AtLeastOneBBoxRandomCrop",
        "BBoxSafeRandomCrop",
        "RandomSizedBBoxSafeCrop",
        "RandomCropNearBBox",
    ),
    *("ConstrainedCoarseDropout", "CropNonEmptyMaskIfExists", "MaskDropout", "Lambda"),
    *(
        "FDA",
        "HistogramMatching",
        "Mosaic",
        "OverlayElements",
        "PixelDistributionAdaptation",
        "TextImage",
    ),
    *(
        "CenterCrop3D",
        "CoarseDropout3D",
        "CubicSymmetry",
        "Pad3D",
        "PadIfNeeded3D",
        "RandomCrop3D",
    ),
    *("FromFloat", "ToTensor3D"),
    *(
        "BaseCompose",
        "BasicTransform",
        "DualTransform",
        "ImageOnlyTransform",
        "Transform3D",
    ),
}


@pytest.mark.filterwarnings("ignore::UserWarning")  # of those that have better siblings
@pytest.mark.parametrize("name", NAMES)
def test_each_library_transform_works_by_its_key_or_is_refused(name: str) -> None:
    inner = [{"HorizontalFlip": {"p": 0.5}}, {"RandomBrightnessContrast": {"p": 0.5}}]
    arguments = (
        {"transforms": inner}
        if name in COMPOSITIONS
        else ARGUMENTS.get(name, {}) | {"p": 1}
    )
    if name in REFUSED:
        with pytest.raises(ConfigError, match=rf"^transform step 1.*{name}"):
            build_steps([{name: arguments}])
        return
    forward = results(build_steps([{name: arguments}]), KEYS[:4])
    np.random.seed(1)
    backward = results(build_steps([{name: arguments}]), KEYS[3::-1])
    assert backward == forward[::-1]


def test_steps_in_brief() -> None:
    assert (brief("light"), brief(STEPS[:2])) == (
        "light",
        "RandomResizedCrop+HorizontalFlip",
    )


BOMB = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 10)}]\n"
    for old, new in zip("abcdefg", "bcdefgh", strict=True)
)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"- Blur: {p: 2026-01-01}", "transform: Object of type date is not"),
        (b"- Blur: {1: 2}", "step 1, Blur: unknown argument 1; choose from"),
        (b"[" * 100 + b"]" * 100, "step 1: must be one NAME"),
        (b"&a [*a]", "transform: Circular reference"),
        (BOMB.encode(), "more than 1,048,576 characters"),
        (
            b"a: &a " + b"x" * 900_000 + b"\nb: [*a, *a]",
            "more than 1,048,576 characters",
        ),
        (
            b"a: &a {" + b"x" * 900 + b": 1}\nb: [" + b"*a," * 1500 + b"]",
            "more than 1,048,576 characters",
        ),
    ],
    ids=range(7),
)
def test_what_yaml_holds_beside_steps_is_one_error(
    content: bytes, message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        build(yaml.safe_load(content))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "name",
    [
        "os.system",
        "builtins.eval",
        "mine_xyz.Transform",
        "A.Blur",
        "albumentations.core.serialization.from_dict",
    ],
)
def test_a_name_of_anybody_else_is_refused_and_never_imported(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine_xyz.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(
        ConfigError, match="transform step 1: Albumentations has no transform"
    ):
        build_steps([{name: {"p": 1.0}}])


# Errors


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ([], "transform is an empty list of steps; the preset 'none'"),
        (
            [{"Blurr": {}}],
            "transform step 1: Albumentations has no transform 'Blurr'; did you mean Blur",
        ),
        (
            [{"Qqqq": {}}],
            "has no transform 'Qqqq'; choose from AdditiveNoise, .*, ZoomBlur$",
        ),
        (
            [STEPS[0], {"Blur": {"blur_limt": 3}}],
            "step 2, Blur: unknown argument 'blur_limt'; did you mean blur_limit",
        ),
        (
            [{"Blur": {"blur_limt": 3}}],
            "did you mean blur_limit[?] choose from blur_limit, p$",
        ),
        (
            [{"Blur": {"p": 2}}],
            "step 1, Blur: p: Input should be less than or equal to 1, got 2; choose from",
        ),
        ([{"Blur": {"blur_limit": "wide"}}], "step 1, Blur: blur_limit: .* got 'wide'"),
        (
            [{"RandomResizedCrop": {}}],
            "step 1, RandomResizedCrop: size: Field required, .*; choose from size, ",
        ),
        (
            [{"Blur": {"p": 1}, "Transpose": {}}],
            "step 1: must be one NAME: {argument: value, …}, got {'Blur",
        ),
        ([{"Blur": 3}], r"step 1: must be Blur: \{argument: value, …\}, got 3"),
        (
            [{"OneOf": {"transforms": [{"Blur": {}}, {"Blurr": {}}]}}],
            "step 1, OneOf step 2: .* 'Blurr'",
        ),
        ([{"OneOf": {"p": 1}}], "step 1, OneOf: must be a list of steps, got None"),
        (
            [{"OneOf": {"transforms": "Blur"}}],
            "step 1, OneOf: must be a list of steps, got 'Blur'",
        ),
        (
            [{"OneOf": {"transforms": STEPS, "p": "often"}}],
            r"OneOf: p must be a number from 0 to 1, got 'often'",
        ),
        (
            [{"SomeOf": {"transforms": STEPS, "n": 0}}],
            "SomeOf: n must be a whole number of at least 1, got 0",
        ),
        (
            [{"OneOf": {"transforms": [{"Blur": {"p": 0}}]}}],
            "OneOf: ZeroDivisionError: ",
        ),
        (
            [{"OneOrOther": {"first": {"Blur": {}}}}],
            "OneOrOther: unknown argument 'first'; choose from transforms, p",
        ),
        (
            [{"Compose": {"transforms": STEPS, "seed": 3}}],
            "Compose: unknown argument 'seed'",
        ),
        (
            [{"Compose": {"transforms": STEPS, "bbox_params": {"format": "coco"}}}],
            "unknown argument 'bbox_params'; choose from transforms, p",
        ),
        (
            [{"FromFloat": {}}],
            "FromFloat takes no uint8 images: leave it out",
        ),
        (
            [{"Lambda": {"name": "mine"}}],
            "Lambda needs a Python function: give the whole pipeline as module:function",
        ),
        ([{"FDA": {}}], "FDA: it needs fda_metadata, but a step gets only the image"),
        ([{"Blur": {"p": {1, 2}}}], "Object of type set is not"),
        ([A.Blur()], "type Blur is not .*; objects go into an albumentations.Compose"),
        ([{"Blur": {"p": "x" * 1000}}], r"got 'x+\.\.\.x+'"),
        ("light", "transform: must be a list of steps, got 'light'"),
    ],
    ids=range(26),
)
def test_what_is_wrong_is_one_error_that_names_it(steps: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        build(steps)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 3000
