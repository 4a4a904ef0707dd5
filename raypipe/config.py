"""Settings of a run, as frozen dataclasses; `raypipe help settings` prints them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, cast

from raypipe.errors import ConfigError
from raypipe.importing import import_name
from raypipe.logs import LogFormat
from raypipe.section import (
    ANY_NUMBER,
    MAX_INT,
    Limits,
    Ramped,
    Section,
    check,
    kinds_of,
    shown,
)

_MAX_PIXELS = (5 << 28) // 6  # the most pixels of an image, before and after decoding

AtLeast1 = Annotated[int, Limits(1, MAX_INT)]
AtLeastMinus1 = Annotated[int, Limits(-1, MAX_INT)]
Positive = Annotated[float, Limits(0, 1e30, above=True)]
Share = Annotated[float, Limits(0, 1)]
BelowOne = Annotated[float, Limits(0, 1, below=True)]
# Larger numbers would take all memory, or overflow where they are used.
BatchSize = Annotated[int, Limits(1, 1 << 20)]
Side = Annotated[int, Limits(1, math.isqrt(_MAX_PIXELS))]
Crops = Annotated[int, Limits(1, 1 << 12)]
Room = Annotated[int, Limits(1, 1 << 16)]
Seconds = Annotated[float, Limits(0, 1e9, above=True)]
Alpha = Annotated[float, Limits(0, 1e6)]
Outputs = Annotated[int, Limits(0, 1 << 24)]
Epochs = Annotated[float, Limits(0, MAX_INT)]
Float32 = Annotated[float, Limits(-1e30, 1e30)]  # within float32

# A number and its unit.
_TIME = re.compile(r"(\d{1,9}(?:\.\d{1,9})?) ?(s|min|h)", re.ASCII)
# The sides of a bucket, in pixels.
_STEPS = re.compile(r"(\d{1,15})(?:\.\.(\d{1,15}))?")
_SIDES = re.compile(r"[1-9]\d{0,4}x[1-9]\d{0,4}")
_DTYPES = [
    "bool",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
]
_DTYPES += ["float16", "float32", "float64"]
_TARGETS = ("mask", "boxes", "keypoints")


@dataclass(frozen=True)
class ColumnOptions(Section, prefix="store.columns.NAME."):
    """Options of a column whose values are lists or numbers; see docs/targets.md.

    Attributes:
        length: numbers in each list. Without `fill`, every list must have exactly this many. 0 = any number; the
            column then stays a list on the host.
        fill: number that pads shorter lists, whose own lengths are then in the column NAME_length; None = no
            padding.
        dtype: dtype of the numbers, also of numbers that are stored as text or bytes; empty = as stored.
    """

    length: Annotated[int, Limits(0, 1 << 24)] = 0
    fill: Annotated[float, ANY_NUMBER] | None = None
    dtype: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(
            self.fill is None or self.length > 0,
            "fill",
            "left out without a length",
        )
        self._require(self.dtype in ("", *_DTYPES), "dtype", f"one of {_DTYPES}")


ColumnsSetting = list[str] | dict[str, dict[str, Any] | None]
"""Names of columns; or their `ColumnOptions` by name, as plain values."""


def column_options(columns: Any) -> dict[str, ColumnOptions]:
    """Return the options of each column; raise ConfigError if one is wrong."""
    columns = check("store.columns", columns, ColumnsSetting)
    if isinstance(columns, dict):
        by_name = columns
    else:
        by_name = dict.fromkeys(columns)
    columns = {}
    option_names = list(kinds_of(ColumnOptions))
    for name, options in by_name.items():
        if set(options or {}) - set(option_names):
            raise ConfigError(
                f"store.columns has {name!r}: {shown(options)}; it must be names, or {{NAME: {{option: value}}}}"
                f" with {', '.join(option_names)}"
            )
        try:
            columns[name] = ColumnOptions(**(options or {}))
        except ConfigError as error:
            raise ConfigError(str(error).replace("NAME", name)) from None
    return columns


ByStore = str | dict[str, str]
"""A text; or one by the name of each store of a mixture, or of each split."""


@dataclass(frozen=True)
class StoreConfig(Section, prefix="store."):
    """The stores: where the images are. A store is a local path or a URI (s3://, gs://, az://, abfs://, hdfs://).

    Attributes:
        train: address of the training store; empty = the handwritten digits that raypipe ships. Several stores,
            `{NAME: ADDRESS, …}`, make a mixture, weighted by plan.mixture.
        val: address of the validation store; empty = no validation (the digits have their own).
        image_column: name of the image column; in WebDataset, the suffix of the image files; in a table of files,
            also a path with columns in braces, such as `images/{id}.jpg`.
        target_column: name of the target's column, which has classes, or numbers of one shape; in WebDataset, the
            suffix, or the field of the JSON; in LMDB of other programs, also a list of keys and labels, such as
            `labels.txt`, or `folder`; in folders and tables also a pattern, such as `(?P<label>[0-9]+)_`
            (docs/tables.md); empty = batches have no target (docs/targets.md).
        trust_pickles: open pickled values in LMDB of other programs, if you trust whoever wrote them; nothing but
            bytes, text, numbers, tuples, lists and dicts is read from them.
        exclude: list of bad samples of the training store to exclude, a path or a URI that `raypipe verify` has
            written; or `{train: LIST, val: LIST}`, with a mixture's names in the place of `train`; empty = none.
        filter: expression over columns, such as "width >= 256 and label != 3"; the run trains on the samples for
            which it is true, of all stores of a mixture; or `{train: EXPRESSION, val: EXPRESSION}`, with a
            mixture's names in the place of `train`; empty = all.
        take: share of the training store, or of each store of a mixture: "80%" or "10000", chosen by hashes of
            indices; "first 10000" or "last 5000" as stored; "10% by class", of each class alike; "10% seed 1" for
            another choice. `{val: "10%"}` without store.val holds out a part for validation, and the run trains on
            the rest; `{train: "80%", val: "10%"}`, with a mixture's names in the place of `train`, sets both.
            `exclude` and `filter` come after it; empty = all.
        columns: further columns that batches get, such as `[caption]`; or `{NAME: {option: value}}` with the
            options `length`, `fill` and `dtype` (docs/targets.md).
        in_memory: copy the store, still encoded, into memory that all processes of a node share, before the first
            sample is read there: for slow disks, network file systems and buckets. A store beyond
            RAYPIPE_MEMORY_BYTES is an error.
    """

    train: ByStore = ""
    val: str = ""
    image_column: str = "image"
    target_column: str = "label"
    trust_pickles: bool = False
    exclude: ByStore = ""
    filter: ByStore = ""
    take: ByStore = ""
    columns: ColumnsSetting = field(default_factory=list)
    in_memory: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.train == {}:
            raise ConfigError(
                "store.train names no store: give its address, or {NAME: ADDRESS, …}; leave it out to train on "
                "the digits that raypipe ships"
            )
        column_options(self.columns)


@dataclass(frozen=True)
class PlanConfig(Section, prefix="plan."):
    """The order of a run: which samples, when, in batches of which size.

    Attributes:
        epochs: passes over the training store.
        micro_batch_size: B, the samples in a micro-batch: one forward and backward pass on one GPU.
        global_batch_size: samples in an optimizer step, a multiple of B. A step has M = global_batch_size / B
            micro-batches, and W must divide M. 0 = B.
        seed: seed of the run, at least 0.
        shuffle: "global", "window" (for stores in groups, such as Parquet, and for tars), "off", or "auto" =
            "window" if the store has groups (Parquet; tars in a bucket), else "global". A window has at least 10
            groups and 4,096 samples; a number is "auto", with windows of so many groups, also for tars on disk.
        val_interval: epochs between validations; the last epoch always has one; 0 = no validation.
        epoch_samples: samples that an epoch draws; 0 = each sample of the store once. A mixture's epoch ends with
            its first store ("shortest", and 0) or with its last one ("longest"); see docs/sampling.md.
        mixture: weight of each store that store.train names; or `{EPOCH: {NAME: WEIGHT, …}, …}`, the weights from
            an epoch on; empty = in proportion to the stores' sizes.
        weights: how often each sample is drawn, by a column of numbers, or by a file `*.npy`. Or a number x, which
            balances classes: a class of n samples is drawn in proportion to n^(1 - x); 1 = all classes equally
            often; 0 = all samples equally often.
        aug_repeats: times that each sample is drawn in a step, each time with different augmentation (repeated
            augmentation) and in another micro-batch.
        buckets: sizes of training images, height x width, such as ["192x256", "224x224", "256x192"]. All images of
            a micro-batch have one size, and each sample gets the size with the nearest aspect ratio; or
            `{train: SIZES, val: SIZES}`, for validation too; empty = transform.size.
        sampler: your own sampler, `module:Class`, or with arguments `{name: module:Class, argument: value, …}`; in
            Python also the class instead of its name. It chooses the samples and their order, instead of shuffle,
            weights, mixture and epoch_samples (docs/sampling.md); empty = none.
        drop_last: leave out the last samples of an epoch, fewer than a global batch. Otherwise its last step has
            them, in equal numbers for each micro-batch, for which at most M - 1 samples come twice; all other rows
            have weight 0. Needs a single store, without buckets and aug_repeats.
        skip: training steps to leave out, such as ["48200..48260", 51007], both ends included, as metrics.jsonl
            counts them. No batch comes for them; all other steps keep their numbers, samples, seeds and learning
            rates. A resumed run may add steps after its checkpoint; those before it must stay.
    """

    epochs: AtLeast1 = 10
    micro_batch_size: BatchSize = 64
    global_batch_size: Annotated[int, Limits(0, 1 << 24)] = 0
    seed: Annotated[int, Limits(0, (1 << 64) - 1)] = 0
    shuffle: Literal["auto", "global", "window", "off"] | AtLeast1 = "auto"
    val_interval: int = 1
    epoch_samples: (
        Annotated[int, Limits(0, 1 << 40)] | Literal["shortest", "longest"]
    ) = 0
    mixture: dict[str, float] | dict[int, dict[str, float]] = field(
        default_factory=dict
    )
    weights: str | Annotated[float, Limits(0, 8)] = 0.0
    aug_repeats: AtLeast1 = 1
    buckets: list[str] | dict[str, list[str]] = field(default_factory=list)
    sampler: str | dict[str, Any] | type = ""
    drop_last: bool = True
    skip: list[int | str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_draws()
        self._check_buckets()
        self._check_sampler()
        self._check_skip()
        self._require(
            self.global_batch_size % self.micro_batch_size == 0,
            "global_batch_size",
            f"a multiple of plan.micro_batch_size, {self.micro_batch_size}",
        )

    def _check_draws(self) -> None:
        expected = f"a divisor of the {self.per_step} micro-batches in a step"
        self._require(
            self.per_step % self.aug_repeats == 0,
            "aug_repeats",
            expected,
        )
        for weights in self.mixture_by_epoch.values():
            self._require(
                any(weights.values()),
                "mixture",
                "weights by store, one of them above 0",
            )
        starts = list(self.mixture_by_epoch)
        self._require(starts[:1] in ([], [0]), "mixture", "weights from epoch 0 on")
        is_whole = bool(self.buckets) or self.aug_repeats > 1
        self._require(
            self.drop_last or not is_whole,
            "drop_last",
            "true with plan.buckets or plan.aug_repeats",
        )

    def _check_sampler(self) -> None:
        if not self.sampler:
            return
        named = self.sampler
        if isinstance(named, dict):
            named = named.get("name", "")
        self._require(
            isinstance(named, type) or (isinstance(named, str) and ":" in named),
            "sampler",
            "module:Class, or {name: module:Class, argument: value, …}",
        )
        for name in ("weights", "mixture", "buckets", "epoch_samples"):
            value = getattr(self, name)
            self._require(
                not value,
                name,
                "left out with plan.sampler, which chooses the samples itself",
            )

    def _check_skip(self) -> None:
        for steps in self.skip:
            match = _STEPS.fullmatch(str(steps))
            ok = match and 1 <= int(match[1]) <= int(match[2] or match[1])
            self._require(
                bool(ok),
                "skip",
                'steps from 1 on, or ranges of them, such as ["48200..48260", 51007]',
            )

    def _check_buckets(self) -> None:
        expected = "different sizes HEIGHTxWIDTH in pixels, such as 192x256"
        for names in self._buckets_by_split.values():
            are_sides = all(map(_SIDES.fullmatch, names))
            self._require(
                are_sides and len(set(names)) == len(names), "buckets", expected
            )
        for height, width in [*self.sides_in("train"), *self.sides_in("val")]:
            ok = height * width <= _MAX_PIXELS
            self._require(ok, "buckets", f"sizes of at most {_MAX_PIXELS} pixels")
        ok = self._buckets_by_split.keys() <= {"train", "val"}
        self._require(ok, "buckets", "sizes, or {train: SIZES, val: SIZES}")

    @property
    def window_groups(self) -> int:
        """Groups in a shuffle window; 0 = by default."""
        return self.shuffle if isinstance(self.shuffle, int) else 0

    @property
    def skipped_ranges(self) -> list[tuple[int, int]]:
        """The first step and the end of each range of `skip`, counted from 0."""
        texts = (str(steps).split("..") for steps in self.skip)
        return [(int(ends[0]) - 1, int(ends[-1])) for ends in texts]

    @property
    def _buckets_by_split(self) -> dict[str, list[str]]:
        if isinstance(self.buckets, dict):
            return self.buckets
        return {"train": self.buckets}

    @property
    def train_buckets(self) -> list[str]:
        """Sizes of training images; empty without buckets."""
        return self._buckets_by_split.get("train", [])

    def sides_in(self, split: Literal["train", "val"]) -> list[tuple[int, int]]:
        """Height and width of each bucket of a split."""
        names = self._buckets_by_split.get(split, [])
        pairs = (bucket.split("x") for bucket in names)
        return [(int(height), int(width)) for height, width in pairs]

    @property
    def is_plain(self) -> bool:
        """Return whether an epoch has each sample of one store equally often."""
        drawn = self.weights or self.mixture or self.train_buckets or self.sampler
        plain = not drawn
        return plain and not (
            isinstance(self.epoch_samples, int) and self.epoch_samples
        )

    @property
    def mixture_by_epoch(self) -> dict[int, dict[str, float]]:
        """Weights by store, by the epoch from which they hold, ascending; empty without weights."""
        if not all(isinstance(weights, dict) for weights in self.mixture.values()):
            return {0: cast(dict[str, float], self.mixture)}
        return dict(sorted(cast(dict[int, dict[str, float]], self.mixture).items()))

    @property
    def per_step(self) -> int:
        """M: micro-batches in an optimizer step."""
        return self.global_batch_size // self.micro_batch_size or 1

    @property
    def samples_per_step(self) -> int:
        """M·B, also if `global_batch_size` is 0."""
        return self.micro_batch_size * self.per_step


@dataclass(frozen=True)
class TransformConfig(Ramped, prefix="transform."):
    """The CPU transform, which actors apply to each sample; see docs/transforms.md.

    Attributes:
        train: transform of training samples: a preset, `module:function`, a list of Albumentations transforms, or
            several views, `{NAME: {transform: …, count: …, size: …}, …}`.
        val: transform of validation samples; the same choices.
        size: side of the images that presets make, in pixels; or sides by the epoch from which they apply, such as
            {0: 128, 10: 160, 20: 224}.
        decode: "cpu": actors decode to uint8 RGB, and send pixels; "array": the same, but PNG, TIFF and .npy keep
            their dtype and channels (docs/targets.md); "device": actors send encoded images, which the training
            device decodes, crops and resizes: fewer bytes, little work for CPUs, and that device's own pixels.
        strength: factor of the probabilities and magnitudes of training transforms, a number or a ramp as
            augment.strength; for raypipe's presets, and lists of steps that raypipe makes itself. At 0 a random
            crop is a central one.
        apply_exif: rotate images by their EXIF orientation, or else by XMP's, as Pillow does; masks, boxes and
            keypoints must then be those of the upright image; off = use the pixels as stored, as torchvision does.
        targets: columns of targets that are transformed together with the image, such as `{mask: seg, boxes: b}`:
            `mask`, a PNG of one channel; `boxes`, `[x0, y0, x1, y1, label]` in pixels; `keypoints`,
            `[x, y, label]` in pixels. `boxes_xywh` are boxes of a corner, width and height, as COCO has them.
            Hugging Face's structs of lists may have either, so they must be `boxes_xywh` or `boxes_xyxy`. A sample
            may have 100 boxes, and 100 keypoints, or as many as `max: 300` says; one with more ends the run.
        make_columns: `module:function` that computes a sample's columns from those of store.columns, such as the
            tokens of a caption; empty = batches get the columns of the store.
        max_bad_fraction: the run ends if more than this share of an actor's samples is bad, after the first 10. Up
            to there another sample, chosen by the plan, replaces a bad one; during validation it gets weight 0.
            0 = the run ends at the first bad sample.
        time_limit_s: seconds for a micro-batch, and, in a second attempt, for each of its samples; a sample that
            takes longer counts as bad; 0 = no limit.
    """

    train: str | list[dict[str, Any]] | dict[str, Any] = "light"
    val: str | list[dict[str, Any]] | dict[str, Any] = "center"
    size: Side | dict[int, Side] = 224
    decode: Literal["cpu", "array", "device"] = "cpu"
    strength: Share | tuple[Share, ...] = 1.0
    apply_exif: bool = False
    targets: dict[str, str | Room] = field(default_factory=dict)
    make_columns: str = ""
    max_bad_fraction: Share = 0.01
    time_limit_s: Annotated[float, Limits(0, 1e9)] = 120.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_strength()
        named = not self.make_columns or ":" in self.make_columns
        self._require(named, "make_columns", "module:function, or empty")
        known = set(self._target_names) <= {*_TARGETS, "boxes_xyxy", "boxes_xywh"}
        boxes = [name for name in self._target_names if name.startswith("boxes")]
        kinds_fit = all(
            isinstance(value, int if name == "max" else str)
            for name, value in self.targets.items()
        )
        self._require(
            known and kinds_fit and len(boxes) < 2,
            "targets",
            "columns by name: mask, boxes (or boxes_xyxy, boxes_xywh), keypoints; and max, a number",
        )
        self._require(
            0 in self.size_by_epoch,
            "size",
            "one, or {EPOCH: SIZE, …} from epoch 0 on",
        )
        if self.decode == "array":  # arrays are not JPEGs, so they are decoded whole
            self._require(
                not self.apply_exif,
                "apply_exif",
                "False with transform.decode='array'",
            )

    @property
    def size_by_epoch(self) -> dict[int, int]:
        """Side of the images by the epoch from which it applies, ascending."""
        if isinstance(self.size, dict):
            return dict(sorted(self.size.items()))
        return {0: self.size}

    @property
    def final_size(self) -> int:
        """The side of the images in the last epochs, and during validation."""
        return list(self.size_by_epoch.values())[-1]

    @property
    def size_text(self) -> str:
        """The sizes in a few words."""
        return ", ".join(map(str, self.size_by_epoch.values()))

    def size_at(self, epoch: int) -> int:
        """The side of the images in a training epoch."""
        return [size for start, size in self.size_by_epoch.items() if start <= epoch][
            -1
        ]

    @property
    def target_columns(self) -> dict[str, str]:
        """Store columns of the image's targets, by name: mask, boxes, keypoints; mostly empty."""
        named = {
            name.partition("_")[0]: str(self.targets[name])
            for name in self._target_names
        }
        return {name: named[name] for name in _TARGETS if name in named}

    @property
    def _target_names(self) -> list[str]:
        return [name for name in self.targets if name != "max"]

    @property
    def max_targets(self) -> int:
        """Boxes, and keypoints, that a sample may have."""
        return int(self.targets.get("max", 100))

    @property
    def boxes_format(self) -> str:
        """The format of the boxes: xyxy or xywh; empty = xyxy, but for structs of lists."""
        forms = [name.partition("_")[2] for name in self._target_names]
        return "".join(forms)

    @property
    def target_settings(self) -> str:
        """The settings that name `target_columns`, for messages."""
        return ", ".join(f"transform.targets.{name}" for name in self._target_names)


@dataclass(frozen=True)
class PoolConfig(Section, prefix="pool."):
    """The pool of CPU actors that decode and transform.

    Attributes:
        engine: "ray": actors make the stream; "inline": this process makes it, without Ray, for debugging.
        min_actors: actors that must run before the stream starts.
        max_actors: actors that the pool may grow to; 0 = all that fit into the cluster next to the trainers. With
            engine "inline", threads that make micro-batches; 0 = the thread that asks for one.
        cpus_per_actor: CPUs that Ray reserves for each actor, which uses as many threads.
        grow_after_s: the pool grows if ranks waited for half of this time, in seconds; at most once in this time.
            After 12 times as long without waiting it gives idle actors back.
        max_in_flight: micro-batches in work or waiting at any time; 0 = 3 blocks per actor and 2 per rank. Or
            [MAX, BLOCK], with the micro-batches that Ray moves at a time, such as [0, 8]; 0 = chosen by their size
            and time.
        reader: who reads the store: "actors": each actor; "separate": one reader for all actors; "auto":
            "separate" for stores in groups, else "actors". Groups of tars stay in a node's cache, so on a
            cluster of one machine, which raypipe has started, the actors read these themselves.
        head_start: micro-batches that each rank makes itself, in a thread, while Ray and the pool start: -1 =
            as many as cover the start; 0 = none. It changes when the first batch comes, and no batch. Unless it
            is 0, ranks also make their micro-batches when the coordinator of their pool dies, until there is
            another; otherwise all trainers restart then.
        stall_timeout_s: the run ends after this many seconds in which a trainer waited and no micro-batch was
            finished, or in which its start waited for the cluster to answer, for room that other jobs hold, or for
            another run's start.
        remember: where finished micro-batches that are needed again are kept, such as those of a validation, or
            that other runs need too: "memory", the node's shared memory; "disk", its cache folder, also for later
            runs; the path of a folder that several nodes see; or "off". They may take as much as a tenth of the
            node's object store, or a tenth of the disk's free space; or so many bytes, such as {disk: 4000000000}.
    """

    engine: Literal["ray", "inline"] = "ray"
    min_actors: AtLeast1 = 1
    max_actors: int = 0
    cpus_per_actor: Annotated[float, Limits(1e-4, 1e6)] = (
        1.0  # Ray counts in ten-thousandths
    )
    grow_after_s: Seconds = 5.0
    max_in_flight: int | tuple[int, ...] = 0
    reader: Literal["auto", "actors", "separate"] = "auto"
    head_start: Annotated[int, Limits(-1, MAX_INT)] = -1
    stall_timeout_s: Seconds = 900.0
    remember: str | dict[str, Annotated[int, Limits(0, 1 << 50)]] = "memory"

    @property
    def kernel_threads(self) -> int:
        """Threads with which an actor makes a micro-batch: one for each whole CPU that it has."""
        return max(1, int(self.cpus_per_actor))

    def __post_init__(self) -> None:
        super().__post_init__()
        expected = f"0 or at least pool.min_actors ({self.min_actors})"
        enough = self.max_actors == 0 or self.max_actors >= self.least_actors
        self._require(enough, "max_actors", expected)
        ok = not isinstance(self.max_in_flight, tuple) or len(self.max_in_flight) == 2
        self._require(ok, "max_in_flight", "a whole number, or [MAX, BLOCK]")
        place = self.remember_in
        is_known = place in ("off", "memory", "disk") or place[:1] == "/"
        expected = '"off", "memory", "disk", or the whole path of a folder'
        self._require(is_known, "remember", f"{expected}, or {{PLACE: BYTES}}")

    @property
    def most_in_flight(self) -> int:
        """Micro-batches in work or waiting at any time; 0 = by themselves."""
        if isinstance(self.max_in_flight, tuple):
            return self.max_in_flight[0]
        return self.max_in_flight

    @property
    def micro_batches_per_block(self) -> int:
        """Micro-batches that Ray moves at a time; 0 = by themselves."""
        return self.max_in_flight[1] if isinstance(self.max_in_flight, tuple) else 0

    @property
    def remember_in(self) -> str:
        """The place of `remember`; "off" also with a limit of 0."""
        if isinstance(self.remember, str):
            return self.remember
        places = [place for place, limit in self.remember.items() if limit]
        return "".join(places) or "off"

    @property
    def remember_bytes(self) -> int | None:
        """The limit of `remember`; None = by itself."""
        if isinstance(self.remember, str):
            return None
        return sum(self.remember.values())

    def blocks_for(self, ranks: int, actors: int) -> tuple[int, int, int]:
        """Return the blocks in flight for a pool of any size, those for each actor, and the largest block.

        Each actor has one in work, one queued behind it, one finished, so no actor and no rank waits.

        Args:
            actors: number of actors that the pool begins with.

        Returns:
            Two numbers of blocks, and a number of micro-batches; 0 = no limit.
        """
        if not self.most_in_flight:
            return 2 * ranks, 3, self.micro_batches_per_block
        largest = self.micro_batches_per_block or max(
            1, self.most_in_flight // (2 * ranks + 3 * actors)
        )
        return max(self.most_in_flight // largest, 2 * ranks + 1), 0, largest

    @property
    def least_actors(self) -> int:
        """Actors that a stream needs to start."""
        return 0 if self.engine == "inline" else self.min_actors


@dataclass(frozen=True)
class AugmentConfig(Ramped, prefix="augment."):
    """The augmentation of whole micro-batches on the training device. Validation batches are only normalized.

    Attributes:
        mean: mean of each channel, for normalization, of pixels scaled to [0, 1]; of floating-point images, as
            they are; by default ImageNet's.
        std: standard deviation of each channel; the same.
        preset: augmentation by name: none, light, standard or strong.
        ops: Kornia operations that follow the preset, each `{op: NAME, parameter: value, …}`.
        module: `module:name` of a torch module, such as Kornia's, of its class, or of a function, which runs after
            the operations: float images (B, 3, H, W) in [0, 1] → the same, random by global generators; it may
            take `strength`. In Python also the object. A `Normalize` at its end replaces `mean` and `std`.
        mixup_alpha: alpha of MixUp's Beta distribution; 0 = no MixUp. Or [ALPHA, SHARE], with the share of the
            micro-batches that it mixes, such as [0.2, 0.3]; without shares MixUp and CutMix mix all of them, each
            half if both are on.
        cutmix_alpha: alpha of CutMix's Beta distribution; 0 = no CutMix. Or [ALPHA, SHARE].
        differentiable: record the gradients of the augmentation, for adversarial training and trainable modules:
            batches get `pixels` and `augment` (docs/training-loop.md).
        strength: factor of the probability of every operation, and of mixing: a number in [0, 1]; or three,
            `[RISE, PEAK, FALL]`: it rises linearly from 0 to PEAK in this share of the run, stays there, and falls
            linearly to 0 in that share at the run's end.
    """

    mean: tuple[Float32, ...] = (0.485, 0.456, 0.406)
    std: tuple[Annotated[float, Limits(1e-30, 1e30)], ...] = (0.229, 0.224, 0.225)
    preset: Literal["none", "light", "standard", "strong"] = "none"
    ops: list[dict[str, Any]] = field(default_factory=list)
    module: str | Callable = ""
    mixup_alpha: Alpha | tuple[Alpha, ...] = 0.0
    cutmix_alpha: Alpha | tuple[Alpha, ...] = 0.0
    differentiable: bool = False
    strength: Share | tuple[Share, ...] = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(bool(self.std), "std", "a number for each channel")
        num = f"as many numbers as augment.std, {len(self.std)}, one for each channel"
        self._require(len(self.mean) == len(self.std), "mean", num)
        for entry in self.ops:
            self._require(
                isinstance(entry.get("op"), str),
                "ops",
                "a list of {op: NAME, parameter: value, …}",
            )
        self._check_shares()
        self._check_strength()

    def _check_shares(self) -> None:
        for name in ("mixup_alpha", "cutmix_alpha"):
            value = getattr(self, name)
            ok = not isinstance(value, tuple) or (
                len(value) == 2 and value[0] > 0 and value[1] <= 1
            )
            expected = "an alpha, or [ALPHA, SHARE] with an alpha above 0 and a share of at most 1"
            self._require(ok, name, expected)
        expected = (
            "of a share that adds up to at most 1 with that of augment.mixup_alpha"
        )
        self._require(sum(self.mix_shares) <= 1, "cutmix_alpha", expected)

    @property
    def mix_alphas(self) -> tuple[float, float]:
        """Alphas of MixUp and CutMix; 0 = off."""
        mixup, cutmix = (
            value[0] if isinstance(value, tuple) else value
            for value in (self.mixup_alpha, self.cutmix_alpha)
        )
        return mixup, cutmix

    @property
    def mix_shares(self) -> tuple[float, float]:
        """Shares of the micro-batches that MixUp and CutMix get."""
        values = (self.mixup_alpha, self.cutmix_alpha)
        given = [value[1] for value in values if isinstance(value, tuple)]
        left = max(0.0, 1 - sum(given))
        num_left = sum(bool(value) for value in values) - len(given)
        shares = []
        for value in values:
            if isinstance(value, tuple):
                shares.append(value[1])
            else:
                shares.append(left / num_left if value else 0.0)
        return shares[0], shares[1]


Imported = Literal["model", "loss", "metrics", "optimizer", "lr_schedule"]
"""Settings that may name an object of the user's, `module:name`."""
Named = str | dict[str, Any]
"""A name; or `{name: NAME, argument: value, …}`."""
_KNOWN: dict[Imported, list[str]] = {
    "loss": ["cross_entropy"],
    "optimizer": ["sgd", "adamw"],
    "lr_schedule": ["cosine"],
}


@dataclass(frozen=True)
class TrainConfig(Section, prefix="train."):
    """The model and its training.

    Attributes:
        model: "small" (a convolutional net for tiny images), a classification model of torchvision, or a
            `module:function` that makes a model for `num_classes`. Also with arguments, such as
            `{name: resnet50, num_classes: 10, compile: true}`: `num_classes`, classes, or outputs of the model, if
            left out as many as the store's classes, or as the numbers in a target that is a list; `compile`, by
            torch.compile, whose first step takes minutes.
        loss: "cross_entropy", or `module:function` of logits and targets that returns a loss for each sample;
            targets other than classes need one. Also with arguments, such as
            `{name: cross_entropy, label_smoothing: 0.05}`: 0.1 if left out; validation has none.
        metrics: more metrics of the validation, besides loss and accuracy: `module:name` of a function of outputs,
            targets and weights, or of an object such as one of torchmetrics, see docs/training-loop.md; empty =
            none.
        optimizer: "sgd" (with Nesterov momentum), "adamw", or `module:function` of parameter groups and `lr`. Also
            with arguments, `{name: sgd, momentum: 0.8, weight_decay: 0.0001}`; if left out, momentum is 0.9, and
            the weight decay, of all parameters but biases and normalization layers, 0.00005. With any of them:
            `max_grad_norm`, to which the norm of the gradient of all parameters is clipped; and `ema_decay`, below
            1, of an exponential moving average of the weights, which is then validated. 0 = neither.
        lr_schedule: schedule of the learning rate: "cosine", or `module:function` of the step, the number of all
            steps, the number of warm-up steps, and `lr`. Also with arguments, `{name: cosine, warmup_epochs: 5}`:
            the epochs in which the rate rises linearly, before it follows a cosine to 0; 1 if left out.
        lr: peak learning rate; 0 = in proportion to the samples of a step: 0.1 for 256 of them with sgd and your
            own optimizers (Goyal et al. 2017), 0.0005 for 512 with adamw (Touvron et al. 2021).
        num_workers: W, the training processes, one per GPU; 0 = the most GPUs that divide M, or 1 without GPUs. Or
            [MIN, MAX], elastic training: it continues with as many workers as fit, divisors of M; MAX 0 = most.
        use_gpu: train on GPUs; "auto" = if the cluster has any.
        cpus_per_worker: CPUs that Ray reserves for each training process; 0 = 1, or less if CPUs are scarce.
        amp: autocast to "bf16" or "fp16" on GPUs; "auto" = bf16 on GPUs, off on CPUs.
        deterministic_reduce: sum gradients in an order that does not depend on W, instead of using DDP
            (docs/reproducibility.md); "auto" = on CPUs.
        max_failures: restarts of the workers after a process or a node has died; -1 = no limit. Restarts after a
            notice that a trainer's node is about to go (Ray 2.60) do not count.
        stop_grace_s: seconds for the current step after a request to stop (Ctrl-C, SIGTERM); then the run ends
            without another checkpoint. Set it 15 s below the grace period of whoever sends SIGTERM.
        start_from: folder or URI of a run (from `raypipe train` or your own loop), or of one of its checkpoints.
            A run with the same plan, and without its own checkpoints, starts there with that model and
            optimizer.
        checkpoint_interval: steps between checkpoints within an epoch, or a time such as "90s", "10min" or "2h"; 0
            = only at the end of each epoch.
        log_interval: steps between records of progress in metrics.jsonl; the first step always has one.
        log: what else the run's folder gets: "samples", the sample indices of every micro-batch, in samples.jsonl
            (the ranks then wait for each other at every step); "digest", a hash of every micro-batch, as the model
            gets it, in digests/, for `raypipe audit`, which gives each epoch a root, a hash over all hashes;
            "trace 60s", Chrome trace events of all processes of the stream, until so long after the first batch,
            in trace.json, for https://ui.perfetto.dev.
    """

    model: Named = "resnet50"
    loss: Named = "cross_entropy"
    metrics: str = ""
    optimizer: Named = "sgd"
    lr_schedule: Named = "cosine"
    lr: Annotated[float, Limits(0, 1e30)] = 0.0
    num_workers: int | tuple[int, ...] = 0
    use_gpu: bool | Literal["auto"] = "auto"
    cpus_per_worker: Annotated[float, Limits(0, 1e6)] = 0.0
    amp: Literal["auto", "off", "bf16", "fp16"] = "auto"
    deterministic_reduce: bool | Literal["auto"] = "auto"
    max_failures: AtLeastMinus1 = 2
    stop_grace_s: Seconds = 20.0  # within the 30 s of Kubernetes and Slurm, with the checkpoint and Ray's end
    start_from: str = ""
    checkpoint_interval: int | str = "10min"
    log_interval: AtLeast1 = 20
    log: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__post_init__()
        for setting, names in _KNOWN.items():
            name = self.named(setting)[0]
            self._require(
                isinstance(name, str) and (name in names or ":" in name),
                setting,
                f"module:function or one of {names}, or {{name: …, argument: value, …}}",
            )
        smoothing = self.label_smoothing
        check("train.loss: label_smoothing", smoothing, BelowOne)
        check("train.lr_schedule: warmup_epochs", self.warmup_epochs, Epochs)
        check("train.model: name", self.model_name, str)
        check("train.model: num_classes", self.num_classes, Outputs)
        check("train.model: compile", self.compiles, bool)
        check("train.optimizer: max_grad_norm", self.max_grad_norm, float)
        check("train.optimizer: ema_decay", self.ema_decay, BelowOne)
        ok = not self.metrics or ":" in self.metrics
        self._require(ok, "metrics", "module:name, or empty")
        sizes = self.num_workers
        ok = not isinstance(sizes, tuple) or (
            len(sizes) == 2 and sizes[0] <= (sizes[1] or MAX_INT)
        )
        self._require(ok, "num_workers", "a whole number, or [MIN, MAX]")
        interval = self.checkpoint_interval
        self._require(
            isinstance(interval, int) or _seconds_of(interval) is not None,
            "checkpoint_interval",
            'a number of steps, or a time such as "10min"',
        )
        for entry in self.log:
            self._require(
                entry in ("samples", "digest") or _traced_s(entry) is not None,
                "log",
                'a list of "samples", "digest" and "trace TIME", such as "trace 60s"',
            )

    def named(self, setting: Imported) -> tuple[str, dict[str, Any]]:
        """Return the name that a setting has, and its arguments."""
        value = getattr(self, setting)
        if isinstance(value, str):
            return value, {}
        arguments = dict(value)
        return arguments.pop("name", ""), arguments

    @property
    def model_name(self) -> str:
        """The name of the model."""
        return self.named("model")[0]

    @property
    def num_classes(self) -> int:
        """Classes, or outputs of the model; 0 = as the store has them."""
        return self.named("model")[1].get("num_classes", 0)

    @property
    def compiles(self) -> bool:
        """True if torch.compile compiles the model."""
        return self.named("model")[1].get("compile", False)

    @property
    def model_arguments(self) -> dict[str, Any]:
        """Further arguments of the model."""
        arguments = self.named("model")[1]
        for of_run in ("num_classes", "compile"):
            arguments.pop(of_run, None)
        return arguments

    @property
    def label_smoothing(self) -> float:
        """Label smoothing of cross_entropy, in [0, 1)."""
        return self.named("loss")[1].get("label_smoothing", 0.1)

    @property
    def max_grad_norm(self) -> float:
        """The largest norm of the gradient; 0 = it is not clipped."""
        return self.named("optimizer")[1].get("max_grad_norm", 0.0)

    @property
    def ema_decay(self) -> float:
        """Decay of the average of the weights; 0 = there is none."""
        return self.named("optimizer")[1].get("ema_decay", 0.0)

    @property
    def warmup_epochs(self) -> float:
        """Epochs of the learning rate's warm-up."""
        return self.named("lr_schedule")[1].get("warmup_epochs", 1.0)

    def imported(self, setting: Imported) -> Any:
        """Import what a setting names as `module:name`: `imported("loss")`.

        Raises:
            ConfigError: it does not exist, or the setting is not one of those.
        """
        check("TrainConfig.imported: setting", setting, Imported)
        address, _ = self.named(setting)
        return import_name(address, f"train.{setting}", trusted=True)

    @property
    def workers_range(self) -> tuple[int, int]:
        """The fewest and the most of `num_workers`; 0 = not set."""
        if isinstance(self.num_workers, tuple):
            return self.num_workers[0], self.num_workers[-1]
        return self.num_workers, self.num_workers

    @property
    def checkpoint_steps(self) -> int:
        """Steps between checkpoints within an epoch; 0 = checkpoints do not depend on steps."""
        if isinstance(self.checkpoint_interval, int):
            return self.checkpoint_interval
        return 0

    @property
    def checkpoint_s(self) -> float:
        """Seconds between checkpoints within an epoch."""
        seconds = _seconds_of(str(self.checkpoint_interval))
        return math.inf if seconds is None else seconds

    @property
    def trace_s(self) -> float:
        """Seconds from the first batch on that are traced; 0 = no trace."""
        return max((_traced_s(entry) or 0.0 for entry in self.log), default=0.0)


def _seconds_of(text: str) -> float | None:
    """The seconds of a time such as "10min"; None = another text."""
    time = _TIME.fullmatch(text)
    if time is None:
        return None
    return float(time[1]) * {"s": 1, "min": 60, "h": 3600}[time[2]]


def _traced_s(entry: str) -> float | None:
    """The seconds of an entry of `train.log` such as "trace 60s"; None = another entry."""
    kind, _, time = entry.partition(" ")
    return _seconds_of(time) if kind == "trace" else None


@dataclass(frozen=True)
class RunConfig(Section, prefix=""):
    """A run: its sections `store`, `plan`, `transform`, `pool`, `augment` and `train`, its name and its folder.

    Attributes:
        storage_path: folder or URI (s3://, gs://, az://, abfs://, hdfs://) that has a folder for each run.
        name: name of the run; empty = made from the date.
        resume: folder or URI of a run, which continues from its latest checkpoint; "auto" = the run called `name`,
            or a new one if there is none.
        trust_run_code: run the code that the settings of a resumed run name, also of another user's run.
        log_format: "text", or "json": progress and logs as JSON objects with time, run, rank, epoch and step.
    """

    store: StoreConfig = field(default_factory=StoreConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)
    transform: TransformConfig = field(default_factory=TransformConfig)
    pool: PoolConfig = field(default_factory=PoolConfig)
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    storage_path: str = "runs"
    name: str = ""
    resume: str = ""
    trust_run_code: bool = False
    log_format: LogFormat = "text"

    @property
    def peak_lr(self) -> float:
        """Return train.lr or, where it is 0, the rate for this optimizer and global batch.

        The rules are those of Goyal et al. 2017 (arXiv:1706.02677) and Touvron et al. 2021 (arXiv:2012.12877).
        """
        if self.train.named("optimizer")[0] == "adamw":
            per_sample = 0.0005 / 512
        else:
            per_sample = 0.1 / 256
        return (
            self.train.lr
            or per_sample * self.plan.micro_batch_size * self.plan.per_step
        )
