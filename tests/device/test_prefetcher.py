from __future__ import annotations

import threading
import time
import weakref
from collections import OrderedDict, namedtuple
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import picture
from micro_batches import run, samples_of, transform_of, with_fields
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from raypipe.config import TransformConfig
from raypipe.device.device_decode import DeviceDecoder
from raypipe.device.prefetcher import Batch, decoded_on_device, on_device, prefetch
from raypipe.errors import ConfigError
from raypipe.plan.places import MicroBatchId
from raypipe.transform.fields import MicroBatch


def host_batch(step: int, size: int = 4) -> MicroBatch:
    rng = np.random.default_rng(step)
    fields = {
        "image": rng.integers(0, 256, (size, 6, 5, 3), dtype=np.uint8),
        "label": rng.integers(0, 10, size),
    }
    weight = np.array([1.0] * (size - 1) + [0.0], np.float32)
    index = np.array([*range(size - 1), -1])
    for array in (weight, index, *fields.values()):
        array.flags.writeable = False  # as Arrow's shared memory is
    return MicroBatch(MicroBatchId("train", 0, step, 0), index, weight, {**fields}, num_bad=step)


CPU = torch.device("cpu")


def on_cpu(batches: list[MicroBatch], **more: Any) -> Iterator[Batch]:
    return on_device(iter(batches), CPU, lambda at: 100 + at.step, **more)


def assert_same(batch: Batch, host: MicroBatch) -> None:
    assert batch.at == host.at and batch.num_bad == host.num_bad and batch.seed == 100 + host.at.step
    assert batch.image.is_contiguous(memory_format=torch.channels_last)
    assert (batch.image.numpy() == host["image"].transpose(0, 3, 1, 2)).all() and batch.image.dtype == torch.uint8
    assert (batch.target.numpy() == host["label"]).all() and batch.target.dtype == torch.int64
    assert (batch.weight.numpy() == host.weight).all() and batch.weight.dtype == torch.float32
    assert (batch.label == host["label"]).all() and (batch.index == host.index).all()


# Micro-batches


@pytest.mark.parametrize("ring", [None, True])
def test_values_places_seeds_and_order_are_kept(ring: bool | None) -> None:
    given = [host_batch(step, size) for step, size in ((3, 4), (1, 4), (2, 4), (7, 2), (5, 4), (6, 4), (4, 1))]
    found = iter(on_cpu(given, ring=ring))
    for host in given:
        assert_same(next(found), host)
    assert next(found, None) is None


@pytest.mark.parametrize("ring", [None, True])
@pytest.mark.parametrize("names", [("mask",), ("boxes",), ("mask", "boxes"), ()])
def test_masks_and_boxes_come_with_their_batch(ring: bool | None, names: tuple[str, ...]) -> None:
    rng, given = np.random.default_rng(0), []
    for step in range(6):
        targets = {
            "mask": rng.integers(0, 256, (4, 6, 5), dtype=np.uint8),
            "boxes": rng.random((4, 3, 5), np.float32),
        }
        given.append(with_fields(host_batch(step), {name: targets[name] for name in names}))
    for batch, host in zip(on_cpu(given, ring=ring), given, strict=True):
        assert_same(batch, host)
        assert batch.fields.keys() == host.fields.keys()
        for name in names:
            np.testing.assert_array_equal(batch.fields[name].numpy(), host[name])


def test_images_are_channels_last_views_of_the_host_memory() -> None:
    host = host_batch(0)
    [batch] = on_cpu([host])
    assert batch.image.shape == (4, 3, 6, 5) and batch.image.dtype == torch.uint8
    assert batch.image.is_contiguous(memory_format=torch.channels_last)
    assert batch.image.data_ptr() == host["image"].ctypes.data
    assert batch.target.data_ptr() == host["label"].ctypes.data


def test_read_only_input_gives_no_warning() -> None:
    # Warnings are errors in these tests, and torch warns of read-only arrays once per process unless told not to.
    torch.set_warn_always(True)
    try:
        assert len(list(on_cpu([host_batch(0)]))) == 1
    finally:
        torch.set_warn_always(False)


def test_on_cpu_nothing_is_taken_before_it_is_asked_for() -> None:
    taken = []

    def batches() -> Iterator[MicroBatch]:
        for step in range(3):
            taken.append(step)
            yield host_batch(step)

    iterator = iter(on_device(batches(), torch.device("cpu"), lambda at: 0))
    next(iterator)
    assert taken == [0]


@pytest.mark.parametrize("ring", [None, True])
def test_no_batches(ring: bool | None) -> None:
    assert list(on_cpu([], ring=ring)) == []


def test_the_ring_copies_into_the_same_slots_and_marks_each_transfer() -> None:
    given, marks = [host_batch(step) for step in range(20)], []
    pointers = set()
    prefetcher = on_cpu(given, ring=True, depth=3, on_copied=lambda start, end: marks.append((start, end)))
    for batch, host in zip(prefetcher, given, strict=True):
        assert batch.image.data_ptr() != host["image"].ctypes.data
        pointers.add(batch.image.data_ptr())
    assert len(pointers) == 4
    assert len(marks) == 20 and all(start <= end for start, end in marks)


class Block(np.ndarray):
    """Memory of Ray's object store: no more than the views of it keep it."""


def test_a_block_is_let_go_while_its_micro_batches_are_in_use() -> None:
    blocks = []

    def batches() -> Iterator[MicroBatch]:
        for step in range(3):
            host = host_batch(step)
            parts = {**host.arrays(), "mask": np.zeros((4, 6, 5), np.uint8)}
            parts |= {"weight": host.weight, "index": host.index}
            memory = np.concatenate([part.reshape(-1).view(np.uint8) for part in parts.values()]).view(Block)
            memory.flags.writeable = False
            blocks.append(weakref.ref(memory))
            at = 0
            for name, part in parts.items():
                parts[name] = memory[at : at + part.nbytes].view(part.dtype).reshape(part.shape)
                at += part.nbytes
            rest = {name: parts.pop(name) for name in ("weight", "index")}
            yield replace(host, fields={**parts}, **rest)
            del memory, part, rest
            parts.clear()

    for step, batch in enumerate(on_device(batches(), CPU, lambda at: 100 + at.step, depth=3, ring=True)):
        deadline = time.monotonic() + 10
        while len(blocks) < 3 or any(block() is not None for block in blocks):
            assert time.monotonic() < deadline, blocks
            time.sleep(0.001)
        assert_same(batch, host_batch(step))
        assert not batch.fields["mask"].any()


def test_without_a_ring_there_is_no_thread_and_nothing_to_mark() -> None:
    def never(start: Any, end: Any) -> None:
        raise AssertionError

    for _ in on_cpu([host_batch(0), host_batch(1)], on_copied=never):
        assert not ring_threads()


def test_closing_early_ends_the_thread() -> None:
    batches = iter(on_cpu([host_batch(step) for step in range(20)], ring=True))
    next(batches)
    assert ring_threads()
    batches.close()  # type: ignore[attr-defined]
    assert not ring_threads()


def test_closing_early_closes_the_source_though_the_decoding_thread_waits_for_it() -> None:
    """Else a stream that is left keeps its actors, and the next one waits for their CPUs."""
    waiting, closed = threading.Event(), threading.Event()
    keys = np.zeros((2, 2), np.uint64)
    transform = transform_of("light", TransformConfig(size=8, decode="gpu"))
    encoded, _ = run(transform, samples_of([picture(0), picture(1)]), keys)

    def source() -> Iterator[MicroBatch]:
        try:
            yield encoded
            waiting.set()
            time.sleep(0.2)
            yield encoded
        finally:
            closed.set()

    given = source()
    batches: Any = decoded_on_device(given, DeviceDecoder(8, CPU), lambda at: 0)
    assert next(batches).image.shape == (2, 3, 8, 8)
    assert waiting.wait(10)
    batches.close()
    assert closed.is_set() and next(given, None) is None


@pytest.mark.parametrize("make", [on_cpu, lambda batches, depth: prefetch(batches, "cpu", depth)])
def test_a_wrong_depth_is_refused_on_every_device(make: Any) -> None:
    with pytest.raises(ConfigError, match="depth is 0"):
        make([], depth=0)


# Any loader


def ring_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "raypipe-ring"]


def data_loader(num: int = 10) -> DataLoader[Any]:
    images = torch.rand(num, 3, 4, 5).to(memory_format=torch.channels_last)
    return DataLoader(TensorDataset(images, torch.arange(num)), batch_size=4)


def test_on_cpu_batches_come_as_they_are() -> None:
    given = [(torch.zeros(2), "a"), None, 3]
    found = list(prefetch(given, "cpu"))
    assert all(a is b for a, b in zip(found, given, strict=True))


def test_a_data_loader_with_its_last_smaller_batch_epoch_after_epoch() -> None:
    loader = data_loader(10)
    batches = prefetch(loader, "cpu", ring=True)
    assert len(batches) == len(loader) == 3  # type: ignore[arg-type]
    for _ in range(3):
        sizes = []
        for (image, target), (expected, label) in zip(batches, loader, strict=True):
            assert torch.equal(image, expected) and torch.equal(target, label)
            assert image.data_ptr() != expected.data_ptr()
            sizes.append(len(image))
        assert sizes == [4, 4, 2] and not ring_threads()


def test_memory_formats_are_kept() -> None:
    image = torch.rand(4, 3, 6, 5)
    given = (image, image.to(memory_format=torch.channels_last), torch.rand(4, 6, 5, 3).permute(0, 3, 1, 2))
    for found in prefetch([given] * 3, "cpu", ring=True):
        assert isinstance(found, tuple)
        for a, b in zip(found, given, strict=True):
            assert torch.equal(a, b) and a.stride() == b.stride() and a.data_ptr() != b.data_ptr()


Pair = namedtuple("Pair", "image target")


def test_trees_keep_their_form_and_what_is_no_tensor_passes_through() -> None:
    path, tensor, array = object(), torch.arange(3), np.arange(3)
    given = {
        "pair": Pair(tensor, [tensor + 1, "name", 3]),
        "more": OrderedDict(x=(None, tensor * 2), y={}),
        "path": path,
        "array": array,
        "alone": (tensor,),
    }
    for found in prefetch([given] * 5, "cpu", ring=True):
        assert list(found) == list(given) and type(found["pair"]) is Pair and type(found["more"]) is OrderedDict
        assert torch.equal(found["pair"].image, tensor) and torch.equal(found["pair"].target[0], tensor + 1)
        assert found["pair"].target[1:] == ["name", 3]
        assert found["more"]["x"][0] is None and found["more"]["y"] == {}
        assert torch.equal(found["more"]["x"][1], tensor * 2) and torch.equal(found["alone"][0], tensor)
        assert found["path"] is path and found["array"] is array
    assert given["pair"].image is tensor, "the loader's own batch is not written to"  # type: ignore[attr-defined]
    [alone] = prefetch([tensor], "cpu", ring=True)
    assert torch.equal(alone, tensor)
    assert list(prefetch(["name", None], "cpu", ring=True)) == ["name", None]


def test_dict_batches_of_a_data_loader_through_the_ring() -> None:
    samples = [{"image": torch.full((3, 2), i), "name": str(i)} for i in range(6)]
    found = [
        (batch["image"].clone(), batch["name"])
        for batch in prefetch(DataLoader(samples, batch_size=2), "cpu", ring=True)  # type: ignore[arg-type]
    ]
    assert [names for _, names in found] == [["0", "1"], ["2", "3"], ["4", "5"]]
    assert [images[:, 0, 0].tolist() for images, _ in found] == [[0, 1], [2, 3], [4, 5]]


class Endless(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        yield from range(1 << 60)


def test_a_loader_without_a_length_is_left_early() -> None:
    batches = prefetch(DataLoader(Endless(), batch_size=2), "cpu", ring=True)
    with pytest.raises(TypeError, match="has no len"):
        len(batches)
    with pytest.raises(TypeError, match="has no len"):
        len(prefetch(iter([]), "cpu"))
    for batch in batches:
        assert batch.tolist() == [0, 1]
        break
    assert not ring_threads()


def test_an_error_of_the_loader_is_the_consumers() -> None:
    loader: DataLoader[Any] = DataLoader([torch.zeros(2), torch.zeros(3)], batch_size=2)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="stack expects each tensor to be equal size"):
        list(prefetch(loader, "cpu", ring=True))


def test_the_loader_draws_the_seeds_of_its_shuffle_as_without_prefetch() -> None:
    def orders(through: Any) -> list[list[int]]:
        torch.manual_seed(3)
        loader: DataLoader[Any] = DataLoader(range(8), batch_size=8, shuffle=True)  # type: ignore[arg-type]
        return [batch.tolist() for batches in [through(loader)] for _ in range(3) for batch in batches]

    assert orders(lambda loader: prefetch(loader, "cpu", ring=True)) == orders(lambda loader: loader)
