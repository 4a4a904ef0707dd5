"""The metrics of a loader: its observers, and requests to stop and to make checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any

import pytest
from patience import until
from pictures import picture
from small_streams import spec_of
from without_ray import every_batch

import raypipe
from raypipe.config import PlanConfig
from raypipe.metrics.observer import Observer
from raypipe.plan.places import MicroBatchId, Split
from raypipe.stores.memory import MemoryStore
from raypipe.streaming.loader import Loader


@pytest.fixture
def loader() -> Loader:
    store = MemoryStore([picture(i, 9, 9) for i in range(8)], [0] * 8)
    plan = PlanConfig(epochs=2, micro_batch_size=2, global_batch_size=4)
    return raypipe.loader(spec_of(store, store, plan=plan))


class Notes(Observer):
    """Notes the events of a loader, in order."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def asked(self, split: Split, name: str, cause: Callable[[], str]) -> None:
        self.events.append(f"asked {name}")

    def arrived(self, split: Split) -> None:
        self.events.append("arrived")

    def handed_out(self, position: MicroBatchId, amounts: Mapping[str, Any]) -> None:
        self.events.append(f"{amounts['images']} images")

    def saving(self, cause: Callable[[], str]) -> None:
        self.events.append("saving")

    def saved(self) -> None:
        self.events.append("saved")

    def failed(self) -> None:
        self.events.append("failed")

    def recorded(self, kind: str, line: str, values: Mapping[str, Any]) -> None:
        self.events.append(kind)

    def ended(self) -> None:
        self.events.append("ended")

    def closed(self) -> None:
        self.events.append("closed")


def test_an_own_observer_sees_each_batch_record_and_the_end(loader: Loader) -> None:
    notes = Notes()
    loader.metrics.observers.append(notes)
    with loader:
        batches = every_batch(loader)
        next(batches)
        next(batches)
        loader.metrics.record("val", accuracy=0.5)
    second = "asked train-e0000-s000000-m001"
    first = "asked the first batch"
    assert notes.events == [
        *(first, "arrived", "2 images"),
        *(second, "arrived", "2 images"),
        *("val", "ended", "closed"),
    ]


def test_the_wait_for_a_checkpoint_is_over_if_it_cannot_be_saved(
    loader: Loader,
) -> None:
    notes = Notes()
    loader.metrics.observers.append(notes)
    with loader.metrics.saving(lambda: "a slow disk"):
        pass
    with (
        pytest.raises(OSError, match="full"),
        loader.metrics.saving(lambda: "a slow disk"),
    ):
        raise OSError("the disk is full")
    assert notes.events == ["saving", "saved", "saving", "failed"]


def test_a_checkpoint_is_due_by_age_and_at_a_request_to_stop(loader: Loader) -> None:
    train = next(loader.epochs()).train
    list(islice(train, 2))
    assert not loader.should_checkpoint()
    assert loader.should_checkpoint(every_s=0.0) and not loader.stopping
    loader.stop_when(lambda: True)
    until(loader.should_checkpoint)
    assert loader.stopping
