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
from lmdb_extension import needs_extension
from lmdb_files import (
    DAMAGES,
    DEPTH,
    ENTRIES,
    FLAGS,
    PAGE,
    READERS,
    child_of,
    histories,
    listed,
    put,
    tree,
    write_and_check,
)

from raypipe.errors import StoreError
from raypipe.stores import lmdb_file
from raypipe.stores.lmdb_file import LMDBFile

pytestmark = pytest.mark.usefixtures("in_own_folder")
FILE = Path("a")


def write_damaged(damage: Callable[[bytearray], None]) -> None:
    data = bytearray(tree(FILE).read_bytes())
    damage(data)
    FILE.write_bytes(data)


@pytest.fixture(params=READERS)
def reader(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Files are read by the extension, or by the lmdb library."""
    if request.param == "library":
        monkeypatch.setattr(lmdb_file, "extension", lambda: None)
    return request.param


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


@needs_extension
def test_another_transaction_goes_on_beside_what_is_open() -> None:
    with lmdb.open("a", subdir=False, lock=False, sync=False) as env:
        with env.begin(write=True) as txn:
            txn.put(b"a", b"1")
        before = LMDBFile(FILE)
        with env.begin(write=True) as txn:
            txn.put(b"a", b"2")
        # its pages are left alone by one transaction more
        assert bytes(before.get(b"a") or b"") == b"1"
        assert bytes(LMDBFile(FILE).get(b"a") or b"") == b"2"


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
    damage: Callable[[bytearray], None], message: str
) -> None:
    write_damaged(damage)
    with pytest.raises(
        StoreError,
        match=rf"a cannot be opened as LMDB: .*{message}.*; copy or convert it again",
    ):
        LMDBFile(FILE)


@needs_extension
@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_page_is_an_error_of_its_keys(name: str) -> None:
    damage, message = DAMAGES[name]
    write_damaged(damage)
    with pytest.raises(
        StoreError, match=rf"a is damaged at key b'00000000': .*{message}"
    ):
        LMDBFile(FILE).get(b"00000000")


@needs_extension
def test_a_database_within_is_named() -> None:
    with (
        lmdb.open("sub", subdir=False, lock=False, max_dbs=1) as env,
        env.begin(write=True) as txn,
    ):
        txn.put(b"key", b"value", db=env.open_db(b"inner", txn=txn))
    with pytest.raises(StoreError, match=r"has named databases at key b'inner'"):
        LMDBFile("sub").get(b"inner")


@pytest.mark.usefixtures("reader")
def test_a_folder_or_nothing_at_the_path() -> None:
    for path in (".", "absent"):
        with pytest.raises(StoreError, match="cannot be opened as LMDB: "):
            LMDBFile(path)


@pytest.mark.usefixtures("reader")
def test_files_are_closed() -> None:
    tree(FILE, num_keys=3)
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(5):
        LMDBFile(FILE).get(b"00000000")
    FILE.write_bytes(b"no database")
    for _ in range(5):
        with pytest.raises(StoreError):
            LMDBFile(FILE)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


@pytest.mark.usefixtures("reader")
def test_several_open_one_file_and_an_empty_one_has_nothing() -> None:
    tree(FILE, num_keys=3)
    files = [LMDBFile(FILE) for _ in range(3)]
    for file in files:
        assert bytes(file.get(b"00000002") or b"") == b"\2" * 3000
        assert listed(file) == [(b"%08d" % number, 3000) for number in range(3)]
    lmdb.open("empty", subdir=False, lock=False).close()
    empty = LMDBFile("empty")
    assert empty.get(b"a") is None and listed(empty) == [] and not empty.num_entries


@pytest.mark.usefixtures("reader")
def test_a_process_that_was_forked_reads_what_was_open() -> None:
    file = LMDBFile(tree(FILE))
    child = os.fork()
    if not child:
        is_right = file.get(b"00000299") == bytes([299 % 256]) * 3000
        os._exit(0 if is_right else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert file.get(b"00000299")


@needs_extension
def test_keys_in_wrong_order_end_a_listing() -> None:
    data = bytearray(tree(FILE).read_bytes())
    first = struct.unpack_from("<I", data, child_of(data, 0))[0]
    struct.pack_into("<I", data, child_of(data, 1), first)
    FILE.write_bytes(data)
    message = f"the keys of page {first} are not above those before"
    with pytest.raises(StoreError, match=f"a is damaged: {message}; copy"):
        listed(LMDBFile(FILE))


def test_without_the_extension_a_file_cut_short_is_refused_unopened(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = tree(FILE).read_bytes()
    monkeypatch.setattr(lmdb_file, "extension", lambda: None)
    monkeypatch.setattr(lmdb, "open", lambda *_, **__: pytest.fail("it was opened"))
    for number in range(30):
        num_bytes = len(whole) * number // 30
        FILE.write_bytes(whole[:num_bytes])
        with pytest.raises(
            StoreError, match=r"is truncated: \d+ bytes, needs \d+; copy|ends within"
        ):
            LMDBFile(FILE)
