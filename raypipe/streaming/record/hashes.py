"""Fast hashes of micro-batches, for the record of a run: XXH3 of 128 bits, which is as fast as memory is read.

    stream_hash      all that reached the rank's host memory: pixels or encoded images, targets, columns, indices
    finished_hash    the tensors that the device stage made, on a CPU, but only sixteen or so rows of each image

Both find damage, mistakes and other versions of libraries. They are not cryptographic: whoever wants to can make
two micro-batches with one hash. `raypipe.streaming.digest`, which is, takes thirty times as long.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from raypipe.transform.fields import MicroBatch, Ragged, images_in

if TYPE_CHECKING:
    from raypipe.device.prefetcher import Batch

# `finished_hash` takes so many of an image: all of them would cost a few percent of the CPU time of light.
_NUM_ROWS = 16


def stream_hash(batch: MicroBatch) -> bytes:
    """16 bytes over the samples of a micro-batch and their fields, and not over its place."""
    return _combined(_of(batch))


def _of(batch: MicroBatch) -> Iterator[tuple[str, np.ndarray]]:
    yield "index", batch.index
    yield "weight", batch.weight
    for name, values in sorted(batch.fields.items()):
        if isinstance(values, Ragged):
            yield f"{name} {values.kind}", values.values
            yield f"{name} offsets", values.offsets
        else:
            yield name, values


def finished_hash(before: Batch, after: Batch) -> bytes:
    """16 bytes over the tensors that the device stage has made on a CPU; empty if it made none."""
    made = {
        name: value
        for name, value in after.fields.items()
        if isinstance(value, torch.Tensor) and value is not before.fields.get(name)
    }
    images = images_in(made)
    tensors = {
        name: _some_rows(value) if name in images else value
        for name, value in made.items()
    }
    if after.mix is not None:
        tensors |= {
            "mix.target": after.mix.target,
            "mix.lam": torch.as_tensor(after.mix.lam),
        }
    if not tensors:
        return b""
    return _combined((name, _bytes_of(tensors[name])) for name in sorted(tensors))


def _some_rows(images: torch.Tensor) -> torch.Tensor:
    """Sixteen or so rows of each of the images (…, C, H, W), in the order of their memory."""
    every = max(1, images.shape[-2] // _NUM_ROWS)
    return images[..., ::every, :].movedim(-3, -1)


def _bytes_of(tensor: torch.Tensor) -> np.ndarray:
    """The bytes of a tensor of any dtype, with its shape in front of the last axis."""
    whole = tensor.detach().contiguous()
    return whole.reshape(*whole.shape, 1).view(torch.uint8).numpy()


def hashed(batches: Iterable[MicroBatch]) -> Iterator[MicroBatch]:
    """Yield micro-batches with their `stream_hash`."""
    for batch in batches:
        yield replace(batch, stream_hash=stream_hash(batch))


@functools.lru_cache(maxsize=256)
def _header(name: str, dtype: np.dtype, shape: tuple[int, ...]) -> bytes:
    return f"{name} {dtype.str} {shape}\n".encode()


def _combined(named: Iterator[tuple[str, np.ndarray]]) -> bytes:
    import xxhash  # only runs that record hashes need it

    parts = list[bytes]()
    for name, array in named:
        if not array.flags.c_contiguous:
            array = np.ascontiguousarray(array)
        parts.append(_header(name, array.dtype, array.shape))
        parts.append(xxhash.xxh3_128_digest(array.data))
    return xxhash.xxh3_128_digest(b"".join(parts))
