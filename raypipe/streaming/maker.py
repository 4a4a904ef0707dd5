"""Makes the micro-batches of a stream, one after the other, in whatever process it is in; knows no Ray.

MicroBatchMaker   the stores, transforms of a stream, opened
try_samples       a few samples in the driver, before anything is started
"""

from __future__ import annotations

import functools
import itertools
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from raypipe.config import TransformConfig
from raypipe.errors import ConfigError, SampleError
from raypipe.logs import log_place
from raypipe.plan.places import PADDING, MicroBatchId, Split
from raypipe.plan.samplers import Draws
from raypipe.storage.retries import outages_s
from raypipe.stores.base import name_of, title_of
from raypipe.streaming.bad_samples import BadSampleBudget, record_bad
from raypipe.streaming.remake import (
    NUM_REMADE,
    Probe,
    check_probe,
    check_remade,
    copied,
    digest_of,
)
from raypipe.transform.batch import (
    FIRST_ATTEMPT,
    NUM_SUBSTITUTES,
    Attempt,
    Candidate,
    MicroBatchTransform,
)
from raypipe.transform.columns import SampleColumns
from raypipe.transform.contents import Content
from raypipe.transform.fields import LABEL, BlockMemory, MicroBatch, Rows
from raypipe.transform.presets import build_transform, is_preset
from raypipe.transform.process_state import process_kept
from raypipe.transform.samples import NO_LABEL, EncodedSample, Samples, read_samples
from raypipe.transform.sizes import Size, has_sizes, sides_of, size_in
from raypipe.transform.transform_steps import brief

if TYPE_CHECKING:
    from raypipe.streaming.spec import StreamSpec

logger = logging.getLogger(__name__)

_FIRST = MicroBatchId("train", 0, 0, 0)
_NUM_TRIED = 8
# Bytes of the micro-batches whose images are made in one call: more would only hold more samples in memory.
_AT_ONCE_BYTES = 8 << 20


@dataclass(frozen=True)
class Outcome:
    """A micro-batch, and what only its maker's process needs to know of it.

    Attributes:
        bad: records of bad samples, see `MicroBatchTransform.run`.
    """

    batch: MicroBatch
    bad: list[dict[str, Any]]


class _Reading(NamedTuple):
    """Seconds that samples took to read, and those of them in which object storage did not answer."""

    seconds: float = 0.0
    outage_s: float = 0.0


class MicroBatchMaker:
    """Reads, decodes and transforms the micro-batches of a stream. No result depends on its state.

    Attributes:
        probes: samples by the user's code, one of each split, for other processes to compare.
    """

    def __init__(self, spec: StreamSpec) -> None:
        self.plan = spec.plan
        self._spec = spec
        self._stores = spec.stores
        self._budget = BadSampleBudget(spec.transform.max_bad_fraction)
        self._attempt = FIRST_ATTEMPT
        self._transforms: dict[tuple[Split, Size], MicroBatchTransform] = {}
        # Copies of splits whose code is the user's, until their first samples were made twice, see `remake`.
        self._unchecked: dict[Split, Callable[[], Content]] = {}
        self._checked: set[Split] = set()
        self.probes: list[Probe] = []
        for split in spec.stores:
            at = MicroBatchId(split, 0, 0, 0)
            self._transform(at, self.plan.draw(at))

    def _transform(self, at: MicroBatchId, draws: Draws) -> MicroBatchTransform:
        """Return the transform for a micro-batch's image size; make it if that size is new."""
        split = at.split
        spec = self._spec
        buckets = self.plan.config.sides_in(at.split)
        bucket = buckets[draws.buckets[0]] if buckets else None
        size = size_in(spec.transform, split, at.epoch, bucket)
        if (split, size) not in self._transforms:
            store = spec.stores[split]
            code = spec.transforms[split]
            columns = spec.columns
            if has_sizes(spec.transform, split, buckets):
                sides = sides_of(size)
            else:
                sides = None

            def content(code: Any, columns: SampleColumns) -> Content:
                return Content(
                    code, spec.transform, columns, size, sides, spec.pool.kernel_threads
                )

            made = self._transforms[split, size] = MicroBatchTransform(
                content(code, columns),
                tolerant=spec.transform.max_bad_fraction > 0,
                exact=split == "val",
                store_address=store.address,
                sample_name=functools.partial(name_of, store),
                probe=functools.partial(self._first_samples, split),
            )
            if made.content.has_user_code and split not in (
                *self._unchecked,
                *self._checked,
            ):
                if isinstance(code, str) and ":" in code:  # it may name an object
                    code = build_transform(code, size)
                # Before its first use, of which it may keep something.
                code, columns = (
                    copied(code),
                    replace(columns, function=copied(columns.function)),
                )
                self._unchecked[split] = lambda: content(copied(code), columns)
        return self._transforms[split, size]

    @property
    def draws_globally(self) -> bool:
        """True if a transform draws from generators of the process."""
        return any(
            transform.content.draws_globally for transform in self._transforms.values()
        )

    def batch(self, at: MicroBatchId) -> MicroBatch:
        """Make one micro-batch in a process shared with the user, and record its bad samples."""
        with process_kept(
            self.draws_globally
        ):  # the first compares with the validation
            outcome = self.make(at)
        self.settle(outcome)
        return outcome.batch

    def block(
        self,
        places: Sequence[MicroBatchId],
        reads: Sequence[Samples] | None = None,
        read_s: float = 0.0,
        attempt: Callable[[MicroBatchId], Attempt] = lambda _: FIRST_ATTEMPT,
        outage_s: float = 0.0,
    ) -> tuple[list[Outcome], BlockMemory | None]:
        """Make the micro-batches of a block.

        Args:
            reads, read_s: samples that a reader has read for each, and its seconds for all; None = read the
                store here.
            attempt: called before each one; returns knowledge from earlier attempts.
            outage_s: part of read_s, waiting for object storage that did not answer.

        Returns:
            The micro-batches, and the memory of them all; None = each has its own, since images differ in size.
        """
        draws = self.plan.draw_block(places)
        transform, *others = {
            self._transform(at, draws.at(number)) for number, at in enumerate(places)
        }
        if others:
            memory = None
        else:
            memory = BlockMemory(transform.content.fields, len(places))
        if memory is None:
            at_once = 1
        else:
            at_once = memory.num_within(_AT_ONCE_BYTES, draws.indices.shape[1])
        outcomes = list[Outcome]()
        while len(outcomes) < len(places):
            first = len(outcomes)
            knowledge = attempt(places[first])
            if knowledge is FIRST_ATTEMPT:
                num = self._num_alike(places[first : first + at_once])
            else:
                num = 1
            part = slice(first, first + num)
            read = Samples.joined(reads[part]) if reads else None
            share = len(places[part]) / len(places)
            spent = _Reading(read_s * share, outage_s * share)
            outcomes += self._make(
                places[part], draws.at(part), read, spent, knowledge, memory
            )
        return outcomes, memory

    def make(
        self,
        at: MicroBatchId,
        read: Samples | None = None,
        attempt: Attempt = FIRST_ATTEMPT,
        num_rows: int | None = None,
    ) -> Outcome:
        """Make one micro-batch; reads the store unless a reader has done so.

        Args:
            read: its B samples, by a reader.
            attempt: knowledge from earlier attempts.
            num_rows: how many of its first rows to make; None = all.
        """
        draws = Draws(*(column[:, :num_rows] for column in self.plan.draw_block([at])))
        (outcome,) = self._make([at], draws, read, _Reading(), attempt)
        return outcome

    def _make(
        self,
        places: Sequence[MicroBatchId],
        draws: Draws,
        read: Samples | None,
        spent: _Reading,
        attempt: Attempt,
        memory: BlockMemory | None = None,
    ) -> list[Outcome]:
        """Make micro-batches of one transform, the images of all in one call as far as possible.

        Args:
            draws: of their samples, (k, B).
            read, spent: their k·B samples, by a reader, and its time for them.
            memory: memory for their arrays; None = new memory.
        """
        started = time.perf_counter()
        first = places[0]
        num = len(places)
        transform = self._transform(first, draws.at(0))
        transform.content.weaken(self._strength(first))
        outage_before_s = outages_s()
        self._log_place(first)
        self._attempt = attempt
        flat = Draws(*(column.ravel() for column in draws))
        if read is None:
            samples = self._samples(first.split, flat.indices, attempt)
        else:
            samples = read
        if read is None:
            spent = _Reading(
                time.perf_counter() - started, outages_s() - outage_before_s
            )

        def substitutes(row: int) -> Iterator[Candidate]:
            of_row = flat.at(slice(row, row + 1))
            at = places[row * num // len(flat.indices)]
            for number in range(NUM_SUBSTITUTES):
                index = self.plan.substitute(at, int(of_row.indices[0]), number)
                k0, k1 = self.plan.substitute_keys(at.split, of_row, index)[0].tolist()
                yield functools.partial(self._read, at.split, index), index, (k0, k1)

        keys = self.plan.sample_keys(first.split, flat)
        rows, bad = transform.run(
            samples, flat.indices, keys, substitutes, attempt, memory, num
        )
        if first.split in self._unchecked and attempt is FIRST_ATTEMPT:
            good = [
                row
                for row in np.flatnonzero(rows.weight)[:NUM_REMADE].tolist()
                if row not in bad
            ]
            if good:
                of = next(
                    of for of, each in self._transforms.items() if each is transform
                )
                self._remake(of, rows, good, samples, keys, self._strength(first))
        if first == _FIRST and not attempt.before_sample:
            self._compare_with_val(transform.content.image_shape)
        outcomes = list[Outcome]()
        for number, at in enumerate(places):
            part = rows.part(number)
            fields = rows.finish(number)
            records = [
                record for row, record in bad.items() if part.start <= row < part.stop
            ]
            work_s = (time.perf_counter() - started) / num
            batch = MicroBatch(
                at,
                rows.index[part],
                rows.weight[part],
                fields,
                num_bad=len(records),
                read_s=spent.seconds / num,
                work_s=work_s,
                outage_s=spent.outage_s / num,
            )
            outcomes.append(Outcome(batch, records))
        return outcomes

    def _strength(self, at: MicroBatchId) -> float:
        """The strength of a micro-batch's transform; a validation's is whole."""
        if at.split == "val":
            return 1.0
        return self._spec.transform.strength_at(
            self.plan.progress(self.plan.global_step(at))
        )

    def _num_alike(self, places: Sequence[MicroBatchId]) -> int:
        """Count the first of some places that have one strength."""
        if not isinstance(self._spec.transform.strength, tuple):
            return len(places)
        strengths = list(map(self._strength, places))
        return sum(
            1
            for _ in itertools.takewhile(
                lambda strength: strength == strengths[0], strengths
            )
        )

    def _remake(
        self,
        of: tuple[Split, Size],
        rows: Rows,
        good: list[int],
        samples: Samples | list[Callable[[], EncodedSample]],
        keys: np.ndarray,
        strength: float,
    ) -> None:
        """Make some rows again; raises ConfigError as `check_remade`."""
        split = of[0]
        pool = self._spec.pool
        new_content = self._unchecked.pop(split)
        self._checked.add(split)
        has_threads = pool.engine == "inline" and not self.draws_globally

        def sample_of(number: int) -> EncodedSample:
            sample = samples[good[number]]
            return sample() if callable(sample) else sample

        def new_maker() -> Callable[[int], dict[str, Any]]:
            content = new_content()
            content.weaken(strength)
            return lambda number: _fields_of(
                content, sample_of(number), keys[good[number]].tolist()
            )

        first = [rows.sample(row) for row in good]
        check_remade(
            first, new_maker, self._title(split), pool.max_actors if has_threads else 1
        )
        sample = sample_of(0)
        kept = sample._replace(
            image=bytes(sample.image or b""), columns=dict(sample.columns)
        )
        self.probes.append(
            Probe(
                of, kept, tuple(keys[good[0]].tolist()), digest_of(first[0]), strength
            )
        )

    def check_probe(self, probe: Probe) -> str:
        """Compare a sample of another process with this one's; see `remake.check_probe`."""
        transform = self._transforms.get(probe.of)
        if transform is None:
            return ""
        try:
            transform.content.weaken(probe.strength)
            made = _fields_of(transform.content, probe.sample, probe.key)
        except SampleError:  # the stream's own errors say what such a sample is
            return ""
        return check_probe(probe, digest_of(made), self._title(probe.of[0]))

    def _title(self, split: Split) -> str:
        return f"transform.{split} is {brief(self._spec.transforms[split])}, which"

    def _samples(
        self, split: Split, indices: np.ndarray, attempt: Attempt
    ) -> Samples | list[Callable[[], EncodedSample]]:
        """The samples of a micro-batch: read, or to be read one by one."""
        if (
            attempt.before_sample
        ):  # each by itself, once it is announced: to read it may be what kills
            return [
                functools.partial(self._read, split, index)
                for index in indices.tolist()
            ]
        wanted = indices.copy()
        if attempt.bad:  # it would not come back
            wanted[np.isin(indices, list(attempt.bad))] = PADDING
        return read_samples(self._stores[split], wanted, self._spec.wanted)

    def _compare_with_val(self, shape: tuple[int, ...]) -> None:
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
        at = MicroBatchId("val", 0, 0, 0)
        self.make(at, num_rows=_NUM_TRIED)
        val = self._transform(at, self.plan.draw(at)).content.image_shape
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

    def settle(self, outcome: Outcome) -> None:
        """Record the bad samples of a micro-batch, and count them against the budget."""
        at = outcome.batch.position
        if outcome.bad:
            self._log_place(at)
            record_bad(self._spec.quarantine, at, outcome.bad)
        self._budget.spend(outcome.bad, len(outcome.batch.index))

    def _log_place(self, at: MicroBatchId) -> None:
        log_place(split=at.split, epoch=at.epoch, step=self.plan.step_of_split(at))

    def _read(self, split: Split, index: int) -> EncodedSample:
        return read_samples(self._stores[split], np.array([index]), self._spec.wanted)[
            0
        ]

    def _first_samples(self, split: Split) -> Iterator[EncodedSample]:
        kept = self.plan.kept[split]
        for index in kept.indices(np.arange(min(16, kept.size))).tolist():
            if self._attempt.before_sample:
                self._attempt.before_sample(index)
            if index not in self._attempt.bad:
                yield self._read(split, index)


def _fields_of(
    content: Content, sample: EncodedSample, key: tuple[int, int]
) -> dict[str, Any]:
    """The fields of a sample as a micro-batch has them."""
    rows = Rows(BlockMemory(content.fields), 1)
    rows.put(0, 0, content.one(sample, key))
    return rows.sample(0)


def check_labels(
    labels: np.ndarray, num_classes: int, title: Callable[[int], str]
) -> None:
    """Raise ConfigError where one of int64 (B,) is outside [0, num_classes); `title` names the sample of a row."""
    for row in np.flatnonzero(
        ((labels < 0) | (labels >= num_classes)) & (labels != NO_LABEL)
    ).tolist():
        raise ConfigError(
            f"{title(row)} has label {labels[row]}, outside [0, {num_classes}): set train.num_classes, or "
            "fix the store"
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
        batch = maker.make(MicroBatchId(split, 0, 0, 0), num_rows=_NUM_TRIED).batch
        if spec.columns.target is None:
            titles = [
                title_of(store.address, i, name_of(store, i))
                for i in batch.index.tolist()
            ]
            check_labels(batch[LABEL], num_classes, titles.__getitem__)
