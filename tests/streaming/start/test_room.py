"""Which streams give way to a new one of their process, and how long it waits for them."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
from patience import until

from raypipe.config import PoolConfig
from raypipe.errors import RaypipeError
from raypipe.rayext.allocation import Resources
from raypipe.streaming.start import room


class Cluster:
    # of whose CPUs another stream's pool has all, and gives what it is asked for after some looks

    def __init__(self, monkeypatch: pytest.MonkeyPatch, gives_after: int) -> None:
        self.asked: list[float] = []
        self.looks = 0
        self._gives_after = gives_after
        self._supervisor: Any = SimpleNamespace(
            give_way=SimpleNamespace(remote=self.asked.append)
        )
        monkeypatch.setattr(room, "supervisors", lambda: [self._supervisor])
        monkeypatch.setattr(room, "cluster_resources", self._resources)
        monkeypatch.setattr(room, "_answers", self._answers)
        monkeypatch.setattr(room, "_LATE_S", 0.0)
        monkeypatch.setattr("ray.is_initialized", lambda: True)

    def _resources(self) -> Resources:
        free = 1.0 if self.looks >= self._gives_after else 0.0
        return Resources(cpus=2.0, gpus=0.0, free_cpus=free, free_gpus=0.0)

    def _answers(self, method: str, supervisors: list[Any]) -> dict[int, float]:
        if method == "awaited_cpus":
            return {0: 0.0}
        self.looks += 1
        return {0: sum(self.asked)}


@pytest.mark.parametrize("gives_after", [0, 3])
def test_a_stream_waits_for_a_pool_that_gives_way(
    gives_after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = Cluster(monkeypatch, gives_after)
    new = room.ActorRoom(PoolConfig())
    new.ask_for()
    assert cluster.looks == gives_after
    assert cluster.asked == [1.0] * (gives_after > 0)
    new.give_back()
    assert sum(cluster.asked) == 0.0


def test_a_stream_that_is_left_while_it_waits_asks_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = Cluster(monkeypatch, gives_after=1000)

    def check() -> None:
        if cluster.looks > 2:
            raise RaypipeError("left")

    new = room.ActorRoom(PoolConfig())
    with pytest.raises(RaypipeError, match="left"):
        new.ask_for(check)
    new.give_back()  # which a stream that ends calls
    assert cluster.asked == [1.0, -1.0]


def test_a_stream_that_has_nothing_to_give_ends_for_one_that_finds_no_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Cluster(monkeypatch, gives_after=1000)
    monkeypatch.setattr(room, "_answers", lambda *_: {0: 0.0})
    ended = list[str]()
    monkeypatch.setattr(room, "make_room", lambda cpus, own, most: ended.append(own))
    new = room.ActorRoom(PoolConfig())
    new.insist("own")
    new.insist("own")
    assert not ended
    new._asked_at = -math.inf
    new.insist("own")
    until(lambda: ended == ["own"])
