"""Batches on the device, ahead of their use: raypipe's micro-batches, or any loader's. Knows torch, not Ray.

    on_device           HostBatch → Batch
    decoded_on_device   the same, of encoded images
    asked_for_here      the same, where the consumer's thread must make the micro-batches
    prefetch            (image, target), or any other tree of tensors → the same on the device

On CUDA the first and the last go through the pinned ring of `raypipe.device.ring`; on CPU nothing is transferred.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import starmap
from queue import SimpleQueue
from typing import Any, TypeVar

import numpy as np
import torch
from torch.utils._pytree import tree_leaves, tree_map

from raypipe.device.device_decode import DeviceDecoder
from raypipe.device.mixing import Mixed
from raypipe.device.ring import CLOSE_S, Item, OnCopied, Ring, hand_over, new_event, view
from raypipe.metrics.timing import mark
from raypipe.plan.places import MicroBatchId
from raypipe.transform.batch import HostBatch
from raypipe.transform.resident import Gather
from raypipe.transform.sizes import Size

Used = TypeVar("Used")


@dataclass(frozen=True)
class Batch:
    """One micro-batch on the training device. From a ring it is valid until the next one is asked for, or for
    `keep` more batches.

    Attributes:
        at: its place in the run.
        seed: seed of everything that is drawn once for this micro-batch.
        image: uint8 (B, 3, H, W), or floating point once it is augmented; channels_last in memory. Of views the
            first crop of the first one, in the same memory. With `transform.decode_as: array` (B, C, H, W), in the
            dtype of the arrays until it is augmented.
        target: int64 (B,), classes; or what the target's column holds, (B, …).
        weight: float32 (B,); 0 for padding and for samples that do not count.
        label: the target, on the host.
        index: int64 (B,), on the host; -1 for padding.
        ends_step: whether it is this rank's last micro-batch of an optimizer step.
        num_bad: samples that were replaced or left out.
        read_s: seconds that an actor spent on reading it.
        work_s: seconds that an actor spent on it in all.
        mixed: the other half of the targets, if MixUp or CutMix was applied.
        num_fallback: samples that the device should have decoded, but the host had to.
        num_decoded: samples that the device decoded.
        failed: by row, why neither could decode a sample; these rows have weight 0 and black pixels.
        source: int64 (B,), on the host: which store of a mixture each sample is from, in the order of
            `plan.sources`; -1 for padding; None if the plan is no mixture.
        mask: uint8 (B, H, W), a class per pixel, 255 where there is none; None if the stream has no masks.
        columns: what store.columns names, by name: numbers as tensors (B, …) of their dtype; else lists of B on
            the host: tensors of any length, text, bytes, or what JSON holds (docs/columns.md).
        boxes: float32 (B, K, 5), each `[x0, y0, x1, y1, label]` in pixels, with label -1 where there is none; None
            if the stream has no boxes.
        keypoints: float32 (B, K, 3), each `[x, y, label]` in pixels, with label -1 where there is none, and
            -2 - label where it lies outside of the image; None if the stream has no keypoints.
        views: by name, uint8 or floating point (B, 3, H, W), or (B, n, 3, H, W) of n crops; empty if the stream's
            transform makes one image.
    """

    at: MicroBatchId
    seed: int
    image: torch.Tensor
    target: torch.Tensor
    weight: torch.Tensor
    label: np.ndarray
    index: np.ndarray
    num_bad: int
    ends_step: bool = False
    read_s: float = 0.0
    work_s: float = 0.0
    mixed: Mixed | None = None
    num_fallback: int = 0
    num_decoded: int = 0
    failed: dict[int, str] = field(default_factory=dict)
    mask: torch.Tensor | None = None
    boxes: torch.Tensor | None = None
    keypoints: torch.Tensor | None = None
    source: np.ndarray | None = None
    columns: dict[str, Any] = field(default_factory=dict)
    views: dict[str, torch.Tensor] = field(default_factory=dict)


def first_image(views: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The first crop of the first view (B, 3, H, W), which is a batch's `image`."""
    first = next(iter(views.values()))
    return first if first.ndim == 4 else first[:, 0]


def on_device(
    batches: Iterable[HostBatch],
    device: torch.device,
    seed_of: Callable[[MicroBatchId], int],
    depth: int = 2,
    keep: int = 0,
    ring: bool | None = None,
    on_copied: OnCopied | None = None,
    gather: Gather | None = None,
) -> Iterator[Batch]:
    """Micro-batches on the device: on CUDA `depth` transfers ahead, see `Ring`; on CPU as views of host memory.

    Args:
        batches: micro-batches in host memory.
        device: CUDA or CPU.
        seed_of: the seed of the micro-batch at a place.
        depth, keep, on_copied: see `Ring`.
        ring: None = on CUDA only; True = on CPU too, as tests of the ring do.
        gather: makes the images of those that the device holds, where a micro-batch is asked for.

    Raises:
        ConfigError: depth < 1, or the device is neither CUDA nor CPU.
    """

    def arrays(host: HostBatch) -> list[np.ndarray]:
        return [*_leaves(host).values()]

    def batch(host: HostBatch, tensors: Sequence[torch.Tensor]) -> Batch:
        there: dict[str, Any] = {"views": {}, "columns": {}, "drawn": {}}
        for (kind, name), tensor in zip(_leaves(host), tensors, strict=True):
            if name:
                there[kind][name] = tensor
            else:
                there[kind] = tensor
        if (drawn := there.pop("drawn")) and gather:
            there["image"] = gather(host.at.split, drawn)
        # NHWC in memory is channels_last as it stands.
        views = there["views"] = {name: each.movedim(-1, -3) for name, each in there["views"].items()}
        there["image"] = first_image(views) if views else there["image"].permute(0, 3, 1, 2)
        return _batch(host, seed_of, there.pop("columns"), target=there.pop("label"), **there)

    through = Ring(batches, arrays, device, depth, keep, on_copied, _without_leaves)
    if through.device.type == "cuda" or ring:
        return _each(through, batch)
    return (batch(host, [*map(view, arrays(host))]) for host in batches)


def asked_for_here(
    source: Iterator[HostBatch], move: Callable[[Iterator[HostBatch]], Iterator[Batch]], ahead: int
) -> Iterator[Batch]:
    """Batches whose source is asked in the consumer's thread, where `move` alone would ask it in one of its own.

    For a source that draws from generators that threads share. It makes the micro-batch that is `ahead` of the one
    that the consumer asks for. The device works on the last one in the meantime, and transfers run beside both.

    Args:
        source: micro-batches in host memory.
        move: `on_device` or `decoded_on_device`.
    """
    handed: SimpleQueue[HostBatch | Exception | None] = SimpleQueue()

    def given() -> Iterator[HostBatch]:
        while (entry := handed.get()) is not None:
            if isinstance(entry, Exception):
                raise entry
            yield entry
            del entry

    def hand_over_next() -> None:
        try:
            handed.put(next(source, None))
        except Exception as error:  # raised after the batches before it
            handed.put(error)

    batches: Any = move(given())
    try:
        for _ in range(ahead):
            hand_over_next()
        for batch in batches:
            hand_over_next()
            yield batch
    finally:
        handed.put(None)  # the thread may be waiting
        batches.close()


def _leaves(host: HostBatch) -> dict[tuple[str, str], np.ndarray]:
    """The arrays of a micro-batch that are to be on the device, by its fields, and by their names within these."""
    fields = ("label", "weight", "mask", "boxes", "keypoints", *(() if host.views or host.drawn else ("image",)))
    found = {(field, ""): array for field in fields if (array := getattr(host, field)) is not None}
    found |= {("views", name): array for name, array in host.views.items()}
    found |= {("drawn", name): array for name, array in host.drawn.items()}
    return found | {("columns", name): array for name, array in _tensors_of(host).items()}


_ELSEWHERE = np.empty(0, np.uint8)


def _without_leaves(host: HostBatch) -> HostBatch:
    """What the host still needs of a micro-batch: no view of the block that it came in."""
    leaves: dict[str, Any] = {field: _ELSEWHERE for field, name in _leaves(host) if not name}
    columns = {
        name: column._replace(values=_ELSEWHERE) if column.kind == "array" else column.copied()
        for name, column in host.columns.items()
    }
    of_host = {"label": host.label.copy(), "index": host.index.copy(), "columns": columns}
    return replace(host, **leaves | of_host, views=dict.fromkeys(host.views, _ELSEWHERE))


def _each(ring: Ring[Item], use: Callable[[Item, tuple[torch.Tensor, ...]], Used]) -> Generator[Used, None, None]:
    with closing(iter(ring)) as pairs:
        yield from starmap(use, pairs)


def decoded_on_device(
    batches: Iterable[HostBatch],
    decoder: DeviceDecoder,
    seed_of: Callable[[MicroBatchId], int],
    depth: int = 2,
    on_decoded: Callable[[MicroBatchId, Any, Any], None] | None = None,
    size_of: Callable[[MicroBatchId], Size | None] = lambda _: None,
    share: float = 1.0,
    on_copied: OnCopied | None = None,
) -> Iterator[Batch]:
    """Micro-batches that the device decodes, in a thread, `depth` ahead of the consumer.

    With a share below 1 actors have made the other images. These come through a ring, and stand behind the decoded
    ones, as the plan has them.

    All that is on the device is made on the decoder's stream, and handed to the stream that is current where the
    batch is asked for: ask for batches under the stream that works on them.

    Closing the iterator ends the thread and closes the source's iterator, if that can be closed.

    Args:
        batches: micro-batches in host memory, encoded to the share.
        decoder: of the training device.
        seed_of: the seed of the micro-batch at a place.
        depth: micro-batches decoded or being decoded, beside the one in use.
        on_decoded: called in the thread for each, with its place, and with `metrics.mark`s of the decoder's stream
            around its work.
        size_of: the size of the images of the micro-batch at a place; None = the decoder's.
        share: of each micro-batch that is encoded, above 0.
        on_copied: of the ring, see `Ring`.
    """
    device = decoder.device
    pairs, close = _with_others(batches, device, share, on_copied)

    def decode_next() -> tuple[Batch, Any] | None:
        """The next batch, and the event behind the work on it."""
        ready = new_event(device)
        with torch.get_device_module(device).stream(decoder.stream):
            # Asked for under this stream, which from here on waits for their transfer.
            host, others = next(pairs, (None, None))
            if host is None:
                return None
            assert host.encoded is not None
            started = mark(device)
            found = decoder.decode(**host.encoded, size=size_of(host.at), others=others)
            target, weight = (torch.from_numpy(array.copy()) for array in (host.label, host.weight))
            weight[list(found.failed)] = 0
            target, weight = (tensor.to(device, non_blocking=True) for tensor in (target, weight))
            columns = {
                name: torch.from_numpy(array.copy()).to(device, non_blocking=True)
                for name, array in _tensors_of(host).items()
            }
            if on_decoded:
                on_decoded(host.at, started, mark(device))
            ready.record(decoder.stream)
        there: dict[str, Any] = {"image": found.image, "target": target, "weight": weight}
        there |= {name: getattr(found, name) for name in ("num_fallback", "num_decoded", "failed")}
        return _batch(host, seed_of, columns, **there), ready

    thread = ThreadPoolExecutor(1, thread_name_prefix="raypipe-decode")
    ahead = deque(thread.submit(decode_next) for _ in range(depth))
    try:
        while (decoded := ahead.popleft().result()) is not None:
            ahead.append(thread.submit(decode_next))
            batch, ready = decoded
            columns = [column for column in batch.columns.values() if isinstance(column, torch.Tensor)]
            hand_over(ready, (batch.image, batch.target, batch.weight, *columns), device)
            yield batch
    finally:
        for future in ahead:
            future.cancel()
        # There, since a generator cannot be closed while the thread is in it.
        ended = thread.submit(close)
        thread.shutdown(wait=False)
        wait([ended], CLOSE_S)


def _with_others(
    batches: Iterable[HostBatch], device: torch.device, share: float, on_copied: OnCopied | None
) -> tuple[Iterator[tuple[HostBatch, torch.Tensor | None]], Callable[[], None]]:
    """Micro-batches with those of their images that are not encoded, and what closes their source.

    On CUDA these images are on the device, and valid until the next ones are asked for.
    """
    if share < 1 and device.type == "cuda":
        ring = Ring(batches, lambda host: [host.image], device, 1, on_copied=on_copied, staged=_without_image)
        each = _each(ring, lambda host, tensors: (host, tensors[0]))
        return each, each.close

    def with_others(host: HostBatch) -> tuple[HostBatch, torch.Tensor | None]:
        return host, None if share == 1 else view(host.image)

    source = iter(batches)
    # A generator would hold on to its last micro-batch.
    return map(with_others, source), getattr(source, "close", lambda: None)


def _without_image(host: HostBatch) -> HostBatch:
    """What else there is of a micro-batch of which a share is encoded: no view of the block that it came in."""
    assert host.encoded is not None
    of_host: dict[str, Any] = {name: getattr(host, name).copy() for name in ("label", "weight", "index")}
    of_host["encoded"] = {name: array.copy() for name, array in host.encoded.items()}
    of_host["columns"] = {name: column.copied() for name, column in host.columns.items()}
    return replace(host, image=_ELSEWHERE, **of_host)


def _tensors_of(host: HostBatch) -> dict[str, np.ndarray]:
    """The columns of a micro-batch that go to the device."""
    return {name: column.values for name, column in host.columns.items() if column.kind == "array"}


def _batch(
    host: HostBatch,
    seed_of: Callable[[MicroBatchId], int],
    columns: dict[str, torch.Tensor],
    **on_device: Any,
) -> Batch:
    on_host = {name: column.unpacked() for name, column in host.columns.items() if name not in columns}
    on_host = {
        name: [view(each) if isinstance(each, np.ndarray) else each for each in values]
        for name, values in on_host.items()
    }
    same = {name: getattr(host, name) for name in ("at", "label", "index", "read_s", "work_s")}
    num_bad = host.num_bad + len(on_device.get("failed", ()))
    found = {name: columns.get(name, on_host.get(name)) for name in host.columns}  # in their order
    return Batch(seed=seed_of(host.at), num_bad=num_bad, columns=found, **same, **on_device)


class Prefetched:
    """A loader's batches on the device, `depth` transfers ahead of their use.

        for image, target in raypipe.prefetch(loader, device):
            ...

    On CUDA a batch is valid until the next one is asked for, or for `keep` more batches. Ask for batches under the
    CUDA stream that works on them. On CPU the loader's batches come as they are.

    It can be iterated as often as the loader, has its length, and ends its thread if the iteration stops early.

    On CUDA the loader runs in a thread of this process. There it shares the global random generators with the
    training loop (num_workers=0): give it a generator of its own.

    Args:
        loader: a torch DataLoader or another iterable. Its batches are tensors, or tuples, named tuples, lists and
            dicts of them, nested (pytrees). Tensors of any shape, dtype and strides arrive with the same; where
            memory overlaps or has gaps, the strides are those of a dense tensor in the same order. Those already
            on the device, and all that is no tensor, pass through. Pinned tensors are not copied on the host.
        device: CUDA or CPU.
        depth: transfers in flight or done, besides the batch in use.
        keep: batches that stay valid besides the newest, for a loop that looks ahead; each takes the device memory
            of one, and as much pinned memory.
        ring: None = on CUDA only; True = on CPU too, for tests of the ring.

    Raises:
        ConfigError: depth < 1, or the device is neither CUDA nor CPU. Iterating raises what the loader raises.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        device: torch.device | str,
        depth: int = 2,
        keep: int = 0,
        ring: bool | None = None,
    ) -> None:
        self._loader = loader
        self._ring = Ring(loader, self._moved, device, depth, keep)
        self._on_cuda = self._ring.device.type == "cuda"
        self._uses_ring = self._on_cuda or bool(ring)

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        return _each(self._ring, self._replaced) if self._uses_ring else iter(self._loader)

    def _moves(self, leaf: Any) -> bool:
        # On CPU every tensor is there already, but with ring=True it is to go through the ring.
        return isinstance(leaf, torch.Tensor) and not (self._on_cuda and leaf.device == self._ring.device)

    def _moved(self, batch: Any) -> tuple[torch.Tensor, ...]:
        return tuple(leaf for leaf in tree_leaves(batch) if self._moves(leaf))

    def _replaced(self, batch: Any, tensors: tuple[torch.Tensor, ...]) -> Any:
        moved = iter(tensors)
        return tree_map(lambda leaf: next(moved) if self._moves(leaf) else leaf, batch)


prefetch = Prefetched
