"""Checkpoints of runs and of users' loops: written whole, synced, and verified before use.

    RUN/checkpoint_EEEE_SSSSSSS_TOKEN/    epoch and step of the cursor; Ray Train names its folders by the time
        state.pt           state_dict of each part, by its name: model, optimizer, …
        cursor.json        the run's place
        checkpoint.json    sizes and hashes of these files, the run's metrics, and the model's input: names of
                           classes, transform, normalization (see `saved_model.input_of`); written last

A folder without checkpoint.json is incomplete. No other file lists a run's checkpoints, so none can contradict
them.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa
import pyarrow.fs

from raypipe.errors import ConfigError, CursorError
from raypipe.plan.places import CURSOR_FILE, Cursor
from raypipe.storage.files import read_by, sync_folder, write_synced
from raypipe.storage.filesystem import (
    as_uri,
    errors_as,
    exists,
    join_address,
    open_filesystem,
    split_address,
)
from raypipe.storage.retries import tried_once

if TYPE_CHECKING:
    from raypipe.metrics.records import RunFolder

STATE_FILE = "state.pt"
_MANIFEST = "checkpoint.json"
_FOLDER = re.compile(r"checkpoint_(\d{4,})_(\d{7,})_[0-9a-f]{8}")
# Folders of a run, or of Ray Train.
_ANY = re.compile(rf"{_FOLDER.pattern}|checkpoint_[\d-]{{10}}_[\d-]{{8}}\.\d+")
_CUT_OFF = "it was cut off while it was written"


class _DamageError(Exception):
    """Error: a checkpoint does not match its manifest."""


class Checkpoint(NamedTuple):
    """Complete checkpoint.

    Attributes:
        address: its folder.
        cursor: the run's place.
        metrics: the run's metrics up to there; empty if another run made it.
        digest: the hash of state.pt.
        input: description of the model's input, see `saved_model.input_of`; empty if there is none.
        state: content of state.pt, verified; empty if it was not requested.
    """

    address: str
    cursor: Cursor
    metrics: dict[str, Any]
    digest: str
    input: dict[str, Any] = {}  # noqa: RUF012  no code changes it
    state: bytes = b""

    @property
    def name(self) -> str:
        """The folder's name."""
        return split_address(self.address)[1]


def read_whole_checkpoint(start: RunFolder | Checkpoint) -> Checkpoint:
    """Read a checkpoint with its state, as it was written, unless it has been read already.

    Args:
        start: the checkpoint, or its folder, by file system and path.

    Raises:
        ConfigError: the checkpoint is damaged, of another make, or cannot be read.
    """
    if not isinstance(start, Checkpoint):
        return _whole(start)
    if start.state:
        return start
    return start._replace(state=_whole(open_filesystem(start.address)).state)


def _whole(folder: RunFolder) -> Checkpoint:
    """The checkpoint in a folder, see `read_whole_checkpoint`."""
    try:
        return _look(folder, folder[1], with_state=True)
    except _DamageError as error:
        raise ConfigError(
            f"{folder[1]} is damaged ({error}), or was not made by loader.report: then restore it as you made it"
        ) from None


def cursor_of(start: RunFolder | Checkpoint) -> Cursor | None:
    """The place in a checkpoint, or in its folder by `Loader.report` or `Loader.save`; None = there is none.

    Raises:
        CursorError: the file is not a cursor's.
    """
    if isinstance(start, Checkpoint):
        return start.cursor
    try:
        return Cursor.from_json(_read(start, CURSOR_FILE).decode(errors="replace"))
    except _DamageError:
        return None


def write_checkpoint(
    run_uri: str,
    cursor: Cursor,
    state: bytes | memoryview,
    metrics: dict[str, Any],
    before: str = "",
    described: Mapping[str, Any] | None = None,
) -> str:
    """Write a checkpoint and, once it is on the disk, remove the older ones.

    Args:
        run_uri: the run's folder.
        cursor: the run's place.
        state: the trainer's state.
        metrics: the run's metrics up to there.
        before: name of the checkpoint that the run wrote or read last, which is kept.
        described: the model's input, see `saved_model.input_of`.

    Returns:
        The name of its folder.

    Raises:
        ConfigError: it cannot be written; it is removed, and the others are unchanged.
        OutageError: object storage did not recover in time; parts may be left, without a manifest.
    """
    name = f"checkpoint_{cursor.epoch:04d}_{cursor.step:07d}_{secrets.token_hex(4)}"
    filesystem, path = open_filesystem(run_uri)
    folder = f"{path}/{name}"
    with errors_as(
        ConfigError,
        f"checkpoint {name} of {run_uri} cannot be written (mend that, and --resume)",
    ):
        try:
            filesystem.create_dir(folder, recursive=True)
            write_files((filesystem, folder), cursor, state, metrics, described)
            sync_folder(filesystem, path)
        except BaseException:
            with tried_once():
                filesystem.delete_dir(folder)
            raise
    with tried_once():
        # again at the next one
        # A checkpoint of a later place, which a resume has passed over, stays.
        for older in _names(run_uri):
            if _place(older) <= _place(name) and older not in (name, before):
                filesystem.delete_dir(f"{path}/{older}")
    return name


def write_files(
    folder: RunFolder,
    cursor: Cursor,
    state: bytes | memoryview,
    metrics: Mapping[str, Any],
    described: Mapping[str, Any] | None = None,
) -> None:
    """Write a checkpoint's files into its folder, by its file system and path; see `write_checkpoint`."""
    filesystem, path = folder
    contents = {STATE_FILE: state, CURSOR_FILE: cursor.to_json().encode()}
    files = {
        file: {"bytes": len(content), "blake2b": _hash(content)}
        for file, content in contents.items()
    }
    manifest = {"files": files, "metrics": metrics, "input": described or {}}
    contents[_MANIFEST] = json.dumps(manifest).encode()
    for file, content in contents.items():
        write_synced(filesystem, f"{path}/{file}", content)
        sync_folder(filesystem, path)


def _hash(content: bytes | memoryview) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def find_start(
    address: str, check: Callable[[Cursor], None], with_state: bool = False
) -> Checkpoint:
    """The checkpoint at an address or, at a run's, its newest, for another run to start from; see `find_newest`.

    A folder that has a place and no checkpoint of raypipe's has no state that raypipe can load.

    Raises:
        ConfigError: there is none.
    """
    uri = as_uri(address)
    newest, _ = _newest_in(uri, check, with_state)
    # `Loader.save` adds the place to a checkpoint that the user's code writes
    is_own = not _FOLDER.fullmatch(split_address(uri)[1])
    if newest is None and is_own and (cursor := cursor_of(open_filesystem(uri))):
        check(cursor)
        newest = Checkpoint(uri, cursor, {}, "")
    if newest is None:
        raise ConfigError(
            f"start_from: no raypipe checkpoint at {address}, or in that folder"
        )
    return newest._replace(metrics={})


def find_newest(
    run_uri: str,
    check: Callable[[Cursor], None],
    with_state: bool = False,
    start_from: str = "",
) -> tuple[Checkpoint | None, dict[str, str]]:
    """Look for the newest checkpoint of a run that is whole. Changes nothing.

    Without the state it reads only manifests, cursors and sizes: a trainer, which needs the state, reads and
        hashes it at once.

    Args:
        run_uri: the run's folder, or a checkpoint's.
        check: raises CursorError for a cursor of a different plan.
        with_state: also read state.pt, and skip a checkpoint whose content has changed.
        start_from: address of a run or a checkpoint, from which a run without checkpoints starts; empty = none.

    Returns:
        The newest complete checkpoint of this plan (None = the run starts from its beginning), and the faults
        of newer ones, by name.

    Raises:
        ConfigError: there are checkpoints, and all of them are damaged; or there is none at `start_from`.
        CursorError: all complete ones belong to another plan.
    """
    newest, passed_over = _newest_in(run_uri, check, with_state)
    if newest is None and start_from:
        newest = find_start(start_from, check, with_state)
    return newest, passed_over


def _newest_in(
    address: str, check: Callable[[Cursor], None], with_state: bool
) -> tuple[Checkpoint | None, dict[str, str]]:
    """The newest whole checkpoint at an address, and the faults of newer ones by name; see `find_newest`."""
    run_uri = address
    with errors_as(ConfigError, f"the checkpoints of {run_uri} cannot be read"):
        names = _names(run_uri, _ANY)
        if not names and exists(join_address(run_uri, _MANIFEST)):
            run_uri, name = split_address(run_uri)
            names = [name]
    passed_over: dict[str, str] = {}
    foreign = None
    for name in names:
        place = join_address(run_uri, name)
        try:
            return _look(open_filesystem(place), place, with_state, check), passed_over
        except CursorError as error:
            foreign = foreign or error
            passed_over[name] = str(error)
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
    """True if a folder has checkpoints, complete or not."""
    return bool(_names(run_uri))


def newest_name(run_uri: str) -> str:
    """The newest checkpoint that was written to its end, whose files are not looked at; empty = there is none."""
    return next(
        (
            name
            for name in _names(run_uri)
            if exists(join_address(run_uri, name, _MANIFEST))
        ),
        "",
    )


def _names(run_uri: str, kind: re.Pattern[str] = _FOLDER) -> list[str]:
    """Names of the checkpoints' folders, the newest first."""
    filesystem, path = open_filesystem(run_uri)
    infos = filesystem.get_file_info(
        pyarrow.fs.FileSelector(path, allow_not_found=True)
    )
    names = [
        info.base_name for info in infos if info.type == pyarrow.fs.FileType.Directory
    ]
    return sorted(filter(kind.fullmatch, names), key=_place, reverse=True)


def _place(name: str) -> tuple[int, ...]:
    """Epoch and step, or the time in a name of Ray Train's."""
    match = _FOLDER.fullmatch(name)
    return tuple(map(int, match.groups() if match else re.findall(r"\d+", name)))


def _look(
    folder: RunFolder,
    address: str,
    with_state: bool,
    check: Callable[[Cursor], None] = lambda cursor: None,
) -> Checkpoint:
    """A checkpoint: manifest and cursor are as they were written, and state.pt as long, or as it was, too."""
    try:
        content = _read(folder, _MANIFEST)
    except _DamageError:
        raise _DamageError(_CUT_OFF) from None
    try:
        manifest = json.loads(content)
        files = manifest["files"]
        metrics = dict(manifest["metrics"])
        described = dict(manifest.get("input", {}))
        sizes = {file: files[file]["bytes"] for file in (STATE_FILE, CURSOR_FILE)}
        digests = {file: files[file]["blake2b"] for file in sizes}
    except (KeyError, TypeError, ValueError):
        raise _DamageError(
            f"its {_MANIFEST} is {'damaged' if content else 'empty'}"
        ) from None
    for file, num_bytes in sizes.items():
        if (size := _read(folder, file, pa.NativeFile.size)) != num_bytes:
            raise _DamageError(f"its {file} has {size} bytes instead of {num_bytes}")
    place = _content(folder, CURSOR_FILE, digests[CURSOR_FILE])
    cursor = Cursor.from_json(place.decode(errors="replace"))
    check(cursor)
    digest = digests[STATE_FILE]
    state = _content(folder, STATE_FILE, digest) if with_state else b""
    return Checkpoint(address, cursor, metrics, digest, described, state)


def _content(folder: RunFolder, name: str, digest: str) -> bytes:
    content = _read(folder, name)
    if _hash(content) != digest:
        raise _DamageError(
            f"the content of its {name} has changed since it was written"
        )
    return content


def _read(
    folder: RunFolder,
    name: str,
    read: Callable[[pa.NativeFile], Any] = pa.NativeFile.read,
) -> Any:
    """Apply `read` to a file; raises _DamageError where it is missing, ConfigError where it cannot be read."""
    filesystem, path = folder
    with errors_as(ConfigError, f"{path}/{name} cannot be read"):
        try:
            return read_by(filesystem, f"{path}/{name}", read)
        except FileNotFoundError:
            raise _DamageError(f"its {name} is missing") from None
