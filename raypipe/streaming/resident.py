"""A stream whose decoded images stay on the training device (`pool.cache: device`).

    once    store → decode → the transform's first steps → uint8 (N, H, W, 3) on the device; the rest on the host
    then    plan → MicroBatchMaker, of rows and draws → HostBatch → the device gathers its images

Order, keys, substitutes, columns and the budget of bad samples are those of any stream, by the same code. Each
rank has the whole store, and makes its own micro-batches.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import groupby, islice
from typing import Any

import numpy as np
import torch

from raypipe.device.resident import ResidentImages, free_bytes
from raypipe.errors import ConfigError, SampleError
from raypipe.logs import progress
from raypipe.lookup import num_cpus
from raypipe.plan.cursor import Cursor
from raypipe.plan.places import Split
from raypipe.plan.samplers import Draws
from raypipe.stores.base import Columns, Store, check_columns, name_of, title_of
from raypipe.streaming.maker import MicroBatchMaker
from raypipe.streaming.spec import StreamSpec
from raypipe.transform.batch import HostBatch
from raypipe.transform.decode import decode
from raypipe.transform.process_state import process_kept
from raypipe.transform.resident import ResidentContent, ResidentTransform, resident_transforms
from raypipe.transform.sizes import Sides

logger = logging.getLogger(__name__)

# Of the memory that is free at the start: model, gradients and activations come after.
_DEFAULT_SHARE = 0.5
_BLOCK = 16  # micro-batches that the plan is asked for at a time, which takes as long as for one
_CHUNK = 1024  # samples that a thread reads and decodes at a time
_TOLD_EVERY_S = 10.0


class ResidentStream:
    """The stream of one rank, and the images on its device.

    Args:
        spec: the stream.
        device: where the images stay.
        rank, world_size: whose share it makes.

    Attributes:
        draws_globally: its columns draw from the generators of the process.

    Raises:
        ConfigError: images differ in size, or take more memory than there is for them.
    """

    def __init__(self, spec: StreamSpec, device: torch.device, rank: int = 0, world_size: int = 1) -> None:
        started = time.perf_counter()
        self._spec, self._rank, self._world_size = spec, rank, world_size
        transforms = resident_transforms(spec.transforms, spec.transform)
        parts = {split: _Part(spec, split, transforms[split]) for split in spec.stores}
        num_bytes = _check_room(spec.pool.cache_bytes, parts.values(), device, world_size)
        with process_kept(generators=False):  # the first steps draw nothing
            pixels = {split: part.load(device, self._tell) for split, part in parts.items()}
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # any stream may read them from now on
        contents = {split: part.content for split, part in parts.items()}
        self.gather = ResidentImages(pixels, {split: content.stages for split, content in contents.items()}).gather
        stores: dict[Split, Store] = {split: part.held() for split, part in parts.items()}
        self._maker = MicroBatchMaker(*spec.replace(stores=stores).recipe, contents=contents)
        self.draws_globally = bool(self._maker.draws_globally())
        what = ", ".join(f"{split} {part.described}" for split, part in parts.items())
        took = f"{num_bytes / 1e6:,.1f} MB, decoded in {time.perf_counter() - started:.1f} s"
        self._tell(f"cache      on {device}: {what}; {took}")

    def _tell(self, text: str) -> None:
        if self._rank == 0:
            progress(logger, text)

    def batches(self, cursor: Cursor) -> Iterator[HostBatch]:
        """The rank's micro-batches from a cursor on, without their images, which `gather` makes."""
        plan = self._spec.plan
        places = (at for at in plan.micro_batches(cursor) if at.micro % self._world_size == self._rank)
        for _, segment in groupby(places, lambda at: (at.split, at.epoch)):
            while block := list(islice(segment, _BLOCK)):
                draws = plan.draw_block(block)
                for number, at in enumerate(block):
                    yield self._maker.batch(at, Draws(*(column[number] for column in draws)))

    def whole_batches(self, cursor: Cursor) -> Iterator[HostBatch]:
        """The same with their images, in host memory."""
        for batch in self.batches(cursor):
            drawn = {name: torch.from_numpy(array) for name, array in batch.drawn.items()}
            yield replace(batch, image=self.gather(batch.at.split, drawn).numpy(), drawn={})


def check_resident(spec: StreamSpec, device: torch.device | None = None, world_size: int = 1) -> None:
    """Look at the first image of each store, and raise ConfigError unless there is room for as many of its size.

    Args:
        device: where they are to stay; None = not known yet: only pool.cache_bytes limits them.
    """
    transforms = resident_transforms(spec.transforms, spec.transform)
    parts = [_Part(spec, split, transforms[split]) for split in spec.stores]
    _check_room(spec.pool.cache_bytes, parts, device, world_size)


def _check_room(cache_bytes: int, parts: Iterable[_Part], device: torch.device | None, world_size: int) -> int:
    """Bytes that the images of all take; raises ConfigError as `check_resident`."""
    num_bytes = sum(part.num_bytes for part in parts)
    limits = {f"pool.cache_bytes={cache_bytes}": cache_bytes} if cache_bytes else {}
    if device is not None:
        free = free_bytes(device)
        # GPUs have memory of their own; of a machine's, each of its trainers takes a part.
        share = 1.0 if cache_bytes else _DEFAULT_SHARE / (1 if device.type == "cuda" else world_size)
        limits[f"{share:.0%} of what is free on {device}"] = int(share * free)
    for what, limit in limits.items():
        if num_bytes > limit:
            raise ConfigError(
                f"pool.cache='device': the decoded images take {num_bytes:,} bytes, and {what} allows {limit:,}: "
                "raise pool.cache_bytes if the device has the room, use smaller images, or set pool.cache='disk', "
                "which keeps them on the disk of each node"
            )
    return num_bytes


class _Part:
    """The samples of one split that the plan may draw, on their way to the device.

    Attributes:
        num_bytes: of their images.
        content: what the samples become; of images that are loaded.
    """

    def __init__(self, spec: StreamSpec, split: Split, transform: ResidentTransform) -> None:
        self._spec, self._store, self._transform = spec, spec.stores[split], transform
        kept = spec.plan.kept[split]
        self._indices = np.sort(kept.indices(np.arange(kept.size)))
        self._sides = self._first_sides()
        self.num_bytes = (len(self._indices) + 1) * self._sides[0] * self._sides[1] * 3
        self._values: dict[str, Any] = {}
        self._bad: dict[int, str] = {}  # by row
        self.content: ResidentContent

    @property
    def described(self) -> str:
        height, width = self._sides
        bad = f", {len(self._bad):,} of them bad" if self._bad else ""
        return f"{len(self._indices):,} images of {height} x {width}{bad}"

    def _pixels(self, image: Any) -> np.ndarray:
        config = self._spec.transform
        return self._transform.first(decode(image, min_side=config.decode_min_side, exif=config.apply_exif))

    def _first_sides(self) -> Sides:
        """Height and width of the first image that is no bad one."""
        for image in self._store.read(self._indices[:16], ("image",))["image"]:
            try:
                height, width, _ = self._pixels(image).shape
            except SampleError:
                continue
            return height, width
        raise ConfigError(f"{self._store.address} has no readable sample among its first")

    def load(self, device: torch.device, tell: Callable[[str], None]) -> torch.Tensor:
        """Decode all; uint8 (n + 1, H, W, 3) on the device, of which the last one is black."""
        count, told = len(self._indices), time.perf_counter()
        pixels = torch.zeros((count + 1, *self._sides, 3), dtype=torch.uint8, device=device)
        names = tuple(dict.fromkeys(("image", *self._spec.columns.read)))
        values: list[Columns] = []

        def decoded(first: int) -> tuple[np.ndarray, Columns]:
            indices = self._indices[first : first + _CHUNK]
            found = dict(self._store.read(indices, names))
            images = np.zeros((len(indices), *self._sides, 3), np.uint8)
            for number, image in enumerate(found.pop("image")):
                self._put(first + number, image, images[number])
            return images, found

        with ThreadPoolExecutor(self._spec.pool.threads or num_cpus(), "raypipe-decode") as pool:
            try:
                for first, (images, found) in zip(
                    range(0, count, _CHUNK), pool.map(decoded, range(0, count, _CHUNK)), strict=True
                ):
                    pixels[first : first + len(images)].copy_(torch.from_numpy(images))
                    values.append(found)
                    if time.perf_counter() - told > _TOLD_EVERY_S:
                        told = time.perf_counter()
                        tell(f"cache      {first + len(images):,} of {count:,} images decoded")
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
        self._values = {name: _joined([each[name] for each in values]) for name in values[0]}
        self.content = ResidentContent(self._transform, self._sides, count, list(self._bad.values()))
        return pixels

    def _put(self, row: int, image: Any, out: np.ndarray) -> None:
        try:
            pixels = self._pixels(image)
        except SampleError as error:
            self._bad[row] = str(error)
            return
        if pixels.shape != out.shape:
            index = int(self._indices[row])
            raise ConfigError(
                f"pool.cache='device' holds images of one size, and {self._title(index)} is "
                f"{pixels.shape[0]} x {pixels.shape[1]}, where the first one is {out.shape[0]} x {out.shape[1]} "
                "(height x width): begin the transform with a resize ('small', 'resize' and 'center' do), use a "
                "store whose images have one size, or set pool.cache='disk'"
            )
        out[...] = pixels

    def _title(self, index: int) -> str:
        return title_of(self._store.address, index, name_of(self._store, index))

    def held(self) -> Store:
        """The samples without their images."""
        row_of = np.full(len(self._store), -1, np.int64)
        row_of[self._indices] = np.arange(len(self._indices))
        named = row_of.copy()
        bad = [*self._bad]
        named[self._indices[bad]] = ~np.arange(len(bad))
        held: Any = _HeldStore(self._store, row_of, named, self._values)
        return held


def _joined(parts: list[Any]) -> Any:
    """A column that was read in parts."""
    if all(isinstance(part, np.ndarray) for part in parts):
        return np.concatenate(parts)
    return [value for part in parts for value in part]


@dataclass(frozen=True)
class _HeldStore:
    """A store in memory, but for its images: `image` is what `ResidentContent` takes.

    Attributes:
        store: the store itself, which nothing is read from.
        rows: int64 (N,), of each sample of the store.
        images: int64 (N,), see above.
        values: columns, by rows.
    """

    store: Store
    rows: np.ndarray
    images: np.ndarray
    values: Mapping[str, Any]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)

    def __len__(self) -> int:
        return len(self.store)

    def read(self, indices: np.ndarray, columns: tuple[str, ...] = ("image", "label")) -> Columns:
        check_columns(columns, ("image", *self.values), self.address)
        rows, found = self.rows[indices], dict[str, Any]()
        for name in columns:
            if name == "image":
                found[name] = self.images[indices].tolist()
                continue
            held = self.values[name]
            found[name] = held[rows] if isinstance(held, np.ndarray) else [held[row] for row in rows.tolist()]
        return found
