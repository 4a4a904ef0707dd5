"""Lists that a node keeps of large files: one process makes each, and all processes of the node map it.

RAYPIPE_CACHE/FOLDER/HASH.arrow   an Arrow stream of one batch, whose schema has [names of columns, facts] as JSON
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa

from raypipe.errors import DAMAGE
from raypipe.storage.files import write_bytes
from raypipe.storage.local_file import locked, make_cache_folder
from raypipe.stores.arrow_values import array_of, numbers_in, to_arrow
from raypipe.stores.base import hash_of_facts

T = TypeVar("T")

UNUSABLE = (*DAMAGE, OSError)
"""Errors of reading a file that is damaged, or that somebody else wrote."""

_FACTS = b"raypipe"  # in the schema's metadata


def table_bytes(
    columns: Mapping[str, np.ndarray | pa.Array], facts: Mapping[str, Any]
) -> bytes:
    """Return columns, whose names may be any texts, and facts, JSON values, as one stream."""
    arrays = [
        to_arrow(column) if isinstance(column, np.ndarray) else column
        for column in columns.values()
    ]
    about = json.dumps([list(columns), facts])
    numbers = list(map(str, range(len(arrays))))
    batch = pa.record_batch(arrays, numbers, metadata={_FACTS: about})
    target = pa.BufferOutputStream()
    with pa.ipc.new_stream(target, batch.schema) as stream:
        stream.write_batch(batch)
    return bytes(target.getvalue())


def table_of(content: pa.Buffer) -> tuple[dict[str, Any], Any]:
    """Return the columns, numbers as views, and the facts of a stream; raise one of `UNUSABLE` for damage."""
    batch = pa.ipc.open_stream(content).read_next_batch()
    batch.validate(full=True)
    names, facts = json.loads(batch.schema.metadata[_FACTS])
    columns = {
        name: numbers_in(column) if array_of(column.type) else column
        for name, column in zip(names, batch.columns, strict=True)
    }
    return columns, facts


def path_of(folder: str, *facts: object) -> Path | None:
    """Return where the node keeps what these facts decide; None without a cache, which only saves time."""
    try:
        return make_cache_folder(folder) / f"{hash_of_facts(facts)}.arrow"
    except OSError:
        return None


def kept(
    path: Path | None,
    read: Callable[[pa.Buffer], T],
    make: Callable[[], T],
    pack: Callable[[T], bytes],
) -> T:
    """Return what a file has, or make it and keep it, if there is room."""
    if path is None:
        return make()
    with contextlib.suppress(*UNUSABLE):
        return read(_mapped(path))
    with locked(path.with_suffix(".lock")):
        with contextlib.suppress(*UNUSABLE):
            return read(_mapped(path))
        made = make()
        with contextlib.suppress(*UNUSABLE):
            write_bytes(path, pack(made))
            return read(_mapped(path))
    return made


def _mapped(path: Path) -> pa.Buffer:
    return pa.memory_map(str(path)).read_buffer()
