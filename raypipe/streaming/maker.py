"""Makes the micro-batches of a stream, one after the other, in whatever process it is in; knows no Ray.

MicroBatchMaker   the stores, transforms and caches of a stream, opened
try_samples       a few samples in the driver, before anything is started
record_bad        the quarantine: best effort, since no run should end for want of it
BadSampleBudget   how many bad samples a run puts up with
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from raypipe.config import PoolConfig, TransformConfig
from raypipe.errors import BadSamplesError, ConfigError, SampleError, TransformError
from raypipe.logs import log_place
from raypipe.plan.places import PADDING, MicroBatchId, Split
from raypipe.plan.samplers import Draws
from raypipe.plan.schedule import Plan
from raypipe.storage.files import write_text
from raypipe.storage.filesystem import join, open_filesystem
from raypipe.storage.patience import impatient
from raypipe.stores.base import Store, name_of, title_of
from raypipe.streaming.row import Made
from raypipe.transform.batch import (
    FIRST_ATTEMPT,
    NO_LABEL,
    WRONG_LABEL,
    Attempt,
    Content,
    HostBatch,
    MicroBatchTransform,
    Read,
    ReadSample,
    Room,
    Sample,
    read_encoded,
    read_samples,
)
from raypipe.transform.columns import NO_COLUMNS, ColumnMaker, SampleColumns
from raypipe.transform.contents import Images
from raypipe.transform.device_share import DeviceShare
from raypipe.transform.encoded import EncodedTransform
from raypipe.transform.presets import build_transform, is_preset
from raypipe.transform.process_state import process_kept
from raypipe.transform.sample_cache import open_caches
from raypipe.transform.sample_transform import EncodedSample, Key
from raypipe.transform.sizes import Sides, Size, has_sizes, sides_of, size_in, sizes_of

logger = logging.getLogger(__name__)

NO_VIEWS = (
    "makes views, and a run trains a classifier of one image: choose another transform, or write a loop of your "
    "own around raypipe.loader, as docs/views.md does"
)

_FIRST = MicroBatchId("train", 0, 0, 0)

# Where a record has failed, this process tries none again: an object store that is gone says so after minutes, and
# a run should not wait for it at every bad sample.
_without_records: set[str] = set()


class MicroBatchMaker:
    """Reads, decodes and transforms micro-batches. Holds no state that a result could depend on.

    Args: as the attributes of a StreamSpec; and `contents`, what the samples of a split become, where that is not
        what its transform says.
    """

    def __init__(
        self,
        plan: Plan,
        stores: Mapping[Split, Store],
        transforms: Mapping[Split, Any],
        config: TransformConfig,
        pool: PoolConfig,
        quarantine: str = "",
        columns: SampleColumns = NO_COLUMNS,
        contents: Mapping[Split, Content] | None = None,
    ) -> None:
        self.plan, self._stores, self._quarantine = plan, stores, quarantine
        self._targets, self._columns = config.target_columns, columns
        self._config, self._given, self._contents = config, transforms, contents or {}
        self._budget = BadSampleBudget(config.max_bad_fraction, config.bad_grace)
        self.caches = open_caches(pool, stores, config, columns.reads_class)
        self._attempt = FIRST_ATTEMPT
        self._transforms: dict[tuple[Split, Size], MicroBatchTransform] = {}
        for split in stores:
            self._transform(MicroBatchId(split, 0, 0, 0))

    def _transform(self, at: MicroBatchId) -> MicroBatchTransform:
        """Of a micro-batch, by the size of its images; made where it is the first of that size."""
        split, size = at.split, self._size(at)
        if (split, size) not in self._transforms:
            store = self._stores[split]
            self._transforms[split, size] = micro_batch_transform(
                self._given[split],
                self._config,
                size=size,
                sides=sides_of(size) if has_sizes(self._config, split, self.plan.config.sides_in(split)) else None,
                probe=functools.partial(self._first_samples, split),
                exact=split == "val",
                store_address=store.address,
                sample_name=functools.partial(name_of, store),
                decoded=self.caches[split].decoded if split in self.caches else None,
                columns=ColumnMaker(self._columns) if self._columns else None,
                content=self._contents.get(split),
            )
        return self._transforms[split, size]

    def _size(self, at: MicroBatchId) -> Size:
        return size_in(self._config, at.split, at.epoch, self.plan.bucket_of(at))

    def room(self, block: Sequence[MicroBatchId]) -> Room:
        """Room for the arrays of micro-batches: for all together where their images have one size."""
        return Room(len(block) if len(set(map(self._size, block))) == 1 else 0)

    def draws_globally(self) -> Split | None:
        """A split whose transform draws from generators of the process, as long as there is one."""
        found = (split for (split, _), transform in self._transforms.items() if transform.draws_globally)
        return next(found, None)

    def batch(self, at: MicroBatchId, draws: Draws | None = None) -> HostBatch:
        """One micro-batch, made in a process that is also the user's; its bad samples are recorded."""
        with process_kept(self.draws_globally() is not None):  # the first compares with the validation
            made = self.make(at, draws=draws)
        self.settle(made)
        return made.host_batch()

    def make(
        self,
        at: MicroBatchId,
        given: Read | None = None,
        attempt: Attempt = FIRST_ATTEMPT,
        room: Room | None = None,
        draws: Draws | None = None,
    ) -> Made:
        """Make one micro-batch; reads the store unless a reader has done so.

        Args:
            given: what a reader has read.
            attempt: what is known of it.
            room: where its arrays are put; None = arrays of its own.
            draws: its draws, where the plan has been asked for them.
        """
        started = time.perf_counter()
        self._log_place(at)
        self._attempt = attempt
        draws = draws or self.plan.draw(at)
        indices = draws.indices
        cache = self.caches.get(at.split)
        kept = cache.find(indices) if cache else {}
        samples: list[Sample | ReadSample]
        if given is not None:
            samples, labels = [*given[0]], given[1]
        elif attempt.before_sample:  # each by itself, once it is announced: to read it may be what kills
            samples = [functools.partial(self._read, at.split, index) for index in indices.tolist()]
            labels = np.zeros(len(indices), np.int64)
        else:
            wanted = indices.copy()
            wanted[list(kept)] = PADDING
            if attempt.bad:  # it would not come back
                wanted[np.isin(indices, list(attempt.bad))] = PADDING
            read, labels = read_samples(self._stores[at.split], wanted, self._targets, self._columns)
            samples = [*read]
        for position, decoded in kept.items():
            samples[position] = decoded
            if given is None:
                labels[position] = decoded.label
        read_s = time.perf_counter() - started

        def read_substitute(position: int, attempt: int) -> tuple[ReadSample, int, int, Key]:
            index = self.plan.substitute(at, int(indices[position]), attempt)
            row = Draws(*(column[position : position + 1] for column in draws))
            k0, k1 = self.plan.sample_keys(at.split, row._replace(indices=np.array([index])))[0].tolist()
            return functools.partial(self._read, at.split, index), 0, index, (k0, k1)

        result = self._transform(at).run(
            {"image": samples, "label": labels, "index": indices},
            self.plan.sample_keys(at.split, draws),
            read_substitute,
            attempt,
            room,
        )
        if at == _FIRST and not attempt.before_sample and "image" in result.arrays:
            self._compare_with_val(result.arrays["image"].shape[1:3])
        return Made(at, result, read_s, time.perf_counter() - started, len(kept))

    def _compare_with_val(self, sides: Sides) -> None:
        """Compare the size of training images with that of a validation's first sample, before the first step."""
        buckets, of_size = self.plan.config.bucket_sides, all(map(is_preset, self._given.values()))
        if "val" not in self._stores or of_size or self._contents or has_sizes(self._config, "train", buckets):
            return
        content = self._transform(MicroBatchId("val", 0, 0, 0)).content
        for sample in self._first_samples("val"):
            with contextlib.suppress(SampleError):
                made = content.one(sample, (0, 0))
                if "image" in made and (
                    words := differing(self._config, self._given, {"train": sides, "val": made["image"].shape[:2]})
                ):
                    logger.warning("%s", words)
                return

    def settle(self, made: Made) -> None:
        """Record the bad samples of a micro-batch, and count them against the budget."""
        if made.result.bad:
            self._log_place(made.at)
            record_bad(self._quarantine, made.at, made.result.bad)
        self._budget.spend(made.result.bad, len(made.result.index))

    def _log_place(self, at: MicroBatchId) -> None:
        log_place(split=at.split, epoch=at.epoch, step=self.plan.global_step(at))

    def _read(self, split: Split, index: int) -> tuple[EncodedSample, int]:
        (sample,), (label,) = read_encoded(self._stores[split], np.array([index]), self._targets, self._columns)
        return sample, int(label)

    def _first_samples(self, split: Split) -> Iterator[EncodedSample]:
        kept = self.plan.kept[split]
        for index in kept.indices(np.arange(min(16, kept.size))).tolist():
            if self._attempt.before_sample:
                self._attempt.before_sample(index)
            if index not in self._attempt.bad:
                yield self._read(split, index)[0]


def micro_batch_transform(
    transform: Any,
    config: TransformConfig,
    *,
    size: Size | None = None,
    sides: Sides | None = None,
    probe: Callable[[], Iterable[EncodedSample]] = tuple,
    store_address: str = "",
    content: Content | None = None,
    **options: Any,
) -> MicroBatchTransform:
    """The transform of a split's micro-batches: of `content_of`, and with the options of `MicroBatchTransform`.

    Args:
        content: used instead of what the transform would make.

    Raises:
        ConfigError: a setting is wrong, or the transform is of a kind that they do not go with.
    """
    content = content or content_of(transform, config, size, sides, probe, store_address)
    return MicroBatchTransform(content, on_bad_sample=config.on_bad_sample, store_address=store_address, **options)


def content_of(
    transform: Any,
    config: TransformConfig,
    size: Size | None = None,
    sides: Sides | None = None,
    probe: Callable[[], Iterable[EncodedSample]] = tuple,
    store_address: str = "",
) -> Content:
    """What a transform makes of samples: `Images`, which get the rest, or what of them the device is to decode.

    Args:
        size: of the images; None = the config's last.

    Raises:
        ConfigError: a setting is wrong, or the transform is of a kind that they do not go with.
    """
    if config.device_share == 1:
        return EncodedTransform(transform, config, size)
    images = Images(build_transform(transform, size or config.final_size), config, probe, store_address, sides)
    if not config.device_share:
        return images
    return DeviceShare(EncodedTransform(transform, config, size), images, config)


def differing(
    config: TransformConfig, transforms: Mapping[Split, Any], sizes: Mapping[Split, tuple[int, ...]]
) -> str:
    """How the sizes of the splits' images differ, in words; empty if they do not.

    Models are trained at one size and validated at another on purpose (FixRes): where each is written down, by a
    transform of the user's or by transform.size.

    Args:
        sizes: height and width.

    Raises:
        ConfigError: one of the sizes was written down nowhere: it is that of a preset, at the default size.
    """
    if len(set(sizes.values())) < 2:
        return ""
    made = ", ".join(f"transform.{split} makes {height} x {width}" for split, (height, width) in sizes.items())
    words = f"sizes of images differ: {made} (height x width)"
    for split, transform in transforms.items():
        if is_preset(transform) and config.size == TransformConfig.size:
            raise ConfigError(
                f"{words}; {transform!r} makes images of transform.size, {config.size} by default: set that, or "
                f"give {split}_transform (transform.{split}), None or 'none' for pixels as they are stored. If "
                "sizes are to differ, write it as steps or as code of your own"
            )
    return words


def check_labels(labels: np.ndarray, num_classes: int, title: Callable[[int], str]) -> None:
    """Raise ConfigError where one of int64 (B,) is outside [0, num_classes); `title` names the sample of a row."""
    for row in np.flatnonzero(((labels < 0) | (labels >= num_classes)) & (labels != NO_LABEL)).tolist():
        raise ConfigError(
            f"{title(row)} has label {labels[row]}, outside [0, {num_classes}): set train.num_classes, or mend "
            "the store"
        )


@process_kept()
def try_samples(
    plan: Plan,
    stores: Mapping[Split, Store],
    transforms: Mapping[Split, Any],
    config: TransformConfig,
    num_classes: int,
    num: int = 8,
    columns: SampleColumns = NO_COLUMNS,
    channels: int = 3,
) -> dict[Split, tuple[int, int]]:
    """Read, decode and transform the first few samples of each split: what is wrong with all is told at once.

    Args:
        num_classes: labels are in [0, num_classes), where targets are classes.
        columns: of the stream.
        channels: that images must have, as augment.mean has them.

    Returns:
        Height and width of the images of each split, where there is one size; of those that a device decodes it is
        not known yet.

    Raises:
        StoreError, ConfigError: a column is missing; a label is out of range; the transform fails on each of them,
            or makes what no micro-batch can hold.
    """
    sizes: dict[Split, tuple[int, int]] = {}
    for split, store in stores.items():
        at = MicroBatchId(split, 0, 0, 0)
        draws = plan.draw(at)
        rows = np.flatnonzero(draws.indices != PADDING)[:num]
        indices = draws.indices[rows]
        buckets = plan.config.sides_in(split)
        several = sizes_of(config, split, buckets) if has_sizes(config, split, buckets) else []
        content, *others = (
            content_of(
                transforms[split],
                config,
                size,
                sides_of(size) if several else None,
                store_address=store.address,
            )
            for size in several or [config.final_size]
        )
        samples, labels = read_samples(store, indices, config.target_columns, columns)
        titles = [title_of(store.address, index, name_of(store, index)) for index in indices.tolist()]
        if columns.target is None:
            check_labels(labels, num_classes, titles.__getitem__)
        maker = ColumnMaker(columns) if columns else None
        bad = []
        keys = plan.sample_keys(split, draws)[rows].tolist()
        for sample, label, title, (k0, k1) in zip(samples, labels.tolist(), titles, keys, strict=True):
            try:
                if label == NO_LABEL:
                    raise SampleError(WRONG_LABEL)
                if maker:
                    maker.one(sample.columns, (k0, k1))
                made = content.one(sample, (k0, k1))
                while others:  # each size once
                    others.pop().one(sample, (k0, k1))
                if isinstance(made, dict) and "image" not in made:
                    raise ConfigError(f"transform.{split} {NO_VIEWS}")
                if isinstance(made, dict) and made["image"].shape[2] != channels:
                    raise ConfigError(
                        f"it has {made['image'].shape[2]} channels, and augment.mean and augment.std are of "
                        f"{channels}: give a number for each channel"
                    )
                if isinstance(made, dict) and not several:
                    sizes[split] = made["image"].shape[:2]
            except SampleError as error:
                bad.append(f"{title}: {error}; {error.advice}")
            except ConfigError as error:
                raise ConfigError(f"{title}: {error}") from error
        if len(bad) == len(indices):
            raise ConfigError(f"none of the first {len(bad)} {split} samples can be used; {bad[-1]}")
    return sizes


def record_bad(folder_uri: str, at: MicroBatchId, bad: list[dict[str, Any]], by: str = "") -> None:
    """Log bad samples, and write them as one JSON-lines object per micro-batch.

    It is named by the micro-batch's place, so that a retry of the same one, on any node, writes the same again.
    Where it cannot be written, that is logged, once in a process, and the log alone has them from then on.

    Args:
        folder_uri: of the quarantine; empty = log only.
        at: the micro-batch.
        bad: one record per sample.
        by: who found them, where that is not an actor; part of the name.
    """
    lines = [json.dumps({**vars(at), **record}) for record in bad]
    for line in lines:
        logger.warning("bad sample: %s", line)
    if not folder_uri or folder_uri in _without_records:
        return
    try:
        with impatient():
            filesystem, folder = open_filesystem(folder_uri)
            filesystem.create_dir(folder, recursive=True)
            write_text(join(folder_uri, f"{at}{by and '-' + by}.jsonl"), "".join(line + "\n" for line in lines))
    except Exception as error:  # a full disk, an object store that is gone, whatever it is
        _without_records.add(folder_uri)
        logger.warning("bad samples cannot be recorded in %s, but in this log: %s", folder_uri, error)


@dataclass
class BadSampleBudget:
    """How many bad samples a run tolerates before it stops.

    Attributes:
        max_fraction: largest share of the samples seen, in [0, 1].
        grace: this many are always tolerated, since one in the first ten says little about a rate.
    """

    max_fraction: float = 0.01
    grace: int = 10
    num_bad: int = 0
    num_seen: int = 0

    def spend(self, bad: list[dict[str, Any]], num_seen: int) -> None:
        """Count further samples seen, and the records of those that were bad.

        Raises:
            BadSamplesError: more than max(grace, max_fraction × seen) have been bad.
        """
        self.num_bad += len(bad)
        self.num_seen += num_seen
        if bad and self.num_bad > max(self.grace, self.max_fraction * self.num_seen):
            title = title_of(bad[-1]["store"], bad[-1]["index"], bad[-1]["name"])
            kind = TransformError if bad[-1].get("fault") == TransformError.fault else SampleError
            raise BadSamplesError(
                f"{self.num_bad} of {self.num_seen} samples are bad, more than"
                f" transform.max_bad_fraction={self.max_fraction:g} allows (the first {self.grace} are free);"
                f" the last one is {title}: {bad[-1]['error']}."
                f" Raise transform.max_bad_fraction, or {kind.advice}"
            )
