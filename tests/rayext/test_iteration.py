from __future__ import annotations

import contextlib
import copy
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from raypipe.errors import ConfigError
from raypipe.rayext.iteration import ExecutionWatch, _raise_failure, begun


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


def test_a_dead_coordinator_is_noticed_while_nobody_reads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers = [None, ray.exceptions.ActorDiedError()]
    asked = list[int]()
    now = [0.0]
    arrived = [False]

    def answer(number: int) -> None:
        if error := answers[number]:
            raise error

    def ask(question: Any) -> int:
        asked.append(len(asked))
        return asked[-1]

    def wait(refs: list[int], timeout: float) -> tuple[list[int], list[int]]:
        return (refs, []) if arrived[0] else ([], refs)

    monkeypatch.setattr(ray, "wait", wait)
    monkeypatch.setattr(ray, "get", answer)
    monkeypatch.setattr("raypipe.rayext.iteration.time.monotonic", lambda: now[0])
    coordinator = SimpleNamespace(__ray_call__=SimpleNamespace(remote=ask))
    watch = ExecutionWatch(Iterator(coordinator, 0))
    for seconds, arrives, num_asked in (
        (0.0, False, 1),
        (5.0, False, 1),
        (6.0, True, 1),
        (6.5, True, 1),
    ):
        now[0] = seconds
        arrived[0] = arrives
        watch.check()
        assert len(asked) == num_asked
    now[0] = 7.1
    with pytest.raises(ray.exceptions.RayActorError):
        watch.check()
    ExecutionWatch(SimpleNamespace()).check()  # an execution of this process


@pytest.mark.parametrize("place", ["_gen_epoch_error", "_exception", ""])
def test_the_error_of_an_execution_is_told_while_nobody_reads(place: str) -> None:
    failure = ConfigError("a reader has failed")
    state = SimpleNamespace(_exception=failure if place == "_exception" else None)
    coordinator = SimpleNamespace(
        _gen_epoch_error=failure if place == "_gen_epoch_error" else None,
        _current_executor=SimpleNamespace(_output_node=("operator", state)),
    )
    with pytest.raises(ConfigError) if place else contextlib.nullcontext():
        _raise_failure(coordinator)
    _raise_failure(SimpleNamespace(_current_executor=None))  # it has not begun


def test_an_iterator_without_a_coordinator_stays_as_it_is() -> None:
    iterator = SimpleNamespace()
    assert begun(iterator) is iterator
