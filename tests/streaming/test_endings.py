"""Streams of pipelines as training scripts have them: batches are float and normalized, made on the device."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import albumentations as A  # noqa: N812
import cv2
import numpy as np
import pytest
import torch
from albumentations.pytorch import ToTensorV2
from small_streams import spec_of
from torchvision.transforms import v2
from without_ray import digests

import raypipe
from raypipe.commands.preview_tiles import Preview
from raypipe.config import AugmentConfig, PlanConfig
from raypipe.device.augment import DeviceAugment
from raypipe.device.prefetcher import Batch
from raypipe.errors import ConfigError
from raypipe.history.step_maker import Remade, StepMaker
from raypipe.plan.places import Cursor
from raypipe.stores.memory import MemoryStore
from raypipe.streaming.digest import plain_settings
from raypipe.streaming.saving.checkpoints import write_checkpoint
from raypipe.streaming.saving.saved_model import input_of
from raypipe.streaming.saving.stateful import saved
from raypipe.streaming.spec import StreamSpec

MEAN, STD = (0.49, 0.48, 0.45), (0.25, 0.24, 0.26)
NUMBERS: Any = {"mean": MEAN, "std": STD}
CROP = [A.RandomCrop(16, 16), A.HorizontalFlip(p=0.5)]
FLOATS = v2.ToDtype(torch.float32, scale=True)
NORMALIZED = [FLOATS, v2.Normalize(MEAN, STD)]
PLAN = PlanConfig(epochs=2, micro_batch_size=4, global_batch_size=8, seed=3)


def picture(seed: int) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (20, 24, 3), np.uint8)
    return cv2.imencode(".png", pixels)[1].tobytes()


STORE = MemoryStore(
    [picture(seed) for seed in range(16)], [seed % 3 for seed in range(16)]
)


def stream(train: Any, val: Any = None) -> StreamSpec:
    return spec_of(STORE, STORE, plan=PLAN, train_transform=train, val_transform=val)


def cropped(*last: Any) -> v2.Compose:
    return v2.Compose([v2.RandomCrop(16), *last])


def centered(*last: Any) -> v2.Compose:
    return v2.Compose([v2.CenterCrop(16), *last])


def first_batch(spec: StreamSpec, split: str = "train", **options: Any) -> Batch:
    epoch = next(raypipe.loader(spec, **options).epochs())
    return next(getattr(epoch, split))


def first(spec: StreamSpec, split: str = "train", **options: Any) -> torch.Tensor:
    return first_batch(spec, split, **options).image.clone()


def test_batches_are_what_the_library_makes_of_the_same_pixels(
    capsys: pytest.CaptureFixture[str],
) -> None:
    last = [A.Normalize(**NUMBERS), ToTensorV2()]
    image = first(
        stream(A.Compose([*CROP, *last]), A.Compose([A.CenterCrop(16, 16), *last]))
    )
    named = "Normalize, ToTensorV2 (float32, mean (0.49, 0.48, 0.45), std"
    assert named in capsys.readouterr().out
    pixels = first(stream(A.Compose(CROP), A.Compose([A.CenterCrop(16, 16)])))
    assert (
        pixels.dtype == torch.uint8
        and image.dtype == torch.float32
        and image.shape == (4, 3, 16, 16)
    )
    expected = [
        A.Compose(last)(image=row.permute(1, 2, 0).numpy())["image"] for row in pixels
    ]
    torch.testing.assert_close(image, torch.stack(expected), atol=2e-6, rtol=1e-6)


def test_an_ending_changes_the_plan_and_not_the_pixels_that_travel() -> None:
    with_ending, without = (
        stream(A.Compose([*CROP, *last]), "center")
        for last in ([A.Normalize(**NUMBERS), ToTensorV2()], [])
    )
    assert digests(with_ending) == digests(without)
    assert with_ending.plan.fingerprint != without.plan.fingerprint
    other = stream(A.Compose([*CROP, A.Normalize()]), "center")
    assert other.plan.fingerprint != with_ending.plan.fingerprint
    settings = plain_settings(with_ending, workers=1, actors=1, from_step=0, to_step=1)
    assert (
        settings["ending.train"]
        == "float32, mean (0.49, 0.48, 0.45), std (0.25, 0.24, 0.26)"
    )
    assert settings["ending.val"] == settings["ending.train"], (
        "a preset takes the other split's"
    )


def test_device_augmentation_comes_before_the_normalization() -> None:
    spec = stream(cropped(*NORMALIZED), "center")
    augment = AugmentConfig(preset="standard")
    batch = first_batch(stream(cropped(), "center"))
    by_config = DeviceAugment(
        AugmentConfig(preset="standard", **NUMBERS), torch.device("cpu")
    )
    expected, _ = by_config(
        batch.image, batch.target, batch.index >= 0, seed=batch.seed
    )
    assert torch.equal(first(spec, augment=augment), expected)
    assert first(spec, augment=augment, dtype=torch.bfloat16).dtype == torch.bfloat16
    assert torch.equal(first(spec, "val", augment=augment), first(spec, "val")), (
        "of which none is augmented"
    )
    with pytest.raises(ConfigError, match="images are normalized once"):
        raypipe.loader(spec, augment=AugmentConfig(mean=(0.5,) * 3, std=(0.5,) * 3))


def test_train_and_val_may_end_differently() -> None:
    spec = stream(cropped(*NORMALIZED), centered(FLOATS))
    train, val = first(spec), first(spec, "val")
    assert train.min() < 0 and 0 <= val.min() <= val.max() <= 1
    assert input_of(spec, None)["mean"] == [0.0] * 3, (
        "a model's input is that of the validation"
    )
    with pytest.raises(
        ConfigError,
        match=r"transform.train ends with ToDtype, Normalize, and transform.val is a",
    ):
        stream(cropped(*NORMALIZED), centered())


@pytest.mark.parametrize("form", ["numpy", "torch"])
def test_a_function_that_returns_floats_is_taken_as_it_is(
    form: str, caplog: pytest.LogCaptureFixture
) -> None:
    whole = A.Compose(
        [*CROP, A.Normalize(**NUMBERS), *([ToTensorV2()] if form == "torch" else [])]
    )

    def function(image: np.ndarray) -> Any:
        return whole(image=image)["image"]

    with caplog.at_level(logging.WARNING):
        found = first(stream(function, function))
    assert found.dtype == torch.float32 and found.shape == (4, 3, 16, 16)
    assert (
        "transform.train returns float images, which are taken as they are: float32 travels"
        in caplog.text
    )
    # Both pipelines have two random steps; the one in the function is seeded as well.
    assert torch.equal(found, first(stream(function, function)))
    assert found.min() < -1 and found.max() > 1


def test_floats_in_the_middle_travel_and_a_line_names_the_step(
    capsys: pytest.CaptureFixture[str],
) -> None:
    erased = cropped(*NORMALIZED, v2.RandomErasing(p=1))
    spec = stream(erased, centered(*NORMALIZED))
    train, val = first(spec), first(spec, "val")
    assert (
        train == 0
    ).float().mean() > 0.01 and train.dtype == val.dtype == torch.float32
    assert (
        "transform.train: ToDtype stands before RandomErasing, so the CPU makes float32"
        in capsys.readouterr().out
    )
    with pytest.raises(ConfigError, match="ToDtype stands before RandomErasing"):
        raypipe.loader(spec, augment=AugmentConfig(preset="light"))
    mixed = first_batch(spec, augment=AugmentConfig(mixup_alpha=1.0))
    assert mixed.mix is not None and mixed.image.min() < -1


def test_a_preview_shows_images_without_the_normalization() -> None:
    pixels = first(stream(cropped(), "center")).permute(0, 2, 3, 1).numpy().astype(int)
    nothing = v2.RandomErasing(p=0)
    in_module = AugmentConfig(module=torch.nn.Sequential(NORMALIZED[1]))
    for steps, augment in (
        (NORMALIZED, AugmentConfig()),
        ([*NORMALIZED, nothing], AugmentConfig()),
        ([FLOATS], in_module),
        ([FLOATS, nothing], in_module),
        ([], in_module),
    ):
        spec = stream(cropped(*steps), "center")
        maker = StepMaker(spec, augment)
        place = next(spec.plan.micro_batches(spec.plan.start()))
        images, *_ = Preview(maker).stages(Remade(maker, place))
        assert all(
            np.abs(image.astype(int) - pixels).max() <= 1 for image in images.values()
        )


def test_a_checkpoint_says_how_its_model_takes_images(tmp_path: Path) -> None:
    crop = {"RandomCrop": {"height": 16, "width": 16}}
    spec = stream(
        [crop, {"Normalize": {"mean": MEAN, "std": STD}}, {"ToTensorV2": None}],
        "center",
    )
    described, content = input_of(spec, None), saved({"net": {"w": torch.ones(2)}})
    write_checkpoint(
        tmp_path.as_uri(),
        Cursor(0, 1, spec.plan.fingerprint),
        content,
        {},
        described=described,
    )
    batch = first_batch(spec, "val")
    prepared = raypipe.read_checkpoint(tmp_path).prepare(picture(int(batch.index[0])))
    torch.testing.assert_close(prepared, batch.image[0], atol=2e-6, rtol=1e-6)


def test_a_model_takes_images_normalized_as_by_the_end_of_a_module() -> None:
    spec = stream(centered(FLOATS), centered(FLOATS))
    module = torch.nn.Sequential(v2.Normalize(MEAN, STD))
    loader = raypipe.loader(spec, augment=AugmentConfig(module=module))
    described = loader._described()
    assert (described["mean"], described["std"]) == (list(MEAN), list(STD))
    batch = next(next(loader.epochs()).val)
    image = cv2.imdecode(
        np.frombuffer(picture(int(batch.index[0])), np.uint8), cv2.IMREAD_COLOR_RGB
    )
    expected = v2.Compose([v2.ToImage(), centered(FLOATS), *module])(image)
    torch.testing.assert_close(batch.image[0], expected, atol=2e-6, rtol=1e-6)


def test_floats_before_an_ending_stay_and_a_warning_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    halved = v2.Lambda(lambda image: image / 2)
    pipeline = v2.Compose([halved, v2.CenterCrop(16), FLOATS])
    assert first(stream(pipeline, pipeline)).dtype == torch.float32
    assert "transform.train returns float images" in caplog.text
