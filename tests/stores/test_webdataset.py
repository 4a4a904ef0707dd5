"""Tars in the WebDataset layout: samples, labels, columns, and the real library on both sides."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import webdataset

from raypipe.errors import StoreError
from raypipe.stores import open_store, open_writer
from raypipe.stores.record import NAME
from raypipe.stores.tar import TarStore, TarWriter

IMAGES = [cv2.imencode(".png", np.full((4, 5, 3), i, np.uint8))[1].tobytes() for i in range(6)]
TYPES = {"image": "binary", "label": "int64", "Caption": "string", "width": "int64", "score": "float64"}
TYPES |= {"mask": "binary"}


def make(path: Path, *members: tuple[str, bytes], **options: Any) -> TarStore:
    with tarfile.open(path, "w") as tar:
        for name, content in members:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return TarStore(path, **options)


def read(store: TarStore) -> dict[str, list[Any]]:
    return {name: list(column) for name, column in store.read(np.arange(len(store)), store.columns).items()}


def sample(i: int) -> dict[str, Any]:
    extra = {
        "Caption": None if i == 2 else f"ä{i}",
        "width": -i,
        "score": i / 3,
        "mask": bytes([i]) if i % 2 else None,
    }
    return {"image": IMAGES[i], "label": i % 3, **extra}


def write(path: Path, indices: range = range(6), **options: Any) -> Path:
    with TarWriter(path, TYPES, ("a", "b", "ü"), **options) as writer:
        for i in indices:
            writer.append(sample(i))
    return path


# The real library


def test_what_webdataset_writes_is_read(tmp_path: Path) -> None:
    pixels = [np.full((8, 8, 3), 20 * i, np.uint8) for i in range(7)]
    with webdataset.ShardWriter(f"{tmp_path}/x-%04d.tar", maxcount=3, verbose=0) as writer:
        for i, image in enumerate(pixels):
            found = {
                "__key__": f"some/{i:06d}",
                "cls": i % 4,
                "txt": f"ü {i}",
                "json": {"width": i},
                "npy": np.arange(i),
            }
            writer.write({**found, "png" if i % 2 else "jpg": image})
    expected = list(webdataset.WebDataset(f"{tmp_path}/x-{{0000..0002}}.tar", shardshuffle=False))
    store = open_store(f"{tmp_path}/x-{{0000..0002}}.tar")
    assert store.columns == ("image", "label", "json", "npy", "txt") and store.classes is None
    assert read(store) == {
        "image": [found.get("png") or found["jpg"] for found in expected],
        "label": [int(found["cls"]) for found in expected],
        "json": [found["json"].decode() for found in expected],
        "npy": [found["npy"] for found in expected],
        "txt": [f"ü {i}" for i in range(7)],
    }
    assert open_store(tmp_path).fingerprint == store.fingerprint


def test_webdataset_reads_what_is_written(tmp_path: Path) -> None:
    for number in range(2):
        write(tmp_path / f"{number}.tar", range(3 * number, 3 * number + 3), first_key=3 * number)
    found = list(webdataset.WebDataset(f"{tmp_path}/{{0..1}}.tar", shardshuffle=False))
    assert [each["__key__"] for each in found] == [f"{i:09d}" for i in range(6)]
    for i, each in enumerate(found):
        assert {name for name in each if name[0] != "_"} == {"png", "cls", "width", "score"} | (
            {"mask"} if i % 2 else set()
        ) | (set() if i == 2 else {"caption"})
        assert each["png"] == IMAGES[i] and each["cls"] == b"%d" % (i % 3)
    decoded = webdataset.WebDataset(f"{tmp_path}/{{0..1}}.tar", shardshuffle=False).decode("rgb8")
    for i, (image, label) in enumerate(decoded.to_tuple("png", "cls")):
        assert image.shape == (4, 5, 3) and (image == i).all() and label == i % 3


# Written by raypipe


def test_all_columns_and_classes_come_back(tmp_path: Path) -> None:
    store = TarStore(write(tmp_path / "a.tar"))
    assert store.columns == tuple(TYPES) and store.classes == ("a", "b", "ü")
    assert read(store) == {name: [sample(i)[name] for i in range(6)] for name in TYPES}


def test_a_tar_depends_on_its_samples_alone(tmp_path: Path) -> None:
    first, second = (write(tmp_path / name).read_bytes() for name in ("a.tar", "b.tar"))
    assert first == second
    with tarfile.open(tmp_path / "a.tar") as tar:
        members = tar.getmembers()
    assert {(member.mtime, member.uid, member.uname) for member in members} == {(0, 0, "")}
    assert [member.name for member in members[:6]] == [
        NAME,
        *(f"000000000.{suffix}" for suffix in ("caption", "cls", "png", "score", "width")),
    ]


@pytest.mark.parametrize("name", ["png", "JPG", "cls", "a/b", "a\0b", ""])
def test_a_column_whose_name_is_no_suffix_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"cannot be written to a tar.*Rename it"):
        TarWriter(tmp_path / "a.tar", {"image": "binary", name: "binary"})
    with pytest.raises(StoreError, match="'X' cannot be written to a tar"):
        TarWriter(tmp_path / "a.tar", {"image": "binary", "x": "binary", "X": "binary"})


def test_a_sample_of_nothing_is_refused(tmp_path: Path) -> None:
    with (
        pytest.raises(StoreError, match="leaves no trace"),
        TarWriter(tmp_path / "a.tar", {"image": "binary"}) as writer,
    ):
        writer.append({"image": None})
    assert list(tmp_path.iterdir()) == []


def rewritten(path: Path, **changes: Any) -> Path:
    """The tar with another note of raypipe's, as long as the one before."""
    content = path.read_bytes()
    end = content.index(b"\0", 512)
    metadata = json.dumps(json.loads(content[512:end]) | changes).encode()
    path.write_bytes(content[:512] + metadata.ljust(end - 512) + content[end:])
    return path


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": 2}, "bad __raypipe__ member: version 2; this raypipe reads version 1"),
        ({"count": 7}, "holds 6 samples, but was written with 7"),
        ({"columns": 3}, "bad __raypipe__ member"),
        ({"classes": 3}, "bad __raypipe__ member"),
        ({"columns": [{"name": "image", "type": "int64"}]}, "'image' has type 'int64'"),
    ],
)
def test_a_damaged_note_is_one_error(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=rf"a\.tar .*{message}"):
        len(TarStore(rewritten(write(tmp_path / "a.tar"), **changes)))


def test_shards_of_other_classes_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "a.tar")
    rewritten(write(tmp_path / "b.tar"), classes=["a", "b", "x"])
    with pytest.raises(StoreError, match=r"b\.tar and .*a\.tar differ in columns or classes"):
        len(open_store(tmp_path))
    make(tmp_path / "b.tar", ("1.jpg", b"x"), ("1.cls", b"1"))
    with pytest.raises(StoreError, match=r"b\.tar and .*a\.tar differ in columns or classes"):
        len(open_store(tmp_path))


def test_the_fingerprint_shows_every_bit_of_what_is_written_and_every_label_of_what_is_not(tmp_path: Path) -> None:
    fingerprints = set()
    for label in (b"1", b"2"):
        fingerprints.add(make(tmp_path / "a.tar", ("1.jpg", b"x"), ("1.cls", label)).fingerprint)
        fingerprints.add(
            make(tmp_path / "a.tar", ("1.jpg", b"x"), ("1.json", b'{"label": %s}' % label)).fingerprint
        )
    assert len(fingerprints) == 4


# Labels


@pytest.mark.parametrize(
    ("options", "labels"),
    [
        ({}, [3, -4]),
        ({"label_column": "id"}, [7, 8]),
        ({"label_column": "index"}, [10, 11]),
    ],
)
def test_labels_are_of_cls_of_another_member_or_of_json(
    options: dict[str, str], labels: list[int], tmp_path: Path
) -> None:
    members = []
    for i, label in enumerate([b"3\n", b" -4 "]):
        members += [(f"{i}.jpg", b"x"), (f"{i}.cls", label), (f"{i}.ID", b"%d" % (7 + i))]
        members += [(f"{i}.json", b'{"index": %d, "label": true}' % (10 + i))]
    assert read(make(tmp_path / "a.tar", *members, **options))["label"] == labels
    assert read(make(tmp_path / "b.tar", ("a.jpg", b""), ("a.json", b'{"label": 5}')))["label"] == [5]


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ([("2.cls", b"cat")], r"label 2\.cls is b'cat', which is no integer"),
        ([("2.cls", b"1.0")], r"label 2\.cls is b'1\.0', which"),
        ([("2.cls", b"")], r"label 2\.cls is b'', which"),
        ([("2.cls", b"9" * 19)], "no integer of 64 bits"),
        ([("2.cls", b"1" + b" " * 100)], "no integer of 64 bits"),
        ([("2.json", b'{"label": "cat"}')], r"'label' of 2\.json is 'cat'"),
        ([("2.json", b'{"label": true}')], r"'label' of 2\.json is True"),
        ([], "sample '2' has no label, and others have one"),
        ([("2.json", b"{")], "sample '2' has no label"),
        ([("2.json", b"[" * 100_000)], "sample '2' has no label"),
        ([("2.json", b"[1]")], "sample '2' has no label"),
        ([("2.cls", b"1"), ("2.cls", b"2")], r"sample '2' has two members \.cls"),
        ([("x.jpg", b""), ("2.cls", b"1")], "sample '2' has no label.*one behind the other"),
    ],
)
def test_a_label_that_is_none_is_one_error(members: list[tuple[str, bytes]], message: str, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=rf"a\.tar: .*{message}"):
        len(make(tmp_path / "a.tar", ("1.jpg", b"x"), ("1.cls", b"0"), ("2.jpg", b"x"), *members))


def test_a_shard_without_labels_among_others_is_one_error(tmp_path: Path) -> None:
    make(tmp_path / "a.tar", ("1.jpg", b"x"), ("1.cls", b"0"))
    make(tmp_path / "b.tar", ("k.jpg", b"x"), ("k.txt", b"0"))
    with pytest.raises(StoreError, match=r"b\.tar: sample 'k' has no label, and those of other shards have one"):
        len(open_store(tmp_path))
    make(tmp_path / "b.tar", ("class/k.jpg", b"x"))
    with pytest.raises(StoreError, match=r"a\.tar has the WebDataset layout, and .*b\.tar has not, or no labels"):
        len(open_store(tmp_path))
    with pytest.raises(StoreError, match=r"a\.tar: sample 'class/k' has no label"):
        len(make(tmp_path / "a.tar", ("1.jpg", b"x"), ("1.cls", b"0"), ("class/k.jpg", b"x")))


# Samples and columns


def test_keys_end_at_the_first_dot_and_what_does_not_count_does_not(tmp_path: Path) -> None:
    store = make(
        tmp_path / "a.tar",
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
    assert read(store) == {"image": [b"a", b"b"], "label": [0, 1], "depth.png": [b"depth", b"depth b"]}


def test_a_key_that_comes_again_is_another_sample(tmp_path: Path) -> None:
    members = [
        ("1.jpg", b"a"),
        ("1.cls", b"1"),
        ("2.jpg", b"b"),
        ("2.cls", b"2"),
        ("1.jpg", b"c"),
        ("1.cls", b"3"),
    ]
    store = make(tmp_path / "a.tar", *members)
    assert read(store) == {"image": [b"a", b"b", b"c"], "label": [1, 2, 3]}
    assert len(list(webdataset.WebDataset(str(tmp_path / "a.tar"), shardshuffle=False))) == 3


def test_a_column_is_what_all_samples_of_all_shards_have(tmp_path: Path) -> None:
    members = [("1.jpg", b"a"), ("1.cls", b"1"), ("1.txt", b"\xff"), ("1.npy", b"n")]
    make(tmp_path / "a.tar", *members, ("2.cls", b"2"), ("2.txt", b"t"), ("2.npy", b"n"))
    assert read(open_store(tmp_path)) == {
        "image": [b"a", None],
        "label": [1, 2],
        "txt": [None, "t"],
        "npy": [b"n", b"n"],
    }
    make(tmp_path / "b.tar", *members[:3])
    assert open_store(tmp_path).columns == ("image", "label", "txt")


def test_images_of_another_suffix(tmp_path: Path) -> None:
    store = make(tmp_path / "a.tar", ("1.cls", b"1"), ("1.jpg", b"j"), ("1.seg.PNG", b"s"), image_column="seg.png")
    assert read(store) == {"image": [b"s"], "label": [1], "jpg": [b"j"]}


def test_captions_beside_every_image_are_a_store_without_labels_and_beside_some_they_are_not(
    tmp_path: Path,
) -> None:
    members = [("x/1.jpg", b"a"), ("x/1.txt", b"t"), ("x/2.jpg", b"b")]
    store = make(tmp_path / "a.tar", *members)
    assert store.classes == ("x",) and read(store) == {"image": [b"a", b"b"], "label": [0, 0]}
    store = make(tmp_path / "a.tar", *members, ("x/2.txt", b"u"))
    assert store.classes is None and read(store) == {"image": [b"a", b"b"], "txt": ["t", "u"]}


def test_options_are_of_the_webdataset_layout_only(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"a\.tar is not of the WebDataset layout"):
        len(make(tmp_path / "a.tar", ("x/1.jpg", b"a"), label_column="y"))


def test_open_writer_makes_one(tmp_path: Path) -> None:
    assert isinstance(open_writer(tmp_path / "a.tar"), TarWriter)
