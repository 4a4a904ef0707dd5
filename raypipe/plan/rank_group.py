"""Which ranks one execution serves, and so which micro-batches of the stream it makes.

    W = 4 ranks in G = 2 groups of R = 2

    micro-batch of the stream   0 1 2 3 | 4 5 6 7 | …
    its rank                    0 1 2 3 | 0 1 2 3
    its group                   0 0 1 1 | 0 0 1 1
    its number in the group     0 1 0 1 | 2 3 2 3      and number mod R is the rank within the group

The groups' streams, put together, are the stream: what a rank gets does not depend on G.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from raypipe.errors import ConfigError

_Number = TypeVar("_Number", int, np.ndarray)


@dataclass(frozen=True)
class RankGroup:
    """R consecutive ranks of W; all of them by default.

    Attributes:
        index: g, the group's number, in [0, W / R).
        size: R, ranks in each group.
        world_size: W.
    """

    index: int = 0
    size: int = 1
    world_size: int = 1

    @property
    def num_groups(self) -> int:
        """G."""
        return self.world_size // self.size

    def count(self, total: int) -> int:
        """How many of `total` micro-batches, a multiple of W, are this group's."""
        assert total % self.world_size == 0
        return total // self.num_groups

    def in_stream(self, number: _Number) -> _Number:
        """Numbers of micro-batches in this group → their numbers in the whole stream."""
        turn, rank = number // self.size, number % self.size
        return turn * self.world_size + self.index * self.size + rank

    def share(self, total: int) -> int:
        """This group's share of a number of things; the shares of all groups add up to it."""
        return total * (self.index + 1) // self.num_groups - total * self.index // self.num_groups


EVERY_RANK = RankGroup()
"""The group of a stream that is not shared out among executions, whatever W."""


def rank_groups(world_size: int, executions: int) -> list[RankGroup]:
    """W ranks in as many groups as there are executions.

    Raises:
        ConfigError: their number does not divide W.
    """
    if executions < 1 or world_size % executions:
        divisors = [g for g in range(1, world_size + 1) if world_size % g == 0]
        raise ConfigError(
            f"pool.executions={executions} does not divide {world_size} workers: each execution serves as many "
            f"ranks as the others; use {', '.join(map(str, divisors))}"
        )
    return [RankGroup(index, world_size // executions, world_size) for index in range(executions)]
