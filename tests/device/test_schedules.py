"""The device side on a simulated CUDA device, in schedules that a seed draws; and mutants of it, which all fail there.

What runs is the code of `raypipe.device` as it stands. See simulated_cuda.py.
"""

from __future__ import annotations

import contextlib
import functools
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from conftest import picture
from simulated_cuda import CUDA, Cuda, Tensor

import raypipe.device.device_decode
import raypipe.device.prefetcher
import raypipe.device.ring
from raypipe.config import TransformConfig
from raypipe.device.device_decode import DeviceDecoder
from raypipe.plan.places import MicroBatchId
from raypipe.transform.batch import HostBatch
from raypipe.transform.contents import EncodedTransform, pack
from raypipe.transform.sample_transform import EncodedSample

SIZE, ROWS = 8, 2
NAMES = ("ring", "device_decode", "prefetcher")


@dataclass
class Code:
    """The three modules, as they stand or with something replaced."""

    ring: Any
    device_decode: Any
    prefetcher: Any

    @contextlib.contextmanager
    def on(self, cuda: Cuda) -> Iterator[None]:
        """The modules on a simulated device, with simulated threads."""
        names, copy_stream = cuda.host.names(), functools.cache(self.ring.new_stream)
        with contextlib.ExitStack() as stack:
            stack.enter_context(cuda.installed())
            stack.enter_context(mock.patch.object(self.ring, "_copy_stream", copy_stream))
            for module in (self.ring, self.prefetcher):
                ours = {name: value for name, value in names.items() if hasattr(module, name)}
                stack.enter_context(mock.patch.multiple(module, **ours))
            yield


AS_IT_STANDS = Code(*(getattr(raypipe.device, name) for name in NAMES))


def changed(module: str, old: str, new: str) -> Code:
    """With a piece of text, which occurs once, replaced in a module."""
    made: dict[str, ModuleType] = {}
    before = {f"raypipe.device.{name}": sys.modules[f"raypipe.device.{name}"] for name in NAMES}
    try:
        for name in NAMES:
            source = Path(str(getattr(raypipe.device, name).__file__)).read_text()
            if name == module:
                assert source.count(old) == 1, f"{old!r} is {source.count(old)} times in {module}.py"
                source = source.replace(old, new)
            full = f"raypipe.device.{name}"
            made[name] = sys.modules[full] = ModuleType(full)
            exec(compile(source, f"<{name} with {new!r}>", "exec"), made[name].__dict__)
    finally:
        sys.modules.update(before)
    return Code(**made)


# What is given, and what must come out


@functools.cache
def host_batch(number: int, size: int = 3, targets: bool = False) -> HostBatch:
    rng = np.random.default_rng([number, size])
    arrays = {
        "image": rng.integers(0, 256, (size, 4, 5, 3), dtype=np.uint8),
        "label": rng.integers(0, 1 << 40, size),
        "weight": rng.random(size, np.float32),
        "index": np.arange(size),
    }
    if targets:
        arrays |= {"mask": rng.integers(0, 256, (size, 4, 5), dtype=np.uint8)}
        arrays |= {"boxes": rng.random((size, 2, 5), np.float32)}
    for array in arrays.values():
        array.flags.writeable = False
    return HostBatch(at=MicroBatchId("train", 0, number, 0), num_bad=0, **arrays)


@functools.cache
def encoded_batch(number: int) -> HostBatch:
    keys = np.random.default_rng(number).integers(0, 2**64, (ROWS, 2), np.uint64)
    transform = EncodedTransform("light", TransformConfig(size=SIZE))
    samples = [EncodedSample(picture(ROWS * number + row)) for row in range(ROWS)]
    jpegs = pack(transform.one(sample, key) for sample, key in zip(samples, keys, strict=True))
    return replace(host_batch(number, ROWS), encoded=jpegs)


@functools.cache
def decoded(number: int) -> np.ndarray:
    encoded = encoded_batch(number).encoded
    assert encoded is not None
    return DeviceDecoder(SIZE, "cpu").decode(**encoded).image.numpy()


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
            self.streams = [torch.cuda.Stream(CUDA) for _ in range(rng.choice([1, 1, 2]))]
        self.stream: Any = self.streams[0]

    def turn(self) -> Any:
        """The stream that works on the next batch."""
        self.stream = self.cuda.rng.choice(self.streams)
        return self.cuda.stream(self.stream)

    def use(self, tensor: Any, expected: np.ndarray) -> None:
        self.kept.append((tensor.clone(), expected))

    def leave_garbage(self) -> None:
        """Memory that was freed, and that is still to be read."""
        for stream in (self.cuda.default, *self.streams):
            with self.cuda.stream(stream):
                for size in self.cuda.rng.sample([60, 180, 1000, 2000], 2):
                    expected = np.full(size, self.cuda.rng.randrange(200), np.uint8)
                    old = torch.full((size,), int(expected[0]), dtype=torch.uint8, device=CUDA)
                    self.use(old, expected)
                    del old

    def check(self) -> None:
        self.cuda.synchronize()
        for found, expected in self.kept:
            assert found.is_cuda
            np.testing.assert_array_equal(found.memory.numpy(), expected)


def use_batch(consumer: Consumer, batch: Any, host: HostBatch) -> None:
    assert batch.at == host.at and batch.index.tolist() == host.index.tolist()
    consumer.use(batch.image, host.image.transpose(0, 3, 1, 2))
    for name, array in {"target": host.label, "weight": host.weight, "mask": host.mask, "boxes": host.boxes}.items():
        assert (getattr(batch, name) is None) == (array is None)
        if array is not None:
            consumer.use(getattr(batch, name), array)


# Programs: each draws its form from the simulation's seed


def micro_batches(code: Code, cuda: Cuda) -> None:
    """The ring: several signatures, batches that are kept, rings after and beside one another, and left early."""
    rng, consumer, marks = cuda.rng, Consumer(cuda), []
    sizes = rng.choice([(3,), (3, 2), (3, 1, 2, 4, 5, 6)])
    targets = rng.random() < 0.3

    def ring(first: int) -> tuple[Iterator[Any], list[HostBatch], int]:
        given = [host_batch(first + n, rng.choice(sizes), targets) for n in range(rng.randrange(1, 8))]
        depth, keep = rng.randrange(1, 4), rng.choice([0, 0, 1, 2])
        on_copied = lambda start, end: marks.append((start, end))  # noqa: E731
        batches = code.prefetcher.on_device(given, CUDA, lambda at: at.step, depth, keep, on_copied=on_copied)
        return iter(batches), given, keep

    def through(batches: Iterator[Any], given: list[HostBatch], keep: int) -> Iterator[None]:
        held: list[tuple[Any, HostBatch, Any]] = []
        num = rng.choice([len(given), len(given), rng.randrange(len(given) + 1)])
        for host in given[:num]:
            with consumer.turn():
                batch = next(batches)
                use_batch(consumer, batch, host)
                held = [*held, (batch, host, consumer.stream)][-keep - 1 :]
                del batch
            for before, of, stream in held[:-1]:  # valid still, on the stream that they were given to
                with cuda.stream(stream):
                    use_batch(consumer, before, of)
                del before
            yield
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
    assert marks and all(start.elapsed_time(end) > 0 for start, end in marks)


def any_loader(code: Code, cuda: Cuda) -> None:
    """The ring, of tensors that are pinned or not, and that the loader lets go of."""
    rng, consumer = cuda.rng, Consumer(cuda)
    pins = rng.random() < 0.7
    arrays = [np.random.default_rng(n).integers(0, 256, (rng.choice([2, 3]), 3, 4, 2)) for n in range(6)]

    def batches() -> Iterator[dict[str, Any]]:
        for number, array in enumerate(arrays):
            image = cuda.pinned(array) if pins else torch.from_numpy(array)
            yield {"image": image.permute(0, 1, 3, 2), "number": (number, torch.full((2,), number))}

    consumer.leave_garbage()
    iterator = iter(code.prefetcher.prefetch(batches(), CUDA, rng.randrange(1, 4)))
    for number in range(rng.choice([6, 6, 3])):
        with consumer.turn():
            batch = next(iterator)
            assert batch["number"][0] == number
            consumer.use(batch["image"], arrays[number].transpose(0, 1, 3, 2))
            consumer.use(batch["number"][1], np.full(2, number))
            del batch
    iterator.close()
    del iterator
    consumer.check()


def decoding(code: Code, cuda: Cuda) -> None:
    """Decoded ahead in a thread; consumed on any stream."""
    rng, consumer = cuda.rng, Consumer(cuda)
    given = [encoded_batch(number) for number in range(4)]
    decoder = code.device_decode.DeviceDecoder(SIZE, CUDA)
    consumer.leave_garbage()
    iterator = code.prefetcher.decoded_on_device(iter(given), decoder, lambda at: 0, rng.randrange(1, 3))
    for number, host in enumerate(given[: rng.choice([4, 2])]):
        with consumer.turn():
            batch = next(iterator)
            consumer.use(batch.image, decoded(number))
            consumer.use(batch.target, host.label)
            consumer.use(batch.weight, host.weight)
            del batch
    iterator.close()
    consumer.check()


def decoding_directly(code: Code, cuda: Cuda) -> None:
    """Decoded where it is used, on the consumer's stream."""
    consumer, decoder = Consumer(cuda), code.device_decode.DeviceDecoder(SIZE, CUDA)
    for number in range(4):
        with consumer.turn():
            image = decoder.decode(**encoded_batch(number).encoded).image
            consumer.use(image, decoded(number))
            del image
    consumer.check()


PROGRAMS = (micro_batches, any_loader, decoding, decoding_directly)


def run(code: Code, program: Callable[[Code, Cuda], None], seed: int) -> Cuda:
    cuda = Cuda(seed)
    with code.on(cuda):
        program(code, cuda)
    return cuda


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_no_schedule_goes_wrong(program: Any) -> None:
    for seed in range(100):
        cuda = run(AS_IT_STANDS, program, seed)
        assert not cuda.errors, f"seed {seed}: {cuda.errors[0]}"
