"""The store of a stream whose samples a Dataset makes: each sample is its index."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pyarrow as pa

from raypipe.stores.base import Columns, check_columns, check_indices, hash_of_facts

_DTYPE = "<i8"


class IndexStore:
    """A store of N indices, each as the 8 bytes of an image.

    Args:
        num_samples: N.
        name: name of the Dataset, for messages.
        facts: hashes of what its items depend on, by name.
    """

    groups = None
    classes = None
    schema = pa.schema([("image", pa.binary())])

    def __init__(self, num_samples: int, name: str, facts: Mapping[str, str]) -> None:
        self._num_samples = num_samples
        self.address = name
        self.facts = facts
        self.fingerprint = hash_of_facts(sorted(facts.items()))

    def __len__(self) -> int:
        return self._num_samples

    def read(
        self, indices: np.ndarray, columns: tuple[str, ...] = ("image",)
    ) -> Columns:
        """Read samples, see `Store.read`."""
        rows = check_indices(indices, len(self), self.address)
        check_columns(columns, self.schema.names, self.address)
        images: list[bytes | memoryview | None] = [
            row.tobytes() for row in rows.astype(_DTYPE)
        ]
        table = pa.table({})
        return Columns(images if "image" in columns else None, table)

    def close(self) -> None:
        """Do nothing: the store has no files."""


def index_in(image: bytes | memoryview | None) -> int:
    """Return the index that a sample of an `IndexStore` is."""
    assert image is not None
    return int.from_bytes(image, "little")
