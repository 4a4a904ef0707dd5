"""Host to device: a ring of pinned slots and a copy stream; on CPU, views. Knows torch, not Ray.

    stream row (read-only, shared memory) → pinned slot → copy stream → device slot → compute stream

Each slot has two events. `copied`: its transfer is done, so compute may read the device side and the host
may refill the pinned side. `consumed`: compute has passed its last use, so the copy stream may overwrite
the device side. Nothing is allocated after the first micro-batch of each shape.
"""

from __future__ import annotations

import queue
import threading
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from raypipe.plan import MicroBatchId


@dataclass(frozen=True)
class HostBatch:
    """One micro-batch in host memory, possibly read-only.

    Attributes:
        at: its place in the run.
        image: uint8 (B, H, W, 3).
        label: int64 (B,).
        weight: float32 (B,); 0 for padding and for samples that count for nothing.
        index: int64 (B,); -1 for padding.
        num_bad: samples that were replaced or left out.
    """

    at: MicroBatchId
    image: np.ndarray
    label: np.ndarray
    weight: np.ndarray
    index: np.ndarray
    num_bad: int


@dataclass(frozen=True)
class Batch:
    """One micro-batch on the training device. On CUDA it is valid until the next one is asked for.

    Attributes:
        at: its place in the run.
        seed: of all that is drawn once for this micro-batch.
        image: uint8 (B, 3, H, W), channels_last in memory.
        target: int64 (B,).
        weight: float32 (B,); 0 for padding and for samples that count for nothing.
        label: the target, on the host.
        index: int64 (B,), on the host; -1 for padding.
        num_bad: samples that were replaced or left out.
    """

    at: MicroBatchId
    seed: int
    image: torch.Tensor
    target: torch.Tensor
    weight: torch.Tensor
    label: np.ndarray
    index: np.ndarray
    num_bad: int


_FIELDS = ("image", "label", "weight")


class _Slot:
    """A pinned and a device buffer for each array of a micro-batch, and the events that guard them."""

    def __init__(self, batch: HostBatch, device: torch.device) -> None:
        self.pinned, self.device = {}, {}
        for name in _FIELDS:
            like = torch.from_numpy(np.empty_like(getattr(batch, name)))
            self.pinned[name] = torch.empty(like.shape, dtype=like.dtype, pin_memory=True)
            self.device[name] = torch.empty(like.shape, dtype=like.dtype, device=device)
        self.views = {name: tensor.numpy() for name, tensor in self.pinned.items()}
        self.copied, self.consumed = torch.cuda.Event(), torch.cuda.Event()

    def fill(self, batch: HostBatch, stream: torch.cuda.Stream) -> None:
        self.copied.synchronize()  # the last transfer out of the pinned side; long done in steady state
        for name in _FIELDS:
            np.copyto(self.views[name], getattr(batch, name))
        with torch.cuda.stream(stream):
            stream.wait_event(self.consumed)
            for name in _FIELDS:
                self.device[name].copy_(self.pinned[name], non_blocking=True)
            self.copied.record(stream)


class DevicePrefetcher:
    """Iterates over micro-batches on the device, `depth` transfers ahead of the consumer.

    Args:
        batches: micro-batches in host memory.
        device: where they go.
        seed_of: the seed of the micro-batch at a place.
        depth: slots in flight beside the one in use; ignored on CPU.
    """

    def __init__(self, batches: Iterator[HostBatch], device: torch.device, seed_of: Any, depth: int = 2) -> None:
        self._batches, self._device, self._seed_of, self._depth = batches, device, seed_of, depth

    def __iter__(self) -> Iterator[Batch]:
        return self._on_cuda() if self._device.type == "cuda" else self._on_host()

    def _on_host(self) -> Iterator[Batch]:
        for batch in self._batches:
            with warnings.catch_warnings():
                # The views are read-only as the shared memory beneath them is; nothing writes to them.
                warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
                tensors = {name: torch.from_numpy(getattr(batch, name)) for name in _FIELDS}
            yield self._as_batch(batch, tensors)

    def _as_batch(self, batch: HostBatch, tensors: dict[str, torch.Tensor]) -> Batch:
        return Batch(
            at=batch.at,
            seed=self._seed_of(batch.at),
            image=tensors["image"].permute(0, 3, 1, 2),  # NHWC in memory is channels_last as it stands
            target=tensors["label"],
            weight=tensors["weight"],
            label=batch.label,
            index=batch.index,
            num_bad=batch.num_bad,
        )

    def _on_cuda(self) -> Iterator[Batch]:
        filled: queue.Queue[tuple[HostBatch, _Slot, queue.Queue[_Slot]] | BaseException | None]
        filled = queue.Queue(self._depth)
        stopped = threading.Event()
        thread = threading.Thread(target=self._fill, args=(filled, stopped), daemon=True, name="raypipe-ring")
        thread.start()
        try:
            while (item := filled.get()) is not None:
                if isinstance(item, BaseException):
                    raise item
                batch, slot, free = item
                compute = torch.cuda.current_stream(self._device)
                compute.wait_event(slot.copied)
                yield self._as_batch(batch, slot.device)
                slot.consumed.record(torch.cuda.current_stream(self._device))
                free.put(slot)
        finally:
            stopped.set()
            while thread.is_alive():  # the thread may wait for room in the queue
                try:
                    filled.get(timeout=0.1)
                except queue.Empty:
                    thread.join(0.1)

    def _fill(self, filled: queue.Queue[Any], stopped: threading.Event) -> None:
        """Runs in a thread: host batches into slots, one ring of `depth` + 1 slots per shape."""
        rings: dict[tuple[int, ...], queue.Queue[_Slot]] = {}
        try:
            stream = torch.cuda.Stream(self._device)
            with torch.cuda.device(self._device):
                for batch in self._batches:
                    if batch.image.shape not in rings:
                        ring: queue.Queue[_Slot] = queue.Queue()
                        for _ in range(self._depth + 1):
                            ring.put(_Slot(batch, self._device))
                        rings[batch.image.shape] = ring
                    free = rings[batch.image.shape]
                    slot = None
                    while slot is None and not stopped.is_set():
                        try:
                            slot = free.get(timeout=0.5)
                        except queue.Empty:
                            continue
                    if slot is None:
                        return
                    slot.fill(batch, stream)
                    filled.put((batch, slot, free))
            filled.put(None)
        except BaseException as error:
            filled.put(error)
