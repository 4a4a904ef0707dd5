"""`SimpleStore`, the base class of a user's store, which reads samples one by one."""

from __future__ import annotations

import contextlib
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from raypipe.errors import RaypipeError, StoreError
from raypipe.stores.base import (
    Columns,
    check_columns,
    check_indices,
    hash_of_facts,
    other_contents,
)


class SimpleStore(ABC):
    """A `Store` at an address, of samples that are read one by one.

    A subclass has a `schema`, the names and Arrow types of the columns, and the four methods below. `classes` and
    `groups` are those of `Store`; None = the store has none.

    Args:
        address: a path or URI; a relative path is made absolute, since processes differ in their working folder.
        options: further arguments of a subclass, with which other processes get the store too.
    """

    schema: pa.Schema
    classes: tuple[str, ...] | None = None
    groups: np.ndarray | None = None

    def __init__(self, address: str | Path, *options: Any) -> None:
        is_uri = "://" in str(address)
        self.address = str(address if is_uri else Path(address).absolute())
        self._options = options
        self._opened: Any = None
        self._pid = 0
        self._count: int | None = None
        self._fingerprint = ""
        # The fingerprint where the process that sent the store here had opened it; "" = it was not sent.
        self._sent_fingerprint = ""

    def __reduce__(self) -> tuple[Any, ...]:
        sent = self.fingerprint if self._pid else self._sent_fingerprint
        return (
            type(self),
            (self.address, *self._options),
            {"_sent_fingerprint": sent},
        )

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
        if self._pid != os.getpid():
            self.close()
            with self._explained():
                self._opened = self.open()
            self._pid = os.getpid()
            if self._sent_fingerprint not in ("", self.fingerprint):
                self.close()
                raise other_contents(self.address)
        return self._opened

    @property
    def fingerprint(self) -> str:
        if not self._fingerprint:
            with self._explained():
                self._fingerprint = hash_of_facts(self.facts())
        return self._fingerprint

    def __len__(self) -> int:
        if self._count is None:
            with self._explained():
                self._count = self.count()
        return self._count

    def read(
        self, indices: np.ndarray, columns: tuple[str, ...] = ("image", "label")
    ) -> Columns:
        """Read samples, see `Store.read`."""
        rows = check_indices(indices, len(self), self.address)
        check_columns(columns, self.schema.names, self.address)
        with self._explained():
            samples = [self.sample(index) for index in rows.tolist()]
            images = None
            if "image" in columns:
                images = [sample["image"] for sample in samples]
            arrays = {}
            for name in columns:
                if name != "image":
                    values = [sample[name] for sample in samples]
                    arrays[name] = pa.array(values, self.schema.field(name).type)
        return Columns(images, pa.table(arrays))

    def close(self) -> None:
        """Forget what was opened; the next read opens it again."""
        self._opened = None
        self._pid = 0
        self._count = None
        self._fingerprint = ""

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Context manager: turn an error of the subclass, which may have any type, into StoreError."""
        try:
            yield
        except RaypipeError:
            raise
        except Exception as error:
            raise StoreError(
                f"{self.address} cannot be read: {type(error).__name__}: {error}"
            ) from error
