"""Copy any store into a new LMDB or Parquet store, in parallel on Ray; verified, and atomic.

    SRC (any store) → ranges → one task per shard writes and hashes → one task per shard reads and compares
    → one rename: DST exists whole or not at all

A destination of one shard is a file, of several a folder of shards. Order and indices are the source's,
unless samples are skipped.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from raypipe.cluster import connect
from raypipe.decode import decode, encode_jpeg, resize_short_side
from raypipe.errors import ConfigError, ResourceError, SampleError, StoreError
from raypipe.stores import open_store, open_writer
from raypipe.stores.atomic import new_path
from raypipe.stores.base import Store

# A shard is small enough to be copied and cached as one object, and large enough to be few.
_SHARD_BYTES = 1 << 30
# Samples per read: a few MB of JPEGs.
_CHUNK = 64
# CPUs of a run that has just ended come back within seconds; anything longer is another job's.
_SETTLE_S = 10.0
# A task that is told to stop does so within a chunk.
_STOP_S = 30.0


@dataclass(frozen=True)
class Reencode:
    """Decode once and store smaller.

    Attributes:
        short_side: pixels of the shorter side; larger images are scaled down, smaller keep their size.
            0 = store the bytes as they are.
        quality: of the JPEG, 1 to 100.
    """

    short_side: int = 0
    quality: int = 90

    def __post_init__(self) -> None:
        if self.short_side < 0 or not 1 <= self.quality <= 100:
            raise ConfigError(
                f"short_side must be at least 0 and quality in [1, 100], got {self.short_side} and {self.quality}"
            )


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
    with new_path(path, overwrite) as partial, _stopped_on_error() as tasks:
        _wait_for_cpu(node)
        files = [partial]
        if num_shards > 1:
            partial.mkdir()
            files = [partial / f"{number:05d}{path.suffix}" for number in range(num_shards)]
        options: dict[str, Any] = {"num_cpus": 1, "scheduling_strategy": here, "max_retries": 0}
        write = ray.remote(num_returns="streaming", **options)(_write_shard)
        tasks += [
            write.remote(store, file, int(start), int(stop), columns, reencode, on_bad_sample)
            for file, start, stop in zip(files, bounds[:-1], bounds[1:], strict=True)
        ]
        # Stable: what one shard yields, and what it skips, stays in order.
        parts = sorted(_follow(tasks, len(store), progress), key=lambda part: part["first"])
        by_shard = [part for part in parts if part["digest"]]
        verify = ray.remote(**options)(_digest_of)
        tasks[:] = [verify.remote(file, columns) for file in files]
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


def column_types(store: Store) -> dict[str, str]:
    """The columns of a store with the types that writers know, found by its first samples.

    Raises:
        StoreError: there are no images, or a column holds something that writers do not know.
    """
    if "image" not in store.columns:
        raise StoreError(f"{store.address} has no column 'image'; its columns are: {', '.join(store.columns)}")
    first = store.read(np.arange(min(len(store), _CHUNK)), store.columns)
    types: dict[str, str] = {}
    for name, values in first.items():
        value = next((value for value in values if value is not None), None)
        if name == "image":
            types[name] = "binary"
        elif isinstance(value, bool | int | np.integer | np.bool_):
            types[name] = "int64"
        elif isinstance(value, float | np.floating):
            types[name] = "float64"
        elif isinstance(value, bytes):
            types[name] = "binary"
        elif isinstance(value, str):
            types[name] = "string"
        else:
            raise StoreError(
                f"{store.address}: column {name!r} holds {type(value).__name__}; "
                "int, float, bytes and str columns can be copied"
            )
    return types


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


def _write_shard(
    store: Store,
    file: Path,
    start: int,
    stop: int,
    columns: dict[str, str],
    reencode: Reencode | None,
    on_bad_sample: str,
) -> Iterator[dict[str, Any]]:
    """Writes samples start … stop - 1; yields what each chunk wrote, and last the digest of all."""
    digest = _Digest(columns)
    with open_writer(file, columns, store.classes) as writer:
        for first in range(start, stop, _CHUNK):
            indices = np.arange(first, min(stop, first + _CHUNK))
            rows = store.read(indices, tuple(columns))
            done: dict[str, Any] = {"samples": 0, "bytes": 0, "skipped": [], "digest": "", "first": start}
            for row, index in enumerate(indices):
                sample = {name: rows[name][row] for name in columns}
                for name, value in sample.items():
                    if isinstance(value, bool | np.bool_):
                        sample[name] = int(value)  # as their column's type
                try:
                    sample["image"] = _checked(sample["image"], reencode)
                except SampleError as error:
                    if on_bad_sample == "raise":
                        raise SampleError(
                            f"{store.address}: sample {index}: {error}. Leave such samples out with "
                            "--on-bad-sample skip"
                        ) from None
                    done["skipped"].append(f"sample {index}: {error}")
                    continue
                writer.append(sample)
                digest.add(sample)
                done["samples"] += 1
                done["bytes"] += len(sample["image"])
            yield done
    yield {"samples": 0, "bytes": 0, "skipped": [], "digest": digest.hex(), "first": start}


def _checked(image: bytes | None, reencode: Reencode | None) -> bytes:
    if not image:
        raise SampleError("it has no bytes")
    if reencode is None or not reencode.short_side:
        return image
    pixels = decode(image, min_side=reencode.short_side)
    return encode_jpeg(resize_short_side(pixels, reencode.short_side), reencode.quality)


class _Digest:
    """A hash over samples, in order: all columns, each as its type has it, and with its length.

    Args:
        columns: name → type, see `column_types`.
    """

    def __init__(self, columns: dict[str, str]) -> None:
        self._columns, self._hash = columns, hashlib.blake2b(digest_size=16)

    def add(self, sample: dict[str, Any]) -> None:
        for name, kind in self._columns.items():
            value = sample[name]
            if value is None:
                self._hash.update(b"\xff" * 8)  # a length that no value has
                continue
            if kind == "int64":
                data = str(int(value)).encode()
            elif kind == "float64":
                data = float(value).hex().encode()  # the source's may be a float32
            else:
                data = value if isinstance(value, bytes) else str(value).encode()
            self._hash.update(len(data).to_bytes(8, "little"))
            self._hash.update(data)

    def hex(self) -> str:
        return self._hash.hexdigest()


def _digest_of(file: Path, columns: dict[str, str]) -> str:
    """The digest of a shard as it reads back."""
    store, digest = open_store(file), _Digest(columns)
    for first in range(0, len(store), _CHUNK):
        rows = store.read(np.arange(first, min(len(store), first + _CHUNK)), tuple(columns))
        for row in range(len(rows["image"])):
            digest.add({name: rows[name][row] for name in columns})
    store.close()
    return digest.hex()


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
def _stopped_on_error() -> Iterator[list[Any]]:
    """A list of tasks, which an error or Ctrl-C ends: none shall write on while its file is being removed."""
    import ray

    tasks: list[Any] = []
    try:
        yield tasks
    except BaseException:
        for task in tasks:
            ray.cancel(task)
        ends = [task.completed() if isinstance(task, ray.ObjectRefGenerator) else task for task in tasks]
        if ends:
            ray.wait(ends, num_returns=len(ends), timeout=_STOP_S, fetch_local=False)
        raise


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
