"""What a store is, and which of its samples are bad.

describe   what the store says of itself, and what a few samples spread over it are; in this process
verify     every sample read and decoded, on Ray, in tasks over ranges; the bad ones as a list for runs
           to leave out, see `raypipe.stores.bad_list`
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from raypipe.commands.sample_check import NO_TARGETS, PART, check_range, check_samples, spread
from raypipe.commands.tasks import Cpus, follow, stopped_on_error
from raypipe.rayext.cluster import connect
from raypipe.storage.whole_file import check_place
from raypipe.stores.bad_list import write_bad_list
from raypipe.stores.base import Store

# Samples that a description looks at: decoded within a second or two.
_NUM_SAMPLED = 64
# Ranges of unlike cost even out over the CPUs; each opens the store anew, which of a folder is a scan.
_TASKS_PER_CPU = 2


def describe(store: Store, targets: Mapping[str, str] = NO_TARGETS) -> dict[str, Any]:
    """What a store is.

    Args:
        store: to look at.
        targets: columns of masks and boxes that are decoded with the images, see `TransformConfig.target_columns`.

    Returns:
        `store` (address), `kind`, `samples`, `bytes` (of the encoded images, by the mean of the sampled),
        `columns` (names), `classes` and `groups` (how many, None where it has none), `fingerprint`; and of
        `sampled` samples that were decoded: `formats` (kind → how many), `image_bytes`, `height_px` and `width_px`
        ([least, median, most], None without any), and `bad`, how many of them are bad.

    Raises:
        StoreError: it cannot be opened.
    """
    groups = store.groups
    samples = list(check_samples(store, spread(store, _NUM_SAMPLED), targets))
    good = [sample for sample in samples if not sample.error]
    mean_bytes = sum(sample.num_bytes for sample in samples) / max(1, len(samples))
    return {
        "store": store.address,
        "kind": type(store).__name__.removesuffix("Store").lower(),
        "samples": len(store),
        "bytes": round(mean_bytes * len(store)),
        "columns": list(store.columns),
        "classes": None if store.classes is None else len(store.classes),
        "groups": None if groups is None else len(groups) - 1,
        "fingerprint": store.fingerprint,
        "sampled": len(samples),
        "formats": dict(Counter(sample.kind or "unknown" for sample in samples)),
        "image_bytes": _range([sample.num_bytes for sample in samples]),
        "height_px": _range([sample.height for sample in good]),
        "width_px": _range([sample.width for sample in good]),
        "bad": len(samples) - len(good),
    }


def _range(values: list[int]) -> list[int] | None:
    return [min(values), int(np.median(values)), max(values)] if values else None


def verify(
    store: Store, output: str = "", *, targets: Mapping[str, str] = NO_TARGETS, progress: bool = True
) -> dict[str, Any]:
    """Read and decode every sample of a store, on the connected Ray cluster or a local one that is started for it.

    A store on a local path is verified by this node, one at a URI by all nodes.

    Args:
        store: to verify.
        output: where to write the list of bad samples, a local path or a URI, be it empty; "" = to
            `NAME.bad.json` in this folder, if any are bad.
        targets: see `describe`.
        progress: show a progress bar on standard error.

    Returns:
        `samples`, `bytes` (of the encoded images), `classes` (how many, or None), `bad` (how many), `list` (where
        it was written, or None), `seconds`, `images_per_s`; and `reasons`, for the first 10 different errors: (the
        first sample that has it, its name, how many have it, the error).

    Raises:
        StoreError: the store cannot be opened.
        ConfigError: the list cannot be written at `output`.
        ResourceError: there is no CPU to spare, or a task died.
    """
    import ray

    from raypipe.stores.parquet import ParquetStore

    num_samples = len(store)
    default = f"{Path(store.address).name}.bad.json"
    check_place(output or default)
    connect()
    started = time.perf_counter()
    bad: list[dict[str, Any]] = []
    num_bytes = 0
    cpus = Cpus("the verification", here="://" not in store.address)
    with stopped_on_error() as (tasks, wanted):
        cpus.wait_for_one()
        check = ray.remote(num_returns="streaming", **cpus.task_options())(check_range)
        bounds = _bounds(store, cpus.number() * _TASKS_PER_CPU)
        reader = store.forwards() if isinstance(store, ParquetStore) else store
        tasks += [
            check.remote(wanted, reader, num_samples, int(start), int(stop), targets)
            for start, stop in itertools.pairwise(bounds)
        ]
        for _, part_bytes, found in follow(tasks, "verify", num_samples, lambda part: part[0], progress):
            num_bytes += part_bytes
            bad += found
    seconds = time.perf_counter() - started
    bad.sort(key=lambda entry: entry["index"])
    address = output or (default if bad else None)
    if address:
        write_bad_list(address, store, bad)
    return {
        "samples": num_samples,
        "bytes": num_bytes,
        "classes": None if store.classes is None else len(store.classes),
        "bad": len(bad),
        "list": address,
        "seconds": seconds,
        "images_per_s": num_samples / seconds,
        "reasons": _reasons(bad)[:10],
    }


def _reasons(bad: list[dict[str, Any]]) -> list[tuple[int, str, int, str]]:
    """One damaged row group is a thousand bad samples and one reason."""
    counts = Counter(entry["error"] for entry in bad)
    first = {entry["error"]: entry for entry in reversed(bad)}
    return [(first[error]["index"], first[error]["name"], number, error) for error, number in counts.items()]


def _bounds(store: Store, num_tasks: int) -> np.ndarray:
    """Bounds of the tasks' ranges, int64 (n + 1,); no group is cut, so that none is read twice."""
    num_tasks = max(1, min(num_tasks, len(store) // PART))
    bounds = np.linspace(0, len(store), num_tasks + 1).astype(np.int64)
    if store.groups is not None and len(store):
        bounds = store.groups[np.searchsorted(store.groups, bounds)]
    return np.unique(bounds)
