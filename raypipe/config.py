"""Every setting of a run, as frozen dataclasses. `jobs/train.py --help` prints the same tree."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from raypipe.errors import ConfigError
from raypipe.logs import LogFormat

Shuffle = Literal["auto", "global", "window", "off"]
Cache = Literal["off", "disk"]
CropDecode = Literal["off", "exact", "scaled"]

# Micro-batches in flight for each actor: one in work, one queued behind it, two finished and waiting.
_PER_ACTOR = 4


# Numbers with limits: in words, and as a test that NaN does not pass.
_AT_LEAST_0 = ("at least 0", lambda value: value >= 0)
AtLeast1 = Annotated[int, ("at least 1", lambda value: value >= 1)]
AtLeastMinus1 = Annotated[int, ("at least -1", lambda value: value >= -1)]
Positive = Annotated[float, ("positive", lambda value: value > 0)]
Share = Annotated[float, ("in [0, 1]", lambda value: 0 <= value <= 1)]
BelowOne = Annotated[float, ("in [0, 1)", lambda value: 0 <= value < 1)]


def _check(config: Any, prefix: str) -> None:
    """Check settings by their types: choices by Literal, numbers by their limit or, without one, "at least 0".

    The command line checks choices too; a script that builds the dataclasses has only these checks.
    """
    for name, kind in get_type_hints(type(config), include_extras=True).items():
        value = getattr(config, name)
        if get_origin(kind) is Literal:
            _require(value in get_args(kind), prefix + name, value, f"one of {get_args(kind)}")
        elif get_origin(kind) is Annotated or kind in (int, float):
            expected, holds = getattr(kind, "__metadata__", [_AT_LEAST_0])[0]
            _require(holds(value), prefix + name, value, expected)


def _require(ok: bool, name: str, value: object, expected: str) -> None:
    if not ok:
        raise ConfigError(f"{name} must be {expected}, got {value!r}")


@dataclass(frozen=True)
class StoreConfig:
    """Where the images are.

    Attributes:
        train: address of the training store (LMDB, Parquet, tar, zip, class folders), a local path or a URI (s3://,
            gs://, az://, abfs://); empty = the handwritten digits that scikit-learn ships.
        val: address of the validation store; empty = no validation (for the digits: their own).
        image_column: name of the image column of Parquet; of WebDataset, the suffix of the images.
        label_column: likewise; of WebDataset the suffix of the labels, or their field in the JSON.
        leave_out: list of bad samples of the training store, as `raypipe inspect --verify` writes it, a local
            path or a URI: the run does without them; empty = without none.
        val_leave_out: the same, of the validation store.
    """

    train: str = ""
    val: str = ""
    image_column: str = "image"
    label_column: str = "label"
    leave_out: str = ""
    val_leave_out: str = ""


@dataclass(frozen=True)
class PlanConfig:
    """The order of a run.

    Attributes:
        epochs: passes over the training store.
        micro_batch: B, samples in a micro-batch: one forward and backward.
        per_step: M, micro-batches in an optimizer step. The global batch is M·B for any number of
            workers W; W must divide M.
        seed: the run's seed, ≥ 0.
        shuffle: "global", "window" (for stores that are read in groups), "off", or "auto": window
            where the store has groups, else global.
        window_groups: groups in a shuffle window; 0 = at least 10 groups and at least 4096 rows.
        val_every: validate after every so many epochs and after the last one; 0 = never.
    """

    epochs: AtLeast1 = 10
    micro_batch: AtLeast1 = 64
    per_step: AtLeast1 = 1
    seed: int = 0
    shuffle: Shuffle = "auto"
    window_groups: int = 0
    val_every: int = 1

    def __post_init__(self) -> None:
        _check(self, "plan.")


@dataclass(frozen=True)
class TransformConfig:
    """What the CPU actors do with each sample.

    Attributes:
        train: preset (none, light, heavy, center, resize, flip-crop, small, tv-light, autoaugment, randaugment,
            trivialaugment, augmix); or `module:function`; or a list of Albumentations transforms,
            `[{NAME: {argument: value, …}}, …]`; or a file of such a list (*.yaml, *.json), a local path or a URI.
            docs/transforms.md has more.
        val: the same, for validation.
        size: side of the images that the presets make, pixels.
        decode: "cpu": actors decode and transform. "gpu": they cut nothing, encoded bytes go to the training
            device, and nvJPEG decodes there; for the presets light, center and resize.
        decode_min_side: decode JPEGs at a fraction of their size (1/8, 2/8, …) as long as the short side stays
            at least this many pixels (scaled in the DCT, several times faster on large photos); 0 = at full size.
        crop_decode: what is decoded of a JPEG where the transform begins with a random resized crop. "exact": the
            crop alone, its pixels those of "off", the whole image, to the bit. "scaled": the crop, at 1/2, 1/4 or
            1/8 of its size where that is no smaller than its target; other pixels, and much faster on photos.
        exif: turn images by their EXIF orientation; off, pixels are used as stored, as torchvision does.
        mask_column: column of a mask per sample, a PNG of one channel, which goes with the image through its
            transform; empty = none. See docs/targets.md.
        boxes_column: column of a sample's boxes, `[x0, y0, x1, y1, label]` in pixels, the same; empty = none.
        max_boxes: boxes that a row has room for; a sample with more of them ends the run.
        on_bad_sample: "substitute" another sample, chosen by the plan (in validation: weight 0), or "raise".
        max_bad_fraction: an actor that has seen a larger share of bad samples stops the run.
        bad_grace: bad samples per actor that are tolerated whatever their share.
        time_limit_s: seconds that a micro-batch may take in an actor, its reading included, before its process is
            ended and it is tried again; a sample that takes as long by itself, twice, counts as bad. 0 = no limit.
    """

    train: str | list[dict[str, Any]] = "light"
    val: str | list[dict[str, Any]] = "center"
    size: AtLeast1 = 224
    decode: Literal["cpu", "gpu"] = "cpu"
    decode_min_side: int = 0
    crop_decode: CropDecode = "exact"
    exif: bool = False
    mask_column: str = ""
    boxes_column: str = ""
    max_boxes: AtLeast1 = 100
    on_bad_sample: Literal["substitute", "raise"] = "substitute"
    max_bad_fraction: Share = 0.01
    bad_grace: int = 10
    time_limit_s: float = 120.0

    def __post_init__(self) -> None:
        _check(self, "transform.")
        if self.crop_decode == "scaled":
            expected = "0 with transform.crop_decode='scaled', which chooses the scale by the crop"
            _require(self.decode_min_side == 0, "transform.decode_min_side", self.decode_min_side, expected)
            _require(self.decode == "cpu", "transform.decode", self.decode, "'cpu' with crop_decode='scaled'")
        if self.target_columns:
            # Masks and boxes are in pixels of the image as it is stored.
            for name, value in {"decode": "cpu", "decode_min_side": 0, "exif": False}.items():
                expected = f"{value!r} with transform.mask_column or transform.boxes_column"
                _require(getattr(self, name) == value, f"transform.{name}", getattr(self, name), expected)

    @property
    def target_columns(self) -> dict[str, str]:
        """Store columns of what goes with the image through its transform, by "mask" and "boxes"; mostly empty."""
        named = {"mask": self.mask_column, "boxes": self.boxes_column}
        return {name: column for name, column in named.items() if column}


@dataclass(frozen=True)
class PoolConfig:
    """The pool of CPU actors that decode and transform.

    Attributes:
        executions: Ray Data executions that share the ranks, each with its own pool and reader; it must divide the
            workers (where training is elastic: as many as divide those of now). One passes on some 60
            micro-batches/s (docs/scale.md).
        min_actors: actors of each execution that must run before the stream starts.
        max_actors: actors that the pool may grow to; 0 = as many as the cluster has, or can scale to,
            beside the trainers.
        cpus_per_actor: CPUs that Ray reserves for each.
        grow_wait: share of the time for which ranks may wait for the stream before the pool, and with it the
            cluster, grows; it does so only while its actors are busy.
        grow_after_s: seconds over which that is measured, and the least between two growths.
        shrink_after_s: seconds without waiting after which actors that have nothing to do are given back.
        prefer_nodes: `label=value` of the Ray nodes that actors take first; where those have no room, or there are
            none, they take any other with free CPUs. Empty = any node.
        in_flight: micro-batches that may be read, transformed or waiting at one time, in all; memory in
            flight is this times B·H·W·3 bytes. 0 = 4 per running actor and 2 per rank.
        read: "actor": actors read the store themselves; "stage": one reader feeds them encoded
            micro-batches; "auto": stage for stores that are read in groups.
        cache: keep decoded samples across epochs, on each node for all of its actors, in RAYPIPE_CACHE ("disk").
            Pixels are those of "off"; it is for stores of small images (docs/cache.md).
        cache_bytes: limit of that cache on a node; when it is full, the other samples are decoded in every epoch.
            0 = a quarter of what its place has free at the start.
        max_attempts: actors that one micro-batch may cost before the run ends, where no sample of it is to blame;
            readers that one row group may cost.
        stall_timeout_s: seconds without a finished micro-batch, while there is work, or without room for the
            trainers, after which the run ends.
    """

    executions: AtLeast1 = 1
    min_actors: AtLeast1 = 1
    max_actors: int = 0
    cpus_per_actor: Positive = 1.0
    grow_wait: Share = 0.5
    grow_after_s: Positive = 5.0
    shrink_after_s: Positive = 60.0
    prefer_nodes: str = "raypipe=transform"
    in_flight: int = 0
    read: Literal["auto", "actor", "stage"] = "auto"
    cache: Cache = "off"
    cache_bytes: int = 0
    max_attempts: AtLeast1 = 6
    stall_timeout_s: Positive = 900.0

    def __post_init__(self) -> None:
        _check(self, "pool.")
        least = f"pool.min_actors ({self.min_actors})"
        if self.executions > 1:
            least += f" x pool.executions ({self.executions})"
        enough = self.max_actors == 0 or self.max_actors >= self.least_actors
        _require(enough, "pool.max_actors", self.max_actors, f"0 or at least {least}")
        label, equals, value = self.prefer_nodes.partition("=")
        named = bool(label and value) or not (label or equals)
        _require(named, "pool.prefer_nodes", self.prefer_nodes, "label=value, or empty")

    def in_flight_for(self, world_size: int) -> tuple[int, int]:
        """Micro-batches that may be in flight: whatever the size of the pool, and for each actor in addition.

        Enough that no actor and no rank waits for another.
        """
        if self.in_flight:
            return max(self.in_flight, 2 * world_size + 1), 0
        return 2 * world_size, _PER_ACTOR

    @property
    def least_actors(self) -> int:
        """Actors that all executions need to start."""
        return self.executions * self.min_actors


@dataclass(frozen=True)
class StrengthConfig:
    """How the strength of the augmentation changes over the run: up, hold, down, each in a straight line.

    Attributes:
        start: strength at the first step, in [0, 1].
        ramp_up: share of the run in which it goes from `start` to `peak`.
        peak: strength between the ramps, in [0, 1].
        ramp_down: share of the run, at its end, in which it goes from `peak` to `end`.
        end: strength at the end of the run, in [0, 1].
    """

    start: Share = 0.0
    ramp_up: Share = 0.0
    peak: Share = 1.0
    ramp_down: Share = 0.0
    end: Share = 0.0

    def __post_init__(self) -> None:
        _check(self, "augment.strength.")
        both = self.ramp_up + self.ramp_down
        _require(both <= 1, "augment.strength.ramp_up + ramp_down", both, "at most 1")

    def at(self, progress: float) -> float:
        """The strength at a share of the run in [0, 1)."""
        if progress < self.ramp_up:
            return self.start + (self.peak - self.start) * progress / self.ramp_up
        if progress > 1 - self.ramp_down:
            return self.end + (self.peak - self.end) * (1 - progress) / self.ramp_down
        return self.peak


@dataclass(frozen=True)
class AugmentConfig:
    """What happens to whole micro-batches on the training device. Validation is normalised, and nothing else.

    Attributes:
        mean, std: normalisation, per RGB channel, of pixels scaled to [0, 1]; ImageNet's by default.
        preset: of Kornia operations: none, light, standard, strong, randaugment or trivialaugment.
        ops: Kornia operations after those of the preset, each `{op: NAME, parameter: value, …}`.
        module: `module:name` of a torch module, its class or a function, after the operations: float images
            (B, 3, H, W) in [0, 1] → the same, random by torch's global generators; it may take `strength`.
        mixup_alpha: of MixUp's Beta distribution; 0 = no MixUp.
        cutmix_alpha: of CutMix's; 0 = no CutMix.
        mix_prob: share of micro-batches that are mixed.
        switch_prob: where both are on, the share of CutMix.
        strength: scales the probability of every operation and of mixing over the run.
    """

    mean: tuple[float, float, float] = (0.485, 0.456, 0.406)
    std: tuple[float, float, float] = (0.229, 0.224, 0.225)
    preset: Literal["none", "light", "standard", "strong", "randaugment", "trivialaugment"] = "none"
    ops: list[dict[str, Any]] = field(default_factory=list)
    module: str = ""
    mixup_alpha: float = 0.0
    cutmix_alpha: float = 0.0
    mix_prob: Share = 1.0
    switch_prob: Share = 0.5
    strength: StrengthConfig = field(default_factory=StrengthConfig)

    def __post_init__(self) -> None:
        _check(self, "augment.")
        _require(min(self.std) > 0, "augment.std", self.std, "positive")
        for entry in self.ops:
            ok = isinstance(entry, dict) and isinstance(entry.get("op"), str)
            _require(ok, "augment.ops", entry, "a list of {op: NAME, parameter: value, …}")


@dataclass(frozen=True)
class TrainConfig:
    """The model and how it learns.

    Attributes:
        model: "small" (a convolutional net for tiny images) or any torchvision classification model.
        optimizer: "sgd" (Nesterov momentum) or "adamw".
        num_classes: 0 = as many as the store names.
        lr: peak learning rate.
        momentum: of SGD.
        weight_decay: not applied to biases and normalisation layers.
        warmup_epochs: linear warm-up, in epochs; then cosine to zero.
        label_smoothing: in [0, 1).
        workers: W, training processes, one per GPU; 0 = one per GPU of the cluster as far as W divides
            plan.per_step, 1 without GPUs.
        min_workers: elastic training, with as many workers as the cluster has room for, from this number up to
            `workers`, and that divide plan.per_step; 0 = always `workers`.
        gpu: train on GPUs; "auto" = when the cluster has any.
        cpus_per_worker: CPUs that Ray reserves for each; 0 = 1, or less where CPUs are short.
        amp: autocast to "bf16" or "fp16" on GPUs; "auto" = bf16 there, off on CPU.
        tf32: let GPUs round the inputs of float32 convolutions and matrix products to TensorFloat-32.
        compile: compile the model (torch.compile); the first step then takes minutes.
        clip_norm: largest norm of the gradient, over all parameters; 0 = not clipped.
        ema_decay: keep an exponential moving average of the weights, and validate it; 0 = none.
        prefetch: transfers to the GPU ahead of the one in use.
        ordered_sum: add the gradients of a step in an order that does not depend on W, so that (with W a power of
            two, and a deterministic model) the weights are the same to the bit; instead of DDP, without its
            overlap. "auto" = on CPU.
        max_failures: restarts of the worker group after something has died, before the run gives up; -1 = no
            limit. An error that would come again ends the run at once.
        checkpoint_every: steps between checkpoints within an epoch; 0 = at epoch ends only.
        log_every: steps between lines of progress and metrics; the first step has one as well.
        log_samples: write the sample indices of every micro-batch, in the order of the stream, to
            RUN/samples.jsonl; all ranks meet at every step for it.
    """

    model: str = "resnet50"
    optimizer: Literal["sgd", "adamw"] = "sgd"
    num_classes: int = 0
    lr: Positive = 0.1
    momentum: float = 0.9
    weight_decay: float = 5e-5
    warmup_epochs: float = 1.0
    label_smoothing: BelowOne = 0.1
    workers: int = 0
    min_workers: int = 0
    gpu: Literal["auto", "yes", "no"] = "auto"
    cpus_per_worker: float = 0.0
    amp: Literal["auto", "off", "bf16", "fp16"] = "auto"
    tf32: bool = True
    compile: bool = False
    clip_norm: float = 0.0
    ema_decay: BelowOne = 0.0
    prefetch: AtLeast1 = 2
    ordered_sum: Literal["auto", "yes", "no"] = "auto"
    max_failures: AtLeastMinus1 = 2
    checkpoint_every: int = 0
    log_every: AtLeast1 = 20
    log_samples: bool = False

    def __post_init__(self) -> None:
        _check(self, "train.")


@dataclass(frozen=True)
class RunConfig:
    """One run.

    Attributes:
        store: where the images are.
        plan: the order of the samples.
        transform: the CPU side.
        pool: the actors of the CPU side.
        augment: the device side.
        train: the model.
        runs: folder or URI (s3://, gs://, az://, abfs://) under which runs are kept.
        name: the run's name; empty = made from the date.
        resume: folder or URI of a run to go on with, from its latest checkpoint.
        trust: go on with a run in a folder that another user owns, and so run the code that it names; the
            configuration that is stored there cannot say so.
        log: lines of progress and of logs as readable "text", or each as a "json" object with time, level, logger,
            message, run, rank, epoch and step, as far as they are known.
    """

    store: StoreConfig = field(default_factory=StoreConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)
    transform: TransformConfig = field(default_factory=TransformConfig)
    pool: PoolConfig = field(default_factory=PoolConfig)
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    runs: str = "runs"
    name: str = ""
    resume: str = ""
    trust: bool = False
    log: LogFormat = "text"

    def __post_init__(self) -> None:
        _check(self, "")
