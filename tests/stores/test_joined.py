from __future__ import annotations

import pickle

import numpy as np
import pytest

from raypipe.errors import StoreError
from raypipe.stores.base import Store, name_of
from raypipe.stores.joined import JoinedStore
from raypipe.stores.memory import MemoryStore


def part(
    size: int,
    salt: int,
    group_size: int | None = None,
    classes: list[str] | None = None,
) -> MemoryStore:
    images = [bytes([salt, i]) for i in range(size)]
    labels, extra = (
        list(range(size)),
        {f"only{salt}": [0] * size, "text": [f"{salt}-{i}" for i in range(size)]},
    )
    return MemoryStore(images, labels, classes, extra, group_size)


def test_a_joined_store_reads_its_parts_in_the_order_asked_for() -> None:
    joined = JoinedStore({"a": part(3, 1), "b": part(2, 2), "c": part(4, 3)})
    assert isinstance(joined, Store) and len(joined) == 9
    assert joined.offsets.tolist() == [0, 3, 5, 9]
    assert tuple(joined.schema.names) == ("image", "label", "text", "name")
    wanted = np.array([8, 0, 4, 0, 3, 5])
    found = joined.read(wanted, ("image", "label", "text"))
    assert found["image"] == [
        bytes(pair) for pair in ((3, 3), (1, 0), (2, 1), (1, 0), (2, 0), (3, 0))
    ]
    assert found["label"].tolist() == [3, 0, 1, 0, 0, 0]
    assert found["text"] == ["3-3", "1-0", "2-1", "1-0", "2-0", "3-0"]
    assert joined.read(np.array([], np.int64))["label"].shape == (0,)
    again = pickle.loads(pickle.dumps(joined))
    assert (
        again.fingerprint == joined.fingerprint
        and again.read(wanted)["image"] == found["image"]
    )
    joined.close()


def test_a_sample_is_called_by_its_source_and_its_number_there() -> None:
    joined = JoinedStore({"a": part(3, 1), "b": part(2, 2)})
    assert name_of(joined, 4) == "b 1" and name_of(joined, 2) == "a 2"
    assert (
        joined.address == f"{joined.parts['a'].address} + {joined.parts['b'].address}"
    )


def test_groups_are_those_of_the_parts_one_after_the_other() -> None:
    assert JoinedStore({"a": part(3, 1), "b": part(2, 2)}).groups is None
    groups = JoinedStore(
        {"a": part(5, 1, 2), "b": part(2, 2), "c": part(3, 3, 3)}
    ).groups
    assert groups is not None and groups.tolist() == [0, 2, 4, 5, 7, 10]


def test_classes_are_those_that_all_name() -> None:
    for classes, expected in ((["x"], ("x",)), (["y"], None), (None, None)):
        parts = {"a": part(1, 1, classes=["x"]), "b": part(1, 2, classes=classes)}
        assert JoinedStore(parts).classes == expected


def test_the_fingerprint_is_that_of_the_parts_in_their_order() -> None:
    a, b = part(3, 1), part(2, 2)
    found = {
        JoinedStore(parts).fingerprint
        for parts in ({"a": a, "b": b}, {"b": b, "a": a}, {"a": a, "b": a})
    }
    assert len(found) == 3
    assert JoinedStore({"x": a, "y": b}).fingerprint in found, "names do not matter"


def test_a_column_that_a_part_lacks_names_the_part() -> None:
    joined = JoinedStore({"a": part(3, 1), "b": part(2, 2)})
    with pytest.raises(
        StoreError, match=rf"{joined.parts['b'].address} has no column 'only1'"
    ):
        joined.read(np.array([0]), ("only1",))
    with pytest.raises(IndexError, match="index 5 is outside"):
        joined.read(np.array([5]))
