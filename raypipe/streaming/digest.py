"""The digest of a stream: one hash over index, label, pixels, masks and boxes of every micro-batch, in order.

Two streams are the same stream if their digests are equal, whatever pool, workers and history made them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import ray

from raypipe.device.prefetcher import HostBatch
from raypipe.errors import RaypipeError
from raypipe.plan.cursor import Cursor
from raypipe.plan.schedule import rank_of
from raypipe.streaming.rank_stream import host_batches

if TYPE_CHECKING:
    from ray.data import DataIterator

    from raypipe.streaming.pipeline import StreamSpec


def batch_digest(batch: HostBatch) -> bytes:
    """16 bytes over the place, index, label, weight and pixels of one micro-batch, and its masks and boxes."""
    digest = hashlib.blake2b(f"{batch.at} {batch.image.shape}".encode(), digest_size=16)
    arrays: list[Any] = [batch.index, batch.label, batch.weight, batch.image]
    if batch.encoded is not None:
        arrays += batch.encoded.values()
    arrays += [array for array in (batch.mask, batch.boxes) if array is not None]
    for array in arrays:
        digest.update(np.ascontiguousarray(array).data)
    return digest.digest()


class Combiner:
    """One digest over those of many micro-batches, in order; holds none of them."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=16)

    def add(self, digest: bytes) -> None:
        self._hash.update(digest)

    def hex(self) -> str:
        """32 hex digits over what was added so far."""
        return self._hash.hexdigest()


def combine(digests: Iterable[bytes]) -> str:
    """32 hex digits over the digests of micro-batches, in order."""
    combiner = Combiner()
    for digest in digests:
        combiner.add(digest)
    return combiner.hex()


@dataclass(frozen=True)
class MicroBatchDigest:
    """What is left of a micro-batch.

    Attributes:
        name: of its place.
        digest: 16 bytes.
        num_samples: with weight.
    """

    name: str
    digest: bytes
    num_samples: int


# Digests that a consumer hands on at a time: few enough to follow, many enough to cost nothing.
_CHUNK = 16


@ray.remote(num_cpus=0)
def _consume(iterator: DataIterator) -> Iterator[list[MicroBatchDigest]]:
    made = []
    for batch in host_batches(iterator):
        made.append(MicroBatchDigest(str(batch.at), batch_digest(batch), int((batch.weight > 0).sum())))
        if len(made) == _CHUNK:
            yield made
            made = []
    yield made


def iterate_digests(
    spec: StreamSpec, cursor: Cursor, *, max_actors: int, world_size: int
) -> Iterator[MicroBatchDigest]:
    """Run the stream from a cursor through W consumers; yields in the order of the plan, as they come.

    To end it at a step, end its plan there (`Plan.until`): all ranks then come to their end together, and so does
    the execution. It must be iterated to its end.

    Raises:
        RaypipeError: a rank got other micro-batches than the plan gives it.
    """
    iterators = spec.splits(cursor, max_actors=max_actors, world_size=world_size)
    ranks = [_digests_of(_consume.options(num_returns="streaming").remote(iterator)) for iterator in iterators]
    for at in spec.plan.micro_batches(cursor):
        rank = rank_of(at.micro, world_size)
        found = next(ranks[rank], None)
        if found is None or found.name != str(at):
            got = "ended" if found is None else f"brought {found.name}"
            raise RaypipeError(f"rank {rank} expected {at}, the stream {got}")
        yield found
    for rank, left in enumerate(ranks):
        for found in left:
            raise RaypipeError(f"rank {rank} expected the end, the stream brought {found.name}")


def _digests_of(stream: Any) -> Iterator[MicroBatchDigest]:
    for ref in stream:
        try:
            made = ray.get(ref)
        except ray.exceptions.RayTaskError as error:
            raise error.cause from None
        yield from made


def stream_digests(
    spec: StreamSpec, cursor: Cursor, *, max_actors: int, world_size: int
) -> tuple[list[bytes], int]:
    """All of `iterate_digests`.

    Returns:
        The digest of each micro-batch, in the order of the plan, and the number of samples with weight.
    """
    found = list(iterate_digests(spec, cursor, max_actors=max_actors, world_size=world_size))
    return [one.digest for one in found], sum(one.num_samples for one in found)


def tail_digest(spec: StreamSpec, num_tail: int, *, max_actors: int, world_size: int) -> tuple[str, str]:
    """Run the whole stream, unbroken.

    Returns:
        The digest of all of it, and of its last `num_tail` micro-batches.
    """
    whole, tail = Combiner(), Combiner()
    start = spec.plan.start()
    before = spec.plan.num_micro_batches(start) - num_tail
    found = iterate_digests(spec, start, max_actors=max_actors, world_size=world_size)
    for number, one in enumerate(found):
        whole.add(one.digest)
        if number >= before:
            tail.add(one.digest)
    return whole.hex(), tail.hex()
