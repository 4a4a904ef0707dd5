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
Optimizer = Literal["sgd", "adamw"]
UseGpu = Literal["auto", "yes", "no"]
Amp = Literal["auto", "off", "bf16", "fp16"]


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
    """

    train: str = ""
    val: str = ""
    image_column: str = "image"
    label_column: str = "label"


@dataclass(frozen=True)
class TransformConfig:
    """What the CPU actors do with each sample.

    Attributes:
        train: preset (none, light, heavy, center, resize, flip-crop, small) or `module:function`.
        val: the same, for validation.
        size: side of the images that the presets make, pixels.
        decode_min_side: decode JPEGs at a fraction of their size (1/8, 2/8, …) as long as the short side stays
            at least this many pixels (scaled in the DCT, several times faster on large photos); 0 = at full size.
        exif: turn images by their EXIF orientation; off, pixels are used as stored, as torchvision does.
        on_bad_sample: "substitute" another sample, chosen by the plan (in validation: weight 0), or "raise".
        max_bad_fraction: an actor that has seen a larger share of bad samples stops the run.
        bad_grace: bad samples per actor that are tolerated whatever their share.
    """

    train: str = "light"
    val: str = "center"
    size: int = 224
    decode_min_side: int = 0
    exif: bool = False
    on_bad_sample: OnBadSample = "substitute"
    max_bad_fraction: float = 0.01
    bad_grace: int = 10

    def __post_init__(self) -> None:
        _require(self.size >= 1, "transform.size", self.size, "at least 1")
        _require(self.decode_min_side >= 0, "transform.decode_min_side", self.decode_min_side, "at least 0")
        _require(0 <= self.max_bad_fraction <= 1, "transform.max_bad_fraction", self.max_bad_fraction, "in [0, 1]")
        _require(self.bad_grace >= 0, "transform.bad_grace", self.bad_grace, "at least 0")
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
    """

    min_actors: int = 1
    max_actors: int = 0
    cpus_per_actor: float = 1.0
    in_flight: int = 0
    read: Read = "auto"

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
        _require_choice("pool.read", self.read, Read)


@dataclass(frozen=True)
class AugmentConfig:
    """What happens to whole micro-batches on the training device.

    Attributes:
        mean, std: normalisation, per RGB channel, of pixels scaled to [0, 1]; ImageNet's by default.
    """

    mean: tuple[float, float, float] = (0.485, 0.456, 0.406)
    std: tuple[float, float, float] = (0.229, 0.224, 0.225)

    def __post_init__(self) -> None:
        _require(min(self.std) > 0, "augment.std", self.std, "positive")


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
        gpu: train on GPUs; "auto" = when the cluster has any.
        cpus_per_worker: CPUs that Ray reserves for each; 0 = 1, or less where CPUs are short.
        amp: autocast to "bf16" or "fp16" on GPUs; "auto" = bf16 there, off on CPU.
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
    gpu: UseGpu = "auto"
    cpus_per_worker: float = 0.0
    amp: Amp = "auto"
    max_failures: int = 2
    checkpoint_every: int = 0
    log_every: int = 20
    log_samples: bool = False

    def __post_init__(self) -> None:
        _require(self.lr > 0, "train.lr", self.lr, "positive")
        _require(0 <= self.label_smoothing < 1, "train.label_smoothing", self.label_smoothing, "in [0, 1)")
        _require(self.log_every >= 1, "train.log_every", self.log_every, "at least 1")
        _require(self.max_failures >= -1, "train.max_failures", self.max_failures, "at least -1")
        for name in (
            "num_classes",
            "momentum",
            "weight_decay",
            "warmup_epochs",
            "workers",
            "cpus_per_worker",
            "checkpoint_every",
        ):
            _require(getattr(self, name) >= 0, f"train.{name}", getattr(self, name), "at least 0")
        _require_choice("train.optimizer", self.optimizer, Optimizer)
        _require_choice("train.gpu", self.gpu, UseGpu)
        _require_choice("train.amp", self.amp, Amp)


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
