"""Tests of other libraries' loops: Accelerate keeps one state for all of a process, and no test inherits it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
import ranks
from accelerated import forget_accelerate

from raypipe.streaming.spec import StreamSpec


@pytest.fixture(autouse=True)
def without_state() -> Iterator[None]:
    yield
    forget_accelerate()


@pytest.fixture(scope="module")
def spec_of(stores: dict[str, Path]) -> Callable[..., StreamSpec]:
    """Streams by micro-batches in a step, and by whether they have a validation; see `ranks.spec_of`."""

    @cache
    def spec(per_step: int = 4, validates: bool = True) -> StreamSpec:
        val = stores["val"] if validates else None
        return ranks.spec_of(stores["train"], val, per_step)

    return spec
