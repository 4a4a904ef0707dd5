"""Ray Train's checkpoints of a run: what a killed run has left half-written is not kept."""

from __future__ import annotations

import json
import re

import pyarrow.fs

from raypipe.filesystem import open_filesystem

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
    complete: set[str] = set()
    if filesystem.get_file_info(f"{path}/{_SNAPSHOT}").type == pyarrow.fs.FileType.File:
        with filesystem.open_input_stream(f"{path}/{_SNAPSHOT}") as file:
            complete = {result["checkpoint_dir_name"] for result in json.loads(file.read())["checkpoint_results"]}
    selector = pyarrow.fs.FileSelector(path, allow_not_found=True)
    found = sorted(info.base_name for info in filesystem.get_file_info(selector) if not info.is_file)
    unfinished = [name for name in found if _FOLDER.fullmatch(name) and name not in complete]
    for name in unfinished:
        filesystem.delete_dir(f"{path}/{name}")
    return unfinished
