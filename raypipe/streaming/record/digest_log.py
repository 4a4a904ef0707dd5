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
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.fs
import torch

from raypipe.device.prefetcher import Batch
from raypipe.errors import ConfigError, RaypipeError
from raypipe.metrics.observer import Observer
from raypipe.metrics.records import Folder, append_whole
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


class RecordedStart(NamedTuple):
    """A line that says that a rank begins.

    Attributes:
        rank: the rank, as the file's name has it.
        seal: see `raypipe.streaming.record.opened.sealed`.
        facts: see `FACTS`.
        time: when, seconds of Unix time.
    """

    rank: int
    seal: str
    facts: dict[str, Any]
    time: float


class Hashes(NamedTuple):
    """The recorded hashes of a micro-batch, hexadecimal.

    Attributes:
        stream: as it reached the rank.
        finished: as the model got it; empty = not recorded.
        start: the start that recorded it.
    """

    stream: str
    finished: str
    start: RecordedStart


@dataclass
class EpochRecord:
    """Record of an epoch, of all ranks.

    Attributes:
        hashes: the hashes by place, the newest of each.
        twice: places that one start, or two, have recorded with different hashes: each with both starts.
        roots: number of micro-batches and root, as they were recorded.
        was_left: whether the loop has left the epoch before its end.
        starts: the starts that wrote it.
        num_lines: number of lines of each rank's file.
    """

    hashes: dict[MicroBatchId, Hashes] = field(default_factory=dict)
    twice: dict[MicroBatchId, list[RecordedStart]] = field(default_factory=dict)
    roots: list[tuple[int, str]] = field(default_factory=list)
    was_left: bool = False
    starts: list[RecordedStart] = field(default_factory=list)
    num_lines: dict[int, int] = field(default_factory=dict)

    def computed_root(self) -> tuple[int, str]:
        """The number of micro-batches, and 64 hex digits over their sorted lines."""
        lines = sorted(
            _line(place, hashes.stream, hashes.finished)
            for place, hashes in self.hashes.items()
        )
        digest = hashlib.blake2b("".join(lines).encode(), digest_size=32)
        return len(lines), digest.hexdigest()


def order_of(place: MicroBatchId) -> tuple[bool, int, int]:
    """The order of an epoch's micro-batches in the plan: its training, then its validation."""
    return place.split == "val", place.step, place.micro


def steps_of_epoch(plan: Plan, epoch: int) -> dict[Split, range]:
    """The steps of an epoch's training, and of its validation if it has one."""
    steps: dict[Split, range] = {"train": range(plan.steps_per_epoch)}
    if plan.has_val(epoch):
        steps["val"] = range(plan.val_steps)
    return steps


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
        folder: the run's folder, which all ranks share.
        plan: the run's plan.
        rank: number of this rank.
        start: the line of a start: its seal and facts.
    """

    def __init__(
        self, folder: Folder, plan: Plan, rank: int, start: Mapping[str, Any]
    ) -> None:
        self._filesystem, run = folder
        self._folder = f"{run}/{DIGESTS}"
        self._plan = plan.without_draws()
        self._rank = rank
        self._start = {"kind": "start", **start}
        self._is_local = isinstance(self._filesystem, pyarrow.fs.LocalFileSystem)
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

    @staticmethod
    def of(
        folder: Folder | None,
        plan: Plan,
        record: Mapping[str, Any],
        rank: int,
        world_size: int,
        device: torch.device,
    ) -> DigestLog:
        """Return a rank's record.

        Args:
            record: what decides the stream, see `opened.settings_record`.

        Raises:
            ConfigError: there is no folder.
        """
        if folder is None:
            raise ConfigError(
                "log_digest writes into the run's folder: name one, raypipe.loader(spec, run_dir=…)"
            )
        facts = {
            "plan": record["plan"],
            "rank": rank,
            "workers": world_size,
            "device": device.type,
            "cpu": cpu_kind(),
        }
        return DigestLog(folder, plan, rank, {**facts, "seal": sealed(record, facts)})

    def add(self, batch: Batch) -> None:
        """Record a batch that is handed out."""
        position = batch.position
        with self._one_by_one:
            if position.epoch != self._epoch:
                self._turn_to(position.epoch)
            self._lines.append(
                _line(position, batch.stream_hash.hex(), batch.finished_hash.hex())
            )
            if batch.ends_split:
                self._ended.add(position.split)
                self._end_part()
            elif time.monotonic() - self._flushed_at > self._flush_s:
                self.flush()

    @property
    def _flush_s(self) -> float:
        return _FLUSH_S if self._is_local else _FLUSH_REMOTE_S

    def leave(self, epoch: int, splits: set[Split]) -> None:
        """The loop begins the next epoch; note it if it has left this one before the end of its splits."""
        with self._one_by_one:
            if epoch != self._epoch:
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
        with self._one_by_one:
            if not self._lines and (self._is_synced or not synced):
                return
            lines = "".join(self._lines).encode()
            with self._best_effort():
                if self._is_local:
                    path = Path(self._path)
                    path.parent.mkdir(parents=True, exist_ok=True)
                    append_whole(path, lines, synced)
                    self._is_synced = synced
                else:
                    with without_retries():
                        write_synced(
                            self._filesystem, self._path, self._content + lines
                        )
                    self._content += lines
                self._counts[str(self._epoch)] += len(self._lines)
                self._lines.clear()
                self._write_counts()
            self._flushed_at = time.monotonic()

    def _write_counts(self) -> None:
        path = f"{self._folder}/count-{self._rank:04d}.json"
        text = json.dumps(self._counts)
        if self._is_local:
            # a crash leaves the old or the new one
            new = Path(f"{path}.new")
            new.write_text(text)
            new.replace(path)
        else:
            with without_retries():
                write_synced(self._filesystem, path, text.encode())

    @property
    def _path(self) -> str:
        return f"{self._folder}/epoch-{self._epoch:04d}-rank-{self._rank:04d}.jsonl"

    def _turn_to(self, epoch: int) -> None:
        """Write what is left of an epoch, and begin or continue the file of another."""
        self.flush(synced=True)
        self._lines.clear()
        self._epoch = epoch
        self._ended.clear()
        content = b""
        with self._best_effort():
            if not self._counts:
                counts = json.loads(
                    _read(
                        self._filesystem, f"{self._folder}/count-{self._rank:04d}.json"
                    )
                    or b"{}"
                )
                self._counts = {str(name): int(num) for name, num in counts.items()}
            content = _read(self._filesystem, self._path)
        # A machine that was lost may have lost lines, too: those that are there count.
        self._counts[str(epoch)] = content.count(b"\n")
        if not self._is_local:
            self._content = content
            if content and not content.endswith(b"\n"):
                self._content += b"\n"
        self._lines.append(json.dumps({**self._start, "time": time.time()}) + "\n")

    def _end_part(self) -> None:
        """This rank has ended a part of the epoch: write the epoch's root if no micro-batch is missing."""
        self.flush(synced=True)
        with self._best_effort():
            folder = (self._filesystem, self._folder)
            record = read_epoch(folder, self._epoch, self._start["plan"])
            num, root = record.computed_root()
            is_complete = num == num_of_epoch(self._plan, self._epoch)
            if is_complete and (num, root) not in record.roots:
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
    try:
        with open_input(filesystem, path) as file:
            return file.read()
    except FileNotFoundError:
        return b""


def recorded_epochs(folder: Folder) -> dict[int, dict[int, str]]:
    """The epochs of a folder of digests, in order: rank → path of its file; empty where there is none."""
    epochs = dict[int, dict[int, str]]()
    for name, path in _files(folder):
        if match := _FILE.fullmatch(name):
            epochs.setdefault(int(match[1]), {})[int(match[2])] = path
    return dict(sorted(epochs.items()))


def recorded_counts(folder: Folder) -> dict[int, dict[int, int]]:
    """Return the number of lines that each rank has written: rank → epoch → number.

    Raises:
        ConfigError: a file cannot be read, or is damaged.
    """
    counts = dict[int, dict[int, int]]()
    for name, path in _files(folder):
        if match := _COUNTS.fullmatch(name):
            with errors_as(ConfigError, f"{path} cannot be read"):
                content = _read(folder[0], path)
            try:
                of_rank = {
                    int(key): int(num) for key, num in json.loads(content).items()
                }
            except (ValueError, AttributeError, TypeError, RecursionError) as error:
                raise ConfigError(f"{path} is damaged: {error}") from None
            counts[int(match[1])] = of_rank
    return counts


def _files(folder: Folder) -> list[tuple[str, str]]:
    """The names and paths of a folder's files, in order."""
    filesystem, path = folder
    with errors_as(ConfigError, f"{path} cannot be read"):
        selector = pyarrow.fs.FileSelector(path, allow_not_found=True)
        infos = filesystem.get_file_info(selector)
    return sorted((info.base_name, info.path) for info in infos)


def read_epoch(folder: Folder, epoch: int, fingerprint: str) -> EpochRecord:
    """Read all ranks' record of an epoch, in a folder of digests.

    Args:
        fingerprint: the plan's; lines of other plans do not count.

    Raises:
        ConfigError: a file cannot be read.
    """
    record = EpochRecord()
    for rank, path in recorded_epochs(folder).get(epoch, {}).items():
        with errors_as(ConfigError, f"{path} cannot be read"):
            content = _read(folder[0], path)
        _read_lines(content, epoch, rank, fingerprint, record)
    return record


def _read_lines(
    content: bytes, epoch: int, rank: int, fingerprint: str, record: EpochRecord
) -> None:
    """Add the lines of a file to a record; other lines are left out."""
    start = RecordedStart(rank, "", {}, 0.0)
    # The last line counts once it has its end.
    texts = content.split(b"\n")[:-1]
    record.num_lines[rank] = len(texts)
    for text in texts:
        try:
            line = json.loads(text)
        except (ValueError, RecursionError):
            continue
        if not isinstance(line, dict):
            continue
        kind = line.get("kind")
        if kind == "start":
            start = _start_of(line, rank)
            record.starts.append(start)
        elif start.facts.get("plan") != fingerprint:
            continue
        elif kind == "left":
            record.was_left = True
        elif kind == "root":
            root = (line.get("micro_batches", 0), str(line.get("root")))
            if root not in record.roots:
                record.roots.append(root)
        elif (place := place_in(line.get("micro_batch"))) and place.epoch == epoch:
            hashes = [line.get("hash"), line.get("finished", "")]
            if _is_hash(hashes[0]) and (hashes[1] == "" or _is_hash(hashes[1])):
                _put(record, place, Hashes(hashes[0], hashes[1], start))


def _start_of(line: dict[str, Any], rank: int) -> RecordedStart:
    facts = {name: line.get(name) for name in FACTS}
    started = line.get("time")
    if not isinstance(started, int | float):
        started = 0.0
    return RecordedStart(rank, str(line.get("seal")), facts, started)


def _put(record: EpochRecord, place: MicroBatchId, hashes: Hashes) -> None:
    """Add the hashes of a place; if several differ, the newest start's count."""
    before = record.hashes.get(place)
    if before is not None and not _agree(before, hashes):
        starts = record.twice.setdefault(place, [])
        starts += [before.start, hashes.start]
    if before is None or hashes.start.time >= before.start.time:
        record.hashes[place] = hashes


def _agree(one: Hashes, other: Hashes) -> bool:
    """Return whether two records of a place are the same, as far as both have it."""
    if one.start is not other.start and not (one.finished and other.finished):
        return one.stream == other.stream
    return one[:2] == other[:2]


def place_in(name: Any) -> MicroBatchId | None:
    """The place of a micro-batch by its name, train-e0000-s000012-m000; None = it does not name one."""
    match = _PLACE.fullmatch(name) if isinstance(name, str) else None
    if match is None:
        return None
    split: Split = "train" if match[1] == "train" else "val"
    return MicroBatchId(split, *map(int, match.groups()[1:]))


def _is_hash(value: Any) -> bool:
    return isinstance(value, str) and _HASH.fullmatch(value) is not None
