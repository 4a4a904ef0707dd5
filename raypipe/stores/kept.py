"""Lists that a node keeps of large files: one process makes each, and all processes of the node map it.

RAYPIPE_CACHE/FOLDER/HASH.arrow   an Arrow stream of one batch, whose schema has [places of columns, facts] as JSON
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa

from raypipe.errors import DAMAGE
from raypipe.storage.files import write_bytes
from raypipe.storage.local_file import locked, make_cache_folder
from raypipe.stores.arrow_values import numbers_in, to_arrow
from raypipe.stores.base import hash_of_facts

T = TypeVar("T", bound=Any)
"""A named tuple."""

UNUSABLE = (*DAMAGE, OSError)
"""Errors of reading a file that is damaged, or that somebody else wrote."""

_FACTS = b"raypipe"  # in the schema's metadata


def packed(value: T) -> bytes:
    """Return a named tuple as one stream: arrays, dicts of arrays, and other values as JSON has them."""
    facts = value._asdict()
    places = []
    arrays = []
    for field, held in value._asdict().items():
        named = held if isinstance(held, dict) else {None: held}
        for name, column in named.items():
            if isinstance(column, np.ndarray | pa.Array):
                is_numpy = isinstance(column, np.ndarray)
                places.append((field, name, is_numpy))
                arrays.append(to_arrow(column) if is_numpy else column)
                facts.pop(field, None)
    about = json.dumps([places, facts])
    numbers = list(map(str, range(len(arrays))))
    batch = pa.record_batch(arrays, numbers, metadata={_FACTS: about})
    target = pa.BufferOutputStream()
    with pa.ipc.new_stream(target, batch.schema) as stream:
        stream.write_batch(batch)
    return bytes(target.getvalue())


def unpacked(kind: type[T], content: pa.Buffer) -> T:
    """Return what `packed` was given, numbers as views; raise one of `UNUSABLE` for damage."""
    batch = pa.ipc.open_stream(content).read_next_batch()
    batch.validate(full=True)
    places, fields = json.loads(batch.schema.metadata[_FACTS])
    for (field, name, is_numpy), column in zip(places, batch.columns, strict=True):
        values = numbers_in(column) if is_numpy else column
        if name is None:
            fields[field] = values
        else:
            fields.setdefault(field, {})[name] = values
    return kind(**fields)


def path_of(folder: str, *facts: object) -> Path | None:
    """Return where the node keeps what these facts decide; None without a cache, which only saves time."""
    try:
        return make_cache_folder(folder) / f"{hash_of_facts(facts)}.arrow"
    except OSError:
        return None


def kept(path: Path | None, kind: type[T], make: Callable[[], T]) -> T:
    """Return what a file has, or make it and keep it, if there is room."""
    if path is None:
        return make()
    with contextlib.suppress(*UNUSABLE):
        return unpacked(kind, _mapped(path))
    with locked(path.with_suffix(".lock")):
        with contextlib.suppress(*UNUSABLE):
            return unpacked(kind, _mapped(path))
        made = make()
        with contextlib.suppress(*UNUSABLE):
            write_bytes(path, packed(made))
            return unpacked(kind, _mapped(path))
    return made


def _mapped(path: Path) -> pa.Buffer:
    return pa.memory_map(str(path)).read_buffer()
