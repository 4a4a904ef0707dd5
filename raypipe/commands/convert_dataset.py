"""The copy of a `ray.data.Dataset`, made and written by the tasks of one execution, in its order.

    rows → make: a record each, with encoded image, on any node
         → write: a shard for each batch of records, read back and compared
         → this process: the shards in order → one rename, or, at a URI, one manifest

A local destination is written by tasks of this node. Shards of a remote one are uploaded by the node that wrote
them.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import Progress

from raypipe.commands.copies import (
    NO_SIZE,
    CopySettings,
    make_image,
    shard_fingerprint,
)
from raypipe.commands.ordered_samples import CHUNK, columns_of, with_encoded_image
from raypipe.commands.tasks import count_cpus
from raypipe.errors import RaypipeError, SampleError, StoreError
from raypipe.rayext.failures import cause_of
from raypipe.storage.files import RemoteFile
from raypipe.storage.filesystem import is_remote, open_filesystem, split_address
from raypipe.storage.local_file import make_cache_folder
from raypipe.stores.destination import finished, new_path, objects_at, put_shard
from raypipe.stores.plain_columns import plain
from raypipe.stores.record import RecordLayout
from raypipe.stores.writers import open_writer

if TYPE_CHECKING:
    import pyarrow as pa
    import ray.data

# A batch is in memory as a whole, and each CPU may write one.
_SHARD_BYTES = 256 << 20


@dataclass(frozen=True)
class Copy:
    """A copy, as its tasks are sent it.

    Attributes:
        dst: a URI, or the local folder of the new shards.
        suffix: suffix of the shards.
        classes: see `raypipe.convert`.
        settings: how samples are copied.
    """

    dst: str
    suffix: str
    classes: tuple[str, ...] | None
    settings: CopySettings


def make_copy(
    dataset: ray.data.Dataset,
    dst: str,
    shards: int,
    overwrite: bool,
    classes: tuple[str, ...] | None,
    settings: CopySettings,
) -> dict[str, int]:
    """Copy a Dataset of Ray Data to a store, see `raypipe.convert`; `settings` are still without columns."""
    first = _first_rows(dataset)
    if not first:
        raise StoreError("the Dataset has no samples")
    samples = map(with_encoded_image, first)
    columns = columns_of(samples, "the Dataset", settings.short_side)
    suffix = Path(split_address(dst)[1]).suffix
    copy = Copy(dst, suffix, classes, settings.of_columns(columns))
    if is_remote(dst):
        with finished(dst, objects_at(dst, overwrite)) as uploaded:
            counts = _Counts()
            for report in _parts(dataset, copy, shards, first):
                if counts.add(report):
                    address, num_bytes, digest = report["shard"]
                    uploaded.append(RemoteFile(address, num_bytes, digest=digest))
            counts.check()
        return counts.result(copy)
    count_cpus("the copy", here=True)
    with new_path(Path(open_filesystem(dst)[1]), overwrite) as partial:
        partial.mkdir()
        counts = _Counts()
        names = []
        for report in _parts(dataset, replace(copy, dst=str(partial)), shards, first):
            if counts.add(report):
                names.append(report["shard"][0])
        counts.check()
        _arrange(partial, names, suffix)
    return counts.result(copy)


def _arrange(partial: Path, names: Sequence[str], suffix: str) -> None:
    """Name the shards by their order; a single one takes the place of the folder."""
    for file in partial.iterdir():
        if file.name not in names:  # a task that was tried again left it
            file.unlink()
    for number, name in enumerate(names):
        (partial / name).rename(partial / f"{number:05d}{suffix}")
    if len(names) == 1:
        with tempfile.TemporaryDirectory(
            dir=partial.parent, prefix=f".{partial.name}."
        ) as folder:
            alone = (partial / f"00000{suffix}").rename(Path(folder, partial.name))
            partial.rmdir()
            alone.rename(partial)


class _Counts:
    """Sums of the parts that the tasks have written."""

    def __init__(self) -> None:
        self._samples = self._without_size = self._bytes = self._skipped = 0
        self._first_reason = ""

    def add(self, report: dict[str, Any]) -> bool:
        """Add a part; return whether it has a shard. Raise the error of a task."""
        if report["error"]:
            if report["at"] < 0:
                where = ""
            else:
                where = f"sample {self._samples + report['at']}: "
            raise (SampleError if report["is_bad"] else StoreError)(
                f"the Dataset: {where}{report['error']}"
            )
        if report["skipped"] and not self._first_reason:
            position, reason = report["skipped"][0]
            self._first_reason = f"sample {self._samples + position}: {reason}"
        self._samples += report["samples"]
        self._without_size += report["without_size"]
        self._bytes += report["bytes"]
        self._skipped += len(report["skipped"])
        return bool(report["shard"])

    def check(self) -> None:
        """Raise StoreError if no sample was written."""
        if self._samples == self._skipped:
            raise StoreError(
                f"the Dataset has no readable sample; the first: {self._first_reason}"
            )

    def result(self, copy: Copy) -> dict[str, int]:
        return {
            "samples": self._samples - self._skipped,
            "classes": len(copy.classes or ()),
            "bytes": self._bytes,
            "skipped": self._skipped,
            "without_size": self._without_size,
        }


# In this process


@contextlib.contextmanager
def _in_order(dataset: ray.data.Dataset) -> Iterator[ray.data.Dataset]:
    """Context manager: the Dataset, whose rows come in its order until the end."""
    options = dataset.context.execution_options
    before = options.preserve_order
    options.preserve_order = True
    try:
        yield dataset
    finally:
        options.preserve_order = before


def _first_rows(dataset: ray.data.Dataset) -> list[dict[str, Any]]:
    with _in_order(dataset.limit(CHUNK)) as head:
        return list(head.iter_rows())


def _parts(
    dataset: ray.data.Dataset, copy: Copy, shards: int, first: Sequence[dict[str, Any]]
) -> Iterator[dict[str, Any]]:
    """Run the tasks; yield what each batch became, in order."""
    import ray

    written = dataset.map(partial(_make, copy=copy))
    batch_size: int | None = None
    if shards:
        written = written.repartition(shards)
    else:
        num_bytes = sum(len(_make(row, copy)["record"]) for row in first) / len(first)
        batch_size = max(1, int(_SHARD_BYTES / max(1, num_bytes)))
    options: dict[str, Any] = {}
    if not is_remote(copy.dst):
        own_node = ray.get_runtime_context().get_node_id()
        affinity = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
            own_node, soft=False
        )
        options["scheduling_strategy"] = affinity
    written = written.map_batches(
        partial(_write, copy=copy),
        batch_size=batch_size,
        batch_format="pyarrow",
        zero_copy_batch=True,
        **options,
    )
    with (
        _in_order(written),
        Progress(console=Console(stderr=True), transient=True) as bar,
    ):
        shown = bar.add_task("the copy", total=None)
        try:
            for row in written.iter_rows():
                report = json.loads(row["part"])
                bar.advance(shown, report["samples"])
                yield report
        except ray.exceptions.RayTaskError as error:
            if isinstance(own_error := cause_of(error), RaypipeError):
                raise own_error from None
            raise


# In tasks


def _make(row: dict[str, Any], copy: Copy) -> dict[str, Any]:
    """Return a row's record, the size of its image, whether it is measured, and its error."""
    result: dict[str, Any] = {
        "record": b"",
        "bytes": 0,
        "has_size": False,
        "error": "",
        "is_bad": False,
    }
    columns = copy.settings.columns
    try:
        sample = with_encoded_image(row)
        try:
            size = make_image(sample, copy.settings)
        except SampleError as error:
            return {**result, "error": str(error), "is_bad": True}
        return {
            **result,
            "record": RecordLayout(columns).pack(plain(sample, columns)),
            "bytes": len(sample["image"]),
            "has_size": size != NO_SIZE,
        }
    except StoreError as error:
        return {**result, "error": str(error)}


_NOTHING: dict[str, Any] = {
    "samples": 0,
    "without_size": 0,
    "bytes": 0,
    "skipped": [],
    "shard": [],
    "error": "",
    "at": -1,
    "is_bad": False,
}
"""What a task reports of a batch: how many samples it has, how many of those written have no known size, and their
bytes; positions and reasons of those skipped; the shard, none if all are; an error, its position (-1 = none), and
whether a bad sample caused it."""


class _BadRowError(Exception):
    """A row that ends the copy: its position, the error, and whether the sample is bad."""


def _write(batch: pa.Table, copy: Copy) -> dict[str, list[str]]:
    """Write a batch of records as a shard, and return what was done, as JSON."""
    try:
        report = _written(batch, copy)
    except _BadRowError as error:
        position, reason, is_bad = error.args
        report = {**_NOTHING, "error": reason, "at": position, "is_bad": is_bad}
    except RaypipeError as error:  # if it were raised, Ray would print its traceback
        report = {**_NOTHING, "error": str(error)}
    return {"part": [json.dumps(report)]}


def _written(batch: pa.Table, copy: Copy) -> dict[str, Any]:
    """Write a batch of records as a shard, read it back, and return what was done."""
    with _folder_of(copy) as folder:
        file = folder / f"{secrets.token_hex(16)}{copy.suffix}"
        report, fingerprint = _write_records(batch, copy, file)
        if len(report["skipped"]) == len(batch):
            file.unlink()
            return report
        if shard_fingerprint(file, copy.settings.columns) != fingerprint:
            raise StoreError(
                f"{file} does not read back as it was written: check the disk, and try again"
            )
        if not is_remote(copy.dst):
            return {**report, "shard": [file.name]}
        shard = put_shard(file, copy.dst, 0)
        return {**report, "shard": [shard.address, shard.num_bytes, shard.digest]}


@contextlib.contextmanager
def _folder_of(copy: Copy) -> Iterator[Path]:
    """Context manager: the folder that shards are written to, a temporary one before an upload."""
    if not is_remote(copy.dst):
        yield Path(copy.dst)
        return
    cache = make_cache_folder()
    with tempfile.TemporaryDirectory(dir=cache, prefix="convert-") as folder:
        yield Path(folder)


def _write_records(
    batch: pa.Table, copy: Copy, file: Path
) -> tuple[dict[str, Any], str]:
    """Write the records of a batch, and return what was done, and the fingerprint of what was written.

    Raises:
        _BadRowError: a row has an error, and is not skipped.
    """
    columns = copy.settings.columns
    layout = RecordLayout(columns)
    names = tuple(columns)
    skipped: list[tuple[int, str]] = []
    num_without_size = 0
    num_image_bytes = 0
    facts = [
        batch[name].to_pylist() for name in ("error", "is_bad", "has_size", "bytes")
    ]
    with open_writer(file, columns, copy.classes) as writer:
        for position, (error, is_bad, has_size, num_bytes) in enumerate(
            zip(*facts, strict=True)
        ):
            if is_bad and copy.settings.on_bad_sample == "skip":
                skipped.append((position, error))
                continue
            if is_bad:
                error += ". Exclude such samples with --on-bad-sample skip"
            if error:
                raise _BadRowError(position, error, is_bad)
            record = batch["record"][position].as_buffer()
            sample = layout.unpack(memoryview(record), names)
            writer.append({**dict.fromkeys(names), **sample})
            num_without_size += not has_size
            num_image_bytes += num_bytes
    report = {
        **_NOTHING,
        "samples": len(batch),
        "without_size": num_without_size,
        "bytes": num_image_bytes,
        "skipped": skipped,
    }
    return report, writer.fingerprint
