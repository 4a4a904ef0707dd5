"""Images/s of any Dataset on a pretended cluster of three nodes, by the number of actors.

    python benchmarks/item_nodes.py

A head without CPUs, where the consumer is, and two nodes of 2 CPUs. An item sleeps 20 ms, as if it waited for a
disk, so that two cores are enough for all.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "tests/faults"))
from local_nodes import Nodes  # isort: skip  it says where Ray keeps its files

import numpy as np

from raypipe import DataLoader

_ITEM_S = 0.02
_BATCH = 32
_GROWN_S = 30.0  # until actors run and blocks are as large as they get
_MEASURED_S = 20.0


class Slow:
    """Images of 64 px, each of which takes its time."""

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> np.ndarray:
        time.sleep(_ITEM_S)
        return np.full((64, 64, 3), index % 256, np.uint8)


def rate(actors: int) -> float:
    """Images/s of a stream with so many actors."""
    batches = iter(DataLoader(Slow(), _BATCH, num_workers=actors))
    begun = time.monotonic()
    num = 0
    measured_s = 0.0
    while measured_s < _MEASURED_S:
        next(batches)
        measured_s = time.monotonic() - begun - _GROWN_S
        num += measured_s > 0
    return num * _BATCH / measured_s


if __name__ == "__main__":
    nodes = Nodes()
    for actors in (1, 2, 4):
        print(f"{actors} actors: {rate(actors):.0f} images/s")
    nodes.close()
