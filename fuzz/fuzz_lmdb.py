"""Damaged LMDB files through the extension: one call of many records gives what calls for one record each give.

    python fuzz/fuzz_lmdb.py [FIRST [COUNT]]        COUNT inputs from number FIRST on; 0 and 4,000
    .ci/sanitize [FIRST [COUNT]]                             the same, by a build under sanitizers

Pages of a sound store are changed; then its header, all its entries, some keys and some records are read. Input
number n is a pure function of n. The last line says how many were accepted and refused; exit code 1 where one of
them had other values.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from raypipe.errors import StoreError
from raypipe.stores.lmdb import LMDBStore
from raypipe.stores.lmdb_file import LMDBFile
from raypipe.stores.record import KEY, RecordLayout
from raypipe.stores.writers import LMDBWriter

_TYPES = {
    "image": "binary",
    "label": "int64",
    "weight": "float64",
    "note": "string",
    "box": "float32[2]",
}
_NUM_RECORDS = 600


def sound_store(path: Path, num_records: int = _NUM_RECORDS) -> bytes:
    """The bytes of a store that has branch pages, and records that have pages of their own."""
    rng = np.random.default_rng(0)
    with LMDBWriter(path, _TYPES) as writer:
        for number in range(num_records):
            image = rng.bytes(9000 if number % 40 == 7 else 60)
            note = None if number % 3 else f"note {number}"
            box = np.zeros(2, np.float32)
            writer.append(
                {
                    "image": image,
                    "label": number,
                    "weight": 0.5,
                    "note": note,
                    "box": box,
                }
            )
    LMDBStore(path).read(np.arange(1), ("image",))
    return path.read_bytes()


def damaged_store(data: bytes, rng: np.random.Generator) -> bytes:
    """A store with numbers of its pages changed: of headers and pointers, of nodes, and anywhere."""
    changed = bytearray(data)
    for _ in range(int(rng.integers(1, 6))):
        page = 4096 * int(rng.integers(len(data) // 4096))
        within = (
            int(rng.integers(4090)) if rng.random() < 0.4 else int(rng.integers(64))
        )
        num_bytes = int(rng.choice([1, 2, 4, 6]))
        value = int(
            rng.choice(
                [
                    0,
                    1,
                    2,
                    15,
                    16,
                    4088,
                    4095,
                    4096,
                    65535,
                    int(rng.integers(65536)),
                    2**31,
                    2**46,
                ]
            )
        )
        changed[page + within : page + within + num_bytes] = (
            value % 256**num_bytes
        ).to_bytes(num_bytes, "little")
    if rng.random() < 0.1:
        del changed[int(rng.integers(8192, len(changed))) :]
    return bytes(changed)


def reads_alike(path: Path, rng: np.random.Generator) -> bool | None:
    """Whether many records are those that are read one by one; None: none of them is read."""
    layout = RecordLayout(_TYPES)
    wanted = [name for name in _TYPES if rng.random() < 0.6]
    keys = rng.integers(-1, _NUM_RECORDS + 2, 30)
    try:
        file = LMDBFile(path)
    except StoreError:
        return None
    with contextlib.suppress(StoreError):
        for entries in file.entries():
            entries.keys.validate(full=True)
            assert len(entries.keys) == len(entries.value_sizes)
    with ThreadPoolExecutor(2) as pool:
        both = pool.map(file.records, [keys] * 2, [layout.native(wanted)] * 2)
        (fixed, variable, done), (_, _, done_beside) = both
    if done.tolist() != done_beside.tolist():
        return False
    if not done.any():
        return None
    columns = layout.columns(fixed, variable, wanted)
    for row, key in enumerate(keys.tolist()):
        values = None
        with contextlib.suppress(StoreError):
            record = file.get(KEY.pack(key % 2**64))
            values = None if record is None else layout.unpack(record, wanted)
        if not done[row]:
            continue
        if values is None:
            return False
        for name, column in columns.items():
            if str(column[row]) != str(values.get(name)):
                return False
    return True


def fuzz_lmdb(first: int, count: int) -> tuple[int, int, list[int]]:
    """Return how many inputs were accepted and refused, and which were accepted with other values."""
    found = []
    with tempfile.TemporaryDirectory(prefix="raypipe-fuzz-") as folder:
        path = Path(folder) / "a.lmdb"
        sound = sound_store(path)
        for number in range(first, first + count):
            rng = np.random.default_rng([number, 3])
            path.write_bytes(damaged_store(sound, rng))
            found.append(reads_alike(path, rng))
    return (
        found.count(True),
        found.count(None),
        [first + at for at, result in enumerate(found) if result is False],
    )


if __name__ == "__main__":
    begin, num = [*map(int, sys.argv[1:]), *(0, 4000)[len(sys.argv) - 1 :]]
    accepted, refused, differ = fuzz_lmdb(begin, num)
    print(
        f"lmdb: {num} inputs from {begin} on: {accepted} accepted, {refused} refused, "
        f"{len(differ)} wrong {differ[:9]}",
        flush=True,
    )
    sys.exit(bool(differ))
