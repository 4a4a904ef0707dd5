"""Blocks of the stream, the units that Ray moves. They have no effect on what the model learns.

A block is up to k micro-batches of one rank and one segment. Blocks come in rounds, one for each of the R ranks
that an execution serves, so that block b is for rank b mod R:

    micro-batch   0  1  2  3  4  5 | 6  7  8  9        R = 2 ranks, k = 3, a segment of 10 micro-batches
    block         0  1  0  1  0  1 | 2  3  2  3
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby, islice
from statistics import median

from raypipe.plan.places import MicroBatchId, Split

Block = list[MicroBatchId]
"""Micro-batches of one rank and one segment, in order."""

# Limits of a block: seconds of an actor's work, and bytes. Ray spends about 30 ms of CPU time on a block,
# little compared with a second, which is also the longest wait for a block. With half a second, samples of 2 ms, a
# micro-batch of 0.3 s, had blocks of one: 8 % more CPU time in all.
MAX_SECONDS = 1.0
MAX_BYTES = 256 << 20
# Where few CPUs make few blocks, smaller ones: blocks of 256 MiB took no less CPU time than of 128, in twice the
# memory. Of 64 they took 12 % more for images of 224 px from short side 256, and 3 % more for whole photos.
_BYTES_PER_CPU = 64 << 20
REMEMBERED_FACTOR = 4
"""A block of a split that is remembered is so many times as large: to copy an image costs less than its share of
what Ray spends on a block."""

# Micro-batches per rank of the first ReadTask, and of the longest, since a lost reader starts again.
# Each has twice those of the one before.
_FIRST_TASK = 16
_LONGEST_TASK = 1024
_MAX_TASKS = 256
# Blocks of a rank in one task, at least: those of the first tasks are small, so that the first batch is not late.
_BLOCKS_OF_TASK = 8
_NUM_MEASURED = 32


def tasks(total: int, ranks: int) -> list[tuple[int, int]]:
    """The shares of the ReadTasks: first micro-batch and how many; each consists of whole rounds of the ranks.

    Args:
        total: micro-batches of an execution.
        ranks: number that it serves; it divides the total.
    """
    longest = max(_LONGEST_TASK, -(-total // _MAX_TASKS))
    longest = -(-longest // ranks) * ranks
    task_ranges: list[tuple[int, int]] = []
    first = 0
    size = _FIRST_TASK * ranks
    while first < total or not task_ranges:
        task_ranges.append((first, min(size, total - first)))
        first, size = first + size, min(2 * size, longest)
    return task_ranges


def cut(
    places: Iterable[MicroBatchId], ranks: int, sizes: Mapping[Split, int]
) -> Iterator[Block]:
    """Cut the micro-batches of a task into blocks.

    Args:
        places: whole rounds of the ranks, in the order of the plan.
        ranks: R.
        sizes: k of each split.
    """
    for (split, _), segment in groupby(
        places, key=lambda position: (position.split, position.epoch)
    ):
        while of_round := list(islice(segment, ranks * sizes[split])):
            yield from (of_round[rank::ranks] for rank in range(ranks))


def most(count: int, ranks: int) -> int:
    """The largest k for a task of this many micro-batches."""
    return max(1, count // (ranks * _BLOCKS_OF_TASK))


def most_bytes(cpus: int, room: float) -> int:
    """Return the most bytes of a block, for a pool of so many CPUs and so much room in the object store."""
    return int(min(MAX_BYTES, cpus * _BYTES_PER_CPU, room))


class Sizes:
    """Sizes of the blocks of a stream's tasks, from reports of its actors about their first ones.

    A task that asks again, since it was restarted, gets the same sizes: its blocks must not change.
    """

    def __init__(self) -> None:
        # seconds and bytes of some finished micro-batches, by split
        self._measured: dict[str, deque[tuple[float, int]]] = {}
        self._sizes: dict[str, dict[Split, int]] = {}  # task → k of each split
        self._remembered = set[Split]()

    def measured(self, split: str, seconds: float, num_bytes: int) -> None:
        """An actor has made a block: the seconds and bytes of a micro-batch."""
        of_split = self._measured.setdefault(split, deque(maxlen=_NUM_MEASURED))
        of_split.append((seconds, num_bytes))

    def remembered(self, split: Split) -> None:
        """Micro-batches of a split are remembered, so that later epochs need not make them."""
        self._remembered.add(split)

    def of_task(
        self, task: str, max_size: int, max_bytes: int, max_bytes_remembered: int
    ) -> dict[Split, int]:
        """Return the micro-batches per block of a task, by split.

        Args:
            max_size: limit from its share.
            max_bytes: most bytes of a block.
            max_bytes_remembered: most bytes of a block of a split that is remembered.
        """
        if task not in self._sizes:
            splits: tuple[Split, ...] = ("train", "val")
            self._sizes[task] = {
                split: min(max_size, self._size(split, max_bytes, max_bytes_remembered))
                for split in splits
            }
        return self._sizes[task]

    def _size(self, split: Split, max_bytes: int, max_bytes_remembered: int) -> int:
        """The largest k whose blocks stay below the limits; 1 without measurements."""
        measured = self._measured.get(split)
        if not measured:
            return 1
        seconds = max(median(seconds for seconds, _ in measured), 1e-6)
        num_bytes = max(1, *(num_bytes for _, num_bytes in measured))
        size = max(1, int(min(MAX_SECONDS / seconds, max_bytes / num_bytes)))
        if split in self._remembered:
            most = max(size, max_bytes_remembered // num_bytes)
            size = min(size * REMEMBERED_FACTOR, most)
        return size
