"""The checkpoints of a run: written whole and synced, and not trusted before they were read.

    RUN/checkpoint_EEEE_SSSSSSS_TOKEN/    epoch and step of the cursor
        state.pt           what the trainer keeps: model, optimizer, …
        cursor.json        where the run stands
        checkpoint.json    sizes and hashes of these files, and the run's figures; written last of all

A folder without checkpoint.json was cut off while it was written. No other file lists the checkpoints, so none can
contradict them.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import secrets
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
import pyarrow.fs

from raypipe.errors import ConfigError, CursorError
from raypipe.plan.cursor import CURSOR_FILE, Cursor
from raypipe.storage.filesystem import explained, one_line, open_filesystem, open_input
from raypipe.storage.whole_file import sync_folder, synced_output

STATE_FILE = "state.pt"
_MANIFEST = "checkpoint.json"
_DAMAGED = "damaged.json"
"""What the manifest of a checkpoint is called once a resume has found it damaged."""
_FOLDER = re.compile(r"checkpoint_(\d{4,})_(\d{7,})_[0-9a-f]{8}")
_CUT_OFF = "it was cut off while it was written"
_CHUNK = 1 << 22  # bytes read at a time
_MAX_JSON = 1 << 20


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint of a run, in its folder `name`, that was read whole, and found as it was written."""

    run_uri: str
    name: str
    cursor: Cursor

    @contextlib.contextmanager
    def state(self) -> Iterator[Path]:
        """state.pt as a file of this machine, within."""
        filesystem, path = open_filesystem(self.run_uri)
        source = f"{path}/{self.name}/{STATE_FILE}"
        if isinstance(filesystem, pyarrow.fs.LocalFileSystem):
            yield Path(source)
            return
        with tempfile.TemporaryDirectory(prefix="raypipe-checkpoint-") as folder:
            with explained(ConfigError, f"checkpoint {self.name} of {self.run_uri} cannot be read"):
                pyarrow.fs.copy_files(source, f"{folder}/{STATE_FILE}", source_filesystem=filesystem)
            yield Path(folder) / STATE_FILE


@dataclass
class Found:
    """What there is to resume from.

    Attributes:
        checkpoint: the newest that is whole and of this plan; None = the run starts from its beginning.
        passed_over: of those that would be newer, by name, what is wrong with them.
        damaged: names of those which have a manifest that is not true of them.
    """

    checkpoint: Checkpoint | None = None
    passed_over: dict[str, str] = field(default_factory=dict)
    damaged: list[str] = field(default_factory=list)


class _DamageError(Exception):
    """Why a checkpoint is not what its manifest says."""


def write_checkpoint(
    run_uri: str, cursor: Cursor, save: Callable[[IO[bytes]], None], metrics: dict[str, Any]
) -> str:
    """Write a checkpoint and, once it is on the disk, remove all that are older than the one before it.

    Args:
        run_uri: the run's folder.
        cursor: where the run stands.
        save: writes the state to a file.
        metrics: the figures of the run that far.

    Returns:
        The name of its folder.

    Raises:
        ConfigError: it cannot be written; nothing is left of it then, and the others are as they were.
    """
    name = f"checkpoint_{cursor.epoch:04d}_{cursor.step:07d}_{secrets.token_hex(4)}"
    filesystem, path = open_filesystem(run_uri)
    folder = f"{path}/{name}"
    with explained(ConfigError, f"checkpoint {name} of {run_uri} cannot be written (mend that, and --resume)"):
        try:
            filesystem.create_dir(folder, recursive=True)
            writers = {STATE_FILE: save, CURSOR_FILE: lambda file: file.write(cursor.to_json().encode())}
            files = {file: _written(filesystem, f"{folder}/{file}", write) for file, write in writers.items()}
            sync_folder(filesystem, folder)
            with synced_output(filesystem, f"{folder}/{_MANIFEST}") as file:
                file.write(json.dumps({"files": files, "metrics": metrics}).encode())
            sync_folder(filesystem, folder)
            sync_folder(filesystem, path)
        except BaseException:
            with contextlib.suppress(pa.ArrowException, OSError):
                filesystem.delete_dir(folder)
            raise
    _remove_old(filesystem, path, name)
    return name


def _written(
    filesystem: pyarrow.fs.FileSystem, path: str, write: Callable[[IO[bytes]], Any]
) -> dict[str, int | str]:
    """Write a file; returns its size and hash."""
    with synced_output(filesystem, path) as file:
        hashed = _Hashed(file)
        try:
            write(hashed)  # type: ignore[arg-type]
        except Exception:
            if hashed.error:  # torch.save tells of its own surprise instead
                raise hashed.error from None
            raise
    return {"bytes": hashed.num_bytes, "blake2b": hashed.hash.hexdigest()}


class _Hashed:
    """A file to write to that knows what was written."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self.hash, self.num_bytes = file, _new_hash(), 0
        self.error: OSError | None = None

    def write(self, data: bytes) -> int:
        try:
            self._file.write(data)
        except OSError as error:
            self.error = error
            raise
        self.hash.update(data)
        self.num_bytes += memoryview(data).nbytes
        return memoryview(data).nbytes

    def flush(self) -> None:
        pass


def _new_hash() -> hashlib.blake2b:
    return hashlib.blake2b(digest_size=16)


def _remove_old(filesystem: pyarrow.fs.FileSystem, path: str, name: str) -> None:
    """Keep a checkpoint and the whole one before it. One of a later place, passed over by a resume, stays."""
    with contextlib.suppress(pa.ArrowException, OSError):  # tried again at the next one
        older = [other for other in _names(filesystem, path) if _place(other) <= _place(name) and other != name]
        whole = (
            number
            for number, other in enumerate(older)
            if filesystem.get_file_info(f"{path}/{other}/{_MANIFEST}").type == pyarrow.fs.FileType.File
        )
        for other in older[next(whole, len(older)) + 1 :]:
            filesystem.delete_dir(f"{path}/{other}")


def find_newest(run_uri: str, check: Callable[[Cursor], None]) -> Found:
    """Read the checkpoints of a run, the newest first, up to one that is whole. Changes nothing.

    Args:
        run_uri: the run's folder.
        check: raises CursorError for a cursor that is not of this run's plan.

    Raises:
        ConfigError: there are checkpoints, and all of them are damaged.
        CursorError: all that are whole are of another plan.
    """
    with explained(ConfigError, f"the checkpoints of {run_uri} cannot be read"):
        filesystem, path = open_filesystem(run_uri)
        names = _names(filesystem, path)
    found, foreign = Found(), None
    for name in names:
        try:
            checkpoint = _read(run_uri, filesystem, path, name)
            if checkpoint is None:
                found.passed_over[name] = _CUT_OFF
                continue
            check(checkpoint.cursor)
        except CursorError as error:
            foreign = foreign or error
            found.passed_over[name] = str(error)
        except _DamageError as damage:
            found.damaged.append(name)
            found.passed_over[name] = str(damage)
        except (pa.ArrowException, OSError) as error:
            found.passed_over[name] = one_line(error)
        else:
            found.checkpoint = checkpoint
            return found
    if foreign:
        raise foreign
    if any(reason != _CUT_OFF for reason in found.passed_over.values()):
        reasons = "; ".join(f"{name}: {reason}" for name, reason in found.passed_over.items())
        raise ConfigError(
            f"no checkpoint of {run_uri} can be read ({reasons}): put one back from a copy, or start a new run"
        )
    return found


def set_aside(run_uri: str, found: Found) -> None:
    """Rename the manifests of damaged checkpoints, so that none counts as whole any more; all else stays."""
    with explained(ConfigError, f"the damaged checkpoints of {run_uri} cannot be set aside"):
        filesystem, path = open_filesystem(run_uri)
        for name in found.damaged:
            filesystem.move(f"{path}/{name}/{_MANIFEST}", f"{path}/{name}/{_DAMAGED}")


def has_checkpoints(run_uri: str) -> bool:
    """Whether a folder has checkpoints, be they whole or not."""
    filesystem, path = open_filesystem(run_uri)
    return bool(_names(filesystem, path))


def _names(filesystem: pyarrow.fs.FileSystem, path: str) -> list[str]:
    """Of the checkpoints' folders, the newest first."""
    selector = pyarrow.fs.FileSelector(path, allow_not_found=True)
    infos = [info for info in filesystem.get_file_info(selector) if info.type == pyarrow.fs.FileType.Directory]
    return sorted((i.base_name for i in infos if _FOLDER.fullmatch(i.base_name)), key=_place, reverse=True)


def _place(name: str) -> tuple[int, int]:
    match = _FOLDER.fullmatch(name)
    assert match is not None
    return int(match[1]), int(match[2])


def _read(run_uri: str, filesystem: pyarrow.fs.FileSystem, path: str, name: str) -> Checkpoint | None:
    """One checkpoint, checked byte by byte; None = it has no manifest."""
    folder = f"{path}/{name}"
    if filesystem.get_file_info(f"{folder}/{_MANIFEST}").type != pyarrow.fs.FileType.File:
        return None
    content = _content(filesystem, f"{folder}/{_MANIFEST}")
    try:
        files = json.loads(content)["files"]
        expected = {file: (files[file]["bytes"], files[file]["blake2b"]) for file in (STATE_FILE, CURSOR_FILE)}
    except (KeyError, TypeError, ValueError):
        raise _DamageError(f"its {_MANIFEST} is {'damaged' if content else 'empty'}") from None
    for file, (num_bytes, digest) in expected.items():
        _check_file(filesystem, f"{folder}/{file}", file, num_bytes, digest)
    try:
        cursor = Cursor.from_json(_content(filesystem, f"{folder}/{CURSOR_FILE}").decode(errors="replace"))
    except CursorError as error:
        raise _DamageError(str(error)) from error
    return Checkpoint(run_uri, name, cursor)


def _content(filesystem: pyarrow.fs.FileSystem, path: str) -> bytes:
    with open_input(filesystem, path) as file:
        return file.read(_MAX_JSON)


def _check_file(filesystem: pyarrow.fs.FileSystem, path: str, name: str, num_bytes: int, digest: str) -> None:
    info = filesystem.get_file_info(path)
    if info.type != pyarrow.fs.FileType.File:
        raise _DamageError(f"its {name} is missing")
    if info.size != num_bytes:
        raise _DamageError(f"its {name} has {info.size} bytes instead of {num_bytes}")
    found = _new_hash()
    with open_input(filesystem, path) as file:
        while chunk := file.read(_CHUNK):
            found.update(chunk)
    if found.hexdigest() != digest:
        raise _DamageError(f"the content of its {name} has changed since it was written")
