"""What rank 0 does beside the steps, each in a thread: it writes checkpoints, and looks for a request to stop.

Neither thread calls Ray, so each may outlast a Ray that is shut down, and none waits for the device in a step.

Ray Train's own thread (`ray.train.report(checkpoint_upload_mode=ASYNC)`, alpha) does not write checkpoints here:
the steps would wait until a local folder is written, nothing is synced to the disk, and Ray Train resumes from it
only once its controller has noted it in a file of its own, some time after the upload. A job that is killed in
between would lose a checkpoint that is whole.
"""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Callable
from typing import Any

import torch

from raypipe.device.ring import new_event
from raypipe.storage.filesystem import is_remote
from raypipe.storage.patience import impatient
from raypipe.streaming.stateful import saved
from raypipe.train.run_folder import stop_requested

logger = logging.getLogger(__name__)

_ALIGN = 64  # bytes; of the largest element that torch has, and of a cache line
# Between two looks for a request to stop: in object storage, each is a request that is paid for.
_LOOK_S, _LOOK_REMOTE_S = 1.0, 3.0


class HostCopy:
    """A copy of a state in host memory; the next one takes its place.

    Tensors that share memory share that of their copies, so that what is saved of a copy is what would be saved of
    the state, byte for byte. All of them lie in one block, which is kept, and is pinned where any is of CUDA: to
    make and pin such a block takes longer than to copy into it.
    """

    def __init__(self) -> None:
        self._block = torch.empty(0, dtype=torch.uint8)
        self._events: list[Any] = []

    def take(self, state: Any) -> Any:
        """Copy dicts, lists and tuples of tensors; of anything else a deep copy.

        What changes the state later, on the current stream, comes after the copy. It is whole after `wait`.
        """
        storages: dict[int, torch.UntypedStorage] = {}

        def find(tensor: torch.Tensor) -> None:
            storage = tensor.untyped_storage()
            storages.setdefault(storage._cdata, storage)

        _mapped(state, find)
        devices = {storage.device for storage in storages.values() if storage.device.type == "cuda"}
        sizes = [-(-storage.nbytes() // _ALIGN) * _ALIGN for storage in storages.values()]
        if self._block.numel() != sum(sizes):
            self._block = torch.empty(0, dtype=torch.uint8)  # before there is another one
            self._block = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=bool(devices))
        copies, begin = {}, 0
        for (key, storage), size in zip(storages.items(), sizes, strict=True):
            # By way of numpy each is a storage of its own, which is what torch.save writes.
            copies[key] = torch.from_numpy(self._block.numpy()[begin : begin + storage.nbytes()])
            source = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # type: ignore[call-overload]
            copies[key].copy_(source, non_blocking=True)
            begin += size

        def copied(tensor: torch.Tensor) -> torch.Tensor:
            storage = copies[tensor.untyped_storage()._cdata].untyped_storage()
            empty = torch.empty(0, dtype=tensor.dtype)
            return empty.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())  # type: ignore[call-overload]

        result = _mapped(state, copied)
        for device in devices:
            event = new_event(device)
            event.record(torch.cuda.current_stream(device))
            self._events.append(event)
        return result

    def wait(self) -> None:
        """Until the copy is whole."""
        while self._events:
            self._events.pop().synchronize()


def _mapped(value: Any, function: Callable[[torch.Tensor], Any]) -> Any:
    """A state with `function` of each tensor in its place; dicts keep their type and attributes (`_metadata`)."""
    if isinstance(value, torch.Tensor):
        # What is more than a view of bytes is copied as torch does it, for which the host waits.
        is_plain = type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout is torch.strided
        if not is_plain or value.is_quantized or value.is_conj() or value.is_neg():
            return value.detach().to("cpu", copy=True)
        return function(value.detach())
    if isinstance(value, dict):
        result = copy.copy(value)
        result.update((key, _mapped(each, function)) for key, each in value.items())
        return result
    if type(value) in (list, tuple):
        return type(value)(_mapped(each, function) for each in value)
    return copy.deepcopy(value)


class CheckpointWriter:
    """Serialises and writes states, in a thread, one at a time.

    An error of the thread's is raised by the next call of any method, once.
    """

    def __init__(self) -> None:
        self._copy = HostCopy()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    @property
    def is_writing(self) -> bool:
        """Whether the thread is at work."""
        return self._thread is not None and self._thread.is_alive()

    def save(self, state: Any, write: Callable[[memoryview], None]) -> None:
        """Take a state as it is now, and let the thread write it; waits for the one before.

        Args:
            state: what torch.save takes, and `HostCopy`.
            write: puts the bytes where they belong; called in the thread.
        """
        self.wait()
        taken = self._copy.take(state)
        self._thread = threading.Thread(
            target=self._write, args=(taken, write), daemon=True, name="raypipe-checkpoint"
        )
        self._thread.start()

    def check(self) -> None:
        """Raise the error of a thread that has failed."""
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def wait(self) -> None:
        """Until nothing is being written."""
        if self._thread:
            self._thread.join()
            self._thread = None
        self.check()

    def _write(self, state: Any, write: Callable[[memoryview], None]) -> None:
        try:
            self._copy.wait()
            write(saved(state))
        except BaseException as error:
            self._error = error


class StopPoll:
    """Looks for a request to stop a run, in a thread, from now until `close`.

    Args:
        run_uri: the run's folder.

    Attributes:
        asked: whether there was one.
    """

    def __init__(self, run_uri: str) -> None:
        self.asked = False
        self._run_uri, self._ended = run_uri, threading.Event()
        self._every_s = _LOOK_REMOTE_S if is_remote(run_uri) else _LOOK_S
        self._thread = threading.Thread(target=self._look, daemon=True, name="raypipe-stop-poll")
        self._thread.start()

    def close(self) -> None:
        """End the thread; one that waits for storage is left to end by itself."""
        self._ended.set()
        self._thread.join(self._every_s)

    def _look(self) -> None:
        has_failed = False
        while not self._ended.is_set():
            try:
                with impatient():
                    self.asked = stop_requested(self._run_uri)
            except Exception as error:  # a run does not end because nobody can ask it to
                if not has_failed:
                    logger.warning("cannot see whether %s was asked to stop, and try on: %s", self._run_uri, error)
                has_failed = True
            if self.asked:
                return
            self._ended.wait(self._every_s)
