"""The form in which images travel with `transform.wire: yuv420`; test_yuv420.py has the arithmetic."""

from __future__ import annotations

from typing import Any

import cv2
import numpy as np
import pytest
import simplejpeg

from raypipe.config import TransformConfig
from raypipe.errors import ConfigError
from raypipe.kernel import yuv420
from raypipe.transform.planes import (
    black,
    chromas,
    from_planes,
    outputs,
    packer,
    to_planes,
)
from raypipe.transform.sample_maker import SampleMaker
from raypipe.transform.samples import EncodedSample

NOISE = np.random.default_rng(0).integers(0, 256, (2, 3, 7, 9, 3), np.uint8)
IMAGES = {"view.a": NOISE, "view.b": NOISE[0, 0]}


def test_fields_that_were_packed_and_unpacked_are_rgb_and_others_stay() -> None:
    fields = {**to_planes(IMAGES), "label": np.arange(2)}
    assert {name: array.shape for name, array in chromas(fields).items()} == {
        "view.a": (2, 3, 4, 5, 2),
        "view.b": (4, 5, 2),
    }
    unpacked = from_planes(fields)
    assert unpacked.keys() == {"view.a", "view.b", "label"}
    for name, image in IMAGES.items():
        assert np.array_equal(unpacked[name], yuv420.rgb(*yuv420.numpy_planes(image)))
    assert from_planes(IMAGES) == IMAGES and not chromas(IMAGES)
    assert from_planes(fields, lambda luma, chroma: luma)["view.a"] is fields["view.a"]


def test_the_kernel_fills_luma_and_chroma_or_rgb() -> None:
    fields = to_planes(IMAGES)
    luma, chroma = outputs(fields, "view.b")
    assert luma is fields["view.b"] and chroma is chromas(fields)["view.b"]
    assert outputs(IMAGES, "view.b") == (IMAGES["view.b"], None)


def test_black_in_planes_is_what_padding_holds() -> None:
    fields = to_planes({"image": np.zeros((4, 4, 3), np.uint8)})
    assert all((array == black(name)).all() for name, array in fields.items())


def test_images_of_floats_are_refused_and_the_rgb_wire_leaves_all() -> None:
    floats = {"image": np.zeros((2, 2, 3), np.float32)}
    assert packer("rgb")(floats) is floats
    with pytest.raises(ConfigError, match=r"sends uint8 RGB, .* made float32"):
        packer("yuv420")(floats)


@pytest.mark.parametrize("other", [{"decode_as": "array"}], ids=str)
def test_what_does_not_go_with_it_is_told_in_a_line(other: Any) -> None:
    (name,) = other
    message = rf"^transform\.{name} must be '\w+' with transform\.wire='yuv420', got '{other[name]}'$"
    with pytest.raises(ConfigError, match=message):
        TransformConfig(wire="yuv420", **other)


def test_fields_have_the_shapes_of_planes_before_and_after_a_sample() -> None:
    transforms: list[Any] = ["center", lambda image: cv2.resize(image, (9, 9))]
    for transform in transforms:
        content = SampleMaker(transform, TransformConfig(wire="yuv420", size=9))
        data = simplejpeg.encode_jpeg(np.zeros((20, 30, 3), np.uint8))
        fields = content.slow(EncodedSample(data, 0), (1, 2))
        assert {name: np.shape(part) for name, part in fields.items()} == {
            "image": (9, 9, 1),
            "chroma.image": (5, 5, 2),
            "label": (),
        }
        assert (
            content.fields["chroma.image"].fill == 128
            and content.fields["image"].fill == 0
        )
