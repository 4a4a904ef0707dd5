"""How long it takes, and how much memory, to find a micro-batch in the middle of a run over 10^9 samples.

python benchmarks/plan_seek.py

Buckets have a table of their samples, 4 to 8 bytes for each. For 10^9 samples the benchmark has none, and a bucket
is so many numbers; for 10^7 it has them, and says what it takes to make them.
"""

from __future__ import annotations

import json
import pickle
import time
import tracemalloc
from collections.abc import Callable, Sequence

import numpy as np

from raypipe.config import PlanConfig
from raypipe.plan.mixture import Mixture, Quotas, as_shares, mix_buckets
from raypipe.plan.order import Shuffle
from raypipe.plan.samplers import Permuted, Repeated, RunSampler
from raypipe.plan.selection import Selection
from raypipe.stores.base import MemoryStore
from raypipe.stores.joined import JoinedStore
from raypipe.streaming.planning import make_plan

_SIZES = [700_000_000, 250_000_000, 49_000_000, 1_000_000]
_BATCH = 1024
_MICRO_BATCH = 128
_STEPS = 100_000
_EPOCH = 57
_SHARES = {
    epoch * _STEPS: as_shares([1 + epoch, 2, 1, 1]) for epoch in range(0, 60, 10)
}
_BUCKETS = ["192x256", "224x224", "256x192"]
_NUM_TABLES = 10_000_000


def _permuted(num: int, seed: int, offset: int = 0) -> Permuted:
    return Permuted(Shuffle("global", num, seed), Selection([], num), offset)


def samplers() -> dict[str, Callable[[], RunSampler]]:
    """What is looked into, by name."""
    offsets = np.append(0, np.cumsum(_SIZES)).tolist()
    sources = list(enumerate(zip(_SIZES, offsets, strict=False)))

    def mixture() -> RunSampler:
        parts = [_permuted(size, number, offset) for number, (size, offset) in sources]
        return Mixture(parts, Quotas(_SHARES, _BATCH, 1), 1)

    def in_buckets() -> RunSampler:
        buckets = [
            [
                _permuted(size // part, number, offset)
                for number, part in enumerate((2, 3, 6))
            ]
            for _, (size, offset) in sources
        ]
        return mix_buckets(buckets, _SHARES, _BATCH // _MICRO_BATCH, _MICRO_BATCH, 1)

    return {
        "each sample once": lambda: _permuted(sum(_SIZES), 1),
        "mixture of four": mixture,
        "mixture, repeated": lambda: Repeated(mixture(), 2, _MICRO_BATCH),
        "mixture in buckets": in_buckets,
        "mixture in buckets, repeated": lambda: Repeated(in_buckets(), 2, _MICRO_BATCH),
    }


def with_tables(weights: Sequence[str]) -> tuple[RunSampler, float, float]:
    """A mixture in buckets over 10^7 samples, with seconds and MiB that it took to lay out."""
    rng = np.random.default_rng(0)
    parts = {}
    for number, size in enumerate(np.array(_SIZES) * _NUM_TABLES // sum(_SIZES)):
        columns = {
            name: rng.integers(200, 800, size) for name in ("width", "height", *weights)
        }
        parts[f"s{number}"] = _Sized(columns)
    config = PlanConfig(
        micro_batch_size=_MICRO_BATCH,
        global_batch_size=_BATCH,
        buckets=_BUCKETS,
        weights=weights[0] if weights else "",
        mixture={f"s{number}": 1.0 for number in range(len(_SIZES))},
        epoch_samples="longest",
    )
    started = time.perf_counter()
    training = make_plan(config, JoinedStore(parts)).training
    laid_out_s = time.perf_counter() - started
    mib = len(pickle.dumps(training)) / 2**20
    assert training
    return training.sampler, laid_out_s, mib


class _Sized(MemoryStore):
    """Samples that have columns of numbers and no images."""

    def __init__(self, found: dict[str, np.ndarray]) -> None:
        self._found = found
        self.columns = ("image", "label", *found)
        self.address = self.fingerprint = f"{len(self)} sizes"
        self.groups = None

    def __len__(self) -> int:
        return len(self._found["width"])

    def read(
        self, indices: np.ndarray, columns: tuple[str, ...] = ("image", "label")
    ) -> dict[str, np.ndarray]:
        return {name: self._found[name][indices] for name in columns}


def main() -> None:
    found = {}
    # What is imported at first use is no part of it.
    samplers()["mixture in buckets, repeated"]().draw(np.arange(2))
    print(f"{sum(_SIZES):,} samples            seek, ms   peak, MiB")

    def seek(name: str, sampler: Callable[[], RunSampler], first: int) -> None:
        positions = np.arange(first, first + _MICRO_BATCH) + _EPOCH * _STEPS * _BATCH
        started = time.perf_counter()
        sampler().draw(positions)  # one that has seen nothing
        seek_ms = 1e3 * (time.perf_counter() - started)
        tracemalloc.start()
        sampler().draw(positions)
        peak_mib = tracemalloc.get_traced_memory()[1] / 2**20
        tracemalloc.stop()
        found[name] = {"seek_ms": round(seek_ms, 2), "peak_mib": round(peak_mib, 2)}
        print(f"{name:29} {seek_ms:8.2f}   {peak_mib:9.2f}")

    for name, sampler in samplers().items():
        seek(name, sampler, _MICRO_BATCH * 78_125)
    print(f"\n{_NUM_TABLES:,} samples, with tables")
    for name, weights in {
        "mixture in buckets, tables": (),
        "the same by weights": ("weight",),
    }.items():
        laid_out, seconds, mib = with_tables(weights)
        seek(name, lambda laid_out=laid_out: laid_out, _MICRO_BATCH * 78)  # type: ignore[misc]
        found[name] |= {"lay_out_s": round(seconds, 2), "tables_mib": round(mib, 1)}
        print(f"{'':29} laid out in {seconds:.1f} s, {mib:.0f} MiB")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
