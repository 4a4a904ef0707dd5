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
    ("silent", "told"),
    [
        (0, "5 transform actors work on 4 blocks, and 3 are queued"),
        (2, "3 transform actors work on 4 blocks, and 3 are queued, 2 do not answer"),
        (5, "no transform actor runs (1 have not started, 0 restart, 5 do not answer)"),
    ],
)
def test_actors_whose_nodes_do_not_answer_are_not_said_to_work(
    silent: int, told: str
) -> None:
    actors = SimpleNamespace(running=5, pending=1, restarting=0)
    assert flow(4, 3).description(actors, 2, 1, silent) == told
