"""Samples of a tar of class folders, `class/image.jpg`, as `tar -c` makes it of a folder of images.

The rules are those of a folder, see `raypipe.stores.class_folders`.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Mapping, Sequence

import numpy as np

from raypipe.errors import StoreError
from raypipe.stores.addresses import is_left_out
from raypipe.stores.base import (
    ARRAY_SUFFIX,
    IMAGE_SUFFIXES,
    hash_of_facts,
    join_fingerprints,
)
from raypipe.stores.class_folders import (
    LeftOut,
    TreeSample,
    check_classes,
    find_classes,
    suffix_of,
)
from raypipe.stores.memory_tree import Link, MemoryTree, Node, Special, TreeFile
from raypipe.stores.webdataset import (
    Indexed,
    Scan,
    as_names,
    as_texts,
    index_samples,
)

_LINK = "-> "


def find_files(
    name: str, members: Sequence[tuple[str, Node]], tree: MemoryTree
) -> Scan | None:
    """Return the files of a tar of class folders; None if no folder has images or arrays.

    Args:
        name: name of the tar, for errors.
        members: names and nodes, in the tar's order. The last of equal names counts.
        tree: the same as a tree; a file's value is position, num_bytes and mtime.

    Returns:
        `keys` and `places` of all files; `others`, path → None for a folder, and words for links and special
        members; and `digest`, a hash over the samples' names, sizes and modification times.
    """
    if not any(map(any, find_classes([tree], name).samples)):
        return None
    files = {}
    others: dict[str, str | None] = {}
    for path, node in tree.nodes():
        if isinstance(node, TreeFile):
            files[path] = node.value[:2]
        elif isinstance(node, Link):
            others[path] = _LINK + node.target
        else:
            others[path] = node and node.kind
    return {
        "keys": as_texts(files),
        "places": {"": np.array(list(files.values()), np.int64)},
        "others": others,
        "left_out": LeftOut(),
        "digest": _hash_of(dict(members)),
    }


def _hash_of(members: Mapping[str, Node]) -> str:
    """Return a hash over the names, sizes and modification times of the samples, and over all links."""
    files = {
        path: node.value
        for path, node in members.items()
        if isinstance(node, TreeFile) and _may_count(path)
    }
    images = [path for path in files if suffix_of(path) in IMAGE_SUFFIXES]
    samples = images or [path for path in files if suffix_of(path) == ARRAY_SUFFIX]
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(samples, key=lambda path: path.split("/")):
        _, num_bytes, mtime = files[path]
        digest.update(
            f"{path}\0{num_bytes}\0{mtime}\n".encode(errors="surrogateescape")
        )
    links = {
        path: node.target for path, node in members.items() if isinstance(node, Link)
    }
    for path, target in sorted(links.items()):
        digest.update(f"{path}\0->{target}\n".encode(errors="surrogateescape"))
    return digest.hexdigest()


def _may_count(path: str) -> bool:
    parts = path.split("/")
    return len(parts) > 1 and not any(map(is_left_out, parts))


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
    views = list(map(_view_of, layout.samples))
    are_plain = [
        paths == sorted(paths, key=lambda path: path.split("/"))
        for paths in (as_names(view["keys"]) for view in views)
    ]
    views = [{**scan, **view} for scan, view in zip(scans, views, strict=True)]
    indexed = index_samples(names, views)
    fingerprint = indexed.fingerprint
    if not all(are_plain) or not all(layout.nums.values()):
        # the tars' own digests do not show these
        facts = hash_of_facts((layout.classes, are_plain))
        digests = [scan["digest"] for scan in scans]
        fingerprint = join_fingerprints([*digests, facts])
    return indexed._replace(
        classes=layout.classes,
        left_out=indexed.left_out + layout.left_out,
        fingerprint=fingerprint,
        told=told,
    )


def _view_of(by_class: Sequence[Sequence[TreeSample]]) -> Scan:
    """Return the samples of a tar, whose places are the values of its tree."""
    nums = list(map(len, by_class))
    files = list(itertools.chain.from_iterable(by_class))
    places = np.array([place for _, place in files], np.int64)
    return {
        "keys": as_texts(path for path, _ in files),
        "places": {"": places.reshape(-1, 2)},
        "labels": np.repeat(np.arange(len(nums)), nums).tolist(),
    }


def _tree_of(scan: Scan) -> MemoryTree:
    """Return the tree of the files that `find_files` found."""
    tree = MemoryTree(missing=(-1, -1))
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
