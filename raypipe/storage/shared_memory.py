"""Memory that all processes of a node share, and that the kernel frees with the last of them, however it ends.

An arena is an anonymous file in memory (memfd). A process that wants one finds the others that have it by their
entries, opens it through /proc/PID/fd, and leaves its own entry:

    CACHE/memory/BOOT.KEY.PID.START.FD    one per process; that of a dead one is removed at the next open
    CACHE/memory/.lock                    held while an arena is looked for, made, or given more room

    arena    | used, granted | offsets, int64: one for each cell, 0 = empty | values: size, then the bytes … |

A cell is written once: its value first, then its offset. A process that is killed between the two leaves a gap.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from raypipe.environment import variable
from raypipe.errors import ConfigError
from raypipe.storage.local_file import boot_id, locked, make_cache_folder

_HEADER_BYTES = 4096
_SIZE_BYTES = 8
# Room is granted to arenas in steps.
_STEP_BYTES = 64 << 20
# Share of the memory that is free, or in arenas.
_FREE_SHARE = 0.5


class Arena:
    """Cells of bytes in shared memory, each empty or written once.

    Args:
        descriptor: the anonymous file; it is closed with the object.
        num_cells: how many cells it has.
        entry: this process's entry.
    """

    def __init__(self, descriptor: int, num_cells: int, entry: Path) -> None:
        self._descriptor = descriptor
        self._folder = entry.parent
        self._lock = threading.Lock()
        memory = mmap.mmap(descriptor, os.fstat(descriptor).st_size)
        self._view = memoryview(memory)
        # bytes that are used and granted, from the start on
        self._counts = np.frombuffer(memory, np.int64, 2)
        self._offsets = np.frombuffer(memory, np.int64, num_cells, _HEADER_BYTES)
        weakref.finalize(self, _close, descriptor, entry, os.getpid())

    @property
    def used_bytes(self) -> int:
        """Bytes of the arena that are in use."""
        return int(self._counts[0])

    def values(self, cells: np.ndarray) -> list[memoryview | None]:
        """Return the values of cells, int64 (n,), read-only; None for empty cells."""
        return [
            self._value(offset) if offset else None
            for offset in self._offsets[cells].tolist()
        ]

    def _value(self, offset: int) -> memoryview:
        start = offset + _SIZE_BYTES
        size = int.from_bytes(self._view[offset:start], "little")
        return self._view[start : start + size].toreadonly()

    def write(
        self, cells: np.ndarray, values: Sequence[Sequence[bytes | memoryview]]
    ) -> bool:
        """Write values, each in pieces, into cells that are empty; return whether there was room for all."""
        is_empty = (self._offsets[cells] == 0).tolist()
        for cell, value, is_missing in zip(
            cells.tolist(), values, is_empty, strict=True
        ):
            if not is_missing:
                continue
            size = sum(map(len, value))
            offset = self._reserve(_SIZE_BYTES + size)
            if offset is None:
                return False
            start = offset + _SIZE_BYTES
            self._view[offset:start] = size.to_bytes(_SIZE_BYTES, "little")
            for piece in value:
                self._view[start : start + len(piece)] = piece
                start += len(piece)
            with self._lock:  # a barrier: the value is seen before its offset
                self._offsets[cell] = offset
        return True

    def _reserve(self, size: int) -> int | None:
        size += -size % 8
        with self._lock:
            # freed by the kernel if this process is killed
            fcntl.flock(self._descriptor, fcntl.LOCK_EX)
            try:
                used, granted = self._counts.tolist()
                if used + size > granted:
                    granted += _granted(self._folder, used + size - granted)
                    self._counts[1] = granted
                if used + size > granted:
                    return None
                self._counts[0] += size
                return int(used)
            finally:
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)


def open_arena(key: str, num_cells: int) -> Arena:
    """Return the node's arena of a key, made if no process has it; this process keeps it while it is referred to.

    Args:
        key: 32 hex digits, equal for equal contents.
        num_cells: number of cells, a function of the key.

    Raises:
        ConfigError: the system has no such memory, or the limit is used up.
    """
    with _mutex:
        if arena := _arenas.get(key):
            return arena
        if not hasattr(os, "memfd_create"):
            raise ConfigError(
                "store.in_memory needs Linux, whose memory processes can share: leave it out"
            )
        try:
            folder = make_cache_folder("memory")
        except OSError as error:
            raise ConfigError(
                f"store.in_memory: {error}; set RAYPIPE_CACHE to another folder"
            ) from error
        with locked(folder / ".lock"):
            entries = _live_entries(folder)
            descriptor = None
            for path in entries:
                descriptor = _open_arena_of(path, key)
                if descriptor is not None:
                    break
            if descriptor is None:
                descriptor = _create_arena(key, num_cells, _total(entries))
            pid = os.getpid()
            entry = folder / f"{boot_id()}.{key}.{pid}.{_start_of(pid)}.{descriptor}"
            entry.touch()
            arena = _arenas[key] = Arena(descriptor, num_cells, entry)
        return arena


def _live_entries(folder: Path) -> list[Path]:
    """Return the entries of live processes; those of dead ones are removed."""
    live = []
    for path in folder.iterdir():
        parts = path.name.split(".")
        if len(parts) != 5 or parts[0] != boot_id():
            continue
        if _start_of(int(parts[2])) == parts[3]:
            live.append(path)
        else:
            path.unlink(missing_ok=True)
    return live


def _start_of(pid: int) -> str:
    """Return when a process was started, in ticks since the machine's start; empty for no process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def _open_arena_of(entry: Path, key: str) -> int | None:
    """Return a new descriptor of another process's arena; None if it has another key, or cannot be opened."""
    _, name, pid, _, number = entry.name.split(".")
    if name != key:
        return None
    try:
        descriptor = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
    except OSError:  # it ended, or lives in another container
        return None
    if not str(Path(f"/proc/self/fd/{descriptor}").readlink()).startswith(
        f"/memfd:{_name_of(key)}"
    ):
        os.close(descriptor)
        return None
    return descriptor


def _name_of(key: str) -> str:
    return f"raypipe-{key}"


def _create_arena(key: str, num_cells: int, taken: int) -> int:
    """Return a descriptor of a new arena; `taken` are the bytes that others are granted."""
    least = _HEADER_BYTES + 8 * num_cells
    room = _limit_bytes(taken) - taken
    if room <= least:
        raise ConfigError(
            f"store.in_memory: there is room for {max(0, room):,} bytes, and the table of {num_cells:,} values "
            f"needs {least:,}: raise RAYPIPE_MEMORY_BYTES, or leave store.in_memory out"
        )
    descriptor = os.memfd_create(_name_of(key), os.MFD_CLOEXEC)
    # As large as the machine's memory: pages are taken when they are written.
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    os.ftruncate(descriptor, max(memory_bytes, _limit_bytes(taken)) + least)
    os.pwrite(descriptor, np.array([least, least], np.int64).tobytes(), 0)
    return descriptor


def _granted(folder: Path, num_bytes: int) -> int:
    """Return by how many bytes an arena may grow: this number or more, or 0."""
    with locked(folder / ".lock"):
        taken = _total(_live_entries(folder))
        limit = _limit_bytes(taken)
        step = max(num_bytes, min(_STEP_BYTES, limit // 64))
        return step if taken + step <= limit else 0


def _total(entries: Sequence[Path]) -> int:
    """Return the bytes that all arenas are granted."""
    granted = {}
    for entry in entries:
        key = entry.name.split(".")[1]
        if (
            key not in granted
            and (descriptor := _open_arena_of(entry, key)) is not None
        ):
            granted[key] = int.from_bytes(os.pread(descriptor, 8, 8), "little")
            os.close(descriptor)
    return sum(granted.values())


def _limit_bytes(taken: int) -> int:
    """Return the limit of all arenas of this node: the variable, or half of the memory that is free or theirs."""
    text = variable("RAYPIPE_MEMORY_BYTES")
    if text:
        if not text.isdecimal():
            raise ConfigError(
                f"RAYPIPE_MEMORY_BYTES must be a whole number of bytes, got {text!r}"
            )
        return int(text)
    free = [os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    with contextlib.suppress(OSError, StopIteration, ValueError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = [
            1024
            * next(
                int(line.split()[1])
                for line in lines
                if line.startswith("MemAvailable:")
            )
        ]
    with contextlib.suppress(OSError, ValueError):
        # a container's limit; it may be "max"
        group = Path("/sys/fs/cgroup")
        limit = int((group / "memory.max").read_text())
        free.append(limit - int((group / "memory.current").read_text()))
    return int(_FREE_SHARE * (max(0, min(free)) + taken))


def _close(descriptor: int, entry: Path, pid: int) -> None:
    if os.getpid() == pid:  # not a forked child
        entry.unlink(missing_ok=True)
    os.close(descriptor)


_mutex = threading.Lock()
_arenas: weakref.WeakValueDictionary[str, Arena] = weakref.WeakValueDictionary()


def _forget() -> None:
    """Let a forked child open its arenas itself: a lock on its parent's descriptor does not exclude the parent."""
    global _mutex
    _mutex = threading.Lock()
    _arenas.clear()


os.register_at_fork(after_in_child=_forget)
