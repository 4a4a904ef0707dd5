"""One LMDB file that others wrote, opened for reading; in which layouts, `raypipe.stores.lmdb_layouts` has."""

from __future__ import annotations

import hashlib
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from raypipe.errors import StoreError
from raypipe.stores.lmdb_layouts import layout_of
from raypipe.stores.lmdb_pages import LMDBFile
from raypipe.stores.lmdb_shard import data_file

_NUM_HASHED = 64  # samples whose values are hashed


class ForeignShard:
    """What a `Shard` is, of a file without a record of raypipe's own. Samples are in the order of their keys.

    Args:
        path: the file, or the environment's folder.
        layout: "auto", or a layout's name.

    Raises:
        StoreError: the file is missing or damaged, or its layout is not known, or not the one named.
        ConfigError: a function of the user's cannot be imported.
    """

    classes: tuple[str, ...] | None = None

    def __init__(self, path: Path | str, layout: str = "auto") -> None:
        self.path = path
        self._file = LMDBFile(data_file(path))
        try:
            self._layout = layout_of(self._file, layout)
        except OSError as error:
            raise StoreError(f"{path} cannot be read: {error}") from error
        self.types, self.count = self._layout.types, len(self._layout.entries)

    @cached_property
    def fingerprint(self) -> str:
        """Hash over the layout, all keys and the lengths of their values, and the samples' values, of 64 of them.

        A copy that was compacted has the same. It takes about two microseconds per key.
        """
        digest = hashlib.blake2b(repr((self._layout.name, self.types)).encode(), digest_size=16)
        try:
            for number, _ in self._file.leaves():
                entries = self._file.leaf(number)
                digest.update(b"".join(b"%d:%b%d;" % (len(key), key, length) for key, length in entries))
            for index in np.unique(np.linspace(0, self.count - 1, _NUM_HASHED).astype(int)).tolist():
                try:
                    digest.update(self._layout.entries.at(index)[1])
                except StoreError:
                    digest.update(b"damaged")
        except OSError as error:
            raise StoreError(f"{self.path} cannot be read: {error}") from error
        return digest.hexdigest()

    def key(self, number: int) -> str:
        """That of a sample, for errors.

        Raises:
            StoreError, OSError: it cannot be read.
        """
        return self._layout.entries.at(number)[0].decode(errors="backslashreplace")

    def read_into(
        self, rows: list[dict[str, Any]], positions: list[int], keys: list[int], columns: tuple[str, ...]
    ) -> None:
        """Set rows[positions[i]] to sample keys[i]; one that is damaged leaves its row as it is.

        Raises:
            StoreError: the file cannot be read at all.
        """
        for position, key in zip(positions, keys, strict=True):
            try:
                rows[position] = self._layout.sample(key)
            except (StoreError, ValueError):
                continue  # a bad sample
            except OSError as error:
                raise StoreError(f"{self.path} cannot be read at sample {key}: {error}") from error
