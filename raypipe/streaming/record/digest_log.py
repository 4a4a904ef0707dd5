"""The record of what each rank handed out: hashes of its micro-batches.

    RUN/digests/epoch-0003-rank-0001-18c3.jsonl     files of each epoch, rank and start:

    {"kind": "start", "seal": …, "rank": …, "device": …, "cpu": …, …}   what it was written by
    {"micro_batch": "train-e0003-s000000-m001", "hash": …, "finished": …}

    RUN/digests/epoch-0003-rank-0001-18c3.json      [number of its bytes, their hash], written after them

The hashes are those of `raypipe.streaming.hashes`, taken when the micro-batch reached the rank, and once the
device stage has finished it on a CPU. The root of an epoch is a hash over the sorted lines of all ranks, so W does
not change it. No rank waits for another.

Both are replaced as a whole, at each checkpoint and every few seconds. Steps that a run does over again are
recorded again, and the lines of the newest file, by its name, count. The seal of a start names the settings under
which its lines were written, see `raypipe.streaming.record.opened`.
"""

from __future__ import annotations

import hashlib
import json
import platform
import re
import threading
import time
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import pyarrow.fs
import torch

from raypipe.device.prefetcher import Batch
from raypipe.errors import ConfigError
from raypipe.metrics.observer import Observer
from raypipe.metrics.records import (
    BestEffort,
    Record,
    RunFolder,
    objects_of,
    write_file,
)
from raypipe.plan.places import MicroBatchId, Split
from raypipe.storage.files import read_whole
from raypipe.storage.filesystem import errors_as
from raypipe.storage.retries import without_retries
from raypipe.streaming.record.opened import sealed

DIGESTS = "digests"
_FILE = re.compile(r"(epoch-(\d{4,})-rank-(\d{4,})-([0-9a-f]+))\.jsonl?")
_PLACE = re.compile(r"(train|val)-e(\d{4,19})-s(\d{6,19})-m(\d{3,19})", re.ASCII)
_FLUSH_S = 10.0
_FLUSH_REMOTE_S = 60.0  # in object storage each is two requests
# Of a file, 2 MB: a long epoch has several of them, since each is written again as a whole.
_MOST_LINES = 20_000


class Hashes(NamedTuple):
    """The recorded hashes of a micro-batch, hexadecimal.

    Attributes:
        stream: as it reached the rank.
        finished: as the model got it; empty = not recorded.
        start: the line of the start that recorded it.
    """

    stream: str
    finished: str
    start: Record


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


def sum_of(content: bytes) -> list[Any]:
    """The number of bytes of a file, and their hash."""
    return [len(content), hashlib.blake2b(content, digest_size=16).hexdigest()]


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
        self._folder = folder
        filesystem, run = folder
        is_local = isinstance(filesystem, pyarrow.fs.LocalFileSystem)
        self._flush_s = _FLUSH_S if is_local else _FLUSH_REMOTE_S
        self._start = {
            "kind": "start",
            "rank": rank,
            "workers": world_size,
            "device": device.type,
            "cpu": cpu_kind(),
            "seal": sealed(record, world_size),
        }
        self._epoch = -1
        self._name = ""  # of the newest file
        self._lines = list[str]()
        self._num_written = 0
        self._flushed_at = 0.0
        self._one_by_one = threading.RLock()
        self._best_effort = BestEffort(run)

    def add(self, batch: Batch) -> None:
        """Record a batch that is handed out."""
        position = batch.position
        hashes = (batch.stream_hash.hex(), batch.finished_hash.hex())
        with self._one_by_one:
            if position.epoch != self._epoch or len(self._lines) >= _MOST_LINES:
                self.flush()
                self._epoch = position.epoch
                name = f"epoch-{position.epoch:04d}-rank-{self._start['rank']:04d}"
                self._name = f"{DIGESTS}/{name}-{round(time.time() * 1e6):x}"
                self._lines = [json.dumps(self._start) + "\n"]
                self._num_written = 0
            self._lines.append(_line(position, *hashes))
            is_due = time.monotonic() - self._flushed_at > self._flush_s
            if batch.ends_split or is_due:
                self.flush()

    def saving(self, cause: Any) -> None:
        """Write all lines, since a resume from the checkpoint does not make them again."""
        self.flush()

    def closed(self) -> None:
        self.flush()

    def flush(self) -> None:
        """Write the lines so far, and then their sum; on a disk they are there before it."""
        with self._one_by_one:
            if self._num_written == len(self._lines):
                return
            self._flushed_at = time.monotonic()
            content = "".join(self._lines)
            with self._best_effort(DIGESTS), without_retries():
                if not self._num_written:
                    filesystem, run = self._folder
                    filesystem.create_dir(f"{run}/{DIGESTS}", recursive=True)
                    # a file without a sum was never written
                    self._write("json", json.dumps(sum_of(b"")))
                self._write("jsonl", content)
                self._write("json", json.dumps(sum_of(content.encode())))
                self._num_written = len(self._lines)

    def _write(self, ending: str, text: str) -> None:
        write_file(self._folder, f"{self._name}.{ending}", text)


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


def _read(filesystem: pyarrow.fs.FileSystem, path: str) -> tuple[bytes, bool]:
    """A file's content, and whether it has all that was summed; a crash may leave more behind it."""
    content = read_whole(f"{path}.jsonl", filesystem) or b""
    try:
        summed = json.loads(read_whole(f"{path}.json", filesystem) or b"")
        return content, sum_of(content[: summed[0]]) == summed
    except (LookupError, RecursionError, TypeError, ValueError):
        return content, False


def read_epoch(folder: RunFolder, epoch: int) -> EpochRecord:
    """Read all ranks' record of an epoch, in a folder of digests; raise ConfigError if a file cannot be read."""
    record = EpochRecord({}, [], [])
    for of_epoch, _, path in recorded_files(folder):
        if of_epoch != epoch:
            continue
        content, is_whole = _read(folder[0], path)
        of_file: dict[MicroBatchId, Hashes] = {}
        start: Record = {}
        for line in objects_of(content):
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
            # a rank on a GPU records none of what it has finished
            finished = {earlier.finished, hashes.finished} - {""}
            if earlier.stream != hashes.stream or len(finished) > 1:
                record.unequal.append((place, earlier, hashes))
        record.recorded.update(of_file)
        if not is_whole:
            record.damaged.append(path.rpartition("/")[2])
    return record


def place_in(name: str) -> MicroBatchId | None:
    """The place of a micro-batch by its name, train-e0000-s000012-m000; None = it does not name one."""
    match = _PLACE.fullmatch(name)
    if match is None:
        return None
    split: Split = "train" if match[1] == "train" else "val"
    return MicroBatchId(split, *map(int, match.groups()[1:]))
