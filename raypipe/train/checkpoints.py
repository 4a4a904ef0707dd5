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
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.fs

from raypipe.errors import ConfigError, CursorError
from raypipe.plan.cursor import CURSOR_FILE, Cursor
from raypipe.storage.filesystem import exists, explained, join, one_line, open_filesystem, read_whole
from raypipe.storage.whole_file import sync_folder, synced_output

STATE_FILE = "state.pt"
_MANIFEST = "checkpoint.json"
_DAMAGED = "damaged.json"
"""What the manifest of a checkpoint is called once a resume has found it damaged."""
_FOLDER = re.compile(r"checkpoint_(\d{4,})_(\d{7,})_[0-9a-f]{8}")
_CUT_OFF = "it was cut off while it was written"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint of a run, in its folder `name`, that was read whole, and found as it was written."""

    run_uri: str
    name: str
    cursor: Cursor

    def state(self) -> io.BytesIO:
        """What state.pt holds."""
        with explained(ConfigError, f"checkpoint {self.name} of {self.run_uri} cannot be read"):
            return io.BytesIO(_content(join(self.run_uri, self.name), STATE_FILE) or b"")


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


def write_checkpoint(run_uri: str, cursor: Cursor, state: bytes | memoryview, metrics: dict[str, Any]) -> str:
    """Write a checkpoint and, once it is on the disk, remove all that are older than the one before it.

    Args:
        run_uri: the run's folder.
        cursor: where the run stands.
        state: what the trainer keeps.
        metrics: the figures of the run that far.

    Returns:
        The name of its folder.

    Raises:
        ConfigError: it cannot be written; nothing is left of it then, and the others are as they were.
    """
    name = f"checkpoint_{cursor.epoch:04d}_{cursor.step:07d}_{secrets.token_hex(4)}"
    filesystem, path = open_filesystem(run_uri)
    folder = f"{path}/{name}"
    contents = {STATE_FILE: state, CURSOR_FILE: cursor.to_json().encode()}
    files = {file: {"bytes": len(content), "blake2b": _hash(content)} for file, content in contents.items()}
    contents[_MANIFEST] = json.dumps({"files": files, "metrics": metrics}).encode()
    with explained(ConfigError, f"checkpoint {name} of {run_uri} cannot be written (mend that, and --resume)"):
        try:
            filesystem.create_dir(folder, recursive=True)
            for file, content in contents.items():
                with synced_output(filesystem, f"{folder}/{file}") as output:
                    output.write(content)
                sync_folder(filesystem, folder)
            sync_folder(filesystem, path)
        except BaseException:
            with contextlib.suppress(pa.ArrowException, OSError):
                filesystem.delete_dir(folder)
            raise
    with contextlib.suppress(pa.ArrowException, OSError):  # tried again at the next one
        _remove_old(run_uri, name)
    return name


def _hash(content: bytes | memoryview) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def _remove_old(run_uri: str, name: str) -> None:
    """Keep a checkpoint and the whole one before it. One of a later place, passed over by a resume, stays."""
    older = [other for other in _names(run_uri) if _place(other) <= _place(name) and other != name]
    whole = (number for number, other in enumerate(older) if exists(join(run_uri, other, _MANIFEST)))
    filesystem, path = open_filesystem(run_uri)
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
        names = _names(run_uri)
    found, foreign = Found(), None
    for name in names:
        reason = _CUT_OFF
        try:
            cursor = _whole(join(run_uri, name))
            if cursor is not None:
                check(cursor)
                found.checkpoint = Checkpoint(run_uri, name, cursor)
                return found
        except CursorError as error:
            foreign, reason = foreign or error, str(error)
        except _DamageError as damage:
            reason = str(damage)
            found.damaged.append(name)
        except (pa.ArrowException, OSError) as error:
            reason = one_line(error)
        found.passed_over[name] = reason
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
    return bool(_names(run_uri))


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


def _content(folder: str, file: str) -> bytes | None:
    return read_whole(*open_filesystem(join(folder, file)))


def _whole(folder: str) -> Cursor | None:
    """The cursor of a checkpoint that is as it was written, checked byte by byte; None = it has no manifest."""
    manifest = _content(folder, _MANIFEST)
    if manifest is None:
        return None
    try:
        files = json.loads(manifest)["files"]
        expected = {file: (files[file]["bytes"], files[file]["blake2b"]) for file in (STATE_FILE, CURSOR_FILE)}
    except (KeyError, TypeError, ValueError):
        raise _DamageError(f"its {_MANIFEST} is {'damaged' if manifest else 'empty'}") from None
    contents: dict[str, bytes] = {}
    for file, (num_bytes, digest) in expected.items():
        content = _content(folder, file)
        if content is None:
            raise _DamageError(f"its {file} is missing")
        if len(content) != num_bytes:
            raise _DamageError(f"its {file} has {len(content)} bytes instead of {num_bytes}")
        if _hash(content) != digest:
            raise _DamageError(f"the content of its {file} has changed since it was written")
        contents[file] = content
    try:
        return Cursor.from_json(contents[CURSOR_FILE].decode(errors="replace"))
    except CursorError as error:
        raise _DamageError(str(error)) from error
