"""Decode, cut, resize and flip on a CPU device, where libjpeg stands in for nvJPEG."""

import io
from collections.abc import Callable

import bombs
import cv2
import numpy as np
import pytest
import torch
from micro_batches import cuts_to_decode
from pictures import picture
from PIL import Image

from raypipe.config import TransformConfig
from raypipe.device import device_decode, jpeg_decoders
from raypipe.device.device_decode import DecodedMicroBatch, DeviceDecoder
from raypipe.errors import ConfigError
from raypipe.transform.decode import decode
from raypipe.transform.encoded import EncodedTransform
from raypipe.transform.samples import EncodedSample

SIZE = 32
LIBRARIES = dict(jpeg_decoders.LIBRARIES)


@pytest.fixture(autouse=True, params=LIBRARIES)
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """By each library that is installed."""
    pytest.importorskip(request.param)
    monkeypatch.setattr(jpeg_decoders, "LIBRARIES", {request.param: LIBRARIES[request.param]})
    return request.param


Call = Callable[[jpeg_decoders.BatchFunction, list[torch.Tensor], torch.device], list[torch.Tensor]]


def stand_in(monkeypatch: pytest.MonkeyPatch, library: str, call: Call) -> None:
    """From now on a function is called, with the library's own, in its place."""
    own = LIBRARIES[library]()
    of_call = {library: lambda: lambda encoded, device: call(own, encoded, device)}
    monkeypatch.setattr(jpeg_decoders, "LIBRARIES", of_call)


def smooth(height: int = 96, width: int = 128, seed: int = 0) -> np.ndarray:
    return cv2.resize(np.random.default_rng(seed).integers(0, 256, (5, 6, 3), np.uint8), (width, height))


def saved(format: str, mode: str = "RGB", pixels: np.ndarray | None = None, **options: object) -> bytes:
    file = io.BytesIO()
    Image.fromarray(smooth() if pixels is None else pixels).convert(mode).save(file, format, **options)
    return file.getvalue()


def broken_within(data: bytes | None = None) -> bytes:
    """A header as it should be, an end marker, and a Huffman table that is none."""
    data = data or picture(3)
    at = data.index(b"\xff\xc4") + 5
    return data[:at] + b"\xff" * 16 + data[at + 16 :]


def run(
    images: list[bytes | None], preset: str = "light", device: str = "cpu", exif: bool = False
) -> tuple[DecodedMicroBatch, dict]:
    keys = np.random.default_rng(0).integers(0, 2**64, (len(images), 2), np.uint64)
    transform = EncodedTransform(preset, TransformConfig(size=SIZE, apply_exif=exif))
    pairs = zip(images, keys, strict=True)
    batch = cuts_to_decode([data and (*transform.one(EncodedSample(data), key).values(),) for data, key in pairs])
    for array in batch.values():
        array.flags.writeable = False  # as they come out of the object store
    return DeviceDecoder(SIZE, device, exif).decode(**batch), batch


def expected(data: bytes, box: np.ndarray, flip: bool) -> np.ndarray:
    """The same by Pillow: decode, cut, resize with antialiasing, flip; (3, S, S)."""
    top, left, height, width = box.tolist()
    cut = Image.fromarray(decode(data)).crop((left, top, left + width, top + height))
    pixels = np.asarray(cut.resize((SIZE, SIZE), Image.Resampling.BILINEAR))
    return (pixels[:, ::-1] if flip else pixels).transpose(2, 0, 1)


@pytest.mark.parametrize("preset", ["light", "center", "resize"])
def test_the_result_is_that_of_pillow(preset: str) -> None:
    images = [picture(i, 90 + i, 120 - 3 * i) for i in range(8)]
    decoded, batch = run(images, preset)
    assert decoded.image.shape == (8, 3, SIZE, SIZE) and decoded.image.dtype == torch.uint8
    assert decoded.image.is_contiguous(memory_format=torch.channels_last)
    assert (decoded.num_fallback, decoded.failed) == (0, {})
    assert batch["flip"].any() == (preset == "light")
    for row, data in enumerate(images):
        difference = decoded.image[row].numpy().astype(int) - expected(
            data, batch["crop"][row], batch["flip"][row]
        )
        # Pillow resizes in fixed point and rounds between its two passes; 1 level for each
        assert abs(difference).max() <= 2 and abs(difference).mean() < 0.5


FALLBACKS: dict[str, Callable[[], bytes]] = {
    "PNG": lambda: saved("PNG"),
    "WebP": lambda: saved("WebP"),
    "CMYK": lambda: saved("JPEG", "CMYK"),
    "RGB in JPEG": lambda: saved("JPEG", keep_rgb=True),  # Adobe's marker, transform 0
    "bytes behind the end": lambda: picture(0, 90, 120) + b"\0",
    "4:4:1": lambda: bombs.rare_jpeg(),
}


@pytest.mark.parametrize("kind", FALLBACKS)
def test_what_nvjpeg_does_not_take_is_decoded_on_the_host(kind: str) -> None:
    data = FALLBACKS[kind]()
    decoded, batch = run([picture(0, 60, 80), data])
    assert decoded.num_fallback == 1 and not decoded.failed
    difference = decoded.image[1].numpy().astype(int) - expected(data, batch["crop"][1], batch["flip"][1])
    assert abs(difference).max() <= 2
    assert decoded.image.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    ("mode", "options"), [("L", {}), ("RGB", {"progressive": True}), ("RGB", {"subsampling": 0})]
)
def test_grey_and_progressive_jpegs_are_decoded_on_the_device(mode: str, options: dict) -> None:
    data = saved("JPEG", mode, **options)
    decoded, batch = run([data], "resize")
    assert decoded.num_fallback == 0
    difference = decoded.image[0].numpy().astype(int) - expected(data, batch["crop"][0], False)
    assert abs(difference).max() <= 2
    if mode == "L":
        assert (decoded.image[0, 0] == decoded.image[0, 2]).all() and decoded.image.float().std() > 5


def test_a_broken_image_takes_no_other_along() -> None:
    good = [picture(i, 60, 80) for i in range(3)]
    whole = picture(9, 60, 80)
    samples = [
        (data, (0, 0, 60, 80), False) for data in (good[0], whole[:-200], good[1], broken_within(whole), good[2])
    ]
    decoded = DeviceDecoder(SIZE, "cpu").decode(**cuts_to_decode(samples))
    assert "truncated" in decoded.failed[1] and set(decoded.failed) == {1, 3}
    assert decoded.num_fallback == 2
    assert not decoded.image[[1, 3]].any()
    for row, data in zip((0, 2, 4), good, strict=True):
        difference = decoded.image[row].numpy().astype(int) - expected(data, np.array([0, 0, 60, 80]), False)
        assert abs(difference).max() <= 2


def test_what_the_device_refuses_alone_is_decoded_on_the_host(
    library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = [picture(i, 60, 80) for i in range(64)]
    whole, _ = run(images)
    calls = []

    def refuses_the_second(
        own: jpeg_decoders.BatchFunction, encoded: list[torch.Tensor], device: torch.device
    ) -> list[torch.Tensor]:
        calls.append(len(encoded))
        if any(one.numpy().tobytes() == images[1] for one in encoded):
            raise RuntimeError("Error while decoding JPEG images")
        return own(encoded, device)

    stand_in(monkeypatch, library, refuses_the_second)
    decoded, _ = run(images)
    assert calls[:2] == [1, 64]  # the first tries the device
    assert calls[2:] == [32, 16, 8, 4, 2, 1, 1, 2, 4, 8, 16, 32]  # and among images it is found by halves
    assert (decoded.num_fallback, decoded.failed) == (1, {})
    assert (decoded.image.int() - whole.image.int()).abs().max() <= 1


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, torch.AcceleratorError])
def test_a_device_that_fails_is_not_taken_for_a_bad_image(
    error: type[RuntimeError], library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = False

    def fails(
        own: jpeg_decoders.BatchFunction, encoded: list[torch.Tensor], device: torch.device
    ) -> list[torch.Tensor]:
        if failing:
            raise error("CUDA error")
        return own(encoded, device)

    stand_in(monkeypatch, library, fails)
    decoder = DeviceDecoder(SIZE, "cpu")
    failing = True
    with pytest.raises(error):
        decoder.decode(**cuts_to_decode([(picture(i), (0, 0, 40, 48), False) for i in range(4)]))
    with pytest.raises(error):  # and not for one without nvJPEG
        DeviceDecoder(SIZE, "cpu")


def test_chunks_bound_the_pixels_of_a_call(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    images = [picture(i, 60, 80) for i in range(5)] + [picture(9, 200, 200)]
    whole, _ = run(images)
    calls = []

    def counted(
        own: jpeg_decoders.BatchFunction, encoded: list[torch.Tensor], device: torch.device
    ) -> list[torch.Tensor]:
        calls.append(len(encoded))
        return own(encoded, device)

    stand_in(monkeypatch, library, counted)
    monkeypatch.setattr(device_decode, "CHUNK_PIXELS", 2 * 60 * 80)
    chunked, _ = run(images)
    assert calls == [1, 2, 2, 1, 1]
    assert torch.equal(chunked.image, whole.image)


def test_padding_is_black() -> None:
    decoded, _ = run([None, picture(0), None])
    assert not decoded.image[[0, 2]].any() and decoded.image[1].any()
    assert not decoded.failed and decoded.num_fallback == 0


def test_a_micro_batch_of_padding_alone() -> None:
    decoded, _ = run([None, None])
    assert decoded.image.shape == (2, 3, SIZE, SIZE) and not decoded.image.any() and not decoded.failed
    assert decoded.image.is_contiguous(memory_format=torch.channels_last)


def test_a_box_outside_the_image_fails() -> None:
    data = picture(0)
    boxes = [(0, 0, 41, 48), (-1, 0, 5, 5), (0, 0, 0, 5), (39, 47, 1, 1)]
    decoded = DeviceDecoder(SIZE, "cpu").decode(**cuts_to_decode([(data, box, False) for box in boxes]))
    assert set(decoded.failed) == {0, 1, 2} and "40x48" in decoded.failed[0]


@pytest.mark.parametrize("orientation", range(1, 9))
def test_images_are_turned_upright_if_asked(orientation: int) -> None:
    tags = Image.Exif()
    tags[0x0112] = orientation
    data = saved("JPEG", exif=tags)
    decoded, batch = run([data], "resize", exif=True)
    assert decoded.num_fallback == (orientation != 1)
    upright = decode(data, exif=True)
    assert tuple(batch["crop"][0][2:]) == upright.shape[:2]
    wanted = np.asarray(Image.fromarray(upright).resize((SIZE, SIZE), Image.Resampling.BILINEAR)).transpose(
        2, 0, 1
    )
    assert abs(decoded.image[0].numpy().astype(int) - wanted).max() <= 2
    assert run([data], "resize")[0].num_fallback == 0


def test_settings_that_cannot_be_are_refused(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="0"):
        DeviceDecoder(0, "cpu")
    with pytest.raises(ConfigError, match="meta"):
        DeviceDecoder(SIZE, "meta")

    def broken(*args: object) -> list[torch.Tensor]:
        raise RuntimeError("not compiled with nvJPEG support")

    stand_in(monkeypatch, library, broken)
    with pytest.raises(ConfigError, match=r"not compiled.*decode='cpu'"):
        DeviceDecoder(SIZE, "cpu")
