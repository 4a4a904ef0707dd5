"""The record of what each rank handed out: hashes of its micro-batches.

    RUN/digests/epoch-0003-rank-0001-18c3.jsonl     a file for each epoch, rank and start, which only grows:

    {"kind": "start", "seal": …, "rank": …, "device": …, "cpu": …, …}   what it was written by
    {"micro_batch": "train-e0003-s000000-m001", "hash": …, "finished": …}

    RUN/digests/epoch-0003-rank-0001-18c3.json      [number of its lines, their sum], written after them

The hashes are those of `raypipe.streaming.hashes`, taken when the micro-batch reached the rank, and once the
device stage has finished it on a CPU. The root of an epoch is a hash over the sorted lines of all ranks, so W does
not change it. No rank waits for another.

Steps that a run does over again are recorded again, and the lines of the newest file, by its name, count. A line
that a crash cut off does not: its step comes after the last checkpoint, before which all lines are written. The
seal of a start names the settings under which its lines were written, see `raypipe.streaming.record.opened`.
"""

from __future__ import annotations

import hashlib
import json
import platform
import re
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow.fs
import torch

from raypipe.device.prefetcher import Batch
from raypipe.errors import ConfigError
from raypipe.metrics.observer import Observer
from raypipe.metrics.records import (
    BestEffort,
    RunFolder,
    append_whole,
    objects_of,
)
from raypipe.plan.places import MicroBatchId, Split
from raypipe.storage.files import read_whole, write_synced
from raypipe.storage.filesystem import errors_as
from raypipe.storage.retries import without_retries
from raypipe.streaming.record.opened import sealed

DIGESTS = "digests"
_FILE = re.compile(r"(epoch-(\d{4,})-rank-(\d{4,})-([0-9a-f]+))\.jsonl?")
_PLACE = re.compile(r"(train|val)-e(\d{4,19})-s(\d{6,19})-m(\d{3,19})", re.ASCII)
_SUMS = 1 << 128
_FLUSH_S = 1.0
_FLUSH_REMOTE_S = (
    60.0  # in object storage each is a request, with all of the epoch's lines
)


class Hashes(NamedTuple):
    """The recorded hashes of a micro-batch, hexadecimal.

    Attributes:
        stream: as it reached the rank.
        finished: as the model got it; empty = not recorded.
        start: the line of the start that recorded it.
    """

    stream: str
    finished: str
    start: dict[str, Any]


class EpochRecord(NamedTuple):
    """Record of an epoch, of all ranks.

    Attributes:
        recorded: the hashes of each place, by the newest file that has them.
        damaged: names of files with other lines than were written.
        unequal: what two starts have recorded for one place, where that differs.
    """

    recorded: dict[MicroBatchId, Hashes]
    damaged: list[str]
    unequal: list[tuple[MicroBatchId, Hashes, Hashes]]

    @property
    def root(self) -> str:
        """64 hex digits over the sorted lines of all micro-batches."""
        return root_of(
            sorted(
                _line(place, hashes.stream, hashes.finished)
                for place, hashes in self.recorded.items()
            )
        )


def root_of(lines: Iterable[str]) -> str:
    """64 hex digits over lines."""
    return hashlib.blake2b("".join(lines).encode(), digest_size=32).hexdigest()


def count_of(lines: Iterable[bytes], num: int = 0, total: int = 0) -> tuple[int, int]:
    """The number of lines, and a sum over their hashes, in any order.

    Args:
        num, total: those of earlier lines.
    """
    for line in lines:
        digest = hashlib.blake2b(line, digest_size=16).digest()
        total = (total + int.from_bytes(digest)) % _SUMS
        num += 1
    return num, total


def cpu_kind() -> str:
    """The kind of this machine's CPU: on others torch may round in other ways."""
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"


class DigestLog(Observer):
    """Writes one rank's part of the record. It never ends a run: a failure to write is one warning.

    Args:
        folder: the run's folder, which all ranks share; None = there is none.
        record: what decides the stream, see `opened.settings_record`.
        rank, world_size: number of this rank, and W.
        device: where its batches are.

    Raises:
        ConfigError: there is no folder.
    """

    def __init__(
        self,
        folder: RunFolder | None,
        record: Mapping[str, Any],
        rank: int,
        world_size: int,
        device: torch.device,
    ) -> None:
        if folder is None:
            raise ConfigError(
                "log_digest writes into the run's folder: name one, raypipe.loader(spec, run_dir=…)"
            )
        self._filesystem, run = folder
        self._is_local = isinstance(self._filesystem, pyarrow.fs.LocalFileSystem)
        self._folder = f"{run}/{DIGESTS}"
        self._start: dict[str, Any] = {
            "kind": "start",
            "rank": rank,
            "workers": world_size,
            "device": device.type,
            "cpu": cpu_kind(),
            "seal": sealed(record, world_size),
        }
        self._epoch = -1
        self._path = ""
        self._lines = list[str]()  # not written yet
        self._count = (0, 0)  # number of lines in the file, and their sum
        # In object storage a file is written as a whole.
        self._content = b""
        self._flushed_at = 0.0
        self._one_by_one = threading.RLock()
        self._best_effort = BestEffort(run)

    def add(self, batch: Batch) -> None:
        """Record a batch that is handed out."""
        position = batch.position
        hashes = (batch.stream_hash.hex(), batch.finished_hash.hex())
        with self._one_by_one:
            if position.epoch != self._epoch:
                self.flush(synced=True)
                self._begin_epoch(position.epoch)
            self._lines.append(_line(position, *hashes))
            flush_s = _FLUSH_S if self._is_local else _FLUSH_REMOTE_S
            is_due = time.monotonic() - self._flushed_at > flush_s
            if batch.ends_split or is_due:
                self.flush(synced=batch.ends_split)

    def _begin_epoch(self, epoch: int) -> None:
        """Count again what an epoch has of this rank, and of ranks that W has no more.

        A machine that was lost may have lost lines.
        """
        self._epoch = epoch
        with self._best_effort(DIGESTS):
            files = recorded_files((self._filesystem, self._folder))
            for of_epoch, rank, path in files:
                is_own = rank % self._start["workers"] == self._start["rank"]
                if of_epoch == epoch and is_own:
                    lines, is_whole = _read_lines(self._filesystem, path)
                    if not is_whole:
                        self._write_count(path, count_of(lines))
        self._begin_file()

    def _begin_file(self) -> None:
        """Begin a file; its first line is that of this start."""
        name = f"epoch-{self._epoch:04d}-rank-{self._start['rank']:04d}"
        self._path = f"{self._folder}/{name}-{round(time.time() * 1e6):x}"
        self._count = (0, 0)
        self._content = b""

    def saving(self, cause: Any) -> None:
        """Write all lines, since a resume from the checkpoint does not make them again."""
        self.flush(synced=True)

    def closed(self) -> None:
        self.flush(synced=True)

    def flush(self, synced: bool = False) -> None:
        """Write the lines so far, and then how many there are.

        Args:
            synced: also wait until a local disk has them.
        """
        with self._one_by_one:
            if not self._lines and not (synced and self._count[0]):
                return
            self._flushed_at = time.monotonic()
            with self._best_effort(DIGESTS):
                self._write("".join(self._lines).encode(), synced)
                self._lines = []
            if self._lines and self._is_local:
                # a part may be there, so all goes into another file, behind its own start
                self._begin_file()

    def _write(self, lines: bytes, synced: bool) -> None:
        path = f"{self._path}.jsonl"
        if not self._count[0]:
            # a file without a count was never written
            self._write_count(self._path, self._count)
            lines = json.dumps(self._start).encode() + b"\n" + lines
        if self._is_local:
            append_whole(Path(path), lines, synced)
        else:
            with without_retries():
                write_synced(self._filesystem, path, self._content + lines)
            self._content += lines
        self._count = count_of(lines.splitlines(), *self._count)
        self._write_count(self._path, self._count)

    def _write_count(self, path: str, count: tuple[int, int]) -> None:
        text = json.dumps(count)
        if self._is_local:
            # a crash leaves the old or the new one
            new = Path(f"{path}.new")
            new.parent.mkdir(parents=True, exist_ok=True)
            new.write_text(text)
            new.replace(f"{path}.json")
        else:
            with without_retries():
                write_synced(self._filesystem, f"{path}.json", text.encode())


def _line(place: MicroBatchId, stream: str, finished: str) -> str:
    of_device = f', "finished": "{finished}"' if finished else ""
    return f'{{"micro_batch": "{place}", "hash": "{stream}"{of_device}}}\n'


def recorded_files(folder: RunFolder) -> list[tuple[int, int, str]]:
    """The files of a folder of digests, oldest first: epoch, rank, and the path without its ending."""
    filesystem, path = folder
    with errors_as(ConfigError, f"{path} cannot be read"):
        selector = pyarrow.fs.FileSelector(path, allow_not_found=True)
        names = [info.base_name for info in filesystem.get_file_info(selector)]
    matches = sorted(
        filter(None, map(_FILE.fullmatch, names)), key=lambda match: int(match[4], 16)
    )
    files = [(int(match[2]), int(match[3]), f"{path}/{match[1]}") for match in matches]
    return list(dict.fromkeys(files))


def _read_lines(
    filesystem: pyarrow.fs.FileSystem, path: str
) -> tuple[list[bytes], bool]:
    """The lines of a file, and whether it has all that were counted; a crash may leave others behind them."""
    content = read_whole(f"{path}.jsonl", filesystem) or b""
    lines = content.split(b"\n")[:-1]
    try:
        counted = json.loads(read_whole(f"{path}.json", filesystem) or b"")
        return lines, [*count_of(lines[: counted[0]])] == counted
    except (LookupError, RecursionError, TypeError, ValueError):
        return lines, False


def read_epoch(folder: RunFolder, epoch: int) -> EpochRecord:
    """Read all ranks' record of an epoch, in a folder of digests; raise ConfigError if a file cannot be read."""
    record = EpochRecord({}, [], [])
    files = recorded_files(folder)
    for path in [path for number, _, path in files if number == epoch]:
        lines, is_whole = _read_lines(folder[0], path)
        of_file: dict[MicroBatchId, Hashes] = {}
        start: dict[str, Any] = {}
        for line in objects_of(b"\n".join([*lines, b""])):
            place = place_in(str(line.get("micro_batch")))
            if line.get("kind") == "start":
                start = line
            elif place is None or place.epoch != epoch:
                is_whole = False
            else:
                pair = (str(line.get("hash", "")), str(line.get("finished", "")))
                hashes = Hashes(*pair, start)
                # a rank makes a place again only as it was, and finishes it on a CPU
                is_whole &= of_file.setdefault(place, hashes) == hashes
                is_whole &= bool(hashes.finished) == (start.get("device") == "cpu")
        for place, hashes in of_file.items():
            earlier = record.recorded.get(place, hashes)
            if _differ(earlier, hashes):
                record.unequal.append((place, earlier, hashes))
        record.recorded.update(of_file)
        if not is_whole:
            record.damaged.append(path.rpartition("/")[2])
    return record


def _differ(first: Hashes, second: Hashes) -> bool:
    """Return whether hashes of a place differ, as far as both are recorded."""
    both = {first.finished, second.finished} - {""}
    return first.stream != second.stream or len(both) > 1


def place_in(name: str) -> MicroBatchId | None:
    """The place of a micro-batch by its name, train-e0000-s000012-m000; None = it does not name one."""
    match = _PLACE.fullmatch(name)
    if match is None:
        return None
    split: Split = "train" if match[1] == "train" else "val"
    return MicroBatchId(split, *map(int, match.groups()[1:]))
