"""Every setting of a run, as frozen dataclasses. `jobs/train.py --help` prints the same tree."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, cast

from raypipe.errors import ConfigError
from raypipe.logs import LogFormat
from raypipe.section import ANY_NUMBER, MAX_INT, Limits, Section, check, kinds_of, shown

Mixture = dict[str, float] | dict[int, dict[str, float]]
"""The weight of each source by its name, or, from an epoch on, those weights."""
Shuffle = Literal["auto", "global", "window", "off"]
Cache = Literal["off", "disk"]
CropDecode = Literal["off", "exact", "scaled"]

_MAX_PIXELS = (1 << 30) // 6  # the most that an image may have, before and after its decoding

AtLeast1 = Annotated[int, Limits(1, MAX_INT)]
AtLeastMinus1 = Annotated[int, Limits(-1, MAX_INT)]
Positive = Annotated[float, Limits(above=True)]
Share = Annotated[float, Limits(0, 1)]
BelowOne = Annotated[float, Limits(0, 1, below=True)]
# Larger numbers would take all memory, or overflow where they are used.
BatchSize = Annotated[int, Limits(1, 1 << 20)]
Side = Annotated[int, Limits(1, math.isqrt(_MAX_PIXELS))]
Crops = Annotated[int, Limits(1, 1 << 12)]
Room = Annotated[int, Limits(1, 1 << 16)]
Seconds = Annotated[float, Limits(0, 1e9, above=True)]
Alpha = Annotated[float, Limits(0, 1e6)]
Pixel = Annotated[float, Limits(-1e30, 1e30)]  # within float32

# A number and its unit.
_TIME = re.compile(r"(\d{1,9}(?:\.\d{1,9})?) ?(s|min|h)", re.ASCII)
# Of a bucket, in pixels.
_SIDES = re.compile(r"[1-9]\d{0,4}x[1-9]\d{0,4}")
_DTYPES = ["bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
_DTYPES += ["float16", "float32", "float64"]


@dataclass(frozen=True)
class ColumnOptions(Section, prefix="store.columns.NAME."):
    """Options of a column's lists and numbers in the batch; see docs/columns.md.

    Attributes:
        length: numbers in each list; without `fill` each must have so many; 0 = any number, as a list on the host.
        fill: pads shorter lists, whose own length is then in the column NAME_length; None = no padding.
        dtype: of the numbers, also of those that are written as text or bytes; empty = as stored.
    """

    length: Annotated[int, Limits(0, 1 << 24)] = 0
    fill: Annotated[float, ANY_NUMBER] | None = None
    dtype: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(self.fill is None or self.length > 0, "fill", self.fill, "left out without a length")
        self._require(self.dtype in ("", *_DTYPES), "dtype", self.dtype, f"one of {_DTYPES}")


Columns = list[str] | dict[str, dict[str, Any] | None]
"""Names of columns; or by name their `ColumnOptions`, as plain values."""


def column_options(columns: Any) -> dict[str, ColumnOptions]:
    """The options of each column; raises ConfigError where one is wrong."""
    columns = check("store.columns", columns, Columns)
    by_name = columns if isinstance(columns, dict) else dict.fromkeys(columns)
    columns, known = {}, list(kinds_of(ColumnOptions))
    for name, options in by_name.items():
        if set(options or {}) - set(known):
            raise ConfigError(
                f"store.columns has {name!r}: {shown(options)}; it must be names, or {{NAME: {{option: value}}}}"
                f" with {', '.join(known)}"
            )
        try:
            columns[name] = ColumnOptions(**(options or {}))
        except ConfigError as error:
            raise ConfigError(str(error).replace("NAME", name)) from None
    return columns


@dataclass(frozen=True)
class StoreConfig(Section, prefix="store."):
    """Where the images are: stores are local paths or URIs (s3://, gs://, az://, abfs://).

    Attributes:
        train: address of the training store; empty = the handwritten digits that raypipe ships. Or several
            for a mixture, `{NAME: ADDRESS, …}`, weighted by plan.mixture.
        val: address of the validation store; empty = no validation (for the digits: their own).
        image_column: name of the image column, where columns have names; of WebDataset, the suffix of the images.
        label_column: the same for labels: classes, or any numbers of one shape; of WebDataset, their suffix, or
            their field in the JSON; empty = batches have no target (docs/columns.md).
        exclude: list of bad samples to exclude, from `raypipe inspect --verify`, a path or a URI; empty = none. Of
            a mixture `{NAME: LIST, …}`.
        val_exclude: the same for the validation store.
        filter: train on the samples for which an expression of columns is true, "width >= 256 and label != 3";
            empty = all. Of a mixture for each store, or `{NAME: EXPRESSION, …}`.
        val_filter: the same for the validation store.
        columns: further columns that batches get, as `[caption]`; or `{NAME: {option: value}}` with the options
            `length`, `fill` and `dtype` of lists (docs/columns.md).
    """

    train: str | dict[str, str] = ""
    val: str = ""
    image_column: str = "image"
    label_column: str = "label"
    exclude: str | dict[str, str] = ""
    val_exclude: str = ""
    filter: str | dict[str, str] = ""
    val_filter: str = ""
    columns: Columns = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__post_init__()
        column_options(self.columns)


@dataclass(frozen=True)
class PlanConfig(Section, prefix="plan."):
    """The order of a run.

    Attributes:
        epochs: passes over the training store.
        micro_batch_size: B, samples in a micro-batch, which is one forward and backward pass.
        global_batch_size: samples in an optimizer step, M micro-batches; W must divide M; 0 = one micro-batch.
        seed: the run's seed, ≥ 0.
        shuffle: "global", "window" (for stores in groups), "off", or "auto": window if there are groups.
        window_groups: groups in a shuffle window; 0 = at least 10 groups and at least 4096 rows.
        val_interval: epochs between validations, the last epoch always has one; 0 = never.
        epoch_samples: samples that an epoch draws; 0 = the store once, or a mixture until its first store ends
            ("shortest"), which may also be its last ("longest"). docs/plans.md describes this and the next ones.
        mixture: weights of the stores that store.train names, or from epoch → such; empty = by their sizes.
        weights: how often each sample is drawn: a column of numbers, or a file *.npy; empty = all alike.
        class_balance: exponent, in [0, 8]: a class of n samples is drawn in proportion to n^(1 - exponent);
            0 = off, 1 = all classes equally often.
        repeats: draw each sample so many times in a step (repeated augmentation), each differently augmented.
        repeats_in: "step": the copies in different micro-batches of a step; "micro_batch": side by side in one.
        buckets: sizes of training images, as ["192x256", "224x224", "256x192"] (height x width): a micro-batch has
            images of one of them, each sample is in that of the nearest aspect ratio; empty = transform.size.
        val_buckets: validations have these buckets too, and not transform.size.
    """

    epochs: AtLeast1 = 10
    micro_batch_size: BatchSize = 64
    global_batch_size: Annotated[int, Limits(0, 1 << 24)] = 0
    seed: Annotated[int, Limits(0, (1 << 64) - 1)] = 0
    shuffle: Shuffle = "auto"
    window_groups: int = 0
    val_interval: int = 1
    epoch_samples: Annotated[int, Limits(0, 1 << 40)] | Literal["shortest", "longest"] = 0
    mixture: Mixture = field(default_factory=dict)
    weights: str = ""
    class_balance: Annotated[float, Limits(0, 8)] = 0.0
    repeats: AtLeast1 = 1
    repeats_in: Literal["step", "micro_batch"] = "step"
    buckets: list[str] = field(default_factory=list)
    val_buckets: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_draws()
        self._check_buckets()
        whole, rest = divmod(self.global_batch_size, self.micro_batch_size)
        if rest:
            nearest = " or ".join(str(number * self.micro_batch_size) for number in (whole, whole + 1) if number)
            expected = f"a multiple of plan.micro_batch_size ({self.micro_batch_size}), such as {nearest}"
            self._require(False, "global_batch_size", self.global_batch_size, expected)

    def _check_draws(self) -> None:
        one = not (self.weights and self.class_balance)
        self._require(one, "weights", self.weights, "empty with plan.class_balance")
        of, what = self.per_step, "micro-batches in a step"
        if self.repeats_in == "micro_batch":
            of, what = self.micro_batch_size, "samples in a micro-batch"
        self._require(of % self.repeats == 0, "repeats", self.repeats, f"a divisor of the {of} {what}")
        for weights in self.mixture_by_epoch.values():
            self._require(any(weights.values()), "mixture", self.mixture, "weights by store, one of them above 0")
        starts = list(self.mixture_by_epoch)
        self._require(starts[:1] in ([], [0]), "mixture", self.mixture, "weights from epoch 0 on")

    def _check_buckets(self) -> None:
        ok = all(map(_SIDES.fullmatch, self.buckets)) and len(set(self.bucket_sides)) == len(self.buckets)
        self._require(ok, "buckets", self.buckets, "different sizes HEIGHTxWIDTH in pixels, such as 192x256")
        ok = all(height * width <= _MAX_PIXELS for height, width in self.bucket_sides)
        self._require(ok, "buckets", self.buckets, f"sizes of at most {_MAX_PIXELS} pixels")
        known = bool(self.buckets) or not self.val_buckets
        self._require(known, "val_buckets", self.val_buckets, "false without plan.buckets")

    @property
    def bucket_sides(self) -> list[tuple[int, int]]:
        """Height and width of each bucket."""
        pairs = (bucket.split("x") for bucket in self.buckets)
        return [(int(height), int(width)) for height, width in pairs]

    def sides_in(self, split: Literal["train", "val"]) -> list[tuple[int, int]]:
        """Height and width of each bucket that a split has."""
        return self.bucket_sides if split == "train" or self.val_buckets else []

    @property
    def is_plain(self) -> bool:
        """Return whether an epoch is each sample of one store once."""
        plain = not (self.weights or self.class_balance or self.mixture or self.buckets)
        return plain and self.repeats == 1 and not (isinstance(self.epoch_samples, int) and self.epoch_samples)

    @property
    def mixture_by_epoch(self) -> dict[int, dict[str, float]]:
        """From epoch → weight by store, ascending; empty where no weights are given."""
        if not all(isinstance(weights, dict) for weights in self.mixture.values()):
            return {0: cast(dict[str, float], self.mixture)}
        return dict(sorted(cast(dict[int, dict[str, float]], self.mixture).items()))

    @property
    def per_step(self) -> int:
        """M: micro-batches in an optimizer step."""
        return self.global_batch_size // self.micro_batch_size or 1

    @property
    def samples_per_step(self) -> int:
        """M·B, also where `global_batch_size` is 0."""
        return self.micro_batch_size * self.per_step


@dataclass(frozen=True)
class TransformConfig(Section, prefix="transform."):
    """The work of the CPU actors on each sample; docs/transforms.md has the presets, docs/targets.md the targets.

    Attributes:
        train: preset; `module:function`; a list of Albumentations transforms; a file of one (*.yaml, *.json); or
            several views, `{NAME: {transform: …, count: …, size: …}, …}` (docs/views.md).
        val: the same, for validation.
        size: side of the images that the presets make, pixels; or from epoch → side, {0: 128, 10: 160, 20: 224}
            (docs/plans.md).
        decode: "cpu": actors decode; "gpu": nvJPEG does, on the training device (presets light, center, resize).
        decode_as: "rgb": images become uint8 RGB; "array": PNG, TIFF and .npy keep their dtype and their channels
            (docs/arrays.md).
        decode_min_side: decode JPEGs at the least of 1/8, 2/8, … that keeps this short side, pixels; 0 = whole.
        crop_decode: "exact": decode only a JPEG's crop, same pixels as "off"; "scaled": reduced (docs/decode.md).
        wire: "rgb", or "yuv420": images travel to the device in half the bytes (docs/transforms.md).
        apply_exif: turn images by their EXIF orientation; if off, use pixels as stored, as torchvision does.
        mask_column: column of a mask per sample, a PNG of one channel, transformed with the image; empty = none.
        boxes_column: column of boxes per sample, `[x0, y0, x1, y1, label]` in pixels, the same; empty = none.
        max_boxes: room for boxes in a row; a sample with more ends the run.
        keypoints_column: column of keypoints per sample, `[x, y, label]` in pixels, the same; empty = none.
        max_keypoints: room for keypoints in a row; a sample with more ends the run.
        make_columns: `module:function` that makes a sample's columns of those of store.columns, such as tokens of
            a caption; empty = they are taken as they are.
        on_bad_sample: "substitute" another sample, chosen by the plan (during validation: weight 0), or "raise".
        max_bad_fraction: the run ends if an actor sees a larger share of bad samples than this.
        bad_grace: bad samples per actor that are always tolerated.
        time_limit_s: seconds for a micro-batch, or for one sample, which then counts as bad; 0 = no limit.
    """

    train: str | list[dict[str, Any]] | dict[str, Any] = "light"
    val: str | list[dict[str, Any]] | dict[str, Any] = "center"
    size: Side | dict[int, Side] = 224
    decode: Literal["cpu", "gpu"] = "cpu"
    decode_as: Literal["rgb", "array"] = "rgb"
    decode_min_side: int = 0
    crop_decode: CropDecode = "exact"
    wire: Literal["rgb", "yuv420"] = "rgb"
    apply_exif: bool = False
    mask_column: str = ""
    boxes_column: str = ""
    max_boxes: Room = 100
    keypoints_column: str = ""
    max_keypoints: Room = 100
    make_columns: str = ""
    on_bad_sample: Literal["substitute", "raise"] = "substitute"
    max_bad_fraction: Share = 0.01
    bad_grace: int = 10
    time_limit_s: Annotated[float, Limits(0, 1e9)] = 120.0

    def __post_init__(self) -> None:
        super().__post_init__()
        named = not self.make_columns or ":" in self.make_columns
        self._require(named, "make_columns", self.make_columns, "module:function, or empty")
        self._require(0 in self.size_by_epoch, "size", self.size, "one, or {EPOCH: SIZE, …} from epoch 0 on")
        if self.crop_decode == "scaled":  # it chooses the scale by the crop
            self._only({"decode_min_side": 0, "decode": "cpu"}, "transform.crop_decode='scaled'")
        if self.decode_as == "array":  # and no JPEG, so it is decoded whole
            self._only({"decode": "cpu", "decode_min_side": 0, "apply_exif": False}, "transform.decode_as='array'")
            ok = self.crop_decode != "scaled"
            self._require(ok, "crop_decode", "scaled", "'exact' or 'off' with transform.decode_as='array'")
        if self.wire == "yuv420":  # which is of uint8 RGB
            self._only({"decode": "cpu", "decode_as": "rgb"}, "transform.wire='yuv420'")
        if self.target_columns:  # in pixels of the stored image
            only = {"decode": "cpu", "decode_min_side": 0, "apply_exif": False}
            self._only(only, self.target_settings)

    def _only(self, values: dict[str, Any], with_what: str) -> None:
        for name, value in values.items():
            own = getattr(self, name)
            self._require(own == value, name, own, f"{value!r} with {with_what}")

    @property
    def size_by_epoch(self) -> dict[int, int]:
        """From epoch → side of the images, ascending."""
        return dict(sorted(self.size.items())) if isinstance(self.size, dict) else {0: self.size}

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
        return [size for start, size in self.size_by_epoch.items() if start <= epoch][-1]

    @property
    def target_columns(self) -> dict[str, str]:
        """Store columns of the image's targets, by "mask", "boxes" and "keypoints"; mostly empty."""
        named = {name: getattr(self, f"{name}_column") for name in ("mask", "boxes", "keypoints")}
        return {name: column for name, column in named.items() if column}

    @property
    def target_settings(self) -> str:
        """The settings that name `target_columns`, for messages."""
        return ", ".join(f"transform.{name}_column" for name in self.target_columns)


@dataclass(frozen=True)
class PoolConfig(Section, prefix="pool."):
    """The pool of CPU actors that decode and transform.

    Attributes:
        engine: "ray": actors make the stream; "inline": this process does, for debugging (docs/tuning.md).
        threads: of engine "inline"; 0 = the thread that asks for a micro-batch makes it.
        min_actors: actors that must run before the stream starts.
        max_actors: actors that the pool may grow to; 0 = all that the cluster can hold beside the trainers.
        cpus_per_actor: CPUs that Ray reserves for each, which makes images with as many threads.
        grow_after_s: the pool grows if ranks waited for half of this many seconds; at most once in this time.
        shrink_after_s: seconds without waiting after which idle actors are given back.
        label_selector: `label=value` of the nodes that actors prefer, and alone ask for; empty = any node.
        block: micro-batches that Ray moves at a time; 0 = chosen by their size and time (docs/tuning.md).
        max_in_flight: micro-batches in work or waiting at any time; 0 = 3 blocks per actor and 2 per rank.
        read: "actor": actors read the store; "stage": one reader does; "auto": stage for stores in groups.
        cache: "disk": keep decoded samples across epochs, on each node, in RAYPIPE_CACHE (docs/cache.md).
        cache_bytes: limit of that cache, on a node; 0 = a quarter of the disk that is free at the start.
        max_attempts: actors that may die at one block, or readers at one row group, before the run ends.
        stall_timeout_s: the run ends after this many seconds without a finished micro-batch or room for trainers.
    """

    engine: Literal["ray", "inline"] = "ray"
    threads: Annotated[int, Limits(0, 1 << 12)] = 0
    min_actors: AtLeast1 = 1
    max_actors: int = 0
    cpus_per_actor: Annotated[float, Limits(1e-4, 1e6)] = 1.0  # Ray counts in ten-thousandths
    grow_after_s: Seconds = 5.0
    shrink_after_s: Seconds = 60.0
    label_selector: str = "raypipe=transform"
    block: int = 0
    max_in_flight: int = 0
    read: Literal["auto", "actor", "stage"] = "auto"
    cache: Cache = "off"
    cache_bytes: Annotated[int, Limits(0, (1 << 63) - 1)] = 0
    max_attempts: AtLeast1 = 6
    stall_timeout_s: Seconds = 900.0

    @property
    def kernel_threads(self) -> int:
        """Threads of an actor that make a micro-batch: one for each whole CPU that it has."""
        return max(1, int(self.cpus_per_actor))

    def __post_init__(self) -> None:
        super().__post_init__()
        expected = f"0 or at least pool.min_actors ({self.min_actors})"
        enough = self.max_actors == 0 or self.max_actors >= self.least_actors
        self._require(enough, "max_actors", self.max_actors, expected)
        named = self.label_selector.partition("=")
        self._require(all(named) or not any(named), "label_selector", self.label_selector, "label=value, or empty")

    def blocks_for(self, ranks: int, actors: int) -> tuple[int, int, int]:
        """Blocks in flight for any size of the pool, further ones for each actor, and the largest block.

        Each actor has one in work, one queued behind it, one finished, so no actor and no rank waits.

        Args:
            actors: number that the pool begins with.

        Returns:
            Two numbers of blocks, and one of micro-batches; 0 = no limit.
        """
        if not self.max_in_flight:
            return 2 * ranks, 3, self.block
        largest = self.block or max(1, self.max_in_flight // (2 * ranks + 3 * actors))
        return max(self.max_in_flight // largest, 2 * ranks + 1), 0, largest

    @property
    def least_actors(self) -> int:
        """Actors that a stream needs to start."""
        return 0 if self.engine == "inline" else self.min_actors


@dataclass(frozen=True)
class StrengthConfig(Section, prefix="augment.strength."):
    """The augmentation's strength over the run: linearly up from 0, constant, linearly down to 0.

    Attributes:
        ramp_up: share of the run in which it rises from 0 to `peak`.
        peak: strength between the ramps, in [0, 1].
        ramp_down: share of the run, at its end, in which it falls from `peak` to 0.
    """

    ramp_up: Share = 0.0
    peak: Share = 1.0
    ramp_down: Share = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        both = self.ramp_up + self.ramp_down
        self._require(both <= 1, "ramp_up + ramp_down", both, "at most 1")

    def at(self, progress: float) -> float:
        """The strength at a share of the run in [0, 1)."""
        if progress < self.ramp_up:
            return self.peak * progress / self.ramp_up
        if progress > 1 - self.ramp_down:
            return self.peak * (1 - progress) / self.ramp_down
        return self.peak


@dataclass(frozen=True)
class AugmentConfig(Section, prefix="augment."):
    """The augmentation of whole micro-batches on the training device. Validation batches are only normalised.

    Attributes:
        mean: normalisation, per channel, of pixels scaled to [0, 1], or floats as they are; ImageNet's by default.
        std: the same.
        preset: of operations: none, light, standard or strong.
        ops: Kornia operations after those of the preset, each `{op: NAME, parameter: value, …}`.
        module: `module:name` of a torch module, its class or a function, run after the operations: float images
            (B, 3, H, W) in [0, 1] → the same, random by torch's global generators; it may take `strength`.
        mixup_alpha: of MixUp's Beta distribution; 0 = no MixUp.
        cutmix_alpha: of CutMix's; 0 = no CutMix. If both are on, each gets half of the mixed micro-batches.
        mix_prob: share of micro-batches that are mixed.
        strength: scales the probability of every operation and of mixing over the run.
    """

    mean: tuple[Pixel, ...] = (0.485, 0.456, 0.406)
    std: tuple[Annotated[float, Limits(1e-30, 1e30)], ...] = (0.229, 0.224, 0.225)
    preset: Literal["none", "light", "standard", "strong"] = "none"
    ops: list[dict[str, Any]] = field(default_factory=list)
    module: str = ""
    mixup_alpha: Alpha = 0.0
    cutmix_alpha: Alpha = 0.0
    mix_prob: Share = 1.0
    strength: StrengthConfig = field(default_factory=StrengthConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(bool(self.std), "std", self.std, "a number for each channel")
        num = f"as many numbers as augment.std, {len(self.std)}, one for each channel"
        self._require(len(self.mean) == len(self.std), "mean", self.mean, num)
        for entry in self.ops:
            self._require(
                isinstance(entry.get("op"), str), "ops", entry, "a list of {op: NAME, parameter: value, …}"
            )


@dataclass(frozen=True)
class TrainConfig(Section, prefix="train."):
    """The model and how it learns.

    Attributes:
        model: "small" (a convolutional net for tiny images), any torchvision classification model, or a
            `module:function` that makes one for `num_classes`.
        loss: "cross_entropy", or `module:function` of logits and targets, with a loss for each sample; needed by
            targets other than classes.
        optimizer: "sgd" (Nesterov momentum), "adamw", or `module:function` of parameter groups and `lr`.
        schedule: "cosine", or `module:function` of the step, all steps, those of warm-up and `lr`.
        num_classes: number of classes, or of the model's outputs; 0 = as many as the store names, or as a target
            that is a list has.
        lr: peak learning rate.
        momentum: of SGD.
        weight_decay: not applied to biases and normalisation layers.
        warmup_epochs: linear warm-up, in epochs; then cosine to zero.
        label_smoothing: in [0, 1).
        num_workers: W, training processes, one per GPU; 0 = the most GPUs that divide M, or 1 without GPUs.
        min_workers: elastic training with this many workers up to `num_workers`, divisors of M; 0 = `num_workers`.
        use_gpu: train on GPUs; "auto" = when the cluster has any.
        cpus_per_worker: CPUs that Ray reserves for each; 0 = 1, or less if CPUs are scarce.
        amp: autocast to "bf16" or "fp16" on GPUs; "auto" = bf16 there, off on CPU.
        compile: compile the model (torch.compile); the first step then takes minutes.
        max_grad_norm: clip the gradient's norm, over all parameters, to this; 0 = no clipping.
        ema_decay: keep an exponential moving average of the weights, and validate it; 0 = none.
        ordered_sum: replace DDP by sums that do not depend on W (docs/determinism.md); "auto" = on CPU.
        max_failures: restarts of the workers after something has died; -1 = no limit.
        max_preemption_failures: restarts after a notice that a trainer's node will go, Ray 2.60; -1 = no limit.
        start_timeout_s: a start waits so long for the cluster to answer, for room that other jobs hold, and for
            another run that starts on the cluster.
        start_from: folder or URI of a run, of jobs/train.py or of an own loop, or of one of their checkpoints; a
            run of the same plan, without checkpoints yet, starts from there with its model and optimizer.
        checkpoint_interval: steps between checkpoints within an epoch, or the time, as "90s", "10min" or "2h"; 0 =
            at epoch ends only.
        log_interval: steps between records of progress, in metrics.jsonl; the first step has one as well.
        log_samples: write the sample indices of every micro-batch to RUN/samples.jsonl; ranks meet at each step.
    """

    model: str = "resnet50"
    loss: str = "cross_entropy"
    optimizer: str = "sgd"
    schedule: str = "cosine"
    num_classes: Annotated[int, Limits(0, 1 << 24)] = 0
    lr: Positive = 0.1
    momentum: float = 0.9
    weight_decay: float = 5e-5
    warmup_epochs: Annotated[float, Limits(0, MAX_INT)] = 1.0
    label_smoothing: BelowOne = 0.1
    num_workers: int = 0
    min_workers: int = 0
    use_gpu: bool | Literal["auto"] = "auto"
    cpus_per_worker: Annotated[float, Limits(0, 1e6)] = 0.0
    amp: Literal["auto", "off", "bf16", "fp16"] = "auto"
    compile: bool = False
    max_grad_norm: float = 0.0
    ema_decay: BelowOne = 0.0
    ordered_sum: Literal["auto", "yes", "no"] = "auto"
    max_failures: AtLeastMinus1 = 2
    max_preemption_failures: AtLeastMinus1 = -1
    start_timeout_s: Seconds = 900.0
    start_from: str = ""
    checkpoint_interval: int | str = "10min"
    log_interval: AtLeast1 = 20
    log_samples: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, known in {
            "loss": ["cross_entropy"],
            "optimizer": ["sgd", "adamw"],
            "schedule": ["cosine"],
        }.items():
            value = getattr(self, name)
            self._require(value in known or ":" in value, name, value, f"module:function or one of {known}")
        interval = self.checkpoint_interval
        ok = isinstance(interval, int) or _TIME.fullmatch(interval) is not None
        self._require(ok, "checkpoint_interval", interval, 'a number of steps, or a time such as "10min"')

    @property
    def checkpoint_steps(self) -> int:
        """Steps between checkpoints within an epoch; 0 = they do not count."""
        return self.checkpoint_interval if isinstance(self.checkpoint_interval, int) else 0

    @property
    def checkpoint_s(self) -> float:
        """Seconds between checkpoints within an epoch."""
        time = _TIME.fullmatch(str(self.checkpoint_interval))
        return float(time[1]) * {"s": 1, "min": 60, "h": 3600}[time[2]] if time else math.inf


@dataclass(frozen=True)
class RunConfig(Section, prefix=""):
    """A run: its sections `store`, `plan`, `transform`, `pool`, `augment` and `train`, its name and its folder.

    Attributes:
        storage_path: folder or URI (s3://, gs://, az://, abfs://) under which runs are kept.
        name: the run's name; empty = made from the date.
        resume: folder or URI of a run to continue from its latest checkpoint; "auto" = that of `name`, or a new
            run while there is none.
        trust: run the code that a run names which is the target, or resume one whose folder another user owns.
        log: progress and logs as lines of "text", or as "json" objects with time, run, rank, epoch, step.
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
    trust: bool = False
    log: LogFormat = "text"
