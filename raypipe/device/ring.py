"""A ring of slots between host and device: transfers run beside the work on what is in use. Knows torch, not Ray.

    leaves of an item → host side of a slot (pinned) → copy stream → device side → compute stream

Each slot has events. `copied`: its transfer is done, so compute may read the device side and the host
may refill the host side. `consumed`: compute has passed its last use, so the copy stream may overwrite the
device side. Of `depth` + 1 slots one is in use and `depth` are filled or being filled, and `keep` more hold what
came before:

    thread      fill a free slot's host side once `copied`; on the copy stream: transfer once `consumed`
    consumer    on the compute stream: go on once `copied`, use; then record `consumed` and free the slot

A slot is one piece of memory on each side, in which the leaves of an item lie one behind the other. It serves
items of any shapes that fit, and one transfer moves all leaves. Where an item is larger than all before it, the
slots grow.

On CPU the same code runs over plain memory, and over torch.cpu's streams and events, which do nothing.
`tests/device/test_schedules.py` runs it on a simulated CUDA device, in any order that CUDA allows.
"""

from __future__ import annotations

import threading
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
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

# Bytes. Each leaf begins at a multiple, as what torch itself takes on the device does.
_ALIGNED = 512
# Layouts are remembered for this many signatures (shapes, dtypes, strides). A new one costs some 50 µs.
_MAX_LAYOUTS = 256
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


def hand_over(ready: Any, tensors: Iterable[torch.Tensor], device: torch.device) -> Any:
    """Let what this thread's current stream is given from now on read tensors that another stream makes.

    Call it in the thread that works on them: which stream is current differs between threads. `ready` is an event
    that the other stream has recorded behind its work on them. Returns the current stream.

    Raises:
        ConfigError: the stream captures a CUDA graph, which would read the memory of this one batch for ever.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise ConfigError(
            "a batch was asked for while a CUDA graph is captured: ask for it before, and copy it into the "
            "tensors that the graph reads (docs/gpu.md)"
        )
    stream = torch.get_device_module(device).current_stream(device)
    ready.wait(stream)
    for tensor in tensors:
        if tensor.is_cuda:  # once freed, its memory is not used again before this stream has done with it
            tensor.record_stream(stream)
    return stream


def view(array: np.ndarray) -> torch.Tensor:
    """An array as a tensor of the same memory. Nothing may write to it: shared memory is read-only."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(array)


class Ring(Generic[Item]):
    """Iterates over (item, its leaves on the device), `depth` transfers ahead of the consumer.

    The tensors are valid until the next item is asked for, or `keep` items longer; then their memory is used
    again. Ask for items under the stream that works on them; it may be a different one each time. The tensors have
    the leaves' shapes and dtypes and, where a leaf is dense, its strides. Items of all shapes share the slots:
    nothing is allocated once each slot has held the largest item.

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
        staged: called in the thread with each item whose leaves were copied to pinned memory; gives what is handed
            out in its place, such as the item without its leaves, whose memory then goes at once. None = the item
            is handed out as it is, and so holds its leaves until the consumer lets go of it.

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
        staged: Callable[[Item], Item] | None = None,
    ) -> None:
        if depth < 1:
            raise ConfigError(f"depth is {depth}: the ring needs at least 1 slot beside the one in use")
        self.device = numbered(device)
        self._items, self._leaves_of, self._on_copied, self._staged = items, leaves_of, on_copied, staged
        self._depth, self._keep = depth, keep

    def __iter__(self) -> Generator[tuple[Item, tuple[torch.Tensor, ...]], None, None]:
        # Here and not in the thread: a DataLoader draws its seed, from the global generator, as it is iterated.
        source = iter(self._items)
        backend: Any = torch.get_device_module(self.device)
        filled: SimpleQueue[Any] = SimpleQueue()  # (item, slot), or an error, or None
        free: deque[_Slot] = deque()
        room, stopped = threading.Semaphore(self._depth), threading.Event()
        arguments = (source, filled, free, room, stopped)
        thread = threading.Thread(target=self._fill, args=arguments, daemon=True, name="raypipe-ring")
        del source, arguments  # the thread's alone
        used: deque[tuple[_Slot, Any]] = deque()  # what is valid still, and the stream that it was handed to
        thread.start()
        try:
            while (entry := filled.get()) is not None:
                if isinstance(entry, BaseException):
                    raise entry
                room.release()
                item, slot = entry
                used.append((slot, hand_over(slot.copied, [slot.memory], self.device)))
                yield item, slot.tensors
                del item, entry  # the last one's host memory is not held while this waits for the next
                if len(used) > self._keep:
                    slot, stream = used.popleft()
                    # The work on it may have gone on under the stream that is current now.
                    slot.release(stream, backend.current_stream(self.device))
                    free.append(slot)
        finally:
            entry = None  # an error's traceback holds this frame
            stopped.set()
            room.release()  # the thread may be waiting for it
            thread.join(CLOSE_S)

    def _fill(
        self,
        source: Iterator[Item],
        filled: SimpleQueue[Any],
        free: deque[_Slot],
        room: threading.Semaphore,
        stopped: threading.Event,
    ) -> None:
        """Runs in a thread: items into slots, until the source ends or the consumer stops."""
        try:
            torch.get_device_module(self.device).set_device(self.device)
            slots = _Slots(self.device, self._depth + self._keep + 1)
            free.extend(slots)
            try:
                for item in source:
                    leaves = self._leaves_of(item)
                    layout = slots.layout_for(leaves)
                    room.acquire()
                    if stopped.is_set():
                        break
                    # At most depth - 1 others are filled and keep + 1 in use: of depth + keep + 1, one is free.
                    slot = free.popleft()
                    slot.fill(leaves, layout, self._on_copied)
                    del leaves
                    if self._staged is not None:
                        item = self._staged(item)
                    filled.put((item, slot))
                    del item
            finally:
                slots.wait()
                if hasattr(source, "close"):
                    source.close()
        except BaseException as error:
            filled.put(error)
        else:
            filled.put(None)


@dataclass(frozen=True)
class _Place:
    """Of one leaf in a slot; `at` is its offset in bytes, the same on both sides."""

    at: int
    num_bytes: int
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]

    def of(self, memory: torch.Tensor) -> torch.Tensor:
        flat = memory[self.at : self.at + self.num_bytes].view(self.dtype)
        # With a version of its own: what is written to one leaf is no change of the others to autograd.
        return flat.as_strided(self.shape, self.stride).data


@dataclass(frozen=True)
class _Layout:
    """Where the leaves of one signature lie in a slot, in their order.

    Attributes:
        places: of each leaf.
        direct: whether the transfer reads the leaf itself. All others lie in front, on the host as on the device.
        host_bytes: of those.
        device_bytes: of all.
    """

    places: tuple[_Place, ...]
    direct: tuple[bool, ...]
    host_bytes: int
    device_bytes: int

    @classmethod
    def of(cls, leaves: Sequence[Leaf]) -> _Layout:
        likes = [
            torch.from_numpy(np.empty_like(leaf, subok=False)) if isinstance(leaf, np.ndarray) else leaf
            for leaf in leaves
        ]
        dense = [torch.empty_like(like, device="meta") for like in likes]
        # With strides unlike the device's, the transfer would go through another copy, unpinned.
        direct = [
            like.is_cuda or (like.is_pinned() and like.stride() == there.stride())
            for like, there in zip(likes, dense, strict=True)
        ]
        places, at, host_bytes = dict[int, _Place](), 0, 0
        for number in sorted(range(len(leaves)), key=lambda number: direct[number]):
            there = dense[number]
            num_bytes = there.numel() * there.element_size()
            places[number] = _Place(at, num_bytes, there.dtype, there.shape, there.stride())
            at += -(-num_bytes // _ALIGNED) * _ALIGNED
            host_bytes = host_bytes if direct[number] else at
        return cls(tuple(places[number] for number in range(len(leaves))), tuple(direct), host_bytes, at)


class _Slots:
    """`count` slots, and their pinned memory."""

    def __init__(self, device: torch.device, count: int) -> None:
        self._device, self._slots = device, [_Slot(device) for _ in range(count)]
        self._layouts: dict[Any, _Layout] = {}
        self._host_bytes = 0

    def __iter__(self) -> Iterator[_Slot]:
        return iter(self._slots)

    def layout_for(self, leaves: Sequence[Leaf]) -> _Layout:
        """Where such leaves lie; the host side of each slot has room for them from now on."""
        signature = tuple(_signature(leaf) for leaf in leaves)
        layout = self._layouts.get(signature)
        if layout is None:
            layout = _Layout.of(leaves)
            if layout.host_bytes > self._host_bytes:
                self._pin(layout.host_bytes)
            if len(self._layouts) == _MAX_LAYOUTS:
                self._layouts.clear()
            self._layouts[signature] = layout
        return layout

    def _pin(self, num_bytes: int) -> None:
        self.wait()
        for slot in self._slots:
            slot.pin(None)
        parts: list[torch.Tensor] = []
        for num in shares(len(self._slots), num_bytes):
            piece = torch.empty(num * num_bytes, dtype=torch.uint8, pin_memory=self._device.type == "cuda")
            parts += piece.split(num_bytes)
        for slot, part in zip(self._slots, parts, strict=True):
            slot.pin(part)
        self._host_bytes = num_bytes

    def wait(self) -> None:
        """Until no transfer reads from host memory."""
        for slot in self._slots:
            slot.wait()


def shares(count: int, num_bytes: int) -> list[int]:
    """How many of `count` slots share each piece of pinned memory, so that the pieces are smallest in all.

    torch rounds each piece up to a power of two: three slots of 36.8 MiB take 3 x 64 MiB, or 128 MiB as one.
    """
    best: list[tuple[int, int, list[int]]] = [(0, 0, [])]  # of 0, 1, 2, … slots: bytes, number of pieces, pieces
    for slots in range(1, count + 1):
        options = []
        for share in range(1, slots + 1):
            rest_bytes, num, rest = best[slots - share]
            rounded = 1 << (share * num_bytes - 1).bit_length()
            options.append((rest_bytes + rounded, num + 1, [*rest, share]))
        best.append(min(options))
    return best[count][2]


class _Slot:
    """Memory on both sides, and the events that guard it.

    Attributes:
        memory: uint8 (n,), on the device.
        tensors: the leaves in it.
        copied: see above.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._backend: Any = torch.get_device_module(device)
        self._stream = _copy_stream(device)
        self.copied = new_event(device)
        self._consumed = new_event(device), new_event(device)
        self.memory = torch.empty(0, dtype=torch.uint8, device=device)
        self.tensors: tuple[torch.Tensor, ...] = ()
        self._host: torch.Tensor | None = None
        # The leaves in it; None = the transfer reads the leaf itself.
        self._on_host: tuple[torch.Tensor | None, ...] = ()
        self._layout: _Layout | None = None
        self._sources: list[torch.Tensor] = []

    def pin(self, host: torch.Tensor | None) -> None:
        """Use this share of pinned memory. No transfer reads from the one before."""
        self._host, self._on_host, self._layout = host, (), None

    def _lay_out(self, layout: _Layout) -> None:
        host, places, self.tensors = self._host, layout.places, ()
        if layout.device_bytes > len(self.memory):
            # Memory that was freed may still be read by what its stream was given before. Taken under the copy
            # stream, it is memory of that stream, and the transfers into it come after.
            with self._backend.stream(self._stream):
                del self.memory
                self.memory = torch.empty(layout.device_bytes, dtype=torch.uint8, device=self._device)
        self.tensors = tuple(place.of(self.memory) for place in places)
        self._on_host = tuple(
            None if direct or host is None else place.of(host)
            for place, direct in zip(places, layout.direct, strict=True)
        )
        self._layout = layout

    def fill(self, leaves: Sequence[Leaf], layout: _Layout, on_copied: OnCopied | None) -> None:
        """Start the transfer. Called by the thread."""
        self.wait()
        if layout is not self._layout:
            self._lay_out(layout)
        copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        for leaf, tensor, host in zip(leaves, self.tensors, self._on_host, strict=True):
            if host is not None:
                _stage(leaf, host)
            else:
                assert isinstance(leaf, torch.Tensor)
                copies.append((tensor, leaf.detach()))
        if self._host is not None and layout.host_bytes:
            copies.append((self.memory[: layout.host_bytes], self._host[: layout.host_bytes]))
        with self._backend.stream(self._stream):
            for event in self._consumed:
                event.wait(self._stream)
            start = mark(self._device) if on_copied else None
            for to, source in copies:
                to.copy_(source, non_blocking=True)
            if on_copied:
                on_copied(start, mark(self._device))
            self.copied.record(self._stream)
        self._sources = [source for _, source in copies]

    def release(self, *streams: Any) -> None:
        """The work on it that two streams were given so far is the last."""
        for event, stream in zip(self._consumed, streams, strict=True):
            event.record(stream)

    def wait(self) -> None:
        """Until the transfer is done: then its sources may be changed, and freed."""
        self.copied.synchronize()
        self._sources = []


def _stage(leaf: Leaf, host: torch.Tensor) -> None:
    """Copy a leaf to the host side."""
    if isinstance(leaf, np.ndarray):
        np.copyto(host.numpy(), leaf)  # torch would warn of read-only arrays
    else:
        host.copy_(leaf.detach())


def _signature(leaf: Leaf) -> tuple[Any, ...]:
    if isinstance(leaf, np.ndarray):
        return leaf.dtype, leaf.shape, leaf.strides
    return leaf.dtype, leaf.shape, leaf.stride(), leaf.device, leaf.is_pinned()


@cache
def _copy_stream(device: torch.device) -> Any:
    """One for all rings, since the allocator keeps freed memory for the stream that it was taken under."""
    return new_stream(device)
