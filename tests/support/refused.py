"""Stores and sources that are refused with one error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from raypipe.errors import StoreError
from raypipe.stores import open_store
from raypipe.stores.sources import Asked, open_source


def store_refused(message: str, address: str | Path, **options: Any) -> None:
    """Check that a store is refused when it is opened, which its length asks for."""
    with pytest.raises(StoreError, match=message):
        len(open_store(address, **options))


def source_rows(
    address: str | Path, image: str = "image", label: str = "label"
) -> list[dict[str, Any]]:
    """The samples of a source, of as many as it says."""
    source = open_source(address, Asked(image, label))
    assert source is not None
    rows = list(source.samples)
    assert source.num_samples in (None, len(rows))
    return rows


def source_refused(
    message: str, address: str | Path, image: str = "image", label: str = "label"
) -> None:
    """Check that a source is refused before or while its samples are read."""
    with pytest.raises(StoreError, match=message):
        source_rows(address, image, label)
