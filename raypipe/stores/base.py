"""What every store is: an indexed, read-only collection of N encoded samples.

A store object holds only its address and options. It opens lazily, once per process, and pickles as
its address and options, so that it may be sent to any actor. Stores know neither Ray nor torch.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import numpy as np

from raypipe.logs import printable

Columns = dict[str, Any]
"""Columns of n samples: `image` is a list of n `bytes` (or None where the store holds no value);
int and float columns are numpy arrays of shape (n,); other columns are lists of n objects."""


@runtime_checkable
class Store(Protocol):
    """An indexed, read-only collection of encoded samples.

    A store may have one method more, `sample_name(index: int) -> str`: what a sample is called where it comes
    from, such as its file and key, for errors and records. See `name_of`.

    Attributes:
        address: the path or URI that the store was opened with, as a string.
        columns: names of all columns, `image` and `label` first where the store has them.
        classes: class names, position = label; None where the store does not name them.
        groups: offsets, int64 of shape (num_groups + 1,), of runs of samples that are read together
            (Parquet row groups); None where any sample is as cheap to read as its neighbour.
        fingerprint: 32 hex digits, equal for equal contents in equal order, different otherwise.
    """

    address: str

    @property
    def columns(self) -> tuple[str, ...]: ...

    @property
    def classes(self) -> tuple[str, ...] | None: ...

    @property
    def groups(self) -> np.ndarray | None: ...

    @property
    def fingerprint(self) -> str: ...

    def __len__(self) -> int: ...

    def read(self, indices: np.ndarray, columns: tuple[str, ...] = ("image", "label")) -> Columns:
        """Read samples by index, in the order asked for, duplicates included.

        Args:
            indices: int64 of shape (n,), each in [0, len(self)).
            columns: the columns wanted.

        Returns:
            One entry per column asked for, see `Columns`. A sample whose value is missing or damaged
            has `image` None or undecodable bytes: that is for the bad-sample policy to judge.

        Raises:
            IndexError: an index is outside [0, len(self)).
            StoreError: the store itself is damaged, or lacks a column; the message names the file,
                the key or the column.
        """
        ...

    def close(self) -> None:
        """Release files and maps; the next read opens them again."""
        ...


def name_of(store: Store, index: int) -> str:
    """What a store calls a sample, fit to be printed in a line; empty where it has no name, or cannot tell now."""
    try:
        return printable(str(store.sample_name(index))).replace("\n", r"\n")  # type: ignore[attr-defined]
    except Exception:  # it is for the record of what is wrong already
        return ""


def title_of(address: object, index: object, name: object) -> str:
    """A sample of a store, as errors and lists call it; `name` as from `name_of`."""
    return f"{address or 'store'} sample {index}{f' ({name})' if name else ''}"


class StoreWriter(Protocol):
    """Writes one new store, sample after sample.

    A writer is a context manager. Leaving it normally finishes the store; leaving it by an exception
    removes what it wrote. Writers write where they are told: atomicity at the final address is the
    business of `raypipe.commands.ingest`.
    """

    def append(self, sample: dict[str, Any]) -> None:
        """Add one sample: `image` bytes, `label` int, and the extra columns declared to the writer."""
        ...

    def __enter__(self) -> StoreWriter: ...

    def __exit__(self, *exc: object) -> None: ...
