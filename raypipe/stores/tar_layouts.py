"""The layouts of tars and zips: WebDataset's, or class folders, `class/image.jpg`, as `tar -c` makes them.

The rules are in `raypipe.stores.webdataset` and `raypipe.stores.class_folders`. Class folders are those of all
tars of a store together, so the scan of such a tar has all of its members, as entries of a tree.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from raypipe.errors import StoreError
from raypipe.stores.class_folders import (
    BY_FOLDER,
    FILE,
    FOLDER,
    LINK,
    Entry,
    LeftOut,
    TreeSample,
    check_classes,
    find_classes,
    suffix_of,
)
from raypipe.stores.memory_tree import MemoryTree
from raypipe.stores.webdataset import (
    MISSING,
    Indexed,
    Place,
    Read,
    Scan,
    as_names,
    as_texts,
    find_samples,
    index_samples,
)


def layout_of(
    name: str,
    members: Sequence[Entry],
    tree: MemoryTree,
    read: Read,
    image_column: str,
    target_column: str,
) -> Scan:
    """Return the samples of a tar or a zip, by the layout that all of its members fit.

    Args:
        name: its name, for errors.
        members: paths, kinds and places, in order; `tree` has the same.

    Raises:
        StoreError: it has no samples; and see `find_samples`.
    """
    entries = [
        (member.name, _place_of(member, tree))
        for member in members
        if member.kind != FOLDER
    ]
    arguments = name, entries, read, image_column, target_column
    scan = find_samples(*arguments) if target_column != BY_FOLDER else None
    may_be_classes = target_column in ("label", BY_FOLDER, "")
    if scan is None and image_column == "image" and may_be_classes:
        scan = _of_folders(name, members, tree)
    if scan is None and not target_column:
        scan = find_samples(*arguments, needs_labels=False)
    if scan is None:
        suffixes = sorted(
            {suffix_of(path) for path, place in entries if not isinstance(place, str)}
            - {""}
        )
        has = f"; its members are {', '.join(suffixes):.200}" if suffixes else ""
        raise StoreError(
            f"{name} has no labels: the layout is class/image.jpg, or WebDataset's pairs key.jpg and key.cls (or "
            f"key.json), or an image and a text for each key{has}. If one of them has the labels, set "
            "store.target_column to its suffix; '' reads images without labels"
        )
    return scan


def _place_of(member: Entry, tree: MemoryTree) -> Place | str:
    """Return the place of a member's bytes, a link's included; if there are none, the kind of member in words."""
    place: Place = member.value
    if member.kind.startswith(LINK):
        place = tree.find(member.name)
    elif member.kind != FILE:
        return member.kind
    return "links to no member" if place == MISSING else place


def _of_folders(name: str, members: Sequence[Entry], tree: MemoryTree) -> Scan | None:
    """Return the members of a tar of class folders; None if no folder has images or arrays."""
    if not find_classes([tree], name).num_samples:
        return None
    places = [place for _, _, place in members]
    return Scan(
        keys=as_texts(path for path, _, _ in members),
        places={"": np.array(places, np.int64)},
        kinds=as_texts(kind for _, kind, _ in members),
    )


def index_tars(
    names: Sequence[str], scans: Sequence[Scan], target_column: str
) -> Indexed:
    """Return the samples of several tars, of either layout; names are for errors.

    Class folders are those of all tars together, and each tar's samples have the order of a folder.

    Raises:
        StoreError: the tars have both layouts; and see `find_classes` and `check_classes`.
    """
    of_folders = [scan.kinds is not None for scan in scans]
    if not any(of_folders):
        return index_samples(names, scans)
    if not all(of_folders):
        folders = names[of_folders.index(True)]
        shard = names[of_folders.index(False)]
        raise StoreError(
            f"{shard} is a tar of WebDataset, but {folders} has class folders: all tars of a store must have one "
            "layout"
        )
    layout = find_classes(list(map(_tree_of, scans)), names[0])
    told = check_classes(names[0], target_column, layout)
    views = map(_view_of, scans, layout.samples)
    indexed = index_samples(names, list(views), layout.classes)
    left_out = layout.left_out + LeftOut(indexed.left_out)
    return indexed._replace(left_out=left_out, told=told)


def _tree_of(scan: Scan) -> MemoryTree:
    """Return the tree of the members of class folders."""
    places = scan.places[""].tolist()
    members = map(Entry, as_names(scan.keys), as_names(scan.kinds), places)
    return MemoryTree(MISSING, members)


def _view_of(scan: Scan, samples: Sequence[TreeSample]) -> Scan:
    """Return the samples of a tar, whose places are the values of its tree."""
    places = np.array([place for _, _, place in samples], np.int64)
    return scan._replace(
        keys=as_texts(path for _, path, _ in samples),
        places={"": places.reshape(-1, 3)},
        labels=[label for label, _, _ in samples],
    )
