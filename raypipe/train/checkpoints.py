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
import io
import json
import re
import secrets
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.fs

from raypipe.errors import ConfigError, CursorError
from raypipe.plan.cursor import CURSOR_FILE, Cursor
from raypipe.storage.files import open_input, read_whole, sync_folder, write_synced
from raypipe.storage.filesystem import exists, explained, is_remote, join, open_filesystem
from raypipe.storage.patience import impatient

STATE_FILE = "state.pt"
_MANIFEST = "checkpoint.json"
_FOLDER = re.compile(r"checkpoint_(\d{4,})_(\d{7,})_[0-9a-f]{8}")
_CHUNK_BYTES = 16 << 20  # read at a time: of an object, each is a request
_CUT_OFF = "it was cut off while it was written"


class _DamageError(Exception):
    """Why a checkpoint is not what its manifest says."""


class Checkpoint(NamedTuple):
    """A checkpoint of a run that was read whole, and found as it was written; with the run's figures that far."""

    name: str
    cursor: Cursor
    metrics: dict[str, Any]


@contextlib.contextmanager
def open_state(run_uri: str, name: str) -> Iterator[pa.NativeFile | io.BytesIO]:
    """state.pt of a checkpoint, open for reading; an object is in memory, since a loader asks for each tensor.

    Raises:
        ConfigError: it cannot be read.
    """
    address = join(run_uri, name, STATE_FILE)
    with explained(ConfigError, f"{address} cannot be read"), open_input(*open_filesystem(address)) as file:
        yield io.BytesIO(file.read()) if is_remote(address) else file


def write_checkpoint(
    run_uri: str, cursor: Cursor, state: bytes | memoryview, metrics: dict[str, Any], before: str = ""
) -> str:
    """Write a checkpoint and, once it is on the disk, remove the older ones.

    Args:
        run_uri: the run's folder.
        cursor: where the run stands.
        state: what the trainer keeps.
        metrics: the figures of the run that far.
        before: name of the checkpoint that the run has written or read last, which stays.

    Returns:
        The name of its folder.

    Raises:
        ConfigError: it cannot be written; nothing is left of it then, and the others are as they were.
        OutageError: object storage has been waited for in vain; something of it may be left, without a manifest.
    """
    name = f"checkpoint_{cursor.epoch:04d}_{cursor.step:07d}_{secrets.token_hex(4)}"
    filesystem, path = open_filesystem(run_uri)
    folder = f"{path}/{name}"
    contents = {STATE_FILE: state, CURSOR_FILE: cursor.to_json().encode()}
    files = {
        file: {"bytes": len(content), "blake2b": _hash(content).hexdigest()} for file, content in contents.items()
    }
    contents[_MANIFEST] = json.dumps({"files": files, "metrics": metrics}).encode()
    with explained(ConfigError, f"checkpoint {name} of {run_uri} cannot be written (mend that, and --resume)"):
        try:
            filesystem.create_dir(folder, recursive=True)
            for file, content in contents.items():
                write_synced(filesystem, f"{folder}/{file}", content)
                sync_folder(filesystem, folder)
            sync_folder(filesystem, path)
        except BaseException:
            with contextlib.suppress(pa.ArrowException, OSError), impatient():
                filesystem.delete_dir(folder)
            raise
    with contextlib.suppress(pa.ArrowException, OSError), impatient():  # tried again at the next one
        for other in _names(run_uri):  # one of a later place, passed over by a resume, stays
            if _place(other) <= _place(name) and other not in (name, before):
                filesystem.delete_dir(f"{path}/{other}")
    return name


def _hash(content: bytes | memoryview = b"") -> hashlib.blake2b:
    return hashlib.blake2b(content, digest_size=16)


def find_newest(run_uri: str, check: Callable[[Cursor], None]) -> tuple[Checkpoint | None, dict[str, str]]:
    """Read the checkpoints of a run, the newest first, up to one that is whole. Changes nothing.

    Args:
        run_uri: the run's folder.
        check: raises CursorError for a cursor that is not of this run's plan.

    Returns:
        The newest that is whole and of this plan, None = the run starts from its beginning; and of those that
        would be newer, by name, what is wrong with them.

    Raises:
        ConfigError: there are checkpoints, and all of them are damaged.
        CursorError: all that are whole are of another plan.
    """
    with explained(ConfigError, f"the checkpoints of {run_uri} cannot be read"):
        names = _names(run_uri)
    passed_over: dict[str, str] = {}
    foreign = None
    for name in names:
        try:
            cursor, metrics = _whole(join(run_uri, name))
            check(cursor)
            return Checkpoint(name, cursor, metrics), passed_over
        except CursorError as error:
            foreign, passed_over[name] = foreign or error, str(error)
        except (_DamageError, ConfigError) as error:
            passed_over[name] = str(error)
    if foreign:
        raise foreign
    if set(passed_over.values()) - {_CUT_OFF}:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in passed_over.items())
        raise ConfigError(
            f"no checkpoint of {run_uri} can be read ({reasons}): put one back from a copy, or start a new run"
        )
    return None, passed_over


def has_checkpoints(run_uri: str) -> bool:
    """Whether a folder has checkpoints, be they whole or not."""
    return bool(_names(run_uri))


def newest_name(run_uri: str) -> str:
    """The newest checkpoint that was written to its end, whose files are not looked at; empty = there is none."""
    return next((name for name in _names(run_uri) if exists(join(run_uri, name, _MANIFEST))), "")


def _names(run_uri: str) -> list[str]:
    """Of the checkpoints' folders, the newest first."""
    filesystem, path = open_filesystem(run_uri)
    infos = filesystem.get_file_info(pyarrow.fs.FileSelector(path, allow_not_found=True))
    names = [info.base_name for info in infos if info.type == pyarrow.fs.FileType.Directory]
    return sorted(filter(_FOLDER.fullmatch, names), key=_place, reverse=True)


def _place(name: str) -> tuple[int, int]:
    match = _FOLDER.fullmatch(name)
    assert match is not None
    return int(match[1]), int(match[2])


def _whole(folder: str) -> tuple[Cursor, dict[str, Any]]:
    """The cursor and the figures of a checkpoint that is as it was written, checked byte by byte."""
    manifest = read_whole(join(folder, _MANIFEST))
    if manifest is None:
        raise _DamageError(_CUT_OFF)
    try:
        found = json.loads(manifest)
        files, metrics = found["files"], dict(found["metrics"])
        expected = {file: (files[file]["bytes"], files[file]["blake2b"]) for file in (STATE_FILE, CURSOR_FILE)}
    except (KeyError, TypeError, ValueError):
        raise _DamageError(f"its {_MANIFEST} is {'damaged' if manifest else 'empty'}") from None
    for file, (num_bytes, digest) in expected.items():
        _check(folder, file, num_bytes, digest)
    try:
        cursor = Cursor.from_json((read_whole(join(folder, CURSOR_FILE)) or b"").decode(errors="replace"))
        return cursor, metrics
    except CursorError as error:
        raise _DamageError(str(error)) from error


def _check(folder: str, name: str, num_bytes: int, digest: str) -> None:
    """Raise _DamageError unless a file is as it was written."""
    address, found = join(folder, name), _hash()
    with explained(ConfigError, f"{address} cannot be read"):
        try:
            with open_input(*open_filesystem(address)) as file:
                if file.size() != num_bytes:
                    raise _DamageError(f"its {name} has {file.size()} bytes instead of {num_bytes}")
                while chunk := file.read(_CHUNK_BYTES):
                    found.update(chunk)
        except FileNotFoundError:
            raise _DamageError(f"its {name} is missing") from None
    if found.hexdigest() != digest:
        raise _DamageError(f"the content of its {name} has changed since it was written")
