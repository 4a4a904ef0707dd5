"""Samples of a tar of class folders, `class/image.jpg`, as `tar -c` makes it of a folder of images.

The rules are those of a folder, see `raypipe.stores.class_folders`.
"""

from __future__ import annotations

import hashlib
import posixpath
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from raypipe.errors import StoreError
from raypipe.stores.addresses import is_left_out
from raypipe.stores.base import ARRAY_SUFFIX, IMAGE_SUFFIXES, hash_of_facts
from raypipe.stores.class_folders import (
    NO_DOUBTS,
    Doubts,
    FileTree,
    Layout,
    LeftOut,
    check_classes,
    find_classes,
    join,
    suffix_of,
)
from raypipe.stores.memory_tree import Link, MemoryTree, Special, TreeFile
from raypipe.stores.webdataset import (
    Indexed,
    Scan,
    as_names,
    as_texts,
    index_samples,
)

Member = TreeFile | Link | Special | None
"""What a member of a tar is; None = a folder. The value of a file is position, num_bytes, mtime."""


def find_files(
    name: str, members: Sequence[tuple[str, Member]], tree: FileTree
) -> Scan | None:
    """Find the samples of a tar of class folders; None if no folder has images or arrays.

    Args:
        name: name of the tar, for errors.
        members: names and nodes, in the tar's order. The last of equal names counts.
        tree: the same as a tree.

    Returns:
        `keys` and `places` of the samples; `digest`, a hash over the samples' names, sizes and modification times;
        and `about`, see `_views`, with the `links` to folders.
    """
    layout = find_classes([tree], name)
    if not any(map(any, layout.samples)):
        return None
    (scan,) = _views(layout)
    last = dict(members)
    scan["about"]["links"] = {
        path: node.target
        for path, node in last.items()
        if isinstance(node, Link) and any(tree.entries(path))
    }
    return {**scan, "digest": _hash_of(last)}


def _hash_of(members: Mapping[str, Member]) -> str:
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
    """Return the samples of several tars, of either layout; raise StoreError if they have both."""
    of_folders = [bool(scan.get("about")) for scan in scans]
    if not any(of_folders):
        return index_samples(names, scans)
    if not all(of_folders):
        folders = names[of_folders.index(True)]
        shard = names[of_folders.index(False)]
        raise StoreError(
            f"{shard} is a tar of WebDataset, but {folders} has class folders: all tars of a store must have one "
            "layout"
        )
    return _index_files(names, scans, target_column)


def _index_files(
    names: Sequence[str], scans: Sequence[Scan], target_column: str
) -> Indexed:
    """Return the samples of several tars, each in the order of a folder; names are for errors.

    Raises:
        StoreError: see `find_classes` and `check_classes`.
    """
    views, doubts, left_out = _views_of(names[0], scans)
    abouts = [view["about"] for view in views]
    num_by_class = Counter[str]()
    for about in abouts:
        num_by_class.update(dict(zip(about["classes"], about["nums"], strict=True)))
    told = check_classes(names[0], target_column, doubts, num_by_class)
    classes = tuple(sorted(num_by_class))
    labels = [_labels_of(about, classes) for about in abouts]
    are_plain = [about["is_plain"] for about in abouts]
    with_samples = np.unique(np.concatenate(labels))
    is_known = all(are_plain) and len(with_samples) == len(classes)
    indexed = index_samples(
        names,
        [
            {**view, "labels": numbers.tolist(), "left_out": {}}
            for view, numbers in zip(views, labels, strict=True)
        ],
    )
    facts = "" if is_known else hash_of_facts((classes, are_plain))
    return indexed._replace(classes=classes, left_out=left_out, facts=facts, told=told)


def _views_of(
    name: str, scans: Sequence[Scan]
) -> tuple[Sequence[Scan], list[Doubts], LeftOut]:
    """Return the samples of each tar of a store, the doubts about them, and the members that are left out."""
    abouts = [scan["about"] for scan in scans]
    doubts = [Doubts(*map(about.get, Doubts._fields)) for about in abouts]
    left_out = LeftOut()
    for counted in (*scans, *abouts):
        left_out.update(counted["left_out"])
    if len({(about["root"], about["has_images"]) for about in abouts}) == 1:
        return scans, doubts, left_out
    # together their samples are in other folders
    layout = find_classes(list(map(_tree_of, scans)), name)
    of_tars = (doubt._replace(splits=[], reasons=[]) for doubt in doubts)
    doubts = [layout.doubts, *of_tars]
    return _views(layout), doubts, left_out + layout.left_out


def _labels_of(about: dict[str, Any], classes: tuple[str, ...]) -> np.ndarray:
    """Return the labels of a tar's samples, numbers of the store's classes, int64 (n,)."""
    number_of = {name: number for number, name in enumerate(classes)}
    numbers = [number_of[name] for name in about["classes"]]
    return np.repeat(np.array(numbers, np.int64), about["nums"])


def _views(layout: Layout) -> list[Scan]:
    """Return the samples of each tree of a layout, with what is known of it: `about`, as JSON.

    `root`, `classes`, `left_out`, `has_images` and the doubts are those of the layout; the first tree has what is
    known of all. `nums` are samples by class. `is_plain`: whether the samples have the order of their names'
    parts, which the tar's digest shows.
    """
    views: list[Scan] = []
    for by_class in layout.samples:
        paths = [path for files in by_class for path, _ in files]
        places = [value[:2] for files in by_class for _, value in files]
        about = {
            "root": layout.root,
            "classes": list(layout.classes),
            "has_images": layout.has_images,
            "nums": list(map(len, by_class)),
            "left_out": {} if views else layout.left_out,
            **(NO_DOUBTS if views else layout.doubts)._asdict(),
            "is_plain": paths == sorted(paths, key=lambda path: path.split("/")),
        }
        views.append(
            {
                "about": about,
                "keys": as_texts(paths),
                "places": {"": np.array(places, np.int64).reshape(-1, 2)},
            }
        )
    return views


def _tree_of(scan: Scan) -> MemoryTree:
    """Return a tree of the samples of a tar, of its classes without samples, and of its links to folders."""
    tree = MemoryTree(missing=(-1, -1))
    about = scan["about"]
    for name in about["classes"]:
        tree.add(join(about["root"], name), None)
    places = scan["places"][""].tolist()
    for path, place in zip(as_names(scan["keys"]), places, strict=True):
        tree.add(path, TreeFile(place))
    for path, target in about["links"].items():
        parent = path.rpartition("/")[0]
        if any(tree.entries(posixpath.normpath(join(parent, target)))):
            tree.add(path, Link(target))  # its samples are those of the other folder
    return tree
