"""How long it takes, and how much memory, to find a micro-batch in the middle of a run over 10^9 samples.

python benchmarks/plan_seek.py
"""

from __future__ import annotations

import json
import time
import tracemalloc

import numpy as np

from raypipe.plan.draws import Draws, Once, Repeated, Walk
from raypipe.plan.mixture import Mixture, as_shares
from raypipe.plan.order import GlobalOrder

_SIZES = [700_000_000, 250_000_000, 49_000_000, 1_000_000]
_BATCH, _MICRO_BATCH, _STEPS, _EPOCH = 1024, 128, 100_000, 57


def plans() -> dict[str, Draws]:
    """What is looked into, by name."""
    leaves = [Once(GlobalOrder(size, number)) for number, size in enumerate(_SIZES)]
    offsets = np.append(0, np.cumsum(_SIZES))
    shares = {epoch: as_shares([1 + epoch, 2, 1, 1]) for epoch in range(0, 60, 10)}
    mixture = Mixture(leaves, offsets, shares, _STEPS, _BATCH, seed=1)
    return {
        "each sample once": Once(GlobalOrder(sum(_SIZES), 1)),
        "epochs of any length": Walk(Once(GlobalOrder(sum(_SIZES), 1)), _STEPS * _BATCH),
        "mixture of four": mixture,
        "mixture, repeated": Repeated(mixture, 2, _MICRO_BATCH),
    }


def main() -> None:
    found = {}
    plans()["mixture, repeated"].draws(0, np.arange(2))  # what is imported at first use is no part of it
    print(f"{sum(_SIZES):,} samples        seek, ms   peak, MiB")
    for name in plans():
        tracemalloc.start()
        draws = plans()[name]  # one that has seen nothing
        started = time.perf_counter()
        draws.draws(_EPOCH, np.arange(10**7, 10**7 + _MICRO_BATCH))
        seek_ms = 1e3 * (time.perf_counter() - started)
        peak_mib = tracemalloc.get_traced_memory()[1] / 2**20
        tracemalloc.stop()
        found[name] = {"seek_ms": round(seek_ms, 2), "peak_mib": round(peak_mib, 2)}
        print(f"{name:25} {seek_ms:8.2f}   {peak_mib:9.2f}")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
