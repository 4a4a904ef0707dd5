"""How much memory a stream takes: the object store's, beside its bound, and that of this machine's Ray processes.

    python benchmarks/memory.py STORE [--transform heavy --size 224 --actors 2 --micro-batch-size 256 --epochs 3]

Prints a table; the last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import threading
import time
from pathlib import Path
from types import TracebackType

import raypipe  # isort: skip
import numpy as np
import ray
from ray._private.internal_api import node_stats

from raypipe.config import PlanConfig, PoolConfig, TransformConfig
from raypipe.printing import print_table

_PERIOD_S = 0.25
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
LET_GO_S = 1.0
"""Ray frees an object up to so long after the last one who held it has let go of it."""


def object_store_bound(
    in_flight: int, ranks: int, per_s: float, micro_batch_bytes: int, block: int = 1
) -> int:
    """The most bytes of pixels that a stream has in the object store.

    Args:
        in_flight: blocks that may be in flight.
        ranks: each holds one, has asked for another, and one is ready.
        per_s: micro-batches/s, the most of any second.
        micro_batch_bytes: B·H·W·3.
        block: micro-batches in the largest.
    """
    return round(
        ((in_flight + 3 * ranks) * block + per_s * LET_GO_S) * micro_batch_bytes
    )


class MemoryWatch:
    """Looks at the memory of the connected cluster four times a second, while it is entered.

    Attributes:
        object_store: most bytes that the object stores of all nodes have held.
        spilled: bytes that they have written to disk, in all since the cluster was started.
        private: most bytes of the pages that this process and its descendants shared with nobody: where the
            cluster is one that this process has started, all of Ray's processes.
    """

    def __init__(self) -> None:
        self.object_store = self.spilled = self.private = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=self._watch, name="MemoryWatch", daemon=True
        )

    def __enter__(self) -> MemoryWatch:
        self._nodes = [node for node in ray.nodes() if node["Alive"]]
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(_PERIOD_S):
            stores = [
                node_stats(
                    node["NodeManagerAddress"], node["NodeManagerPort"], False
                ).store_stats
                for node in self._nodes
            ]
            self.object_store = max(
                self.object_store,
                sum(store.object_store_bytes_used for store in stores),
            )
            self.spilled = max(
                self.spilled, sum(store.spilled_bytes_total for store in stores)
            )
            self.private = max(self.private, private_bytes(os.getpid()))


def private_bytes(root: int) -> int:
    """Bytes of the pages that a process and its descendants share with nobody; shared memory is left out."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:  # it has ended
                continue
            children.setdefault(parent, []).append(int(entry.name))
    found = 0
    tree = [root]
    while tree:
        pid = tree.pop()
        tree += children.get(pid, [])
        try:
            _, resident, shared, *_ = map(
                int, Path(f"/proc/{pid}/statm").read_text().split()
            )
        except OSError:
            continue
        found += (resident - shared) * _PAGE_BYTES
    return found


def most_per_s(arrivals: np.ndarray) -> float:
    """Most micro-batches of any second."""
    return float(
        (np.searchsorted(arrivals, arrivals + 1.0) - np.arange(len(arrivals))).max()
    )


def measure(
    store: raypipe.stores.Store, transform: TransformConfig, args: argparse.Namespace
) -> dict[str, int]:
    """Stream a store through one consumer; the peaks of what it takes, and the bound, in bytes."""
    from raypipe.streaming.blocks import MAX_BYTES
    from raypipe.streaming.opening import open_stream
    from raypipe.streaming.pipeline import splits
    from raypipe.streaming.row import host_batches

    spec = open_stream(
        store,
        plan=PlanConfig(
            epochs=args.epochs, micro_batch_size=min(args.micro_batch_size, len(store))
        ),
        transform=transform,
        pool=PoolConfig(min_actors=args.actors, max_actors=args.actors),
    )
    raypipe.connect()
    (iterator,) = splits(spec, spec.plan.start(), max_actors=args.actors)
    arrivals = []
    num_bytes = 0
    with MemoryWatch() as memory:
        for batch in host_batches(iterator):
            arrivals.append(time.perf_counter())
            num_bytes = batch["image"].nbytes
    fixed, per_actor, _ = spec.pool.blocks_for(1, args.actors)
    most = most_per_s(np.array(arrivals))
    block = max(1, MAX_BYTES // num_bytes)
    return {
        "micro_batch_bytes": num_bytes,
        "object_store_bytes": memory.object_store,
        "object_store_bound_bytes": object_store_bound(
            fixed + per_actor * args.actors, 1, most, num_bytes, block
        ),
        "spilled_bytes": memory.spilled,
        "private_bytes": memory.private,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("store")
    parser.add_argument("--transform", default="heavy")
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--actors", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--micro-batch-size", type=int, default=256)
    parser.add_argument("--epochs", type=int, default=3)
    args = parser.parse_args()
    transform = TransformConfig(train=args.transform, size=args.size)
    found = measure(raypipe.open_store(args.store), transform, args)
    ray.shutdown()
    rows = [
        (name.replace("_bytes", "").replace("_", " "), f"{n / 2**20:,.0f} MiB")
        for name, n in found.items()
    ]
    print_table(args.store, dict(rows))
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
