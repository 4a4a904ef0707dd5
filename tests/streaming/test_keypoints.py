"""Keypoints go where their pixels go, and reach the batch by any way with the same bits."""

from __future__ import annotations

from typing import Any

import albumentations as A  # noqa: N812
import numpy as np
import pytest
import without_ray
from micro_batches import EncodedSample, slow_one

from raypipe.config import AugmentConfig, PlanConfig, PoolConfig, TransformConfig
from raypipe.errors import ConfigError
from raypipe.stores.memory import MemoryStore
from raypipe.streaming.handover import loader
from raypipe.streaming.opening import open_stream
from raypipe.streaming.spec import StreamSpec
from raypipe.transform.decode.rgb import encode_jpeg
from raypipe.transform.sample_maker import SampleMaker

SIZE = (192, 256)
KEYS = np.random.SeedSequence(3).generate_state(24, np.uint64).reshape(12, 2).tolist()


def scene(index: int) -> tuple[bytes, list[list[float]]]:
    """A bright disc for each of three keypoints, one colour each, on black; their labels are 2, 0 and 1."""
    rng = np.random.default_rng(index)
    image, points = np.zeros((*SIZE, 3), np.uint8), []
    rows, columns = np.mgrid[: SIZE[0], : SIZE[1]]
    for channel, label in enumerate((2, 0, 1)):
        x, y = rng.integers(15, [SIZE[1] - 15, SIZE[0] - 15]).tolist()
        image[:, :, channel] = np.where(
            (rows - y) ** 2 + (columns - x) ** 2 <= 100, 255, 0
        )
        points.append([x, y, label])
    return encode_jpeg(image, 100), points


SCENES = [scene(index) for index in range(12)]


def store() -> MemoryStore:
    images, points = zip(*SCENES, strict=True)
    packed = [np.array(each, "<f4").tobytes() for each in points]
    return MemoryStore(list(images), np.zeros(12, np.int64), columns={"joints": packed})


PIPELINES: dict[str, Any] = {
    **{name: name for name in ("light", "heavy", "center", "resize", "small")},
    "turned": A.Compose(
        [A.Resize(128, 128), A.RandomRotate90(p=1), A.Transpose(p=0.5)]
    ),
    "perspective": A.Compose([A.Perspective(p=1), A.Resize(128, 128)]),
}


@pytest.mark.parametrize("name", PIPELINES)
def test_a_keypoint_is_where_its_disc_is_and_changes_no_pixel(name: str) -> None:
    num_seen, num_marked = 0, 0
    config = TransformConfig(size=128, targets={"keypoints": "joints"})
    made = SampleMaker(PIPELINES[name], config)
    plain = SampleMaker(PIPELINES[name], TransformConfig(size=128))
    for (image, points), key in zip(SCENES, KEYS, strict=True):
        found = slow_one(made, EncodedSample(image, 0, {"joints": points}), key)
        pixels = found["image"]
        assert np.array_equal(
            pixels, slow_one(plain, EncodedSample(image), key)["image"]
        )
        assert (
            found["keypoints"].shape == (3, 3)
            and found["keypoints"].dtype == np.float32
        )
        for channel, (x, y, label) in enumerate(found["keypoints"].tolist()):
            inside = 0 <= x < 128 and 0 <= y < 128
            assert label == (points[channel][2] if inside else -2 - points[channel][2])
            num_marked += not inside
            if not (30 <= x < 98 and 30 <= y < 98):  # else the disc may be cut
                continue
            num_seen += 1
            if name != "heavy":  # whose colours may change places
                rows, columns = np.nonzero(pixels[:, :, channel] > 127)
                assert abs(columns.mean() - x) < 2 and abs(rows.mean() - y) < 2
    assert num_seen > 3 and (num_marked or name not in ("light", "heavy"))


def spec_of(transform: Any = "light", **config: Any) -> StreamSpec:
    return open_stream(
        store(),
        plan=PlanConfig(epochs=2, micro_batch_size=4),
        transform=TransformConfig(
            size=32, **{"targets": {"keypoints": "joints", "max": 5}, **config}
        ),
        train_transform=transform,
        pool=PoolConfig(engine="inline"),
    )


def test_what_does_not_go_with_keypoints_ends_the_run() -> None:
    with pytest.raises(
        ConfigError, match=r"it has 3 keypoints, and transform\.targets\.max is 2"
    ):
        next(
            without_ray.host_batches(spec_of(targets={"keypoints": "joints", "max": 2}))
        )
    with pytest.raises(
        ConfigError,
        match=r"transform\.targets\.keypoints needs an albumentations\.Compose or .*, and the transform is",
    ):
        spec_of(lambda image: image)
    with pytest.raises(
        ConfigError, match=r"no column 'elbows' for transform\.targets\.keypoints"
    ):
        spec_of(targets={"keypoints": "elbows"})
    with pytest.raises(ConfigError, match="mixes images, not masks and the like"):
        loader(spec_of(), augment=AugmentConfig(mixup_alpha=0.2))
