"""Copy any store into a new LMDB, Parquet or WebDataset store, in parallel on Ray; verified, and atomic.

    SRC (any store) → ranges → one task per shard writes and hashes → one task per shard reads and compares
    → one rename, or, at a URI, one manifest: DST exists whole or not at all

A local destination of one shard is a file, of several a folder of shards; a remote one is a folder. Order and
indices are the source's, unless samples are skipped.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import numpy as np

from raypipe.commands.shard_copy import Reencode, column_types, digest_of, write_shard
from raypipe.commands.tasks import Cpus, follow, get, stopped_on_error
from raypipe.errors import ConfigError, StoreError
from raypipe.rayext.cluster import connect
from raypipe.storage.filesystem import check_lasting, is_remote, open_filesystem, split
from raypipe.stores import open_store
from raypipe.stores.addresses import expand
from raypipe.stores.base import Store
from raypipe.stores.destination import WRITTEN_SUFFIXES, new_path, new_remote

# A shard is small enough to be copied and cached as one object, and large enough to be few.
_SHARD_BYTES = 1 << 30


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
        dst: a local path or a URI that ends in `.lmdb`, `.parquet` or `.tar`.
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
    if shards < 0:
        raise ConfigError(f"shards must be at least 0, got {shards}")
    suffix = Path(split(dst)[1]).suffix
    if suffix not in WRITTEN_SUFFIXES:
        raise StoreError(f"{dst}: the destination must end in one of {', '.join(WRITTEN_SUFFIXES)}")
    if expand(dst) != [dst]:
        raise StoreError(
            f"{dst}: several files beside others cannot appear all at once: name one destination, such as "
            "train.tar, and several --shards make it a folder of shards"
        )
    check_lasting(dst, "the destination")
    destination = new_remote if is_remote(dst) else new_path
    where: Any = dst if is_remote(dst) else Path(open_filesystem(dst)[1])
    if not len(store):
        raise StoreError(f"{store.address} has no samples")
    columns = column_types(store, reencode)
    connect()
    # A local destination is this node's, and what is uploaded is written here; tasks must not write it elsewhere.
    cpus = Cpus("the copy", here=True)
    num_shards = min(len(store), shards or _num_shards(store, cpus.number()))
    bounds = np.linspace(0, len(store), num_shards + 1).astype(int)
    with destination(where, overwrite) as partial, stopped_on_error() as (tasks, wanted):
        cpus.wait_for_one()
        files = [partial]
        if num_shards > 1:
            partial.mkdir()
            files = [partial / f"{number:05d}{suffix}" for number in range(num_shards)]
        options = cpus.task_options()
        write = ray.remote(num_returns="streaming", **options)(write_shard)
        tasks += [
            write.remote(wanted, store, file, int(start), int(stop), columns, reencode, on_bad_sample)
            for file, start, stop in zip(files, bounds[:-1], bounds[1:], strict=True)
        ]
        # Stable: what one shard yields, and what it skips, stays in order.
        followed = follow(tasks, "ingest", len(store), _num_seen, progress)
        parts = sorted(followed, key=lambda part: part["first"])
        by_shard = [part for part in parts if part["digest"]]
        verify = ray.remote(**options)(digest_of)
        tasks[:] = [verify.remote(wanted, file, columns) for file in files]
        for file, part, digest in zip(files, by_shard, get(list(tasks)), strict=True):
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


def _num_shards(store: Store, num_cpus: int) -> int:
    sample = np.linspace(0, len(store) - 1, min(64, len(store))).astype(int)
    images = store.read(sample, ("image",))["image"]
    total = sum(len(image or b"") for image in images) / len(sample) * len(store)
    return max(1, int(np.ceil(total / _SHARD_BYTES)), min(num_cpus, len(store) // 1000))


def _num_seen(part: dict[str, Any]) -> int:
    return part["samples"] + len(part["skipped"])
