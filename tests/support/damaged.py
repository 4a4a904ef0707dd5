"""What becomes of a store whose files are damaged."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from raypipe.errors import StoreError
from raypipe.stores import open_store


def assert_read_or_named(path: Path) -> None:
    """All of it is read, or one error names it."""
    try:
        store = open_store(path)
        store.read(np.arange(len(store)), tuple(store.schema.names))
    except StoreError as error:
        assert str(path) in str(error)
