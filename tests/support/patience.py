"""Waits for what another thread or process does, on a machine that may be slow and busy."""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE_S = 300.0
"""Limit of a wait that is only ever reached by a fault."""


def until(holds: Callable[[], object], told: Callable[[], object] = str) -> None:
    """Wait until a condition holds.

    Args:
        told: what a failure shows.
    """
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline, told()
        time.sleep(0.01)
