"""The record of what each rank handed out: hashes of its micro-batches, and a root for each epoch.

    RUN/digests/epoch-0003-rank-0001.jsonl      one file for each epoch and rank, which only grows:

    {"kind": "start", "plan": …, "rank": …, "workers": …, …}        a rank begins, maybe again
    {"micro_batch": "train-e0003-s000000-m001", "hash": …, "finished": …}
    {"kind": "left"}                                                the loop has left the epoch before its end
    {"kind": "root", "micro_batches": n, "root": …, "finished_root": …}

The hashes are those of `raypipe.streaming.record.hashes`. The roots are those of
`raypipe.streaming.record.merkle` over all ranks' micro-batches in the plan's order, so they do not depend on W. A
rank that ends its part of an epoch reads the files of all ranks; the one that ends last finds all micro-batches,
and writes the root. No rank waits for another.

Steps that a run does over again are recorded again, the same. A line that a crash cut off does not count: its step
comes after the last checkpoint, before which all lines are written.
"""

from __future__ import annotations

import contextlib
import json
import logging
import platform
import re
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

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
from raypipe.streaming.record import merkle

logger = logging.getLogger(__name__)

DIGESTS = "digests"
_FILE = re.compile(r"epoch-(\d{4,})-rank-(\d{4,})\.jsonl")
_PLACE = re.compile(r"(train|val)-e(\d{4,})-s(\d{6,})-m(\d{3,})")
_HASH = re.compile(r"[0-9a-f]{32}")
_ROOT = re.compile(r"[0-9a-f]{64}")
_FLUSH_S = 1.0
_FLUSH_REMOTE_S = (
    60.0  # in object storage each is a request, with all of the epoch's lines
)


class Hashes(NamedTuple):
    """The recorded hashes of a micro-batch, hexadecimal, see `raypipe.streaming.record.hashes`.

    Attributes:
        stream: as it reached the rank.
        finished: as the model got it; empty = not recorded.
    """

    stream: str
    finished: str = ""


class EpochRoot(NamedTuple):
    """The roots of an epoch, hexadecimal.

    Attributes:
        num_micro_batches: number of leaves of `root`.
        root: root over the hashes of the stream.
        finished_root: root over those of finished micro-batches; empty = there are none.
    """

    num_micro_batches: int
    root: str
    finished_root: str = ""


@dataclass
class EpochRecord:
    """Record of an epoch, of all ranks.

    Attributes:
        hashes: the hashes by place, the newest of each.
        disagreeing: places with two different hashes, with those of the first.
        roots: roots that were recorded.
        was_left: whether the loop has left the epoch before its end.
        starts: facts about the starts that wrote it.
        num_foreign: micro-batches that were recorded under other plans, and do not count.
    """

    hashes: dict[MicroBatchId, Hashes] = field(default_factory=dict)
    disagreeing: dict[MicroBatchId, Hashes] = field(default_factory=dict)
    roots: list[EpochRoot] = field(default_factory=list)
    was_left: bool = False
    starts: list[dict[str, Any]] = field(default_factory=list)
    num_foreign: int = 0

    def leaves(self) -> list[tuple[MicroBatchId, bytes]]:
        """Return the places in the plan's order, with the content of each one's leaf."""
        return [
            (place, leaf_of(place, self.hashes[place].stream))
            for place in sorted(self.hashes, key=_order)
        ]

    def computed_root(self) -> EpochRoot:
        """The roots of the hashes."""
        return root_of(
            {
                _order(place): _leaves_of(str(place), hashes)
                for place, hashes in self.hashes.items()
            }
        )


def leaf_of(place: MicroBatchId | str, hash_hex: str) -> bytes:
    """The content of the leaf of a micro-batch, or of its name, in the tree of its epoch."""
    return f"{place} {hash_hex}".encode()


Order = tuple[bool, int, int]
"""The order of an epoch's micro-batches in the plan: its training, then its validation."""
Leaves = tuple[bytes, bytes]
"""The contents of a micro-batch's leaves in the two trees of its epoch; the second is empty if it has none."""


def _order(place: MicroBatchId) -> Order:
    return place.split == "val", place.step, place.micro


def _leaves_of(name: str, hashes: Hashes) -> Leaves:
    of_finished = b""
    if hashes.finished:
        of_finished = leaf_of(name, hashes.finished)
    return leaf_of(name, hashes.stream), of_finished


def root_of(leaves: Mapping[Order, Leaves]) -> EpochRoot:
    """Return the roots of an epoch's leaves."""
    in_order = [leaves[order] for order in sorted(leaves)]
    of_stream = [leaf for leaf, _ in in_order]
    of_finished = [leaf for _, leaf in in_order if leaf]
    return EpochRoot(
        len(of_stream),
        merkle.root(of_stream).hex(),
        merkle.root(of_finished).hex() if of_finished else "",
    )


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
        facts: more facts for the lines of a start, besides the plan, the rank and the time.
    """

    def __init__(
        self, folder: Folder, plan: Plan, rank: int, facts: Mapping[str, Any]
    ) -> None:
        self._filesystem, run = folder
        self._folder = f"{run}/{DIGESTS}"
        self._plan = plan.without_draws()
        self._rank = rank
        self._start = {"plan": plan.order_fingerprint, "rank": rank, **facts}
        self._is_local = isinstance(self._filesystem, pyarrow.fs.LocalFileSystem)
        self._epoch = -1
        self._ended = set[Split]()  # splits whose last micro-batch was handed out
        # What this rank has added to the epoch since it began. Python's collector soon leaves plain tuples out.
        self._leaves = dict[Order, Leaves]()
        self._root: EpochRoot | None = None  # the one that was written last
        self._is_synced = True
        self._lines = list[str]()
        # Lines are made of them once a second, in a loop: one at a time it takes longer.
        self._added = list[tuple[MicroBatchId, bytes, bytes]]()
        # In object storage a file is written as a whole.
        self._content = b""
        self._flushed_at = 0.0
        self._one_by_one = threading.RLock()
        self._has_warned = False

    @staticmethod
    def of(
        folder: Folder | None,
        plan: Plan,
        rank: int,
        world_size: int,
        device: torch.device,
    ) -> DigestLog:
        """Return a rank's record, with the facts that finished micro-batches depend on.

        Raises:
            ConfigError: there is no folder.
        """
        if folder is None:
            raise ConfigError(
                "log_digest writes into the run's folder: name one, raypipe.loader(spec, run_dir=…)"
            )
        facts = {"workers": world_size, "device": device.type, "cpu": cpu_kind()}
        return DigestLog(folder, plan, rank, facts)

    def add(self, batch: Batch) -> None:
        """Record a batch that is handed out."""
        position = batch.position
        with self._one_by_one:
            if position.epoch != self._epoch:
                self._turn_to(position.epoch)
            self._added.append((position, batch.stream_hash, batch.finished_hash))
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
                self._write_added()
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
        """Write the lines so far.

        Args:
            synced: also wait until a local disk has them.
        """
        with self._one_by_one:
            self._write_added()
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
                self._lines.clear()
            self._flushed_at = time.monotonic()

    def _write_added(self) -> None:
        """Make lines of the micro-batches that were added."""
        for place, stream, finished in self._added:
            name = str(place)
            hashes = Hashes(stream.hex(), finished.hex())
            self._leaves[_order(place)] = _leaves_of(name, hashes)
            line = f'{{"micro_batch": "{name}", "hash": "{hashes.stream}"'
            if finished:
                line += f', "finished": "{hashes.finished}"'
            self._lines.append(line + "}\n")
        self._added.clear()

    @property
    def _path(self) -> str:
        return f"{self._folder}/epoch-{self._epoch:04d}-rank-{self._rank:04d}.jsonl"

    def _turn_to(self, epoch: int) -> None:
        """Write what is left of an epoch, and begin or continue the file of another."""
        self.flush(synced=True)
        self._lines.clear()
        self._epoch = epoch
        self._ended.clear()
        self._leaves = {}
        self._root = None
        self._content = b""
        if not self._is_local:
            with (
                self._best_effort(),
                contextlib.suppress(FileNotFoundError),
                open_input(self._filesystem, self._path) as file,
            ):
                self._content = file.read()
            if self._content and not self._content.endswith(b"\n"):
                self._content += b"\n"
        start = {"kind": "start", **self._start, "time": time.time()}
        self._lines.append(json.dumps(start) + "\n")

    def _end_part(self) -> None:
        """This rank has ended a part of the epoch: write the epoch's root if no micro-batch is missing."""
        num = num_of_epoch(self._plan, self._epoch)
        self._write_added()
        if len(self._leaves) == num:
            self._add_root(root_of(self._leaves))
            self.flush(synced=True)
            return
        self.flush(synced=True)
        with self._best_effort():
            folder = (self._filesystem, self._folder)
            record = read_epoch(folder, self._epoch, self._plan.order_fingerprint)
            if len(record.hashes) < num:
                return
            root = record.computed_root()
            if root not in record.roots:
                self._add_root(root)
                self.flush(synced=True)

    def _add_root(self, root: EpochRoot) -> None:
        if root == self._root:
            return
        self._root = root
        line = {
            "kind": "root",
            "micro_batches": root.num_micro_batches,
            "root": root.root,
            "finished_root": root.finished_root,
        }
        self._lines.append(json.dumps(line) + "\n")

    @contextlib.contextmanager
    def _best_effort(self) -> Iterator[None]:
        try:
            yield
        except (pa.ArrowException, OSError, RaypipeError) as error:
            if not self._has_warned:
                text = "hashes cannot be recorded in %s: %s; the run goes on, and its record has gaps"
                logger.warning(text, self._folder, error)
            self._has_warned = True


def recorded_epochs(folder: Folder) -> dict[int, list[str]]:
    """The epochs of a folder of digests, with the names of their files, in order; empty where there is none."""
    filesystem, path = folder
    with errors_as(ConfigError, f"{path} cannot be read"):
        infos = filesystem.get_file_info(
            pyarrow.fs.FileSelector(path, allow_not_found=True)
        )
    epochs = dict[int, list[str]]()
    for name in sorted(info.base_name for info in infos):
        if match := _FILE.fullmatch(name):
            epochs.setdefault(int(match[1]), []).append(name)
    return dict(sorted(epochs.items()))


def read_epoch(folder: Folder, epoch: int, fingerprint: str) -> EpochRecord:
    """Read all ranks' record of an epoch, in a folder of digests.

    Args:
        fingerprint: the plan's; other plans' lines do not count.

    Raises:
        ConfigError: a file cannot be read.
    """
    filesystem, path = folder
    record = EpochRecord()
    times = dict[MicroBatchId, float]()
    for name in recorded_epochs(folder).get(epoch, []):
        with (
            errors_as(ConfigError, f"{path}/{name} cannot be read"),
            open_input(filesystem, f"{path}/{name}") as file,
        ):
            content = file.read()
        _read_lines(content, epoch, fingerprint, record, times)
    return record


def _read_lines(
    content: bytes,
    epoch: int,
    fingerprint: str,
    record: EpochRecord,
    times: dict[MicroBatchId, float],
) -> None:
    """Add the lines of a file to a record; other lines are left out.

    Args:
        times: when the start of each place's hashes was.
    """
    is_of_plan = False
    started = 0.0
    # The last line counts once it has its end.
    for text in content.split(b"\n")[:-1]:
        try:
            line = json.loads(text)
        except (ValueError, RecursionError):
            continue
        if not isinstance(line, dict):
            continue
        kind = line.get("kind")
        if kind == "start":
            is_of_plan = line.get("plan") == fingerprint
            started = _number(line.get("time"))
            if is_of_plan:
                record.starts.append(line)
        elif not is_of_plan:
            record.num_foreign += "micro_batch" in line
        elif kind == "left":
            record.was_left = True
        elif kind == "root":
            if (root := _root_of(line)) and root not in record.roots:
                record.roots.append(root)
        elif (found := _hashes_of(line)) and found[0].epoch == epoch:
            _put(record, times, *found, started)


def _put(
    record: EpochRecord,
    times: dict[MicroBatchId, float],
    place: MicroBatchId,
    hashes: Hashes,
    started: float,
) -> None:
    """Add the hashes of a place; if several differ, the newest count."""
    before = record.hashes.get(place)
    if before is not None and before.stream != hashes.stream:
        record.disagreeing[place] = before
    if before is None or started >= times[place]:
        record.hashes[place] = hashes
        times[place] = started


def _hashes_of(line: dict[str, Any]) -> tuple[MicroBatchId, Hashes] | None:
    place = _place_of(line.get("micro_batch"))
    stream = line.get("hash")
    finished = line.get("finished", "")
    if place is None or not _is_hex(stream, _HASH):
        return None
    if finished != "" and not _is_hex(finished, _HASH):
        return None
    return place, Hashes(stream, finished)


def _root_of(line: dict[str, Any]) -> EpochRoot | None:
    num = line.get("micro_batches")
    root = line.get("root")
    finished = line.get("finished_root", "")
    if not isinstance(num, int) or not _is_hex(root, _ROOT):
        return None
    return EpochRoot(num, root, finished if _is_hex(finished, _ROOT) else "")


def _place_of(name: Any) -> MicroBatchId | None:
    """The place of a micro-batch by its name; None = it does not name one."""
    match = _PLACE.fullmatch(name) if isinstance(name, str) else None
    if match is None:
        return None
    split: Split = "train" if match[1] == "train" else "val"
    return MicroBatchId(split, *map(int, match.groups()[1:]))


def _is_hex(value: Any, kind: re.Pattern[str]) -> TypeGuard[str]:
    return isinstance(value, str) and kind.fullmatch(value) is not None


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else 0.0
