"""The plan: which samples, in which order, with which seed. Numpy only; knows no Ray, no torch.

A run is one schedule of segments, each made of steps of M micro-batches of B samples:

    schedule   train 0              | val 0 | train 1 | val 1 | …
    train e    step 0 | step 1 | …  S = N // (M·B) steps; fewer than M·B samples are left out
    val e      step 0 | …           ceil(Nval / (M·B)) steps; the last is padded with index -1 (or each bucket's)
    step       micro-batch 0 … M-1  micro-batch m goes to rank m mod W

Everything is a pure function of (plan, epoch, step, micro-batch): a stream can start anywhere in O(1).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from raypipe.config import PlanConfig
from raypipe.errors import ConfigError, CursorError
from raypipe.plan.buckets import InTurn, Sides
from raypipe.plan.cursor import Cursor
from raypipe.plan.draws import Drawn
from raypipe.plan.layout import Layout, lay_out, selection_of
from raypipe.plan.leaves import members_of
from raypipe.plan.order import Domain, Order, StoredOrder, derive_keys, mix64
from raypipe.plan.places import PADDING, MicroBatchId, Split
from raypipe.plan.selection import Selection
from raypipe.stores.base import Store

# To find a sample by drawing takes a second or two for so many.
_MAX_LOOKED_AT, _LOOKED_AT = 1 << 22, 1 << 16
_SPLIT_CODE = {"train": 0, "val": 1}


@dataclass(frozen=True)
class Segment:
    """One pass over one split, or what is left of it after a resume.

    Attributes:
        split, epoch: which.
        first_step, num_steps: steps first_step … num_steps - 1 are delivered. The first is 0 except after a
            resume, and the last is that of the whole pass unless the plan is cut off.
    """

    split: Split
    epoch: int
    first_step: int
    num_steps: int


@dataclass(frozen=True)
class Share:
    """What one of G executions makes of the stream: every G-th micro-batch, for every G-th rank.

        micro-batch of the stream   0 1 2 3 | 4 5 6 7 | …      W = 4 ranks, G = 2 executions
        its rank r                  0 1 2 3 | 0 1 2 3
        its execution r mod G       0 1 0 1 | 0 1 0 1          where it is for rank r // G of R = W / G

    Together they make up the stream: what a rank gets does not depend on G.

    Attributes:
        index, executions: the execution's number in [0, G), and G, which divides W.
    """

    index: int = 0
    executions: int = 1

    def of(self, total: int) -> int:
        """This execution's part of a number of things; the parts of all add up to it."""
        return len(range(self.index, total, self.executions))


WHOLE = Share()


def shares(world_size: int, executions: int) -> list[Share]:
    """The share of each execution.

    Raises:
        ConfigError: their number does not divide W.
    """
    if executions < 1 or world_size % executions:
        raise ConfigError(
            f"pool.executions={executions} does not divide {world_size} workers: each execution serves as many "
            f"ranks as the others; use {_divisors(world_size)}"
        )
    return [Share(index, executions) for index in range(executions)]


def _divisors(number: int) -> str:
    return ", ".join(str(divisor) for divisor in range(1, number + 1) if number % divisor == 0)


@dataclass(frozen=True)
class Plan:
    """One run as one stream; `Plan.from_stores` makes it.

    Attributes:
        config: the order's settings.
        layout: what the training epochs draw.
        num_train: N, samples of the training store that are not excluded.
        num_val: samples of the validation store that are not excluded; 0 = no validation.
        fingerprint: 16 hex digits over everything that determines the stream's order.
        kept: which samples of each store these are.
        num_val_rows: samples of a validation, and the padding of its buckets.
        val_buckets: those of the validations; None = they have none.
        end_step: the training step, counted through all epochs, before which the schedule is cut off; None = not
            cut off.
    """

    config: PlanConfig
    layout: Layout = field(repr=False, compare=False)
    num_train: int
    num_val: int
    fingerprint: str
    kept: dict[Split, Selection] = field(repr=False, compare=False)
    num_val_rows: int
    val_buckets: InTurn | None = field(default=None, repr=False, compare=False)
    end_step: int | None = None

    @staticmethod
    def from_stores(
        config: PlanConfig,
        train: Store,
        val: Store | None = None,
        *,
        exclude: Sequence[int] | np.ndarray | Selection = (),
        val_exclude: Sequence[int] | np.ndarray | Selection = (),
    ) -> Plan:
        """The plan of a run over a training store and, optionally, a validation store.

        Args:
            train: of a mixture a `JoinedStore`.
            exclude, val_exclude: indices of samples of each store to exclude; all others keep their indices. Or a
                selection of those that are left.

        Raises:
            ConfigError: the store, without excluded samples, is smaller than one step, has no groups to shuffle in
                windows, or lacks what another setting needs.
        """
        kept: dict[Split, Selection] = {
            "train": selection_of(exclude, train),
            "val": selection_of(val_exclude, val),
        }
        num_train = len(train) - kept["train"].num_left_out
        num_val = len(val) - kept["val"].num_left_out if val is not None and config.val_interval else 0
        layout = lay_out(config, train, kept["train"])
        fingerprint = hashlib.blake2b(json.dumps(layout.parts).encode(), digest_size=8).hexdigest()
        val_buckets = None
        if val is not None and num_val and config.val_buckets:
            members = members_of(val, kept["val"], config.bucket_sides, "store.val_filter")
            val_buckets = InTurn(members, config.micro_batch_size)
        num_val_rows = val_buckets.size if val_buckets else num_val
        return Plan(config, layout, num_train, num_val, fingerprint, kept, num_val_rows, val_buckets)

    def bound_to(self, also: Any) -> Plan:
        """This plan, whose fingerprint has something else, as JSON has it, that determines the stream."""
        content = json.dumps([self.fingerprint, also])
        return replace(self, fingerprint=hashlib.blake2b(content.encode(), digest_size=8).hexdigest())

    @property
    def train_order(self) -> Order:
        """Position → index of the training store, of a plain plan."""
        assert self.layout.order is not None, "a plain plan has an order"
        return self.layout.order

    def until(self, step: int) -> Plan:
        """This plan, cut off before a training step, counted through all epochs.

        A validation before that step stays. So the plan cut off at a, followed by the plan cut off at b from
        `cursor_at(a)` on, equals the plan cut off at b.
        """
        assert 0 < step <= self.config.epochs * self.steps_per_epoch
        return replace(self, end_step=step)

    @property
    def global_batch_size(self) -> int:
        """M·B: samples in an optimizer step."""
        return self.config.samples_per_step

    @cached_property
    def steps_per_epoch(self) -> int:
        """S: training steps in an epoch."""
        return self.layout.epoch_samples // self.global_batch_size

    @cached_property
    def val_steps(self) -> int:
        """Steps in a validation; 0 = there is none."""
        return -(-self.num_val_rows // self.global_batch_size)

    def progress(self, epoch: int, step: int) -> float:
        """The share of the run's training steps, in [0, 1], that come before a step."""
        return (epoch * self.steps_per_epoch + step) / (self.config.epochs * self.steps_per_epoch)

    def global_step(self, at: MicroBatchId) -> int:
        """Training steps, through all epochs, before a micro-batch's step; in a validation, its own steps."""
        return at.step + (at.epoch * self.steps_per_epoch if at.split == "train" else 0)

    def has_val(self, epoch: int) -> bool:
        """Whether a validation follows training epoch e."""
        every = self.config.val_interval
        return self.val_steps > 0 and ((epoch + 1) % every == 0 or epoch + 1 == self.config.epochs)

    def start(self) -> Cursor:
        """The cursor of a run that has not begun."""
        return self.cursor_at(0)

    def cursor_at(self, global_step: int) -> Cursor:
        """The cursor after so many training steps, with no pending validation."""
        return Cursor(*divmod(global_step, self.steps_per_epoch), self.fingerprint)

    def check(self, cursor: Cursor) -> None:
        """Raise CursorError unless the cursor is a place of this plan."""
        if cursor.fingerprint != self.fingerprint:
            raise CursorError(
                f"the checkpoint was made under plan {cursor.fingerprint}, this run has plan "
                f"{self.fingerprint}: the training store, what is excluded, seed, micro_batch_size, "
                "global_batch_size, shuffle or another setting of what an epoch draws differ. Restore those, or "
                "start a new run"
            )
        if not (0 <= cursor.epoch <= self.config.epochs and 0 <= cursor.step <= self.steps_per_epoch):
            raise CursorError(
                f"the checkpoint is at epoch {cursor.epoch}, step {cursor.step}; this run has "
                f"{self.config.epochs} epochs of {self.steps_per_epoch} steps"
            )

    def check_workers(self, world_size: int) -> None:
        """Raise ConfigError unless W divides M."""
        if world_size < 1 or self.config.per_step % world_size:
            step = max(1, world_size) * self.config.micro_batch_size
            fewer = self.global_batch_size // step
            sizes = " or ".join(str(number * step) for number in (fewer, fewer + 1) if number)
            raise ConfigError(
                f"{world_size} workers cannot share the {self.config.per_step} micro-batches of a step "
                f"evenly: use {_divisors(self.config.per_step)} workers, or plan.global_batch_size={sizes}"
            )

    def segments(self, cursor: Cursor) -> Iterator[Segment]:
        """The rest of the schedule, from a cursor on."""
        self.check(cursor)
        last_step = self.config.epochs * self.steps_per_epoch if self.end_step is None else self.end_step
        for epoch in range(cursor.epoch, self.config.epochs):
            first = cursor.step if epoch == cursor.epoch else 0
            num_steps = min(self.steps_per_epoch, last_step - epoch * self.steps_per_epoch)
            if num_steps <= 0:
                return
            if first < num_steps:
                yield Segment("train", epoch, first, num_steps)
            if self.has_val(epoch) and num_steps == self.steps_per_epoch:
                yield Segment("val", epoch, 0, self.val_steps)

    def micro_batches(self, cursor: Cursor, first: int = 0, share: Share = WHOLE) -> Iterator[MicroBatchId]:
        """Every micro-batch of a share from a cursor on, in order, without the first `first` of them."""
        per_step = self.config.per_step
        for segment in self.segments(cursor):
            numbers = range(segment.first_step * per_step, segment.num_steps * per_step)
            numbers = numbers[share.index :: share.executions]
            for number in numbers[first:]:
                yield MicroBatchId(segment.split, segment.epoch, *divmod(number, per_step))
            first = max(0, first - len(numbers))

    def num_micro_batches(self, cursor: Cursor, share: Share = WHOLE) -> int:
        """How many micro-batches of a share remain from a cursor on."""
        steps = sum(segment.num_steps - segment.first_step for segment in self.segments(cursor))
        return share.of(steps * self.config.per_step)

    def indices(self, at: MicroBatchId) -> np.ndarray:
        """The samples of a micro-batch: int64 (B,), PADDING after a validation's last sample."""
        return self.draws(at)[0]

    def draws(self, at: MicroBatchId) -> Drawn:
        """The samples of a micro-batch, int64 (B,), and their repeats, int64 (B,), or None: all are 0."""
        indices, repeats = self.block_draws([at])
        return indices[0], None if repeats is None else repeats[0]

    def block_draws(self, block: Sequence[MicroBatchId]) -> Drawn:
        """The same of k micro-batches of a segment: int64 (k, B). For 16 it takes as long as for one."""
        size, split, epoch = self.config.micro_batch_size, block[0].split, block[0].epoch
        first = [(at.step * self.config.per_step + at.micro) * size for at in block]
        positions = np.add.outer(first, np.arange(size)).ravel()
        repeats = None
        if split == "train":
            found, repeats = self.train_draws(epoch, positions)
        elif self.val_buckets:
            found = self.val_buckets.indices(positions)
        else:
            numbers = np.minimum(positions, self.num_val - 1)
            found = np.where(positions < self.num_val, self.kept["val"].indices(numbers), PADDING)
        shape = (len(block), size)
        return found.reshape(shape), None if repeats is None else repeats.reshape(shape)

    def train_draws(self, epoch: int, positions: np.ndarray) -> Drawn:
        """The samples at int64 positions (n,) of a training epoch, and their repeats."""
        if self.layout.draws is not None:
            return self.layout.draws.draws(epoch, positions)
        return self.train_order.indices(epoch, positions), None

    def bucket_of(self, at: MicroBatchId) -> Sides | None:
        """Height and width of the bucket that a micro-batch is of; None where its split has none."""
        number = self._bucket(at)
        return None if number is None else self.config.bucket_sides[number]

    def _bucket(self, at: MicroBatchId) -> int | None:
        first = np.array([(at.step * self.config.per_step + at.micro) * self.config.micro_batch_size])
        if at.split == "val":
            return int(self.val_buckets.buckets(first)[0]) if self.val_buckets else None
        if not self.config.buckets:
            return None
        assert self.layout.draws is not None, "a plan with buckets is not plain"
        return int(self.layout.draws.buckets(at.epoch, first)[0])

    def find(self, epoch: int, index: int) -> tuple[MicroBatchId | None, int]:
        """The first micro-batch of a training epoch that draws a sample, None where none does, and the row there.

        Of a plan that is not plain, only the first 4 million draws are looked at.
        """
        position = -1
        if self.layout.order is not None:
            position = int(self.layout.order.positions(epoch, np.array([index]))[0])
        else:
            num_draws = min(self.steps_per_epoch * self.global_batch_size, _MAX_LOOKED_AT)
            for first in range(0, num_draws, _LOOKED_AT):
                found, _ = self.train_draws(epoch, np.arange(first, min(num_draws, first + _LOOKED_AT)))
                if (places := np.flatnonzero(found == index)).size:
                    position = first + int(places[0])
                    break
        number, row = divmod(position, self.config.micro_batch_size)
        step, micro = divmod(number, self.config.per_step)
        is_in = position >= 0 and step < self.steps_per_epoch
        return (MicroBatchId("train", epoch, step, micro) if is_in else None), row

    def without_draws(self) -> Plan:
        """This plan for one who needs its schedule alone: it has no lists of samples, whatever they weigh."""
        order = StoredOrder(self.num_train)
        layout = replace(self.layout, order=order, draws=None, leaves=(), buckets=(), offsets=None, mixture=None)
        return replace(self, layout=layout, kept={}, val_buckets=None)

    def source_of(self, indices: np.ndarray) -> np.ndarray:
        """Of a mixture, which source each sample of int64 indices (n,) is from: int64 (n,), -1 = padding."""
        assert self.layout.offsets is not None, "a mixture has sources"
        return np.where(indices < 0, PADDING, np.searchsorted(self.layout.offsets[1:-1], indices, side="right"))

    def sample_keys(self, at: MicroBatchId, indices: np.ndarray, repeats: np.ndarray | None = None) -> np.ndarray:
        """The key of each sample's CPU transform: uint64 (B, 2), a function of (seed, split, e, index, repeat).

        Each word is a bijection of the index under a key of (seed, split, e), so no two samples of an
        epoch share a key. A validation has the same keys in every epoch, so its metrics compare.

        Args:
            repeats: int64 (B,), which tell apart the draws of a sample in an epoch; None = all are 0.
        """
        keys = _sample_domain(self.config.seed, at.split, at.epoch if at.split == "train" else 0)
        x = indices.astype(np.uint64)
        words = [x ^ keys[0], x ^ keys[1]]
        if repeats is not None:  # hashed, by one bijection for each word, of which each leaves 0 as it is
            hashed = mix64(repeats.astype(np.uint64))
            words = [words[0] ^ hashed, words[1] ^ mix64(hashed)]
        return np.stack([mix64(word) for word in words], axis=1)

    def micro_batch_seed(self, at: MicroBatchId) -> int:
        """The seed, in [0, 2^63), of all that is drawn once per micro-batch: augmentation, dropout."""
        parts = (Domain.MICRO_BATCH, _SPLIT_CODE[at.split], at.epoch, at.step, at.micro)
        return int(derive_keys(1, self.config.seed, *parts)[0]) >> 1

    def substitute(self, at: MicroBatchId, index: int, attempt: int) -> int:
        """The sample that replaces a bad one: a function of (seed, e, index, attempt), of its source or bucket."""
        parts = (Domain.SUBSTITUTE, at.epoch, index, attempt)
        key = derive_keys(1, self.config.seed, *parts)[0]
        layout = self.layout
        if layout.order is not None:
            number = key % np.uint64(self.num_train)
            return int(self.kept["train"].indices(np.array([number], np.int64))[0])
        source, offset = 0, 0
        if layout.offsets is not None:
            source = int(self.source_of(np.array([index]))[0])
            offset = int(layout.offsets[source])
        if (bucket := self._bucket(at)) is not None:
            return offset + layout.buckets[source][bucket].another(key)
        position = key % np.uint64(layout.leaves[source].size)
        return offset + int(layout.leaves[source].draws(0, np.array([position], np.int64))[0][0])


@lru_cache(maxsize=8)
def _sample_domain(seed: int, split: Split, epoch: int) -> np.ndarray:
    return derive_keys(2, seed, Domain.SAMPLE, _SPLIT_CODE[split], epoch)
