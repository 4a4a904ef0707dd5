"""The last lines of training scripts, which the device does: what is taken from a pipeline, and what is left."""

from __future__ import annotations

from typing import Any

import albumentations as A  # noqa: N812
import numpy as np
import pytest
import torch
import torchvision
from albumentations.pytorch import ToTensorV2
from torchvision import tv_tensors
from torchvision.transforms import v2

from raypipe.config import AugmentConfig, TransformConfig
from raypipe.device.augment import Normalize
from raypipe.errors import ConfigError
from raypipe.transform.ending import normalization, take_ending
from raypipe.transform.sample_transform import SampleTransform
from raypipe.transform.split_endings import take_endings
from raypipe.transform.views import View, find_views

OLD = torchvision.transforms
NUMBERS: Any = ([0.49, 0.48, 0.45], [0.25, 0.24, 0.26])
IMAGE = np.random.default_rng(0).integers(0, 256, (12, 10, 3), np.uint8)
FLOAT = v2.ToDtype(torch.float32, scale=True)

ENDINGS = {
    "A.Normalize, ToTensorV2": [A.Normalize(*NUMBERS), ToTensorV2()],
    "A.Normalize of gray": [A.Normalize((0.5,), (0.25,)), ToTensorV2()],
    "A.ToFloat": [A.ToFloat(), ToTensorV2()],
    "A.ToFloat, A.Normalize": [
        A.ToFloat(max_value=255),
        A.Normalize(*NUMBERS, max_pixel_value=1.0),
    ],
    "v2.ToDtype, v2.Normalize": [
        v2.ToImage(),
        FLOAT,
        v2.Normalize(*NUMBERS),
        v2.ToPureTensor(),
    ],
    "v2.ToDtype without scale": [
        v2.ToDtype(torch.float32),
        v2.Normalize([123.0], [58.0]),
    ],
    "v2.ToDtype of float16": [v2.ToDtype(torch.float16, scale=True)],
    "v2.ToDtype by a mapping": [
        v2.ToDtype({tv_tensors.Image: torch.float32, "others": None}, scale=True)
    ],
    "v2.ConvertImageDtype": [
        v2.ConvertImageDtype(torch.float64),
        v2.Normalize(*NUMBERS),
    ],
    "PILToTensor, ConvertImageDtype": [
        OLD.PILToTensor(),
        OLD.ConvertImageDtype(torch.float32),
    ],
    "ToTensor, Normalize": [OLD.ToTensor(), OLD.Normalize(*NUMBERS)],
}


def by_library(steps: list[Any]) -> torch.Tensor:
    """The image, (C, H, W), as the library makes it."""
    if type(steps[0]).__module__.startswith("albumentations"):
        made = A.Compose(steps)(image=IMAGE)["image"]
        return (
            made
            if isinstance(made, torch.Tensor)
            else torch.from_numpy(made).permute(2, 0, 1)
        )
    if isinstance(steps[0], OLD.ToTensor):
        return OLD.Compose(steps)(IMAGE)
    tensor = tv_tensors.Image(torch.from_numpy(IMAGE).permute(2, 0, 1))
    return v2.Compose(
        [step for step in steps if not isinstance(step, OLD.PILToTensor)]
    )(tensor)


@pytest.mark.parametrize("name", ENDINGS)
def test_the_device_makes_what_the_library_makes(name: str) -> None:
    steps = ENDINGS[name]
    is_of_albumentations = name.startswith("A.")
    first = A.HorizontalFlip() if is_of_albumentations else v2.RandomHorizontalFlip()
    compose = (
        A.Compose
        if is_of_albumentations
        else OLD.Compose
        if "Tensor" in name[:10]
        else v2.Compose
    )
    rest, ending = take_ending(compose([first, *steps]))
    assert (
        next(iter(rest.transforms)) is first and ending is not None and ending.on_device
    )
    assert all(
        type(step).__name__ in ("ToImage", "PILToTensor", type(first).__name__)
        for step in rest.transforms
    )
    dtype = getattr(torch, ending.dtype)
    normalize = Normalize(
        AugmentConfig(mean=ending.mean, std=ending.std), torch.device("cpu"), dtype
    )
    found = normalize(torch.from_numpy(IMAGE).permute(2, 0, 1)[None])[0]
    expected = by_library(steps)
    assert found.dtype == expected.dtype
    torch.testing.assert_close(
        found, expected, atol=2e-3 if dtype == torch.float16 else 2e-6, rtol=1e-6
    )


def test_an_ending_in_nested_pipelines_is_found_and_nothing_may_be_left() -> None:
    normalize = v2.Compose([FLOAT, v2.Normalize(*NUMBERS)])
    rest, ending = take_ending(v2.Compose([v2.Compose([v2.RandomCrop(8)]), normalize]))
    assert ending and ending.mean == (0.49, 0.48, 0.45) and len(rest.transforms) == 1
    rest, ending = take_ending(torch.nn.Sequential(v2.RandomCrop(8), FLOAT))
    assert (
        ending and ending.dtype == "float32" and [*map(type, rest)] == [v2.RandomCrop]
    )
    assert take_ending(OLD.ToTensor())[0] is None
    assert take_ending(A.Compose([A.Normalize(), ToTensorV2()]))[0] is None


@pytest.mark.parametrize(
    "pipeline",
    [
        v2.Compose(
            [v2.ToImage(), v2.RGB(), v2.ToDtype(torch.uint8), v2.ToPureTensor()]
        ),
        A.Compose([A.HorizontalFlip(), ToTensorV2()]),
        A.Compose([A.HorizontalFlip(), A.ToFloat(), A.FromFloat("uint8")]),
        OLD.Compose([OLD.RandomCrop(8), OLD.PILToTensor()]),
    ],
)
def test_steps_that_change_no_values_are_left_out(pipeline: Any) -> None:
    rest, ending = take_ending(pipeline)
    assert (
        ending is None and SampleTransform(rest)(IMAGE.copy(), (1, 2)).dtype == np.uint8
    )


@pytest.mark.parametrize(
    ("pipeline", "because"),
    [
        (
            v2.Compose([FLOAT, v2.Normalize(*NUMBERS), v2.RandomErasing(p=1)]),
            "ToDtype stands before RandomErasing",
        ),
        (
            A.Compose([A.Normalize(normalization="image"), ToTensorV2()]),
            "by chance, or depends",
        ),
        (
            A.Compose([A.Normalize(), A.VerticalFlip(p=1e-9), ToTensorV2()]),
            "Normalize stands before VerticalFlip",
        ),
        (
            v2.Compose([FLOAT, v2.RandomHorizontalFlip(1e-9)]),
            "ToDtype stands before RandomHorizontalFlip",
        ),
        (
            v2.Compose([FLOAT, v2.ClampBoundingBoxes()]),
            "ToDtype stands before ClampBoundingBoxes",
        ),
        (v2.Compose([FLOAT, v2.Lambda(lambda image: image)]), "stands before Lambda"),
        (
            OLD.Compose(
                [OLD.ToTensor(), OLD.Resize((12, 10)), OLD.Normalize(*NUMBERS)]
            ),
            "ToTensor stands before Resize",
        ),
    ],
)
def test_floats_in_the_middle_are_made_by_the_library(
    pipeline: Any, because: str
) -> None:
    rest, ending = take_ending(pipeline)
    assert ending and not ending.on_device and because in ending.because
    made = SampleTransform(rest)(IMAGE.copy(), (1, 2))
    assert made.dtype == np.float32 and made.shape == IMAGE.shape


def halves(image: np.ndarray, **_: Any) -> np.ndarray:
    return image / np.float32(2)


@pytest.mark.parametrize(
    ("pipeline", "channels"),
    [
        (OLD.Compose([OLD.Grayscale(), OLD.ToTensor(), OLD.Normalize(0.1, 0.3)]), 1),
        (OLD.Compose([lambda pil: pil.convert("L"), OLD.ToTensor()]), 1),
        (v2.Compose([v2.Grayscale(), FLOAT, v2.Normalize([0.1], [0.3])]), 1),
        (A.Compose([A.ToGray(1, p=1), A.Normalize((0.1,), (0.3,)), ToTensorV2()]), 1),
        (A.Compose([A.Lambda(image=halves, name="halves"), A.Normalize()]), 3),
    ],
    ids=["Grayscale", "convert L", "v2", "ToGray", "own floats"],
)
def test_an_ending_stays_where_the_steps_before_make_no_uint8_rgb(
    pipeline: Any, channels: int
) -> None:
    rest, ending = take_ending(pipeline)
    assert rest is pipeline and ending and not ending.on_device
    assert "do not make uint8 RGB" in ending.because
    made = SampleTransform(rest)(IMAGE.copy(), (1, 2))
    assert made.dtype == np.float32 and made.shape == (*IMAGE.shape[:2], channels)


def test_looking_at_a_pipeline_leaves_its_generators_as_they_are() -> None:
    pipeline = A.Compose([A.RandomCrop(8, 8), A.Normalize(), ToTensorV2()], seed=3)
    twin = A.Compose([A.RandomCrop(8, 8), A.Normalize(), ToTensorV2()], seed=3)
    torch.manual_seed(1)
    take_ending(pipeline)
    take_ending(v2.Compose([v2.RandomCrop(8), FLOAT]))
    found = torch.rand(3)
    torch.manual_seed(1)
    assert torch.equal(found, torch.rand(3))
    images = (each(image=IMAGE)["image"] for each in (pipeline, twin))
    assert torch.equal(next(images), next(images))


def test_a_normalize_on_uint8_is_an_error_with_the_step_to_add() -> None:
    with pytest.raises(
        ConfigError,
        match=r"Normalize fails .*uint8.*\(write v2.ToDtype\(torch.float32, scale=True\)",
    ):
        take_ending(v2.Compose([v2.RandomCrop(8), v2.Normalize(*NUMBERS)]))
    with pytest.raises(
        ConfigError, match=r"Normalize fails .* and a number for each channel"
    ):
        take_ending(v2.Compose([FLOAT, v2.Normalize((0.5,) * 4, (0.5,) * 4)]))


def test_one_normalization_holds() -> None:
    _, ending = take_ending(v2.Compose([FLOAT, v2.Normalize(*NUMBERS)]))
    _, scaled = take_ending(FLOAT)
    assert ending and scaled
    config = normalization(AugmentConfig(preset="light"), ending)
    assert config and config.mean == (0.49, 0.48, 0.45) and config.preset == "light"
    own = AugmentConfig(mean=(0.5,) * 3, std=(0.5,) * 3)
    assert normalization(own, scaled) is own, (
        "a pipeline that only scales leaves the rest to augment"
    )
    with pytest.raises(
        ConfigError, match=r"ends with ToDtype, Normalize .* leave one of them out"
    ):
        normalization(own, ending)
    _, middle = take_ending(
        v2.Compose([FLOAT, v2.Normalize(*NUMBERS), v2.RandomErasing()])
    )
    with pytest.raises(
        ConfigError,
        match=r"ToDtype stands before RandomErasing.* end the pipeline with",
    ):
        normalization(AugmentConfig(preset="standard"), middle)


def test_lists_views_and_presets_have_endings_too() -> None:
    config, normalize = (
        TransformConfig(size=8),
        {"Normalize": {"mean": [0.5] * 3, "std": [0.25] * 3}},
    )
    steps = [{"RandomCrop": {"height": 8, "width": 8}}]
    rests, endings = take_endings(
        {"train": [*steps, normalize, {"ToTensorV2": None}], "val": "center"}, config
    )
    assert rests == {"train": steps, "val": "center"}
    assert (
        endings["train"].std == endings["val"].std == (0.25,) * 3
        and not endings["val"].is_own
    )
    views = {
        "a": ([*steps, normalize], 2),
        "b": {"transforms": [[*steps, normalize]] * 2},
        "c": "light",
    }
    rests, endings = take_endings({"train": views}, config)
    assert rests["train"] == {
        "a": View((steps,), 2, 8),
        "b": View((steps, steps), 2, 8),
        "c": View(("light",), 1, 8),
    }
    assert find_views(rests["train"], 8) == rests["train"]
    assert endings["train"].mean == (0.5,) * 3
    with pytest.raises(
        ConfigError, match=r"view 'b' ends with no step .* and view 'a' with Normalize"
    ):
        take_endings({"train": {"a": [*steps, normalize], "b": steps}}, config)
    with pytest.raises(
        ConfigError,
        match=r"train ends with Normalize, and transform.val is RandomCrop",
    ):
        take_endings({"train": [*steps, normalize], "val": steps}, config)
