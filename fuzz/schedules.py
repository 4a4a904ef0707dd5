"""Programs of the device side on a simulated CUDA device, in schedules that a seed draws."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import numpy as np
import torch
from encoded import by_libjpeg, encoded
from pictures import picture
from simulated_cuda import CUDA, Cuda

import raypipe.device.decoders
import raypipe.device.prefetcher
import raypipe.device.ring
from raypipe.device.decoders import BoxDecoder, DeviceDecoder
from raypipe.plan.places import MicroBatchId
from raypipe.transform.encoded_map import DATA, MAP, CropBox
from raypipe.transform.fields import MicroBatch

NAMES = ("ring", "decoders", "prefetcher")


@dataclass
class Code:
    """The three modules, as they stand or with something replaced."""

    ring: Any
    decoders: Any
    prefetcher: Any

    @contextlib.contextmanager
    def on(self, cuda: Cuda) -> Iterator[None]:
        """The modules on a simulated device, with simulated threads."""
        names, copy_stream = cuda.host.names(), functools.cache(self.ring.new_stream)
        with contextlib.ExitStack() as stack:
            stack.enter_context(cuda.installed())
            stack.enter_context(
                mock.patch.object(self.ring, "_copy_stream", copy_stream)
            )
            ours = {
                name: value for name, value in names.items() if hasattr(self.ring, name)
            }
            stack.enter_context(mock.patch.multiple(self.ring, **ours))
            yield


AS_IT_STANDS = Code(*(getattr(raypipe.device, name) for name in NAMES))


@functools.cache
def host_batch(number: int, size: int = 3, targets: bool = False) -> MicroBatch:
    rng = np.random.default_rng([number, size])
    fields: dict[str, Any] = {
        "image": rng.integers(0, 256, (size, 4, 5, 3), dtype=np.uint8),
        "label": rng.integers(0, 1 << 40, size),
    }
    weight, index = rng.random(size, np.float32), np.arange(size)
    if targets:
        fields |= {"mask": rng.integers(0, 256, (size, 4, 5), dtype=np.uint8)}
        fields |= {"boxes": rng.random((size, 2, 5), np.float32)}
    for array in (weight, index, *fields.values()):
        array.flags.writeable = False
    return MicroBatch(MicroBatchId("train", 0, number, 0), index, weight, fields)


@functools.cache
def encoded_batch(number: int) -> MicroBatch:
    batch = encoded([picture(2 * number + row) for row in range(2)], size=8)
    return replace(batch, position=MicroBatchId("train", 0, number, 0))


@functools.cache
def decoded(number: int) -> np.ndarray:
    batch = encoded_batch(number)
    return DeviceDecoder("cpu")(
        batch.fields[DATA], batch[MAP], batch.weight > 0
    ).image.numpy()  # type: ignore[arg-type]


@dataclass
class Consumer:
    """Works on batches under streams of its own, and is far ahead of the device.

    Attributes:
        kept: what it has made of them, and what that must be.
    """

    cuda: Cuda
    kept: list[tuple[Any, np.ndarray]] = field(default_factory=list)

    def __post_init__(self) -> None:
        rng, self.streams = self.cuda.rng, [self.cuda.default]
        if rng.random() < 0.7:
            self.streams = [
                torch.cuda.Stream(CUDA) for _ in range(rng.choice([1, 1, 2, 3]))
            ]
        self.stream: Any = self.streams[0]
        self.lends, self.lent = len(self.streams) > 1 and rng.random() < 0.7, False

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Under the stream that works on the next batch: any, or the one that works already."""
        if not self.lent:
            self.stream = self.cuda.rng.choice(self.streams)
        with self.cuda.stream(self.stream):
            yield

    def lend(self) -> Any:
        """Go on with a batch under another stream, behind the one that it was given to."""
        before, self.stream = self.stream, self.cuda.rng.choice(self.streams)
        self.lent = True
        self.stream.wait_stream(before)
        return self.cuda.stream(self.stream)

    def join(self) -> None:
        """All streams are behind all others, as one who has lent batches sees to before they are let go."""
        for stream in self.streams if self.lends else ():
            for other in self.streams:
                stream.wait_stream(other)

    def use(self, tensor: Any, expected: np.ndarray) -> None:
        self.kept.append((tensor.clone(), expected))

    def leave_garbage(self) -> None:
        """Memory that was freed, and that is still to be read."""
        for stream in (self.cuda.default, *self.streams):
            with self.cuda.stream(stream):
                for size in self.cuda.rng.sample([60, 180, 1000, 2000], 2):
                    expected = np.full(size, self.cuda.rng.randrange(200), np.uint8)
                    old = torch.full(
                        (size,), int(expected[0]), dtype=torch.uint8, device=CUDA
                    )
                    self.use(old, expected)
                    del old

    def check(self) -> None:
        self.cuda.synchronize()
        for found, expected in self.kept:
            assert found.is_cuda
            if not np.array_equal(found.memory.numpy(), expected):
                # says where
                np.testing.assert_array_equal(found.memory.numpy(), expected)


def use_batch(consumer: Consumer, batch: Any, host: MicroBatch) -> None:
    assert (
        batch.position == host.position and batch.index.tolist() == host.index.tolist()
    )
    consumer.use(batch.image, host["image"].transpose(0, 3, 1, 2))
    consumer.use(batch.target, host["label"])
    consumer.use(batch.weight, host.weight)
    assert batch.fields.keys() == host.fields.keys()
    for name in ("mask", "boxes"):
        if name in host.fields:
            consumer.use(batch.fields[name], host[name])


def micro_batches(code: Code, cuda: Cuda) -> None:
    """The ring: several signatures, batches that are kept, rings after and beside one another, and left early."""
    rng, consumer, marks = cuda.rng, Consumer(cuda), []
    sizes = rng.choice([(3,), (3, 2), (3, 1, 2, 4, 5, 6)])
    targets = rng.random() < 0.3

    def ring(first: int) -> tuple[Iterator[Any], list[MicroBatch], int]:
        num = rng.randrange(1, 8)
        given = [host_batch(first + n, rng.choice(sizes), targets) for n in range(num)]
        depth, keep = rng.randrange(1, 4), rng.choice([0, 0, 1, 2])
        on_copied = lambda start, end: marks.append((start, end))  # noqa: E731
        batches = code.prefetcher.on_device(
            given, CUDA, lambda at: at.step, depth, keep, on_copied=on_copied
        )
        return iter(batches), given, keep

    def through(
        batches: Iterator[Any], given: list[MicroBatch], keep: int
    ) -> Iterator[None]:
        held: list[tuple[Any, MicroBatch, Any]] = []
        num = rng.choice([len(given), len(given), rng.randrange(len(given) + 1)])
        for host in given[:num]:
            with consumer.turn():
                batch = next(batches)
                if consumer.lends and not keep:
                    with consumer.lend():
                        use_batch(consumer, batch, host)
                else:
                    use_batch(consumer, batch, host)
                held = [*held, (batch, host, consumer.stream)][-keep - 1 :]
                del batch
            for before, of, stream in held[:-1]:
                # valid still, on the stream that they were given to
                with cuda.stream(stream):
                    use_batch(consumer, before, of)
                del before
            yield
        consumer.join()
        with consumer.turn():
            assert num < len(given) or next(batches, None) is None
            batches.close()  # type: ignore[attr-defined]

    consumer.leave_garbage()
    rings = [through(*ring(10 * number)) for number in range(rng.choice([1, 2]))]
    while rings:  # in turn
        one = rng.choice(rings)
        if next(one, rings) is rings:
            rings.remove(one)
    consumer.leave_garbage()
    for _ in through(*ring(20)):
        pass
    consumer.check()
    # None where all rings were left before their threads began.
    assert all(start.elapsed_time(end) > 0 for start, end in marks)


def debugging(code: Code, cuda: Cuda) -> None:
    """The ring, which overwrites what is released."""
    with mock.patch.dict(os.environ, RAYPIPE_DEBUG="1"):
        micro_batches(code, cuda)


def decoding(code: Code, cuda: Cuda) -> None:
    """Decoded ahead, by a library that writes on a stream of its own; consumed on any stream."""
    consumer = Consumer(cuda)
    given = [encoded_batch(number) for number in range(3)]
    consumer.leave_garbage()
    with mock.patch.dict(
        code.decoders.LIBRARIES, {"simulated": lambda _: nvjpeg(cuda)}, clear=True
    ):
        decoder = code.decoders.DeviceDecoder(CUDA)
    consumer.leave_garbage()

    def decode_images(host: MicroBatch) -> MicroBatch:
        made = decoder(host.fields[DATA], host[MAP], host.weight > 0)
        fields: dict[str, Any] = {"image": made.image, "label": host["label"]}
        return replace(host, fields=fields, ready=made.ready)

    depth = cuda.rng.randrange(1, 3)
    batches = code.prefetcher.on_device(
        iter(given), CUDA, lambda at: 0, depth, decode=decode_images
    )
    for number, host in enumerate(given[: cuda.rng.choice([3, 2])]):
        with consumer.turn():
            batch = next(batches)
            consumer.use(batch.image, decoded(number))
            consumer.use(batch.target, host["label"])
            del batch
    batches.close()
    consumer.check()


def nvjpeg(cuda: Cuda) -> BoxDecoder:
    """A library that waits for no stream of its caller's, and then the host waits for it."""
    own, by_host = torch.cuda.Stream(CUDA), by_libjpeg(torch.device("cpu"))

    def decode_boxes(
        images: list[torch.Tensor], boxes: list[CropBox]
    ) -> list[torch.Tensor | None]:
        found = list[Any]()
        for image in by_host(images, boxes):
            assert image is not None
            found.append(cuda.allocate(image.contiguous()))
            write = functools.partial(found[-1].memory.copy_, image.contiguous())
            cuda.launch(own, write, set(), {found[-1].handle.number}, "nvJPEG")  # type: ignore[arg-type]
        own.synchronize()
        return found

    return decode_boxes


PROGRAMS = (micro_batches, debugging, decoding)


def run(code: Code, program: Callable[[Code, Cuda], None], seed: int) -> Cuda:
    cuda = Cuda(seed)
    with code.on(cuda):
        program(code, cuda)
    return cuda


def beside_a_capture(cuda: Cuda, mode: str, ask: bool = False) -> None:
    """The ring's thread goes on while the consumer captures a graph; images grow, so it takes memory."""
    given, code = [host_batch(n, 1 + n) for n in range(6)], AS_IT_STANDS
    batches = iter(code.prefetcher.on_device(given, CUDA, lambda at: 0, depth=3))
    use_batch(consumer := Consumer(cuda), next(batches), given[0])
    with contextlib.closing(batches):  # type: ignore[type-var]
        with cuda.capture(mode):
            for _ in range(30):
                cuda.host.pause()
            if ask:
                next(batches)
        for host in given[1:]:
            use_batch(consumer, next(batches), host)
    consumer.check()
    assert not cuda.errors
