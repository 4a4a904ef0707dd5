"""Makes the first samples of a split twice, to find a user's code whose results depend on more than the sample.

A transform's draws are seeded, as far as its generators are found. Other state (a counter, a running statistic, a
generator made from the clock) shows itself where the same samples are made again in another copy of the transform,
last first.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from raypipe.errors import ConfigError, SampleError
from raypipe.streaming.items import ITEM
from raypipe.transform.fields import COLUMN
from raypipe.transform.nest import difference

logger = logging.getLogger(__name__)

NUM_REMADE = 4

MadeSample = Mapping[str, Any]
"""The fields of one sample."""


def check_remade(
    first: Mapping[int, MadeSample],
    make: Callable[[int], MadeSample],
    title: str,
) -> None:
    """Compare samples with what a copy of the code makes of them, last first.

    Args:
        first: samples as the stream has made them, by their numbers.
        make: makes the sample with a number by a copy of the code.
        title: name of the transform, for errors.

    Raises:
        ConfigError: they differ.
    """
    try:
        again = {number: make(number) for number in sorted(first, reverse=True)}
        for number, original in first.items():
            if name := _differing(original, again[number]):
                raise _depends(title, name)
    except SampleError:  # the stream's own errors say what such a sample is
        return


def _differing(first: MadeSample, second: MadeSample) -> str:
    """The name of a field that differs; empty: none does."""
    for name in first:
        if name == ITEM:
            differs = difference(first[name], second[name])
            if differs == "numbers":
                return name
            if differs == "others":
                logger.warning(
                    "an item has values besides its tensors and arrays, such as ids of objects, that differ each "
                    "time it is made, and a digest of the stream will differ too"
                )
        elif name not in second or not _is_equal(first[name], second[name]):
            return name
    return ""


def _is_equal(first: Any, second: Any) -> bool:
    if isinstance(first, np.ndarray) and isinstance(second, np.ndarray):
        return (
            first.shape == second.shape
            and first.dtype == second.dtype
            and first.tobytes() == second.tobytes()
        )
    return type(first) is type(second) and bool(first == second)


def _depends(title: str, field: str) -> ConfigError:
    code_name = "make_columns" if field.startswith(f"{COLUMN}.") else title
    return ConfigError(
        f"{code_name} does not make the same of the same sample: it keeps state from sample to sample, or draws "
        f"elsewhere ({field} differs). Let it take an argument `rng`, and draw from that alone, or from the "
        "generators of random, numpy and torch, which raypipe seeds for each sample; make generators and "
        "pipelines outside of the call; and keep no counter, buffer or statistic from sample to sample "
        "(docs/reproducibility.md)"
    )
