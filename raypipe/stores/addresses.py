"""Which local files an address means: one, those of a folder, or those that a pattern finds.

train.parquet                 itself
data                          all in it of the right names, sorted
data/train-*.parquet          those that the pattern finds; only the last part of a path is a pattern
train-{00000..01023}-of-01024.tfrecord
"""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path

from raypipe.errors import StoreError
from raypipe.stores.remote import expand
from raypipe.stores.splits import check_one_split


def is_pattern(name: str) -> bool:
    """Whether the last part of an address stands for several files."""
    return "*" in name or "{" in name


def list_files(address: str, is_one: Callable[[str], bool], what: str) -> list[str]:
    """The files of a local address.

    Args:
        address: an absolute path.
        is_one: whether a file of this name in a folder is one of the store's; hidden ones are not.
        what: they are, for the error.

    Raises:
        StoreError: there are none, or those of a folder are of several splits or not all of one.
    """
    path = Path(address)
    if path.is_dir():
        names = [name for name in _names_in(path) if is_one(name)]
        check_one_split(address, names)
        found = [str(path / name) for name in sorted(names)]
    elif path.exists() or not is_pattern(path.name):
        found = [address]
    elif "*" in path.name:
        names = [name for name in _names_in(path.parent) if fnmatchcase(name, path.name)]
        found = [str(path.parent / name) for name in sorted(names)]
    else:
        found = expand(address)
    if not found:
        raise StoreError(f"{address} has no {what} files")
    return found


def _names_in(folder: Path) -> list[str]:
    """Names of what is in a folder, without folders and what is hidden."""
    try:
        return [child.name for child in folder.iterdir() if child.name[0] not in "._" and not child.is_dir()]
    except OSError as error:
        raise StoreError(f"{folder} cannot be listed: {error}") from error
