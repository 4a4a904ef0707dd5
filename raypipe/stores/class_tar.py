"""Samples of a tar of class folders, `class/image.jpg`, as `tar -c` makes it of a folder of images.

The rules are those of a folder, see `raypipe.stores.class_folders`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from raypipe.errors import StoreError
from raypipe.stores.class_folders import (
    LeftOut,
    TreeSample,
    check_classes,
    find_classes,
)
from raypipe.stores.memory_tree import Link, MemoryTree, Special, TreeFile
from raypipe.stores.webdataset import (
    MISSING,
    Indexed,
    Scan,
    as_names,
    as_texts,
    index_samples,
)

_LINK = "-> "


def find_files(name: str, tree: MemoryTree) -> Scan | None:
    """Return the files of a tar of class folders; None if no folder has images or arrays.

    Args:
        name: name of the tar, for errors.
        tree: its members; a file's value is its `Place`.

    Returns:
        `keys` and `places` of all files; and `others`, path → None for a folder, and words for links and special
        members.
    """
    if not any(map(any, find_classes([tree], name).samples)):
        return None
    files = {}
    others: dict[str, str | None] = {}
    for path, node in tree.nodes():
        if isinstance(node, TreeFile):
            files[path] = node.value
        elif isinstance(node, Link):
            others[path] = _LINK + node.target
        else:
            others[path] = node and node.kind
    return {
        "keys": as_texts(files),
        "places": {"": np.array(list(files.values()), np.int64)},
        "others": others,
        "left_out": LeftOut(),
    }


def index_tars(
    names: Sequence[str], scans: Sequence[Scan], target_column: str
) -> Indexed:
    """Return the samples of several tars, of either layout; names are for errors.

    Class folders are those of all tars together, and each tar's samples have the order of a folder.

    Raises:
        StoreError: the tars have both layouts; and see `find_classes` and `check_classes`.
    """
    of_folders = [scan.get("others") is not None for scan in scans]
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
        {**scan, **_view_of(samples)}
        for scan, samples in zip(scans, layout.samples, strict=True)
    ]
    indexed = index_samples(names, views, layout.classes)
    return indexed._replace(left_out=indexed.left_out + layout.left_out, told=told)


def _view_of(by_class: Sequence[Sequence[TreeSample]]) -> Scan:
    """Return the samples of a tar, whose places are the values of its tree."""
    nums = list(map(len, by_class))
    files = list(itertools.chain.from_iterable(by_class))
    places = np.array([place for _, place in files], np.int64)
    return {
        "keys": as_texts(path for path, _ in files),
        "places": {"": places.reshape(-1, 3)},
        "labels": np.repeat(np.arange(len(nums)), nums).tolist(),
    }


def _tree_of(scan: Scan) -> MemoryTree:
    """Return the tree of the files that `find_files` found."""
    tree = MemoryTree(MISSING)
    for path, words in scan["others"].items():
        if words is None:
            tree.add(path, None)
        elif words.startswith(_LINK):
            tree.add(path, Link(words.removeprefix(_LINK)))
        else:
            tree.add(path, Special(words))
    places = scan["places"][""].tolist()
    for path, place in zip(as_names(scan["keys"]), places, strict=True):
        tree.add(path, TreeFile(place))
    return tree
