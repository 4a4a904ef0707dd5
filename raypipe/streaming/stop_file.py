"""Request to stop a run, in its folder: `raypipe stop` writes RUN/stop, and the run's loader sees it.

The file is empty until the trainers have seen it, then it says so. It is there until the run has ended. A run is
given as the address of its folder, or as the open folder.
"""

from __future__ import annotations

from raypipe.metrics.records import RunFolder
from raypipe.storage.files import write_synced
from raypipe.storage.filesystem import open_filesystem


def _file(run: str | RunFolder) -> RunFolder:
    filesystem, folder = open_filesystem(run) if isinstance(run, str) else run
    return filesystem, f"{folder}/stop"


def request_stop(run: str | RunFolder) -> None:
    """Ask the trainers of a run to end with a checkpoint."""
    write_synced(*_file(run), b"")


def stop_requested(run: str | RunFolder) -> bool:
    """Return whether the trainers of a run were asked to end."""
    filesystem, path = _file(run)
    return filesystem.get_file_info(path).is_file


def answer_stop(run: str | RunFolder) -> None:
    """Confirm that the trainers have seen a request, if there is one, and will only write the checkpoint."""
    if stop_requested(run):
        write_synced(*_file(run), b"seen")


def stop_answered(run: str | RunFolder) -> bool:
    """Return whether the trainers have seen the request."""
    filesystem, path = _file(run)
    return bool(filesystem.get_file_info(path).size)


def remove_stop(run: str | RunFolder) -> None:
    """Withdraw the request to stop a run."""
    if stop_requested(run):
        filesystem, path = _file(run)
        filesystem.delete_file(path)
