"""Samples of a tar of class folders, `class/image.jpg`, as `tar -c` makes it of a folder of images.

The rules are those of a folder, see `raypipe.stores.class_folders`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from raypipe.errors import StoreError
from raypipe.stores.base import ARRAY_SUFFIX, IMAGE_SUFFIXES, hash_of_facts
from raypipe.stores.class_folders import Layout, LeftOut, Tree, find_classes, is_left_out, suffix_of
from raypipe.stores.memory_tree import File, Link, MemoryTree, Special

Member = File | Link | Special | None
"""What a member of a tar is; None = a folder. The value of a file is its `Place`."""


class Indexed(NamedTuple):
    """The samples of several tars of class folders.

    Attributes:
        columns: image, places (N, 2), and label.
        classes: class names.
        nums: samples of each tar.
        left_out: see `raypipe.stores.class_folders`.
        facts: a hash of what the tars' own digests do not tell; empty if there is nothing.
    """

    columns: dict[str, np.ndarray]
    classes: tuple[str, ...]
    nums: list[int]
    left_out: LeftOut
    facts: str


def find_files(name: str, members: Sequence[tuple[str, Member]], tree: Tree) -> dict[str, Any] | None:
    """Return the members of a tar of class folders; None if no folder has images or arrays.

    Args:
        name: name of the tar, for errors.
        members: names, and what they are, in the tar's order. The last of equal names counts.
        tree: the same as a tree.

    Returns:
        JSON values: `files`, the names; `places`, position and num_bytes of each, as a flat list, -1 for what is
        no file; `others`, by number, ["link", target] or ["special", kind], and [] for folders; and `digest`, a
        hash over the samples' names, sizes and modification times.
    """
    if not any(map(any, find_classes([tree], name, refuse_others=False).samples)):
        return None
    last = dict(members)
    files = {name: node.value for name, node in last.items() if isinstance(node, File) and _may_count(name)}
    links = {name: node.target for name, node in last.items() if isinstance(node, Link)}
    images = [name for name in files if suffix_of(name) in IMAGE_SUFFIXES]
    names = images or [name for name in files if suffix_of(name) == ARRAY_SUFFIX]
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(names, key=lambda name: name.split("/")):
        _, num_bytes, mtime = files[name]
        digest.update(f"{name}\0{num_bytes}\0{mtime}\n".encode(errors="surrogateescape"))
    for name, target in sorted(links.items()):
        digest.update(f"{name}\0->{target}\n".encode(errors="surrogateescape"))
    places, others = list[int](), dict[str, list[str]]()
    for number, node in enumerate(last.values()):
        places += node.value[:2] if isinstance(node, File) else (-1, -1)
        if not isinstance(node, File):
            others[str(number)] = _described(node)
    return {"files": list(last), "places": places, "others": others, "digest": digest.hexdigest()}


def _may_count(name: str) -> bool:
    parts = name.split("/")
    return len(parts) > 1 and not any(map(is_left_out, parts))


def _described(node: Link | Special | None) -> list[str]:
    if isinstance(node, Link):
        return ["link", node.target]
    return ["special", node.kind] if isinstance(node, Special) else []


def index_files(names: Sequence[str], scans: Sequence[dict[str, Any]], refuse_others: bool) -> Indexed:
    """Return the samples of several tars, each in the order of a folder; names are for errors.

    Args:
        refuse_others: see `raypipe.stores.class_folders.find_classes`.

    Raises:
        StoreError: see `find_classes`; or there are no class folders.
    """
    layout = find_classes(list(map(_tree_of, scans)), names[0], refuse_others)
    nums = [sum(map(len, by_class)) for by_class in layout.samples]
    if not sum(nums):
        raise StoreError(f"{names[0]} has no class folders with images: the layout is class/image.jpg")
    places = np.array([place for by_class in layout.samples for files in by_class for _, place in files], np.int64)
    of_class = [np.repeat(np.arange(len(by_class)), list(map(len, by_class))) for by_class in layout.samples]
    columns = {"image": places.reshape(-1, 2), "label": np.concatenate(of_class).astype(np.int64)}
    return Indexed(columns, layout.classes, nums, layout.left_out, _facts(layout))


def _tree_of(scan: dict[str, Any]) -> MemoryTree:
    tree = MemoryTree(missing=(-1, -1))
    others, places = scan["others"], scan["places"]
    for number, name in enumerate(scan["files"]):
        node: Member = File((places[2 * number], places[2 * number + 1]))
        if (other := others.get(str(number))) is not None:
            kind, text = other or ("", "")
            node = Link(text) if kind == "link" else Special(text) if kind == "special" else None
        tree.add(name, node)
    return tree


def _facts(layout: Layout) -> str:
    """Return a hash of classes without samples, and of an order that is not that of the names' parts."""
    order = [[path for files in by_class for path, _ in files] for by_class in layout.samples]
    is_plain = all(paths == sorted(paths, key=lambda path: path.split("/")) for paths in order)
    has_empty = any(not any(map(len, of_class)) for of_class in zip(*layout.samples, strict=True))
    return "" if is_plain and not has_empty else hash_of_facts((layout.classes, is_plain))


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
