"""The stream made in this process, without Ray: for a debugger, a notebook, a first look, tests of a transform.

Plan and transforms, and so the bits, are those of a cluster. Nothing is supervised: what crashes ends the process.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import islice

from raypipe.plan.places import Cursor, MicroBatchId
from raypipe.storage.retries import Threads
from raypipe.stores.in_memory import hold
from raypipe.streaming.maker import MicroBatchMaker
from raypipe.streaming.spec import StreamSpec
from raypipe.transform.fields import MicroBatch


def inline_batches(
    spec: StreamSpec,
    start: Cursor | MicroBatchId,
    rank: int = 0,
    world_size: int = 1,
    maker: MicroBatchMaker | None = None,
) -> Iterator[MicroBatch]:
    """Yield a rank's micro-batches from a place on, made by pool.max_actors threads.

    Without such threads, or if a transform draws from the process's generators, the consumer's thread makes
    them.

    Args:
        maker: the stream's maker; None = a new one.
    """
    hold(spec.stores.values())
    maker = maker or MicroBatchMaker(spec)
    places = spec.plan.micro_batches(start, share=(rank, world_size))
    if maker.draws_globally or not spec.pool.max_actors:
        return (maker.batch(position) for position in places)
    return _by_threads(spec, maker, places)


def _by_threads(
    spec: StreamSpec, maker: MicroBatchMaker, places: Iterator[MicroBatchId]
) -> Iterator[MicroBatch]:
    """Yield micro-batches in order, which threads make ahead of use."""
    num_threads = spec.pool.max_actors
    # those at rest: one serves a thread at a time, with its own copy of the user's code, as actors have
    makers = deque([maker])
    for _ in range(num_threads - 1):
        makers.append(MicroBatchMaker(spec.with_own_code()))

    def batch(position: MicroBatchId) -> MicroBatch:
        maker = makers.popleft()
        try:
            return maker.batch(position)
        finally:
            makers.append(maker)

    with Threads(num_threads) as pool:
        first = islice(places, 2 * num_threads)
        ahead = deque(pool.submit(batch, position) for position in first)
        while ahead:
            yield ahead.popleft().result()
            ahead.extend(pool.submit(batch, position) for position in islice(places, 1))
