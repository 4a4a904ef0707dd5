"""The record of what each rank handed out: hashes of its micro-batches, and a root for each epoch.

    RUN/digests/epoch-0003-rank-0001.jsonl      one file for each epoch and rank, which only grows:

    {"kind": "start", "seal": …, "rank": …, "device": …, "cpu": …, …}   a rank begins, maybe again
    {"micro_batch": "train-e0003-s000000-m001", "hash": …, "finished": …}
    {"kind": "left"}                                                the loop has left the epoch before its end
    {"kind": "root", "micro_batches": n, "root": …}

    RUN/digests/count-0001.json                 {epoch: number of lines in its file}, written after the lines

The hashes are those of `raypipe.streaming.hashes`, taken when the micro-batch reached the rank, and once the
device stage has finished it on a CPU. The root is a hash over the sorted lines of all ranks, so W does not
change it. A rank that ends its part of an epoch reads the files of all ranks; the one that ends last finds all
micro-batches, and writes the root. No rank waits for another.

Steps that a run does over again are recorded again. A line that a crash cut off does not count: its step comes
after the last checkpoint, before which all lines are written. A start's seal names the settings under which its
lines were written, see `raypipe.streaming.record.opened`.
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
from raypipe.plan.places import MicroBatchId, Split
from raypipe.plan.schedule import Plan
from raypipe.storage.files import open_input, write_synced
from raypipe.storage.filesystem import errors_as
from raypipe.storage.retries import without_retries
from raypipe.streaming.record.opened import sealed

logger = logging.getLogger(__name__)

DIGESTS = "digests"
FACTS = ("plan", "rank", "workers", "device", "cpu")
"""Facts that the line of a start has, and its seal covers."""
_FILE = re.compile(r"epoch-(\d{4,})-rank-(\d{4,})\.jsonl")
_COUNTS = re.compile(r"count-(\d{4,})\.json")
_PLACE = re.compile(r"(train|val)-e(\d{4,})-s(\d{6,})-m(\d{3,})")
_HASH = re.compile(r"[0-9a-f]{32}")
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
        recorded: the hashes of each place, in the order of their starts; the newest count.
        roots: the root, as it was recorded; several are different ones.
        was_left: whether the loop has left the epoch before its end.
        starts: the lines of the starts that wrote it.
        num_lines: number of lines of each rank's file.
    """

    recorded: dict[MicroBatchId, list[Hashes]] = field(default_factory=dict)
    roots: set[str] = field(default_factory=set)
    was_left: bool = False
    starts: list[dict[str, Any]] = field(default_factory=list)
    num_lines: dict[int, int] = field(default_factory=dict)

    @property
    def hashes(self) -> dict[MicroBatchId, Hashes]:
        """The hashes by place, the newest of each."""
        return {place: several[-1] for place, several in self.recorded.items()}

    def computed_root(self) -> str:
        """64 hex digits over the sorted lines of all micro-batches."""
        lines = sorted(
            _line(place, hashes.stream, hashes.finished)
            for place, hashes in self.hashes.items()
        )
        return root_of(lines)


def root_of(lines: Iterable[str]) -> str:
    """64 hex digits over lines."""
    return hashlib.blake2b("".join(lines).encode(), digest_size=32).hexdigest()


def num_of_epoch(plan: Plan, epoch: int) -> int:
    """The number of an epoch's micro-batches, of training and validation, on all ranks."""
    num_steps = plan.training_of(epoch).num_delivered
    if plan.has_val(epoch):
        num_steps += plan.val_steps
    return num_steps * plan.config.per_step


def cpu_kind() -> str:
    """The kind of this machine's CPU: on others torch may round in other ways."""
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"


class DigestLog(Observer):
    """Writes one rank's part of the record. It never ends a run: a failure to write is one warning.

    Args:
        folder: the run's folder, which all ranks share; None = there is none.
        plan: the run's plan.
        record: what decides the stream, see `opened.settings_record`.
        rank, world_size: number of this rank, and W.
        device: where its batches are.

    Raises:
        ConfigError: there is no folder.
    """

    def __init__(
        self,
        folder: RunFolder | None,
        plan: Plan,
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
        self._plan = plan.without_draws()
        self._rank = rank
        facts = {
            "plan": record["plan"],
            "rank": rank,
            "workers": world_size,
            "device": device.type,
            "cpu": cpu_kind(),
        }
        self._start = {"kind": "start", **facts, "seal": sealed(record, facts)}
        self._epoch = -1
        self._ended = set[Split]()  # splits whose last micro-batch was handed out
        self._lines = list[str]()
        self._counts = dict[str, int]()
        self._is_synced = True
        # In object storage a file is written as a whole.
        self._content = b""
        self._flushed_at = 0.0
        self._one_by_one = threading.RLock()
        self._has_warned = False

    def add(self, batch: Batch) -> None:
        """Record a batch that is handed out."""
        position = batch.position
        with self._one_by_one:
            self._turn_to(position.epoch)
            self._lines.append(
                _line(position, batch.stream_hash.hex(), batch.finished_hash.hex())
            )
            flush_s = _FLUSH_S if self._is_local else _FLUSH_REMOTE_S
            if batch.ends_split:
                self._ended.add(position.split)
                self._end_part()
            elif time.monotonic() - self._flushed_at > flush_s:
                self.flush()

    def leave(self, epoch: int, splits: set[Split]) -> None:
        """The loop begins the next epoch; note it if it has left this one before the end of its splits."""
        with self._one_by_one:
            self._turn_to(epoch)
            if not splits <= self._ended:
                self._lines.append('{"kind": "left"}\n')
                self.flush()

    def recorded(self, kind: str, line: str, values: Mapping[str, Any]) -> None:
        """Write all lines before rank 0 records the same steps in metrics.jsonl, so that these never end later."""
        if self._is_local:
            self.flush()

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
        with self._one_by_one, self._best_effort():
            if not self._lines and (self._is_synced or not synced):
                return
            self._flushed_at = time.monotonic()
            self._append("".join(self._lines).encode(), synced)
            self._counts[str(self._epoch)] += len(self._lines)
            self._lines.clear()
            counts = json.dumps(self._counts)
            path = f"{self._folder}/count-{self._rank:04d}.json"
            if self._is_local:
                # a crash leaves the old or the new one
                new = Path(f"{path}.new")
                new.write_text(counts)
                new.replace(path)
            else:
                with without_retries():
                    write_synced(self._filesystem, path, counts.encode())

    def _append(self, lines: bytes, synced: bool) -> None:
        """Append lines to the epoch's file; in object storage it is written as a whole."""
        if self._is_local:
            path = Path(self._path)
            path.parent.mkdir(parents=True, exist_ok=True)
            append_whole(path, lines, synced)
            self._is_synced = synced
        else:
            with without_retries():
                write_synced(self._filesystem, self._path, self._content + lines)
            self._content += lines

    @property
    def _path(self) -> str:
        return f"{self._folder}/epoch-{self._epoch:04d}-rank-{self._rank:04d}.jsonl"

    def _turn_to(self, epoch: int) -> None:
        """Write what is left of another epoch, and begin or continue the file of this one."""
        if epoch == self._epoch:
            return
        self.flush(synced=True)
        self._lines.clear()
        self._epoch = epoch
        self._ended.clear()
        self._content = b""
        with self._best_effort():
            if not self._counts:
                path = f"{self._folder}/count-{self._rank:04d}.json"
                self._counts |= json.loads(_read(self._filesystem, path) or b"{}")
            self._content = _read(self._filesystem, self._path)
        # A machine that was lost may have lost lines, too: those that are there count.
        self._counts[str(epoch)] = self._content.count(b"\n")
        if self._content and not self._content.endswith(b"\n"):
            self._content += b"\n"
        self._lines.append(json.dumps({**self._start, "time": time.time()}) + "\n")

    def _end_part(self) -> None:
        """This rank has ended a part of the epoch: write the epoch's root if no micro-batch is missing."""
        self.flush(synced=True)
        with self._best_effort():
            folder = (self._filesystem, self._folder)
            record = read_epoch(folder, self._epoch, self._start["plan"])
            num = len(record.recorded)
            root = record.computed_root()
            is_complete = num == num_of_epoch(self._plan, self._epoch)
            if is_complete and root not in record.roots:
                line = {"kind": "root", "micro_batches": num, "root": root}
                self._lines.append(json.dumps(line) + "\n")
                self.flush(synced=True)

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


def _read(filesystem: pyarrow.fs.FileSystem, path: str) -> bytes:
    """The content of a file; empty if there is none."""
    with errors_as(ConfigError, f"{path} cannot be read"):
        try:
            with open_input(filesystem, path) as file:
                return file.read()
        except FileNotFoundError:
            return b""


def recorded_files(folder: RunFolder) -> dict[tuple[int, int], str]:
    """The files of a folder of digests, in order: (epoch, rank) → path; empty where there is none."""
    matches = _files(folder, _FILE)
    return {(int(match[1]), int(match[2])): path for match, path in matches}


def recorded_counts(folder: RunFolder) -> dict[int, dict[int, int]]:
    """Return the number of lines that each rank has written: rank → epoch → number."""
    counts = dict[int, dict[int, int]]()
    for match, path in _files(folder, _COUNTS):
        of_rank = json.loads(_read(folder[0], path))
        counts[int(match[1])] = {int(key): int(of_rank[key]) for key in of_rank}
    return counts


def _files(folder: RunFolder, name: re.Pattern[str]) -> list[tuple[re.Match[str], str]]:
    """The files of a folder whose names match, in order, with their paths."""
    filesystem, path = folder
    with errors_as(ConfigError, f"{path} cannot be read"):
        selector = pyarrow.fs.FileSelector(path, allow_not_found=True)
        paths = sorted(info.path for info in filesystem.get_file_info(selector))
    matches = ((name.fullmatch(path.rpartition("/")[2]), path) for path in paths)
    return [(match, path) for match, path in matches if match]


def read_epoch(folder: RunFolder, epoch: int, fingerprint: str) -> EpochRecord:
    """Read all ranks' record of an epoch, in a folder of digests.

    Args:
        fingerprint: the plan's; lines of other plans do not count.

    Raises:
        ConfigError: a file cannot be read.
    """
    record = EpochRecord()
    for (number, rank), path in recorded_files(folder).items():
        if number != epoch:
            continue
        content = _read(folder[0], path)
        record.num_lines[rank] = content.count(b"\n")
        start: dict[str, Any] = {}
        for line in objects_of(content):
            if line.get("kind") == "start":
                start = line
                record.starts.append(start)
            elif start.get("plan") == fingerprint:
                _add(record, line, epoch, start)
    for several in record.recorded.values():
        several.sort(key=lambda hashes: time_of(hashes.start))
    return record


def _add(
    record: EpochRecord, line: dict[str, Any], epoch: int, start: dict[str, Any]
) -> None:
    """Add a line to a record, unless it is none of the epoch's."""
    kind = line.get("kind")
    place = place_in(line.get("micro_batch"))
    if kind == "left":
        record.was_left = True
    elif kind == "root":
        record.roots.add(str(line.get("root")))
    elif place and place.epoch == epoch:
        stream = str(line.get("hash"))
        finished = str(line.get("finished", ""))
        if _HASH.fullmatch(stream) and (not finished or _HASH.fullmatch(finished)):
            hashes = Hashes(stream, finished, start)
            record.recorded.setdefault(place, []).append(hashes)


def time_of(start: dict[str, Any]) -> float:
    """The time of the line of a start, seconds of Unix time."""
    started = start.get("time")
    return started if isinstance(started, int | float) else 0.0


def place_in(name: Any) -> MicroBatchId | None:
    """The place of a micro-batch by its name, train-e0000-s000012-m000; None = it does not name one."""
    match = _PLACE.fullmatch(str(name))
    if match is None:
        return None
    split: Split = "train" if match[1] == "train" else "val"
    return MicroBatchId(split, *map(int, match.groups()[1:]))
