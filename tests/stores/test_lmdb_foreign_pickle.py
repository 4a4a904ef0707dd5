"""Pickles as plain data: what Python writes comes back, and nothing of a pickle is ever run."""

from __future__ import annotations

import contextlib
import os
import pickle
import time
import tracemalloc
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypipe.stores.lmdb_foreign import loads

_LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
_KEYS = st.text() | st.integers() | st.binary()
_DATA = st.recursive(
    _LEAVES, lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(_KEYS, inner)
)


def has_bytes(value: Any) -> bool:
    return "bytes" in repr(type(value)) or "b'" in repr(value) or 'b"' in repr(value)


@given(value=_DATA, protocol=st.integers(2, pickle.HIGHEST_PROTOCOL))
def test_plain_data_come_back(value: Any, protocol: int) -> None:
    if protocol == 2 and has_bytes(value):
        return  # Python 3 writes bytes as a call there
    assert loads(pickle.dumps(value, protocol)) == value


def test_a_value_that_is_there_twice_is_one() -> None:
    one = [b"x" * 300]
    first, second = loads(pickle.dumps((one, one)))
    assert first is second and first == one


def test_bytes_of_python_2() -> None:
    assert loads(b"\x80\x02U\x03\xff\xd8\xffq\x00K\x05\x86q\x01.") == (b"\xff\xd8\xff", 5)


class Malicious:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.path}",)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_program_is_refused_and_not_run(tmp_path: Path, protocol: int) -> None:
    data = pickle.dumps((b"image", Malicious(tmp_path / "touched")), protocol)
    with pytest.raises(ValueError, match="no pickle of plain data"):
        loads(data)
    assert not (tmp_path / "touched").exists()
    pickle.loads(data)  # what it would have done
    assert (tmp_path / "touched").exists()


@pytest.mark.parametrize(
    "value",
    [OrderedDict(a=1), np.int64(3), np.zeros(2), Path("x"), len, 1j],
    ids=lambda value: type(value).__name__,
)
def test_objects_are_refused_by_name(value: Any) -> None:
    with pytest.raises(ValueError, match="no pickle of plain data"):
        loads(pickle.dumps((b"image", value)))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x80\x04.",
        b"\x80\x04K\x01",  # no end
        b"\x80\x04h\x05.",  # from an empty memo
        b"\x80\x04e.",  # no mark
        b"\x80\x04\x86.",
        b"\x80\x04K\x01K\x02a.",  # append to a number
        b"\x80\x04}]K\x01s.",  # a list as a key
        b"\x80\x04}(K\x01u.",  # a key without a value
        b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x7f.",  # bytes without end
        b"\x80\x04X\xff\xff\xff\xff.",
        b"\x80\x04\x8a\xff.",
        b"\xff\xd8\xff\xe0",
        b"\x80\x04\x82\x01.",  # of copyreg's registry
        b"\x80\x04Pname\n.",
    ],
)
def test_damage_is_a_value_error(data: bytes) -> None:
    with pytest.raises(ValueError):
        loads(data)


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x04K\x01r\xff\xff\xff\xff.",  # for the memo of pickle.loads: 64 GB
        b"\x80\x04]" + b"h\x00" * 2_000_000 + b".",
        b"\x80\x04\x8e" + (1 << 40).to_bytes(8, "little") + b"x.",
    ],
    ids=["far memo", "many references", "huge bytes"],
)
def test_what_says_it_is_large_takes_no_memory(data: bytes) -> None:
    tracemalloc.start()
    start = time.process_time()
    with contextlib.suppress(ValueError):
        loads(data)
    taken_s, (_, peak) = time.process_time() - start, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 3 * len(data) + (4 << 20) and taken_s < 5


def test_a_pickle_that_contains_itself_ends() -> None:
    value: list[Any] = []
    value.append(value)
    again = loads(pickle.dumps(value))
    assert again[0] is again
    twice: Any = ()
    for _ in range(100):  # 2^100 in full
        twice = (twice, twice)
    assert len(loads(pickle.dumps(twice))) == 2
