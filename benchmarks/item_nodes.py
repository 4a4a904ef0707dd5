"""Images/s of any Dataset on a pretended cluster of three nodes, by the number of actors.

    python benchmarks/item_nodes.py [--actors 1 2 4 --item-ms 20 --seconds 20]

A head without CPUs, where the consumer is, and two nodes of 2 CPUs. An item sleeps, as one does that waits for a
disk, so that two cores are enough for all. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "tests/faults"))
from local_nodes import Nodes  # isort: skip  it says where Ray keeps its files

import numpy as np

from raypipe import DataLoader

_BATCH = 32
_GROWN_S = 10.0  # until actors run and blocks are as large as they get


class Slow:
    """Images of 64 px, each of which takes its time."""

    def __init__(self, item_s: float) -> None:
        self.item_s = item_s

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        time.sleep(self.item_s)
        return np.full((64, 64, 3), index % 256, np.uint8), index % 10


def rate(actors: int, item_s: float, seconds: float) -> float:
    """Images/s of a stream with so many actors."""
    loader = DataLoader(Slow(item_s), _BATCH, shuffle=True, num_workers=actors)
    begun = time.monotonic()
    started = 0.0
    num = 0
    for _, labels in loader:
        now = time.monotonic()
        if not started:
            started = now if now - begun > _GROWN_S else 0.0
            continue
        num += len(labels)
        if now - started > seconds:
            break
    del loader
    return num / (time.monotonic() - started)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--actors", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--item-ms", type=float, default=20.0)
    parser.add_argument("--seconds", type=float, default=20.0)
    options = parser.parse_args()
    nodes = Nodes()
    rates = {}
    for actors in options.actors:
        rates[actors] = rate(actors, options.item_ms / 1000, options.seconds)
        ceiling = actors * 1000 / options.item_ms
        print(f"{actors} actors: {rates[actors]:.0f} images/s of {ceiling:.0f}")
    nodes.close()
    print(json.dumps(rates))


if __name__ == "__main__":
    main()
