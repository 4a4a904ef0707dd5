"""Samples of a tar of class folders, `class/image.jpg`, as `tar -c` makes it of a folder of images."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Any

import numpy as np

from raypipe.errors import StoreError
from raypipe.stores.base import ARRAY_SUFFIX, IMAGE_SUFFIXES
from raypipe.stores.webdataset import Place, is_visible


def find_files(entries: Sequence[tuple[str, Place | None]]) -> dict[str, Any] | None:
    """Find the images of a tar's folders or, if there are none, the arrays; None without either.

    Args:
        entries: its members in order: names, and the places of regular files. The last of equal names counts.

    Returns:
        JSON values: `files`, the names, sorted by their parts; `places`, position and num_bytes of each, as a flat
        list; `num`; and `digest`, a hash over the names, sizes and modification times.
    """
    files: dict[str, Place] = {}
    for name, place in entries:
        path = PurePosixPath(name)
        files.pop(str(path), None)
        if place and len(path.parts) > 1 and is_visible(path):
            files[str(path)] = place
    for suffixes in (IMAGE_SUFFIXES, {ARRAY_SUFFIX}):
        names = [name for name in files if PurePosixPath(name).suffix.lower() in suffixes]
        if names:
            break
    else:
        return None
    names.sort(key=lambda name: name.split("/"))
    digest, places = hashlib.blake2b(digest_size=16), list[int]()
    for name in names:
        start, num_bytes, mtime = files[name]
        places += start, num_bytes
        digest.update(f"{name}\0{num_bytes}\0{mtime}\n".encode(errors="surrogateescape"))
    return {"files": names, "places": places, "num": len(names), "digest": digest.hexdigest()}


def index_files(scans: Sequence[dict[str, Any]]) -> tuple[dict[str, np.ndarray], tuple[str, ...]]:
    """Return the columns of several tars, and the class names; see `raypipe.stores.webdataset.index_samples`.

    A folder that all samples share, such as `train/`, is not a class if a class folder remains below it.
    """
    paths = [name.split("/") for scan in scans for name in scan["files"]]
    depth = 0
    while len({path[depth] for path in paths}) == 1 and min(map(len, paths)) > depth + 2:
        depth += 1
    classes, labels = np.unique([path[depth] for path in paths], return_inverse=True)
    places = np.concatenate([np.array(scan["places"], np.int64) for scan in scans]).reshape(-1, 2)
    return {"image": places, "label": labels.astype(np.int64)}, tuple(classes.tolist())


def have_class_folders(names: Sequence[str], scans: Sequence[dict[str, Any]]) -> bool:
    """Return whether tars have class folders; raise StoreError if only some of them have."""
    of_folders = ["files" in scan for scan in scans]
    if any(of_folders) and not all(of_folders):
        folders, other = names[of_folders.index(True)], names[of_folders.index(False)]
        raise StoreError(
            f"{other} is a tar of WebDataset, but {folders} has class folders: all tars of a store must have one "
            "layout"
        )
    return any(of_folders)
