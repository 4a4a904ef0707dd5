"""The agreement of ranks, two of them in two threads that wait for each other as processes do."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from raypipe.plan.places import MicroBatchId
from raypipe.rayext.agreement import Agreement, from_rank_zero, in_train_function


class Clock:
    """Takes the place of the module `time`: a test says how time passes."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("raypipe.rayext.agreement.time", clock)
    return clock


def test_one_rank_decides_alone_after_each_step() -> None:
    agreement = Agreement(0, 1)
    decisions = iter(range(3))
    seen = [agreement.on(lambda: (next(decisions), False)) for _ in range(3)]
    assert seen == [0, 1, 2]


def test_two_ranks_agree_once_a_second_at_once_and_when_urgent(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    barrier = threading.Barrier(2, timeout=600)
    sent: list[Any] = []

    def broadcast(message: Any) -> Any:
        if message is not None:
            sent.append(message)
        barrier.wait()
        return sent[-1]

    monkeypatch.setattr("raypipe.rayext.agreement.from_rank_zero", broadcast)
    ranks = [Agreement(rank, 2) for rank in range(2)]
    is_urgent = False

    def step(decision: str, at_once: bool = False) -> list[str | None]:
        """A step of an eighth of a second; the decision that each rank sees."""
        clock.now += 0.125

        def asked(rank: int) -> str | None:
            return ranks[rank].on(lambda: (decision, is_urgent), at_once)

        return list(threads.map(asked, range(2)))

    with ThreadPoolExecutor(2) as threads:
        assert step("first") == ["first", "first"] and sent[-1] == ("first", 8)
        assert [step("later") for _ in range(7)] == [[None, None]] * 7
        assert step("second") == ["second", "second"]
        assert step("now", at_once=True) == ["now", "now"]
        is_urgent = True
        assert step("urgent", at_once=True) == ["urgent", "urgent"]
        assert sent[-1] == ("urgent", 1)
        assert step("again") == ["again", "again"]


def test_ray_trains_actor_needs_no_module_of_what_it_hands_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent: list[Any] = []

    def broadcast(message: Any) -> Any:
        sent.append(message)
        return sent[0]

    name = "raypipe.rayext.agreement.in_train_function"
    monkeypatch.setattr(name, lambda: True)
    monkeypatch.setattr("ray.train.collective.broadcast_from_rank_zero", broadcast)
    place = MicroBatchId("train", 1, 2, 3)
    assert [from_rank_zero(place), from_rank_zero(None)] == [place, place]
    assert set(map(type, sent)) == {bytes}


def test_processes_of_torchrun_agree_by_torch_distributed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broadcast(values: list[Any], src: int) -> None:
        assert src == 0
        values[0] = "of rank 0"

    monkeypatch.setattr("torch.distributed.broadcast_object_list", broadcast)
    assert not in_train_function()
    assert from_rank_zero(None) == "of rank 0"
