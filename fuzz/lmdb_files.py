"""LMDB files of any history, the tree in them, and damage to its pages."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import lmdb
import pytest
from hypothesis import strategies as st
from lmdb_extension import needs_extension

from raypipe.stores import lmdb_file
from raypipe.stores.lmdb_file import LMDBFile

PAGE = 4096

# of the main tree, in a meta
ROOT, ENTRIES, DEPTH, FLAGS = (
    16 + 24 + 88,
    16 + 24 + 80,
    16 + 24 + 54,
    16 + 24 + 52,
)

# Empty, in the leaf, the longest in a leaf and one byte more; a page less its header, and one byte more.
EDGES = [
    0,
    1,
    100,
    2018,
    2019,
    2026,
    2027,
    2034,
    2035,
    PAGE - 17,
    PAGE - 16,
    PAGE - 15,
    2 * PAGE - 16,
    2 * PAGE - 15,
]


def sizes() -> st.SearchStrategy[int]:
    return st.sampled_from(EDGES) | st.integers(0, 12_000)


@st.composite
def histories(draw: st.DrawFn) -> list[list[tuple[bytes, int | None]]]:
    """Transactions, each a list of (key, bytes of its value, or None for a deletion).

    The keys of one history are about as long as one another: 400 of 500 bytes make a tree of four levels.
    """
    padding = b"." * draw(st.sampled_from([0, 56, 300, 500]))
    number = st.integers(0, 400).map(lambda i: b"%04d" % i + padding)
    key = number | st.binary(min_size=1, max_size=511)
    change = st.tuples(key, sizes() | st.none())
    run = st.builds(  # neighbouring keys, which fill pages, or empty them
        lambda first, num, size: [
            (b"%04d" % i + padding, size) for i in range(first, first + num)
        ],
        st.integers(0, 400),
        st.integers(1, 200),
        st.sampled_from([0, 8, 500, 3000]) | st.none(),
    )
    return draw(st.lists(st.lists(change, max_size=20) | run, min_size=1, max_size=6))


def value(key: bytes, num_bytes: int, number: int) -> bytes:
    seed = key[:8] + number.to_bytes(2, "little")
    return (seed * (num_bytes // len(seed) + 1))[:num_bytes]


READERS = [
    pytest.param("extension", marks=needs_extension),
    "library",
]


def write_and_check(
    history: list[list[tuple[bytes, int | None]]], folder: Path
) -> None:
    """Write the transactions one by one; the extension reads all after each of them."""
    entries: dict[bytes, bytes] = {}
    absent = {b"\0", b"\xff" * 511, b"0000x"} | {
        key for changes in history for key, _ in changes
    }
    with lmdb.open(
        str(folder / "a"), subdir=False, lock=False, sync=False, map_size=64 << 20
    ) as env:
        for number, changes in enumerate(history):
            with env.begin(write=True) as txn:
                for key, size in changes:
                    if size is None:
                        txn.delete(key)
                        entries.pop(key, None)
                    else:
                        entries[key] = value(key, size, number)
                        txn.put(key, entries[key])
            with env.begin() as txn:
                assert dict(txn.cursor()) == entries
            if lmdb_file.extension():
                check(folder / "a", entries, absent)
        env.copy(str(folder / "copy"), compact=True)
    if lmdb_file.extension():  # the library needs the pages that nobody wrote yet
        check(folder / "a", entries, absent)
    check(folder / "copy", entries, absent)


def tree(path: Path, num_keys: int = 300, num_bytes: int = 3_000) -> Path:
    """A file with two levels of pages, long values, and both meta pages written."""
    with lmdb.open(
        str(path), subdir=False, lock=False, sync=False, map_size=64 << 20
    ) as env:
        for _ in range(2):
            with env.begin(write=True) as txn:
                for i in range(num_keys):
                    txn.put(b"%08d" % i, bytes([i % 256]) * num_bytes)
    return path


def newest(data: bytearray) -> int:
    """Where the meta page that counts starts."""
    return max(
        (0, PAGE),
        key=lambda at: struct.unpack_from("<Q", data, at + 16 + 24 + 96 + 8)[0],
    )


def put(at: int, code: str, number: int) -> Callable[[bytearray], None]:
    return lambda data: struct.pack_into(code, data, newest(data) + at, number)


def root_of(data: bytearray) -> int:
    return struct.unpack_from("<Q", data, newest(data) + ROOT)[0] * PAGE


def child_of(data: bytearray, index: int) -> int:
    """Where in the root the number of a child stands."""
    root = root_of(data)
    return root + struct.unpack_from("<H", data, root + 16 + 2 * index)[0]


def cycle(data: bytearray) -> None:
    """The first child is the root again, and so without end."""
    struct.pack_into("<I", data, child_of(data, 0), root_of(data) // PAGE)
    struct.pack_into("<H", data, newest(data) + DEPTH, 32)


def in_root(at: int, code: str, number: int) -> Callable[[bytearray], None]:
    return lambda data: struct.pack_into(code, data, root_of(data) + at, number)


def in_leaf(at: int, code: str, number: int) -> Callable[[bytearray], None]:
    """In the node of key 0: length of the value at 0, flags at 4, length of the key at 6, page number at 16."""

    def change(data: bytearray) -> None:
        leaf = struct.unpack_from("<I", data, child_of(data, 0))[0] * PAGE
        node = leaf + struct.unpack_from("<H", data, leaf + 16)[0]
        struct.pack_into(code, data, node + at, number)

    return change


DAMAGES: dict[str, tuple[Callable[[bytearray], None], str]] = {
    "a cycle": (cycle, "must have flags"),
    "root in the metas": (put(ROOT, "<Q", 1), "page 1"),
    "root beyond the file": (put(ROOT, "<Q", 1 << 63), "page 9223372036854775808"),
    "root is a leaf": (put(DEPTH, "<H", 1), "must have flags 0x2"),
    "number of a page": (in_root(0, "<Q", 3), "has the number 3"),
    "flags of a page": (in_root(10, "<H", 0x21), "flags 0x21"),
    "no free space": (in_root(12, "<H", 15), "free space from byte 15"),
    "free space beyond the page": (in_root(14, "<H", 5000), r"to 5000"),
    "no nodes": (in_root(12, "<H", 16), "is empty"),
    "node beyond the page": (
        in_root(16, "<H", 4090),
        "a node at byte 4090 of a page of 4096",
    ),
    "key beyond the page": (in_leaf(6, "<H", 5000), "a key of 5000 bytes"),
    "value beyond the page": (in_leaf(4, "<H", 0), "a value of 3000 bytes at byte"),
    "a flag that no value has": (in_leaf(4, "<H", 3), "its flags are 0x3"),
    "long value beyond its pages": (
        in_leaf(0, "<I", 9_000),
        "a value of 9000 bytes in 1 pages",
    ),
    "long value beyond the file": (
        in_leaf(0, "<I", 1 << 28),
        "268435456 bytes in 1 pages from page",
    ),
    "long value beyond all images": (
        in_leaf(0, "<I", 0xFFFFFFFF),
        "4294967295 bytes; the limit is 536870912",
    ),
    "long value elsewhere": (in_leaf(16, "<Q", 2), "must be a long value"),
    "long value beyond all": (in_leaf(16, "<Q", 1 << 52), "page 4503599627370496"),
}


def check(path: Path, entries: dict[bytes, bytes], absent: set[bytes]) -> None:
    file = LMDBFile(path)
    assert file.num_entries == len(entries)
    for key, content in entries.items():
        found = file.get(key)
        assert found is not None and bytes(found) == content
    for key in absent - entries.keys():
        assert file.get(key) is None
    assert listed(file) == [(key, len(entries[key])) for key in sorted(entries)]


def listed(file: LMDBFile) -> list[tuple[bytes, int]]:
    """All keys, and the sizes of their values."""
    return [
        entry
        for keys, sizes in file.entries()
        for entry in zip(keys.to_pylist(), sizes.tolist(), strict=True)
    ]
