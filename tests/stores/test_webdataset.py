"""Tars in the WebDataset layout: samples, labels, columns, and the real library on both sides."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import webdataset
from refused import store_refused
from tars import write_members

from raypipe.errors import StoreError
from raypipe.stores import open_store
from raypipe.stores.tar import TarStore

pytestmark = pytest.mark.usefixtures("in_own_folder")


def make(name: str, *members: tuple[str, bytes], **options: Any) -> TarStore:
    return TarStore(write_members(Path(name), members), **options)


def read(store: TarStore) -> dict[str, list[Any]]:
    return {
        name: list(column)
        for name, column in store.read(
            np.arange(len(store)), tuple(store.stored.names)
        ).items()
    }


# The real library


def test_what_webdataset_writes_is_read() -> None:
    pixels = [np.full((8, 8, 3), 20 * i, np.uint8) for i in range(7)]
    with webdataset.ShardWriter("x-%04d.tar", maxcount=3, verbose=0) as writer:
        for i, image in enumerate(pixels):
            found = {
                "__key__": f"some/{i:06d}",
                "cls": i % 4,
                "txt": f"ü {i}",
                "json": {"width": i},
                "npy": np.arange(i),
            }
            writer.write({**found, "png" if i % 2 else "jpg": image})
    expected = list(webdataset.WebDataset("x-{0000..0002}.tar", shardshuffle=False))
    store = open_store("x-{0000..0002}.tar")
    assert (
        tuple(store.stored.names) == ("image", "label", "json", "npy", "txt")
        and store.classes is None
    )
    assert read(store) == {
        "image": [found.get("png") or found["jpg"] for found in expected],
        "label": [int(found["cls"]) for found in expected],
        "json": [found["json"].decode() for found in expected],
        "npy": [found["npy"] for found in expected],
        "txt": [f"ü {i}" for i in range(7)],
    }
    assert open_store(".").fingerprint == store.fingerprint


def test_the_fingerprint_shows_every_label() -> None:
    fingerprints = set()
    for label in (b"1", b"2"):
        fingerprints.add(make("a.tar", ("1.jpg", b"x"), ("1.cls", label)).fingerprint)
        fingerprints.add(
            make(
                "a.tar",
                ("1.jpg", b"x"),
                ("1.json", b'{"label": %s}' % label),
            ).fingerprint
        )
    assert len(fingerprints) == 4


# Labels


@pytest.mark.parametrize(
    ("options", "labels"),
    [
        ({}, [3, -4]),
        ({"target_column": "id"}, [7, 8]),
        ({"target_column": "index"}, [10, 11]),
    ],
)
def test_labels_are_of_cls_of_another_member_or_of_json(
    options: dict[str, str], labels: list[int]
) -> None:
    members = []
    for i, label in enumerate([b"3\n", b" -4 "]):
        members += [
            (f"{i}.jpg", b"x"),
            (f"{i}.cls", label),
            (f"{i}.ID", b"%d" % (7 + i)),
        ]
        members += [(f"{i}.json", b'{"index": %d, "label": true}' % (10 + i))]
    assert read(make("a.tar", *members, **options))["label"] == labels
    assert read(make("b.tar", ("a.jpg", b""), ("a.json", b'{"label": 5}')))[
        "label"
    ] == [5]


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ([("2.cls", b"cat")], r"label 2\.cls must be .*, got b'cat'"),
        ([("2.cls", b"")], r"label 2\.cls must be .*, got b''"),
        ([("2.cls", b"9" * 19)], "must be an integer of 64 bits"),
        ([("2.cls", b"1" + b" " * 100)], "must be an integer of 64 bits"),
        (
            [("2.json", b'{"label": "cat"}')],
            r"'label' of 2\.json must be .*, got 'cat'",
        ),
        ([("2.json", b'{"label": true}')], r"'label' of 2\.json must be .*, got True"),
        ([], "sample '2' has no label, but others have one"),
        ([("2.json", b"{")], "sample '2' has no label"),
        ([("2.json", b"[" * 100_000)], "sample '2' has no label"),
        ([("2.cls", b"1"), ("2.cls", b"2")], r"sample '2' has two members \.cls"),
        (
            [("x.jpg", b""), ("2.cls", b"1")],
            "sample 'x' has no label",
        ),
    ],
)
def test_a_label_that_is_none_is_one_error(
    members: list[tuple[str, bytes]], message: str
) -> None:
    with pytest.raises(StoreError, match=rf"a\.tar: .*{message}"):
        len(
            make(
                "a.tar",
                ("1.jpg", b"x"),
                ("1.cls", b"0"),
                ("2.jpg", b"x"),
                *members,
            )
        )


def test_a_shard_without_labels_among_others_is_one_error() -> None:
    make("a.tar", ("1.jpg", b"x"), ("1.cls", b"0"))
    make("b.tar", ("k.jpg", b"x"), ("k.txt", b"0"))
    store_refused(
        r"b\.tar: sample 'k' has no label, but samples of other shards have one",
        ".",
    )
    make("b.tar", ("class/k.jpg", b"x"))
    store_refused(r"a\.tar is a tar of WebDataset, but .*b\.tar has class folders", ".")
    with pytest.raises(StoreError, match=r"a\.tar: sample 'class/k' has no label"):
        len(
            make(
                "a.tar",
                ("1.jpg", b"x"),
                ("1.cls", b"0"),
                ("class/k.jpg", b"x"),
            )
        )


# Samples and columns


def test_keys_end_at_the_first_dot_and_what_does_not_count_does_not() -> None:
    store = make(
        "a.tar",
        ("./d.x/a.depth.png", b"depth"),
        ("./d.x/a.JPG", b"a"),
        ("./d.x/a.cls", b"0"),
        ("__more__", b"x"),
        ("__more__/b.jpg", b"x"),
        ("no_suffix", b"x"),
        (".hidden.jpg", b"x"),
        ("../out.jpg", b"x"),
        ("/root.jpg", b"x"),
        ("d.x/b.depth.png", b"depth b"),
        ("d.x/b.cls", b"1"),
        ("d.x/b.jpg", b"b"),
    )
    assert read(store) == {
        "image": [b"a", b"b"],
        "label": [0, 1],
        "depth.png": [b"depth", b"depth b"],
    }


def test_a_key_that_comes_again_is_another_sample() -> None:
    members = [
        ("1.jpg", b"a"),
        ("1.cls", b"1"),
        ("2.jpg", b"b"),
        ("2.cls", b"2"),
        ("1.jpg", b"c"),
        ("1.cls", b"3"),
    ]
    store = make("a.tar", *members)
    assert read(store) == {"image": [b"a", b"b", b"c"], "label": [1, 2, 3]}
    assert len(list(webdataset.WebDataset("a.tar", shardshuffle=False))) == 3


def test_a_column_is_what_all_samples_of_all_shards_have() -> None:
    members = [("1.jpg", b"a"), ("1.cls", b"1"), ("1.txt", b"\xff"), ("1.npy", b"n")]
    make("a.tar", *members, ("2.cls", b"2"), ("2.txt", b"t"), ("2.npy", b"n"))
    assert read(open_store(".")) == {
        "image": [b"a", None],
        "label": [1, 2],
        "txt": [None, "t"],
        "npy": [b"n", b"n"],
    }
    make("b.tar", *members[:3])
    assert tuple(open_store(".").stored.names) == ("image", "label", "txt")


def test_images_of_another_suffix() -> None:
    store = make(
        "a.tar",
        ("1.cls", b"1"),
        ("1.jpg", b"j"),
        ("1.seg.PNG", b"s"),
        image_column="seg.png",
    )
    assert read(store) == {"image": [b"s"], "label": [1], "jpg": [b"j"]}


def test_captions_beside_every_image_make_a_store_without_labels() -> None:
    members = [("x/1.jpg", b"a"), ("x/1.txt", b"t"), ("x/2.jpg", b"b")]
    with pytest.raises(
        StoreError, match=r"x/1\.txt, which belong to images by their names"
    ):
        len(make("a.tar", *members))
    store = make("a.tar", *members, target_column="folder")
    assert store.classes == ("x",) and read(store) == {
        "image": [b"a", b"b"],
        "label": [0, 0],
    }
    store = make("a.tar", *members, ("x/2.txt", b"u"))
    assert store.classes is None and read(store) == {
        "image": [b"a", b"b"],
        "txt": ["t", "u"],
    }


def test_an_unknown_suffix_or_field_is_told_with_the_known_ones() -> None:
    members = [("1.jpg", b"j"), ("1.seg.png", b"s"), ("1.json", b'{"species": 3}')]
    with pytest.raises(
        StoreError,
        match=r"no column 'spcies' for target_column; did you mean species\? its",
    ):
        len(make("a.tar", *members, target_column="spcies"))
    with pytest.raises(
        StoreError,
        match=r"no column 'seg\.pgn' for image_column; did you mean seg\.png",
    ):
        len(
            make(
                "b.tar",
                *members,
                image_column="seg.pgn",
                target_column="species",
            )
        )


@pytest.mark.parametrize("shard", ["a.tar", "b.tar"])
def test_a_caption_that_is_missing_is_none_and_the_others_stay(shard: str) -> None:
    members = [("1.jpg", b"a"), ("1.cls", b"1"), ("1.txt", b"one")]
    make("a.tar", *members)
    without = [("2.jpg", b"b"), ("2.cls", b"2")]
    make(shard, *(members if shard == "a.tar" else []), *without)
    store = open_store(".")
    assert store.read(np.arange(2), ("txt",))["txt"] == ["one", None]


@pytest.mark.parametrize("label", ["cls", "json"])
def test_a_samples_members_need_not_be_next_to_each_other(label: str) -> None:
    labels = [b"7", b"5"] if label == "cls" else [b'{"label": 7}', b'{"label": 5}']
    members = [("a.jpg", b"A"), ("b.jpg", b"B")]
    members += [(f"b.{label}", labels[1]), (f"a.{label}", labels[0])]
    store = make("a.tar", *members)
    read = store.read(np.arange(len(store)))
    assert read["image"] == [b"A", b"B"] and read["label"].tolist() == [7, 5]
