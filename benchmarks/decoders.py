"""CPU time per image of JPEG decoders, on one core: docs/transforms.md and results/decode.md have a run.

    python benchmarks/decoders.py STORE [--samples 500] [--repeats 5] [--short-side 256]

Each decoder makes uint8 RGB of the whole image, as a data set does for each sample. The last rows go on to what a
model gets, a random resized crop of 224 pixels with a flip: by OpenCV, and by raypipe, which decodes only the crop
into the micro-batch. Every part of 25 images goes through all decoders in turn, so that what else the machine does
falls on all of them alike; the times are CPU seconds of the process. The last line is JSON, µs an image, medians.
"""

from __future__ import annotations

import argparse
import io
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from typing import Any

import cv2
import numpy as np
import simplejpeg
import torch
from PIL import Image
from torchvision.io import ImageReadMode, decode_jpeg

from raypipe import TransformConfig, open_store
from raypipe.kernel import why_no_kernel
from raypipe.stores.memory import MemoryStore
from raypipe.transform.decode.rgb import decode
from raypipe.transform.sample_maker import SampleMaker
from raypipe.transform.samples import read_samples

PART = 25
SIDE = 224
Decoder = Callable[[bytes], Any]


def by_pillow(image: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(image)).convert("RGB"))


def by_opencv(image: bytes) -> np.ndarray:
    pixels = cv2.imdecode(np.frombuffer(image, np.uint8), cv2.IMREAD_COLOR_RGB)
    assert pixels is not None
    return pixels


def by_torchvision(image: bytes) -> torch.Tensor:
    return decode_jpeg(
        torch.frombuffer(bytearray(image), dtype=torch.uint8), mode=ImageReadMode.RGB
    )


def by_simplejpeg(image: bytes) -> np.ndarray:
    return simplejpeg.decode_jpeg(image, colorspace="RGB")


def cropped(decoded: Decoder, rng: np.random.Generator) -> Decoder:
    """A decoder that goes on to a random resized crop and a flip, by OpenCV."""

    def crop(image: bytes) -> np.ndarray:
        pixels = decoded(image)
        height, width = pixels.shape[:2]
        area = height * width * rng.uniform(0.08, 1)
        ratio = np.exp(rng.uniform(np.log(3 / 4), np.log(4 / 3)))
        rows = min(height, round((area / ratio) ** 0.5))
        columns = min(width, round((area * ratio) ** 0.5))
        top = rng.integers(0, height - rows + 1)
        left = rng.integers(0, width - columns + 1)
        resized = cv2.resize(
            pixels[top : top + rows, left : left + columns], (SIDE, SIDE)
        )
        return cv2.flip(resized, 1) if rng.random() < 0.5 else resized

    return crop


DECODERS: dict[str, Decoder] = {
    "Pillow": by_pillow,
    "OpenCV": by_opencv,
    "torchvision": by_torchvision,
    "simplejpeg": by_simplejpeg,
    "raypipe": decode,
}


def one_by_one(decoder: Decoder) -> Callable[[list[bytes], int], None]:
    def run(images: list[bytes], _: int) -> None:
        for image in images:
            decoder(image)

    return run


def by_program() -> Callable[[list[bytes], int], None]:
    """The micro-batches of raypipe's light transform."""
    transform = SampleMaker("light", TransformConfig(size=SIDE))

    def run(images: list[bytes], repeat: int) -> None:
        keys = np.stack(
            [np.full(len(images), repeat), np.arange(len(images))], axis=1
        ).astype(np.uint64)
        indices = np.arange(len(images))
        store = MemoryStore(images, [0] * len(images))
        transform.make(read_samples(store, indices), keys)

    return run


def encoded(address: str, num: int, short_side: int) -> list[bytes]:
    """Baseline JPEGs of a store, as they are or shrunk."""
    store = open_store(address)
    images = [
        bytes(image) for image in store.read(np.arange(min(num, len(store))))["image"]
    ]
    if not short_side:
        return images
    return [shrunk(decode(image), short_side) for image in images]


def shrunk(pixels: np.ndarray, short_side: int) -> bytes:
    scale = min(1, short_side / min(pixels.shape[:2]))
    resized = cv2.resize(pixels, None, fx=scale, fy=scale, interpolation=cv2.INTER_AREA)
    return cv2.imencode(".jpg", resized[..., ::-1], [cv2.IMWRITE_JPEG_QUALITY, 90])[
        1
    ].tobytes()


def parts(images: Sequence[bytes]) -> Iterator[list[bytes]]:
    for first in range(0, len(images), PART):
        yield list(images[first : first + PART])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("store")
    parser.add_argument("--samples", type=int, default=500)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--short-side",
        type=int,
        default=0,
        help="shrink images to this first; 0 = as they are",
    )
    options = parser.parse_args()
    if reason := why_no_kernel():
        print(f"without the extension: {reason}")
    cv2.setNumThreads(1)
    torch.set_num_threads(1)
    images = encoded(options.store, options.samples, options.short_side)
    runs = {name: one_by_one(decoder) for name, decoder in DECODERS.items()}
    runs["OpenCV, crop"] = one_by_one(cropped(by_opencv, np.random.default_rng(0)))
    runs["raypipe, crop"] = by_program()
    names = list(runs)
    found = {name: list[float]() for name in runs}
    for repeat in range(options.repeats + 1):  # the first one warms up
        spent_ns = dict.fromkeys(names, 0)
        for number, part in enumerate(parts(images)):
            turn = (number + repeat) % len(names)
            for name in names[turn:] + names[:turn]:
                started_ns = time.process_time_ns()
                runs[name](part, repeat)
                spent_ns[name] += time.process_time_ns() - started_ns
        if repeat:
            for name, spent in spent_ns.items():
                found[name].append(spent / len(images) / 1000)
    medians = {
        name: round(statistics.median(times), 1) for name, times in found.items()
    }
    packages = {
        "Pillow": "pillow",
        "OpenCV": "opencv-python-headless",
        "raypipe": "raypipe-data",
    }
    kilobytes = sum(map(len, images)) / len(images) / 1000
    print(
        f"{len(images)} JPEGs of {kilobytes:.0f} KB, µs of CPU time an image, medians of {options.repeats}"
    )
    for name, median in medians.items():
        library = name.partition(",")[0]
        print(
            f"{name:14} {version(packages.get(library, library)):10} {median:8.1f} {min(found[name]):8.1f}"
        )
    print(json.dumps(medians))


if __name__ == "__main__":
    main()
