"""What a stream holds, made in this process: what a real one, on a cluster, must be equal to."""

from __future__ import annotations

from collections.abc import Iterator

from raypipe.streaming.digest import batch_digest
from raypipe.streaming.maker import MicroBatchMaker
from raypipe.streaming.spec import StreamSpec
from raypipe.transform.batch import HostBatch


def host_batches(spec: StreamSpec, from_step: int = 0) -> Iterator[HostBatch]:
    """Each micro-batch from a training step on, by one worker, which reads the store itself."""
    maker = MicroBatchMaker(*spec.recipe)
    return (maker.batch(at) for at in spec.plan.micro_batches(spec.plan.cursor_at(from_step)))


def digests(spec: StreamSpec, from_step: int = 0) -> list[bytes]:
    return [batch_digest(batch) for batch in host_batches(spec, from_step)]
