"""A ring of slots between host and device: transfers run beside the work on what is in use. Knows torch, not Ray.

    leaves of an item → host side of a slot (pinned) → copy stream → device side → compute stream

Each slot has two events. `copied`: its transfer is done, so compute may read the device side and the host
may refill the host side. `consumed`: compute has passed its last use, so the copy stream may overwrite the
device side. Of `depth` + 1 slots one is in use and `depth` are filled or being filled, and `keep` more hold what
came before:

    thread      fill a free slot's host side once `copied`; on the copy stream: transfer once `consumed`
    consumer    on the compute stream: go on once `copied`, use; then record `consumed` and free the slot

On CPU the same code runs over plain memory, and over torch.cpu's streams and events, which do nothing.
"""

from __future__ import annotations

import threading
import warnings
from collections import OrderedDict, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from functools import cache
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

import numpy as np
import torch

from raypipe.errors import ConfigError
from raypipe.metrics.timing import mark

Item = TypeVar("Item")
Leaf = np.ndarray | torch.Tensor
OnCopied = Callable[[Any, Any], None]

# Slots are kept for this many signatures: the full and the last batch of training and of validation make four.
MAX_SIGNATURES = 4
# A source that is in the midst of an item cannot be interrupted; after this its thread is left to end by itself.
CLOSE_S = 10.0


def numbered(device: torch.device | str) -> torch.device:
    """The device by its number: which one is current differs between threads.

    Raises:
        ConfigError: the device is neither CUDA nor CPU.
    """
    device = torch.device(device)
    if device.type not in ("cuda", "cpu"):
        raise ConfigError(f"device is {device}: batches go to cuda or cpu")
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def new_stream(device: torch.device) -> Any:
    return torch.cuda.Stream(device) if device.type == "cuda" else torch.cpu.Stream()


def new_event(device: torch.device) -> Any:
    # Blocking, or a thread that waits for it would burn a core while the host is ahead of the device.
    return torch.cuda.Event(blocking=True) if device.type == "cuda" else torch.cpu.Event()


def hand_over(ready: Any, tensors: Iterable[torch.Tensor], device: torch.device) -> None:
    """Let what this thread's current stream is given from now on read tensors that another stream makes.

    Call it in the thread that works on them: which stream is current differs between threads. `ready` is an event
    that the other stream has recorded behind its work on them.
    """
    stream = torch.get_device_module(device).current_stream(device)
    ready.wait(stream)
    for tensor in tensors:
        if tensor.is_cuda:  # once freed, its memory is not used again before this stream has done with it
            tensor.record_stream(stream)


def view(array: np.ndarray) -> torch.Tensor:
    """An array as a tensor of the same memory. Nothing may write to it: shared memory is read-only."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(array)


class Ring(Generic[Item]):
    """Iterates over (item, its leaves on the device), `depth` transfers ahead of the consumer.

    The tensors are valid until the next item is asked for, or `keep` items longer; then their memory is used
    again. Ask for items under the stream that works on them. The tensors have the leaves' shapes and dtypes and,
    where a leaf is dense, its strides. Nothing is allocated after the first item of each signature (shapes,
    dtypes, strides).

    The items are drawn in a thread, anew for each iteration. Closing the iterator ends the thread and closes the
    source's iterator, if that can be closed.

    Args:
        items: the source.
        leaves_of: the arrays (possibly read-only) and tensors of an item that are to be on the device. Dense
            pinned tensors are read by the transfer itself; all else is copied to pinned memory first.
        device: CUDA, or CPU.
        depth: transfers in flight or done, beside the item in use.
        keep: items that stay valid beside the newest; each takes a slot, on the host and on the device.
        on_copied: called in the thread, for each item, with `metrics.mark`s of the copy stream before and after
            the transfer.

    Attributes:
        device: where the tensors are; on CUDA, with its number.

    Raises:
        ConfigError: depth < 1, or the device is neither CUDA nor CPU. Iterating raises what the source raises,
            after the items that came before.
    """

    def __init__(
        self,
        items: Iterable[Item],
        leaves_of: Callable[[Item], Sequence[Leaf]],
        device: torch.device | str,
        depth: int = 2,
        keep: int = 0,
        on_copied: OnCopied | None = None,
    ) -> None:
        if depth < 1:
            raise ConfigError(f"depth is {depth}: the ring needs at least 1 slot beside the one in use")
        self.device = numbered(device)
        self._items, self._leaves_of, self._on_copied = items, leaves_of, on_copied
        self._depth, self._keep = depth, keep

    def __iter__(self) -> Generator[tuple[Item, tuple[torch.Tensor, ...]], None, None]:
        # Here and not in the thread: a DataLoader draws its seed, from the global generator, as it is iterated.
        source = iter(self._items)
        backend: Any = torch.get_device_module(self.device)
        filled: SimpleQueue[Any] = SimpleQueue()  # (item, slot, where the slot goes back to), or an error, or None
        room, stopped = threading.Semaphore(self._depth), threading.Event()
        arguments = (source, filled, room, stopped)
        thread = threading.Thread(target=self._fill, args=arguments, daemon=True, name="raypipe-ring")
        del source, arguments  # the thread's alone
        used: deque[tuple[_Slot, deque[_Slot]]] = deque()  # what is valid still, and where the slots go back to
        thread.start()
        try:
            while (entry := filled.get()) is not None:
                if isinstance(entry, BaseException):
                    raise entry
                room.release()
                item, slot, free = entry
                hand_over(slot.copied, slot.tensors, self.device)
                yield item, slot.tensors
                del item, entry  # the last one's host memory is not held while this waits for the next
                used.append((slot, free))
                if len(used) > self._keep:
                    slot, free = used.popleft()
                    slot.consumed.record(backend.current_stream(self.device))
                    free.append(slot)
        finally:
            entry = None  # an error's traceback holds this frame
            stopped.set()
            room.release()  # the thread may be waiting for it
            thread.join(CLOSE_S)

    def _fill(
        self, source: Iterator[Item], filled: SimpleQueue[Any], room: threading.Semaphore, stopped: threading.Event
    ) -> None:
        """Runs in a thread: items into slots, until the source ends or the consumer stops."""
        slots = _Slots(self.device, self._depth + self._keep + 1)
        try:
            torch.get_device_module(self.device).set_device(self.device)
            try:
                for item in source:
                    leaves = self._leaves_of(item)
                    free = slots.free_for(leaves)
                    room.acquire()
                    if stopped.is_set():
                        break
                    # At most depth - 1 others are filled and keep + 1 in use: of depth + keep + 1, one is free.
                    slot = free.popleft()
                    slot.fill(leaves, self._on_copied)
                    filled.put((item, slot, free))
                    del item, leaves
            finally:
                slots.wait()
                if hasattr(source, "close"):
                    source.close()
        except BaseException as error:
            filled.put(error)
        else:
            filled.put(None)


class _Slots:
    """`count` slots for each of the last MAX_SIGNATURES signatures."""

    def __init__(self, device: torch.device, count: int) -> None:
        self._device, self._count = device, count
        self._kept: OrderedDict[Any, tuple[list[_Slot], deque[_Slot]]] = OrderedDict()

    def free_for(self, leaves: Sequence[Leaf]) -> deque[_Slot]:
        """The free slots for such leaves, the one that was given back first in front."""
        signature = tuple(_signature(leaf) for leaf in leaves)
        if signature not in self._kept:
            if len(self._kept) == MAX_SIGNATURES:
                _, (oldest, _) = self._kept.popitem(last=False)
                for slot in oldest:
                    slot.wait()
            slots = [_Slot(leaves, self._device) for _ in range(self._count)]
            self._kept[signature] = slots, deque(slots)
        self._kept.move_to_end(signature)
        return self._kept[signature][1]

    def wait(self) -> None:
        """Until no transfer reads from host memory."""
        for slots, _ in self._kept.values():
            for slot in slots:
                slot.wait()


class _Slot:
    """Host memory and `tensors`, the device's, for the leaves of one signature; and the events that guard them."""

    def __init__(self, leaves: Sequence[Leaf], device: torch.device) -> None:
        self._device = device
        self._backend: Any = torch.get_device_module(device)
        self._stream = _copy_stream(device)
        self.copied, self.consumed = new_event(device), new_event(device)
        self._host: list[torch.Tensor | None] = []
        self._sources: list[torch.Tensor] = []
        tensors = []
        for leaf in leaves:
            like = torch.from_numpy(np.empty_like(leaf, subok=False)) if isinstance(leaf, np.ndarray) else leaf
            # Memory that was freed may still be read by what its stream was given before. Taken under the copy
            # stream, it is memory of that stream, and the transfers into it come after.
            with self._backend.stream(self._stream):
                tensors.append(torch.empty_like(like, device=device))
            # With strides unlike the device's, the transfer would go through another copy, unpinned.
            direct = like.is_cuda or (like.is_pinned() and like.stride() == tensors[-1].stride())
            self._host.append(None if direct else torch.empty_like(like, pin_memory=device.type == "cuda"))
        self.tensors = tuple(tensors)

    def fill(self, leaves: Sequence[Leaf], on_copied: OnCopied | None) -> None:
        """Start the transfer. Called by the thread."""
        self.wait()
        self._sources = [_staged(leaf, host) for leaf, host in zip(leaves, self._host, strict=True)]
        with self._backend.stream(self._stream):
            self.consumed.wait(self._stream)
            start = mark(self._device) if on_copied else None
            for tensor, source in zip(self.tensors, self._sources, strict=True):
                tensor.copy_(source, non_blocking=True)
            if on_copied:
                on_copied(start, mark(self._device))
            self.copied.record(self._stream)

    def wait(self) -> None:
        """Until the transfer is done: then its sources may be changed, and freed."""
        self.copied.synchronize()
        self._sources = []


def _staged(leaf: Leaf, host: torch.Tensor | None) -> torch.Tensor:
    """What the transfer reads: the host side, filled, or the leaf itself where there is none."""
    if isinstance(leaf, np.ndarray):
        assert host is not None
        np.copyto(host.numpy(), leaf)  # torch would warn of read-only arrays
        return host
    return leaf.detach() if host is None else host.copy_(leaf.detach())


def _signature(leaf: Leaf) -> tuple[Any, ...]:
    if isinstance(leaf, np.ndarray):
        return leaf.dtype, leaf.shape, leaf.strides
    return leaf.dtype, leaf.shape, leaf.stride(), leaf.device, leaf.is_pinned()


@cache
def _copy_stream(device: torch.device) -> Any:
    """One for all rings, since the allocator keeps freed memory for the stream that it was taken under."""
    return new_stream(device)
