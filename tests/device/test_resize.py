"""Cuts and resizes of many images at once, against torch's one image at a time, in floats."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from encoded import encoded, keys_of, saved
from torch.nn.functional import interpolate

from raypipe.config import TransformConfig
from raypipe.device.resize import resize_boxes
from raypipe.kernel import Op
from raypipe.transform.decode.rgb import decode
from raypipe.transform.encoded_map import MAP, box_of_map
from raypipe.transform.sample_maker import SampleMaker

IMAGES = [
    saved(0),
    saved(1, sides=(97, 400)),
    saved(2, sides=(60, 50)),
    saved(3, sides=(333, 100)),
]
PIPELINES: dict[str, Any] = {
    "light": "light",
    "center": "center",
    "resize": "resize",
    "flip-crop": [
        {"Pad": {"padding": 4}},
        {"RandomCrop": {"height": 50, "width": 40}},
        {"HorizontalFlip": {}},
    ],
    "cubic": [
        {"RandomResizedCrop": {"size": [70, 90], "interpolation": 2}},
        {"VerticalFlip": {}},
    ],
    "turns": [
        {"RandomRotate90": {}},
        {"Resize": {"height": 80, "width": 70}},
        {"D4": {}},
        {"CenterCrop": {"height": 70, "width": 70}},
    ],
    "twice": [
        {"SmallestMaxSize": {"max_size": 80}},
        {"Transpose": {}},
        {"RandomResizedCrop": {"size": [90, 60]}},
    ],
    "borders": [
        {"Pad": {"padding": [30, 0, 10, 40], "fill": [9, 200, 30]}},
        {"HorizontalFlip": {}},
        {"Resize": {"height": 60, "width": 80}},
        {"Pad": {"padding": 20, "fill": [9, 200, 30]}},
        {"RandomCrop": {"height": 50, "width": 50}},
    ],
}


def boxes(maps: np.ndarray) -> list[torch.Tensor]:
    cut = []
    for image, of_map in zip(IMAGES, maps, strict=True):
        top, left, bottom, right = box_of_map(of_map)
        cut.append(
            torch.from_numpy(decode(image)[top:bottom, left:right]).permute(2, 0, 1)
        )
    return cut


def step_by_step(image: np.ndarray, program: Any, params: np.ndarray) -> np.ndarray:
    """The program's steps one after the other, in floats, with torch's antialiased resize."""
    pixels = torch.from_numpy(image).permute(2, 0, 1).double()
    for step, op, p in program.applied(params):
        if op == Op.CROP:
            pixels = pixels[:, p[0] : p[0] + p[2], p[1] : p[1] + p[3]]
        elif op == Op.PAD:
            fill = torch.tensor(p[5:8]).double().view(3, 1, 1)
            pixels = (
                torch.nn.functional.pad(pixels - fill, (p[2], p[3], p[0], p[1])) + fill
            )
        elif op == Op.RESIZE:
            mode = "bicubic" if step.interpolation == 2 else "bilinear"
            pixels = interpolate(pixels[None], tuple(p[:2]), mode=mode, antialias=True)[
                0
            ]
        else:
            pixels = pixels.transpose(1, 2) if p[0] & 4 else pixels
            pixels = pixels.flip([axis for axis, bit in ((1, 2), (2, 1)) if p[0] & bit])
    return pixels.clamp(0, 255).permute(1, 2, 0).numpy()


@pytest.mark.parametrize("name", PIPELINES)
def test_all_at_once_is_what_torch_makes_of_each(name: str) -> None:
    batch, content = (
        encoded(IMAGES, PIPELINES[name]),
        SampleMaker(PIPELINES[name], TransformConfig(size=96)),
    )
    program = content._transforms[0].program
    assert program is not None
    images = [decode(image) for image in IMAGES]
    params, _ = program.draw(
        keys_of(4), np.array([image.shape[:2] for image in images])
    )
    made = resize_boxes(boxes(batch[MAP]), batch[MAP]).numpy()
    for row, image in enumerate(images):
        apart = np.abs(made[row] - step_by_step(image, program, params[row]))
        assert apart.max() < 1.5 and apart.mean() < 0.4, (
            f"{name}, image {row}: {apart.max()}, {apart.mean()}"
        )


def test_an_image_has_the_same_bits_alone_and_among_others() -> None:
    maps = encoded(IMAGES)[MAP]
    together = resize_boxes(boxes(maps), maps)
    alone = [
        resize_boxes([box], maps[row : row + 1])[0]
        for row, box in enumerate(boxes(maps))
    ]
    assert all(
        torch.equal(one, other) for one, other in zip(together, alone, strict=True)
    )


@pytest.mark.parametrize("precision", ["highest", "medium"])
def test_neither_threads_nor_precision_of_products_change_a_bit(precision: str) -> None:
    maps = encoded(IMAGES)[MAP]
    expected, before = (
        resize_boxes(boxes(maps), maps),
        torch.get_float32_matmul_precision(),
    )
    torch.set_float32_matmul_precision(precision)
    try:
        assert torch.equal(resize_boxes(boxes(maps), maps), expected)
    finally:
        torch.set_float32_matmul_precision(before)


def test_one_color_stays_that_color_at_any_scale() -> None:
    maps = encoded([saved(0, sides=(1000, 40))] * 2, "resize")[MAP]
    plain = torch.full((3, 1000, 40), 251, dtype=torch.uint8)
    assert resize_boxes([plain, plain], maps).unique().tolist() == [251]


def test_images_that_stay_as_they_are_have_the_bits_of_the_products(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    images = [saved(number, sides=(48, 36)) for number in range(4)]
    maps = encoded(images, [{"Resize": {"height": 48, "width": 36}}])[MAP]
    whole = [torch.from_numpy(decode(image)).permute(2, 0, 1) for image in images]
    copied = resize_boxes(whole, maps)
    monkeypatch.setattr("raypipe.device.resize._are_whole", lambda axes: False)
    assert torch.equal(resize_boxes(whole, maps), copied)
