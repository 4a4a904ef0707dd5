"""Boxes and flips as functions of header and key; the packed row; bad headers."""

import io
import pickle

import bombs
import cv2
import numpy as np
import pytest
from micro_batches import run
from pictures import picture
from PIL import Image

from raypipe.config import TransformConfig
from raypipe.errors import ConfigError, SampleError
from raypipe.transform.batch import MicroBatchTransform
from raypipe.transform.decode import decode, encode_jpeg, image_size
from raypipe.transform.draws import Key
from raypipe.transform.encoded import CROP, DATA, FLIP, EncodedTransform, center_box, random_resized_crop
from raypipe.transform.fields import Ragged
from raypipe.transform.samples import EncodedSample


def made(preset: str, size: int) -> EncodedTransform:
    return EncodedTransform(preset, TransformConfig(size=size))


def cut(transform: EncodedTransform, data: bytes | None, key: Key) -> tuple[tuple[int, ...], bool]:
    """The box, and whether it is flipped."""
    made = transform.one(EncodedSample(data), key)
    assert made[DATA] is data
    return made[CROP], made[FLIP]


def keys(num: int) -> np.ndarray:
    return np.random.default_rng(7).integers(0, 2**64, (num, 2), np.uint64)


def saved(format: str, height: int = 30, width: int = 50, **options: object) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (width, height), (200, 100, 50)).save(file, format, **options)
    return file.getvalue()


def test_the_draws_are_those_of_a_fresh_philox_whatever_came_before() -> None:
    data, transform = picture(0, 300, 400), made("light", 64)
    forwards = [cut(transform, data, key) for key in keys(20).tolist()]
    backwards = [cut(transform, data, key) for key in keys(20).tolist()[::-1]][::-1]
    assert forwards == backwards
    for key, (box, flip) in zip(keys(20), forwards, strict=True):
        fresh = np.random.Generator(np.random.Philox(key=key))
        assert (random_resized_crop(300, 400, fresh), bool(fresh.random() < 0.5)) == (box, flip)
    assert cut(pickle.loads(pickle.dumps(transform)), data, keys(1)[0]) == forwards[0]


def test_the_draws_never_change() -> None:
    transform, data = made("light", 64), saved("BMP", 300, 400)
    assert [cut(transform, data, key) for key in [(0, 0), (1, 0), (2**64 - 1, 5)]] == [
        ((69, 33, 112, 97), False),
        ((52, 26, 188, 230), True),
        ((153, 87, 125, 126), False),
    ]


@pytest.mark.parametrize(("height", "width"), [(375, 500), (500, 375), (224, 224), (33, 57)])
def test_light_draws_the_areas_and_ratios_of_inception(height: int, width: int) -> None:
    rng = np.random.default_rng(0)
    boxes = np.array([random_resized_crop(height, width, rng) for _ in range(4000)])
    top, left, h, w = boxes.T
    assert boxes.dtype.kind == "i" and (boxes >= 0).all() and (h > 0).all() and (w > 0).all()
    assert (top + h <= height).all() and (left + w <= width).all()
    slack = 1 / min(h.min(), w.min())  # half a pixel of either side, relative
    area, ratio = h * w / (height * width), w / h
    largest = min(height, width * 4 / 3) * min(width, height * 4 / 3) / (height * width)
    assert 0.08 * (1 - slack) <= area.min() < 0.1 and 0.9 * largest < area.max() <= largest * (1 + slack)
    assert 3 / 4 * (1 - slack) <= ratio.min() < 0.77 and 1.3 < ratio.max() <= 4 / 3 * (1 + slack)
    assert np.corrcoef(top / np.maximum(height - h, 1), left / np.maximum(width - w, 1))[0, 1] < 0.1
    # Uniform as long as every ratio fits into the image; above, long boxes are drawn anew.
    fits = min(height / width, width / height) * 3 / 4
    assert abs(np.median(area[area < fits]) - (0.08 + fits) / 2) < 0.03


def test_half_are_flipped_and_only_by_light() -> None:
    data, many = saved("BMP"), keys(2000).tolist()
    flips = [cut(made("light", 8), data, key)[1] for key in many]
    assert 900 < sum(flips) < 1100
    for preset in ("center", "resize"):
        transform = made(preset, 8)
        assert {cut(transform, data, key) for key in many[:50]} == {cut(transform, data, many[0])}


@pytest.mark.parametrize(
    ("height", "width", "box"),
    [
        (10, 1000, (0, 493, 10, 13)),  # no draw fits: as high as the image, 4:3
        (1000, 10, (493, 0, 13, 10)),
        (1, 1, (0, 0, 1, 1)),
    ],
)
def test_where_no_draw_fits_the_box_is_centred(height: int, width: int, box: tuple[int, ...]) -> None:
    class Largest(np.random.Generator):
        def uniform(self, low: float, high: float) -> float:  # type: ignore[override]
            return high

    assert random_resized_crop(height, width, Largest(np.random.Philox(0))) == box


@pytest.mark.parametrize(("height", "width"), [(375, 500), (500, 375), (256, 256), (100, 130), (3, 4), (1, 1)])
def test_center_shows_what_the_cpu_preset_shows(height: int, width: int) -> None:
    from raypipe.transform.presets import build_transform

    top, left, h, w = center_box(height, width, 224)
    assert 0 <= top < top + h <= height and 0 <= left < left + w <= width
    # A ramp, whose values say which source columns are seen; then rows.
    for axis, (start, length, side) in enumerate([(top, h, height), (left, w, width)]):
        ramp = np.linspace(0, 250, side)
        image = np.broadcast_to(ramp[:, None, None] if axis == 0 else ramp[None, :, None], (height, width, 3))
        seen = build_transform("center", 224, by_library=True)(
            image=np.ascontiguousarray(image.astype(np.float32))
        )["image"]
        mean_ramp = ramp[start : start + length].mean()
        per_pixel = 250 / max(side - 1, 1)
        assert abs(seen.mean() - mean_ramp) <= per_pixel * 0.51 + 1


def test_resize_takes_the_whole_image() -> None:
    assert cut(made("resize", 8), saved("PNG"), (1, 2)) == ((0, 0, 30, 50), False)


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WebP", "BMP", "GIF", "TIFF"])
@pytest.mark.parametrize("orientation", [1, 6])
@pytest.mark.parametrize("exif", [False, True])
def test_the_size_is_that_of_the_decoded_image(format: str, orientation: int, exif: bool) -> None:
    tags = Image.Exif()
    tags[0x0112] = orientation
    data = saved(format) if format in ("BMP", "GIF") else saved(format, exif=tags)
    assert image_size(data, exif=exif) == decode(data, exif=exif).shape[:2]
    assert image_size(memoryview(data), exif=exif) == image_size(bytearray(data), exif=exif)


def test_a_jpeg_with_something_behind_its_end_is_whole() -> None:
    assert image_size(picture(0) + b"\0\0\0") == (40, 48)


def test_the_size_of_a_jpeg_of_rare_subsampling_is_known() -> None:
    assert image_size(bombs.rare_jpeg()) == (32, 16)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (None, "missing|None|value"),
        (b"", "empty value"),
        (b"<html>", "not an image.*text"),
        (b"RIFF0000WAVE", "not an image"),
        (picture(0)[:-300], "truncated JPEG"),
        (b"\xff\xd8\xff\xe0" + bytes(20) + b"\xff\xd9", "JPEG"),
        (saved("PNG")[:20], "truncated PNG"),
        (saved("WebP")[:20], "damaged WebP"),
        (saved("BMP")[:15], "damaged BMP"),
        # the frame header declares 65,500 x 65,500
        (
            picture(0).replace(b"\x08\x00\x28\x00\x30\x03", b"\x08\xff\xdc\xff\xdc\x03"),
            "65500x65500 pixels, limit",
        ),
        (saved("PNG")[:16] + b"\x00\x01\x00\x00\x00\x01\x00\x00" + saved("PNG")[24:], "PNG|pixels, limit"),
    ],
)
@pytest.mark.filterwarnings("error")
def test_bad_headers_are_sample_errors(data: bytes | None, reason: str) -> None:
    with pytest.raises(SampleError, match=reason):
        cut(made("light", 8), data, (0, 0))


def test_unknown_presets_and_sizes_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"'heavy'.*light, center, resize"):
        made("heavy", 224)
    with pytest.raises(ConfigError, match="0"):
        made("light", 0)


def test_a_micro_batch_is_its_bytes_end_to_end_and_plain_arrays() -> None:
    images = [picture(0), b"", b"bad", picture(1)]
    transform = MicroBatchTransform(made("light", 16), exact=True)
    batch, bad = run(transform, [*map(EncodedSample, images)], keys(4), indices=[0, -1, 2, 3])
    assert {name: (array.dtype.str, array.shape) for name, array in batch.arrays("encoded").items()} == {
        "crop": ("<i4", (4, 4)),
        "flip": ("|b1", (4,)),
    }
    data = batch.fields[DATA]
    assert isinstance(data, Ragged) and data.unpacked() == [images[0], b"", b"", images[3]]
    assert data.values.dtype == np.uint8 and data.offsets.dtype == np.int64
    assert [record["index"] for record in bad] == [2] and batch.weight.tolist() == [1, 0, 0, 1]
    assert not batch[CROP][1:3].any() and not batch[FLIP][1:3].any()
    box, flip = cut(made("light", 16), images[3], keys(4)[3])
    assert (tuple(batch[CROP][3].tolist()), bool(batch[FLIP][3])) == (box, flip)


def test_nothing_but_padding_is_a_micro_batch_whose_samples_nobody_reads() -> None:
    probe = pytest.fail
    batch, _ = run(MicroBatchTransform(made("light", 16), probe=probe), [], keys(2), padding=2)
    data = batch.fields[DATA]
    assert isinstance(data, Ragged) and data.values.shape == (0,) and data.offsets.tolist() == [0, 0, 0]
    assert batch[CROP].tolist() == [[0] * 4] * 2 and not batch.weight.any()


def test_the_header_is_all_that_is_read_of_a_whole_jpeg(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raypipe.transform.decode.decode", lambda *a, **k: pytest.fail("decoded"))
    rng = np.random.default_rng(0)
    pixels = cv2.resize(rng.integers(0, 256, (9, 9, 3), np.uint8), (700, 500))
    assert image_size(encode_jpeg(pixels)) == (500, 700)
