"""Class folders, `class/image.jpg`: which entries of a tree of files are samples, of which class, in which order.

A folder, its copy in an object store and its tar are one data set, by the same rules:

    an image, in a folder or in folders below it  a sample of the class that the folder names
    a .npy                                        a sample, if the tree has no image
    a folder                                      a class, in the order of names, also if it is empty
    a folder around all images, with none in it   no class: the folders in it are
    a link                                        what it leads to; an unreadable sample if it leads nowhere
    a name that begins with a dot, lost+found,
    __MACOSX and the like                         left out
    another file                                  left out; an error if it belongs to an image by its name
    a file next to the class folders              left out

Samples are sorted by class, then by path. A folder at the end of several links counts once per class, under its
shortest and then first path. `LeftOut` counts the entries that are left out.
"""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any, NamedTuple, Protocol

from raypipe.errors import StoreError
from raypipe.stores.addresses import is_left_out
from raypipe.stores.base import ARRAY_SUFFIX, IMAGE_SUFFIXES

logger = logging.getLogger(__name__)

FOLDER = "folder"
FILE = "file"
BY_FOLDER = "folder"
"""The value of target_column that takes the folders for classes whatever else is in them."""

_SUFFIXES = {*IMAGE_SUFFIXES, ARRAY_SUFFIX}
_SPLITS = frozenset(
    {
        "train",
        "training",
        "val",
        "valid",
        "validation",
        "test",
        "testing",
        "eval",
        "dev",
    }
)
_HIDDEN = "hidden or of the system"
_BESIDE = "outside the class folders"
_NUM_NAMED = 3

LeftOut = Counter[str]
"""How many entries of a tree are no samples, by the reason: a suffix, or words."""

TreeSample = tuple[str, Any]
"""Path from the root, and what its tree knows of the file."""


class Entry(NamedTuple):
    """An entry of a folder, links followed: `kind` is FOLDER, FILE, or the words for anything else."""

    name: str
    kind: str
    value: Any = None


class FileTree(Protocol):
    """A tree of files; paths are relative to its root, "" is the root."""

    def entries(self, folder: str) -> Iterable[Entry]:
        """Yield the entries of a folder, unordered; none of a folder that is not there."""
        ...

    def identity(self, folder: str) -> Hashable:
        """Return what is equal for two paths of one folder."""
        ...


class Layout(NamedTuple):
    """Class folders of a store, as `find_classes` finds them.

    Attributes:
        root: path of the folder that the classes are in.
        classes: class names.
        samples: the samples of each tree, by class.
        left_out: all other entries.
        of_images: other files that belong to images by their names.
        has_images: False if the samples are arrays.
        flat: images that are in no folder.
        has_tars: whether there are tars next to the folders.
    """

    root: str
    classes: tuple[str, ...]
    samples: list[list[list[TreeSample]]]
    left_out: LeftOut
    of_images: list[str]
    has_images: bool
    flat: list[TreeSample]
    has_tars: bool


def suffix_of(name: str) -> str:
    """Return the suffix of a file's name, in lower case, with the dot."""
    return PurePosixPath(name).suffix.lower()


@dataclass
class _Files:
    """The files of a folder and of all folders below it."""

    images: list[TreeSample] = field(default_factory=list)
    arrays: list[TreeSample] = field(default_factory=list)
    left_out: LeftOut = field(default_factory=Counter)
    # other files that belong to images
    with_images: list[str] = field(default_factory=list)

    @property
    def samples(self) -> list[TreeSample]:
        return self.images or self.arrays

    def sorted(self, has_images: bool) -> list[TreeSample]:
        """Return the samples by path: the images, or, if no folder has an image, the arrays."""
        samples = self.images if has_images else self.arrays
        return sorted(samples, key=lambda sample: sample[0])


def find_classes(trees: Sequence[FileTree], where: str) -> Layout:
    """Find the classes of trees, which share them, and their samples; there may be none.

    Args:
        trees: several tars are several trees.
        where: name of the store, for errors.

    Raises:
        StoreError: the folders are splits; or an entry with an image's name is not a file.
    """
    flat, names, outside = _top(trees, "")
    by_class = _files_by_class(trees, "", names, where)
    root = ""
    for folder in _folders_around(trees, by_class):
        outside += Counter(f"{name}/" for name in names if join(root, name) != folder)
        root = folder
        _, names, beside = _top(trees, root)
        outside += beside
    if root:
        by_class = _files_by_class(trees, root, names, where)
    refuse_splits(where, by_class, _only_parent(root, by_class))
    every = [files for of_trees in by_class.values() for files in of_trees]
    has_images = any(files.images for files in every)
    left_out = sum((files.left_out for files in every), outside)
    if has_images and (num_arrays := sum(len(files.arrays) for files in every)):
        left_out[ARRAY_SUFFIX] += num_arrays
    return Layout(
        root=root,
        classes=tuple(by_class),
        samples=[
            [of_trees[number].sorted(has_images) for of_trees in by_class.values()]
            for number in range(len(trees))
        ],
        left_out=left_out,
        of_images=sorted(path for files in every for path in files.with_images),
        has_images=has_images,
        flat=sorted(flat),
        has_tars=any(
            suffix_of(entry.name) == ".tar"
            for tree in trees
            for entry in tree.entries("")
        ),
    )


def _files_by_class(
    trees: Sequence[FileTree], root: str, names: Iterable[str], where: str
) -> dict[str, list[_Files]]:
    """Return the files of each tree by the folders that are in the root, in the order of their names."""
    return {
        name: [_files(tree, join(root, name), where) for tree in trees]
        for name in sorted(names)
    }


def _only_parent(root: str, by_class: dict[str, list[_Files]]) -> str:
    """Return the only class with samples if all of them are in folders below it; else an empty text."""
    holding = [name for name, of_trees in by_class.items() if _holds(of_trees)]
    if len(holding) != 1:
        return ""
    (name,) = holding
    return name if _are_below(join(root, name), by_class[name]) else ""


def join(folder: str, name: str) -> str:
    """Return the path of an entry of a folder."""
    return f"{folder}/{name}" if folder else name


def tell_left_out(where: str, num_samples: int, left_out: LeftOut) -> None:
    """Say in one line what a store leaves out."""
    if left_out:
        logger.warning(
            "%s: %s samples; left out: %s",
            where,
            f"{num_samples:,}",
            words_of(left_out),
        )


def words_of(left_out: LeftOut) -> str:
    """Return what is left out in words, the most frequent first."""
    told = [f"{num:,} {reason}" for reason, num in left_out.most_common(6)]
    num_untold = left_out.total() - sum(num for _, num in left_out.most_common(6))
    if num_untold:
        told.append(f"{num_untold:,} others")
    return ", ".join(told)


def _top(
    trees: Sequence[FileTree], root: str
) -> tuple[list[TreeSample], set[str], LeftOut]:
    """Return the images in a folder itself, the names of its folders, and what else is in it."""
    flat = list[TreeSample]()
    names = set[str]()
    beside = LeftOut()
    for name, kind, value in itertools.chain.from_iterable(
        tree.entries(root) for tree in trees
    ):
        if is_left_out(name):
            beside[_HIDDEN] += 1
        elif kind == FOLDER:
            names.add(name)
        else:
            beside[_BESIDE] += 1
            if kind == FILE and suffix_of(name) in IMAGE_SUFFIXES:
                flat.append((join(root, name), value))
    return flat, names, beside


def _files(tree: FileTree, top: str, where: str) -> _Files:
    """Return the files of a folder and of all folders below it, unordered."""
    files = _Files()
    visited = set[Hashable]()
    folders = [top]
    for folder in folders:  # the loop appends to the list
        identity = tree.identity(folder)
        if identity in visited:
            continue
        visited.add(identity)
        within = list[str]()
        images = list[str]()
        unknown = list[str]()
        for name, kind, value in tree.entries(folder):
            if is_left_out(name):
                files.left_out[_HIDDEN] += 1
                continue
            if kind == FOLDER:
                within.append(f"{folder}/{name}")
                continue
            suffix = suffix_of(name)
            if suffix not in _SUFFIXES:
                unknown.append(name)
                continue
            if kind != FILE:
                raise StoreError(
                    f"{where}/{folder}/{name} is not an image: it is {kind}, not a regular file; remove it"
                )
            if suffix == ARRAY_SUFFIX:
                files.arrays.append((f"{folder}/{name}", value))
            else:
                images.append(name)
                files.images.append((f"{folder}/{name}", value))
        folders += sorted(within)
        if unknown:
            _count_unknown(files, folder, images, unknown)
    return files


def _count_unknown(
    files: _Files, folder: str, images: list[str], unknown: list[str]
) -> None:
    """Note files that are neither images nor arrays, and which of them belong to an image: `a.txt` to `a.jpg`, and
    `a.jpg.json` too."""
    stems = {*images, *(PurePosixPath(name).stem for name in images)}
    for name in unknown:
        files.left_out[suffix_of(name) or "without a suffix"] += 1
        ends = (position for position, letter in enumerate(name) if letter == ".")
        if any(name[:end] in stems for end in ends):
            files.with_images.append(f"{folder}/{name}")


def _folders_around(
    trees: Sequence[FileTree], by_class: dict[str, list[_Files]]
) -> Iterator[str]:
    """Yield the paths of the folders, each in the one before, that all samples are below, none of them directly.

    An empty folder next to one is a class without samples, so the other is a class too.
    """
    samples = [files.samples for of_trees in by_class.values() for files in of_trees]
    if sum(map(_holds, by_class.values())) != 1:
        return
    parts = [path.split("/") for path, _ in itertools.chain.from_iterable(samples)]
    root = ""
    for depth in range(min(map(len, parts), default=0) - 2):
        name = parts[0][depth]
        if any(path[depth] != name for path in parts):
            return
        _, names, _ = _top(trees, root)
        if any(_is_empty(trees, join(root, sibling)) for sibling in names - {name}):
            return
        root = join(root, name)
        yield root


def _holds(of_trees: list[_Files]) -> bool:
    return any(files.samples for files in of_trees)


def _is_empty(trees: Sequence[FileTree], folder: str) -> bool:
    """Return whether a folder has no visible entry in any tree."""
    return all(
        is_left_out(entry.name) for tree in trees for entry in tree.entries(folder)
    )


def _are_below(folder: str, of_trees: list[_Files]) -> bool:
    """Return whether all samples of a folder are in folders below it."""
    return all(
        "/" in path[len(folder) + 1 :]
        for files in of_trees
        for path, _ in files.samples
    )


def refuse_splits(where: str, classes: Collection[str], only_one: str = "") -> None:
    """Raise StoreError if class folders are the splits of a dataset, which would be learned as classes.

    Args:
        only_one: the only folder with samples, if all of them are in folders below it.
    """
    several = "train" in classes and not {
        "val",
        "valid",
        "validation",
        "test",
    }.isdisjoint(classes)
    if several or (only_one.lower() in _SPLITS and len(classes) > 1):
        raise StoreError(
            f"{where} has the folders {', '.join(classes):.300}, which are splits, not classes: choose one, such "
            "as the folder train"
        )


def refuse_files_of_images(where: str, of_images: Sequence[str]) -> None:
    """Raise StoreError if other files belong to images by their names, since they may be the labels."""
    if not of_images:
        return
    if len(of_images) > _NUM_NAMED:
        more = f" and {len(of_images) - _NUM_NAMED:,} more"
    else:
        more = ""
    suffixes = ", ".join(sorted({suffix_of(path)[1:] for path in of_images}))
    raise StoreError(
        f"{where}: {', '.join(of_images[:_NUM_NAMED]):.300}{more} belong to images by their names, so the labels "
        f"may be in them and not in the names of the folders. Set store.target_column to {BY_FOLDER!r} to train "
        f"on the folders' names, to '' for no target, or, in a tar, to the labels' suffix ({suffixes:.100})"
    )
