from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

from raypipe.rayext.iteration import begun


class Iterator:
    """As much of Ray Data's iterator of a split as `begun` looks at."""

    def __init__(self, coordinator: Any, split: int) -> None:
        self._coord_actor, self._output_split_idx = coordinator, split


def test_an_execution_begins_once_for_a_split_and_anew_for_a_second_pass() -> None:
    asked: list[int] = []

    def start(split: int) -> str:
        asked.append(split)
        return f"epoch {len(asked)}"

    coordinator = SimpleNamespace(
        start_epoch=SimpleNamespace(remote=start), get="its other methods"
    )
    before = Iterator(coordinator, 1)
    after = begun(before)
    assert asked == [1] and before._coord_actor is coordinator
    assert after._coord_actor.get == "its other methods"
    assert copy.copy(after._coord_actor).get == "its other methods"
    assert [after._coord_actor.start_epoch.remote(1) for _ in range(2)] == [
        "epoch 1",
        "epoch 2",
    ]


def test_an_iterator_without_a_coordinator_stays_as_it_is() -> None:
    iterator = SimpleNamespace()
    assert begun(iterator) is iterator
