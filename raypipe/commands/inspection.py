"""Descriptions of stores, and the search for their bad samples.

describe   the store's own figures, and those of a few samples spread over it; in this process
verify     every sample, on Ray; the bad ones as a list for runs to exclude, see `raypipe.stores.record`

If a read of many samples fails, smaller parts are read, down to single samples, so only the damaged samples count
as bad. In a store that is read in groups, damage to the images of a group counts for the whole group.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from raypipe.commands.tasks import count_cpus, run_tasks
from raypipe.errors import ConfigError, RaypipeError, SampleError, StoreError
from raypipe.rayext.cluster import connect
from raypipe.storage.files import check_place
from raypipe.storage.filesystem import is_remote
from raypipe.stores.bad_list import write_bad_list
from raypipe.stores.base import Store, forwards, name_of
from raypipe.stores.numbers import NPY
from raypipe.transform.column_types import types_in
from raypipe.transform.columns import NO_COLUMNS, ColumnMaker, SampleColumns
from raypipe.transform.decode.array import decode_any
from raypipe.transform.decode.image_header import image_kind
from raypipe.transform.samples import WRONG_LABEL
from raypipe.transform.targets import decode_targets

# Samples that a description decodes, within a second or two.
_NUM_SAMPLED = 64
NO_TARGETS: Mapping[str, str] = {}
# Samples that show the type of a column.
_NUM_TYPED = 8

# Encoded samples that a task holds at a time: a few MB of JPEGs, and bounded where single files are large.
READ = 16
# Samples per report of a task: a driver gets those of hundreds of tasks.
PART = 256
# Several ranges per CPU even out their costs; each opens the store again, which scans a folder.
_PER_CPU = 2
# Places of a store that is read in groups: one sample costs as much as its whole group.
_NUM_PLACES = 8


@dataclass(frozen=True)
class CheckedSample:
    """The result of reading and decoding one sample.

    Attributes:
        kind: the image's format, as `image_kind` names it, "npy", or "unknown".
        num_bytes: size of the encoded image; 0 = no image.
        height, width: pixels of the image; 0 where it cannot be decoded.
        error: why a run cannot use it; "" = it can.
    """

    index: int
    kind: str
    num_bytes: int
    height: int
    width: int
    error: str


def spread(store: Store, num_most: int) -> np.ndarray:
    """Indices, int64 (n,), of up to `most` samples, evenly spread; at few places where there are groups."""
    groups = store.groups
    if groups is None or not len(store):
        return np.unique(
            np.linspace(0, len(store) - 1, min(len(store), num_most)).astype(np.int64)
        )
    places = np.linspace(0, len(store) - 1, _NUM_PLACES).astype(np.int64)
    near = places[:, None] + np.arange(num_most // _NUM_PLACES)
    ends = groups[np.searchsorted(groups, places, side="right")]
    return np.unique(near[near < ends[:, None]])


def check_samples(
    store: Store,
    indices: np.ndarray,
    targets: Mapping[str, str] = NO_TARGETS,
    of_run: SampleColumns = NO_COLUMNS,
    boxes_format: str = "",
) -> Iterator[CheckedSample]:
    """Read and decode samples of int64 indices (n,) in full, as a run does, targets and columns included."""
    maker = ColumnMaker(of_run) if of_run else None
    columns = {
        "image": "image",
        **({"label": "label"} if "label" in store.schema.names else {}),
        **targets,
    }
    columns |= {f"column {name}": name for name in of_run.stored}
    for few in np.split(indices, range(READ, len(indices), READ)):
        read = {name: read_each(store, few, column) for name, column in columns.items()}
        for position, index in enumerate(few.tolist()):
            sample = {name: values[position] for name, (values, _) in read.items()}
            reason = next(
                filter(None, (errors.get(position) for _, errors in read.values())), ""
            )
            if "label" in columns and sample["label"] is None:
                reason = reason or WRONG_LABEL
            height = width = 0
            if not reason:
                try:
                    if maker:
                        maker.one(
                            {name: sample[f"column {name}"] for name in of_run.stored},
                            (index, 0),
                        )
                    height, width, _ = decode_any(sample["image"]).shape
                    decode_targets(
                        sample,
                        {name: name for name in targets},
                        (height, width),
                        boxes_format,
                    )
                except SampleError as error:
                    reason = str(error)
            image = bytes(sample["image"] or b"")
            yield CheckedSample(
                index, _format(image), len(image), height, width, reason
            )


def read_each(
    store: Store, indices: np.ndarray, column: str
) -> tuple[list[Any], dict[int, str]]:
    """Values of one column, None where they cannot be read, and the reasons, by position; all held at a time."""
    try:
        return list(store.read(indices, (column,))[column]), {}
    except MemoryError:  # the machine's state, not the samples' fault
        raise
    except Exception as error:  # whatever a damaged file makes a reader raise
        if isinstance(error, RaypipeError):
            reason = str(error)
        else:
            reason = f"{type(error).__name__}: {error}"
    if len(indices) == 1:
        return [None], {0: reason}
    groups = (
        ()
        if store.groups is None
        else np.unique(np.searchsorted(store.groups, indices, side="right"))
    )
    if column == "image" and len(groups) == 1:
        # The images of a group are read together, so one stands for all; each try reads the group again.
        _, errors = read_each(store, indices[:1], column)
        if errors:
            return [None] * len(indices), dict.fromkeys(range(len(indices)), errors[0])
    half = len(indices) // 2
    first, first_errors = read_each(store, indices[:half], column)
    second, second_errors = read_each(store, indices[half:], column)
    return first + second, first_errors | {
        half + position: reason for position, reason in second_errors.items()
    }


def task_bounds(store: Store, num_tasks: int) -> np.ndarray:
    """Bounds of the tasks' ranges, int64 (n + 1,); no group is cut, so no group is read twice."""
    num_tasks = max(1, min(num_tasks, len(store) // PART))
    bounds = np.linspace(0, len(store), num_tasks + 1).astype(np.int64)
    if store.groups is not None and len(store):
        bounds = store.groups[np.searchsorted(store.groups, bounds)]
    return np.unique(bounds)


def check_range(
    store: Store,
    start: int,
    stop: int,
    num_samples: int,
    targets: Mapping[str, str] = NO_TARGETS,
    columns: SampleColumns = NO_COLUMNS,
    boxes_format: str = "",
) -> Iterator[tuple[int, int, list[dict[str, Any]]]]:
    """A task: checks samples start … stop - 1.

    Yields:
        How many more samples have been checked, the bytes of their encoded images, and `index`, `name` (see
        `name_of`) and `error` of the bad ones among them.

    Raises:
        StoreError: the store is not there, or is another than the one of `num_samples` samples.
    """
    if len(store) != num_samples:
        raise StoreError(
            f"{store.address} has {len(store)} samples for this process, {num_samples} for the one that started "
            "it: is it being written, or another one on another node?"
        )
    for first in range(start, stop, PART):
        indices = np.arange(first, min(stop, first + PART))
        num_bytes = 0
        bad = []
        for sample in check_samples(store, indices, targets, columns, boxes_format):
            num_bytes += sample.num_bytes
            if sample.error:
                name = name_of(store, sample.index)
                bad.append({"index": sample.index, "name": name, "error": sample.error})
        yield len(indices), num_bytes, bad


def describe(
    store: Store, targets: Mapping[str, str] = NO_TARGETS, boxes_format: str = ""
) -> dict[str, Any]:
    """Describe a store.

    Args:
        store: to look at.
        targets: columns of targets that are decoded with the images, see `TransformConfig.target_columns`.
        boxes_format: see `TransformConfig`.

    Returns:
        `store` (address), `kind`, `samples`, `bytes` (of the encoded images, by the mean of the sampled),
        `columns` (what each holds, by name), `classes` and `groups` (how many, None where it has none),
        `fingerprint`; and of `sampled` samples that were decoded: `formats` (kind → how many), `image_bytes`,
        `height_px` and `width_px`
        ([least, median, most], None without any), and `bad`, how many of them are bad.

    Raises:
        StoreError: it cannot be opened.
    """
    samples = list(
        check_samples(
            store, spread(store, _NUM_SAMPLED), targets, boxes_format=boxes_format
        )
    )
    sizes = [sample.num_bytes for sample in samples]
    good = [sample for sample in samples if not sample.error]
    return {
        "store": store.address,
        "kind": type(store).__name__.removesuffix("Store").lower(),
        "samples": len(store),
        "bytes": round(sum(sizes) / max(1, len(samples)) * len(store)),
        "columns": types_of(store),
        "classes": None if store.classes is None else len(store.classes),
        "groups": None if store.groups is None else len(store.groups) - 1,
        "fingerprint": store.fingerprint,
        "sampled": len(samples),
        "formats": dict(Counter(sample.kind for sample in samples)),
        "image_bytes": _range(sizes),
        "height_px": _range([sample.height for sample in good]),
        "width_px": _range([sample.width for sample in good]),
        "bad_samples": len(samples) - len(good),
    }


def _format(image: bytes) -> str:
    if image.startswith(NPY):
        return "npy"
    return image_kind(image) or "unknown"


def types_of(store: Store) -> dict[str, str]:
    """The contents of each column of a store in words, by its schema, or by a few samples."""
    kinds = dict.fromkeys(store.schema.names, "unknown") | {"image": "images"}
    indices = spread(store, _NUM_TYPED)[:_NUM_TYPED]
    for name in store.schema.names if len(indices) else ():
        if name != "image":
            column = SampleColumns({name: (name,)})
            with contextlib.suppress(ConfigError, StoreError):  # it has no values
                kinds[name] = str(types_in(store, column, indices)[name])
    return kinds


def _range(values: list[int]) -> list[int] | None:
    if values:
        return [min(values), int(np.median(values)), max(values)]
    return None


def verify(
    store: Store,
    output: str = "",
    *,
    targets: Mapping[str, str] = NO_TARGETS,
    columns: SampleColumns = NO_COLUMNS,
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
    num_samples = len(store)
    default = f"{Path(store.address).name}.bad.json"
    check_place(output or default)
    started = time.perf_counter()
    connect()
    here = not is_remote(store.address)
    bounds = task_bounds(
        store, count_cpus("the verification", here) * _PER_CPU
    ).tolist()
    reader = forwards(store)
    calls = [
        (reader, *ends, num_samples, targets, columns, boxes_format)
        for ends in itertools.pairwise(bounds)
    ]
    parts = list(run_tasks("the verification", here, check_range, calls, num_samples))
    seconds = time.perf_counter() - started
    bad = sorted(
        itertools.chain(*(of_part for *_, of_part in parts)),
        key=lambda entry: entry["index"],
    )
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
    """Group bad samples by their error, since one damaged row group can make a thousand samples bad."""
    counts = Counter(entry["error"] for entry in bad)
    first = {entry["error"]: entry for entry in reversed(bad)}
    return [{**first[error], "samples": number} for error, number in counts.items()]
