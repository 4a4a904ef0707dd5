"""How long it takes, and how much memory, to find a micro-batch in the middle of a run over 10^9 samples.

python benchmarks/plan_seek.py

Buckets have a table of their samples, 4 to 8 bytes for each. For 10^9 samples the benchmark has none, and a bucket
is an order of so many numbers; for 10^7 it has them, and says what it takes to make them.
"""

from __future__ import annotations

import json
import pickle
import time
import tracemalloc
from collections.abc import Callable, Sequence

import numpy as np

from raypipe.config import PlanConfig
from raypipe.plan.buckets import Bucket, mixed
from raypipe.plan.draws import Draws, Once, Passes, Repeated, Walk
from raypipe.plan.layout import lay_out
from raypipe.plan.mixture import Mixture, Turns, as_shares
from raypipe.plan.order import GlobalOrder
from raypipe.plan.selection import Chosen, JoinedSelection, Kept
from raypipe.stores.base import MemoryStore
from raypipe.stores.joined import JoinedStore

_SIZES = [700_000_000, 250_000_000, 49_000_000, 1_000_000]
_BATCH, _MICRO_BATCH, _STEPS, _EPOCH = 1024, 128, 100_000, 57
_SHARES = {epoch: as_shares([1 + epoch, 2, 1, 1]) for epoch in range(0, 60, 10)}
_BUCKETS = ["192x256", "224x224", "256x192"]
_NUM_TABLES = 10_000_000


class _Numbers(Chosen):
    """A bucket's samples without a table: as many as are said."""

    def __init__(self, num: int) -> None:
        self.chosen = np.broadcast_to(np.uint8(0), num)


def _bucket(num: int, seed: int) -> Bucket:
    return Bucket(_Numbers(num), Once(GlobalOrder(num, seed)))


def plans() -> dict[str, Callable[[], Draws]]:
    """What is looked into, by name."""
    whole, per_epoch = Passes(Once(GlobalOrder(sum(_SIZES), 1))), _STEPS * _BATCH
    offsets = np.append(0, np.cumsum(_SIZES))
    leaves = [Once(GlobalOrder(size, number)) for number, size in enumerate(_SIZES)]
    parts = [Passes(leaf, int(offset)) for leaf, offset in zip(leaves, offsets, strict=False)]
    buckets = [[_bucket(size // 2, 1), _bucket(size // 3, 2), _bucket(size // 6, 3)] for size in _SIZES]

    def mixture() -> Draws:
        return Walk(Mixture(parts, Turns(_SHARES, _STEPS, _BATCH, seed=1)), per_epoch)

    def in_buckets() -> Draws:
        places = _BATCH // _MICRO_BATCH
        return Walk(mixed(buckets, offsets, _SHARES, _STEPS, places, _MICRO_BATCH, seed=1), per_epoch)

    return {
        "each sample once": lambda: Once(GlobalOrder(sum(_SIZES), 1)),
        "epochs of any length": lambda: Walk(whole, per_epoch),
        "mixture of four": mixture,
        "mixture, repeated": lambda: Repeated(mixture(), 2, _MICRO_BATCH),
        "mixture in buckets": in_buckets,
        "mixture in buckets, repeated": lambda: Repeated(in_buckets(), 2, _MICRO_BATCH),
    }


def with_tables(weights: Sequence[str]) -> tuple[Draws, float, float]:
    """A mixture in buckets over 10^7 samples, with seconds and MiB that it took to lay out."""
    rng = np.random.default_rng(0)
    parts = {}
    for number, size in enumerate(np.array(_SIZES) * _NUM_TABLES // sum(_SIZES)):
        columns = {name: rng.integers(200, 800, size) for name in ("width", "height", *weights)}
        parts[f"s{number}"] = _Sized(columns)
    store = JoinedStore(parts)
    config = PlanConfig(
        micro_batch_size=_MICRO_BATCH,
        global_batch_size=_BATCH,
        buckets=_BUCKETS,
        weights=weights[0] if weights else "",
        mixture={f"s{number}": 1 for number in range(len(_SIZES))},
        epoch_samples="longest",
    )
    kept = JoinedSelection([Kept(np.array([], np.int64)) for _ in parts], store.offsets)
    started = time.perf_counter()
    layout = lay_out(config, store, kept)
    laid_out_s, mib = time.perf_counter() - started, len(pickle.dumps(layout)) / 2**20
    assert layout.draws is not None
    return layout.draws, laid_out_s, mib


class _Sized(MemoryStore):
    """Samples that have columns of numbers and no images."""

    def __init__(self, found: dict[str, np.ndarray]) -> None:
        self._found, self.columns = found, ("image", "label", *found)
        self.address = self.fingerprint = f"{len(self)} sizes"
        self.groups = None

    def __len__(self) -> int:
        return len(self._found["width"])

    def read(self, indices: np.ndarray, columns: tuple[str, ...] = ("image", "label")) -> dict[str, np.ndarray]:
        return {name: self._found[name][indices] for name in columns}


def main() -> None:
    found = {}
    plans()["mixture in buckets, repeated"]().draws(
        0, np.arange(2)
    )  # what is imported at first use is no part of it
    print(f"{sum(_SIZES):,} samples            seek, ms   peak, MiB")

    def seek(name: str, draws: Callable[[], Draws], first: int) -> None:
        positions = np.arange(first, first + _MICRO_BATCH)
        started = time.perf_counter()
        draws().draws(_EPOCH, positions)  # one that has seen nothing
        seek_ms = 1e3 * (time.perf_counter() - started)
        tracemalloc.start()
        draws().draws(_EPOCH, positions)
        peak_mib = tracemalloc.get_traced_memory()[1] / 2**20
        tracemalloc.stop()
        found[name] = {"seek_ms": round(seek_ms, 2), "peak_mib": round(peak_mib, 2)}
        print(f"{name:29} {seek_ms:8.2f}   {peak_mib:9.2f}")

    for name, draws in plans().items():
        seek(name, draws, _MICRO_BATCH * 78_125)
    print(f"\n{_NUM_TABLES:,} samples, with tables")
    for name, weights in {"mixture in buckets, tables": (), "the same by weights": ("weight",)}.items():
        laid_out, seconds, mib = with_tables(weights)
        seek(name, lambda laid_out=laid_out: laid_out, _MICRO_BATCH * 78)
        found[name] |= {"lay_out_s": round(seconds, 2), "tables_mib": round(mib, 1)}
        print(f"{'':29} laid out in {seconds:.1f} s, {mib:.0f} MiB")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
