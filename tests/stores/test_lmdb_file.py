"""An open LMDB file: what liblmdb wrote, by the extension and by the lmdb library; an exception for any damage.

raypipe/stores/csrc/lmdb.c: all but the header. Without the extension, damage behind it is the library's to find.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from pathlib import Path

import lmdb
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lmdb_extension import needs_extension

from raypipe.errors import StoreError
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


@pytest.fixture(params=READERS)
def reader(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Files are read by the extension, or by the lmdb library."""
    if request.param == "library":
        monkeypatch.setattr(lmdb_file, "extension", lambda: None)
    return request.param


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


@pytest.mark.parametrize(
    ("reader", "num_cases"),
    [pytest.param("extension", 40, marks=needs_extension), ("library", 10)],
    indirect=["reader"],
)
def test_reads_what_liblmdb_wrote_and_reads(
    reader: str,
    num_cases: int,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lmdb_file, "_LEAVES_AT_ONCE", 3)

    @settings(
        max_examples=num_cases,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    @given(history=histories())
    def each_transaction_and_a_copy(
        history: list[list[tuple[bytes, int | None]]],
    ) -> None:
        write_and_check(history, tmp_path_factory.mktemp("lmdb"))

    each_transaction_and_a_copy()


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


@needs_extension
def test_another_transaction_goes_on_beside_what_is_open(tmp_path: Path) -> None:
    path = tmp_path / "a"
    with lmdb.open(str(path), subdir=False, lock=False, sync=False) as env:
        with env.begin(write=True) as txn:
            txn.put(b"a", b"1")
        before = LMDBFile(path)
        with env.begin(write=True) as txn:
            txn.put(b"a", b"2")
        # its pages are left alone by one transaction more
        assert bytes(before.get(b"a") or b"") == b"1"
        assert bytes(LMDBFile(path).get(b"a") or b"") == b"2"


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


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (put(16, "<I", 0xDEADBEEF), "is not a meta page"),
        (put(10, "<H", 1), "is not a meta page"),
        (put(0, "<Q", 7), "is not a meta page"),
        (put(20, "<I", 999), "is not a meta page .*data version 1"),
        (put(16 + 24, "<I", 5000), "is not a meta page"),
        (put(16 + 24, "<I", 65_536), "is not a meta page"),
        (put(16 + 24, "<I", 8192), "page 1 is not a meta page"),
        (
            lambda data: struct.pack_into("<I", data, PAGE + 16 + 24, 8192),
            "pages of 4096 and 8192 bytes",
        ),
        (put(FLAGS, "<H", 4), "flags 0x4: duplicate"),
        (put(DEPTH, "<H", 33), "a tree of depth 33"),
        (put(DEPTH, "<H", 0), "a tree of depth 0"),
        (put(ENTRIES, "<Q", 1 << 60), "1152921504606846976 entries"),
    ],
)
@pytest.mark.usefixtures("reader")
def test_a_damaged_meta_page_is_an_error_on_opening(
    tmp_path: Path, damage: Callable[[bytearray], None], message: str
) -> None:
    data = bytearray(tree(tmp_path / "a").read_bytes())
    damage(data)
    (tmp_path / "a").write_bytes(data)
    with pytest.raises(
        StoreError,
        match=rf"a cannot be opened as LMDB: .*{message}.*; copy or convert it again",
    ):
        LMDBFile(tmp_path / "a")


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


@needs_extension
@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_page_is_an_error_of_its_keys(tmp_path: Path, name: str) -> None:
    damage, message = DAMAGES[name]
    data = bytearray(tree(tmp_path / "a").read_bytes())
    damage(data)
    (tmp_path / "a").write_bytes(data)
    with pytest.raises(
        StoreError, match=rf"a is damaged at key b'00000000': .*{message}"
    ):
        LMDBFile(tmp_path / "a").get(b"00000000")


@needs_extension
def test_a_database_within_is_named(tmp_path: Path) -> None:
    with (
        lmdb.open(str(tmp_path / "sub"), subdir=False, lock=False, max_dbs=1) as env,
        env.begin(write=True) as txn,
    ):
        txn.put(b"key", b"value", db=env.open_db(b"inner", txn=txn))
    with pytest.raises(StoreError, match=r"has named databases at key b'inner'"):
        LMDBFile(tmp_path / "sub").get(b"inner")


@pytest.mark.usefixtures("reader")
def test_a_folder_or_nothing_at_the_path(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent"):
        with pytest.raises(StoreError, match="cannot be opened as LMDB: "):
            LMDBFile(path)


@pytest.mark.usefixtures("reader")
def test_files_are_closed(tmp_path: Path) -> None:
    path = tree(tmp_path / "a", num_keys=3)
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(5):
        LMDBFile(path).get(b"00000000")
    path.write_bytes(b"no database")
    for _ in range(5):
        with pytest.raises(StoreError):
            LMDBFile(path)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


@pytest.mark.usefixtures("reader")
def test_several_open_one_file_and_an_empty_one_has_nothing(tmp_path: Path) -> None:
    path = tree(tmp_path / "a", num_keys=3)
    files = [LMDBFile(path) for _ in range(3)]
    for file in files:
        assert bytes(file.get(b"00000002") or b"") == b"\2" * 3000
        assert listed(file) == [(b"%08d" % number, 3000) for number in range(3)]
    lmdb.open(str(tmp_path / "empty"), subdir=False, lock=False).close()
    empty = LMDBFile(tmp_path / "empty")
    assert empty.get(b"a") is None and listed(empty) == [] and not empty.num_entries


@pytest.mark.usefixtures("reader")
def test_a_process_that_was_forked_reads_what_was_open(tmp_path: Path) -> None:
    file = LMDBFile(tree(tmp_path / "a"))
    child = os.fork()
    if not child:
        is_right = file.get(b"00000299") == bytes([299 % 256]) * 3000
        os._exit(0 if is_right else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert file.get(b"00000299")


@needs_extension
def test_keys_in_wrong_order_end_a_listing(tmp_path: Path) -> None:
    data = bytearray(tree(tmp_path / "a").read_bytes())
    first = struct.unpack_from("<I", data, child_of(data, 0))[0]
    struct.pack_into("<I", data, child_of(data, 1), first)
    (tmp_path / "a").write_bytes(data)
    message = f"the keys of page {first} are not above those before"
    with pytest.raises(StoreError, match=f"a is damaged: {message}; copy"):
        listed(LMDBFile(tmp_path / "a"))


def test_without_the_extension_a_file_cut_short_is_refused_unopened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tree(tmp_path / "a")
    whole = path.read_bytes()
    monkeypatch.setattr(lmdb_file, "extension", lambda: None)
    monkeypatch.setattr(lmdb, "open", lambda *_, **__: pytest.fail("it was opened"))
    for number in range(30):
        num_bytes = len(whole) * number // 30
        path.write_bytes(whole[:num_bytes])
        with pytest.raises(
            StoreError, match=r"is truncated: \d+ bytes, needs \d+; copy|ends within"
        ):
            LMDBFile(path)
