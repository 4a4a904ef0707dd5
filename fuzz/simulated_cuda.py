"""A CUDA device of one's own, in this process: streams, events, the allocator, and tensors on it.

A stream is a queue. What is launched waits in it, and runs when the seed says so: behind what was launched on the
same stream before, and behind the events that the stream was told to wait for. Nothing else is ordered. An
operation reads and writes real memory when it runs, so what runs too early or too late leaves wrong values.

    event     `record` marks the end of a stream as it is then; `wait` and `synchronize` are for what was recorded
              last before them, and for nothing if nothing was.
    memory    belongs to the stream that was current when it was first taken. Freed, it serves the next tensor of
              that stream at once, whatever else is still to read it; streams that were named by `record_stream`
              are waited for.
    transfer  from pinned memory: read when it runs. From other memory: read at once, as CUDA promises.
    graph     while one is captured, no thread may take memory or wait for the device; in the mode "thread_local",
              not the thread that captures.

All of this is told to torch's sanitizer for CUDA as well, which judges the order alone: an access that nothing
orders behind the one before it is an error in every schedule. Here memory keeps its number when it is freed and
taken anew, so that the sanitizer also judges who uses it then.
"""

from __future__ import annotations

import contextlib
import functools
import random
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.cuda._sanitizer
from simulated_host import Host
from torch.cuda._sanitizer import EventHandler
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_leaves

CUDA = torch.device("cuda", 0)
_ROUND = 512  # bytes, as torch's allocator does


class Cuda:
    """The simulated device, and the threads that use it.

    Attributes:
        host: the threads.
        errors: of the sanitizer.
        rng: draws the schedule; a program under test may draw its own form from it first.
        num_fresh, num_bytes: blocks of device memory that were not there before, and the size of all.
        tensor_type: of tensors on the device.
    """

    tensor_type: type[Tensor]

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.errors: list[Any] = []
        self.num_fresh = self.num_bytes = 0
        self._sanitizer, self._streams = EventHandler(), list[Stream]()
        self._clock = self._numbers = 0
        self._thread = threading.local()
        self._free: list[_Block] = []
        self._deferred: list[tuple[_Block, list[Event]]] = []
        self._pinned: dict[int, torch.Tensor] = {}
        self._capturing: tuple[Any, str] | None = None
        self.host = Host(self.rng, self._advance)
        self.default = Stream(self, 0)

    # Streams and events

    def number(self) -> int:
        self._numbers += 1
        return self._numbers

    def tell(self, what: str, *numbers: int) -> None:
        getattr(self._sanitizer, f"_handle_{what}")(*numbers)

    def current(self, device: Any = None) -> Stream:
        """Each thread has its own, and begins with the default stream."""
        return getattr(self._thread, "stream", self.default)

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        self.enter_thread()
        before, self._thread.stream = self.current(), stream
        try:
            yield
        finally:
            self._thread.stream = before

    def enter_thread(self, device: Any = None) -> None:
        """From now on tensors that this thread makes on CUDA are simulated. As torch.cuda.set_device."""
        if not getattr(self._thread, "entered", False):
            self._thread.entered = True
            _Factories(self).__enter__()

    def _advance(self, must: bool) -> bool:
        able = [
            stream
            for stream in self._streams
            if stream.queue and stream.queue[0].is_ready()
        ]
        willing = [stream for stream in able if self.rng.random() < stream.pace]
        if not able or not (willing or must):
            return False
        self.rng.choice(willing or able).queue.popleft().run()
        return True

    def synchronize(self, device: Any = None) -> None:
        for stream in self._streams:
            stream.synchronize()

    def launch(
        self,
        stream: Stream,
        run: Callable[[], Any],
        reads: set[int],
        writes: set[int],
        name: str,
    ) -> None:
        """Put an operation on a stream; reads and writes are numbers of blocks."""
        aliases = {number: [""] for number in reads | writes}
        found = self._sanitizer._handle_kernel_launch(
            stream.number, reads - writes, writes, writes, name, aliases
        )
        for error in found:
            now, before = error.current_access, error.previous_access  # type: ignore[attr-defined]
            self.errors.append(
                f"{now.operator} of stream {now.stream} is not ordered behind {before.operator} of {before.stream}"
            )
        stream.queue.append(_Operation(run))
        self.host.pause()

    def host_waits(self, name: str) -> None:
        """Called where the host waits for the device without having said so."""

    # Memory

    def allocate(self, like: torch.Tensor) -> Tensor:
        """What `torch.empty` makes under the current stream: of a CPU tensor's shape, dtype and strides."""
        self._not_captured("memory is taken")
        if not like.numel():
            return self.tensor_type(
                torch.empty_like(like), _Handle(_Block(self, like, self.default))
            )
        num_bytes = -(-_extent(like) // _ROUND) * _ROUND
        stream, waiting = self.current(), self._deferred
        self._deferred = []
        for block, events in waiting:
            if all(event.passed() for event in events):
                for event in events:
                    event.tell("synchronization")
                self._free.append(block)
            else:
                self._deferred.append((block, events))
        fitting = [
            block
            for block in self._free
            if block.stream is stream and block.num_bytes >= num_bytes
        ]
        if fitting:
            block = self.choose(fitting)
            self._free.remove(block)
        else:
            block = _Block(
                self,
                torch.full((num_bytes,), self.rng.randrange(1, 255), dtype=torch.uint8),
                stream,
            )
            self.num_fresh += 1
            self.num_bytes += num_bytes
        handle = _Handle(block)
        weakref.finalize(handle, self._freed, block).atexit = False
        flat = block.memory[: _extent(like)].view(like.dtype)
        return self.tensor_type(flat.as_strided(like.shape, like.stride()), handle)

    def choose(self, fitting: list[_Block]) -> _Block:
        """Which of the free blocks serves what fits into each."""
        return self.rng.choice(fitting)

    def _freed(self, block: _Block) -> None:
        events = [Event(self) for _ in block.used_by]
        for stream, event in zip(block.used_by, events, strict=True):
            event.put_on(stream)
        block.used_by = []
        self._deferred.append((block, events)) if events else self._free.append(block)

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return (
            not isinstance(tensor, Tensor)
            and tensor.untyped_storage().data_ptr() in self._pinned
        )

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """In pinned memory of torch's own, which is not used again before the transfers from it are done."""
        memory = tensor.clone()
        self._pinned[memory.untyped_storage().data_ptr()] = memory
        return memory.as_strided(memory.shape, memory.stride()).detach()

    def source(self, tensor: torch.Tensor) -> torch.Tensor:
        """Of host memory, what a transfer reads when it runs; it holds no tensor of the program."""
        if not self.is_pinned(tensor):
            return tensor.clone()
        memory = self._pinned[tensor.untyped_storage().data_ptr()]
        flat = memory.as_strided(
            (_extent(memory) // memory.element_size(),), (1,), 0
        ).view(torch.uint8)
        return flat.view(tensor.dtype).as_strided(
            tensor.shape, tensor.stride(), tensor.storage_offset()
        )

    # Graphs

    @contextlib.contextmanager
    def capture(self, mode: str = "global") -> Iterator[None]:
        """As torch.cuda.graph; what is launched within is not run."""
        self._capturing = threading.current_thread(), mode
        yield
        self._capturing = None

    def is_capturing(self) -> bool:
        return (
            self._capturing is not None
            and self._capturing[0] is threading.current_thread()
        )

    def _not_captured(self, what: str) -> None:
        if self._capturing and (self._capturing[1] == "global" or self.is_capturing()):
            raise RuntimeError(
                f"cudaErrorStreamCaptureUnsupported: {what} while a graph is captured"
            )

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Stands in for torch.cuda."""
        events = {
            "Stream": lambda *_, **__: Stream(self),
            "Event": lambda *_, **__: Event(self),
        }
        streams = {
            "stream": self.stream,
            "current_stream": self.current,
            "synchronize": self.synchronize,
        }
        streams |= {
            "default_stream": lambda *_: self.default,
            "set_device": self.enter_thread,
        }
        device = {
            "current_device": lambda: 0,
            "is_current_stream_capturing": self.is_capturing,
        }
        with contextlib.ExitStack() as stack:
            stack.enter_context(
                mock.patch.multiple(torch.cuda, **events, **streams, **device)
            )
            stack.enter_context(
                mock.patch.object(torch.cuda._sanitizer, "traceback", _NO_TRACES)
            )
            stack.enter_context(_Factories(self))
            self._thread.entered = True
            yield


# The sanitizer takes a stack for each access, which takes more time than all else.
_NO_TRACES = SimpleNamespace(
    StackSummary=SimpleNamespace(extract=lambda *_, **__: []), walk_stack=lambda _: []
)


class _Operation:
    def __init__(self, run: Callable[[], Any]) -> None:
        self.run = run

    def is_ready(self) -> bool:
        return True


class _Token:
    """A place in a stream. `at` is when it was passed."""

    done, at = False, 0


class _Record:
    def __init__(self, cuda: Cuda, token: _Token) -> None:
        self._cuda, self._token = cuda, token

    def is_ready(self) -> bool:
        return True

    def run(self) -> None:
        self._cuda._clock += 1
        self._token.done, self._token.at = True, self._cuda._clock


class _Wait:
    def __init__(self, token: _Token) -> None:
        self._token = token

    def is_ready(self) -> bool:
        return self._token.done

    def run(self) -> None:
        pass


class Stream:
    """Attributes: pace, how soon it does what it has; queue, what it has."""

    def __init__(self, cuda: Cuda, number: int | None = None) -> None:
        self._cuda, self.number = cuda, cuda.number() if number is None else number
        self.pace, self.queue = cuda.rng.choice([0.05, 0.5, 1.0]), deque[Any]()
        cuda._streams.append(self)
        if number is None:
            cuda.tell("stream_creation", self.number)

    def synchronize(self) -> None:
        self._cuda._not_captured("a stream is waited for")
        self._cuda.tell("stream_synchronization", self.number)
        token = _Token()
        self.queue.append(_Record(self._cuda, token))
        self._cuda.host.pause(lambda: token.done)

    def wait_event(self, event: Event) -> None:
        event.wait(self)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event(self._cuda)
        event.record(self)
        return event

    def wait_stream(self, stream: Stream) -> None:
        self.wait_event(stream.record_event())


class Event:
    def __init__(self, cuda: Cuda) -> None:
        self._cuda, self._number = cuda, cuda.number()
        self._token: _Token | None = None
        cuda.tell("event_creation", self._number)

    def tell(self, what: str, *stream: int) -> None:
        self._cuda.tell(f"event_{what}", self._number, *stream)

    def put_on(self, stream: Stream) -> None:
        """Record, without a pause."""
        self._token = _Token()
        stream.queue.append(_Record(self._cuda, self._token))
        self.tell("record", stream.number)

    def passed(self) -> bool:
        return self._token is None or self._token.done

    def record(self, stream: Stream | None = None) -> None:
        self.put_on(stream or self._cuda.current())
        self._cuda.host.pause()

    def wait(self, stream: Stream | None = None) -> None:
        stream = stream or self._cuda.current()
        if self._token:
            stream.queue.append(_Wait(self._token))
        self.tell("wait", stream.number)
        self._cuda.host.pause()

    def query(self) -> bool:
        self._cuda.host.pause()
        return self.passed()

    def synchronize(self) -> None:
        self._cuda._not_captured("an event is waited for")
        self.tell("synchronization")
        if token := self._token:
            self._cuda.host.pause(lambda: token.done)

    def elapsed_time(self, end: Event) -> float:
        assert self._token and end._token and self._token.done and end._token.done
        return float(end._token.at - self._token.at)


# Tensors


class _Block:
    """Device memory, of one stream, used by others too."""

    def __init__(self, cuda: Cuda, memory: torch.Tensor, stream: Stream) -> None:
        self.cuda, self.memory, self.stream, self.number = (
            cuda,
            memory,
            stream,
            _ROUND * cuda.number(),
        )
        self.num_bytes = len(memory) if memory.ndim else 0
        self.used_by: list[Stream] = []


class _Handle:
    """Held by the tensors of a block; the last one to go frees it."""

    def __init__(self, block: _Block) -> None:
        self.block, self.cuda, self.number = block, block.cuda, block.number


class Tensor(torch.Tensor):
    """On the simulated device.

    Attributes:
        memory: what it holds so far: a CPU tensor of the same memory.
        handle: holds the memory.
    """

    memory: torch.Tensor
    handle: _Handle

    @staticmethod
    def __new__(cls, memory: torch.Tensor, handle: _Handle) -> Tensor:
        made = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, memory.shape, strides=memory.stride(), dtype=memory.dtype, device="cpu"
        )
        made.memory, made.handle = memory, handle
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    device = property(lambda self: CUDA)  # type: ignore[assignment]
    is_cuda = property(lambda self: True)  # type: ignore[assignment]

    def is_pinned(self, *_: Any) -> bool:
        return False

    def data_ptr(self) -> int:
        return self.memory.data_ptr()

    def record_stream(self, stream: Stream) -> None:  # type: ignore[override]
        block = self.handle.block
        if stream is not block.stream and stream not in block.used_by:
            block.used_by.append(stream)
        self.handle.cuda.host.pause()

    def cpu(self, *_: Any) -> torch.Tensor:
        self.handle.cuda.host_waits("cpu")
        self.handle.cuda.current().synchronize()
        return self.memory.clone()

    def to(self, *args: Any, **options: Any) -> Any:
        copy = options.pop("copy", False)
        device, dtype, non_blocking, memory_format = _parsed(*args, **options)
        if device is not None and device.type == "cpu":
            return self.cpu().to(dtype)
        more = {} if memory_format is None else {"memory_format": memory_format}
        found = torch.Tensor.to(
            self, self.dtype if dtype is None else dtype, non_blocking, **more
        )
        return found.clone() if copy and found is self else found

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        handle = next(
            leaf.handle
            for leaf in tensors_of((args, kwargs))
            if isinstance(leaf, Tensor)
        )
        if _is_view(func):
            there = mapped(memory_of, (args, kwargs))
            return mapped(
                lambda x: handle.cuda.tensor_type(x, handle),
                func(*there[0], **there[1]),
            )
        return handle.cuda._operation(func, args, kwargs)


def _parsed(*args: Any, **options: Any) -> Any:
    """Device, dtype, non_blocking and memory_format of what `Tensor.to` is given."""
    if args and isinstance(args[0], Tensor):
        return CUDA, args[0].dtype, False, None
    with torch._C.DisableTorchFunction():
        return torch._C._nn._parse_to(*args, **options)


@functools.cache
def _is_view(func: Any) -> bool:
    aliases = [returned.alias_info for returned in func._schema.returns]
    return any(alias is not None and not alias.is_write for alias in aliases)


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """Those among an operator's arguments, in their order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple | dict):
        for each in value.values() if isinstance(value, dict) else value:
            yield from tensors_of(each)


def mapped(function: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """An operator's arguments or results with `function` of each tensor in its place."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, list | tuple):
        return type(value)([mapped(function, each) for each in value])
    if isinstance(value, dict):
        return {key: mapped(function, each) for key, each in value.items()}
    return value


def memory_of(value: Any) -> Any:
    return value.memory if isinstance(value, Tensor) else value


def _extent(like: torch.Tensor) -> int:
    """Bytes from the first element of a tensor to behind its last."""
    if not like.numel():
        return 0
    last = sum(
        (size - 1) * stride
        for size, stride in zip(like.shape, like.stride(), strict=True)
    )
    return (last + 1) * like.element_size()


def _operation(self: Cuda, func: Any, args: Any, kwargs: Any) -> Any:
    """Launch what is no view on the current stream; waits for the result if that is for the host."""
    kwargs = {
        name: value
        for name, value in kwargs.items()
        if name not in ("device", "pin_memory")
    }
    flat, spec = tree_flatten((args, kwargs))
    names = [argument.name for argument in func._schema.arguments]
    written = [
        value
        for number, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
        for value in tree_leaves(
            args[number] if number < len(args) else kwargs.get(names[number])
        )
        if isinstance(value, torch.Tensor)
    ]
    stream, waits = self.current(), False
    if func is torch.ops.aten.copy_.default:
        non_blocking = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
        waits = not (
            isinstance(args[0], Tensor)
            and (isinstance(args[1], Tensor) or non_blocking)
        )
    ours = [leaf for leaf in flat if isinstance(leaf, Tensor)]
    hosts = {id(leaf) for leaf in written}

    def argument(leaf: Any) -> Any:
        if (
            isinstance(leaf, Tensor)
            or not isinstance(leaf, torch.Tensor)
            or id(leaf) in hosts
        ):
            return memory_of(leaf)
        return self.source(leaf)

    given, given_named = torch.utils._pytree.tree_unflatten(
        [argument(leaf) for leaf in flat], spec
    )
    reads = {
        leaf.handle.number for leaf in ours if not any(leaf is one for one in written)
    }
    if written:
        run = functools.partial(func, *given, **given_named)
        writes = {leaf.handle.number for leaf in written if isinstance(leaf, Tensor)}
        self.launch(stream, run, reads, writes, func.name())
        if waits:
            self.host_waits(func.name())
            stream.synchronize()
        return written[0] if len(written) == 1 else tuple(written)
    with torch.no_grad():
        # for the shapes alone: nothing is there as yet
        probe = func(*given, **given_named)
    if not any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(probe)):
        result: list[Any] = []
        self.launch(
            stream,
            lambda: result.append(func(*given, **given_named)),
            reads,
            set(),
            func.name(),
        )
        stream.synchronize()
        return result[0]
    leaves, form = tree_flatten(probe)
    made = [self.allocate(leaf) for leaf in leaves]
    places = [tensor.memory for tensor in made]

    def run_into() -> None:
        for place, value in zip(
            places, tree_leaves(func(*given, **given_named)), strict=True
        ):
            place.copy_(value)

    self.launch(
        stream, run_into, reads, {tensor.handle.number for tensor in made}, func.name()
    )
    return torch.utils._pytree.tree_unflatten(made, form)


Cuda._operation = _operation  # type: ignore[attr-defined]
Cuda.tensor_type = Tensor


class _Factories(TorchFunctionMode):
    """What makes tensors on the device, or pinned ones."""

    def __init__(self, cuda: Cuda) -> None:
        super().__init__()
        self._cuda = cuda

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        cuda = self._cuda
        if func is torch.Tensor.is_pinned:
            return cuda.is_pinned(args[0])
        if func is torch.Tensor.pin_memory:
            return cuda.pin(args[0])
        if func is torch.Tensor.to and not isinstance(args[0], Tensor):
            copy = kwargs.pop("copy", False)
            device, dtype, non_blocking, memory_format = _parsed(*args[1:], **kwargs)
            kwargs |= {"copy": True} if copy else {}
            if device is not None and device.type == "cuda":
                source = args[0] if dtype is None else args[0].to(dtype)
                like = (
                    source
                    if memory_format is None
                    else source.contiguous(memory_format=memory_format)
                )
                return cuda.allocate(torch.empty_like(like)).copy_(source, non_blocking)
        pins, device = kwargs.pop("pin_memory", False), kwargs.get("device")
        if device is not None and torch.device(device).type == "cuda":
            kwargs.pop("device")
            found = func(*args, **kwargs)
            made = cuda.allocate(found)
            return (
                made
                if func.__name__.startswith("empty")
                else made.copy_(found, non_blocking=True)
            )
        found = func(*args, **kwargs)
        return cuda.pin(found) if pins else found
