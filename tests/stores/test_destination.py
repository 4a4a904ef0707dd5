from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from raypipe.errors import StoreError
from raypipe.stores import open_store
from raypipe.stores.destination import digits_stores, new_path, write_atomically

pytestmark = pytest.mark.usefixtures("in_own_folder")

SAMPLES = [{"image": b"abc", "label": 1}, {"image": b"de", "label": 0}]
STORE = Path("x.lmdb")


def test_digits_that_have_no_place_name_the_variable() -> None:
    Path("file").touch()
    with pytest.raises(
        StoreError,
        match=r"file/digits-v2 cannot be written to \(RAYPIPE_CACHE may name",
    ):
        digits_stores(Path("file"))


def test_an_error_while_overwriting_leaves_what_was_there() -> None:
    write_atomically("x.lmdb", SAMPLES, None)
    with pytest.raises(KeyError), new_path(STORE, overwrite=True):
        raise KeyError
    assert len(open_store("x.lmdb")) == 2


def test_a_folder_with_files_of_others_is_not_overwritten() -> None:
    STORE.mkdir()
    for name in ("00000.lmdb", "thesis.tex"):
        (STORE / name).touch()
    with pytest.raises(StoreError, match=r"has thesis\.tex, which belongs to no store"):
        write_atomically("x.lmdb", SAMPLES, None, overwrite=True)
    (STORE / "thesis.tex").unlink()
    write_atomically("x.lmdb", SAMPLES, None, overwrite=True)
    assert len(open_store("x.lmdb")) == 2


def test_the_second_of_two_writers_is_refused() -> None:
    with new_path(STORE, False) as partial:
        partial.write_bytes(b"first")
        with (
            pytest.raises(StoreError, match="another process is writing"),
            new_path(STORE, False),
        ):
            pass
    assert STORE.read_bytes() == b"first"


def test_a_link_in_the_place_of_its_lock_is_not_written_to() -> None:
    Path("precious").write_bytes(b"content")
    Path(".x.lmdb.lock").symlink_to("precious")
    with pytest.raises(
        StoreError, match=r"cannot be written to: \.x\.lmdb\.lock: it is a link"
    ):
        write_atomically("x.lmdb", SAMPLES, None)
    assert Path("precious").read_bytes() == b"content"


def test_all_who_ask_for_the_digits_first_get_them() -> None:
    with ThreadPoolExecutor(4) as pool:
        (stores, *others) = pool.map(digits_stores, [Path()] * 4)
    assert others == [stores] * 3 and [
        len(open_store(address)) for address in stores
    ] == [1437, 360]
