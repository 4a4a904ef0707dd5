"""Columns of Arrow tables: every physical type that a logical type has, files by path, stores without a target."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from refused import store_refused

from raypipe.errors import StoreError
from raypipe.stores import open_store, store_options
from raypipe.stores.arrow_columns import TableColumns, chunked_taker
from raypipe.stores.filter import matching

pytestmark = pytest.mark.usefixtures("in_own_folder")

FILES = [b"abcde", None, b"12345", b"abcde", b"     ", None]
TEXTS = ["a", None, "long enough for no view to hold it within", "a", "", None]
ORDER = np.array([5, 0, 0, 4, 3, 1, 2])
ROWS = pa.array([b"x"] * len(FILES))


def dictionary(values: list[Any], kind: pa.DataType, index: pa.DataType) -> pa.Array:
    entries = list(dict.fromkeys(value for value in values if value is not None))
    places = [None if value is None else entries.index(value) for value in values]
    return pa.DictionaryArray.from_arrays(
        pa.array(places, index), pa.array(entries, kind)
    )


def arrays_of(values: list[Any], kinds: list[pa.DataType]) -> dict[str, pa.Array]:
    """The values in each of the physical types, and dictionaries of each with small and large indices."""
    arrays = {str(kind): pa.array(values, kind) for kind in kinds}
    plain = [
        kind
        for kind in kinds
        if not (pa.types.is_binary_view(kind) or pa.types.is_string_view(kind))
    ]
    for kind in plain:
        for index in (pa.int8(), pa.uint32(), pa.int64()):
            arrays[f"dictionary of {kind} by {index}"] = dictionary(values, kind, index)
    return arrays


BYTES = arrays_of(
    FILES, [pa.binary(), pa.large_binary(), pa.binary_view(), pa.binary(5)]
)
STRINGS = arrays_of(TEXTS, [pa.string(), pa.large_string(), pa.string_view()])


def in_chunks(values: pa.Array) -> pa.ChunkedArray:
    return pa.chunked_array([values[:2], values[:0], values[2:]])


def write(path: str, **columns: Any) -> str:
    pq.write_table(pa.table(columns), path)
    return path


@pytest.mark.parametrize("values", BYTES.values(), ids=BYTES)
def test_images_of_every_physical_type_are_the_same_bytes(values: pa.Array) -> None:
    expected = [FILES[index] for index in ORDER]
    paths = pa.array([f"{number}.png" for number in range(len(FILES))])
    struct = pa.StructArray.from_arrays([values, paths], ["bytes", "path"])
    for image in (values, struct):
        columns = TableColumns(
            [("a.parquet", pa.schema({"image": image.type}))], "image", "label"
        )
        assert (
            chunked_taker(columns.opened("image", in_chunks(image)))(ORDER) == expected
        )
        path = write("a.parquet", image=image, mask=image)
        store = open_store(path)
        read = store.read(ORDER, ("image", "mask"))
        assert dict(read) == {"image": expected, "mask": expected}
        assert {type(mask) for mask in read["mask"]} == {bytes, type(None)}
        names = {"mask.path"} if image is struct else set()
        assert set(store.schema.names) == {"image", "mask", "name"} | names
        for name in names:
            assert store.read(ORDER, (name,))[name] == [
                f"{index}.png" for index in ORDER
            ]


@pytest.mark.parametrize("values", STRINGS.values(), ids=STRINGS)
def test_text_of_every_physical_type_is_the_same(values: pa.Array) -> None:
    store = open_store(write("a.parquet", image=ROWS, t=values))
    assert store.read(ORDER, ("t",))["t"] == [TEXTS[index] for index in ORDER]
    assert matching(store, "t == 'a'").tolist() == [text == "a" for text in TEXTS]


LISTS = [
    pa.list_(pa.int16()),
    pa.large_list(pa.int16()),
    pa.list_view(pa.int16()),
    pa.list_(pa.int16(), 2),
]


@pytest.mark.parametrize("kind", LISTS, ids=str)
def test_lists_of_every_physical_type_are_the_same_numbers(kind: pa.DataType) -> None:
    values = [[number, -number] for number in range(len(FILES))]
    store = open_store(write("a.parquet", image=ROWS, label=pa.array(values, kind)))
    assert np.array_equal(store.read(ORDER)["label"], np.array(values)[ORDER])


NO_TARGETS = {
    "text": pa.array(["cat"] * 6),
    "dates": pa.array([0] * 6, pa.timestamp("us")),
    "bytes": pa.array([b"1"] * 6),
    "texts": pa.array([["1"]] * 6),
    "structs": pa.array([{"id": 1}] * 6),
}


@pytest.mark.parametrize("values", NO_TARGETS.values(), ids=NO_TARGETS)
def test_without_a_target_a_label_of_any_type_is_no_error(values: pa.Array) -> None:
    path = write("a.parquet", image=ROWS, label=values, width=pa.array([1] * 6))
    store_refused("to '' for batches without a target", path)
    store = open_store(path, **store_options(target_column=""))
    assert (
        tuple(store.stored.names) == ("image", "width")
        and store.read(ORDER, ("image",))["image"] == [b"x"] * 7
    )


def test_without_a_target_a_good_label_stays_in_the_store() -> None:
    path = write("a.parquet", image=ROWS, label=pa.array(range(6)))
    without, default = (
        open_store(path, **store_options(target_column="")),
        open_store(path),
    )
    assert (
        tuple(without.schema.names) == tuple(default.schema.names)
        and without.fingerprint == default.fingerprint
    )
    path = write("b.parquet", image=ROWS, label=pa.array([1, None, 2, 3, 4, 5]))
    with pytest.raises(
        StoreError,
        match=r"has a null label.*write the file again without such rows \(table\.filter",
    ):
        open_store(path).read(ORDER)
    assert open_store(path, target_column="").read(ORDER)["label"] == [
        5,
        1,
        1,
        4,
        3,
        None,
        2,
    ]


def test_images_that_are_only_named_are_files_unless_one_has_bytes() -> None:
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    named = [{"bytes": None, "path": f"/data/{number}.jpg"} for number in range(6)]
    path = write("a.parquet", image=pa.array(named, kind))
    assert open_store(path).sample_name(2) == "/data/2.jpg"
    path = write(
        "a.parquet",
        image=pa.array([*named[1:], {"bytes": b"x", "path": ""}], kind),
    )
    # bad samples among good ones
    assert open_store(path).read(np.array([0, 5]), ("image",))["image"] == [
        None,
        b"x",
    ]


def test_a_damaged_page_with_a_checksum_is_an_error() -> None:
    path, numbers = Path("a.parquet"), pa.array(range(1000, 1100))
    table = pa.table({"image": pa.array([b"x" * 50] * 100), "label": numbers})
    options = {
        "use_dictionary": False,
        "compression": "none",
        "write_page_checksum": True,
    }
    pq.write_table(table, path, **options)
    whole = path.read_bytes()
    for value in (1000, 1050, 1098):
        place = whole.index(
            value.to_bytes(8, "little") + (value + 1).to_bytes(8, "little")
        )
        path.write_bytes(
            whole[:place] + (77).to_bytes(8, "little") + whole[place + 8 :]
        )
        with pytest.raises(
            StoreError,
            match=r"row group 0: cannot be read: .*CRC.*copy or convert it again",
        ):
            open_store(path).read(np.arange(100))
