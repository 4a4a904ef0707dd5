"""Every setting of a run, as frozen dataclasses. `jobs/train.py --help` prints the same tree.

PlanConfig lives beside the plan that it describes, in plan.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from raypipe.errors import ConfigError
from raypipe.plan import PlanConfig

OnBadSample = Literal["substitute", "raise"]
Read = Literal["auto", "actor", "stage"]
Decode = Literal["cpu", "gpu"]
Optimizer = Literal["sgd", "adamw"]
UseGpu = Literal["auto", "yes", "no"]
Amp = Literal["auto", "off", "bf16", "fp16"]
OrderedSum = Literal["auto", "yes", "no"]
AugmentPreset = Literal["none", "light", "standard", "strong", "randaugment", "trivialaugment"]


def _require(ok: bool, name: str, value: object, expected: str) -> None:
    if not ok:
        raise ConfigError(f"{name} must be {expected}, got {value!r}")


def _require_choice(name: str, value: str, choices: Any) -> None:
    _require(value in get_args(choices), name, value, f"one of {get_args(choices)}")


@dataclass(frozen=True)
class StoreConfig:
    """Where the images are.

    Attributes:
        train: address of the training store (LMDB, Parquet, tar, class folders); empty = the
            handwritten digits that scikit-learn ships.
        val: address of the validation store; empty = no validation (for the digits: their own).
        image_column: name of the image column, for Parquet.
        label_column: name of the label column, for Parquet.
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
class TransformConfig:
    """What the CPU actors do with each sample.

    Attributes:
        train: preset (none, light, heavy, center, resize, flip-crop, small) or `module:function`.
        val: the same, for validation.
        size: side of the images that the presets make, pixels.
        decode: "cpu": actors decode and transform. "gpu": they cut nothing, encoded bytes go to the training
            device, and nvJPEG decodes there; for the presets light, center and resize.
        decode_min_side: decode JPEGs at a fraction of their size (1/8, 2/8, …) as long as the short side stays
            at least this many pixels (scaled in the DCT, several times faster on large photos); 0 = at full size.
        exif: turn images by their EXIF orientation; off, pixels are used as stored, as torchvision does.
        on_bad_sample: "substitute" another sample, chosen by the plan (in validation: weight 0), or "raise".
        max_bad_fraction: an actor that has seen a larger share of bad samples stops the run.
        bad_grace: bad samples per actor that are tolerated whatever their share.
        time_limit_s: seconds that a micro-batch may take in an actor before its process is ended and it is tried
            again; a sample that takes as long by itself, twice, counts as bad. 0 = no limit.
    """

    train: str = "light"
    val: str = "center"
    size: int = 224
    decode: Decode = "cpu"
    decode_min_side: int = 0
    exif: bool = False
    on_bad_sample: OnBadSample = "substitute"
    max_bad_fraction: float = 0.01
    bad_grace: int = 10
    time_limit_s: float = 120.0

    def __post_init__(self) -> None:
        _require(self.size >= 1, "transform.size", self.size, "at least 1")
        _require(self.decode_min_side >= 0, "transform.decode_min_side", self.decode_min_side, "at least 0")
        _require(0 <= self.max_bad_fraction <= 1, "transform.max_bad_fraction", self.max_bad_fraction, "in [0, 1]")
        _require(self.bad_grace >= 0, "transform.bad_grace", self.bad_grace, "at least 0")
        _require(self.time_limit_s >= 0, "transform.time_limit_s", self.time_limit_s, "at least 0")
        _require_choice("transform.decode", self.decode, Decode)
        _require_choice("transform.on_bad_sample", self.on_bad_sample, OnBadSample)


@dataclass(frozen=True)
class PoolConfig:
    """The pool of CPU actors that decode and transform.

    Attributes:
        min_actors: actors that must run before the stream starts.
        max_actors: actors that the pool may grow to; 0 = as many as the cluster has, or can scale to,
            beside the trainers.
        cpus_per_actor: CPUs that Ray reserves for each.
        in_flight: micro-batches that may be read, transformed or waiting at one time, in all; memory in
            flight is this times B·H·W·3 bytes. 0 = 4 per actor and 2 per rank.
        read: "actor": actors read the store themselves; "stage": one reader feeds them encoded
            micro-batches; "auto": stage for stores that are read in groups.
        recycle_after: micro-batches after which an actor's process is replaced, for transforms that leak memory;
            it costs the start of a process. 0 = never.
        max_attempts: actors that one micro-batch may cost before the run ends, where no sample of it is to blame.
        stall_timeout_s: seconds without a finished micro-batch, while there is work, after which the run ends.
    """

    min_actors: int = 1
    max_actors: int = 0
    cpus_per_actor: float = 1.0
    in_flight: int = 0
    read: Read = "auto"
    recycle_after: int = 0
    max_attempts: int = 6
    stall_timeout_s: float = 900.0

    def __post_init__(self) -> None:
        _require(self.min_actors >= 1, "pool.min_actors", self.min_actors, "at least 1")
        _require(
            self.max_actors == 0 or self.max_actors >= self.min_actors,
            "pool.max_actors",
            self.max_actors,
            f"0 or at least pool.min_actors ({self.min_actors})",
        )
        _require(self.cpus_per_actor > 0, "pool.cpus_per_actor", self.cpus_per_actor, "positive")
        _require(self.in_flight >= 0, "pool.in_flight", self.in_flight, "at least 0")
        _require(self.recycle_after >= 0, "pool.recycle_after", self.recycle_after, "at least 0")
        _require(self.max_attempts >= 1, "pool.max_attempts", self.max_attempts, "at least 1")
        _require(self.stall_timeout_s > 0, "pool.stall_timeout_s", self.stall_timeout_s, "positive")
        _require_choice("pool.read", self.read, Read)


@dataclass(frozen=True)
class StrengthConfig:
    """How the strength of the augmentation changes over the run: up, hold, down, each in a straight line.

    Attributes:
        start: strength at the first step, in [0, 1].
        ramp_up: share of the run in which it rises from `start` to 1.
        ramp_down: share of the run, at its end, in which it falls from 1 to `end`.
        end: strength at the end of the run, in [0, 1].
    """

    start: float = 0.0
    ramp_up: float = 0.0
    ramp_down: float = 0.0
    end: float = 0.0

    def __post_init__(self) -> None:
        for name in ("start", "ramp_up", "ramp_down", "end"):
            _require(0 <= getattr(self, name) <= 1, f"augment.strength.{name}", getattr(self, name), "in [0, 1]")
        both = self.ramp_up + self.ramp_down
        _require(both <= 1, "augment.strength.ramp_up + ramp_down", both, "at most 1")

    def at(self, progress: float) -> float:
        """The strength at a share of the run in [0, 1)."""
        if progress < self.ramp_up:
            return self.start + (1 - self.start) * progress / self.ramp_up
        if progress > 1 - self.ramp_down:
            return self.end + (1 - self.end) * (1 - progress) / self.ramp_down
        return 1.0


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
    preset: AugmentPreset = "none"
    ops: list[dict[str, Any]] = field(default_factory=list)
    module: str = ""
    mixup_alpha: float = 0.0
    cutmix_alpha: float = 0.0
    mix_prob: float = 1.0
    switch_prob: float = 0.5
    strength: StrengthConfig = field(default_factory=StrengthConfig)

    def __post_init__(self) -> None:
        _require(min(self.std) > 0, "augment.std", self.std, "positive")
        _require_choice("augment.preset", self.preset, AugmentPreset)
        for entry in self.ops:
            ok = isinstance(entry, dict) and isinstance(entry.get("op"), str)
            _require(ok, "augment.ops", entry, "a list of {op: NAME, parameter: value, …}")
        for name in ("mixup_alpha", "cutmix_alpha"):
            _require(getattr(self, name) >= 0, f"augment.{name}", getattr(self, name), "at least 0")
        for name in ("mix_prob", "switch_prob"):
            _require(0 <= getattr(self, name) <= 1, f"augment.{name}", getattr(self, name), "in [0, 1]")


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
        workers: W, training processes, one per GPU; 0 = one per GPU of the cluster, 1 without GPUs.
        min_workers: elastic training, with as many workers as the cluster has room for, from this number up to
            `workers`, and that divide plan.per_step; 0 = always `workers`.
        resize_every_s: seconds between two looks for room, where training is elastic.
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
        max_failures: worker group restarts before the run gives up; -1 = no limit.
        checkpoint_every: steps between checkpoints within an epoch; 0 = at epoch ends only.
        log_every: steps between lines of progress and metrics.
        log_samples: write the sample indices of every micro-batch, in the order of the stream, to
            RUN/samples.jsonl, and print them; all ranks meet at every step for it.
    """

    model: str = "resnet50"
    optimizer: Optimizer = "sgd"
    num_classes: int = 0
    lr: float = 0.1
    momentum: float = 0.9
    weight_decay: float = 5e-5
    warmup_epochs: float = 1.0
    label_smoothing: float = 0.1
    workers: int = 0
    min_workers: int = 0
    resize_every_s: float = 60.0
    gpu: UseGpu = "auto"
    cpus_per_worker: float = 0.0
    amp: Amp = "auto"
    tf32: bool = True
    compile: bool = False
    clip_norm: float = 0.0
    ema_decay: float = 0.0
    prefetch: int = 2
    ordered_sum: OrderedSum = "auto"
    max_failures: int = 2
    checkpoint_every: int = 0
    log_every: int = 20
    log_samples: bool = False

    def __post_init__(self) -> None:
        _require(self.lr > 0, "train.lr", self.lr, "positive")
        _require(self.resize_every_s > 0, "train.resize_every_s", self.resize_every_s, "positive")
        _require(0 <= self.label_smoothing < 1, "train.label_smoothing", self.label_smoothing, "in [0, 1)")
        _require(0 <= self.ema_decay < 1, "train.ema_decay", self.ema_decay, "in [0, 1)")
        _require(self.prefetch >= 1, "train.prefetch", self.prefetch, "at least 1")
        _require(self.log_every >= 1, "train.log_every", self.log_every, "at least 1")
        _require(self.max_failures >= -1, "train.max_failures", self.max_failures, "at least -1")
        for name in (
            "num_classes",
            "momentum",
            "weight_decay",
            "warmup_epochs",
            "workers",
            "min_workers",
            "cpus_per_worker",
            "clip_norm",
            "checkpoint_every",
        ):
            _require(getattr(self, name) >= 0, f"train.{name}", getattr(self, name), "at least 0")
        _require_choice("train.optimizer", self.optimizer, Optimizer)
        _require_choice("train.gpu", self.gpu, UseGpu)
        _require_choice("train.amp", self.amp, Amp)
        _require_choice("train.ordered_sum", self.ordered_sum, OrderedSum)


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
        runs: folder or pyarrow file system URI (s3://…) under which runs are kept.
        name: the run's name; empty = made from the date.
        resume: folder or URI of a run to go on with, from its latest checkpoint.
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
