"""Samples of a tar of class folders, `class/image.jpg`, as `tar -c` makes it of a folder of images.

The rules are those of a folder, see `raypipe.stores.class_folders`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from raypipe.errors import StoreError
from raypipe.stores.class_folders import (
    TreeSample,
    check_classes,
    find_classes,
)
from raypipe.stores.memory_tree import Link, MemoryTree, Node, Special, TreeFile
from raypipe.stores.webdataset import (
    MISSING,
    Indexed,
    Scan,
    as_names,
    as_texts,
    index_samples,
)

# Kinds of members besides files, and links, whose targets follow.
_FOLDER = "/"
_LINK = "-> "


def find_files(
    name: str, members: Sequence[tuple[str, Node]], tree: MemoryTree
) -> Scan | None:
    """Return the members of a tar of class folders; None if no folder has images or arrays.

    Args:
        name: name of the tar, for errors.
        members: paths and nodes, in order; `tree` has the same. A file's value is its `Place`.

    Returns:
        `keys`, `places` and `kinds` of all members: words, empty for a file.
    """
    if not any(map(any, find_classes([tree], name).samples)):
        return None
    places = [
        node.value if isinstance(node, TreeFile) else MISSING for _, node in members
    ]
    return Scan(
        keys=as_texts(path for path, _ in members),
        places={"": np.array(places, np.int64)},
        kinds=as_texts(_kind_of(node) for _, node in members),
    )


def _kind_of(node: Node) -> str:
    """Return the kind of a member in words, empty for a file."""
    if isinstance(node, Link):
        return _LINK + node.target
    if isinstance(node, Special):
        return node.kind
    return "" if node else _FOLDER


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
    views = [
        _view_of(scan, samples)
        for scan, samples in zip(scans, layout.samples, strict=True)
    ]
    indexed = index_samples(names, views, layout.classes)
    return indexed._replace(left_out=indexed.left_out + layout.left_out, told=told)


def _view_of(scan: Scan, by_class: Sequence[Sequence[TreeSample]]) -> Scan:
    """Return the samples of a tar, whose places are the values of its tree."""
    nums = list(map(len, by_class))
    files = list(itertools.chain.from_iterable(by_class))
    places = np.array([place for _, place in files], np.int64)
    return scan._replace(
        keys=as_texts(path for path, _ in files),
        places={"": places.reshape(-1, 3)},
        labels=np.repeat(np.arange(len(nums)), nums),
    )


def _tree_of(scan: Scan) -> MemoryTree:
    """Return the tree of the members that `find_files` found."""
    tree = MemoryTree(MISSING)
    places = scan.places[""].tolist()
    kinds = as_names(scan.kinds)
    for path, place, kind in zip(as_names(scan.keys), places, kinds, strict=True):
        node: Node = Special(kind)
        if not kind:
            node = TreeFile(place)
        elif kind == _FOLDER:
            node = None
        elif kind.startswith(_LINK):
            node = Link(kind.removeprefix(_LINK))
        tree.add(path, node)
    return tree
