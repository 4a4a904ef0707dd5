"""The record of what each rank handed out: hashes of its micro-batches.

    RUN/digests/epoch-0003-rank-0001-18c3.jsonl     a file for each epoch, rank and start, which only grows:

    {"kind": "start", "seal": …, "rank": …, "device": …, "cpu": …, …}   what it was written by
    {"micro_batch": "train-e0003-s000000-m001", "hash": …, "finished": …}

    RUN/digests/epoch-0003-rank-0001-18c3.json      [number of its lines, their sum], written after them

The hashes are those of `raypipe.streaming.hashes`, taken when the micro-batch reached the rank, and once the
device stage has finished it on a CPU. The root of an epoch is a hash over the sorted lines of all ranks, so W does
not change it. No rank waits for another.

Steps that a run does over again are recorded again, and the lines of the newest start count. A line that a crash
cut off does not: its step comes after the last checkpoint, before which all lines are written. The seal of a start
names the settings under which its lines were written, see `raypipe.streaming.record.opened`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import platform
import re
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.fs
import torch

from raypipe.device.prefetcher import Batch
from raypipe.errors import ConfigError, RaypipeError
from raypipe.metrics.observer import Observer
from raypipe.metrics.records import RunFolder, append_whole, objects_of
from raypipe.plan.places import MicroBatchId
from raypipe.storage.files import read_whole, write_synced
from raypipe.storage.filesystem import errors_as
from raypipe.storage.retries import without_retries
from raypipe.streaming.record.opened import sealed

logger = logging.getLogger(__name__)

DIGESTS = "digests"
_FILE = re.compile(r"(epoch-(\d{4,})-rank-(\d{4,})-[0-9a-f]+)\.jsonl?")
_PLACE = rb"(train|val)-e(\d{4,})-s(\d{6,})-m(\d{3,})"
_HASH = rb'"([0-9a-f]{32})"'
_LINE = re.compile(
    rb'{"micro_batch": "%b", "hash": %b(?:, "finished": %b)?}' % (_PLACE, _HASH, _HASH)
)
_START_LINE = b'{"kind": "start"'
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


@dataclass
class EpochRecord:
    """Record of an epoch, of all ranks.

    Attributes:
        recorded: the hashes of each place, by the newest start that has recorded it.
        starts: the lines of the starts that wrote it.
        damaged: names of files with other lines than were written.
        unequal: what two starts have recorded for one place, where that differs.
    """

    recorded: dict[MicroBatchId, Hashes] = field(default_factory=dict)
    starts: list[dict[str, Any]] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)
    unequal: list[tuple[MicroBatchId, Hashes, Hashes]] = field(default_factory=list)

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


def sum_of(lines: Iterable[bytes]) -> int:
    """Return a sum over the hashes of lines, in any order."""
    hashes = (hashlib.blake2b(line, digest_size=16).digest() for line in lines)
    return sum(map(int.from_bytes, hashes)) % _SUMS


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
        self._start = {
            "kind": "start",
            "plan": record["plan"],
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
        self._is_synced = True
        # In object storage a file is written as a whole.
        self._content = b""
        self._flushed_at = 0.0
        self._one_by_one = threading.RLock()
        self._has_warned = False

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
        with self._best_effort():
            files = recorded_files((self._filesystem, self._folder))
            for of_epoch, rank, path in files:
                is_own = rank % self._start["workers"] == self._start["rank"]
                if of_epoch == epoch and is_own:
                    lines, is_whole = _read_lines(self._filesystem, path)
                    if not is_whole:
                        self._write_count(path, (len(lines), sum_of(lines)))
        self._begin_file()

    def _begin_file(self) -> None:
        """Begin a file; its first line is that of this start."""
        self._start["time"] = time.time()
        rank = self._start["rank"]
        number = round(self._start["time"] * 1e6)
        self._path = (
            f"{self._folder}/epoch-{self._epoch:04d}-rank-{rank:04d}-{number:x}"
        )
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
            if not self._lines and (self._is_synced or not synced):
                return
            self._flushed_at = time.monotonic()
            with self._best_effort():
                self._write("".join(self._lines), synced)
                self._lines = []
            if self._lines and self._is_local:
                # a part may be there, so all goes into another file, behind its own start
                self._begin_file()

    def _write(self, text: str, synced: bool) -> None:
        num, total = self._count
        path = f"{self._path}.jsonl"
        if not num:
            # a file without a count was never written
            self._write_count(self._path, (0, 0))
            text = json.dumps(self._start) + "\n" + text
        lines = text.encode()
        if self._is_local:
            append_whole(Path(path), lines, synced)
            self._is_synced = synced
        else:
            with without_retries():
                write_synced(self._filesystem, path, self._content + lines)
            self._content += lines
        written = lines.splitlines()
        self._count = (num + len(written), (total + sum_of(written)) % _SUMS)
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

    @contextlib.contextmanager
    def _best_effort(self) -> Iterator[None]:
        try:
            yield
        except (pa.ArrowException, OSError, RaypipeError, ValueError) as error:
            if not self._has_warned:
                text = "hashes cannot be recorded in %s: %s; the run goes on, and its record has gaps"
                logger.warning(text, self._folder, error)
            self._has_warned = True


def _line(place: MicroBatchId, stream: str, finished: str) -> str:
    of_device = f', "finished": "{finished}"' if finished else ""
    return f'{{"micro_batch": "{place}", "hash": "{stream}"{of_device}}}\n'


def recorded_files(folder: RunFolder) -> list[tuple[int, int, str]]:
    """The files of a folder of digests, in order: epoch, rank, and the path without its ending."""
    filesystem, path = folder
    with errors_as(ConfigError, f"{path} cannot be read"):
        selector = pyarrow.fs.FileSelector(path, allow_not_found=True)
        names = sorted(info.base_name for info in filesystem.get_file_info(selector))
    matches = filter(None, map(_FILE.fullmatch, names))
    files = [(int(match[2]), int(match[3]), f"{path}/{match[1]}") for match in matches]
    return list(dict.fromkeys(files))


def _read_lines(
    filesystem: pyarrow.fs.FileSystem, path: str
) -> tuple[list[bytes], bool]:
    """The lines of a file, and whether it has all that were counted; a crash may leave others behind them."""
    content = read_whole(f"{path}.jsonl", filesystem) or b""
    lines = content.split(b"\n")[:-1]
    count = read_whole(f"{path}.json", filesystem) or b""
    try:
        num, total = json.loads(count)
        return lines, bool(sum_of(lines[:num]) == total)
    except (RecursionError, TypeError, ValueError):
        return lines, False


def read_epoch(folder: RunFolder, epoch: int, fingerprint: str) -> EpochRecord:
    """Read all ranks' record of an epoch, in a folder of digests.

    Args:
        fingerprint: the plan's; lines of other plans do not count.

    Raises:
        ConfigError: a file cannot be read.
    """
    record = EpochRecord()
    files = recorded_files(folder)
    for path in [path for number, _, path in files if number == epoch]:
        lines, is_whole = _read_lines(folder[0], path)
        of_file: dict[MicroBatchId, Hashes] = {}
        start: dict[str, Any] = {}
        for line in lines:
            match = _LINE.fullmatch(line)
            if line.startswith(_START_LINE):
                for start in objects_of(line + b"\n"):
                    record.starts.append(start)
            elif start.get("plan") == fingerprint:
                if match and int(match[2]) == epoch:
                    *of_place, stream, finished = match.groups(b"")
                    hashes = Hashes(stream.decode(), finished.decode(), start)
                    # a rank makes a place again only as it was, and finishes it on a CPU
                    known = of_file.setdefault(_place_of(*of_place), hashes)
                    is_whole &= known[:2] == hashes[:2]
                    is_whole &= bool(finished) == (start.get("device") == "cpu")
                else:
                    is_whole = False
        for place, hashes in of_file.items():
            earlier = record.recorded.get(place, hashes)
            if _differ(earlier, hashes):
                record.unequal.append((place, earlier, hashes))
            if _time_of(earlier.start) <= _time_of(hashes.start):
                record.recorded[place] = hashes
        if not is_whole:
            record.damaged.append(path.rpartition("/")[2])
    return record


def _differ(first: Hashes, second: Hashes) -> bool:
    """Return whether hashes of a place differ, as far as both are recorded."""
    if first.stream != second.stream:
        return True
    both_finished = first.finished and second.finished
    return bool(both_finished) and first.finished != second.finished


def _time_of(start: dict[str, Any]) -> float:
    """The time of the line of a start, seconds of Unix time."""
    started = start.get("time")
    return started if isinstance(started, int | float) else 0.0


def place_in(name: str) -> MicroBatchId | None:
    """The place of a micro-batch by its name, train-e0000-s000012-m000; None = it does not name one."""
    match = re.fullmatch(_PLACE, name.encode(errors="replace"))
    return _place_of(*match.groups()) if match else None


def _place_of(split: bytes, *numbers: bytes) -> MicroBatchId:
    return MicroBatchId("train" if split == b"train" else "val", *map(int, numbers))
