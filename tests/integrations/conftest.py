"""Tests of other libraries' loops: Accelerate keeps one state for all of a process, and no test inherits it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from accelerated import forget_accelerate


@pytest.fixture(autouse=True)
def without_state() -> Iterator[None]:
    yield
    forget_accelerate()
