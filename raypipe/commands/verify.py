"""The command `verify`, which finds the bad samples of a store.

Every sample is read and decoded, by tasks on Ray; the bad ones become a list for runs to exclude, see
`raypipe.stores.bad_list`.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from raypipe.config import RunConfig
from raypipe.printing import print_table, told
from raypipe.storage.files import check_place
from raypipe.storage.filesystem import is_remote
from raypipe.stores.bad_list import write_bad_list
from raypipe.stores.base import Store, forwards, name_of

if TYPE_CHECKING:
    from raypipe.commands.checked_samples import CheckedSample
    from raypipe.transform.columns import SampleColumns

# Samples per report of a task: a driver gets those of hundreds of tasks.
PART = 256
# Several ranges per CPU even out their costs; each opens the store again, which scans a folder.
_PER_CPU = 2


def verify_store(
    run: RunConfig, target: str = "", *, output: str = ""
) -> dict[str, Any]:
    """Read and decode every sample of a store, and list the bad ones.

    Examples:
        raypipe verify train.lmdb
        raypipe verify s3://bucket/train.parquet --output bad.json

    Args:
        output: where to write the list of bad samples, for --store.exclude, a local path or a URI; empty =
            NAME.bad.json in this folder, if any sample is bad.
    """
    from raypipe.streaming.opening import open_train, run_columns
    from raypipe.transform.checks import check_target_columns

    store = open_train(run)
    targets = run.transform.target_columns
    check_target_columns(store, targets)
    columns = run_columns(run, store)
    form = run.transform.boxes_format
    summary = verify(store, output, targets=targets, columns=columns, boxes_format=form)
    return {"store": store.address, **summary}


def print_verified(summary: dict[str, Any]) -> None:
    """Print a verification: each reason with the first sample that has it, and how to exclude them."""
    rows = told(summary, "store", "reasons")
    for reason in summary["reasons"]:
        others = reason["samples"] - 1
        more = f" and {others:,} more" if others else ""
        name = f" ({reason['name']})" if reason["name"] else ""
        rows[f"sample {reason['index']}{more}"] = reason["error"] + name
    if summary["bad_samples"]:
        rows["to exclude them"] = f"--store.exclude {summary['list']}"
    print_table(summary["store"], rows)


def verify(
    store: Store,
    output: str = "",
    *,
    targets: Mapping[str, str] | None = None,
    columns: SampleColumns | None = None,
    boxes_format: str = "",
) -> dict[str, Any]:
    """Read and decode every sample of a store on Ray: one on a local path by this node, one at a URI by all nodes.

    Args:
        store: to verify.
        output: where to write the list of bad samples, a local path or a URI, be it empty; "" = to
            `NAME.bad.json` in this folder, if any are bad.
        targets, boxes_format: see `describe`.
        columns: columns of a run, to check as well.

    Returns:
        `samples`, `bytes` (of the encoded images), `classes` (how many, or None), `bad_samples` (how many), `list`
        (where it was written, or None), `seconds`, `images_per_s`; and `reasons`, for the first 10 different
        errors `{index, name, samples, error}`: the first sample that has it, its name, how many have it.

    Raises:
        StoreError: the store cannot be opened.
        ConfigError: the list cannot be written at `output`.
        ResourceError: there is no CPU to spare, or a task died.
    """
    from raypipe.commands.checked_samples import check_samples
    from raypipe.commands.tasks import count_cpus, run_tasks
    from raypipe.rayext.cluster import connect

    num_samples = len(store)
    default = f"{Path(store.address).name}.bad.json"
    check_place(output or default)
    started = time.perf_counter()
    connect()
    here = not is_remote(store.address)
    num_cpus = count_cpus("the verification", here)
    check = functools.partial(
        check_samples, targets=targets, of_run=columns, boxes_format=boxes_format
    )
    task = functools.partial(check_range, forwards(store), check)
    num_tasks = max(1, min(num_cpus * _PER_CPU, num_samples // PART))
    bounds = np.linspace(0, num_samples, num_tasks + 1).astype(np.int64)
    ranges = itertools.pairwise(np.unique(bounds).tolist())
    parts = list(run_tasks("the verification", here, task, ranges, num_samples))
    seconds = time.perf_counter() - started
    bad = [entry for _, _, of_part in parts for entry in of_part]
    bad.sort(key=lambda entry: entry["index"])
    address = output or (default if bad else None)
    if address:
        write_bad_list(address, store, bad)
    return {
        "samples": num_samples,
        "bytes": sum(num_bytes for _, num_bytes, _ in parts),
        "classes": None if store.classes is None else len(store.classes),
        "bad_samples": len(bad),
        "list": address,
        "seconds": seconds,
        "images_per_s": num_samples / seconds,
        "reasons": _reasons(bad)[:10],
    }


def _reasons(bad: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The first bad sample of each error, and how many have it: one damaged row group can make a thousand bad."""
    counts = Counter(entry["error"] for entry in bad)
    first = {entry["error"]: entry for entry in reversed(bad)}
    return [{**first[error], "samples": num} for error, num in counts.items()]


def check_range(
    store: Store,
    check: Callable[[Store, np.ndarray], Iterator[CheckedSample]],
    start: int,
    stop: int,
) -> Iterator[tuple[int, int, list[dict[str, Any]]]]:
    """A task: checks samples start … stop - 1.

    Yields:
        How many more samples have been checked, the bytes of their encoded images, and `index`, `name` (see
        `name_of`) and `error` of the bad ones among them.
    """
    for first in range(start, stop, PART):
        indices = np.arange(first, min(stop, first + PART))
        num_bytes = 0
        bad = []
        for sample in check(store, indices):
            num_bytes += sample.num_bytes
            if sample.error:
                name = name_of(store, sample.index)
                bad.append({"index": sample.index, "name": name, "error": sample.error})
        yield len(indices), num_bytes, bad
