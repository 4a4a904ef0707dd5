"""A ring of slots between host and device: transfers overlap with the work on the slot in use. Imports torch,
not Ray.

    arrays of an item → host side of a slot (pinned) → copy stream → device side → compute stream

Each slot has events. `copied`: its transfer is done, so compute may read the device side and the host
may refill the host side. `consumed`: compute has passed its last use, so the copy stream may overwrite the
device side. One of `depth` + 1 slots is in use and `depth` are filled or being filled; `keep` more hold earlier
items:

    thread      fill a free slot's host side once `copied`; on the copy stream: transfer once `consumed`
    consumer    on the compute stream: continue once `copied`; then record `consumed` and free the slot

A slot is one piece of memory on each side, with the arrays of an item one after the other. It serves
items of any shapes that fit, and one transfer moves all of them. A slot grows for an item that does not fit.

On CPU the same code runs over plain memory, and over torch.cpu's streams and events, which do nothing.
With RAYPIPE_DEBUG a slot is overwritten as it is freed, so that a kept item is found.
`tests/device/test_schedules.py` runs it on a simulated CUDA device, in any order that CUDA allows.
"""

from __future__ import annotations

import threading
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

import numpy as np
import torch

from raypipe.environment import variable
from raypipe.errors import ConfigError
from raypipe.metrics.timing import mark
from raypipe.metrics.tracer import traced

Item = TypeVar("Item")
OnCopied = Callable[[Any, Any], None]

# Bytes. Each array begins at a multiple, as what torch itself takes on the device does.
_ALIGNED = 512
# A source that is making an item cannot be interrupted; after this its thread is left to end by itself.
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
    if device.type == "cuda":
        return torch.cuda.Stream(device)
    return torch.cpu.Stream()


def new_event(device: torch.device) -> Any:
    # Blocking, or a thread that waits for it would burn a core while the host is ahead of the device.
    if device.type == "cuda":
        return torch.cuda.Event(blocking=True)
    return torch.cpu.Event()


def hand_over(ready: Any, tensors: Iterable[torch.Tensor], device: torch.device) -> Any:
    """Let later work on this thread's current stream read tensors that another stream makes.

    Call it in the thread that works on them: which stream is current differs between threads. `ready` is an event
    that the other stream has recorded behind its work on them. Returns the current stream.

    Raises:
        ConfigError: the stream captures a CUDA graph, which would read this batch's memory forever.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise ConfigError(
            "a batch was asked for while a CUDA graph is captured: ask for it before, and copy it into the "
            "tensors that the graph reads (docs/performance.md)"
        )
    stream = torch.get_device_module(device).current_stream(device)
    ready.wait(stream)
    for tensor in tensors:
        if tensor.is_cuda:  # once freed, its memory is not used again before this stream has done with it
            tensor.record_stream(stream)
    return stream


def _is_debugging() -> bool:
    return variable("RAYPIPE_DEBUG") not in ("", "0")


def uses_ring(device: torch.device) -> bool:
    """Return whether batches go to a device through a ring: on CPU only while debugging, to behave as on CUDA."""
    return device.type == "cuda" or _is_debugging()


def view(array: np.ndarray) -> torch.Tensor:
    """An array as a tensor of the same memory. Nothing may write to it: shared memory is read-only."""
    _have_torch_warn()
    if torch.is_warn_always_enabled():
        return _view_quietly(array)
    return torch.from_numpy(array)


@cache
def _have_torch_warn() -> None:
    """Have torch warn of an array that is not writable, which it does once: a filter takes as long as a view."""
    _view_quietly(np.frombuffer(b"1", np.uint8))


def _view_quietly(array: np.ndarray) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message="The given NumPy array is not writable"
        )
        return torch.from_numpy(array)


@dataclass(eq=False)
class Ring(Generic[Item]):
    """Iterates over (item, its arrays on the device), `depth` transfers ahead of the consumer.

    The tensors are valid until the next item is requested, or `keep` items longer; then their memory is reused.
    Request items under the stream that works on them; it may be a different one each time. Items of all shapes
    share the slots: nothing is allocated once each slot has held the largest item.

    Each iteration draws the items again, in a thread. Closing the iterator ends the thread and closes the
    source's iterator, if that can be closed.

    Attributes:
        items: the source.
        arrays_of: returns the arrays of an item to move to the device, possibly read-only.
        device: CUDA, or CPU, where the tensors are; on CUDA, with its number.
        depth: transfers in flight or done, besides the item in use; at least 1.
        keep: items that stay valid besides the newest; each takes a slot, on the host and on the device.
        on_copied: called in the thread, for each item, with `metrics.mark`s of the copy stream before and after
            the transfer.
        staged: called in the thread with each item whose arrays were copied to pinned memory; returns the item
            to hand out instead, such as one without its arrays, whose memory is then freed at once.
        copied: event behind the transfer of the newest item, for another stream; None before the first.

    Raises:
        ConfigError: the device is neither CUDA nor CPU. Iterating raises what the source raises,
            after the items that came before.
    """

    items: Iterable[Item]
    arrays_of: Callable[[Item], Sequence[np.ndarray]]
    device: torch.device
    depth: int = 2
    keep: int = 0
    on_copied: OnCopied | None = None
    staged: Callable[[Item], Item] = lambda item: item
    copied: Any = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.device = numbered(self.device)

    def __iter__(self) -> Generator[tuple[Item, tuple[torch.Tensor, ...]], None, None]:
        # Here and not in the thread: a DataLoader draws its seed, from the global generator, as it is iterated.
        source = iter(self.items)
        backend: Any = torch.get_device_module(self.device)
        filled: SimpleQueue[Any] = SimpleQueue()  # (item, slot), or an error, or None
        free: deque[_Slot] = deque()
        room = threading.Semaphore(self.depth)
        stopped = threading.Event()
        arguments = (source, filled, free, room, stopped)
        thread = threading.Thread(
            target=self._fill, args=arguments, daemon=True, name="raypipe-ring"
        )
        del source, arguments  # used only by the thread
        # items still valid, and the stream that each was handed to
        used: deque[tuple[_Slot, Any]] = deque()
        thread.start()
        try:
            while (entry := filled.get()) is not None:
                if isinstance(entry, BaseException):
                    raise entry
                room.release()
                host_item, slot = entry
                self.copied = slot.copied
                used.append((slot, hand_over(slot.copied, [slot.memory], self.device)))
                yield host_item, slot.tensors
                # the last one's host memory is not held while this waits for the next
                del (
                    host_item,
                    entry,
                )
                if len(used) > self.keep:
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
            free.extend(_Slot(self.device) for _ in range(self.depth + self.keep + 1))
            try:
                for host_item in source:
                    arrays = self.arrays_of(host_item)
                    room.acquire()
                    if stopped.is_set():
                        break
                    # At most depth - 1 others are filled and keep + 1 in use: of depth + keep + 1, one is free.
                    slot = free.popleft()
                    with traced("ring") as filling:
                        slot.fill(arrays, self.on_copied)
                        place = getattr(host_item, "position", None)
                        if filling is not None and place:
                            filling.append(place)
                    del arrays
                    host_item = self.staged(host_item)
                    filled.put((host_item, slot))
                    del host_item
            finally:
                if hasattr(source, "close"):
                    source.close()
        except BaseException as error:
            filled.put(error)
        else:
            filled.put(None)


class _Slot:
    """Memory on both sides, and the events that guard it.

    Attributes:
        memory: uint8 (n,), on the device.
        tensors: the arrays in it.
        copied: see above.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._backend: Any = torch.get_device_module(device)
        self._stream = _copy_stream(device)
        self.copied = new_event(device)
        self._consumed = new_event(device), new_event(device)
        self._host, self.memory = (
            torch.empty(0, dtype=torch.uint8, device=side) for side in ("cpu", device)
        )
        self.tensors: tuple[torch.Tensor, ...] = ()

    def fill(self, arrays: Sequence[np.ndarray], on_copied: OnCopied | None) -> None:
        """Start the transfer. Called by the thread."""
        starts = [
            0,
            *accumulate(-(-array.nbytes // _ALIGNED) * _ALIGNED for array in arrays),
        ]
        num_bytes = starts.pop()
        self.tensors = ()
        self.copied.synchronize()  # the host side has been read
        if num_bytes > len(self.memory):
            self._host = torch.empty(
                num_bytes, dtype=torch.uint8, pin_memory=self._device.type == "cuda"
            )
            # Memory that was freed may still be read by what its stream was given before. Taken under the copy
            # stream, it is memory of that stream, and the transfers into it come after.
            with self._backend.stream(self._stream):
                del self.memory
                self.memory = torch.empty(
                    num_bytes, dtype=torch.uint8, device=self._device
                )
        tensors = []
        for start, array in zip(starts, arrays, strict=True):
            tensors.append(_part(self.memory, start, array))
            # torch would warn of read-only arrays
            np.copyto(_part(self._host, start, array).numpy(), array)
        self.tensors = tuple(tensors)
        with self._backend.stream(self._stream):
            for event in self._consumed:
                event.wait(self._stream)
            began = mark(self._device) if on_copied else None
            self.memory[:num_bytes].copy_(self._host[:num_bytes], non_blocking=True)
            if on_copied:
                on_copied(began, mark(self._device))
            self.copied.record(self._stream)

    def release(self, *streams: Any) -> None:
        """The work on it that two streams were given so far is the last."""
        for event, stream in zip(self._consumed, streams, strict=True):
            event.record(stream)
        if _is_debugging():
            self._spoil()

    def _spoil(self) -> None:
        """Overwrite a released slot on the current stream, and leave its memory to whoever kept its tensors."""
        for event in self._consumed:
            hand_over(event, [self.memory], self._device)
        self.memory.fill_(255)  # -1 in signed integers, and NaN in floats
        self.memory = torch.empty(0, dtype=torch.uint8, device=self._device)
        self.tensors = ()


def _part(memory: torch.Tensor, start: int, like: np.ndarray) -> torch.Tensor:
    """The bytes from `start` on as an array's dtype and shape."""
    dtype = torch.from_numpy(np.empty(0, like.dtype)).dtype
    # Separate versions: autograd does not see a write to one tensor as a change of the others.
    return memory[start : start + like.nbytes].view(dtype).view(like.shape).data


@cache
def _copy_stream(device: torch.device) -> Any:
    """Return the one copy stream of all rings: the allocator keeps freed memory for the stream that allocated
    it."""
    return new_stream(device)
