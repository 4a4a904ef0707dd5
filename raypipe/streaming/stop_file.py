"""Request to stop a run, in its folder: `raypipe stop` writes RUN/stop, and the run's loader sees it.

The file is empty until the trainers have seen it, then it says so. It is there until the run has ended.
"""

from __future__ import annotations

from raypipe.storage.files import read_whole, write_synced, write_text
from raypipe.storage.filesystem import exists, join_address, open_filesystem

_STOP_FILE = "stop"


def request_stop(run_uri: str) -> None:
    """Ask the trainers of a run to end with a checkpoint."""
    filesystem, path = open_filesystem(join_address(run_uri, _STOP_FILE))
    write_synced(filesystem, path, b"")


def stop_requested(run_uri: str) -> bool:
    """Return whether the trainers of a run were asked to end."""
    return exists(join_address(run_uri, _STOP_FILE))


def answer_stop(run_uri: str) -> None:
    """Confirm that the trainers have seen the request, and will only write the checkpoint."""
    write_text(join_address(run_uri, _STOP_FILE), "seen")


def stop_answered(run_uri: str) -> bool:
    """Return whether the trainers have seen the request."""
    return bool(read_whole(join_address(run_uri, _STOP_FILE)))


def remove_stop(run_uri: str) -> None:
    """Withdraw the request to stop a run."""
    if stop_requested(run_uri):
        filesystem, path = open_filesystem(join_address(run_uri, _STOP_FILE))
        filesystem.delete_file(path)
