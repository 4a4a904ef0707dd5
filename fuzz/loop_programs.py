"""Programs of an own loop by chance, and what the plan says of each of their passes."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import random
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

from raypipe.device.prefetcher import Batch
from raypipe.errors import RaypipeError
from raypipe.plan.places import Cursor, MicroBatchId, Split
from raypipe.streaming import rank_stream
from raypipe.streaming.epochs import Epoch
from raypipe.streaming.handover import loader
from raypipe.streaming.inline import inline_batches
from raypipe.streaming.loader import Loader
from raypipe.streaming.maker import MicroBatchMaker
from raypipe.streaming.rank_stream import HostSource
from raypipe.streaming.shares import Share
from raypipe.streaming.spec import StreamSpec
from raypipe.transform.fields import MicroBatch

OPERATIONS = (
    "train",
    "hold",
    "val",
    "val",
    "part of val",
    "earlier val",
    "validation",
    "next epoch",
)

OPERATIONS += ("next epoch", "resume", "cell")


class Reference:
    """What a loop must get, from the plan alone: the micro-batches of the pass that it asks for, in order.

    Attributes:
        cursor: place after the last whole step, or after the epoch.
        left: the pass of the epoch at hand that a loop has left before its end, while none goes on with it.
    """

    def __init__(self, spec: StreamSpec, rank: int, world_size: int) -> None:
        self.plan, self.rank, self.world_size = spec.plan, rank, world_size
        self.cursor = spec.plan.start()
        self.epoch, self.first, self.taken, self.is_held = -1, 0, 0, False
        self.has_train = self.has_val = False
        self.left: Split | None = None

    @property
    def place(self) -> Cursor:
        """Where a resume goes on: after what a loop has left."""
        if not self.left or self.cursor.epoch != self.epoch:
            return self.named(self.cursor)
        after = (
            (self.epoch + 1, 0)
            if self.left == "val"
            else (self.epoch, self.plan.steps_per_epoch)
        )
        return self.named(Cursor(*after, self.plan.fingerprint))

    def named(self, place: Cursor) -> Cursor:
        """The same place, by its one name: the end of an epoch without a validation is the next one's start."""
        if place.step == self.plan.steps_per_epoch and not self.plan.has_val(
            place.epoch
        ):
            return Cursor(place.epoch + 1, 0, place.fingerprint)
        return place

    def resume(self) -> None:
        self.cursor = self.place
        self.epoch, self.left = -1, None

    def of(self, split: Split, epoch: int, first_step: int = 0) -> list[MicroBatchId]:
        num = self.plan.steps_per_epoch if split == "train" else self.plan.val_steps
        per_step = self.plan.config.per_step
        return [
            MicroBatchId(split, epoch, step, micro)
            for step in range(first_step, num)
            for micro in range(self.rank, per_step, self.world_size)
        ]

    def next_epoch(self, again: bool = False) -> int | None:
        """Its number; None = there is none. `again`: the loop was left, so it goes on at the cursor."""
        steps = self.plan.steps_per_epoch
        if self.epoch >= 0 and not again and self.cursor.epoch <= self.epoch:
            self._stand_at(self.epoch + self.has_val, 0 if self.has_val else steps)
        self.left = None
        place = self.named(self.cursor)
        if place.epoch >= self.plan.config.epochs:
            self.epoch = self.plan.config.epochs - 1
            return None
        self.epoch, self.first, self.taken, self.is_held = (
            place.epoch,
            place.step,
            0,
            False,
        )
        self.has_train, self.has_val = (
            place.step < steps,
            self.plan.has_val(place.epoch),
        )
        return self.epoch

    def _stand_at(self, epoch: int, step: int) -> None:
        self.cursor = Cursor(epoch, step, self.plan.fingerprint)

    def train(self, num: int, held: bool) -> list[MicroBatchId]:
        whole = self.of("train", self.epoch, self.first)
        part = whole[self.taken : self.taken + num]
        self.taken += len(part)
        self.is_held = (self.is_held or held) and self.taken < len(whole)
        if part and (
            steps := self.taken // (self.plan.config.per_step // self.world_size)
        ):
            self._stand_at(self.epoch, self.first + steps)
        if part:
            is_left = self.taken < len(whole) and not self.is_held
            self.left = "train" if is_left else None
        return part

    @property
    def train_is_open(self) -> bool:
        left = self.has_train and self.taken < len(
            self.of("train", self.epoch, self.first)
        )
        return left and (self.is_held or not self.taken)

    def val(self, epoch: int, num: int) -> list[MicroBatchId]:
        whole = self.of("val", epoch)
        if epoch == self.epoch and not self.train_is_open:
            # it is the one at the epoch's end
            if num < len(whole):
                self.left = "val"
            elif self.cursor.epoch <= epoch:
                self._stand_at(epoch + 1, 0)
        return whole[:num]


@functools.cache
def content(maker: MicroBatchMaker, at: MicroBatchId) -> tuple[list[int], str]:
    batch = maker.batch(at)
    pixels: Any = batch.fields["image"]
    return batch.index.tolist(), hashlib.sha1(np.ascontiguousarray(pixels)).hexdigest()


def seen(batch: Batch) -> tuple[MicroBatchId, list[int], str]:
    pixels = batch.image.movedim(1, -1).contiguous().numpy()
    return batch.position, batch.index.tolist(), hashlib.sha1(pixels).hexdigest()


class Program:
    """A random program on one rank, in step with the reference."""

    def __init__(
        self,
        spec: StreamSpec,
        make: Callable[[Cursor | None], Loader],
        rank: int,
        world_size: int,
        seed: int,
    ) -> None:
        self.make, self.loader = make, make(None)
        self.reference, self.maker = (
            Reference(spec, rank, world_size),
            MicroBatchMaker(spec),
        )
        self.random, self.num_delivered = random.Random(seed), 0
        self.epochs = self.loader.epochs()
        self.epoch: Epoch | None = None
        self.earlier: list[Epoch] = []
        self.held: Iterator[Batch] | None = None

    def run(self, num: int) -> None:
        self.next_epoch()
        for _ in range(num):
            name = self.random.choice(OPERATIONS)
            getattr(self, name.replace(" ", "_"))()
            assert self.loader.cursor == self.reference.cursor, name
            assert self.loader.state_dict() == dataclasses.asdict(
                self.reference.place
            ), name
        self.loader.close()

    def expect(self, batches: Iterator[Batch], places: list[MicroBatchId]) -> None:
        got = [seen(batch) for batch in batches]
        assert got == [(at, *content(self.maker, at)) for at in places]
        self.num_delivered += len(places)

    def next_epoch(self, again: bool = False) -> None:
        number = self.reference.next_epoch(again)
        self.held = None
        if self.epoch:
            self.earlier.append(self.epoch)
        left = self.epoch
        self.epoch = next(self.epochs, None)
        assert (self.epoch and self.epoch.number) == number
        if self.epoch:
            assert bool(len(self.epoch.train)) == self.reference.has_train
            assert bool(len(self.epoch.val)) == self.reference.has_val
        if (
            left
            and len(left.train)
            and left.train.begun
            and left.train._num_taken < len(left.train)
        ):
            with pytest.raises(RaypipeError, match="was skipped"):
                next(left.train)

    def train(self, held: bool = False) -> None:
        if not self.epoch or not len(self.epoch.train):
            return
        if self.epoch.train._num_taken == len(self.epoch.train):
            assert list(self.epoch.train) == []
            return
        num = self.random.choice([1, 2, 5, 100])
        if held and self.held is None:
            self.held = iter(self.epoch.train)
        batches = self.held if held and self.held else iter(self.epoch.train)
        if num == 100:
            self.expect(batches, self.reference.train(num, held))
        else:
            self.expect(islice(batches, num), self.reference.train(num, held))

    def hold(self) -> None:
        self.train(held=True)

    def val(self) -> None:
        if self.epoch and len(self.epoch.val):
            self.expect(
                iter(self.epoch.val), self.reference.val(self.epoch.number, 100)
            )

    def part_of_val(self) -> None:
        if self.epoch and len(self.epoch.val):
            self.expect(
                islice(self.epoch.val, 2), self.reference.val(self.epoch.number, 2)[:2]
            )

    def earlier_val(self) -> None:
        for epoch in self.earlier[-1:]:
            if len(epoch.val):
                self.expect(iter(epoch.val), self.reference.val(epoch.number, 100))

    def validation(self) -> None:
        number = max(0, self.reference.epoch)
        self.expect(iter(self.loader.validation()), self.reference.val(number, 100))

    def resume(self) -> None:
        state = self.loader.state_dict()
        if self.random.random() < 0.5:
            self.loader.close()
            self.loader = self.make(Cursor.from_dict(state))
            self.earlier = []
        else:
            self.loader.load_state_dict(state)
        self.epochs = self.loader.epochs()
        self.held, self.epoch = None, None
        self.reference.resume()
        self.next_epoch()

    def cell(self) -> None:
        """A loop over the epochs that is left at once, and run again: it goes on at the cursor."""
        self.held = None
        del self.epochs
        self.epochs = self.loader.epochs()
        assert self.loader.place == self.reference.named(self.reference.cursor)
        self.next_epoch(again=True)


def loader_of(
    spec: StreamSpec, rank: int, world_size: int, cursor: Cursor | None
) -> Loader:
    def open_at(place: MicroBatchId) -> Iterator[MicroBatch]:
        return inline_batches(spec, place, rank, world_size)

    share = Share(rank, world_size, rank, world_size)
    return Loader(spec, HostSource(open_at), share, cursor=cursor or spec.plan.start())


def train_on_two(config: dict[str, Any]) -> None:
    """All ranks leave each training early, and validate twice; the last validation is iterated by rank 0 alone."""
    rank_stream._START_IMAGES = 0  # each skip is a seek
    one, seen = loader(config["spec"]), list[str]()
    reference = Reference(config["spec"], one.rank, 2)
    for epoch in one.epochs():
        got = [batch.position for batch in islice(epoch.train, 4)]
        assert got == reference.of("train", epoch.number)[:4]
        is_last = epoch.number == 2
        for _ in range(1 if is_last else 2):
            if not is_last or one.rank == 0:
                got = [batch.position for batch in epoch.val]
                assert got == reference.of("val", epoch.number)
                seen.append(f"{epoch.number}")
        if is_last and one.rank == 0:
            told = "iterates the validation of epoch 2, and rank 1 does not"
            events = one._stream.supervisor.events
            # the other rank says that it leaves it out
            while not any(told in text for _, text in ray.get(events.remote(0))):
                time.sleep(0.1)
        if is_last:
            Path(config["folder"], str(one.rank)).write_text(" ".join(seen))
