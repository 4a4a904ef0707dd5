"""Streams of eight nodes that make the same, with the ledger of the cluster: what is made, and what is moved."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from raypipe.config import PlanConfig, TransformConfig
from raypipe.plan.places import MicroBatchId
from raypipe.stores.memory import MemoryStore
from raypipe.streaming.hashes import batch_hash
from raypipe.streaming.maker import MicroBatchMaker
from raypipe.streaming.memory.content import Contents
from raypipe.streaming.memory.recall import Recall
from raypipe.streaming.memory.remembered import Ledger, Parcel, User
from raypipe.streaming.memory.stored import Stored
from raypipe.streaming.opening import open_stream
from raypipe.streaming.spec import StreamSpec

from pictures import CLASSES, picture  # isort: skip

EPOCHS = 4
STEPS = 5  # of an epoch
ROOM = 10 << 20


class Cluster:
    """The objects of a cluster, its ledger, and who has made and moved each micro-batch."""

    def __init__(self) -> None:
        self.ledger = Ledger()
        self.objects: list[list[Stored]] = []
        self.made = Counter[bytes]()
        self.moved = Counter[bytes]()
        self.changed = threading.Condition()


class Trial(threading.Thread):
    """A stream of one actor on a node of its own; it works the schedule through.

    Args:
        dies_after: it is killed when it has so many blocks, with claims in its hands.
    """

    def __init__(
        self, cluster: Cluster, number: int, spec: StreamSpec, dies_after: int = 99
    ) -> None:
        super().__init__()
        self.cluster = cluster
        name = f"trial {number}"
        self.user = User(name, name, name, f"node {number}", "t")
        cluster.ledger.check_in(self.user, ROOM)
        maker = MicroBatchMaker(spec)
        contents = Contents(spec, maker.sample_makers.recipes, name)
        self.recall = Recall(maker.block, contents, self, frozenset())
        self.recall.is_shared = True
        self.dies_after = dies_after
        self.digests: list[bytes] = []
        self.num_remembered = 0

    def run(self) -> None:
        for epoch in range(EPOCHS):
            block = [MicroBatchId("train", epoch, step, 0) for step in range(STEPS)]
            if epoch == self.dies_after:
                keys = self.recall._contents.keys(block)
                with self.cluster.changed:
                    self.cluster.ledger.ask(self.user, keys, 2, 0, comes_back=False)
                    self.cluster.ledger.die([self.user.name])
                    self.cluster.changed.notify_all()
                return
            for batch in self.recall.block(block)[0]:
                self.digests.append(batch_hash(batch))
                self.num_remembered += batch.num_remembered

    def find(
        self, keys: Sequence[bytes], limit: int, comes_back: bool
    ) -> tuple[dict[bytes, Stored], list[bytes]]:
        with self.cluster.changed:
            self.cluster.ledger.check_in(self.user, ROOM)  # a sign of life
            reply = self.cluster.ledger.ask(self.user, keys, limit, 0, comes_back)
            if not (reply.finished or reply.to_make):
                self.cluster.changed.wait(1.0)
            self.cluster.moved.update(list(reply.finished))
            objects = self.cluster.objects
            stored = {
                key: objects[location.ref][location.number]
                for key, location in reply.finished.items()
            }
        return stored, reply.to_make

    def keep(
        self, finished: dict[bytes, Stored], dropped: list[bytes], comes_back: bool
    ) -> dict[bytes, Stored]:
        assert not dropped
        with self.cluster.changed:
            self.cluster.objects.append(list(finished.values()))
            ref = len(self.cluster.objects) - 1
            num_bytes = sum(stored.num_bytes for stored in finished.values())
            parcel = Parcel(list(finished), num_bytes, comes_back)
            self.cluster.ledger.put(self.user, parcel, ref)
            self.cluster.made.update(list(finished))
            self.cluster.changed.notify_all()
        return {}


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Micro-batches are claimed one by one, and nobody loses patience on a busy machine."""
    monkeypatch.setattr("raypipe.streaming.memory.recall._TURN_S", 0.0)
    monkeypatch.setattr("raypipe.streaming.memory.recall._WAIT_S", 60.0)


def spec_of(**plan: Any) -> StreamSpec:
    images = [picture(number) for number in range(22)]
    store = MemoryStore(images, [number % 5 for number in range(22)], CLASSES)
    settings = {"epochs": EPOCHS, "micro_batch_size": 4, "global_batch_size": 4}
    return open_stream(
        store,
        plan=PlanConfig(**{**settings, "seed": 3, **plan}),
        transform=TransformConfig(train="light", size=16),
    )


def expected(spec: StreamSpec) -> list[bytes]:
    maker = MicroBatchMaker(spec)
    places = spec.plan.micro_batches(spec.plan.start())
    return [batch_hash(maker.make(place)[0]) for place in places]


def finish(trials: Sequence[Trial]) -> None:
    for trial in trials:
        trial.start()
    for trial in trials:
        trial.join(100)
        assert not trial.is_alive()


def test_eight_trials_on_eight_nodes_make_each_micro_batch_once() -> None:
    cluster = Cluster()
    spec = spec_of()
    trials = [Trial(cluster, number, spec) for number in range(8)]
    finish(trials)
    num = EPOCHS * STEPS
    assert set(cluster.made.values()) == {1} and len(cluster.made) == num
    # each of the other seven nodes has got it once
    assert set(cluster.moved.values()) == {7} and len(cluster.moved) == num
    assert sum(trial.num_remembered for trial in trials) == 7 * num
    assert {tuple(trial.digests) for trial in trials} == {tuple(expected(spec))}


def test_a_trial_that_dies_with_claims_stops_nobody() -> None:
    cluster = Cluster()
    spec = spec_of()
    killed = Trial(cluster, 0, spec, dies_after=1)
    others = [Trial(cluster, number, spec) for number in (1, 2)]
    finish([killed, *others])
    assert len(killed.digests) == STEPS
    assert [trial.digests for trial in others] == [expected(spec)] * 2
    assert set(cluster.made.values()) == {1} and len(cluster.made) == EPOCHS * STEPS


def test_a_trial_that_starts_late_finds_what_was_made() -> None:
    cluster = Cluster()
    spec = spec_of()
    late = Trial(cluster, 1, spec)
    finish([Trial(cluster, 0, spec)])
    finish([late])
    assert late.num_remembered == EPOCHS * STEPS and late.digests == expected(spec)
    assert set(cluster.made.values()) == {1}


def test_little_room_costs_time_and_no_pixel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "ROOM", 12_000)  # three of twenty
    cluster = Cluster()
    spec = spec_of()
    trials = [Trial(cluster, number, spec) for number in range(3)]
    finish(trials)
    assert [trial.digests for trial in trials] == [expected(spec)] * 3
    assert all(used <= 12_000 for used in cluster.ledger.used.values())


def test_streams_of_other_steps_and_ranks_have_the_same_keys() -> None:
    def keys(spec: StreamSpec) -> list[bytes]:
        maker = MicroBatchMaker(spec)
        contents = Contents(spec, maker.sample_makers.recipes, "s")
        places = spec.plan.micro_batches(spec.plan.start())
        first = [place for place in places if place.epoch == 0]
        return contents.keys(first)[:4]

    one = keys(spec_of())
    # the learning rate and the model are none of a stream's
    assert keys(spec_of(global_batch_size=8)) == one == keys(spec_of(epochs=2))
    assert not set(one) & set(keys(spec_of(seed=4)))
    assert not set(one) & set(keys(spec_of(micro_batch_size=2)))
