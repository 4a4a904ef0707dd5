"""The plan: which samples, in which order, with which seed. Numpy only; knows no Ray, no torch.

A run is one schedule of segments, each made of steps of M micro-batches of B samples:

    schedule   train 0              | val 0 | train 1 | val 1 | …
    train e    step 0 | step 1 | …  S = N // (M·B) steps, N = samples of an epoch; fewer than M·B samples are
               left out, or, without plan.drop_last, are one more step, with padding
               without the steps of plan.skip; all others keep their numbers and draws
    val e      step 0 | …           ceil(Nval / (M·B)) steps; the last is padded with index -1 (or each bucket's)
    step       micro-batch 0 … M-1  micro-batch m goes to rank m mod W

Everything is a pure function of (plan, epoch, step, micro-batch): a stream can start anywhere.
`Plan.places_of` makes all draws of the run to find those of some samples.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import takewhile
from typing import Any

import numpy as np

from raypipe.config import PlanConfig
from raypipe.errors import ConfigError, CursorError
from raypipe.plan.compose import (
    StoreArrays,
    Training,
    compose_custom,
    compose_mixture,
    compose_one,
)
from raypipe.plan.custom import CustomSampler
from raypipe.plan.order import Domain, derive_keys, mix64
from raypipe.plan.places import (
    PADDING,
    Cursor,
    MicroBatchId,
    SamplePlace,
    Sides,
    Split,
    TrainStep,
)
from raypipe.plan.samplers import Draws, RunSampler, Sequential
from raypipe.plan.selection import JoinedSelection, Selection
from raypipe.plan.skipped import NOTHING, Skipped

_SPLIT_CODE = {"train": 0, "val": 1}
WHOLE = (0, 1)
"""The share of a single rank: rank 0 of 1."""
_NUM_SCANNED = 1 << 18  # draws that `places_of` makes at once


@dataclass(frozen=True)
class Segment:
    """Pass over one split, or the rest of it after a resume.

    Attributes:
        split, epoch: which.
        first_step, num_steps: steps first_step … num_steps - 1 are delivered. The first is 0 except after a
            resume, and the last is that of the whole pass unless the plan is cut off.
        skipped: steps between these that are left out.
    """

    split: Split
    epoch: int
    first_step: int
    num_steps: int
    skipped: Skipped = NOTHING

    @property
    def num_delivered(self) -> int:
        """Number of steps that are delivered."""
        return self.num_steps - self.first_step - self.skipped.count

    def behind(self, step: int) -> Segment:
        """Return the rest of it behind so many steps of the pass."""
        first = min(max(self.first_step, step), self.num_steps)
        skipped = self.skipped.within(first, self.num_steps)
        return replace(self, first_step=first, skipped=skipped)

    def step_of(self, number: int) -> int:
        """Return the step that is delivered after so many others."""
        return self.skipped.step_after(self.first_step, number)


@dataclass(frozen=True)
class Plan:
    """Order of a run's stream; see `Plan.of`, or for stores `raypipe.streaming.planning.make_plan`.

    Attributes:
        config: the order's settings.
        training: draws of the training epochs; None = this plan has only its schedule, see `without_draws`.
        validation: draws of each validation; None = no validation.
        steps_per_epoch: S, training steps in an epoch.
        num_val: samples of the validation store that are not excluded; 0 = no validation.
        num_val_rows: samples of a validation, and the padding of the micro-batches that they fill.
        order_fingerprint: 16 hex digits over everything that determines the order, except skipped steps.
        kept: which samples of each store these are.
        sources: names of a mixture's stores.
        schedule: the only segments of the schedule, see `until` and `only`; None = it has all of the run's.
    """

    config: PlanConfig
    training: Training | None = field(repr=False, compare=False)
    validation: Sequential | None = field(repr=False, compare=False)
    steps_per_epoch: int
    num_val: int
    num_val_rows: int
    order_fingerprint: str
    kept: dict[Split, Selection | JoinedSelection] = field(repr=False, compare=False)
    sources: tuple[str, ...] = ()
    schedule: tuple[Segment, ...] | None = None

    @staticmethod
    def of(
        config: PlanConfig,
        train: StoreArrays | Mapping[str, StoreArrays],
        val: StoreArrays | None = None,
        sampler: CustomSampler | None = None,
    ) -> Plan:
        """The plan of a run over a training store and, optionally, a validation store.

        Args:
            train: the training store, or a mixture's sources by name; their samples are numbered one source
                after the other.
            sampler: the user's, which draws the training samples of them; None = by the settings.

        Raises:
            ConfigError: the store, without excluded samples, is smaller than one step, has no groups to shuffle in
                windows, or lacks what another setting needs.
        """
        names = tuple[str, ...]()
        selection: Selection | JoinedSelection
        if isinstance(train, StoreArrays):
            sources = [train]
            selection = train.selection
        else:
            sources = list(train.values())
            names = tuple(train)
            selection = JoinedSelection([source.selection for source in sources])
        if sampler is not None:
            training = compose_custom(config, sources, sampler)
        elif isinstance(train, StoreArrays):
            training = compose_one(config, train)
        else:
            training = compose_mixture(config, train)
        validation = None
        if val is not None and config.val_interval and val.selection.size:
            num_buckets = len(config.sides_in("val"))
            buckets = [val.in_bucket(bucket)[1] for bucket in range(num_buckets)]
            buckets = buckets or [val.selection]
            validation = Sequential(buckets, config.micro_batch_size)
        content = training.content
        if not config.drop_last:
            content = [content, "with rest"]
        plan = Plan(
            config,
            training,
            validation,
            training.steps,
            val.selection.size if val and validation else 0,
            validation.size if validation else 0,
            _digest(content),
            {"train": selection, "val": val.selection if val else Selection([], 0)},
            names,
        )
        plan._check_skipped()
        return plan

    def _check_skipped(self) -> None:
        """Raise ConfigError if `plan.skip` has steps that the run does not have, or all of them."""
        num_steps = self.config.epochs * self.steps_per_epoch
        beyond = [end for _, end in self.skipped.ranges if end > num_steps]
        if beyond or self.skipped.count == num_steps:
            problem = f"skips step {beyond[0]:,}" if beyond else "skips all of them"
            raise ConfigError(
                f"the run has the steps 1 to {num_steps:,}, counted through all epochs as in metrics.jsonl, and "
                f"plan.skip {problem}"
            )

    def bound_to(self, also: Any) -> Plan:
        """Return this plan with further JSON values in its fingerprint, which determine the stream."""
        return replace(self, order_fingerprint=_digest([self.order_fingerprint, also]))

    def until(self, step: int) -> Plan:
        """Return this plan, cut off before a training step, counted through all epochs.

        A validation before that step stays. So the plan cut off at a, followed by the plan cut off at b from
        `cursor_at(a)` on, equals the plan cut off at b.
        """
        assert 0 < step <= self.config.epochs * self.steps_per_epoch
        epoch, rest = divmod(step, self.steps_per_epoch)
        before = takewhile(lambda segment: segment.epoch < epoch, self._passes(0))
        schedule = list(before)
        if rest:
            cut = replace(self.training_of(epoch), num_steps=rest)
            schedule.append(cut.behind(0))
        return replace(self, schedule=tuple(schedule))

    def only(self, segment: Segment) -> Plan:
        """Return this plan with a single segment for its schedule: to repeat a validation."""
        return replace(self, schedule=(segment,))

    @property
    def num_train(self) -> int:
        """N: samples of the training store that are not excluded."""
        return self.kept["train"].size

    @property
    def global_batch_size(self) -> int:
        """M·B: samples in an optimizer step."""
        return self.config.samples_per_step

    @cached_property
    def val_steps(self) -> int:
        """Number of steps of each validation; 0 = no validation."""
        return -(-self.num_val_rows // self.global_batch_size)

    @property
    def model_seed(self) -> int:
        """Seed of a new model's weights, for `torch.manual_seed` before it is made: apart from all other draws."""
        return int(derive_keys(1, self.config.seed, Domain.WEIGHTS)[0]) >> 1

    def progress(self, done: TrainStep) -> float:
        """The share of the run's training, in [0, 1], after so many steps."""
        return done / (self.config.epochs * self.steps_per_epoch)

    @cached_property
    def skipped(self) -> Skipped:
        """The training steps that are left out, counted through all epochs from 0."""
        return Skipped.of(self.config.skipped_ranges)

    @property
    def fingerprint(self) -> str:
        """16 hex digits over everything that determines the stream's order."""
        return self._fingerprint_before(self.config.epochs * self.steps_per_epoch)

    def _fingerprint_before(self, step: int) -> str:
        """The fingerprint of the stream before a step, so that a resumed run may skip later ones."""
        skipped = self.skipped.within(0, step)
        if not skipped.count:
            return self.order_fingerprint
        return _digest([self.order_fingerprint, {"skip": skipped.ranges}])

    def global_step(self, micro_batch: MicroBatchId | Cursor) -> TrainStep:
        """Training steps, through all epochs, before a micro-batch or a cursor.

        During a validation these are all steps of its epoch and of earlier ones.
        """
        if isinstance(micro_batch, MicroBatchId) and micro_batch.split == "val":
            return TrainStep((micro_batch.epoch + 1) * self.steps_per_epoch)
        return TrainStep(micro_batch.epoch * self.steps_per_epoch + micro_batch.step)

    def step_of_split(self, micro_batch: MicroBatchId) -> int:
        """Steps before a micro-batch on its split's own clock: all training's, or this validation's."""
        return (
            micro_batch.step
            if micro_batch.split == "val"
            else self.global_step(micro_batch)
        )

    def has_val(self, epoch: int) -> bool:
        """True if a validation follows training epoch e."""
        every = self.config.val_interval
        return self.val_steps > 0 and (
            (epoch + 1) % every == 0 or epoch + 1 == self.config.epochs
        )

    def start(self, cursor: Cursor | None = None) -> Cursor:
        """Return where a run starts that continues from a cursor, see `normalized`; None = it has not begun.

        Raises:
            CursorError: see `check`.
        """
        if cursor is None:
            return self.normalized(self.cursor_at(0))
        self.check(cursor)
        return self.normalized(cursor)

    def cursor_at(self, global_step: int) -> Cursor:
        """The cursor after so many training steps, skipped ones included, with no pending validation."""
        return self.cursor(*divmod(global_step, self.steps_per_epoch))

    def cursor(self, epoch: int, step: int) -> Cursor:
        """The cursor after so many steps of an epoch, skipped ones included."""
        done = epoch * self.steps_per_epoch + step
        return Cursor(epoch, step, self._fingerprint_before(done))

    def normalized(self, cursor: Cursor) -> Cursor:
        """Name a place by the next epoch where no validation is next."""
        rest = self.training_of(cursor.epoch, cursor.step)
        if not rest.num_delivered and cursor.epoch < self.config.epochs:
            # the rest of the epoch is skipped, or there is none
            if not self.has_val(cursor.epoch):
                return self.cursor(cursor.epoch + 1, 0)
            return self.cursor(cursor.epoch, self.steps_per_epoch)
        return cursor

    def training_of(self, epoch: int, first_step: int = 0) -> Segment:
        """Return an epoch's training, or the rest of it from a step on."""
        num_steps = self.steps_per_epoch
        begin = epoch * num_steps
        skipped = self.skipped.within(begin, begin + num_steps).moved(-begin)
        return Segment("train", epoch, 0, num_steps, skipped).behind(first_step)

    def check(self, cursor: Cursor) -> None:
        """Raise CursorError unless the cursor is a place of this plan."""
        done = self.global_step(cursor)
        expected = self._fingerprint_before(done)
        if cursor.fingerprint != expected:
            raise CursorError(
                f"the checkpoint was made under plan {cursor.fingerprint}, this run has plan "
                f"{expected}: the training store, its excluded samples, seed, micro_batch_size, "
                "global_batch_size, shuffle, sampler or another setting of the order differs, or plan.skip before "
                f"the checkpoint's step {done}. Restore it, resume from an earlier checkpoint, or start a new run"
            )
        if not (
            0 <= cursor.epoch <= self.config.epochs
            and 0 <= cursor.step <= self.steps_per_epoch
        ):
            raise CursorError(
                f"the checkpoint is at epoch {cursor.epoch}, step {cursor.step}; this run has "
                f"{self.config.epochs} epochs of {self.steps_per_epoch} steps"
            )

    def check_workers(self, world_size: int) -> None:
        """Raise ConfigError unless W divides M."""
        if world_size < 1 or self.config.per_step % world_size:
            step = max(1, world_size) * self.config.micro_batch_size
            fewer = self.global_batch_size // step
            sizes = " or ".join(
                str(number * step) for number in (fewer, fewer + 1) if number
            )
            per_step = self.config.per_step
            divisors = ", ".join(
                str(number)
                for number in range(1, per_step + 1)
                if per_step % number == 0
            )
            raise ConfigError(
                f"{world_size} workers cannot share the {per_step} micro-batches of a step "
                f"evenly: use {divisors} workers, or plan.global_batch_size={sizes}. raypipe.check_resources "
                "keeps an elastic TorchTrainer at these numbers"
            )

    def segments(self, start: Cursor | MicroBatchId) -> Iterator[Segment]:
        """The rest of the schedule, from a cursor, or from the step of a micro-batch, on."""
        epoch = start.epoch
        step = start.step
        if isinstance(start, Cursor):
            self.check(start)
        elif start.split == "val":
            # it may come where the schedule has none
            yield Segment("val", epoch, step, self.val_steps)
            epoch += 1
            step = 0
        for segment in self._passes(epoch):
            if segment.split == "train" and segment.epoch == epoch:
                segment = segment.behind(step)
            if segment.num_delivered:
                yield segment

    def _passes(self, first_epoch: int) -> Iterator[Segment]:
        """The segments of the schedule from an epoch on; a training may have no steps left."""
        if self.schedule is not None:
            yield from (one for one in self.schedule if one.epoch >= first_epoch)
            return
        for epoch in range(first_epoch, self.config.epochs):
            yield self.training_of(epoch)
            if self.has_val(epoch):
                yield Segment("val", epoch, 0, self.val_steps)

    def micro_batches(
        self,
        start: Cursor | MicroBatchId,
        first: int = 0,
        share: tuple[int, int] = WHOLE,
    ) -> Iterator[MicroBatchId]:
        """Yield the micro-batches of a share from a cursor, or from the step of a place, on, in order.

        Args:
            first: how many of them to leave out.
            share: (rank, W): the micro-batches m of each step with m mod W = rank.
        """
        for segment in self.segments(start):
            num = segment.num_delivered * (self.config.per_step // share[1])
            for number in range(first, num):
                yield self.place_in(segment, number, share)
            first = max(0, first - num)

    def place_in(
        self, segment: Segment, number: int, share: tuple[int, int]
    ) -> MicroBatchId:
        """The place of the micro-batch of a share that comes after so many of a segment."""
        rank, world_size = share
        steps, turn = divmod(number, self.config.per_step // world_size)
        step = segment.step_of(steps)
        micro = rank + turn * world_size
        return MicroBatchId(segment.split, segment.epoch, step, micro)

    def ends_split(self, place: MicroBatchId) -> bool:
        """Return whether a micro-batch's step is the last of its epoch's training, or of its validation."""
        if place.split == "val":
            return place.step + 1 == self.val_steps
        return not self.training_of(place.epoch, place.step + 1).num_delivered

    def num_micro_batches(self, start: Cursor | MicroBatchId) -> int:
        """Count the micro-batches from a place on, see `micro_batches`."""
        if not (self.val_steps or self.schedule or self.config.skip):
            # a run of `raypipe.DataLoader` may have a million epochs
            num_steps = self.config.epochs * self.steps_per_epoch
            return (num_steps - self.global_step(start)) * self.config.per_step
        steps = sum(segment.num_delivered for segment in self.segments(start))
        return steps * self.config.per_step

    def indices(self, micro_batch: MicroBatchId) -> np.ndarray:
        """The samples of a micro-batch: int64 (B,), PADDING after a validation's last sample."""
        return self.draw(micro_batch).indices

    def draw(self, micro_batch: MicroBatchId) -> Draws:
        """The draws of a micro-batch, (B,)."""
        return self.draw_block([micro_batch]).at(0)

    def draw_block(self, block: Sequence[MicroBatchId]) -> Draws:
        """The draws of k micro-batches of a segment, (k, B). For 16 it takes as long as for one."""
        size = self.config.micro_batch_size
        first = [
            (self.step_of_split(place) * self.config.per_step + place.micro) * size
            for place in block
        ]
        positions = np.add.outer(np.array(first), np.arange(size))
        draws = self._sampler(block[0].split).draw(positions.ravel())
        return Draws(*(column.reshape(positions.shape) for column in draws))

    def _sampler(self, split: Split) -> RunSampler:
        sampler: RunSampler | None = self.validation
        if split == "train":
            sampler = self.training.sampler if self.training else None
        assert sampler, "this plan has a schedule alone, or no validation"
        return sampler

    def draw_epoch(self, epoch: int, positions: np.ndarray) -> Draws:
        """The draws at int64 positions (n,) of a training epoch."""
        first = epoch * self.steps_per_epoch * self.global_batch_size
        return self._sampler("train").draw(first + positions)

    def places_of(
        self,
        samples: Sequence[int],
        split: Split,
        epochs: Iterable[int],
    ) -> Iterator[tuple[int, SamplePlace]]:
        """Yield where the run draws samples, in the order of the run, each place with its sample.

        It makes all draws of the epochs, some ten million a second. Substitutes of bad samples are not among them.

        Args:
            samples: as in `draw`: in a mixture, counted through its stores, one after the other.
            epochs: those to look in, each of which has the split.
        """
        size = self.num_val_rows
        if split == "train":
            size = self.steps_per_epoch * self.global_batch_size
        for epoch in epochs:
            begin = epoch * self.steps_per_epoch
            first = epoch * size if split == "train" else 0
            for start in range(0, size, _NUM_SCANNED):
                positions = np.arange(start, min(start + _NUM_SCANNED, size))
                indices = self._sampler(split).draw(first + positions).indices
                found = np.isin(indices, samples) & (indices != PADDING)
                for position in positions[found].tolist():
                    number, row = divmod(position, self.config.micro_batch_size)
                    step, micro = divmod(number, self.config.per_step)
                    if split == "val" or not self.skipped.has(begin + step):
                        place = MicroBatchId(split, epoch, step, micro)
                        yield int(indices[position - start]), SamplePlace(place, row)

    def bucket_of(self, micro_batch: MicroBatchId) -> Sides | None:
        """Height and width of the bucket that a micro-batch is of; None where its split has none."""
        sides = self.config.sides_in(micro_batch.split)
        # all of its samples share one
        return sides[self.draw(micro_batch).buckets[0]] if sides else None

    def without_draws(self) -> Plan:
        """Return this plan's schedule without its lists of samples, which can be large."""
        return replace(self, training=None, validation=None, kept={})

    def source_of(self, indices: np.ndarray) -> np.ndarray:
        """The number of the source of each sample of int64 indices (n,) of a mixture: int64 (n,), -1 = padding."""
        selection = self.kept["train"]
        assert isinstance(selection, JoinedSelection), "a mixture has sources"
        return np.where(
            indices < 0,
            PADDING,
            np.searchsorted(selection.offsets[1:-1], indices, side="right"),
        )

    def sample_keys(self, split: Split, draws: Draws) -> np.ndarray:
        """Keys of the samples' CPU transforms: uint64 (B, 2), a function of (seed, split, pass, index, repeat).

        Each word is a bijection of the index under a key of (seed, split, pass), so that no two samples of a pass
        share a key. A validation has the same keys in every epoch, so its metrics compare.
        """
        keys = np.empty((len(draws.indices), 2), np.uint64)
        for pass_number in np.unique(draws.passes).tolist():
            keys[draws.passes == pass_number] = _sample_domain(
                self.config.seed, split, pass_number
            )
        # The repeat is hashed by one bijection for each word, both of which leave 0 as it is.
        repeats = mix64(draws.repeats.astype(np.uint64))
        return mix64(
            keys
            ^ draws.indices.astype(np.uint64)[:, None]
            ^ np.stack([repeats, mix64(repeats)], axis=1)
        )

    def substitute_keys(self, split: Split, bad: Draws, index: int) -> np.ndarray:
        """The keys, uint64 (1, 2), of a sample that replaces the one of a draw; its own draws have others."""
        of_bad = self.sample_keys(split, bad)
        of_substitute = self.sample_keys(split, bad._replace(indices=np.array([index])))
        return mix64(of_substitute ^ mix64(of_bad ^ np.uint64(Domain.SUBSTITUTE)))

    def micro_batch_seed(self, micro_batch: MicroBatchId) -> int:
        """The seed, in [0, 2^63), of all that is drawn once per micro-batch: augmentation, dropout."""
        parts = (
            _SPLIT_CODE[micro_batch.split],
            micro_batch.epoch,
            micro_batch.step,
            micro_batch.micro,
        )
        return int(derive_keys(1, self.config.seed, Domain.MICRO_BATCH, *parts)[0]) >> 1

    def substitute(self, micro_batch: MicroBatchId, index: int, attempt: int) -> int:
        """The sample that replaces a bad one: a function of (seed, e, index, attempt), of its source or bucket."""
        assert self.training, "a plan without draws has a schedule alone"
        key = int(
            derive_keys(
                1,
                self.config.seed,
                Domain.SUBSTITUTE,
                micro_batch.epoch,
                index,
                attempt,
            )[0]
        )
        source = 0
        if self.sources:
            source = self.source_of(np.array([index]))[0]
        bucket = 0
        if self.config.train_buckets:
            bucket = self.draw(micro_batch).buckets[0]
        return self.training.store_samplers[source][bucket].sample_of(
            key, micro_batch.epoch
        )


def _digest(content: Any) -> str:
    """Hash JSON values into 16 hex digits."""
    return hashlib.blake2b(json.dumps(content).encode(), digest_size=8).hexdigest()


@lru_cache(maxsize=64)
def _sample_domain(seed: int, split: Split, pass_number: int) -> np.ndarray:
    return derive_keys(2, seed, Domain.SAMPLE, _SPLIT_CODE[split], pass_number)
