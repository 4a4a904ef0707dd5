"""The hash of a micro-batch: XXH3 of 128 bits over all of its arrays, which is as fast as memory is read.

`raypipe digest`, the record of a run and `raypipe audit` use this one rule, on a micro-batch as it reached host
memory and as the device stage has finished it on a CPU. It finds damage, mistakes and other versions of libraries.
It is not cryptographic: whoever wants to can make two micro-batches with one hash.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from raypipe.transform.fields import MicroBatch, Ragged, images_in
from raypipe.transform.nest import CLASSES

if TYPE_CHECKING:
    from raypipe.device.prefetcher import Batch


def batch_hash(batch: MicroBatch | Batch) -> bytes:
    """Return 16 bytes over the samples of a micro-batch and its fields by name, and not over its place."""
    import xxhash  # most processes hash nothing

    values: dict[str, Any] = {
        **batch.fields,
        "index": batch.index,
        "weight": batch.weight,
    }
    mix = getattr(batch, "mix", None)
    if mix is not None:
        values |= {"mix.target": mix.target, "mix.lam": np.asarray(mix.lam)}
    images = images_in(batch.fields)
    parts = list[bytes]()
    for name in sorted(values.keys() - {CLASSES}):
        for title, array in _arrays(name, values[name], name in images):
            whole = np.ascontiguousarray(array)
            parts.append(f"{title} {array.dtype.str} {array.shape}\n".encode())
            parts.append(xxhash.xxh3_128_digest(whole.data))
    return xxhash.xxh3_128_digest(b"".join(parts))


def _arrays(name: str, value: Any, is_image: bool) -> Iterator[tuple[str, np.ndarray]]:
    """Yield a field's arrays with their names; a batch on a device has lists of arrays, text and the like."""
    if isinstance(value, Ragged):
        yield f"{name} {value.kind}", value.values
        yield f"{name} offsets", value.offsets
    elif isinstance(value, np.ndarray):
        yield name, value
    elif isinstance(value, list):
        for number, one in enumerate(value):
            if not isinstance(one, np.ndarray):
                one = np.frombuffer(str(one).encode(errors="surrogatepass"), np.uint8)
            yield f"{name} {number}", one
    else:
        import torch

        tensor = value.detach()
        if is_image:
            # in the order of its memory
            tensor = tensor.movedim(-3, -1)
        # numpy lacks some of torch's types, so the hash takes bytes
        whole = tensor.contiguous().unsqueeze(-1)
        yield f"{name} {tensor.dtype}", whole.view(torch.uint8).numpy()


def combine(digests: Iterable[bytes]) -> str:
    """Return 32 hex digits over the hashes of micro-batches, in order."""
    return hashlib.blake2b(b"".join(digests), digest_size=16).hexdigest()
