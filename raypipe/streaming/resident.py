"""A small dataset on the training device: decoded once, and streamed by the ordinary loader.

It is the stream with `transform.decode: device`, without the decoding. The host draws maps under the same keys,
and each says which pixels of an image on the device go into the batch. So order, pixels, checkpoints, validation,
augmentation, records and digests are those of that stream, and no step reads the store.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import raypipe
from raypipe.config import AugmentConfig, PlanConfig, PoolConfig, TransformConfig
from raypipe.device.ambient import pinned
from raypipe.device.prefetcher import Batch, on_device
from raypipe.device.resize import to_device
from raypipe.device.ring import new_event, new_stream, numbered
from raypipe.errors import ConfigError, ResourceError, StoreError
from raypipe.mistakes import checks_keywords
from raypipe.plan.places import PADDING, MicroBatchId, Sides, Split
from raypipe.plan.schedule import Segment
from raypipe.stores.base import Store, name_of, title_of
from raypipe.streaming.decoding import Decoding, with_images
from raypipe.streaming.inline import inline_batches
from raypipe.streaming.loader import Loader
from raypipe.streaming.opening import open_stream
from raypipe.streaming.spec import StreamSpec
from raypipe.transform.encoded import EncodedImages
from raypipe.transform.encoded_map import (
    AT,
    KEPT,
    MAP,
    RESIZES,
    START,
    STEP,
    axis_columns,
    sides_of_map,
)
from raypipe.transform.fields import IMAGE, LABEL, MicroBatch, Ragged
from raypipe.transform.presets import build_transform
from raypipe.transform.sample_transform import SampleTransform
from raypipe.transform.transform_steps import Steps

_ROOM = 0.9  # the share of a GPU's free memory that images may take; a model needs some
_FRAME = (
    1  # pixels of zeros around each image; a map that goes beyond its edges ends there
)


@checks_keywords
def resident(
    store: Store | str | Path,
    device: torch.device | str = "cpu",
    *,
    val: Store | str | Path | None = None,
    plan: PlanConfig | None = None,
    size: int = 0,
    border: int = 0,
    flip: float = 0.0,
    augment: AugmentConfig | Callable[..., Any] | None = None,
    dtype: torch.dtype | None = None,
    target_column: str | None = "label",
    exclude: str = "",
    filter: str = "",
    rank: int | None = None,
    world_size: int | None = None,
    run_dir: str | Path = "",
    log_digest: bool = False,
) -> Resident:
    """Decode a small store once, into the memory of a device.

    Args:
        store: its address, or the store.
        device: where images and targets stay.
        val: a store to validate on, whose images stay there too; None = `plan` has no validation.
        plan: the order, as a stream has it; None = the default.
        size: side to which images are resized; 0 = all have one size as stored.
        border: pixels of zeros around an image, from which a crop of the image's size is cut; 0 = no crops.
        flip: probability of a horizontal flip.
        augment, dtype: augmentation of micro-batches behind these, as in `raypipe.loader`. None = uint8 images.
        target_column: the targets' column; None = batches have no target.
        exclude, filter: a list of bad samples, and an expression of columns, as in `raypipe.open_stream`.
        rank, world_size: this process's share; None = as torch.distributed has them, or all.
        run_dir, log_digest: where the run is recorded and continues, as in `raypipe.loader`. For the hashes of
            `log_digest` each epoch reads the store.

    Raises:
        ConfigError: a setting is wrong, or images have different sizes.
        StoreError: a sample cannot be read.
        ResourceError: the device has too little memory.
    """
    plan = plan or PlanConfig()
    if plan.buckets:
        raise ConfigError(
            "plan.buckets need a stream: all images of a resident dataset have one size"
        )
    if not (border >= 0 and 0 <= flip <= 1):
        raise ConfigError(
            f"border must be at least 0, and flip from 0 to 1, got {border} and {flip}"
        )
    opened = functools.partial(
        open_stream,
        store,
        transform=TransformConfig(decode="device"),
        pool=PoolConfig(engine="inline"),
        target_column=target_column,
    )

    def opened_once(sides: Sides) -> StreamSpec:
        """A stream whose validation has the store's samples that are not left out."""
        steps = _steps(sides)
        return opened(
            store,
            plan=replace(plan, val_interval=1, skip=[]),
            train_transform=steps,
            val_transform=steps,
            exclude={"val": exclude},
            filter={"val": filter},
        )

    sides = (size or 1, size or 1)
    if not size:
        sides = sides_of_map(next(_passed(opened_once(sides)))[MAP][0])
    spec = opened(
        val,
        plan=plan,
        train_transform=_steps(sides, size > 0, border, flip),
        val_transform=_steps(sides),
        exclude=exclude,
        filter=filter,
    )
    passes = {"train": opened_once(sides), "val": spec}
    images = ResidentImages(spec, passes, device, log_digest)
    return Resident(
        raypipe.loader(
            replace(spec, resident=images),
            rank=rank,
            world_size=world_size,
            device=device,
            augment=augment,
            dtype=dtype,
            run_dir=run_dir,
            log_digest=log_digest,
        ),
        images,
        spec.columns.has_target,
    )


def _steps(
    sides: Sides, is_resized: bool = True, border: int = 0, flip: float = 0.0
) -> Steps:
    """The steps of a transform to one size, whose crops and flips are those of any stream with the same steps."""
    box = dict(zip(("height", "width"), sides, strict=True))
    steps: Steps = []
    if is_resized:
        steps.append({"Resize": box})
    if border:
        steps += [{"Pad": {"padding": border}}, {"RandomCrop": box}]
    if not steps:  # all of an image; a program ends with a fixed size
        steps.append({"CenterCrop": box})
    if flip:
        steps.append({"HorizontalFlip": {"p": flip}})
    return steps


def _passed(spec: StreamSpec) -> Iterator[MicroBatch]:
    """Yield a validation of a stream, encoded, of which no sample is bad."""
    plan = spec.plan.only(Segment("val", 0, 0, spec.plan.val_steps))
    transform = replace(spec.transform, max_bad_fraction=1.0)
    spec = replace(spec, plan=plan, transform=transform)
    for batch in inline_batches(spec, plan.start()):
        yield _checked(spec.stores["val"], batch)


def _checked(store: Store, batch: MicroBatch) -> MicroBatch:
    """Return a batch; raise StoreError if one of its samples is bad."""
    for index in batch.index[(batch.weight == 0) & (batch.index != PADDING)].tolist():
        title = title_of(store.address, index, name_of(store, index))
        raise StoreError(
            f"{title} cannot be used, as the line above says; `raypipe verify` lists all such samples, for the "
            "argument `exclude`"
        )
    return batch


class Resident:
    """A dataset on a device; `raypipe.resident` makes one.

        for epoch in data.loader.epochs():
            for batch in epoch.train:
                ...                            # batch.image, batch.target; batch.ends_step after each step
            for batch in epoch.val:
                ...

    Attributes:
        loader: the loader that streams it, with its place, checkpoints and records.
        plan: the plan, as of a stream.
        images: uint8 (N, 3, H, W), by the store's indices, on the device; zeros where samples are left out.
        targets: (N, …), on the device; None without.
        augment: augmentation of micro-batches; None = none.
    """

    def __init__(
        self, loader: Loader, images: ResidentImages, has_target: bool
    ) -> None:
        self.loader = loader
        self.plan = loader.plan
        self.augment = loader.augment
        self._train = images.splits["train"]
        self.images = self._train.images
        self.targets: torch.Tensor | None = None
        if has_target:
            self.targets = torch.from_numpy(self._train.targets[:-1]).to(
                self.images.device
            )

    def __len__(self) -> int:
        """Samples of the store without those that are left out."""
        return self.plan.num_train

    def epoch(self, number: int, step: int = 0) -> Iterator[Batch]:
        """Yield this rank's micro-batches of an epoch, from a step on; the loader goes there."""
        plan = self.plan
        if not (0 <= number < plan.config.epochs and 0 <= step <= plan.steps_per_epoch):
            raise ConfigError(
                f"epoch {number}, step {step} is not in a plan of {plan.config.epochs} epochs of "
                f"{plan.steps_per_epoch} steps"
            )
        if not plan.training_of(number, step).num_delivered:
            return
        self.loader.load_state_dict(asdict(plan.cursor(number, step)))
        yield from next(self.loader.epochs()).train

    def whole(self, size: int = 0) -> Iterator[Batch]:
        """Iterate over all samples, once and in order, without crops, flips and augmentation: a validation.

        Every rank gets all of them.

        Args:
            size: samples in a batch; the last one may have fewer; 0 = that of a micro-batch.
        """
        size = size or self.plan.config.micro_batch_size
        kept = self.plan.kept["train"].indices(np.arange(len(self)))
        parts = np.split(kept, range(size, len(self), size))
        device = self.images.device
        for batch in on_device(
            itertools.starmap(self._unchanged, enumerate(parts)),
            device,
            self.plan.micro_batch_seed,
            ring=False,
            facts_of=lambda host: {"ends_step": True},
        ):
            yield self.augment.of_batch(batch, 0.0) if self.augment else batch

    def _unchanged(self, number: int, index: np.ndarray) -> MicroBatch:
        """A micro-batch of samples, int64 (B,), as they are stored."""
        image = self.images[to_device(index, self.images.device)]
        fields: dict[str, Any] = {
            IMAGE: image.contiguous(memory_format=torch.channels_last),
            LABEL: self._train.targets[index],
        }
        position = MicroBatchId("val", 0, number, 0)
        return MicroBatch(position, index, np.ones(len(index), np.float32), fields)


class ResidentImages:
    """The decoded images of a stream's stores: the source of its loader, and its decoder.

    Args:
        spec: the stream, whose transforms resize whole images to one size, and then only move pixels.
        passes: a stream for each split, whose validation has all of its samples once.
        device: where they stay.
        is_hashed: micro-batches come with the stored images, over which a stream has its hash.

    Attributes:
        splits: the images of each split.
    """

    def __init__(
        self,
        spec: StreamSpec,
        passes: Mapping[str, StreamSpec],
        device: torch.device | str,
        is_hashed: bool,
    ) -> None:
        self._spec = spec
        self._device = device = numbered(device)
        self._is_hashed = is_hashed
        self._backend: Any = torch.get_device_module(device)
        self._stream = new_stream(device)
        self.splits = {
            split: _Split(spec, split, passes[split], device) for split in spec.stores
        }
        self._backend.synchronize(device)

    def open(
        self, rank: int, world_size: int, start: MicroBatchId
    ) -> Iterator[MicroBatch]:
        """Open a rank's stream at a place."""
        if self._is_hashed:
            return inline_batches(self._spec, start, rank, world_size)
        share = (rank, world_size)
        places = self._spec.plan.micro_batches(start, share=share)
        return map(self._mapped, places)

    def _mapped(self, position: MicroBatchId) -> MicroBatch:
        """The micro-batch of a place, with maps and without images."""
        draws = self._spec.plan.draw(position)
        of_split = self.splits[position.split]
        fields: dict[str, np.ndarray | Ragged] = {
            MAP: of_split.maps(self._spec.plan.sample_keys(position.split, draws)),
            LABEL: of_split.targets[draws.indices],
        }
        weight = (draws.indices != PADDING).astype(np.float32)
        return MicroBatch(position, draws.indices, weight, fields)

    def __call__(self, batch: MicroBatch) -> MicroBatch:
        """Return a micro-batch with its images instead of maps; see `raypipe.streaming.decoding`."""
        device = self._device
        with pinned(device), torch.no_grad(), self._backend.stream(self._stream):
            image = self.splits[batch.position.split].cut(batch.index, batch[MAP])
            ready = new_event(device)
            ready.record(self._stream)
        return with_images(batch, image, ready)


class _Split:
    """The images of a split, on a device.

    Attributes:
        images: uint8 (N, 3, H, W), by the store's indices.
        targets: (N + 1, …), on the host; the last is that of padding.
    """

    def __init__(
        self, spec: StreamSpec, split: Split, passed: StreamSpec, device: torch.device
    ) -> None:
        steps = spec.transforms[split]
        transform = build_transform(steps, spec.transform.final_size)
        self._encoded = EncodedImages(SampleTransform(transform), "raypipe.resident")
        self._sides: Sides = self._encoded.image_shape[:2]
        first: Any = spec.transforms["train"]
        is_resized = "Resize" in first[0]
        self._framed, self.targets = _decoded(passed, self._sides, is_resized, device)
        inside = self._framed[:-1, _FRAME:-_FRAME, _FRAME:-_FRAME]
        self.images = inside.permute(0, 3, 1, 2)

    def maps(self, keys: np.ndarray) -> np.ndarray:
        """The maps of B samples by their keys, uint64 (B, 2): int32 (B, n)."""
        sizes = np.tile(self._sides, (len(keys), 1))
        return self._encoded.maps(keys, sizes)[1]

    def cut(self, index: np.ndarray, maps: np.ndarray) -> torch.Tensor:
        """The images of samples, int64 (B,), by their maps: uint8 (B, 3, H, W)."""
        num_images, height, width, _ = self._framed.shape
        device = self._framed.device
        rows = (index % num_images * height)[:, None] + _kept(maps, 0, height)
        row = to_device(rows * width, device)
        column = to_device(_kept(maps, 1, width), device)
        pixels = (row[:, :, None] + column[:, None]).flatten()
        image = self._framed.view(-1, 3).index_select(0, pixels)
        return image.view(len(index), *self._sides, 3).permute(0, 3, 1, 2)


def _kept(maps: np.ndarray, axis: int, side: int) -> np.ndarray:
    """The rows (0) or columns (1) of framed images that maps take, int64 (B, n).

    A resize among them changes nothing, or the images have it already.
    """
    of_axis = maps[:, axis_columns(maps.shape[1], axis), None].astype(np.int64)
    start = of_axis[:, START] + of_axis[:, RESIZES + AT] + _FRAME
    kept = np.arange(of_axis[0, RESIZES + KEPT, 0])
    return np.clip(start + of_axis[:, RESIZES + STEP] * kept, 0, side - 1)


def _decoded(
    spec: StreamSpec, sides: Sides, is_resized: bool, device: torch.device
) -> tuple[torch.Tensor, np.ndarray]:
    """Decode the samples of a stream's validation. Padding, the last row, and other samples have what fills them.

    Returns:
        Images with their frames, uint8 (N + 1, H, W, 3), on a device; and targets (N + 1, …), on the host.
    """
    store = spec.stores["val"]
    num = len(store) + 1
    framed = _empty(num, sides, device)
    inside = framed[:, _FRAME:-_FRAME, _FRAME:-_FRAME]
    targets: np.ndarray | None = None
    all_bad = replace(spec.transform, max_bad_fraction=1.0)
    decoding = Decoding(replace(spec, transform=all_bad), torch.device("cpu"))
    for host in _passed(spec):
        for index, of_map in zip(host.index.tolist(), host[MAP], strict=True):
            found = sides_of_map(of_map)
            if index != PADDING and not is_resized and found != sides:
                raise ConfigError(
                    f"{store.address}: sample {index} has {found} pixels (height, width), and the "
                    f"first one {sides}: raypipe.resident(…, size=32) resizes all images"
                )
        batch = _checked(store, decoding.to_pixels(host))
        pixels = torch.from_numpy(batch[IMAGE]).to(device)
        inside[torch.from_numpy(batch.index).to(device)] = pixels
        if targets is None:
            shape = (num, *batch[LABEL].shape[1:])
            targets = np.zeros(shape, batch[LABEL].dtype)
        targets[batch.index] = batch[LABEL]
    assert targets is not None, "a plan has samples"
    return framed, targets


def _empty(num: int, sides: Sides, device: torch.device) -> torch.Tensor:
    """Return memory of zeros for images with their frames; raise ResourceError if the GPU has not so much."""
    height, width = sides
    shape = (num, height + 2 * _FRAME, width + 2 * _FRAME, 3)
    needed = math.prod(shape)
    if device.type == "cuda" and needed > _ROOM * (
        free := torch.cuda.mem_get_info(device)[0]
    ):
        raise ResourceError(
            f"{num - 1:,} images of {width}x{height} take {needed / 1e9:.1f} GB of the GPU's memory, of which "
            f"{free / 1e9:.1f} GB are free: give a smaller size, or stream them with raypipe.loader"
        )
    return torch.zeros(shape, dtype=torch.uint8, device=device)
