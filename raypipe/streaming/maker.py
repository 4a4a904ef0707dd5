"""Makes the micro-batches of a stream, one after the other, in whatever process it is in; knows no Ray.

MicroBatchMaker   the stores, transforms of a stream, opened
try_samples       a few samples in the driver, before anything is started

`MicroBatchMaker._make_rows` is the whole road of a sample, from the store to its row.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from raypipe.config import TransformConfig
from raypipe.errors import ConfigError, SampleError, TransformError
from raypipe.logs import log_place
from raypipe.metrics.tracer import traced
from raypipe.plan.places import PADDING, MicroBatchId, Split
from raypipe.storage.retries import outages_s, report_progress
from raypipe.stores.base import Columns, name_of, title_of
from raypipe.streaming.bad_samples import (
    BadSample,
    BadSampleBudget,
    forget_bad,
    record_bad,
    recorded_in,
)
from raypipe.streaming.sample_makers import NUM_REMADE, Maker, SampleMakers
from raypipe.transform.fields import LABEL, MicroBatch, Rows, bytes_per_row
from raypipe.transform.presets import is_preset
from raypipe.transform.process_state import process_kept
from raypipe.transform.samples import check_labels, read_by_reader, read_samples
from raypipe.transform.sizes import has_sizes

if TYPE_CHECKING:
    from raypipe.streaming.spec import StreamSpec

logger = logging.getLogger(__name__)

ReadSamples = Callable[[MicroBatchId, np.ndarray], Columns]
"""Reads the samples of int64 indices (n,) for a micro-batch; padding has no image."""
Made = tuple[list[MicroBatch], list[BadSample], dict[str, np.ndarray]]
"""Micro-batches of a block; their bad samples; and arrays of all by field, (k, B, …), if images have one size."""

NUM_SUBSTITUTES = 8  # at the default budget of 1 % bad samples, 8 bad substitutes in a row have a chance of 1e-16
_NUM_COMPARED = 32  # samples; half of a store that the code cannot take look like a branch that fails once in 4e9
NONE_EXCLUDED: Mapping[int, str] = MappingProxyType({})
_FIRST = MicroBatchId("train", 0, 0, 0)
_NUM_TRIED = 8
# Bytes of the rows whose images are made in one call: more would only hold more samples in memory. A call costs as
# much as some tens of small images, however many it makes.
_AT_ONCE_BYTES = 8 << 20


@dataclass(frozen=True)
class _Assignment:
    """Micro-batches of one image size to make, and the memory that they go to.

    Attributes:
        sample_maker: makes their samples.
        block: their places.
        indices: their samples, int64 (k·B,).
        keys: those of the samples, uint64 (k·B, 2).
        out: their rows, k·B.
        excluded: index → reason of samples that must not be touched.
    """

    sample_maker: Maker
    block: Sequence[MicroBatchId]
    indices: np.ndarray
    keys: np.ndarray
    out: Rows
    excluded: Mapping[int, str]

    @property
    def num_samples(self) -> int:
        """Samples of a micro-batch, B."""
        return len(self.indices) // len(self.block)

    def position(self, row: int) -> MicroBatchId:
        """The micro-batch of a row."""
        return self.block[row // self.num_samples]

    def check_allowed(self, index: int) -> None:
        """Raise SampleError for a sample that must not be touched."""
        if index in self.excluded:
            raise SampleError(self.excluded[index])


class MicroBatchMaker:
    """Reads, decodes and transforms the micro-batches of a stream. No result depends on its state.

    Args:
        spec: the stream.
        read: reads samples; None = from the stream's stores.

    Attributes:
        sample_makers: those of the stream, with the check of the user's code.
    """

    def __init__(self, spec: StreamSpec, read: ReadSamples | None = None) -> None:
        self.plan = spec.plan
        self.sample_makers = SampleMakers(spec)
        self._spec = spec
        self._stores = spec.stores
        self._read_samples = read or self.read_store
        self._read_s = 0.0  # seconds of reading so far
        self._outage_s = 0.0  # those of them in which object storage did not answer
        self._budget = BadSampleBudget(spec.transform.max_bad_fraction)
        self._is_tolerant = spec.transform.max_bad_fraction > 0
        for split in spec.stores:
            position = MicroBatchId(split, 0, 0, 0)
            self.sample_makers.get(position)

    @property
    def draws_globally(self) -> bool:
        """True if a transform draws from generators of the process."""
        return self.sample_makers.draws_globally

    def batch(self, position: MicroBatchId) -> MicroBatch:
        """Make one micro-batch in a process shared with the user, and record its bad samples."""
        with traced("make", [position]), process_kept(self.draws_globally):
            # the first compares with the validation
            batch, bad = self.make(position)
        self.settle([batch], bad)
        return batch

    def make(
        self,
        position: MicroBatchId,
        excluded: Mapping[int, str] = NONE_EXCLUDED,
        num_rows: int | None = None,
    ) -> tuple[MicroBatch, list[BadSample]]:
        """Make one micro-batch, and list its bad samples; see `block`."""
        (batch,), bad, _ = self.block([position], excluded=excluded, num_rows=num_rows)
        return batch, bad

    def block(
        self,
        block: Sequence[MicroBatchId],
        given: Columns | None = None,
        excluded: Mapping[int, str] = NONE_EXCLUDED,
        one_by_one: bool = False,
        num_rows: int | None = None,
    ) -> Made:
        """Make the micro-batches of a block.

        Args:
            given: their samples, end to end, if a reader has read them; None = read the store here.
            excluded: index → reason of samples that must not be touched: each is a bad one.
            one_by_one: read and make a sample at a time, and none that the block does not need.
            num_rows: how many of the first rows of each to make; None = all.
        """
        draws = self.plan.draw_block(block).flat(num_rows)
        keys = self.plan.sample_keys(block[0].split, draws)
        num = len(block)
        num_samples = len(draws.indices) // num
        buckets = draws.buckets[::num_samples].tolist()
        makers = list(map(self.sample_makers.get, block, buckets))
        num_at_once = num if len(set(makers)) == 1 else 1
        batches = list[MicroBatch]()
        bad = list[BadSample]()
        for first in range(0, num, num_at_once):
            end = first + num_at_once
            rows = slice(first * num_samples, end * num_samples)
            assignment = _Assignment(
                makers[first],
                block[first:end],
                draws.indices[rows],
                keys[rows],
                Rows(makers[first].fields, num_at_once * num_samples),
                excluded,
            )
            of_span = None if given is None else given.rows(rows)
            finished, bad_of_span = self._fill(assignment, of_span, one_by_one)
            batches += finished
            bad += bad_of_span
        if given is not None:
            batches = read_by_reader(batches, given)
        arrays = dict[str, np.ndarray]()
        if num_at_once == num:
            arrays = {
                name: array.reshape(num, num_samples, *array.shape[1:])
                for name, array in assignment.out.arrays.items()
            }
        return batches, bad, arrays

    def _fill(
        self,
        assignment: _Assignment,
        given: Columns | None = None,
        one_by_one: bool = False,
    ) -> tuple[list[MicroBatch], list[BadSample]]:
        """Make the micro-batches of an assignment, as many rows at once as memory allows.

        Args:
            given, one_by_one: see `block`.
        """
        num_samples = assignment.num_samples
        seconds = np.zeros((3, len(assignment.block)))
        bad = list[BadSample]()
        first = 0
        while first < len(assignment.indices):
            report_progress()  # a time limit is one for each
            before = self._seconds()
            number = first // num_samples
            count = 1
            of_rows = None
            if one_by_one:
                rows = slice(first, first + 1)
            else:
                count = self._num_at_once(assignment, number)
                rows = slice(first, first + count * num_samples)
                if given is not None:
                    of_rows = given.rows(rows)
            bad += self._make_rows(assignment, rows, of_rows, is_checked=not one_by_one)
            if assignment.block[number] == _FIRST and not one_by_one:
                self._compare_with_val(assignment.sample_maker)
            spent = self._seconds() - before
            seconds[:, number : number + count] += spent[:, None] / count
            first = rows.stop
        return self._finished(assignment, bad, seconds), bad

    def _finished(
        self, assignment: _Assignment, bad: Sequence[BadSample], seconds: np.ndarray
    ) -> list[MicroBatch]:
        """The micro-batches of an assignment whose rows are made.

        Args:
            seconds: float (3, k), see `_seconds`.
        """
        num_bad = Counter(sample.position for sample in bad)
        num_samples = assignment.num_samples
        out = assignment.out
        batches = []
        for number, position in enumerate(assignment.block):
            rows = slice(number * num_samples, (number + 1) * num_samples)
            started = time.perf_counter()
            # the same in each validation
            key = assignment.keys[rows.start].tolist()
            fields = assignment.sample_maker.finish(out, rows, key)
            read_s, outage_s, work_s = seconds[:, number].tolist()
            batches.append(
                MicroBatch(
                    position,
                    out.index[rows],
                    out.weight[rows],
                    fields,
                    num_bad=num_bad[position],
                    read_s=read_s,
                    work_s=work_s + time.perf_counter() - started,
                    outage_s=outage_s,
                )
            )
        return batches

    def _seconds(self) -> np.ndarray:
        """Seconds so far: of reading, of outages of object storage, and of the clock; their differences count."""
        return np.array([self._read_s, self._outage_s, time.perf_counter()])

    def _make_rows(
        self,
        assignment: _Assignment,
        rows: slice,
        given: Columns | None,
        is_checked: bool,
    ) -> list[BadSample]:
        """Make rows of micro-batches: the whole road of a sample.

        Args:
            rows: the rows to make, whose micro-batches have one strength.
            given: the samples of these rows, if a reader has read them.
            is_checked: make the first samples of a user's code twice, to find state in it.
        """
        sample_maker = assignment.sample_maker
        out = assignment.out
        position = assignment.position(rows.start)
        sample_maker.weaken(self.sample_makers.strength(position))
        self._log_place(position)

        indices = assignment.indices[rows]
        keys = assignment.keys[rows]
        is_wanted = indices != PADDING
        if assignment.excluded:
            is_wanted &= ~np.isin(indices, list(assignment.excluded))
        samples = given
        if samples is None:
            samples = self._read(position, np.where(is_wanted, indices, PADDING))

        is_made = sample_maker.fast(samples, indices, keys, is_wanted, out, rows.start)

        bad = list[BadSample]()
        for number in np.flatnonzero(~is_made).tolist():
            row = rows.start + number
            index = int(indices[number])
            if index == PADDING:
                out.leave_out(row)
                continue
            try:
                assignment.check_allowed(index)
                key = keys[number]
                fields = self._slow(assignment, row, index, key, samples, number)
                out.put(row, index, fields)
            except SampleError as error:
                bad.append(self._stand_in(assignment, row, error))

        if not out.arrays:
            out.learn(self._first_sample(assignment))
        if is_checked and self.sample_makers.is_unchecked(sample_maker):
            self._check_user_code(assignment, rows, samples, keys, bad)
        return bad

    def _check_user_code(
        self,
        assignment: _Assignment,
        rows: slice,
        samples: Columns,
        keys: np.ndarray,
        bad: Sequence[BadSample],
    ) -> None:
        """Make the first good samples of some rows again, to find state in the user's code."""
        out = assignment.out
        bad_indices = [sample.index for sample in bad]
        is_good = out.weight[rows] > 0
        is_good &= ~np.isin(assignment.indices[rows], bad_indices)
        numbers = np.flatnonzero(is_good)[:NUM_REMADE].tolist()
        if numbers:
            self.sample_makers.check(
                assignment.sample_maker,
                assignment.position(rows.start),
                {number: out.sample(rows.start + number) for number in numbers},
                samples,
                keys,
            )

    def _slow(
        self,
        assignment: _Assignment,
        row: int,
        index: int,
        key: np.ndarray,
        samples: Columns,
        number: int = 0,
    ) -> dict[str, Any]:
        """Make the fields of a row by one of some samples; an error of the settings names it."""
        try:
            return assignment.sample_maker.slow(samples, number, key.tolist())
        except ConfigError as error:
            title = self._sample_title(assignment.position(row).split, index)
            raise ConfigError(f"{title}: {error}") from error

    def _stand_in(
        self, assignment: _Assignment, row: int, error: SampleError
    ) -> BadSample:
        """Replace the bad sample of a row by the plan's first good substitute. During validation it gets weight 0.

        Raises:
            SampleError: no bad sample is tolerated, or no substitute is good.
        """
        position = assignment.position(row)
        split = position.split
        index = int(assignment.indices[row])
        title = self._sample_title(split, index)
        if not self._is_tolerant:
            hint = f"with a transform.max_bad_fraction above 0 the run would use another one; or {error.advice}"
            raise type(error)(f"{title}: {error} ({hint})") from error
        if isinstance(error, TransformError) and self._is_of_code(assignment, row):
            raise TransformError(
                f"{title}: {error}; the same draws fail on other samples as well, so the code is at fault and not "
                f"the sample: {error.advice}"
            ) from error
        store = self._stores[split]
        bad = BadSample(
            position,
            store.address,
            index,
            name_of(store, index),
            None,
            str(error),
            error.fault,
        )
        if split == "val":
            assignment.out.leave_out(row, index)
            return bad
        number_in_batch = row % assignment.num_samples
        draw = self.plan.draw(position).at(slice(number_in_batch, number_in_batch + 1))
        for number in range(NUM_SUBSTITUTES):
            substitute = self.plan.substitute(position, index, number)
            (key,) = self.plan.substitute_keys(split, draw, substitute)
            try:
                assignment.check_allowed(substitute)
                sample = self._read(position, np.array([substitute]))
                fields = self._slow(assignment, row, substitute, key, sample)
            except SampleError as further:
                last = further
                continue
            assignment.out.put(row, substitute, fields)
            return replace(bad, substitute=substitute)
        raise type(last)(
            f"{title}: {error}; {NUM_SUBSTITUTES} substitutes were bad as well, the last one "
            f"{self._sample_title(split, substitute)}: {last}; {last.advice}"
        ) from error

    def _is_of_code(self, assignment: _Assignment, row: int) -> bool:
        """True where the user's code fails with the draws of a row on each of many other samples."""
        position = assignment.position(row)
        index = int(assignment.indices[row])
        key = assignment.keys[row]
        candidates = {
            self.plan.substitute(position, index, number)
            for number in range(_NUM_COMPARED)
        }
        if position.split == "val":
            # the plan's substitutes are training samples
            kept = self.plan.kept["val"]
            numbers = np.array(list(candidates)) % kept.size
            candidates = set(kept.indices(numbers).tolist())
        others = sorted(candidates - {index, *assignment.excluded})
        for other in others:
            report_progress()
            with contextlib.suppress(SampleError):
                sample = self._read(position, np.array([other]))
                self._slow(assignment, row, other, key, sample)
                return False
        return bool(others)

    def _first_sample(self, assignment: _Assignment) -> dict[str, Any]:
        """The fields of a sample that shows their shapes, where a micro-batch has none."""
        split = assignment.block[0].split
        kept = self.plan.kept[split]
        position = MicroBatchId(split, 0, 0, 0)
        reason = ""
        for index in kept.indices(np.arange(min(16, kept.size))).tolist():
            if index in assignment.excluded:
                continue
            try:
                sample = self._read(position, np.array([index]))
                return assignment.sample_maker.slow(sample, 0, (0, 0))
            except SampleError as error:
                reason = f" ({error}; {error.advice})"
        raise ConfigError(
            f"{self._stores[split].address or 'the store'} has no readable sample among its first{reason}: "
            "the size of its images cannot be told"
        )

    def _read(self, position: MicroBatchId, indices: np.ndarray) -> Columns:
        """Read samples, and count the seconds."""
        started = time.perf_counter()
        outage_before_s = outages_s()
        with traced("read", [position]):
            samples = self._read_samples(position, indices)
        self._read_s += time.perf_counter() - started
        self._outage_s += outages_s() - outage_before_s
        return samples

    def read_store(self, position: MicroBatchId, indices: np.ndarray) -> Columns:
        """Read samples of the stream's stores, see `ReadSamples`."""
        store = self._stores[position.split]
        return read_samples(
            store, indices, self._spec.names, self._spec.columns.reads_class
        )

    def _num_at_once(self, assignment: _Assignment, number: int) -> int:
        """Count the micro-batches, from one of them on, to make in one call: of one strength, and within the bytes
        above."""
        bytes_of_row = bytes_per_row(assignment.out.fields)
        if bytes_of_row is None:
            return 1
        num_bytes = bytes_of_row * assignment.num_samples
        count = max(1, _AT_ONCE_BYTES // max(1, num_bytes))
        block = assignment.block[number : number + count]
        if not isinstance(self._spec.transform.strength, tuple):
            return len(block)
        strengths = [self.sample_makers.strength(position) for position in block]
        _, alike = next(itertools.groupby(strengths))
        return len(list(alike))

    def _sample_title(self, split: Split, index: int) -> str:
        store = self._stores[split]
        return title_of(store.address, index, name_of(store, index))

    def _compare_with_val(self, train: Maker) -> None:
        """Compare the size of training images with that of the validation's, before the first step.

        Models are trained at one size and validated at another on purpose (FixRes): that is accepted if each size
        is set, by a user's transform or by transform.size.

        Raises:
            ConfigError: one of the sizes is not set: a preset has the default size.
        """
        config = self._spec.transform
        transforms = self._spec.transforms
        if "val" not in transforms or all(map(is_preset, transforms.values())):
            return
        # Also where no sizes are compared: a validation that cannot be made is found before the first epoch.
        position = MicroBatchId("val", 0, 0, 0)
        self.make(position, num_rows=_NUM_TRIED)
        shape = train.image_shape
        val = self.sample_makers.get(position).image_shape
        has_size = shape and not has_sizes(
            config, "train", self.plan.config.sides_in("train")
        )
        if not has_size or not val or val[:2] == shape[:2]:
            return
        words = (
            f"sizes of images differ: transform.train makes {shape[0]} x {shape[1]}, transform.val makes "
            f"{val[0]} x {val[1]} (height x width)"
        )
        for split, transform in transforms.items():
            if is_preset(transform) and config.size == TransformConfig.size:
                raise ConfigError(
                    f"{words}; {transform!r} makes images of transform.size, {config.size} by default: set that, "
                    f"or give {split}_transform (transform.{split}), None or 'none' for pixels as stored; "
                    "if sizes are to differ, write it as steps or as your own code"
                )
        logger.warning("%s", words)

    def settle(self, batches: Sequence[MicroBatch], bad: Sequence[BadSample]) -> None:
        """Record the bad samples of micro-batches, and count them against the budget."""
        for batch in batches:
            bad_here = [sample for sample in bad if sample.position == batch.position]
            if bad_here:
                self._log_place(batch.position)
                record_bad(self._spec.quarantine, batch.position, bad_here)
            elif str(batch.position) in self._recorded_before:
                forget_bad(self._spec.quarantine, batch.position)
            self._budget.spend(bad_here, len(batch.index))

    @functools.cached_property
    def _recorded_before(self) -> set[str]:
        """The micro-batches that earlier starts of the run have recorded with bad samples."""
        return recorded_in(self._spec.quarantine)

    def _log_place(self, position: MicroBatchId) -> None:
        log_place(
            split=position.split,
            epoch=position.epoch,
            step=self.plan.step_of_split(position),
        )


@process_kept()
def try_samples(spec: StreamSpec, num_classes: int) -> None:
    """Make the first few rows of each split as the run will, to raise errors of all samples before it starts.

    Args:
        num_classes: labels are in [0, num_classes), where targets are classes.

    Raises:
        StoreError, SampleError, ConfigError: a column is missing; a label is out of range; the transform fails on
            each of them, or returns values that no micro-batch can hold.
    """
    maker = MicroBatchMaker(spec)
    for split, store in spec.stores.items():
        batch, _ = maker.make(MicroBatchId(split, 0, 0, 0), num_rows=_NUM_TRIED)
        if spec.columns.target is None:
            titles = [
                title_of(store.address, i, name_of(store, i))
                for i in batch.index.tolist()
            ]
            check_labels(batch[LABEL], num_classes, titles.__getitem__)
