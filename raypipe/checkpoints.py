"""Ray Train's checkpoints of a run: which are complete, and where the newest stands."""

from __future__ import annotations

import json
import re

import pyarrow.fs

from raypipe.cursor import CURSOR_FILE, Cursor
from raypipe.errors import ConfigError
from raypipe.filesystem import explained, open_filesystem

# Ray Train's names: of the file in which it records the checkpoints that are complete, and of their folders.
_SNAPSHOT = "checkpoint_manager_snapshot.json"
_FOLDER = re.compile(r"checkpoint_\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d\.\d+")


def remove_unfinished(run_uri: str) -> list[str]:
    """Delete the checkpoints of a run that no trainer reported as complete; none of its trainers may be running.

    Ray Train copies a checkpoint file by file and records it after the last one, so one that was cut off is there
    but not on record: no resume would read it, and nobody would ever delete it.

    Returns:
        The names of the folders that were deleted.
    """
    filesystem, path = open_filesystem(run_uri)
    complete = _complete(filesystem, path)
    selector = pyarrow.fs.FileSelector(path, allow_not_found=True)
    found = sorted(info.base_name for info in filesystem.get_file_info(selector) if not info.is_file)
    unfinished = [name for name in found if _FOLDER.fullmatch(name) and name not in complete]
    for name in unfinished:
        filesystem.delete_dir(f"{path}/{name}")
    return unfinished


def newest_cursor(run_uri: str) -> Cursor | None:
    """The cursor of the newest complete checkpoint of a run, from which a resume goes on; None = there is none.

    Raises:
        ConfigError: it cannot be read.
        CursorError: it is damaged.
    """
    filesystem, path = open_filesystem(run_uri)
    complete = _complete(filesystem, path)
    if not complete:
        return None
    newest = max(complete)  # they are named by time
    with (
        explained(ConfigError, f"checkpoint {newest} of {run_uri} cannot be read"),
        filesystem.open_input_stream(f"{path}/{newest}/{CURSOR_FILE}") as file,
    ):
        return Cursor.from_json(file.read().decode(errors="replace"))


def _complete(filesystem: pyarrow.fs.FileSystem, path: str) -> set[str]:
    """Names of the checkpoints in a run's folder that Ray Train has on record."""
    if filesystem.get_file_info(f"{path}/{_SNAPSHOT}").type != pyarrow.fs.FileType.File:
        return set()
    with filesystem.open_input_stream(f"{path}/{_SNAPSHOT}") as file:
        return {result["checkpoint_dir_name"] for result in json.loads(file.read())["checkpoint_results"]}
