"""Files of every kind that our libraries write, through every store: the reference's pixels, or refused by name.

What is expected is made of twins: stores of the reference's own pixels, in formats that have nothing else.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import deliveries
import numpy as np
import pytest
import readings
from delivered import MODULES, Files, Group, _of, _unequal, difference, every, verdict
from deliveries import LAYOUTS, Outcomes
from drawn import unique
from tiers import is_soak

from raypipe.errors import SampleError
from raypipe.transform.decode.array import decode_array
from raypipe.transform.decode.jpeg_header import jpeg_size
from raypipe.transform.decode.rgb import decode


@pytest.fixture(scope="module")
def files() -> Files:
    """All drawn files, with their readings; the truth is the array where it is known."""
    drawn = {}
    for name, make in MODULES.items():
        drawn[name] = [(file, readings.read(file.data)) for file in unique(make())]
        for file, reading in drawn[name]:
            reading.array = reading.array if file.truth is None else file.truth
    return drawn


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


@pytest.mark.parametrize("name", deliveries.READINGS)
def test_every_store_delivers_it_with_and_without_the_extension(
    name: str, group: Group, request: pytest.FixtureRequest
) -> None:
    wrong = []
    # A store knows neither of the extension nor of the way of reading: one of them is enough for others than the
    # plain one, and the soak has all.
    is_whole = is_soak(request.config)
    ways = [(layout, True) for layout in LAYOUTS[: None if is_whole else 1]]
    if name == "rgb":
        ways = [(layout, True) for layout in LAYOUTS]
    ways += [(layout, False) for layout in LAYOUTS[: None if is_whole else 1]]
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
