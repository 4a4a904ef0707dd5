"""Samples of a tar of class folders, `class/image.jpg`, as `tar -c` makes it of a folder of images.

The rules are those of a folder, see `raypipe.stores.class_folders`.
"""

from __future__ import annotations

import hashlib
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
    suffix_of,
)
from raypipe.stores.memory_tree import Link, MemoryTree, Special, TreeFile
from raypipe.stores.webdataset import Indexed, packed

Member = TreeFile | Link | Special | None
"""What a member of a tar is; None = a folder. The value of a file is position, num_bytes, mtime."""

About = dict[str, Any]
"""What a tar is by itself, or among others, as JSON: `root`, `classes`, `left_out`, `doubts`, `has_images` of
its `Layout`; `nums`, samples by class; `places`, position and num_bytes of each sample, as a flat list; `keys`,
their paths; and `is_plain`, whether they are in the order of their names' parts, which the tar's digest shows."""


def find_files(
    name: str, members: Sequence[tuple[str, Member]], tree: FileTree
) -> dict[str, Any] | None:
    """Find the samples of a tar of class folders; None if no folder has images or arrays.

    Args:
        name: name of the tar, for errors.
        members: names and nodes, in the tar's order. The last of equal names counts.
        tree: the same as a tree.

    Returns:
        JSON values: `about`; `digest`, a hash over the samples' names, sizes and modification times; and all that
        `_tree_of` needs: `files`, names of members; `places` of each, -1 for all but files; and `others`, by
        number, ["link", target] or ["special", kind], and [] for folders.
    """
    layout = find_classes([tree], name)
    if not any(map(any, layout.samples)):
        return None
    last = dict(members)
    places = list[int]()
    not_files = dict[str, list[str]]()
    for number, node in enumerate(last.values()):
        if isinstance(node, TreeFile):
            places += node.value[:2]
        else:
            places += (-1, -1)
            not_files[str(number)] = _described(node)
    (about,) = _about(layout)
    return {
        "about": about,
        "digest": _hash_of(last),
        "files": list(last),
        "places": places,
        "others": not_files,
    }


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


def _described(node: Link | Special | None) -> list[str]:
    if isinstance(node, Link):
        return ["link", node.target]
    return ["special", node.kind] if isinstance(node, Special) else []


def index_files(
    names: Sequence[str], scans: Sequence[dict[str, Any]], target_column: str
) -> Indexed:
    """Return the samples of several tars, each in the order of a folder; names are for errors.

    Raises:
        StoreError: see `find_classes` and `check_classes`.
    """
    abouts: list[About] = [scan["about"] for scan in scans]
    if len({(about["root"], about["has_images"]) for about in abouts}) > 1:
        # together they are something else
        abouts = _about(find_classes(list(map(_tree_of, scans)), names[0]))
    num_by_class = Counter[str]()
    for about in abouts:
        num_by_class.update(dict(zip(about["classes"], about["nums"], strict=True)))
    doubts = [Doubts(*about["doubts"]) for about in abouts]
    told = check_classes(names[0], target_column, doubts, num_by_class)
    classes = tuple(sorted(num_by_class))
    number_of = {name: number for number, name in enumerate(classes)}
    labels = [
        np.repeat([number_of[name] for name in about["classes"]], about["nums"])
        for about in abouts
    ]
    places = [np.array(about["places"], np.int64).reshape(-1, 2) for about in abouts]
    columns = {
        "image": np.concatenate(places),
        "label": np.concatenate(labels).astype(np.int64),
    }
    left_out = sum((LeftOut(about["left_out"]) for about in abouts), LeftOut())
    are_plain = [about["is_plain"] for about in abouts]
    is_known = all(are_plain) and len(np.unique(columns["label"])) == len(classes)
    facts = "" if is_known else hash_of_facts((classes, are_plain))
    return Indexed(
        columns,
        classes,
        list(map(len, places)),
        [about["keys"] for about in abouts],
        left_out,
        facts,
        told,
    )


def _about(layout: Layout) -> list[About]:
    """Return what is known of each tree of a layout; the first has what is known of all."""
    every: list[About] = []
    for by_class in layout.samples:
        paths = [path for files in by_class for path, _ in files]
        about: About = {
            "root": layout.root,
            "classes": layout.classes,
            "has_images": layout.has_images,
        }
        about |= {"nums": list(map(len, by_class)), "left_out": {}, "doubts": NO_DOUBTS}
        about["places"] = [
            number for files in by_class for _, value in files for number in value[:2]
        ]
        about["keys"] = packed(paths)
        about["is_plain"] = paths == sorted(paths, key=lambda path: path.split("/"))
        every.append(about)
    every[0] |= {"left_out": layout.left_out, "doubts": layout.doubts}
    return every


_NODES: dict[str, type[Link | Special]] = {"link": Link, "special": Special}


def _tree_of(scan: dict[str, Any]) -> MemoryTree:
    """Return the tree that `find_files` was given."""
    tree = MemoryTree(missing=(-1, -1))
    not_files = scan["others"]
    places = scan["places"]
    for number, path in enumerate(scan["files"]):
        node: Member = TreeFile((places[2 * number], places[2 * number + 1]))
        if (described := not_files.get(str(number))) is not None:
            node = _NODES[described[0]](described[1]) if described else None
        tree.add(path, node)
    return tree


def have_class_folders(names: Sequence[str], scans: Sequence[dict[str, Any]]) -> bool:
    """Return whether tars have class folders; raise StoreError if only some of them have."""
    of_folders = ["files" in scan for scan in scans]
    if any(of_folders) and not all(of_folders):
        folders = names[of_folders.index(True)]
        shard = names[of_folders.index(False)]
        raise StoreError(
            f"{shard} is a tar of WebDataset, but {folders} has class folders: all tars of a store must have one "
            "layout"
        )
    return any(of_folders)
