"""The parts that need the compiled extension are skipped where it is not built, and say so."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator
from typing import Any

import bombs
import cv2
import numpy as np
import pytest
import simplejpeg
from PIL import Image

from raypipe.config import PlanConfig, TransformConfig
from raypipe.errors import SampleError
from raypipe.plan.places import MicroBatchId
from raypipe.stores.memory import MemoryStore
from raypipe.streaming.maker import MicroBatchMaker
from raypipe.streaming.opening import open_stream
from raypipe.transform.decode import jpeg as jpeg_module
from raypipe.transform.decode.jpeg import (
    Box,
    Undecoded,
    decode_box,
    decode_jpeg_at,
    open_for_crop,
    why_no_kernel,
)
from raypipe.transform.decode.rgb import decode

needs_extension = pytest.mark.skipif(
    bool(why_no_kernel()), reason=f"no kernel: {why_no_kernel()}"
)
RNG = np.random.default_rng(0)


@contextlib.contextmanager
def no_extension() -> Iterator[None]:
    """What a node without the extension does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jpeg_module, "why_no_kernel", lambda: "not built")
        yield


def noise(height: int, width: int) -> np.ndarray:
    """Pixels that use every coefficient, so that nothing can be left out unseen."""
    return RNG.integers(0, 256, (height, width, 3), np.uint8)


def cut(image: np.ndarray, box: Box) -> np.ndarray:
    top, left, height, width = box
    return image[top : top + height, left : left + width]


def by_pillow(image: np.ndarray, mode: str = "RGB", **options: Any) -> bytes:
    out = io.BytesIO()
    Image.fromarray(image).convert(mode).save(out, "JPEG", quality=92, **options)
    return out.getvalue()


KINDS: dict[str, Callable[[np.ndarray], bytes]] = {
    **{
        sampling: lambda image, sampling=sampling: simplejpeg.encode_jpeg(
            image, 90, "RGB", sampling
        )
        for sampling in ("444", "422", "420", "440", "411", "Gray")
    },
    "progressive 420": lambda image: by_pillow(
        image, progressive=True, subsampling="4:2:0"
    ),
    "progressive 444": lambda image: by_pillow(
        image, progressive=True, subsampling="4:4:4"
    ),
    "progressive gray": lambda image: by_pillow(image, "L", progressive=True),
    "restart markers": lambda image: by_pillow(
        image, restart_marker_blocks=3, subsampling="4:2:0"
    ),
    "RGB, not YCbCr": lambda image: by_pillow(image, keep_rgb=True),
    "CMYK": lambda image: by_pillow(image, "CMYK"),
}


def boxes(height: int, width: int, num: int) -> Iterator[Box]:
    """Corners, edges, single pixels, the whole, and boxes anywhere."""
    yield from [
        (0, 0, height, width),
        (0, 0, 1, 1),
        (height - 1, width - 1, 1, 1),
        (0, width // 2, height, 1),
    ]
    for _ in range(num):
        h, w = int(RNG.integers(1, height + 1)), int(RNG.integers(1, width + 1))
        yield int(RNG.integers(height - h + 1)), int(RNG.integers(width - w + 1)), h, w


@needs_extension
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(1, 1), (7, 9), (33, 50), (64, 64), (101, 83)])
def test_a_box_has_the_pixels_of_the_whole_to_the_bit(
    kind: str, shape: tuple[int, int]
) -> None:
    data = KINDS[kind](noise(*shape))
    whole = decode(data)
    for box in boxes(*shape, 12):
        assert np.array_equal(decode_box(data, box), cut(whole, box)), box


@needs_extension
@pytest.mark.parametrize("eighths", [1, 2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_at_a_scale_it_has_the_pixels_of_simplejpeg_at_that_scale(
    kind: str, eighths: int
) -> None:
    data = KINDS[kind](noise(91, 130))
    whole = decode_jpeg_at(data, -(-91 * eighths // 8))
    assert whole.shape[:2] == (-(-91 * eighths // 8), -(-130 * eighths // 8))
    for box in boxes(*whole.shape[:2], 12):
        pixels = decode_box(data, box, eighths)
        assert np.array_equal(pixels, cut(whole, box)), box
        with no_extension():
            assert np.array_equal(decode_box(data, box, eighths), pixels)


@needs_extension
def test_the_extension_decodes_all_but_the_unusual_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        jpeg_module, "decode_jpeg_at", lambda *a: pytest.fail("decoded whole")
    )
    for kind, encode in KINDS.items():
        if kind != "CMYK":
            assert decode_box(encode(noise(40, 40)), (3, 5, 7, 9)).shape == (7, 9, 3)


@needs_extension
def test_an_unfinished_progressive_file_is_smoothed_as_a_whole() -> None:
    """libjpeg guesses what is missing from the neighbors, which a crop has other ones of."""
    smooth = cv2.resize(noise(6, 6), (96, 96))
    data = by_pillow(smooth, progressive=True, subsampling="4:4:4")
    scans = [at for at in range(len(data)) if data[at : at + 2] == b"\xff\xda"]
    for kept in range(1, 4):
        part = data[: scans[kept]] + b"\xff\xd9"
        assert np.array_equal(
            decode_box(part, (30, 30, 20, 20)), cut(decode(part), (30, 30, 20, 20))
        )


# --- damage


def outcome(run: Callable[[bytes], np.ndarray], data: bytes) -> bytes | str:
    try:
        return run(data).tobytes()
    except SampleError as error:
        return str(error)


@needs_extension
@pytest.mark.parametrize("kind", ["420", "444", "progressive 420", "restart markers"])
def test_damage_anywhere_is_found_and_named_as_in_the_whole(kind: str) -> None:
    data = KINDS[kind](cv2.resize(noise(12, 12), (120, 100)))
    box = 10, 20, 30, 40
    found = set()
    for number in range(150):
        rng = np.random.default_rng(number)
        at = int(rng.integers(len(data) // 4, len(data)))
        flipped = bytes([data[at] ^ 1 << int(rng.integers(8))])
        damaged = data[:at] + flipped + data[at + 1 :] if number % 3 else data[:at]
        part = outcome(lambda damaged: decode_box(damaged, box), damaged)
        whole = outcome(lambda damaged: cut(decode(damaged), box), damaged)
        assert part == whole
        found.add(type(part))
    assert found == {bytes, str}, "all of it was damaged, or nothing"


# --- which images, at which scale


def opened(
    data: Any, mode: Any, target: tuple[int, int] = (50, 50), **settings: Any
) -> Undecoded | None:
    return open_for_crop(data, TransformConfig(crop_decode=mode, **settings), target)


PHOTO = cv2.resize(noise(12, 16), (160, 120))
MODES = ["scaled", pytest.param("exact", marks=needs_extension)]


@pytest.mark.parametrize("mode", MODES)
def test_only_jpegs_that_may_be_cropped_are_opened(mode: Any) -> None:
    jpeg = simplejpeg.encode_jpeg(PHOTO, 90, "RGB", "420")
    found = opened(jpeg, mode)
    assert found is not None and found[0] == (120, 160)
    png = io.BytesIO()
    Image.fromarray(PHOTO).save(png, "PNG")
    for other in (png.getvalue(), b"", jpeg[:30], b"\xff\xd8\xff", bombs.rare_jpeg()):
        assert opened(other, mode) is None
    declared = jpeg.index(b"\xff\xc0")
    # 65,500 x 65,500
    bomb = jpeg[: declared + 5] + b"\xff\xdc\xff\xdc" + jpeg[declared + 9 :]
    assert opened(bomb, mode) is None
    assert opened(bombs.jpeg_of_scans(13000, 13000, 17), mode) is None


@pytest.mark.parametrize("mode", MODES)
def test_images_that_are_turned_are_left_to_the_whole_decode(mode: Any) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    turned = by_pillow(PHOTO, exif=exif)
    assert opened(turned, mode, apply_exif=True) is None
    assert opened(turned, mode) is not None
    exif[0x0112] = 1
    assert opened(by_pillow(PHOTO, exif=exif), mode, apply_exif=True) is not None


@pytest.mark.parametrize(
    ("box", "shape"),
    [
        ((0, 0, 120, 160), (15, 20)),  # 1/8
        ((0, 0, 79, 160), (20, 40)),  # 79 / 8 is under 10: 1/4
        ((8, 16, 24, 40), (12, 20)),  # 1/2
        ((8, 16, 19, 40), (19, 40)),
        ((7, 7, 40, 40), (10, 10)),
    ],
)
def test_the_scale_is_the_smallest_that_leaves_the_target(
    box: Box, shape: tuple[int, int]
) -> None:
    data = simplejpeg.encode_jpeg(PHOTO, 95, "RGB", "420")
    found = opened(data, "scaled", (10, 10))
    assert found is not None
    pixels = found[1](box)
    assert pixels.shape == (*shape, 3)
    shown = cv2.resize(
        cut(decode(data), box), shape[::-1], interpolation=cv2.INTER_AREA
    )
    # of 255: the same view, to half a pixel at the edges
    assert np.abs(pixels.astype(int) - shown).mean() < 10
    with no_extension():
        assert np.array_equal(opened(data, "scaled", (10, 10))[1](box), pixels)  # type: ignore[index]


def test_every_box_at_every_scale_keeps_a_pixel_and_stays_inside() -> None:
    for side in (15, 16, 17, 23, 40):
        spans = np.array(
            [
                (first, end - first)
                for first in range(side)
                for end in range(first + 1, side + 1)
            ]
        )
        boxes, sizes = spans[:, [0, 0, 1, 1]], np.full((len(spans), 2), side)
        for target in (1, 2, 3, 9):
            scaled, eighths = jpeg_module.scaled_boxes(boxes, sizes, (target, target))
            starts, lengths = scaled[:, :2], scaled[:, 2:]
            assert set(eighths.tolist()) <= {1, 2, 4, 8} and (
                side >= 16 or (eighths == 8).all()
            )
            assert (starts >= 0).all() and (lengths >= 1).all()
            assert (starts + lengths <= -(-side * eighths[:, None] // 8)).all()


def test_the_settings_of_a_run_reach_its_actors() -> None:
    store = MemoryStore(
        [simplejpeg.encode_jpeg(cv2.resize(PHOTO, (400, 300)), 90, "RGB", "420")] * 2,
        [0, 1],
    )

    def maker(**settings: Any) -> MicroBatchMaker:
        transform = TransformConfig(train="light", size=16, **settings)
        return MicroBatchMaker(
            open_stream(store, plan=PlanConfig(micro_batch_size=2), transform=transform)
        )

    off, exact, scaled = (
        maker(crop_decode=mode).batch(MicroBatchId("train", 0, 0, 0))["image"]
        for mode in ("off", "exact", "scaled")
    )
    assert np.array_equal(off, exact) and not np.array_equal(off, scaled)
