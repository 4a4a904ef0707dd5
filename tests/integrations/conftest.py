"""Tests of other libraries' loops: Accelerate keeps one state for all of a process, and no test inherits it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))
from ranks import forget_accelerate


@pytest.fixture(autouse=True)
def without_state() -> Iterator[None]:
    yield
    forget_accelerate()
