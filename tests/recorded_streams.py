"""A recorder of streams, for code that runs on the CPU as it would on CUDA, and a judge of what was recorded.

torch.cpu has the streams and events of torch.cuda, and they do nothing. Here they tell torch's sanitizer for CUDA
what they would do, and so does each operation: what it reads and writes, and under which stream. The sanitizer
then says whether an operation touches memory that another stream, for all that it was told, may still be at work
on. It knows nothing of the allocator: `handed_over` tells which tensors were said to be in use by which stream.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.cuda._sanitizer import FACTORY_FUNCTION_REGEX, ArgumentHandler, EventHandler
from torch.utils._python_dispatch import TorchDispatchMode

import raypipe.device.ring


class Recorder:
    """Stands in for torch.cpu's streams and events while a test runs.

    Attributes:
        errors: of the sanitizer, one for each access that nothing orders after the one before it.
        handed_over: (address, number of the stream) of each tensor that a stream was said to use.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.errors: list[Any] = []
        self.handed_over: set[tuple[int, int]] = set()
        self._sanitizer, self._lock, self._numbers = EventHandler(), threading.RLock(), itertools.count(1)
        self._thread, self._kept = threading.local(), list[Any]()
        self._default = _Stream(self, 0)
        monkeypatch.setattr(torch.cpu, "Stream", lambda *_: self._new_stream())
        monkeypatch.setattr(torch.cpu, "Event", lambda *_: _Event(self, next(self._numbers)))
        monkeypatch.setattr(torch.cpu, "stream", self.stream)
        monkeypatch.setattr(torch.cpu, "current_stream", self.current)
        monkeypatch.setattr("raypipe.device.ring._copy_stream", functools.cache(raypipe.device.ring.new_stream))
        self._hand_over = raypipe.device.ring.hand_over
        for module in ("ring", "prefetcher", "device_decode"):
            monkeypatch.setattr(f"raypipe.device.{module}.hand_over", self._noted)

    def _new_stream(self) -> _Stream:
        stream = _Stream(self, next(self._numbers))
        self.tell("stream_creation", stream.number)
        return stream

    def _noted(self, ready: Any, tensors: Any, device: torch.device) -> None:
        self._hand_over(ready, tensors, device)
        self.handed_over |= {(tensor.data_ptr(), self.current(device).number) for tensor in tensors}

    def tell(self, what: str, *numbers: int) -> None:
        with self._lock:
            getattr(self._sanitizer, f"_handle_{what}")(*numbers)

    def current(self, device: Any = None) -> _Stream:
        """As on CUDA each thread has its own, and begins with the default stream."""
        return getattr(self._thread, "stream", self._default)

    @contextlib.contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        before, self._thread.stream = self.current(), stream
        yield
        self._thread.stream = before

    def operations(self) -> TorchDispatchMode:
        """To be entered in each thread whose operations are recorded."""
        return _Operations(self)

    def launch(self, func: Any, args: Any, kwargs: Any) -> Any:
        factory = bool(FACTORY_FUNCTION_REGEX.match(func._schema.name))
        arguments = _Arguments()
        arguments.parse_inputs(func._schema, args, kwargs, is_factory=factory)
        outputs = func(*args, **kwargs)
        arguments.parse_outputs(func._schema, outputs, is_factory=factory)
        with self._lock:
            self._kept.append((args, kwargs, outputs))  # or other tensors would come to lie at the same addresses
            self.errors += self._sanitizer._handle_kernel_launch(
                self.current().number,
                arguments.dataptrs_read - arguments.dataptrs_written,
                arguments.dataptrs_written,
                arguments.outputs,
                func._schema,
                arguments.tensor_aliases,
            )
        return outputs


class _Stream:
    def __init__(self, recorder: Recorder, number: int) -> None:
        self._recorder, self.number = recorder, number

    def synchronize(self) -> None:
        self._recorder.tell("stream_synchronization", self.number)


class _Event:
    def __init__(self, recorder: Recorder, number: int) -> None:
        self._recorder, self._number = recorder, number
        recorder.tell("event_creation", number)

    def record(self, stream: Any = None) -> None:
        self._recorder.tell("event_record", self._number, (stream or self._recorder.current()).number)

    def wait(self, stream: Any = None) -> None:
        self._recorder.tell("event_wait", self._number, (stream or self._recorder.current()).number)

    def synchronize(self) -> None:
        self._recorder.tell("event_synchronization", self._number)


class _Operations(TorchDispatchMode):
    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._recorder.launch(func, args, kwargs or {})


class _Arguments(ArgumentHandler):
    """Of tensors on the CPU, where the sanitizer's own looks at those on CUDA."""

    def _handle_argument(
        self, value: Any, is_write: bool, metadata_only: bool, name: str | None = None, is_output: bool = False
    ) -> None:
        if isinstance(value, torch.Tensor) and value.numel():
            address = value.untyped_storage().data_ptr()
            if is_write:
                self.dataptrs_written.add(address)
            elif not metadata_only:
                self.dataptrs_read.add(address)
            self.tensor_aliases.setdefault(address, []).append(name or "")
            if is_output:
                self.outputs.add(address)
