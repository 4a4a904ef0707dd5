"""A small dataset on the training device: decoded once, in the order of a stream's plan, cropped and flipped.

CIFAR's 50,000 images are 150 MB, and a GPU makes micro-batches of them as fast as its memory is read: no actors,
no Ray, no copies. Order, keys of the samples and seeds of the micro-batches are those of a stream with this plan,
so they depend only on the seed, the epoch and the step, for any number of ranks, and after any resume.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from raypipe.config import AugmentConfig, PlanConfig, PoolConfig, TransformConfig
from raypipe.device.augment import DeviceAugment
from raypipe.device.modules import PLAIN
from raypipe.device.prefetcher import Batch
from raypipe.device.ring import numbered
from raypipe.errors import ConfigError, ResourceError, SampleError, StoreError
from raypipe.mistakes import checks_keywords
from raypipe.plan.places import MicroBatchId
from raypipe.stores.base import Store, name_of
from raypipe.streaming.opening import open_stream
from raypipe.transform.fields import IMAGE, LABEL
from raypipe.transform.sample_maker import SampleMaker
from raypipe.transform.samples import EncodedSample, read_samples

_READ = 1024  # samples that are read at a time
_ROOM = 0.9  # the share of a GPU's free memory that images may take; a model needs some


@checks_keywords
def resident(
    store: Store | str | Path,
    device: torch.device | str = "cpu",
    *,
    plan: PlanConfig | None = None,
    size: int = 0,
    border: int = 0,
    flip: float = 0.0,
    augment: AugmentConfig | Callable[..., Any] | None = None,
    dtype: torch.dtype = torch.float32,
    target_column: str | None = "label",
    exclude: str = "",
    filter: str = "",
    rank: int | None = None,
    world_size: int | None = None,
) -> Resident:
    """Decode a small store once, into the memory of a device.

    Args:
        store: its address, or the store.
        device: where images and targets stay.
        plan: the order, as a stream has it; None = the default.
        size: side to which images are resized; 0 = all have one size as stored.
        border: pixels of zeros around an image, from which a crop of the image's size is cut; 0 = no crops.
        flip: probability of a horizontal flip.
        augment, dtype: augmentation of micro-batches behind these, as in `raypipe.loader`. None = uint8 images.
        target_column: the targets' column; None = batches have no target.
        exclude, filter: a list of bad samples, and an expression of columns, as in `raypipe.open_stream`.
        rank, world_size: this process's share; None = as torch.distributed has them, or all.

    Raises:
        ConfigError: a setting is wrong, or images have different sizes.
        StoreError: a sample cannot be read.
        ResourceError: the device has too little memory.
    """
    if plan and plan.buckets:
        raise ConfigError(
            "plan.buckets need a stream: all images of a resident dataset have one size"
        )
    spec = open_stream(
        store,
        plan=plan or PlanConfig(),
        transform=TransformConfig(
            train="resize" if size else "none", size=size or TransformConfig.size
        ),
        pool=PoolConfig(engine="inline"),
        target_column=target_column,
        exclude=exclude,
        filter=filter,
    )
    if not (border >= 0 and 0 <= flip <= 1):
        raise ConfigError(
            f"border must be at least 0, and flip from 0 to 1, got {border} and {flip}"
        )
    is_distributed = (
        torch.distributed.is_available() and torch.distributed.is_initialized()
    )
    if rank is not None:
        rank = rank
    elif is_distributed:
        rank = torch.distributed.get_rank()
    else:
        rank = 0
    world_size = world_size or (
        torch.distributed.get_world_size() if is_distributed else 1
    )
    spec.plan.check_workers(world_size)
    if augment is not None and not isinstance(augment, AugmentConfig):
        augment = AugmentConfig(PLAIN.mean, PLAIN.std, module=augment)
    on = numbered(device)
    if augment:
        device_augment = DeviceAugment(
            augment,
            on,
            dtype,
            has_label=spec.columns.has_target,
            target=spec.columns.target,
        )
    else:
        device_augment = None
    return Resident(spec, on, border, flip, device_augment, (rank, world_size))


class Resident:
    """A dataset on a device; `raypipe.resident` makes one.

        for number in range(data.plan.config.epochs):
            for batch in data.epoch(number):
                ...                            # batch.image, batch.target; batch.ends_step after each step

    Attributes:
        plan: the plan, as of a stream.
        images: uint8 (N, 3, H, W), by the store's indices, on the device; zeros where samples are left out.
        targets: (N, …), on the device; None without.
        augment: augmentation of micro-batches; None = none.
    """

    def __init__(
        self,
        spec: Any,
        device: torch.device,
        border: int,
        flip: float,
        augment: DeviceAugment | None,
        share: tuple[int, int],
    ) -> None:
        self.plan = spec.plan
        self.augment = augment
        self._device = device
        self._border = border
        self._flip = flip
        (self._rank, self._world_size) = share
        self._kept = spec.plan.kept["train"].indices(np.arange(spec.plan.num_train))
        self._padded, self._targets_host = _decoded(spec, self._kept, device, border)
        if self._targets_host is None:
            self.targets = None
        else:
            self.targets = torch.from_numpy(self._targets_host).to(device)
        self.images = _inside(self._padded, border).permute(0, 3, 1, 2)

    def __len__(self) -> int:
        """Samples of the store without those that are left out."""
        return len(self._kept)

    def epoch(self, number: int, step: int = 0) -> Iterator[Batch]:
        """Yield this rank's micro-batches of an epoch, from a step on, cropped, flipped and augmented."""
        plan = self.plan
        per_step = self.plan.config.per_step
        size = self.plan.config.micro_batch_size
        if not (0 <= number < plan.config.epochs and 0 <= step <= plan.steps_per_epoch):
            raise ConfigError(
                f"epoch {number}, step {step} is not in a plan of {plan.config.epochs} epochs of "
                f"{plan.steps_per_epoch} steps"
            )
        skipped = plan.training_of(number).skipped
        first = step * plan.global_batch_size
        num_rows = plan.steps_per_epoch * plan.global_batch_size
        draws = plan.draw_epoch(number, np.arange(first, num_rows))
        y, x, is_flipped = self._crops(plan.sample_keys("train", draws))
        # One copy for the whole epoch; a micro-batch then only reads the device's memory.
        drawn = torch.from_numpy(np.stack([draws.indices, y, x, is_flipped])).to(
            self._device
        )
        for micro_number in range(
            self._rank, len(draws.indices) // size, self._world_size
        ):
            rows = slice(micro_number * size, (micro_number + 1) * size)
            turn, micro = divmod(micro_number, per_step)
            if skipped.has(step + turn):
                continue
            position = MicroBatchId("train", number, step + turn, micro)
            image = self._cut(*drawn[:, rows])
            ends_step = micro + self._world_size >= per_step
            yield self._batch(
                position, image, draws.indices[rows], drawn[0, rows], ends_step
            )

    def whole(self, size: int = 0) -> Iterator[Batch]:
        """Iterate over all samples, once and in order, without crops, flips and augmentation: a validation.

        Every rank gets all of them.

        Args:
            size: samples in a batch; the last one may have fewer; 0 = that of a micro-batch.
        """
        size = size or self.plan.config.micro_batch_size
        for number, rows in enumerate(
            np.split(self._kept, range(size, len(self), size))
        ):
            on_device = torch.from_numpy(rows).to(self._device, non_blocking=True)
            image = self.images[on_device].contiguous(memory_format=torch.channels_last)
            yield self._batch(
                MicroBatchId("val", 0, number, 0), image, rows, on_device, True
            )

    def _crops(self, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Draw the corner of each sample's crop, and whether it is flipped, by its key."""
        places = np.uint64(2 * self._border + 1)
        y = (keys[:, 0] >> np.uint64(32)) % places
        x = (keys[:, 0] & np.uint64(0xFFFFFFFF)) % places
        is_flipped = (keys[:, 1] >> np.uint64(11)) * 2.0**-53 < self._flip
        return y.astype(np.int64), x.astype(np.int64), is_flipped.astype(np.int64)

    def _cut(
        self,
        indices: torch.Tensor,
        top: torch.Tensor,
        left: torch.Tensor,
        is_flipped: torch.Tensor,
    ) -> torch.Tensor:
        height, width = self.images.shape[2:]
        y = top[:, None] + torch.arange(height, device=self._device)
        x = left[:, None] + torch.arange(width, device=self._device)
        x = torch.where(is_flipped[:, None] > 0, x.flip(1), x)
        return self._padded[
            indices[:, None, None], y[:, :, None], x[:, None, :]
        ].permute(0, 3, 1, 2)

    def _batch(
        self,
        position: MicroBatchId,
        image: torch.Tensor,
        index: np.ndarray,
        on_device: torch.Tensor,
        ends_step: bool,
    ) -> Batch:
        fields = {IMAGE: image} | (
            {} if self.targets is None else {LABEL: self.targets[on_device]}
        )
        batch = Batch(
            position=position,
            seed=self.plan.micro_batch_seed(position),
            fields=fields,
            weight=torch.ones(len(index), device=self._device),
            target_host=index[:0]
            if self._targets_host is None
            else self._targets_host[index],
            index=index,
            num_bad=0,
            ends_step=ends_step,
        )
        if self.augment is None:
            return batch
        strength = self.augment.config.strength_at(
            self.plan.progress(self.plan.global_step(position))
        )
        return self.augment.of_batch(batch, strength)


def _decoded(
    spec: Any, kept: np.ndarray, device: torch.device, border: int
) -> tuple[torch.Tensor, np.ndarray | None]:
    """Decode the kept samples of a stream's store: images uint8 (N, H, W, 3) with their borders, on a device, and
    the targets, on the host.
    """
    store = spec.stores["train"]
    sample_maker = SampleMaker(spec.transforms["train"], spec.transform, spec.columns)
    padded: torch.Tensor | None = None
    targets = []
    for indices in np.split(kept, range(_READ, len(kept), _READ)):
        chunk = []
        for number, sample in zip(
            indices.tolist(), read_samples(store, indices, spec.wanted), strict=True
        ):
            fields = _one(store, sample_maker, number, sample)
            chunk.append(fields[IMAGE])
            targets.append(fields.get(LABEL))
        if padded is None:
            padded = _empty(len(store), chunk[0].shape, border, device)
        rows = torch.from_numpy(indices).to(device)
        _inside(padded, border)[rows] = torch.from_numpy(np.stack(chunk)).to(device)
    assert padded is not None, "a plan has samples"
    if not spec.columns.has_target:
        return padded, None
    of_kept = np.array(targets)
    of_all = np.zeros((len(store), *of_kept.shape[1:]), of_kept.dtype)
    of_all[kept] = of_kept
    return padded, of_all


def _inside(padded: torch.Tensor, border: int) -> torch.Tensor:
    """The images (N, H, W, 3) without their borders, in the same memory."""
    height, width = padded.shape[1:3]
    return padded[:, border : height - border, border : width - border]


def _one(
    store: Store, sample_maker: SampleMaker, number: int, sample: EncodedSample
) -> dict[str, Any]:
    try:
        return sample_maker.slow(sample, (0, 0))
    except ConfigError as error:
        raise ConfigError(
            f"{store.address}: sample {number}: {error}; raypipe.resident(…, size=32) resizes all images"
        ) from error
    except SampleError as error:
        name = name_of(store, number)
        raise StoreError(
            f"{store.address}: sample {number}{f' ({name})' if name else ''} cannot be used: {error}; `raypipe "
            "verify` lists all such samples, for the argument `exclude`"
        ) from error


def _empty(
    num: int, shape: tuple[int, ...], border: int, device: torch.device
) -> torch.Tensor:
    """Return memory of zeros for images with their borders; raise ResourceError if the GPU has not so much."""
    height, width, channels = shape
    sides = height + 2 * border, width + 2 * border
    needed = num * sides[0] * sides[1] * channels
    if device.type == "cuda" and needed > _ROOM * (
        free := torch.cuda.mem_get_info(device)[0]
    ):
        raise ResourceError(
            f"{num:,} images of {width}x{height} take {needed / 1e9:.1f} GB of the GPU's memory, of which "
            f"{free / 1e9:.1f} GB are free: give a smaller size, or stream them with raypipe.loader"
        )
    return torch.zeros((num, *sides, channels), dtype=torch.uint8, device=device)
