"""Stores as libraries write them: trees of files and their tars, WebDataset's shards, Parquet's types, LMDB.

Each is three pictures with a label. A tree of files is a folder and a tar at once.
"""

from __future__ import annotations

import datetime
import decimal
import io
import json
import os
import pickle
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import foreign_lmdbs as lmdbs_of
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import webdataset
from drawn import image, saved

from raypipe.stores.destination import write_atomically

PICTURES = [saved(image(height=5 + number, width=7), "PNG") for number in range(3)]
LABELS = [0, 0, 1]
GOOD = list(zip(range(3), LABELS, strict=True))


@dataclass
class Stored:
    """A store.

    Attributes:
        name: what is special about it.
        write: writes it into an empty folder and returns its address.
        samples: numbers of pictures (None = one that is missing) and labels, in order; None = it is refused.
        options: arguments of `open_store`.
    """

    name: str
    write: Callable[[Path], Path]
    samples: list[tuple[int | None, Any]] | None = field(
        default_factory=lambda: list(GOOD)
    )
    options: dict[str, Any] = field(default_factory=dict)


# Trees of files

PLAIN = {"a/0.png": 0, "a/1.png": 1, "b/2.png": 2}


def _link(to: str) -> Callable[[Path], None]:
    return lambda path: path.symlink_to(to)


def _hard_link(to: str) -> Callable[[Path], None]:
    return lambda path: os.link(path.parent / to, path)


TREES: dict[str, tuple[dict[str, Any], list[tuple[int | None, Any]] | None]] = {
    "plain": (PLAIN, GOOD),
    "below": ({"a/x/0.png": 0, "a/x/y/1.png": 1, "b/2.png": 2}, GOOD),
    "around": ({f"photos/{name}": value for name, value in PLAIN.items()}, GOOD),
    "empty class": ({**PLAIN, "ab/": None}, [(0, 0), (1, 0), (2, 2)]),
    "hidden": ({**PLAIN, ".git/x.png": 0, "a/.x.png": 0, "b/.thumbs/x.png": 0}, GOOD),
    "of systems": (
        {
            **PLAIN,
            "__MACOSX/a/0.png": 0,
            "lost+found/": None,
            "a/Thumbs.db": b"x",
            "a/desktop.ini": b"x",
        },
        GOOD,
    ),
    "others beside": ({**PLAIN, "readme.txt": b"x", "a/notes.md": b"x"}, GOOD),
    "arrays beside": ({**PLAIN, "a/9.npy": b"x"}, GOOD),
    "underscores": ({"_a_/0.png": 0, "_a_/1.png": 1, "b_/2.png": 2}, GOOD),
    "spaces": ({"a a/0 0.png": 0, "a a/1.png": 1, "b/2 .png": 2}, GOOD),
    "unicode": ({"ä/0.png": 0, "ä/1.png": 1, "猫/2.png": 2}, GOOD),
    "long names": (
        {f"a/{'n' * 120}0.png": 0, f"a/{'n' * 120}1.png": 1, f"{'b' * 200}/2.png": 2},
        GOOD,
    ),
    "deep": ({f"a/{'d/' * 40}0.png": 0, f"a/{'d/' * 40}1.png": 1, "b/2.png": 2}, GOOD),
    "capitals": ({"a/0.PNG": 0, "a/1.Png": 1, "b/2.pNG": 2}, GOOD),
    "wrong suffixes": ({"a/0.jpg": 0, "a/1.webp": 1, "b/2.jfif": 2}, GOOD),
    "numbers": ({"2/0.png": 0, "2/1.png": 1, "3/2.png": 2}, GOOD),
    "link": (
        {"a/0.png": 0, "a/1.png": 1, "b/2.png": 2, "b/3.png": _link("../a/0.png")},
        [*GOOD, (0, 1)],
    ),
    "link to a folder": ({**PLAIN, "c": _link("a")}, [*GOOD, (0, 2), (1, 2)]),
    "link to nothing": ({**PLAIN, "b/3.png": _link("gone.png")}, [*GOOD, (None, 1)]),
    "link to itself": ({**PLAIN, "b/3.png": _link("3.png")}, [*GOOD, (None, 1)]),
    "link in a ring": ({**PLAIN, "b/up": _link("..")}, [*GOOD, (0, 1), (1, 1)]),
    "hard link": ({**PLAIN, "b/3.png": _hard_link("2.png")}, [*GOOD, (2, 1)]),
    "empty file": ({**PLAIN, "b/3.png": b""}, [*GOOD, (None, 1)]),
    "splits": (
        {**{f"train/{name}": value for name, value in PLAIN.items()}, "val/a/3.png": 0},
        None,
    ),
    "no folders": ({"0.png": 0, "1.png": 1}, None),
    "no images": ({"a/0.txt": b"x", "b/1.txt": b"x"}, None),
    "labels in texts": (
        {**PLAIN, "a/0.txt": b"7", "a/1.txt": b"7", "b/2.txt": b"3"},
        None,
    ),
    "nothing": ({}, None),
}


def plant(root: Path, tree: dict[str, Any]) -> Path:
    """Write a tree of files: pictures by number, contents, links, and folders."""
    root.mkdir()
    for name, value in tree.items():
        path = root / name
        (path if name.endswith("/") else path.parent).mkdir(parents=True, exist_ok=True)
        if callable(value):
            value(path)
        elif value is not None:
            path.write_bytes(PICTURES[value] if isinstance(value, int) else value)
    return root


def _tar_of(folder: Path, tree: dict[str, Any], **options: Any) -> Path:
    root, path = plant(folder / "root", tree), folder / "root.tar"
    with tarfile.open(path, "w", **options) as tar:
        for each in sorted(root.iterdir()):
            tar.add(each, each.name)
    return path


def trees() -> Iterator[Stored]:
    for name, (tree, samples) in TREES.items():
        yield Stored(
            f"folder: {name}",
            lambda folder, tree=tree: plant(folder / "root", tree),
            samples,
        )
        for kind, number in (
            ("ustar", tarfile.USTAR_FORMAT),
            ("gnu", tarfile.GNU_FORMAT),
            ("pax", tarfile.PAX_FORMAT),
        ):
            if kind == "ustar" and name in ("long names", "deep", "unicode"):
                continue  # which it cannot hold

            def write(
                folder: Path, tree: dict[str, Any] = tree, number: int = number
            ) -> Path:
                return _tar_of(folder, tree, format=number)

            yield Stored(f"tar of {kind}: {name}", write, samples)


def compressed() -> Iterator[Stored]:
    """Archives: compressed tars are unpacked, and a zip is refused."""
    for suffix in ("gz", "bz2", "xz"):

        def write(folder: Path, suffix: str = suffix) -> Path:
            path = folder / f"drawn.tar.{suffix}"
            with tarfile.open(path, f"w:{suffix}") as tar:
                tar.add(plant(folder / "root", PLAIN), "")
            return path

        yield Stored(f"tar.{suffix}", write)

    def zipped(folder: Path) -> Path:
        with zipfile.ZipFile(folder / "drawn.zip", "w") as archive:
            for name, number in PLAIN.items():
                archive.writestr(name, PICTURES[number])
        return folder / "drawn.zip"

    yield Stored("zip", zipped, None)


# Members of tars


def _tar(
    folder: Path,
    members: list[tuple[str, Any, dict[str, Any]]],
    tail: bytes = b"",
    keep: int | None = None,
) -> Path:
    path = folder / "drawn.tar"
    with tarfile.open(path, "w") as tar:
        for name, value, attributes in members:
            member = tarfile.TarInfo(name)
            data = PICTURES[value] if isinstance(value, int) else value
            member.size = len(data)
            for attribute, setting in attributes.items():
                setattr(member, attribute, setting)
            tar.addfile(member, io.BytesIO(data))
    path.write_bytes(path.read_bytes()[:keep] + tail)
    return path


def members() -> Iterator[Stored]:
    plain = [(name, value, {}) for name, value in PLAIN.items()]

    def of(
        name: str, several: list[Any], samples: Any = GOOD, **options: Any
    ) -> Stored:
        return Stored(
            f"members: {name}", lambda folder: _tar(folder, several, **options), samples
        )

    yield of("plain", plain)
    yield of("with a dot", [(f"./{name}", value, {}) for name, value, _ in plain])
    yield of("twice", [("a/0.png", 2, {}), *plain])
    yield of("in another order", plain[::-1])
    yield of("device", [*plain, ("b/3.png", b"", {"type": tarfile.CHRTYPE})], None)
    yield of("fifo", [*plain, ("b/3.png", b"", {"type": tarfile.FIFOTYPE})], None)
    yield of("absolute", [*plain, ("/b/3.png", 0, {})])
    yield of("outside", [*plain, ("../b/3.png", 0, {})])
    yield of(
        "pax headers",
        [
            (name, value, {"pax_headers": {"comment": "drawn"}})
            for name, value, _ in plain
        ],
    )
    yield of(
        "large times", [(name, value, {"mtime": 2**40}) for name, value, _ in plain]
    )
    yield of(
        "hard link to a later member",
        [("b/3.png", b"", {"type": tarfile.LNKTYPE, "linkname": "b/2.png"}), *plain],
        [*GOOD, (None, 1)],
    )
    yield of(
        "hard link to nothing",
        [*plain, ("b/3.png", b"", {"type": tarfile.LNKTYPE, "linkname": "gone"})],
        [*GOOD, (None, 1)],
    )
    yield of("zeros behind the end", plain, tail=bytes(10240))
    yield of("cut", plain, None, keep=1000)
    yield of("cut in a header", plain, None, keep=100)
    yield of("no end mark", plain, None, keep=512 + 512)
    yield of("empty", [], None)


# WebDataset


def shards() -> Iterator[Stored]:
    """By its own writer; the tests of raypipe.stores.webdataset have its rules one by one."""

    def of(
        name: str,
        samples: Any = GOOD,
        options: dict[str, Any] | None = None,
        **columns: Any,
    ) -> Stored:
        def write(folder: Path) -> Path:
            with webdataset.TarWriter(str(folder / "drawn.tar")) as writer:
                for number, data in enumerate(PICTURES):
                    row = {key: values[number] for key, values in columns.items()}
                    writer.write(
                        {
                            "__key__": f"{number:03}",
                            **({} if "image.png" in row else {"png": data}),
                            **row,
                        }
                    )
            return folder / "drawn.tar"

        return Stored(f"webdataset: {name}", write, samples, options or {})

    yield of("cls", cls=LABELS)
    yield of("json", json=[{"label": label} for label in LABELS])
    yield of("json and cls", cls=LABELS, json=[{"caption": "x"}] * 3)
    yield of(
        "a field of json",
        options={"target_column": "class"},
        json=[{"class": label} for label in LABELS],
    )
    yield of("label", samples=[(0, 7), (1, 7), (2, 3)], label=[b"7", b"7", b"3"])
    yield of("an own suffix", samples=None, kind=[b"7", b"7", b"3"])
    yield of(
        "an own suffix by its name",
        options={"target_column": "kind"},
        samples=[(0, 7), (1, 7), (2, 3)],
        kind=[b"7", b"7", b"3"],
    )
    yield of(
        "captions",
        txt=["one", "two", "three"],
        samples=[(0, None), (1, None), (2, None)],
        options={"target_column": ""},
    )
    yield of("labels that are text", cls=[b"cat", b"cat", b"dog"], samples=None)
    yield of(
        "labels that are no whole numbers", cls=[b"0.5", b"1.5", b"2"], samples=None
    )
    yield of("a label beyond 64 bits", cls=[str(2**70).encode()] * 3, samples=None)
    yield of("arrays beside", cls=LABELS, **{"npy": [b"x"] * 3})


# Parquet


def _parquet(
    table: pa.Table | Callable[[], pa.Table], **options: Any
) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        pq.write_table(
            table if isinstance(table, pa.Table) else table(),
            folder / "drawn.parquet",
            **options,
        )
        return folder / "drawn.parquet"

    return write


def _table(images: Any = None, labels: Any = None, **others: Any) -> pa.Table:
    columns = {"image": pa.array(PICTURES, pa.binary()) if images is None else images}
    return pa.table(
        {**columns, "label": LABELS if labels is None else labels, **others}
    )


def parquets() -> Iterator[Stored]:
    size = len(PICTURES[0])
    equal = [PICTURES[0]] * 3
    paths = pa.array(["0.png"] * 3)
    for name, images in {
        "binary": pa.array(PICTURES, pa.binary()),
        "large binary": pa.array(PICTURES, pa.large_binary()),
        "binary view": pa.array(PICTURES, pa.binary_view()),
        "dictionary": pa.array(PICTURES, pa.binary()).dictionary_encode(),
        "struct": pa.StructArray.from_arrays(
            [pa.array(PICTURES), paths], ["bytes", "path"]
        ),
        "struct without paths": pa.StructArray.from_arrays(
            [pa.array(PICTURES)], ["bytes"]
        ),
        "struct of large binary": pa.StructArray.from_arrays(
            [pa.array(PICTURES, pa.large_binary()), paths], ["bytes", "path"]
        ),
        "in chunks": pa.chunked_array([[each] for each in PICTURES], pa.binary()),
    }.items():
        yield Stored(f"parquet, image: {name}", _parquet(_table(images)))
    fixed = pa.array(equal, pa.binary(size))
    yield Stored(
        "parquet, image: fixed size", _parquet(_table(fixed)), [(0, 0), (0, 0), (0, 1)]
    )
    nulls = pa.array([PICTURES[0], None, PICTURES[2]], pa.binary())
    yield Stored(
        "parquet, image: null", _parquet(_table(nulls)), [(0, 0), (None, 0), (2, 1)]
    )
    paths_without_files = pa.array(["x"] * 3)
    yield Stored(
        "parquet, image: text",
        _parquet(_table(paths_without_files)),
        [(None, 0), (None, 0), (None, 1)],
    )
    for name, bad in {
        "numbers": pa.array([1, 2, 3]),
        "lists of numbers": pa.array([[1], [2], [3]]),
        "struct of others": pa.StructArray.from_arrays([pa.array([1, 2, 3])], ["x"]),
        "nulls": pa.nulls(3),
    }.items():
        yield Stored(f"parquet, image: {name}", _parquet(_table(bad)), None)
    integers = (
        pa.int8(),
        pa.int16(),
        pa.int32(),
        pa.int64(),
        pa.uint8(),
        pa.uint16(),
        pa.uint32(),
        pa.uint64(),
    )
    for kind in integers:
        yield Stored(
            f"parquet, label: {kind}", _parquet(_table(labels=pa.array(LABELS, kind)))
        )
    yield Stored(
        "parquet, label: in chunks",
        _parquet(_table(labels=pa.chunked_array([[0], [0, 1]]))),
    )
    for kind in (pa.float16(), pa.float32(), pa.float64()):
        floats = pa.array([0.5, 0.25, 1.0], kind)
        yield Stored(
            f"parquet, label: {kind}",
            _parquet(_table(labels=floats)),
            [(0, 0.5), (1, 0.25), (2, 1.0)],
        )
    flags = [(0, True), (1, False), (2, True)]
    yield Stored(
        "parquet, label: bool",
        _parquet(_table(labels=pa.array([True, False, True]))),
        flags,
    )
    lists = pa.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    expected = [(0, [1.0, 2.0]), (1, [3.0, 4.0]), (2, [5.0, 6.0])]
    yield Stored(
        "parquet, label: fixed lists",
        _parquet(_table(labels=lists.cast(pa.list_(pa.float64(), 2)))),
        expected,
    )
    for name, bad in {
        "text": pa.array(["cat", "cat", "dog"]),
        "large text": pa.array(["cat", "cat", "dog"], pa.large_string()),
        "text view": pa.array(["cat", "cat", "dog"], pa.string_view()),
        "dictionary of text": pa.array(["cat", "cat", "dog"]).dictionary_encode(),
        "binary": pa.array([b"0", b"0", b"1"]),
        "date": pa.array([datetime.date(2026, 1, 2)] * 3),
        "time": pa.array([datetime.datetime(2026, 1, 2)] * 3),
        "duration": pa.array([datetime.timedelta(1)] * 3),
        "decimal": pa.array([decimal.Decimal("1.5")] * 3),
        "struct": pa.array([{"x": 1}] * 3),
        "map": pa.array([[("x", 1)]] * 3, pa.map_(pa.string(), pa.int64())),
        "null": pa.nulls(3),
        "with a null": pa.array([0, None, 1]),
    }.items():
        yield Stored(f"parquet, label: {name}", _parquet(_table(labels=bad)), None)
        without = [(number, None) for number in range(3)]
        options = {"target_column": ""}
        yield Stored(
            f"parquet, no label asked for: {name}",
            _parquet(_table(labels=bad)),
            without,
            options,
        )
    yield Stored(
        "parquet: other names",
        _parquet(_table().rename_columns(["img", "fine"])),
        options={"image_column": "img", "target_column": "fine"},
    )
    yield Stored(
        "parquet: other columns",
        _parquet(_table(more=pa.array([[1], [], None]), text=pa.array(["x"] * 3))),
    )
    yield Stored("parquet: no rows", _parquet(_table().slice(0, 0)), [])
    for codec in ("none", "snappy", "gzip", "brotli", "zstd", "lz4"):
        yield Stored(f"parquet: {codec}", _parquet(_table(), compression=codec))
    for name, options in {
        "version 1.0": {"version": "1.0"},
        "version 2.4": {"version": "2.4"},
        "pages of version 2": {"data_page_version": "2.0"},
        "no dictionary": {"use_dictionary": False},
        "checksums": {"write_page_checksum": True},
        "checksums of pages of version 2": {
            "write_page_checksum": True,
            "data_page_version": "2.0",
        },
        "a row group for each row": {"row_group_size": 1},
        "a page for each row": {"data_page_size": 1, "write_batch_size": 1},
        "an index of pages": {"write_page_index": True},
        "no statistics": {"write_statistics": False},
        "split by bytes": {
            "use_dictionary": False,
            "column_encoding": {"label": "DELTA_BINARY_PACKED"},
        },
        "bytes with lengths": {
            "use_dictionary": False,
            "column_encoding": {"image": "DELTA_LENGTH_BYTE_ARRAY"},
        },
        "bytes with prefixes": {
            "use_dictionary": False,
            "column_encoding": {"image": "DELTA_BYTE_ARRAY"},
        },
        "no schema of Arrow": {"store_schema": False},
    }.items():
        yield Stored(f"parquet: {name}", _parquet(_table(), **options))
    features = {
        "label": {"names": ["cat", "dog"], "_type": "ClassLabel"},
        "image": {"_type": "Image"},
    }
    metadata = {b"huggingface": json.dumps({"info": {"features": features}}).encode()}
    yield Stored(
        "parquet: class names", _parquet(_table().replace_schema_metadata(metadata))
    )

    def several(folder: Path) -> Path:
        for number in range(3):
            pq.write_table(
                _table().slice(number, 1),
                folder / f"train-{number:05}-of-00003.parquet",
            )
        return folder

    yield Stored("parquet: several files", several)


# LMDB


def lmdbs() -> Iterator[Stored]:
    samples = [
        {"image": data, "label": label}
        for data, label in zip(PICTURES, LABELS, strict=True)
    ]

    def whole(folder: Path) -> Path:
        write_atomically(str(folder / "drawn.lmdb"), samples, ("cat", "dog"))
        return folder / "drawn.lmdb"

    def parts(folder: Path) -> Path:
        for number, sample in enumerate(samples):
            write_atomically(str(folder / f"{number}.lmdb"), [sample], ("cat", "dog"))
        return folder

    yield Stored("lmdb: one file", whole)
    yield Stored("lmdb: several files", parts)

    yield from foreign()


def foreign() -> Iterator[Stored]:
    """LMDBs of other programs."""

    def of(
        name: str, write: Callable[[Path], Path], samples: Any = GOOD, **options: Any
    ) -> Stored:
        return Stored(f"lmdb of others: {name}", write, samples, options)

    def values(
        dumps: Callable[[Any], bytes], make: Callable[[bytes, int], Any]
    ) -> Callable[[Path], Path]:
        return lambda folder: lmdbs_of.write_values(
            folder / "drawn", PICTURES, LABELS, dumps, make
        )

    def listed(lines: str) -> Callable[[Path], Path]:
        def write(folder: Path) -> Path:
            (folder / "drawn.txt").write_text(lines)
            return lmdbs_of.write_entries(folder / "drawn.lmdb", keyed)

        return write

    unlabeled = [(number, None) for number in range(3)]
    keyed = {b"k%d" % number: picture for number, picture in enumerate(PICTURES)}
    yield of(
        "keys",
        lambda folder: lmdbs_of.write_entries(folder / "drawn.lmdb", keyed),
        unlabeled,
        target_column="",
    )
    yield of(
        "folders",
        lambda folder: lmdbs_of.write_folders(
            folder / "drawn.lmdb", PICTURES, LABELS, ("a", "b")
        ),
    )
    yield of(
        "LSUN", lambda folder: lmdbs_of.write_lsun(folder, PICTURES, LABELS, ("a", "b"))
    )
    yield of("a list", listed("k0 0\nk1 0\nk2 1\n"))
    yield of("a list of names", listed("k2\tdog\nk1\tcat\nk0\tcat\n"))
    yield of("a list of one key", listed("k0 0\n"), None)
    texts = ["one", "two", "three"]
    write_texts = lmdbs_of.write_texts
    yield of(
        "text",
        lambda folder: write_texts(folder / "drawn", PICTURES, texts),
        unlabeled,
        target_column="",
    )
    makes: dict[str, Callable[[bytes, int], Any]] = {
        "tuples": lambda image, label: (image, label),
        "label first": lambda image, label: (label, image),
        "dicts": lambda image, label: {"image": image, "label": label},
        "names and images": lambda image, label: ("name", image),
        "three parts": lambda image, label: [image, label, "name"],
        "images alone": lambda image, label: image,
    }
    for kind, dumps in lmdbs_of.DUMPS.items():
        trust = {"trust_pickles": True} if kind == "pickle" else {}
        for name, make in makes.items():
            if kind == "pyarrow" and name == "dicts":
                continue  # which the writer of the tests lacks
            has_label = name not in ("names and images", "images alone")
            options = trust if has_label else {**trust, "target_column": ""}
            expected = GOOD if has_label else unlabeled
            yield of(f"{kind}, {name}", values(dumps, make), expected, **options)
    yield of("pickle, not trusted", values(pickle.dumps, makes["tuples"]), None)
    yield of(
        "pickle of numpy",
        values(lambda value: pickle.dumps(np.array([1])), makes["tuples"]),
        None,
        trust_pickles=True,
    )
    yield of(
        "pickle of protocol 2",
        values(lambda value: pickle.dumps(value, 2), makes["tuples"]),
        None,
        trust_pickles=True,
    )
    yield of(
        "json",
        values(lambda value: json.dumps(str(value)).encode(), makes["tuples"]),
        None,
    )
    yield of(
        "numbers",
        lambda folder: lmdbs_of.write_entries(folder / "drawn.lmdb", {b"a": bytes(8)}),
        None,
    )


def files() -> Iterator[Stored]:
    """All of them."""
    for part in (trees, compressed, members, shards, parquets, lmdbs):
        yield from part()
