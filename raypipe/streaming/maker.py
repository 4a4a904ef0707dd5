"""Makes the micro-batches of a stream, one after the other, in whatever process it is in; knows no Ray.

MicroBatchMaker   the stores, transforms of a stream, opened
try_samples       a few samples in the driver, before anything is started

`MicroBatchMaker._make_rows` is the whole road of a sample, from the store to its row.
"""

from __future__ import annotations

import functools
import itertools
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from raypipe.config import TransformConfig
from raypipe.errors import ConfigError, SampleError
from raypipe.logs import log_place
from raypipe.plan.places import PADDING, MicroBatchId, Split
from raypipe.plan.samplers import Draws
from raypipe.storage.retries import outages_s, report_progress
from raypipe.stores.base import name_of, title_of
from raypipe.streaming.bad_samples import BadSample, BadSampleBudget, record_bad
from raypipe.streaming.remake import (
    NUM_REMADE,
    Probe,
    check_probe,
    check_remade,
    copied,
    digest_of,
)
from raypipe.transform.fields import LABEL, MicroBatch, Rows, bytes_per_row
from raypipe.transform.keys import Key
from raypipe.transform.presets import build_transform, is_preset
from raypipe.transform.process_state import process_kept
from raypipe.transform.sample_maker import SampleMaker
from raypipe.transform.samples import (
    EncodedSample,
    Samples,
    check_labels,
    read_samples,
)
from raypipe.transform.sizes import Size, has_sizes, sides_of, size_in
from raypipe.transform.transform_steps import brief

if TYPE_CHECKING:
    from raypipe.streaming.spec import StreamSpec

logger = logging.getLogger(__name__)

ReadSamples = Callable[[MicroBatchId, np.ndarray], Samples]
"""Reads the samples of int64 indices (n,) for a micro-batch; padding has no image."""

NUM_SUBSTITUTES = 8  # at the default budget of 1 % bad samples, 8 bad substitutes in a row have a chance of 1e-16
NONE_EXCLUDED: Mapping[int, str] = MappingProxyType({})
_FIRST = MicroBatchId("train", 0, 0, 0)
_NUM_TRIED = 8
# Bytes of the rows whose images are made in one call: more would only hold more samples in memory. A call costs as
# much as some tens of small images, however many it makes.
_AT_ONCE_BYTES = 8 << 20


class MicroBatchMaker:
    """Reads, decodes and transforms the micro-batches of a stream. No result depends on its state.

    Args:
        spec: the stream.
        read: reads samples; None = from the stream's stores.

    Attributes:
        probes: samples by the user's code, one of each split, for other processes to compare.
    """

    def __init__(self, spec: StreamSpec, read: ReadSamples | None = None) -> None:
        self.plan = spec.plan
        self._spec = spec
        self._stores = spec.stores
        self._read_samples = read or self.read_store
        self._read_s = 0.0  # seconds of reading so far
        self._outage_s = 0.0  # those of them in which object storage did not answer
        self._budget = BadSampleBudget(spec.transform.max_bad_fraction)
        self._is_tolerant = spec.transform.max_bad_fraction > 0
        self._sample_makers: dict[tuple[Split, Size], SampleMaker] = {}
        # Copies of splits whose code is the user's, until their first samples were made twice, see `remake`.
        self._unchecked: dict[Split, Callable[[], SampleMaker]] = {}
        self._checked: set[Split] = set()
        self.probes: list[Probe] = []
        for split in spec.stores:
            position = MicroBatchId(split, 0, 0, 0)
            self._sample_maker(position, self.plan.draw(position))

    def _size(self, position: MicroBatchId, draws: Draws) -> Size:
        """The size of a micro-batch's images."""
        buckets = self.plan.config.sides_in(position.split)
        bucket = buckets[draws.buckets[0]] if buckets else None
        return size_in(self._spec.transform, position.split, position.epoch, bucket)

    def _sample_maker(self, position: MicroBatchId, draws: Draws) -> SampleMaker:
        """Return the maker of a micro-batch's samples; make it if its image size is new."""
        split = position.split
        size = self._size(position, draws)
        if (split, size) in self._sample_makers:
            return self._sample_makers[split, size]
        spec = self._spec
        code = spec.transforms[split]
        columns = spec.columns
        sides = None
        if has_sizes(spec.transform, split, self.plan.config.sides_in(split)):
            sides = sides_of(size)
        new = functools.partial(
            SampleMaker,
            config=spec.transform,
            size=size,
            sides=sides,
            threads=spec.pool.kernel_threads,
        )
        sample_maker = new(code, columns=columns)
        self._sample_makers[split, size] = sample_maker
        is_checked = split in self._unchecked or split in self._checked
        if sample_maker.has_user_code and not is_checked:
            if isinstance(code, str) and ":" in code:  # it may name an object
                code = build_transform(code, size)
            # Before its first use, of which it may keep something.
            code = copied(code)
            columns = replace(columns, function=copied(columns.function))
            self._unchecked[split] = lambda: new(copied(code), columns=columns)
        return sample_maker

    @property
    def draws_globally(self) -> bool:
        """True if a transform draws from generators of the process."""
        return any(
            sample_maker.draws_globally for sample_maker in self._sample_makers.values()
        )

    def batch(self, position: MicroBatchId) -> MicroBatch:
        """Make one micro-batch in a process shared with the user, and record its bad samples."""
        with process_kept(self.draws_globally):
            # the first compares with the validation
            batch, bad = self.make(position)
        self.settle([batch], bad)
        return batch

    def make(
        self,
        position: MicroBatchId,
        given: Samples | None = None,
        excluded: Mapping[int, str] = NONE_EXCLUDED,
        num_rows: int | None = None,
    ) -> tuple[MicroBatch, list[BadSample]]:
        """Make one micro-batch, and list its bad samples.

        Args:
            given: its B samples, by a reader; None = read the store here.
            excluded: see `block`.
            num_rows: how many of its first rows to make; None = all.
        """
        draws = self.plan.draw_block([position])
        draws = Draws(*(column[:, :num_rows] for column in draws))
        sample_maker = self._sample_maker(position, draws.at(0))
        out = Rows(sample_maker.fields, draws.indices.size)
        reads = [given] if given is not None else None
        (batch,), bad = self._fill(
            sample_maker, [position], draws, out, reads, excluded
        )
        return batch, bad

    def block(
        self,
        block: Sequence[MicroBatchId],
        reads: Sequence[Samples] | None = None,
        read_s: float = 0.0,
        outage_s: float = 0.0,
        excluded: Mapping[int, str] = NONE_EXCLUDED,
        one_by_one: bool = False,
    ) -> tuple[list[MicroBatch], list[BadSample], dict[str, np.ndarray]]:
        """Make the micro-batches of a block.

        Args:
            reads, read_s: samples that a reader has read for each, and its seconds for all; None = read the
                store here.
            outage_s: part of read_s, waiting for object storage that did not answer.
            excluded: index → reason of samples that must not be touched: each is a bad one.
            one_by_one: read and make a sample at a time, and none that the block does not need.

        Returns:
            The micro-batches; their bad samples; and the arrays of all by field, (k, B, …), if their images have
            one size.
        """
        draws = self.plan.draw_block(block)
        num = len(block)
        num_samples = draws.indices.shape[1]
        makers = [
            self._sample_maker(position, draws.at(number))
            for number, position in enumerate(block)
        ]
        if len(set(makers)) == 1:
            parts = [slice(0, num)]
        else:
            parts = [slice(number, number + 1) for number in range(num)]
        batches = list[MicroBatch]()
        bad = list[BadSample]()
        for span in parts:
            sample_maker = makers[span.start]
            out = Rows(sample_maker.fields, len(block[span]) * num_samples)
            read = reads[span] if reads else None
            finished, bad_of_part = self._fill(
                sample_maker,
                block[span],
                draws.at(span),
                out,
                read,
                excluded,
                one_by_one,
            )
            batches += finished
            bad += bad_of_part
        if reads:
            batches = [
                replace(batch, read_s=read_s / num, outage_s=outage_s / num)
                for batch in batches
            ]
        arrays = dict[str, np.ndarray]()
        if len(parts) == 1:
            arrays = {
                name: array.reshape(num, num_samples, *array.shape[1:])
                for name, array in out.arrays.items()
            }
        return batches, bad, arrays

    def _fill(
        self,
        sample_maker: SampleMaker,
        block: Sequence[MicroBatchId],
        draws: Draws,
        out: Rows,
        reads: Sequence[Samples] | None = None,
        excluded: Mapping[int, str] = NONE_EXCLUDED,
        one_by_one: bool = False,
    ) -> tuple[list[MicroBatch], list[BadSample]]:
        """Make the micro-batches of one image size, as many rows at once as memory allows.

        Args:
            draws: of their samples, (k, B).
        """
        num, num_samples = draws.indices.shape
        flat = Draws(*(column.ravel() for column in draws))
        seconds = np.zeros((3, num))  # rows: reading, outages, in all
        bad = list[BadSample]()
        first = 0
        while first < num * num_samples:
            report_progress()  # a time limit is one for each
            started = time.perf_counter()
            before = self._read_s, self._outage_s
            number = first // num_samples
            if one_by_one:
                rows = slice(first, first + 1)
                given = None
            else:
                count = self._num_at_once(block[number:], out, num_samples)
                rows = slice(first, first + count * num_samples)
                given = None
                if reads:
                    given = Samples.joined(reads[number : number + count])
            bad += self._make_rows(
                sample_maker,
                block,
                flat,
                rows,
                out,
                given,
                excluded,
                is_checked=not one_by_one,
            )
            if block[number] == _FIRST and not one_by_one:
                self._compare_with_val(block[number], flat)
            micro_batches = slice(number, -(-rows.stop // num_samples))
            count = micro_batches.stop - number
            spent = (
                self._read_s - before[0],
                self._outage_s - before[1],
                time.perf_counter() - started,
            )
            seconds[:, micro_batches] += np.array(spent)[:, None] / count
            first = rows.stop
        num_bad = Counter(sample.position for sample in bad)
        batches = []
        for number, position in enumerate(block):
            rows = slice(number * num_samples, (number + 1) * num_samples)
            read_s, outage_s, work_s = seconds[:, number].tolist()
            batches.append(
                MicroBatch(
                    position,
                    out.index[rows],
                    out.weight[rows],
                    out.finish(rows),
                    num_bad=num_bad[position],
                    read_s=read_s,
                    work_s=work_s,
                    outage_s=outage_s,
                )
            )
        return batches, bad

    def _make_rows(
        self,
        sample_maker: SampleMaker,
        block: Sequence[MicroBatchId],
        draws: Draws,
        rows: slice,
        out: Rows,
        given: Samples | None,
        excluded: Mapping[int, str],
        is_checked: bool,
    ) -> list[BadSample]:
        """Make rows of micro-batches: the whole road of a sample.

        Args:
            block: micro-batches of one image size, and strength in these rows.
            draws: of their samples, (k·B,).
            rows: the rows of `out` to make.
            given: the samples of these rows, if a reader has read them.
            excluded: index → reason of samples that must not be touched.
            is_checked: make the first samples of a user's code twice, to find state in it.
        """
        num_samples = len(draws.indices) // len(block)
        position = block[rows.start // num_samples]
        sample_maker.weaken(self._strength(position))
        self._log_place(position)

        indices = draws.indices[rows]
        keys = self.plan.sample_keys(position.split, draws.at(rows))
        is_wanted = indices != PADDING
        if excluded:
            is_wanted &= ~np.isin(indices, list(excluded))
        samples = given
        if samples is None:
            samples = self._read(position, np.where(is_wanted, indices, PADDING))

        is_made = sample_maker.fast(samples, indices, keys, is_wanted, out, rows.start)

        bad = list[BadSample]()
        for number in np.flatnonzero(~is_made).tolist():
            index = int(indices[number])
            row = rows.start + number
            position = block[row // num_samples]
            if index == PADDING:
                out.leave_out(row)
                continue
            try:
                if index in excluded:
                    raise SampleError(excluded[index])
                fields = self._slow(
                    sample_maker, position, samples[number], index, keys[number]
                )
                out.put(row, index, fields)
            except SampleError as error:
                draw = draws.at(slice(row, row + 1))
                bad.append(
                    self._stand_in(
                        sample_maker, position, draw, error, excluded, out, row
                    )
                )

        if not out.arrays:
            out.learn(self._first_sample(sample_maker, position.split, excluded))
        if is_checked and position.split in self._unchecked:
            is_bad = np.isin(indices, [sample.index for sample in bad])
            good = (out.weight[rows] > 0) & ~is_bad
            numbers = np.flatnonzero(good)[:NUM_REMADE].tolist()
            if numbers:
                originals = [out.sample(rows.start + number) for number in numbers]
                remade = [samples[number] for number in numbers]
                self._remake(sample_maker, position, originals, remade, keys[numbers])
        return bad

    def _slow(
        self,
        sample_maker: SampleMaker,
        position: MicroBatchId,
        sample: EncodedSample,
        index: int,
        key: np.ndarray,
    ) -> dict[str, Any]:
        """Make the fields of one sample; an error of the settings names it."""
        try:
            return sample_maker.slow(sample, key.tolist())
        except ConfigError as error:
            title = self._sample_title(position.split, index)
            raise ConfigError(f"{title}: {error}") from error

    def _stand_in(
        self,
        sample_maker: SampleMaker,
        position: MicroBatchId,
        draw: Draws,
        error: SampleError,
        excluded: Mapping[int, str],
        out: Rows,
        row: int,
    ) -> BadSample:
        """Replace a bad sample by the plan's first good substitute; during validation it gets weight 0.

        Args:
            draw: its draw, (1,).

        Raises:
            SampleError: no bad sample is tolerated, or no substitute is good.
        """
        split = position.split
        index = int(draw.indices[0])
        title = self._sample_title(split, index)
        if not self._is_tolerant:
            hint = f"with a transform.max_bad_fraction above 0 the run would use another one; or {error.advice}"
            raise type(error)(f"{title}: {error} ({hint})") from error
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
            out.leave_out(row, index)
            return bad
        for number in range(NUM_SUBSTITUTES):
            substitute = self.plan.substitute(position, index, number)
            (key,) = self.plan.substitute_keys(split, draw, substitute)
            try:
                if substitute in excluded:
                    raise SampleError(excluded[substitute])
                sample = self._read(position, np.array([substitute]))[0]
                fields = self._slow(sample_maker, position, sample, substitute, key)
            except SampleError as further:
                last = further
                continue
            out.put(row, substitute, fields)
            return replace(bad, substitute=substitute)
        raise type(last)(
            f"{title}: {error}; {NUM_SUBSTITUTES} substitutes were bad as well, the last one "
            f"{self._sample_title(split, substitute)}: {last}; {last.advice}"
        ) from error

    def _first_sample(
        self, sample_maker: SampleMaker, split: Split, excluded: Mapping[int, str]
    ) -> dict[str, Any]:
        """The fields of a sample that shows their shapes, where a micro-batch has none."""
        kept = self.plan.kept[split]
        position = MicroBatchId(split, 0, 0, 0)
        reason = ""
        for index in kept.indices(np.arange(min(16, kept.size))).tolist():
            if index in excluded:
                continue
            try:
                sample = self._read(position, np.array([index]))[0]
                return sample_maker.slow(sample, (0, 0))
            except SampleError as error:
                reason = f" ({error}; {error.advice})"
        raise ConfigError(
            f"{self._stores[split].address or 'the store'} has no readable sample among its first{reason}: "
            "the size of its images cannot be told"
        )

    def _read(self, position: MicroBatchId, indices: np.ndarray) -> Samples:
        """Read samples, and count the seconds."""
        started = time.perf_counter()
        outage_before_s = outages_s()
        samples = self._read_samples(position, indices)
        self._read_s += time.perf_counter() - started
        self._outage_s += outages_s() - outage_before_s
        return samples

    def read_store(self, position: MicroBatchId, indices: np.ndarray) -> Samples:
        """Read samples of the stream's stores, see `ReadSamples`."""
        return read_samples(self._stores[position.split], indices, self._spec.wanted)

    def _strength(self, position: MicroBatchId) -> float:
        """The strength of a micro-batch's transform; a validation's is whole."""
        if position.split == "val":
            return 1.0
        return self._spec.transform.strength_at(
            self.plan.progress(self.plan.global_step(position))
        )

    def _num_at_once(
        self, block: Sequence[MicroBatchId], out: Rows, num_samples: int
    ) -> int:
        """Count the first micro-batches to make in one call: of one strength, and within the bytes above."""
        num_bytes = bytes_per_row(out.fields)
        if num_bytes is None:
            return 1
        count = max(1, _AT_ONCE_BYTES // max(1, num_bytes * num_samples))
        block = block[:count]
        if not isinstance(self._spec.transform.strength, tuple):
            return len(block)
        strengths = [self._strength(position) for position in block]
        _, alike = next(itertools.groupby(strengths))
        return len(list(alike))

    def _remake(
        self,
        sample_maker: SampleMaker,
        position: MicroBatchId,
        originals: list[dict[str, Any]],
        samples: list[EncodedSample],
        keys: np.ndarray,
    ) -> None:
        """Make some samples again; raises ConfigError as `check_remade`."""
        split = position.split
        pool = self._spec.pool
        strength = self._strength(position)
        new_sample_maker = self._unchecked.pop(split)
        self._checked.add(split)
        has_threads = pool.engine == "inline" and not self.draws_globally

        def new_maker() -> Callable[[int], dict[str, Any]]:
            again = new_sample_maker()
            again.weaken(strength)
            return lambda number: _fields_of(
                again, samples[number], keys[number].tolist()
            )

        num_threads = pool.max_actors if has_threads else 1
        check_remade(originals, new_maker, self._title(split), num_threads)
        image = bytes(samples[0].image or b"")
        kept = samples[0]._replace(image=image, columns=dict(samples[0].columns))
        size = next(
            size
            for (_, size), maker in self._sample_makers.items()
            if maker is sample_maker
        )
        k0, k1 = keys[0].tolist()
        self.probes.append(
            Probe((split, size), kept, (k0, k1), digest_of(originals[0]), strength)
        )

    def check_probe(self, probe: Probe) -> str:
        """Compare a sample of another process with this one's; see `remake.check_probe`."""
        sample_maker = self._sample_makers.get(probe.of)
        if sample_maker is None:
            return ""
        try:
            sample_maker.weaken(probe.strength)
            fields = _fields_of(sample_maker, probe.sample, probe.key)
        except SampleError:  # the stream's own errors say what such a sample is
            return ""
        return check_probe(probe, digest_of(fields), self._title(probe.of[0]))

    def _title(self, split: Split) -> str:
        return f"transform.{split} is {brief(self._spec.transforms[split])}, which"

    def _sample_title(self, split: Split, index: int) -> str:
        store = self._stores[split]
        return title_of(store.address, index, name_of(store, index))

    def _compare_with_val(self, first: MicroBatchId, draws: Draws) -> None:
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
        shape = self._sample_maker(first, draws).image_shape
        val = self._sample_maker(position, self.plan.draw(position)).image_shape
        has_size = shape and not has_sizes(
            config, "train", self.plan.config.bucket_sides
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
            self._budget.spend(bad_here, len(batch.index))

    def _log_place(self, position: MicroBatchId) -> None:
        log_place(
            split=position.split,
            epoch=position.epoch,
            step=self.plan.step_of_split(position),
        )


def _fields_of(
    sample_maker: SampleMaker, sample: EncodedSample, key: Key
) -> dict[str, Any]:
    """The fields of a sample as a micro-batch has them."""
    rows = Rows(sample_maker.fields, 1)
    rows.put(0, 0, sample_maker.slow(sample, key))
    return rows.sample(0)


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
