"""The digest of a stream: one hash over index, label and pixels of every micro-batch, in order.

Two streams are the same stream if their digests are equal, whatever pool, workers and history made them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import ray

from raypipe.errors import RaypipeError
from raypipe.plan import Cursor, rank_of
from raypipe.prefetcher import HostBatch
from raypipe.rank_stream import host_batches

if TYPE_CHECKING:
    from ray.data import DataIterator

    from raypipe.pipeline import StreamSpec


def batch_digest(batch: HostBatch) -> bytes:
    """16 bytes over the place, index, label, weight and pixels of one micro-batch."""
    digest = hashlib.blake2b(f"{batch.at} {batch.image.shape}".encode(), digest_size=16)
    arrays: list[Any] = [batch.index, batch.label, batch.weight, batch.image]
    if batch.encoded is not None:
        arrays += batch.encoded.values()
    for array in arrays:
        digest.update(np.ascontiguousarray(array).data)
    return digest.digest()


def combine(digests: Iterable[bytes]) -> str:
    """32 hex digits over the digests of micro-batches, in order."""
    return hashlib.blake2b(b"".join(digests), digest_size=16).hexdigest()


@ray.remote(num_cpus=0)
def _consume(iterator: DataIterator) -> list[tuple[str, bytes, int]]:
    return [
        (str(batch.at), batch_digest(batch), int((batch.weight > 0).sum())) for batch in host_batches(iterator)
    ]


def stream_digests(
    spec: StreamSpec, cursor: Cursor, *, max_actors: int, world_size: int
) -> tuple[list[bytes], int]:
    """Run the stream from a cursor through W consumers.

    Returns:
        The digest of each micro-batch, in the order of the plan, and the number of samples with weight.

    Raises:
        RaypipeError: a rank got other micro-batches than the plan gives it.
    """
    iterators = spec.splits(cursor, max_actors=max_actors, world_size=world_size)
    ranks = _get([_consume.remote(iterator) for iterator in iterators])
    digests, samples = [], 0
    positions = [iter(rank) for rank in ranks]
    for at in spec.plan.micro_batches(cursor):
        rank = rank_of(at.micro, world_size)
        name, digest, real = next(positions[rank], ("the end", b"", 0))
        if name != str(at):
            raise RaypipeError(f"rank {rank} expected {at}, the stream brought {name}")
        digests.append(digest)
        samples += real
    return digests, samples


def _get(refs: list[Any]) -> Any:
    try:
        return ray.get(refs)
    except ray.exceptions.RayTaskError as error:
        raise error.cause from None
