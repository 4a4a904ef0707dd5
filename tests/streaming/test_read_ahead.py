"""Which groups an actor fetches before their window begins, from a store that keeps what it has fetched."""

from __future__ import annotations

import threading
from concurrent.futures import wait

import numpy as np
import pytest

from raypipe.config import PlanConfig, PoolConfig
from raypipe.errors import StoreError
from raypipe.plan.places import MicroBatchId
from raypipe.plan.schedule import Plan
from raypipe.stores.base import Columns
from raypipe.stores.joined import JoinedStore
from raypipe.stores.memory import MemoryStore
from raypipe.streaming import read_ahead
from raypipe.streaming.opening import open_stream
from raypipe.streaming.planning import make_plan
from raypipe.streaming.read_ahead import ReadAhead

NUM, PER_GROUP, PER_WINDOW = 240, 4, 3
IN_WINDOW = PER_GROUP * PER_WINDOW


class KeepingStore(MemoryStore):
    """A store in groups, each of which is fetched by the first read of one of its samples."""

    keeps_groups = True

    def __init__(self) -> None:
        super().__init__([b"jpeg"] * NUM, [0] * NUM, group_size=PER_GROUP)
        self.fetched = set[int]()
        self.threads = set[str]()
        self.answers = threading.Event()
        self.answers.set()
        self.is_broken = False

    def is_at_hand(self, indices: np.ndarray, columns: tuple[str, ...]) -> bool:
        return {*(indices // PER_GROUP).tolist()} <= self.fetched

    def read(
        self, indices: np.ndarray, columns: tuple[str, ...] = ("image", "label")
    ) -> Columns:
        self.threads.add(threading.current_thread().name)
        assert self.answers.wait()
        if self.is_broken:
            raise StoreError("the bucket is gone")
        self.fetched |= {*(indices // PER_GROUP).tolist()}
        return super().read(indices, columns)


@pytest.fixture
def store() -> KeepingStore:
    return KeepingStore()


@pytest.fixture(autouse=True)
def _each_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a window ahead is 6 samples here, and after each micro-batch there is a look."""
    monkeypatch.setattr(read_ahead, "_NUM_SAMPLES", IN_WINDOW // 2)
    monkeypatch.setattr(read_ahead, "_LOOK_SAMPLES", 1)


def plan_of(store: MemoryStore) -> Plan:
    config = PlanConfig(epochs=2, micro_batch_size=2, shuffle=PER_WINDOW)
    return make_plan(config, store)


def ahead_of(store: MemoryStore, plan: Plan) -> ReadAhead:
    return ReadAhead(plan, {"train": store}, ("image", "label"))


def begin(ahead: ReadAhead, position: MicroBatchId) -> None:
    """Begin, and wait until what was begun is fetched."""
    ahead.begin(position)
    if ahead._fetching:
        wait([ahead._fetching])
    assert not ahead.is_busy


def test_a_window_is_fetched_while_the_one_before_is_made(store: KeepingStore) -> None:
    plan = plan_of(store)
    stream = list(plan.micro_batches(plan.start()))
    ahead = ahead_of(store, plan)
    for number, position in enumerate(stream[:40]):
        begin(ahead, position)
        later = plan.indices(stream[number + 3])
        assert {*(later // PER_GROUP).tolist()} <= store.fetched
        # and nothing of the window after the next
        assert len(store.fetched) <= (1 + (number + 3) // 6) * PER_WINDOW
    assert store.threads == {"raypipe-read-ahead"}


def test_on_one_machine_actors_read_the_groups_that_it_keeps() -> None:
    keeping, others = KeepingStore(), MemoryStore([b"jpeg"] * 8, [0] * 8, group_size=4)
    for store, reads_apart in (
        (keeping, False),
        (others, True),
        (JoinedStore({"a": keeping, "b": keeping}), False),
        (JoinedStore({"a": keeping, "b": others}), True),
    ):
        plan = PlanConfig(epochs=1, micro_batch_size=2)
        spec = open_stream(store, plan=plan)
        assert "train" in spec.readers()
        assert ("train" in spec.readers(is_one_machine=True)) == reads_apart
        pool = PoolConfig(reader="separate")
        spec = open_stream(store, plan=plan, pool=pool)
        assert "train" in spec.readers(is_one_machine=True)
