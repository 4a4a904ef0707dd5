"""LMDBs of other programs: layouts, orders, labels, damage, and what is refused."""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from foreign_lmdbs import (
    DUMPS,
    write_entries,
    write_folders,
    write_lsun,
    write_texts,
    write_values,
)
from pictures import picture
from refused import store_refused

import raypipe
from raypipe.errors import ConfigError, StoreError
from raypipe.stores import open_store, open_writer
from raypipe.stores.base import Store
from raypipe.stores.lmdb_values import keys_in

pytestmark = pytest.mark.usefixtures("in_own_folder")

IMAGES = [picture(number) for number in range(12)]
LABELS = [number % 3 for number in range(12)]
PLAIN = {str(number).encode(): image for number, image in enumerate(IMAGES)}
PLAN = raypipe.PlanConfig(epochs=1, micro_batch_size=2, epoch_samples=8, weights=1.0)
FEW = {b"a": IMAGES[0], b"b": IMAGES[1]}


def read(store: Store, *columns: str) -> list[Any]:
    values = store.read(np.arange(len(store)), columns)
    return [
        each.tolist() if isinstance(each, np.ndarray) else list(map(_plain, each))
        for each in values.values()
    ]


def _plain(value: Any) -> Any:
    return bytes(value) if isinstance(value, memoryview) else value


# Layouts


def test_the_classes_of_lsun_are_its_databases() -> None:
    write_lsun(Path(), IMAGES, LABELS, ("bridge", "church_outdoor", "tower"))
    write_entries(Path("tower_val_lmdb"), {b"0": IMAGES[0]}, folder=True)
    store_refused(
        r"several splits: train \(3\), val \(1\)\. .*/tower_val_lmdb, or", "."
    )
    store = open_store("*_train_lmdb")
    assert store.classes == ("bridge", "church_outdoor", "tower")
    assert read(store, "label") == [sorted(LABELS)]


def test_folders_in_keys_are_classes() -> None:
    keys = [
        f"train/n{number % 2}/below/{number:02}.JPEG".encode() for number in range(12)
    ]
    store = open_store(
        write_entries(Path("a.lmdb"), dict(zip(keys, IMAGES, strict=True)))
    )
    assert store.classes == ("n0", "n1") and read(store, "label") == [[0] * 6 + [1] * 6]
    splits = write_folders(Path("b.lmdb"), IMAGES, LABELS, ("train", "val", "x"))
    store_refused(r"b\.lmdb has the folders train, val, which are splits", splits)
    store_refused(
        r"not class/name\.jpg of several classes",
        write_entries(Path("c.lmdb"), PLAIN),
        target_column="folder",
    )


def test_scene_text_has_its_texts() -> None:
    texts = [f"wörd {number}" for number in range(12)]
    path = write_texts(Path("a.lmdb"), IMAGES, texts)
    store = open_store(path)
    assert tuple(store.stored.names) == ("image", "text", "key") and read(
        store, "image", "text"
    ) == [IMAGES, texts]
    # Entries beyond num-samples do not count, and a sample may lack its text.
    more = {
        b"image-%09d" % 13: IMAGES[0],
        b"path-%09d" % 1: b"x",
        b"label-%09d" % 2: b"\xff",
    }
    write_entries(path, more)
    assert read(open_store(path), "text") == [[texts[0], None, *texts[2:]]]


@pytest.mark.parametrize("kind", DUMPS)
def test_values_come_in_the_order_of_keys(kind: str) -> None:
    path = write_values(Path("a"), IMAGES, LABELS, DUMPS[kind])
    store = open_store(path, trust_pickles=kind == "pickle")
    assert tuple(store.stored.names) == ("image", "label", "key")
    assert read(store, "image", "label", "key") == [
        IMAGES,
        LABELS,
        [str(number) for number in range(12)],
    ]
    names = [f"{number * 7 % 12:02}.jpg".encode() for number in range(12)]
    entries = {
        name: DUMPS[kind]((IMAGES[row], LABELS[row])) for row, name in enumerate(names)
    }
    shuffled = write_entries(
        Path("b.lmdb"), {**entries, b"__keys__": DUMPS[kind](names)}
    )
    store = open_store(shuffled, trust_pickles=kind == "pickle")
    assert read(store, "image", "label") == [IMAGES, LABELS]
    assert store.sample_name(1).endswith("b.lmdb, key 07.jpg")  # type: ignore[attr-defined]
    missing = write_entries(
        Path("c.lmdb"), {**entries, b"__keys__": DUMPS[kind]([*names, b"gone"])}
    )
    store_refused(
        r"c\.lmdb has no key b'gone', which its __keys__ names",
        missing,
        trust_pickles=kind == "pickle",
    )


@pytest.mark.parametrize("num", [3, 20, 70_000])
def test_lists_of_keys_of_any_length_are_read(num: int) -> None:
    keys = [str(number).encode() for number in range(num)]
    for dumps in (pickle.dumps, msgpack.packb):
        assert keys_in(memoryview(dumps(keys)), may_unpickle=True) == keys
    assert (
        keys_in(memoryview(json.dumps([*range(num)]).encode()), may_unpickle=False)
        == keys
    )
    assert keys_in(memoryview(pickle.dumps(keys)), may_unpickle=False) is None


ARRAY = {b"nd": True, b"type": b"|u1", b"kind": b"", b"shape": [len(IMAGES[0])]}
NUMBER = {b"nd": False, b"type": b"<i8", b"data": (5).to_bytes(8, "little")}

# Name → the value of a row and its image, and the labels of three.
VALUES: dict[str, tuple[Callable[[int, bytes], Any], list[Any] | None]] = {
    "dict": (lambda row, image: {"img": image, "target": row, "id": 7}, [0, 1, 2]),
    "label first": (lambda row, image: [row, image], [0, 1, 2]),
    "float": (lambda row, image: [image, row / 2], [0.0, 0.5, 1.0]),
    "lists": (lambda row, image: [image, [row, 1.5]], [[0, 1.5], [1, 1.5], [2, 1.5]]),
    "msgpack_numpy": (lambda _, image: [{**ARRAY, b"data": image}, NUMBER], [5, 5, 5]),
    "booleans": (lambda row, image: (image, row > 0), [0, 1, 1]),
    "image alone": (lambda _, image: image, None),
    "text": (lambda row, image: (image, f"word {row}"), None),
}


@pytest.mark.parametrize("name", VALUES)
def test_parts_of_a_value_are_found_by_content(name: str) -> None:
    value_of, labels = VALUES[name]
    images = [IMAGES[0]] * 3 if name == "msgpack_numpy" else IMAGES[:3]
    values = [msgpack.packb(value_of(*pair)) for pair in enumerate(images)]
    entries = {b"%d" % row: value for row, value in enumerate(values)}
    store = open_store(write_entries(Path("a.lmdb"), entries))
    assert read(store, "image") == [images]
    if labels is not None:
        assert read(store, "label") == [labels]
    assert ("text" in store.schema.names) == (name == "text")


def test_a_label_of_a_dict_may_be_named() -> None:
    named = {b"a": msgpack.packb({"image": IMAGES[0], "fine": 3, "label": 1})}
    path = write_entries(Path("named.lmdb"), named)
    assert read(open_store(path, target_column="fine"), "label") == [[3]]
    store_refused(
        r"named\.lmdb has no column 'coarse' for target_column",
        path,
        target_column="coarse",
    )


# Lists of keys and labels


def listed(separator: str, label_of: Callable[[int], object]) -> str:
    """A list of more keys than there are, in another order."""
    return "".join(f"{n}{separator}{label_of(n)}\n" for n in reversed(range(13)))


def test_labels_of_a_list_beside() -> None:
    path = write_entries(Path("train.lmdb"), PLAIN)
    before = open_store(path).fingerprint
    Path("train.txt").write_text(listed(" ", lambda number: number % 5))
    store = open_store(path)
    assert store.classes is None and store.fingerprint != before
    assert read(store, "label") == [[number % 5 for number in range(12)]]
    names = "key,class\n" + listed(",", lambda number: ("cat", "dog")[number % 2])
    Path("names.csv").write_text(names)
    store = open_store(path, target_column="names.csv")
    assert store.classes == ("cat", "dog") and read(store, "label") == [[0, 1] * 6]
    assert open_store(path, target_column="").stored.names == ["image", "key"]
    folder = write_entries(Path("env"), PLAIN, folder=True)
    (folder / "labels.txt").write_text(listed("\t", int))
    assert read(open_store(folder), "label") == [list(range(12))]
    quoted = [f'"{number}","{number % 2}"' for number in range(12)]
    Path("names.csv").write_text("\ufeff" + "\n".join(quoted))
    store = open_store(path, target_column="names.csv")
    assert read(store, "label") == [[0, 1] * 6]
    Path("names.csv").write_text("\n".join([*quoted, "3,1", "3,0"]))
    store_refused(
        "names.csv has the labels '1' and '0' for the key b'3': write one line",
        path,
        target_column="names.csv",
    )
    Path("train.txt").write_text("0 1\n")
    for column, message in (
        (
            "label",
            r"train\.txt has 1 lines, and none for the key b'1' of .*train\.lmdb",
        ),
        ("absent.txt", r"absent\.txt cannot be read"),
    ):
        store_refused(message, path, target_column=column)


# Trust


def test_pickles_need_the_word_of_trust() -> None:
    path = write_values(Path("a"), IMAGES, LABELS, DUMPS["pickle"])
    store_refused(r"/a has pickled values.*--store\.trust-pickles true", path)
    with pytest.raises(StoreError, match="trust_pickles=True in Python"):
        raypipe.open_stream(path, plan=PLAN)
    spec = raypipe.open_stream(path, plan=PLAN, trust_pickles=True)
    assert spec.stores["train"].read(np.array([3]))["label"] == 0


class Trap:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return Path.touch, (self.marker,)


def test_a_trusted_pickle_runs_nothing() -> None:
    marker = Path("marker").absolute()
    trap = pickle.dumps((IMAGES[0], Trap(marker)))
    good = {
        str(number).encode(): pickle.dumps((image, 1))
        for number, image in enumerate(IMAGES)
    }
    store = open_store(
        write_entries(Path("a.lmdb"), {**good, b"5": trap}), trust_pickles=True
    )
    assert [image is None for image in read(store, "image")[0]] == [
        number == 5 for number in range(12)
    ]
    store_refused(
        r"it names pathlib\.Path\.?touch|it names pathlib",
        write_entries(Path("b.lmdb"), {b"0": trap}),
        trust_pickles=True,
    )
    keys = write_entries(
        Path("c.lmdb"), {**good, b"__keys__": pickle.dumps(Trap(marker))}
    )
    assert len(open_store(keys, trust_pickles=True)) == 12
    assert not marker.exists()
    pickle.loads(trap)
    assert marker.exists()  # it is a trap


# What is refused, and damage


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({b"a": b"123", b"b": b"456"}, "LMDB of an unknown layout"),
        # as pyarrow.serialize and Caffe wrote them
        (
            {b"a": bytes(16)},
            "unknown layout .* pyarrow.serialize: .* `raypipe.convert`",
        ),
        ({b"a": b"\x08\x03\x10\x01\x18\x01\x22\x03abc"}, "unknown layout .*Caffe's"),
        (
            {b"a": msgpack.packb([b"no image", 1])},
            r"cannot be read: at key b'a': it has no image \(0: bytes, 1: int\)",
        ),
        ({b"__len__": b"0"}, "has no samples: 1 keys"),
        ({}, "has no samples: 0 keys"),
    ],
)
def test_others_are_refused_by_name(entries: dict[bytes, bytes], message: str) -> None:
    store_refused(rf"a\.lmdb.*{message}", write_entries(Path("a.lmdb"), entries))


def test_stores_of_two_kinds_are_refused() -> None:
    write_entries(Path("0.lmdb"), FEW)
    write_entries(Path("1.lmdb"), {b"0": msgpack.packb([IMAGES[0], 1])})
    store_refused(
        r"1\.lmdb and .*0\.lmdb differ: msgpack with labels of type int64", "."
    )
    Path("1.lmdb").unlink()
    with open_writer("1.lmdb") as writer:
        writer.append({"image": IMAGES[0], "label": 1})
    store_refused(
        r"0\.lmdb is LMDB from another program, and .*1\.lmdb is raypipe's", "."
    )


def test_several_files_are_one_store() -> None:
    for number, classes in enumerate([("a", "b"), ("b", "c")]):
        write_folders(Path(f"{number}.lmdb"), IMAGES[:4], [0, 0, 1, 1], classes)
    store = open_store(".")
    assert store.classes == ("a", "b", "c") and read(store, "label") == [
        [0, 0, 1, 1, 1, 1, 2, 2]
    ]


def test_an_lmdb_may_have_any_name() -> None:
    assert len(open_store(write_entries(Path("train_db"), FEW))) == 2
    assert len(open_store(write_entries(Path("train.lmdb"), FEW, folder=True))) == 2
    assert len(open_store("*.lmdb")) == 2


def test_damaged_values_are_bad_samples() -> None:
    entries = {
        str(number).encode(): msgpack.packb((image, 1))
        for number, image in enumerate(IMAGES)
    }
    entries |= {
        b"3": b"\x92\xc6\xff",
        b"4": msgpack.packb([7]),
        b"5": msgpack.packb((IMAGES[5], "x")),
    }
    store = open_store(write_entries(Path("a.lmdb"), entries))
    images, labels = read(store, "image", "label")
    assert [image is None for image in images] == [
        number in (3, 4) for number in range(12)
    ]
    assert labels == [None if number in (3, 4, 5) else 1 for number in range(12)]


# The listing


def test_keys_are_listed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYPIPE_CACHE", "cache")
    monkeypatch.setattr("raypipe.stores.lmdb_listing._SMALL", 0)
    path = write_folders(Path("a.lmdb"), IMAGES, LABELS, ("x", "y", "z"))
    first = open_store(path)
    before = first.fingerprint, read(first, "image", "label", "key")
    with monkeypatch.context() as patch:
        # a second listing would fail
        patch.delattr("raypipe.stores.lmdb_file.LMDBFile.entries")
        again = open_store(path)
        assert (again.fingerprint, read(again, "image", "label", "key")) == before
        assert again.classes == ("x", "y", "z")
    write_entries(path, {b"x/more.jpg": IMAGES[0]})
    assert len(open_store(path)) == 13


def test_the_fingerprint_is_of_contents_and_order() -> None:
    def fingerprint(name: str, entries: dict[bytes, bytes], **options: Any) -> str:
        return open_store(write_entries(Path(name), entries), **options).fingerprint

    first = fingerprint("a.lmdb", PLAIN)
    assert re.fullmatch("[0-9a-f]{32}", first)
    backwards = dict(reversed(PLAIN.items()))  # other pages, the same contents
    assert fingerprint("b.lmdb", backwards) == first
    values = {key: msgpack.packb((image, 1)) for key, image in PLAIN.items()}
    orders = [msgpack.packb(list(PLAIN)), msgpack.packb(list(backwards))]
    by_order = {
        fingerprint(f"{n}.lmdb", {**values, b"__keys__": keys})
        for n, keys in enumerate(orders)
    }
    assert len(by_order) == 2


def test_other_stores_ignore_the_word_of_trust() -> None:
    with open_writer("a.parquet") as writer:
        writer.append({"image": IMAGES[0], "label": 1})
    assert len(open_store("a.parquet", trust_pickles=True)) == 1
    with pytest.raises(ConfigError, match="no option 'image_column'"):
        open_store(write_entries(Path("a.lmdb"), FEW), image_column="img")
