"""Parquet stores: layouts, broken files, and the cache of row groups."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from refused import store_refused
from rewritten import rewrite

from raypipe.errors import StoreError
from raypipe.stores import open_store
from raypipe.stores.parquet import ParquetStore
from raypipe.stores.writers import ROW_GROUP_BYTES, ParquetWriter

pytestmark = pytest.mark.usefixtures("in_own_folder")

DATA = Path(__file__).with_name("data")


def write(
    path: str, num_samples: int = 40, num_bytes: int = 10_000, **options: Any
) -> str:
    with ParquetWriter(path, **options) as writer:
        for i in range(num_samples):
            writer.append({"image": bytes([i % 256]) * num_bytes, "label": i})
    return path


def write_table(path: str, metadata: dict | None = None, **columns: pa.Array) -> str:
    table = pa.table(columns)
    if metadata is not None:
        table = table.replace_schema_metadata({"huggingface": json.dumps(metadata)})
    pq.write_table(table, path)
    return path


IMAGES = pa.array([b"a", b"bb", b"ccc"])


@pytest.mark.parametrize(
    "kind", [pa.int8(), pa.uint8(), pa.int32(), pa.uint32(), pa.int64()]
)
def test_label_types(kind: pa.DataType) -> None:
    path = write_table("a.parquet", image=IMAGES, label=pa.array([0, 1, 2], kind))
    for indices in ([2, 0], []):
        labels = ParquetStore(path).read(np.array(indices))["label"]
        assert labels.dtype == np.int64
        assert labels.tolist() == indices


@pytest.mark.parametrize(
    ("feature", "classes"),
    [
        ({"names": ["x", "y"], "_type": "ClassLabel"}, ("x", "y")),
        ({"names": ["x", "y"]}, ("x", "y")),
        ({"dtype": "int64", "_type": "Value"}, None),
        ({"names": ["x"], "_type": "Other"}, None),
        (None, None),
    ],
)
def test_classes_in_the_metadata(feature: dict | None, classes: tuple | None) -> None:
    metadata = {"info": {"features": {"image": {"_type": "Image"}, "label": feature}}}
    path = write_table("a.parquet", metadata, image=IMAGES, label=pa.array([0, 1, 1]))
    assert ParquetStore(path).classes == classes


def test_renamed_columns() -> None:
    metadata = {"info": {"features": {"fine": {"names": ["x", "y"]}}}}
    columns = {
        "coarse": pa.array([7, 8, 9]),
        "img": IMAGES,
        "fine": pa.array([0, 1, 1]),
    }
    path = write_table("a.parquet", metadata, **columns)
    store = ParquetStore(path, image_column="img", target_column="fine")
    assert tuple(store.stored.names) == ("image", "label", "coarse")
    assert store.classes == ("x", "y")
    assert store.read(np.array([1]))["label"].tolist() == [1]

    store_refused(
        r"a\.parquet has no column 'image' .*; did you mean img\? .* coarse, img, fine",
        path,
    )
    store_refused(
        "no column 'fien' for target_column; did you mean fine",
        path,
        image_column="img",
        target_column="fien",
    )
    without_label = ParquetStore(path, image_column="img")
    assert tuple(without_label.stored.names) == ("image", "coarse", "fine")
    assert without_label.fingerprint != store.fingerprint
    with pytest.raises(
        StoreError, match="no column 'label' for target_column; its columns are image, "
    ):
        without_label.read(np.array([0]))


def test_what_the_datasets_library_wrote_is_read() -> None:
    """tests/stores/data/README.md has how it was written."""
    expected = json.loads((DATA / "hugging-face.json").read_text())
    for split, num_files in (("train", 2), ("test", 1)):
        store = open_store(DATA / "hugging-face" / f"{split}-*.parquet")
        assert store.classes == ("cat", "dog", "owl")
        assert tuple(store.stored.names) == ("image", "label", "caption", "name")
        batch = store.read(np.arange(len(store)), tuple(store.schema.names))
        rows = expected[split]
        assert [hashlib.sha256(image).hexdigest() for image in batch["image"]] == [
            row["sha256"] for row in rows
        ]
        assert batch["label"].tolist() == [row["label"] for row in rows]
        assert batch["caption"] == [row["caption"] for row in rows]
        assert len(list((DATA / "hugging-face").glob(f"{split}-*"))) == num_files


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (
            {"image": pa.array([1]), "label": pa.array([0])},
            r"'image' has type int64; images must be bytes \(binary",
        ),
        ({"image": pa.array([[1]]), "label": pa.array([0])}, "'image' has type list"),
        (
            {"image": pa.array([b"a"]), "label": pa.array(["x"])},
            "'label' has type string; labels must be num",
        ),
        (
            {"image": pa.array([b"a"]), "label": pa.array([["x"]])},
            "'label' has type list",
        ),
    ],
)
def test_unusable_types(columns: dict, message: str) -> None:
    store_refused(message, write_table("a.parquet", **columns))


def test_two_columns_of_one_name() -> None:
    table = pa.table(
        [IMAGES, pa.array([0, 1, 2]), pa.array([0, 1, 2])], ["image", "label", "label"]
    )
    pq.write_table(table, "a.parquet")
    store_refused(r"a\.parquet has several columns called 'label'", "a.parquet")


def test_files_must_agree() -> None:
    write_table("a.parquet", image=IMAGES, label=pa.array([0, 1, 2]))
    write_table("b.parquet", image=IMAGES, label=pa.array([0, 1, 2], pa.int32()))
    store_refused(
        r"b\.parquet and .*a\.parquet differ in schema or classes \(label: int32\)",
        ".",
    )


def test_a_footer_with_foreign_null_counts_does_not_end_the_process() -> None:
    path = Path("a.parquet")
    write_table("a.parquet", image=IMAGES, label=pa.array([0, 1, 2]))
    # In the schema, before a column's name: it has nulls (1, as Thrift has it); and now it has none.
    rewrite(path, b"\x25\x02\x18\x05image", b"\x25\x00\x18\x05image")
    with pytest.raises(
        StoreError,
        match=r"a\.parquet, row group 0: cannot be read: .*; copy or convert it again",
    ):
        ParquetStore(path).read(np.arange(3))
    assert ParquetStore(path).read(np.arange(3), ("label",))["label"].sum() == 3


def test_a_footer_with_a_foreign_type_does_not_end_the_process() -> None:
    named = pa.array([{"bytes": b"", "path": "a.jpg"}] * 3)
    path = Path(write_table("a.parquet", image=named, label=pa.array(range(3))))
    # The type of each column's values, behind its schema: 6 (BYTE_ARRAY), and now none of Parquet's.
    rewrite(path, b"\x15\x0c\x19", b"\x15\x22\x19")
    assert ParquetStore(path).read(np.arange(3), ("label",))["label"].sum() == 3


def test_text_that_is_no_utf_8_is_none() -> None:
    names = pa.array([b"a", b"\xff", b"c"]).view(pa.string())
    path = write_table("a.parquet", image=IMAGES, label=pa.array([0, 1, 2]), name=names)
    assert ParquetStore(path).read(np.arange(3), ("name",))["name"] == ["a", None, "c"]


def test_images_are_views_and_keep_a_quarter_of_the_cache_beyond_it() -> None:
    path = write("a.parquet", row_group_size=4)
    store = ParquetStore(path, cache_bytes=400_000)
    images = store.read(np.arange(40))["image"]
    kinds = [type(image) for image in images]
    assert kinds == [memoryview] * 8 + [bytes] * 32  # two groups of 40 kB
    assert len({id(view.obj) for view in images[:4]}) == 1
    assert 0 < store._contents.num_bytes() <= 400_000
    store.close()
    assert images == [bytes([i]) * 10_000 for i in range(40)]
    assert {type(image) for image in store.forwards().read(np.arange(4))["image"]} == {
        bytes
    }


def test_a_store_for_one_pass_is_the_same_store_with_one_group_held() -> None:
    path = write("a.parquet", row_group_size=4)
    same = ParquetStore(path)
    store = same.forwards()
    assert (store.address, store.fingerprint) == (same.address, same.fingerprint)
    for start in range(0, 40, 8):
        assert store.read(np.arange(start, start + 8))["label"].tolist() == list(
            range(start, start + 8)
        )
        assert 40_000 < store._contents.num_bytes() < 50_000


def test_writer_groups_are_about_8_mib() -> None:
    num_bytes = 1 << 20
    store = ParquetStore(write("a.parquet", 20, num_bytes))
    assert store.groups.tolist() == [0, 8, 16, 20]
    assert 8 * num_bytes == ROW_GROUP_BYTES


def test_writer_leaves_images_as_they_are() -> None:
    path = write("a.parquet", 50, 1_000, classes=["a", "b"])
    metadata = pq.read_metadata(path)
    image = metadata.row_group(0).column(0)
    assert (image.path_in_schema, image.compression, image.statistics) == (
        "image",
        "UNCOMPRESSED",
        None,
    )
    assert not image.has_dictionary_page
    features = json.loads(metadata.metadata[b"huggingface"])["info"]["features"]
    assert features["label"] == {"names": ["a", "b"], "_type": "ClassLabel"}
    assert ParquetStore(path).classes == ("a", "b")


def test_a_row_group_that_hardly_shrinks_may_be_as_large_as_stored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RAYPIPE_READ_BYTES", str(1 << 20))
    rng = np.random.default_rng(1)
    for name, images in (
        ("photos", [rng.bytes(1 << 17) for _ in range(32)]),
        ("zeros", [bytes(1 << 17)] * 32),
    ):
        table = pa.table({"image": images, "label": list(range(32))})
        pq.write_table(table, f"{name}.parquet", use_dictionary=False)
    assert ParquetStore("photos.parquet").read(np.array([31]))["label"].tolist() == [31]
    with pytest.raises(
        StoreError,
        match=r"unpack to .* bytes; the limit is 1,048,576: write smaller row groups",
    ):
        ParquetStore("zeros.parquet").read(np.array([0]))
