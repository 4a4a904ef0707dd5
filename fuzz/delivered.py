"""What stores deliver of drawn files, against what decoders by themselves make of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import deliveries
import draw_jpeg
import draw_others
import draw_png
import draw_tiff
import numpy as np
import readings
from deliveries import LAYOUTS, Delivered, Outcomes, Refusal
from drawn import Drawn

from raypipe.streaming.spec import StreamSpec

MODULES: dict[str, Callable[[], Iterable[Drawn]]] = {
    "png": draw_png.files,
    "jpeg": draw_jpeg.files,
    "tiff": draw_tiff.files,
    "others": draw_others.files,
    "npy": draw_others.arrays,
}

Files = dict[str, list[tuple[Drawn, readings.Reading]]]


def every(files: Files) -> list[tuple[Drawn, readings.Reading]]:
    return list(itertools.chain.from_iterable(files.values()))


def _of(file: Drawn, reading: readings.Reading, name: str) -> np.ndarray | None:
    """What is expected; None = a refusal."""
    if ("array" if name == "array" else "rgb") in file.refused:
        return None
    pixels: np.ndarray | None = getattr(reading, name)
    assert pixels is not None, f"{file.name}: its reference refuses it: {reading.why}"
    return pixels


def difference(found: np.ndarray, expected: np.ndarray, levels: float = 0) -> str:
    """How two arrays differ; empty = they do not."""
    if (found.shape, found.dtype) != (expected.shape, expected.dtype):
        return (
            f"{found.dtype} {found.shape}, expected {expected.dtype} {expected.shape}"
        )
    if not levels:
        return "" if np.array_equal(found, expected) else "other values"
    most = np.abs(found.astype(float) - expected).max()
    return "" if most <= levels else f"other values, by up to {most:g}"


class Group:
    """Files of a module in stores of all kinds: one for all of them, and one for each dtype and number of channels
    that arrays of a run must have in common."""

    def __init__(
        self, files: list[tuple[Drawn, readings.Reading]], folder: Path
    ) -> None:
        self.whole = [Stored(files, folder / "whole")]
        by_array = dict[Any, list[tuple[Drawn, readings.Reading]]]()
        for file, reading in files:
            array = _of(file, reading, "array")
            like = (
                (np.dtype(np.uint8), 3)
                if array is None
                else (array.dtype, array.shape[2])
            )
            by_array.setdefault(like, []).append((file, reading))
        self.by_array = [
            Stored(members, folder / str(number))
            for number, members in enumerate(by_array.values())
        ]


class Stored:
    """Files in stores of all kinds; the good ones come first, so that each reading has one to begin with."""

    def __init__(
        self, files: list[tuple[Drawn, readings.Reading]], folder: Path
    ) -> None:
        self._folder = folder
        folder.mkdir()
        self.files = sorted(
            files, key=lambda each: (len(each[0].refused), each[0].name)
        )
        self.names = [
            f"{number:03}-{file.name}" for number, (file, _) in enumerate(self.files)
        ]
        contents = [
            (name, file.data)
            for name, (file, _) in zip(self.names, self.files, strict=True)
        ]
        self.addresses = {
            layout: deliveries.write_store(folder, layout, contents)
            for layout in LAYOUTS
        }

    def opened(self, name: str) -> dict[str, StreamSpec]:
        """The stream of each kind of store."""
        return {
            layout: deliveries.opened(address, name, len(self.files))
            for layout, address in self.addresses.items()
        }

    def expected(self, name: str) -> Outcomes | None:
        """The twins' outcomes, in whose place a refused file has None; None if all are refused."""
        pixels = [_of(file, reading, name) for file, reading in self.files]
        good = next((each for each in pixels if each is not None), None)
        if good is None:
            return None
        pack = deliveries.as_npy if name == "array" else deliveries.as_png
        twins = [("", pack(good if each is None else each)) for each in pixels]
        folder = self._folder / f"twins-{name}"
        folder.mkdir()
        address = deliveries.write_store(folder, "lmdb", twins)
        outcomes = deliveries.delivered(deliveries.opened(address, name, len(twins)))
        for of_split in outcomes.values():
            for number, each in enumerate(pixels):
                of_split[number] = None if each is None else of_split[number]
        return outcomes


def verdict(
    file: Drawn,
    found: Any,
    expected: Delivered | None,
    stored: str,
    name: str,
    layout: str,
    levels: int,
) -> str:
    """Why an outcome is not right; empty = it is."""
    if found is None:
        return "it did not come"
    if isinstance(found, Refusal):
        if expected is not None:
            return f"refused, {found.reason}"
        is_named = found.name.endswith(stored) if layout in ("folder", "tar") else True
        return "" if is_named and found.reason else f"refused as {found}"
    if expected is None:
        return "delivered"
    assert isinstance(expected, np.ndarray)
    return difference(found, expected, levels + 1 if levels else 0)  # a resize rounds


def _unequal(found: Delivered | None, first: Delivered | None) -> str:
    """Whether it differs from what came of the same file elsewhere."""
    if isinstance(found, np.ndarray) and isinstance(first, np.ndarray):
        return difference(found, first)
    same = (
        isinstance(found, Refusal)
        and isinstance(first, Refusal)
        and found.reason == first.reason
    )
    return "" if same else f"{found} here, {first} in the first store"
