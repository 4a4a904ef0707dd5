"""A crop for which images are too small is told of before the run, and not by bad samples."""

from __future__ import annotations

from typing import Any

import albumentations as A  # noqa: N812
import pytest

from raypipe.config import PlanConfig, TransformConfig
from raypipe.errors import ConfigError
from raypipe.stores.base import MemoryStore
from raypipe.streaming.opening import open_stream

from pictures import picture  # isort: skip


class NotRead(MemoryStore):
    """A store of which no image may be read."""

    def read(self, *_: Any) -> Any:
        raise AssertionError("an image was read for a transform that makes its own room")


TOO_SMALL: dict[str, dict[str, Any]] = {
    "preset": {"transform": TransformConfig(train="flip-crop", val="none")},
    "schedule": {"transform": TransformConfig(train="flip-crop", val="resize", size={0: 32, 3: 224})},
    "steps": {"train_transform": [{"HorizontalFlip": {}}, {"RandomCrop": {"height": 60, "width": 9}}]},
    "compose": {"train_transform": A.Compose([A.CenterCrop(41, 9), A.Blur()])},
}


@pytest.mark.parametrize("name", [*TOO_SMALL])
def test_a_crop_that_no_image_has_room_for_is_refused_before_the_run(name: str) -> None:
    images: list[bytes | None] = [b"damaged", None, *(picture(number, 40, 48) for number in range(12))]
    store = MemoryStore(images, [0] * len(images))
    mend = r"Set transform\.size=40" if name in ("preset", "schedule") else "begin with a resize"
    with pytest.raises(ConfigError, match=rf"transform\.train .*memory:.*40x48 .*{mend}"):
        open_stream(store, plan=PlanConfig(micro_batch_size=2), **TOO_SMALL[name])


def test_a_crop_is_allowed_where_some_images_have_room_or_after_resize() -> None:
    small, large = picture(0, 32, 32), picture(1, 232, 240)
    mixed = MemoryStore([small, large, small], [0] * 3)
    open_stream(mixed, plan=PlanConfig(micro_batch_size=2), transform=TransformConfig(train="flip-crop"))
    open_stream(
        MemoryStore([small] * 3, [0] * 3),
        plan=PlanConfig(micro_batch_size=2),
        transform=TransformConfig(train="flip-crop", size=40),  # with the preset's border there is room
    )
    store = NotRead([small] * 3, [0] * 3)
    for transform in (
        "center",
        "light",
        [{"Resize": {"height": 9, "width": 9}}, {"CenterCrop": {"height": 9, "width": 9}}],
    ):
        open_stream(store, plan=PlanConfig(micro_batch_size=2), train_transform=transform)
