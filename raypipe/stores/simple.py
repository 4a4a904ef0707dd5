"""`SimpleStore`, the base class of a user's store, which reads samples one by one."""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa

from raypipe.errors import RaypipeError, StoreError
from raypipe.stores.base import Columns, FileStore, hash_of_facts

_T = TypeVar("_T")


class SimpleStore(FileStore["_Samples"]):
    """A `Store` at an address, of samples that are read one by one.

    A subclass has a `schema`, the names and Arrow types of the columns, and the four methods below. `classes` and
    `groups` are those of `Store`; None = the store has none.

    Args:
        address: a path or URI; a relative path is made absolute, since processes differ in their working folder.
        options: further arguments of a subclass, with which other processes get the store too.
    """

    _is_of_process = True
    schema: pa.Schema = pa.schema([])
    classes: tuple[str, ...] | None = None
    groups: np.ndarray | None = None

    @abstractmethod
    def open(self) -> Any:
        """Open the files or the database; `opened` has the result, which stays in its process."""

    @abstractmethod
    def count(self) -> int:
        """Return the number of samples."""

    @abstractmethod
    def sample(self, index: int) -> Mapping[str, Any]:
        """Return the values of a sample by column; an `image` of None if it is missing."""

    @abstractmethod
    def facts(self) -> Any:
        """Return what is different for other contents, such as all names and sizes; its `repr` is hashed."""

    @property
    def opened(self) -> Any:
        """The result of `open`, which is called once per process, when it is first used."""
        return self._contents.opened

    def _open(self) -> _Samples:
        return self._patiently(lambda: _Samples(self, self.open()))

    def _patiently(self, do: Callable[[], _T]) -> _T:
        with self.explained():
            return do()

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Context manager: turn an error of the subclass, which may have any type, into StoreError."""
        try:
            yield
        except RaypipeError:
            raise
        except Exception as error:
            raise StoreError(
                f"{self.address} cannot be read: {type(error).__name__}: {error}"
            ) from error


class _Samples:
    """The samples of an open store."""

    written = ""

    def __init__(self, store: SimpleStore, opened: Any) -> None:
        self._store = store
        self.opened = opened
        self.schema = store.schema

    @cached_property
    def fingerprint(self) -> str:
        with self._store.explained():
            return hash_of_facts(self._store.facts())

    @cached_property
    def _count(self) -> int:
        with self._store.explained():
            return self._store.count()

    def __len__(self) -> int:
        return self._count

    def read(self, rows: np.ndarray, columns: tuple[str, ...]) -> Columns:
        samples = list(map(self._store.sample, rows.tolist()))
        images = None
        arrays = {}
        for name in columns:
            values = [sample[name] for sample in samples]
            if name == "image":
                images = values
            else:
                arrays[name] = pa.array(values, self.schema.field(name).type)
        return Columns(images, pa.table(arrays))
