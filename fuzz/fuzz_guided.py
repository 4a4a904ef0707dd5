"""Fuzzing of the extensions, guided by the code that each input reaches: see .ci/fuzz, which builds them for it.

    corpus       the project's own pictures and stores, made here
      ↑ ↓
    an input     a member of the corpus, changed: by changes of its format, by numbers that the code
                 has compared, or by parts of another member
      ↓
    a target     of fuzz_kernel.py or fuzz_lmdb.py: whatever is accepted has the pixels and values of the usual way

An input that reaches new code joins the corpus. The input at hand is in a file while it is tried, so it is there
when the process dies of it.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import sys
import tempfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import lmdb
import numpy as np
from fuzz_files import mutated, originals
from fuzz_kernel import agrees, runs_like_reference, seeks_alike
from fuzz_lmdb import damaged_store, reads_alike, sound_store

_NUM_EDGES = 65536
_NUM_OPERANDS = 256
_NUMBERS = [0, 1, 2, 15, 16, 127, 128, 255, 4095, 4096, 65535, 1 << 31, (1 << 32) - 1]
_NUMBERS += [1 << 46, (1 << 63) - 1, (1 << 64) - 1]
_MOST_BYTES = 1 << 18  # of an input
# A counter counts as one of these: none, 1, 2, 3, 4 to 7, …, 128 and more.
_CLASSES = np.array(
    [0, 1, 2, 4, *[8] * 4, *[16] * 8, *[32] * 16, *[64] * 96, *[128] * 128], np.uint8
)
_FOLDER = Path(tempfile.gettempdir())


class Target(NamedTuple):
    """An extension's module, the first inputs, a change of such an input, and what tells whether one is right."""

    module: str
    corpus: Callable[[], list[bytes]]
    change: Callable[[bytes, np.random.Generator], bytes]
    check: Callable[[bytes, np.random.Generator], bool | None]


def stores() -> list[bytes]:
    """A store of raypipe's, and those of other programs: small, with long values, nested, with an empty key."""
    with tempfile.TemporaryDirectory(prefix="raypipe-fuzz-") as folder:
        own = Path(folder) / "own.lmdb"
        made = [sound_store(own), sound_store(Path(folder) / "few.lmdb", 40)]
        for number, values in enumerate(([b"x"], [b"y" * 5000] * 3, [b"z" * 50] * 300)):
            path = Path(folder) / f"{number}.lmdb"
            with (
                lmdb.open(str(path), subdir=False, map_size=1 << 22, max_dbs=2) as file,
                file.begin(write=True) as transaction,
            ):
                for row, value in enumerate(values):
                    transaction.put(b"%08d" % row, value)
                if number == 2:
                    file.open_db(b"nested", transaction)
            made.append(path.read_bytes())
    return [*made, without_key(made[2])]


def without_key(data: bytes) -> bytes:
    """A store of one entry, with a key of 0 bytes."""
    at = data.index(b"00000000")
    return data[: at - 2] + bytes(2) + data[at:]


def reads_store(data: bytes, rng: np.random.Generator) -> bool | None:
    """Whether the records of a store are read one by one as in one call."""
    path = _FOLDER / f"raypipe-fuzz-{os.getpid()}.lmdb"
    path.write_bytes(data)
    return reads_alike(path, rng)


TARGETS = {
    "lmdb": Target("_raypipe_lmdb", stores, damaged_store, reads_store),
    "decode_crop": Target("_raypipe_kernel", originals, mutated, agrees),
    "run": Target("_raypipe_kernel", originals, mutated, runs_like_reference),
    "to_seekable": Target("_raypipe_kernel", originals, mutated, seeks_alike),
}


def changed(
    data: bytes, other: bytes, operands: np.ndarray, rng: np.random.Generator
) -> bytes:
    """Bytes changed in some places."""
    content = bytearray(data)
    for _ in range(1 << int(rng.integers(0, 5))):
        place = int(rng.integers(0, len(content) + 1))
        kind = int(rng.integers(6))
        size = int(rng.choice([1, 2, 4, 8]))
        if kind == 0:
            number = int(rng.choice(_NUMBERS[:11]))
        elif kind == 1:
            number = int(rng.choice(operands))
        else:
            number = int(rng.integers(1 << 62))
        order = "little" if rng.random() < 0.5 else "big"
        packed = (number % 256**size).to_bytes(size, order)
        if kind < 3:
            content[place : place + size] = packed
        elif kind == 3:
            content[place:place] = packed
        elif kind == 4:
            del content[place : place + int(rng.integers(1, 64))]
        else:
            start = int(rng.integers(0, len(other) + 1))
            part = other[start : start + int(rng.integers(1, 256))]
            content[place : place + len(part)] = part
    return bytes(content[:_MOST_BYTES])


class Reached:
    """The code that a module has reached."""

    def __init__(self, module: str) -> None:
        library = ctypes.CDLL(__import__(module).__file__)
        edges = (ctypes.c_uint8 * _NUM_EDGES).in_dll(library, "raypipe_edges")
        operands = (ctypes.c_uint64 * _NUM_OPERANDS).in_dll(library, "raypipe_operands")
        self.operands = np.frombuffer(operands, np.uint64)
        self._edges = np.frombuffer(edges, np.uint8)
        self._seen = np.zeros(_NUM_EDGES, np.uint8)

    def is_new(self, run: Callable[[], None]) -> bool:
        """Whether a call reaches code, or as often, as none before did."""
        self._edges[:] = 0
        run()
        classes = _CLASSES[self._edges]
        if not (classes & ~self._seen).any():
            return False
        self._seen |= classes
        return True

    def num(self) -> int:
        return int(np.count_nonzero(self._seen))


def fuzz(name: str, seconds: float, seed: int, out: Path) -> int:
    """Fuzz a target for so many CPU seconds; return how many inputs were wrong, which are in the folder."""
    target = TARGETS[name]
    reached = Reached(target.module)
    at_hand = out / f"{name}-dies-of-this"
    wrong: list[Path] = []

    def check(data: bytes) -> None:
        at_hand.write_bytes(data)
        rng = np.random.default_rng(zlib.crc32(data))
        if target.check(data, rng) is False:
            wrong.append(out / f"{name}-wrong-{zlib.crc32(data):08x}")
            wrong[-1].write_bytes(data)

    begun = time.process_time()
    corpus = [data for data in target.corpus() if reached.is_new(lambda: check(data))]  # noqa: B023
    num_first = len(corpus)
    num_tried = 0
    rng = np.random.default_rng(seed)
    while time.process_time() - begun < seconds and len(wrong) < 10:
        # newer ones, which reach rarer code, more often
        first, second = rng.integers(0, len(corpus), 2).tolist()
        data, other = corpus[max(first, second)], corpus[min(first, second)]
        if rng.random() < 0.4:
            data = target.change(data, rng)
        else:
            data = changed(data, other, reached.operands, rng)
        num_tried += 1
        if reached.is_new(lambda: check(data)):  # noqa: B023
            corpus.append(data)
    at_hand.unlink()
    print(
        f"{name}: {num_tried} inputs, seed {seed}: {len(corpus) - num_first} reached new code, "
        f"{reached.num()} edges; {len(wrong)} wrong {[str(path) for path in wrong]}",
        flush=True,
    )
    return len(wrong)


def main(arguments: list[str]) -> int:
    out = Path(os.environ["RAYPIPE_FUZZ_OUT"])
    if arguments[:1] == ["--again"]:
        data = Path(arguments[1]).read_bytes()
        check = TARGETS[arguments[2]].check
        return int(check(data, np.random.default_rng(zlib.crc32(data))) is False)
    minutes = float(arguments[0]) if arguments else 20.0
    names = arguments[1:] or list(TARGETS)
    out.mkdir(parents=True, exist_ok=True)
    num_wrong = 0
    for name in names:
        # a process of its own, of which a sanitizer makes an end
        process = os.fork()
        if not process:
            found = fuzz(name, 60 * minutes / len(names), time.time_ns(), out)
            os._exit(bool(found))
        status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        num_wrong += bool(status)
        at_hand = out / f"{name}-dies-of-this"
        if at_hand.exists():
            kept = out / f"{name}-dies-{zlib.crc32(at_hand.read_bytes()):08x}"
            shutil.move(at_hand, kept)
            print(f"{name}: the process ended with {status}: {kept}", flush=True)
    if not any(out.iterdir()):
        out.rmdir()
    return int(num_wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
