"""Whose the folder of a run is, before a resume imports the code that the configuration in it names."""

from __future__ import annotations

import os
import pwd
from collections.abc import Iterator
from pathlib import Path

import pyarrow.fs

from raypipe.errors import ConfigError
from raypipe.storage.filesystem import as_uri, open_filesystem

_ROOT = 0  # who needs no planted file to run code here


def check_owner(run: str, trusted: bool) -> None:
    """Raise ConfigError where a local folder, or anything in it, belongs to another user, unless that is trusted.

    Object storage knows no users of this machine: who may write a bucket may run code through a resume from it.

    Args:
        run: folder or URI of a run; it need not be there.
        trusted: what the user said of it.
    """
    filesystem, path = open_filesystem(as_uri(run))
    if trusted or not isinstance(filesystem, pyarrow.fs.LocalFileSystem):
        return
    for found, owner in _owners(path):
        if owner not in (os.getuid(), _ROOT):
            raise ConfigError(
                f"{found} belongs to {_name(owner)}, not to you, and a resume runs the code that config.yaml "
                "names and what a search has pickled: look at what is there, then add --trust=true"
            )


def _owners(folder: str) -> Iterator[tuple[Path, int]]:
    for place, _, files in os.walk(folder):
        for path in (Path(place), *(Path(place, name) for name in files)):
            yield path, path.lstat().st_uid
            if path.is_symlink() and path.exists():
                yield path, path.stat().st_uid


def _name(uid: int) -> str:
    try:
        return f"user {pwd.getpwuid(uid).pw_name}"
    except KeyError:
        return f"user {uid}"
