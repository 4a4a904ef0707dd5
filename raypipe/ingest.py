"""Copy any store into a new LMDB or Parquet store, in parallel on Ray; verified, and atomic.

    SRC (any store) → ranges → one task per shard writes and hashes → one task per shard reads and compares
    → one rename: DST exists whole or not at all

A destination of one shard is a file, of several a folder of shards. Order and indices are the source's,
unless samples are skipped.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np

from raypipe.cluster import connect
from raypipe.errors import ConfigError, ResourceError, StoreError
from raypipe.shard_copy import Reencode, column_types, digest_of, write_shard
from raypipe.stores import open_store
from raypipe.stores.atomic import new_path
from raypipe.stores.base import Store

# A shard is small enough to be copied and cached as one object, and large enough to be few.
_SHARD_BYTES = 1 << 30
# CPUs of a run that has just ended come back within seconds; anything longer is another job's.
_SETTLE_S = 10.0
# A task that is told to stop does so within a chunk.
_STOP_S = 30.0


def ingest(
    src: str | Store,
    dst: str,
    *,
    reencode: Reencode | None = None,
    shards: int = 0,
    on_bad_sample: Literal["raise", "skip"] = "raise",
    overwrite: bool = False,
    progress: bool = True,
) -> dict[str, int]:
    """Copy a store into a new one, on the connected Ray cluster or a local one that is started for it.

    Args:
        src: a store or its address.
        dst: a local path that ends in `.lmdb` or `.parquet`.
        reencode: decode once and store smaller; None = the bytes as they are.
        shards: files of the new store, none without samples; 0 = 1 GiB each, and enough to use all CPUs on a
            large store.
        on_bad_sample: "raise", or "skip" samples that have no bytes or, when re-encoded, cannot be decoded.
        overwrite: replace a store at `dst`.
        progress: show a progress bar on standard error.

    Returns:
        `samples` written, `classes` named, `bytes` of images written, `skipped` samples.

    Raises:
        StoreError: the source is damaged, the destination exists, or the copy does not compare equal.
        SampleError: a sample is bad, and on_bad_sample is "raise".
        ResourceError: this node has no CPU to spare, or a task died.
    """
    import ray

    store = open_store(src) if isinstance(src, str) else src
    path = Path(dst).expanduser().absolute()
    if shards < 0:
        raise ConfigError(f"shards must be at least 0, got {shards}")
    if "://" in dst or path.suffix not in (".lmdb", ".parquet"):
        raise StoreError(f"{dst}: the destination must be a local path that ends in .lmdb or .parquet")
    if not len(store):
        raise StoreError(f"{store.address} has no samples")
    columns = column_types(store)
    connect()
    # A local destination is this node's; tasks must not write it elsewhere.
    node = ray.get_runtime_context().get_node_id()
    here = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node, soft=False)
    num_shards = min(len(store), shards or _num_shards(store, _num_cpus(node)))
    bounds = np.linspace(0, len(store), num_shards + 1).astype(int)
    with new_path(path, overwrite) as partial, _stopped_on_error() as (tasks, wanted):
        _wait_for_cpu(node)
        files = [partial]
        if num_shards > 1:
            partial.mkdir()
            files = [partial / f"{number:05d}{path.suffix}" for number in range(num_shards)]
        options: dict[str, Any] = {"num_cpus": 1, "scheduling_strategy": here, "max_retries": 0}
        write = ray.remote(num_returns="streaming", **options)(write_shard)
        tasks += [
            write.remote(wanted, store, file, int(start), int(stop), columns, reencode, on_bad_sample)
            for file, start, stop in zip(files, bounds[:-1], bounds[1:], strict=True)
        ]
        # Stable: what one shard yields, and what it skips, stays in order.
        parts = sorted(_follow(tasks, len(store), progress), key=lambda part: part["first"])
        by_shard = [part for part in parts if part["digest"]]
        verify = ray.remote(**options)(digest_of)
        tasks[:] = [verify.remote(wanted, file, columns) for file in files]
        for file, part, digest in zip(files, by_shard, _get(list(tasks)), strict=True):
            if part["digest"] != digest:
                raise StoreError(f"{file} does not read back as it was written: check the disk, and try again")
        skipped = [record for part in parts for record in part["skipped"]]
        samples = sum(part["samples"] for part in parts)
        if not samples:
            raise StoreError(f"{store.address} has no readable sample; the first: {skipped[0]}")
        written = open_store(partial)
        if len(written) != samples:
            raise StoreError(f"{partial} has {len(written)} samples, {samples} were written")
        written.close()
    return {
        "samples": samples,
        "classes": len(store.classes or ()),
        "bytes": sum(part["bytes"] for part in parts),
        "skipped": len(skipped),
    }


def _num_cpus(node: str) -> int:
    """CPUs that Ray may use on a node.

    Raises:
        ResourceError: none.
    """
    import ray

    [cpus] = [int(found["Resources"].get("CPU", 0)) for found in ray.nodes() if found["NodeID"] == node]
    if not cpus:
        raise ResourceError("this node offers Ray no CPUs (num-cpus: 0): run ingest where it does")
    return cpus


def _wait_for_cpu(node: str) -> None:
    """Ray alone would wait for a CPU for ever, and say nothing."""
    import ray

    deadline = time.monotonic() + _SETTLE_S
    while ray._private.state.available_resources_per_node().get(node, {}).get("CPU", 0.0) < 1:
        if time.monotonic() > deadline:
            raise ResourceError(
                f"the copy needs 1 CPU, other jobs hold all {_num_cpus(node)} of this node. "
                "Wait for them, or stop them (`ray job list`)"
            )
        time.sleep(0.2)


def _num_shards(store: Store, num_cpus: int) -> int:
    sample = np.linspace(0, len(store) - 1, min(64, len(store))).astype(int)
    images = store.read(sample, ("image",))["image"]
    total = sum(len(image or b"") for image in images) / len(sample) * len(store)
    return max(1, int(np.ceil(total / _SHARD_BYTES)), min(num_cpus, len(store) // 1000))


def _follow(streams: list[Any], total: int, progress: bool) -> Iterator[dict[str, Any]]:
    """What the tasks yield, as it comes, with a progress bar."""
    import ray
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), disable=not progress, transient=True) as bar:
        task = bar.add_task("ingest", total=total)
        pending = list(streams)
        while pending:
            ready: list[Any] = ray.wait(pending, num_returns=1, timeout=10, fetch_local=False)[0]
            for stream in ready:
                try:
                    part = _get(next(stream))
                except StopIteration:
                    pending.remove(stream)
                    continue
                bar.advance(task, part["samples"] + len(part["skipped"]))
                yield part


@contextlib.contextmanager
def _stopped_on_error() -> Iterator[tuple[list[Any], Path]]:
    """A list of tasks, which an error or Ctrl-C ends: none shall write on while its file is being removed.

    Beside it a file, which is there as long as the tasks' work is wanted: they look, see `shard_copy`. With
    Ray 2.60, ray.cancel aborts this process at times, where a task is cancelled while it is being dispatched
    ("Check failed: Tried to complete task that was not pending").
    """
    import ray

    tasks: list[Any] = []
    descriptor, name = tempfile.mkstemp(prefix="raypipe-ingest-")
    os.close(descriptor)
    wanted = Path(name)
    try:
        yield tasks, wanted
    except BaseException:
        wanted.unlink()
        ends = [task.completed() if isinstance(task, ray.ObjectRefGenerator) else task for task in tasks]
        if ends:
            ray.wait(ends, num_returns=len(ends), timeout=_STOP_S, fetch_local=False)
        raise
    wanted.unlink()


def _get(refs: Any) -> Any:
    """ray.get, with the task's own error instead of Ray's wrapper around it.

    Raises:
        ResourceError: the task's process died.
    """
    import ray

    try:
        return ray.get(refs)
    except ray.exceptions.RayTaskError as error:
        raise error.cause from None
    except ray.exceptions.RayError as error:
        raise ResourceError(
            f"a process of the copy died ({type(error).__name__}), maybe of too little memory: "
            "try again, or with fewer CPUs for Ray"
        ) from error
