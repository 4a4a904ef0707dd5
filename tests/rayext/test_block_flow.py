"""What is said of an execution's blocks while ranks wait for them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from raypipe.rayext.block_flow import BlockFlow


def flow(active: int, queued: int) -> Any:
    """The blocks of an execution whose pool has so many in work, and whose reader has yielded so many more."""
    found: Any = BlockFlow.__new__(BlockFlow)
    found.pool = SimpleNamespace(num_active_tasks=lambda: active)
    found.queued = lambda: queued
    found.waiting = lambda: 0
    return found


@pytest.mark.parametrize(
    ("running", "told"),
    [
        (5, "5 transform actors work on 4 blocks, and 3 are queued"),
        (0, "no transform actor runs (1 have not started, 0 restart)"),
    ],
)
def test_what_the_pool_does_is_told_while_ranks_wait(running: int, told: str) -> None:
    actors = SimpleNamespace(running=running, pending=1, restarting=0)
    assert flow(4, 3).description(actors, 2, 1) == told
