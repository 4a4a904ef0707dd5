"""Files of every kind that our libraries write, through every store: the reference's pixels, or refused by name.

What is expected is made of twins: stores of the reference's own pixels, in formats that have nothing else.
"""

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
import pytest
import readings
from deliveries import LAYOUTS, Delivered, Outcomes, Refusal
from drawn import Drawn, unique
from tiers import is_soak

from raypipe.errors import SampleError
from raypipe.streaming.spec import StreamSpec
from raypipe.transform.decode.array import decode_array
from raypipe.transform.decode.jpeg_header import jpeg_size
from raypipe.transform.decode.rgb import decode

MODULES: dict[str, Callable[[], Iterable[Drawn]]] = {
    "png": draw_png.files,
    "jpeg": draw_jpeg.files,
    "tiff": draw_tiff.files,
    "others": draw_others.files,
    "npy": draw_others.arrays,
}

Files = dict[str, list[tuple[Drawn, readings.Reading]]]


@pytest.fixture(scope="module")
def files() -> Files:
    """All drawn files, with their readings; the truth is the array where it is known."""
    drawn = {}
    for name, make in MODULES.items():
        drawn[name] = [(file, readings.read(file.data)) for file in unique(make())]
        for file, reading in drawn[name]:
            reading.array = reading.array if file.truth is None else file.truth
    return drawn


def every(files: Files) -> list[tuple[Drawn, readings.Reading]]:
    return list(itertools.chain.from_iterable(files.values()))


def test_there_are_files_of_many_kinds(files: Files) -> None:
    assert len(every(files)) >= 700
    kinds = {reading.kind for _, reading in every(files)}
    assert len(kinds) >= 35, sorted(kinds)


def _of(file: Drawn, reading: readings.Reading, name: str) -> np.ndarray | None:
    """What is expected; None = a refusal."""
    if ("array" if name == "array" else "rgb") in file.refused:
        return None
    pixels: np.ndarray | None = getattr(reading, name)
    assert pixels is not None, f"{file.name}: its reference refuses it: {reading.why}"
    return pixels


@pytest.mark.parametrize("is_used", [True, False], ids=["with", "without"])
@pytest.mark.parametrize("name", ["rgb", "upright", "array"])
def test_a_file_is_decoded_as_its_reference_has_it(
    name: str, is_used: bool, files: Files
) -> None:
    ways: dict[str, Callable[[bytes], np.ndarray]] = {
        "rgb": decode,
        "upright": lambda data: decode(data, exif=True),
        "array": decode_array,
    }
    wrong = []
    with deliveries.extension(is_used):
        for file, reading in every(files):
            expected = _of(file, reading, name)
            try:
                found = ways[name](file.data)
            except SampleError as error:
                if expected is not None:
                    wrong.append(f"{file.name}: refused, {error}")
                assert str(error)
                continue
            if expected is None:
                wrong.append(f"{file.name}: delivered")
            elif why := difference(found, expected, reading.levels):
                wrong.append(f"{file.name}: {why}")
    assert not wrong, "\n".join(wrong)


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


@pytest.mark.parametrize("is_used", [True, False], ids=["with", "without"])
@pytest.mark.parametrize("part", [2, 4, 8])
def test_a_reduced_jpeg_is_that_of_libjpeg(
    part: int, is_used: bool, files: Files
) -> None:
    with deliveries.extension(is_used):
        for file, reading in files["jpeg"]:
            size = None if file.refused else jpeg_size(file.data)
            if size is None or min(size) < 16 or min(size) % part:  # decoded larger
                continue
            found = decode(file.data, min_side=min(size) // part)
            why = difference(found, readings.reduced(file.data, part), reading.levels)
            assert not why, f"{file.name}: {why}"


@pytest.fixture(scope="module", params=MODULES)
def group(
    request: pytest.FixtureRequest,
    files: Files,
    tmp_path_factory: pytest.TempPathFactory,
) -> Any:
    return Group(files[request.param], tmp_path_factory.mktemp(request.param))


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


@pytest.mark.parametrize("name", deliveries.READINGS)
def test_every_store_delivers_it_with_and_without_the_extension(
    name: str, group: Group, request: pytest.FixtureRequest
) -> None:
    wrong = []
    # A store does not know of the extension: without it one of them is enough, and the soak has all.
    without = LAYOUTS if is_soak(request.config) else LAYOUTS[:1]
    ways = [(layout, True) for layout in LAYOUTS]
    ways += [(layout, False) for layout in without]
    for store in group.by_array if name == "array" else group.whole:
        expected = store.expected(name)
        first: Outcomes | None = None
        specs = {} if expected is None else store.opened(name)
        for layout, is_used in ways if specs else ():
            assert expected is not None
            found = deliveries.delivered(specs[layout], with_extension=is_used)
            first = first or found
            where = f"{layout}, {'with' if is_used else 'without'} the extension"
            for split, row in itertools.product(found, range(len(store.files))):
                file, reading = store.files[row]
                each = found[split][row]
                why = verdict(
                    file,
                    each,
                    expected[split][row],
                    store.names[row],
                    name,
                    layout,
                    reading.levels,
                )
                why = why or _unequal(each, first[split][row])
                if why:
                    wrong.append(f"{file.name} ({where}, {split}): {why}")
    assert not wrong, "\n".join(wrong)


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
