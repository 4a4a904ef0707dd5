"""The stream made in this process, without Ray: for a debugger, a notebook, a first look, tests of a transform.

Plan and transforms, and so the bits, are those of a cluster. Nothing is supervised: what crashes ends the process.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from queue import SimpleQueue

from raypipe.errors import ConfigError
from raypipe.plan.cursor import Cursor
from raypipe.plan.places import MicroBatchId
from raypipe.streaming.maker import MicroBatchMaker
from raypipe.streaming.spec import StreamSpec
from raypipe.transform.batch import HostBatch


def inline_batches(spec: StreamSpec, cursor: Cursor, rank: int = 0, world_size: int = 1) -> Iterator[HostBatch]:
    """A rank's micro-batches from a cursor on, by pool.threads threads; 0 = each when it is asked for.

    Raises:
        ConfigError: threads were asked for, and a transform draws from generators that all threads share.
    """
    places = (at for at in spec.plan.micro_batches(cursor) if at.micro % world_size == rank)
    if not spec.pool.threads:
        yield from map(MicroBatchMaker(*spec.recipe).batch, places)
        return
    makers = SimpleQueue[MicroBatchMaker]()  # those at rest: one serves a thread at a time
    for _ in range(spec.pool.threads):
        maker = MicroBatchMaker(*spec.recipe)
        if split := maker.draws_globally():
            raise ConfigError(
                f"pool.threads is {spec.pool.threads}, and the {split} transform draws from generators that "
                "threads share: set pool.threads=0, or let it take rng (docs/transforms.md)"
            )
        makers.put(maker)

    def batch(at: MicroBatchId) -> HostBatch:
        maker = makers.get()
        try:
            return maker.batch(at)
        finally:
            makers.put(maker)

    pool = ThreadPoolExecutor(spec.pool.threads, "raypipe-inline")
    try:
        ahead = deque(pool.submit(batch, at) for at in islice(places, 2 * spec.pool.threads))
        while ahead:
            yield ahead.popleft().result()
            ahead.extend(pool.submit(batch, at) for at in islice(places, 1))
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
