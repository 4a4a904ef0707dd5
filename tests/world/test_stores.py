"""Stores of every layout, link, column type and label type that libraries write: as drawn, or refused by name."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from draw_stores import PICTURES, Stored, files

import raypipe
from raypipe.errors import ConfigError, StoreError

STORES = list(files())


def read(store: Any, columns: list[str]) -> list[tuple[Any, Any]]:
    """Numbers of pictures, and labels; None where there is none."""
    values = store.read(np.arange(len(store)), columns)
    found = []
    for row, data in enumerate(values["image"]):
        picture = PICTURES.index(bytes(data)) if data else None
        label = values["label"][row] if "label" in values else None
        found.append(
            (
                picture,
                label.tolist() if isinstance(label, np.ndarray | np.generic) else label,
            )
        )
    return found


@pytest.mark.parametrize("stored", STORES, ids=lambda stored: stored.name)
def test_a_store_has_what_was_drawn_or_is_refused_by_name(
    stored: Stored, tmp_path: Path
) -> None:
    address = stored.write(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            store = raypipe.open_store(address, **stored.options)
            has_labels = stored.options.get("target_column") != ""
            found = read(store, ["image", "label"] if has_labels else ["image"])
        except (StoreError, ConfigError) as error:
            assert stored.samples is None, str(error)
            assert tmp_path.name in str(error), str(error)
            return
    assert stored.samples is not None, f"delivered {found}"
    assert found == stored.samples
    assert re.fullmatch("[0-9a-f]{32}", store.fingerprint)
