"""Samples as a store has them: which of them are read, and which labels are classes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from micro_batches import EncodedSample, each

from raypipe.errors import ConfigError
from raypipe.stores.base import Columns
from raypipe.stores.memory import MemoryStore
from raypipe.transform.samples import NO_LABEL, read_samples

TARGETS = {"seg": [b"m0", b"m1"], "objects": [[[0, 0, 1, 1, 2]], []]}


class Watched(MemoryStore):
    """It notes what is read of it."""

    def read(self, indices: np.ndarray, columns: Any) -> Columns:
        self.read_of = indices.tolist(), tuple(columns)
        return super().read(indices, columns)


def test_padding_is_not_read_and_has_neither_image_nor_columns() -> None:
    store = Watched([b"a", b"b"], [3, 4], columns=TARGETS)
    found = read_samples(store, np.array([-1, 1, -1]), ("image", "label", "seg"))
    nothing = EncodedSample(None, 0, {"seg": None})
    assert each(found) == [nothing, EncodedSample(b"b", 4, {"seg": b"m1"}), nothing]
    assert store.read_of == ([1], ("image", "label", "seg"))
    assert (
        each(read_samples(store, np.array([-1, -1])))
        == [EncodedSample(None, 0, {})] * 2
    )


def test_a_label_that_no_class_can_be_is_marked() -> None:
    class Labeled(MemoryStore):
        def read(self, indices: np.ndarray, columns: Any) -> Columns:
            return Columns(
                super().read(indices, columns).images, pa.table({"label": labels})
            )

    for labels in (
        [7, None, 1 - 2**63, None],
        np.array([7, 2**64 - 1, 2**62, 2**63], np.uint64),
    ):
        found = read_samples(Labeled([b"a"] * 4, [0] * 4), np.arange(4)).labels
        assert found.tolist() == [7, NO_LABEL, int(labels[2]), NO_LABEL]


@pytest.mark.parametrize(
    ("labels", "kind"),
    [(np.array([0.5, 1]), "double"), (np.zeros((2, 3), np.int64), "fixed_size_list")],
)
def test_labels_that_are_no_classes_end_the_run_with_their_type(
    labels: np.ndarray, kind: str
) -> None:
    store = MemoryStore([b"a", b"b"], labels)
    with pytest.raises(
        ConfigError,
        match=rf"labels of {kind}.*, which are not classes: name",
    ):
        read_samples(store, np.arange(2))
