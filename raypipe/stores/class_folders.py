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
    a file next to the class folders              not read, which one line says

Samples are sorted by class, then by path. A folder at the end of several links counts once per class, under its
shortest and then first path. `LeftOut` counts the entries that are left out.

`Doubts` has the reasons why the folders may not be classes; `check_classes` makes errors of them. They are splits,
or hold the classes, or images and masks; or all samples have one class, and other files may have the labels.
"""

from __future__ import annotations

import itertools
import logging
import re
from collections import Counter, defaultdict
from collections.abc import (
    Collection,
    Hashable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any, NamedTuple, Protocol

from raypipe.errors import StoreError
from raypipe.stores.addresses import is_left_out
from raypipe.stores.base import ARRAY_SUFFIX, IMAGE_SUFFIXES
from raypipe.stores.splits import split_of, splits_in

logger = logging.getLogger(__name__)

FOLDER = "folder"
FILE = "file"
BY_FOLDER = "folder"
"""The value of target_column that takes the folders for classes whatever else is in them."""

_SUFFIXES = {*IMAGE_SUFFIXES, ARRAY_SUFFIX}
# Names, only of letters, of folders of images or of their labels, which are not classes next to each other.
_IMAGES_OR_LABELS = re.compile(
    r"images?|imgs?|jpe?gs?|(jpeg|png)images|leftimgbit|annotations?|labels|masks|groundtruth|gt|trimaps|xmls"
    r"|segmentation(class|object)"
)
_DOCUMENTS = re.compile(
    r"(readme|licen[cs]e|copying|notice|citation|thumbs\.db|desktop\.ini)|.*\.(md|pdf|py|sh)$",
    re.IGNORECASE,
)
_HIDDEN = "hidden or of the system"
_NUM_NAMED = 3
_TAKE_FOLDERS = f"store.target_column to {BY_FOLDER!r} to train on the folders' names, or to '' for no target"

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


class Doubts(NamedTuple):
    """Reasons why folders may not be classes.

    Attributes:
        splits: folders that are splits.
        reasons: what shows that the folders are not classes, in words.
        labels: a sentence about other files that may be the labels; may be empty.
        others: files and folders that are not read, and that may have labels.
    """

    splits: list[str]
    reasons: list[str]
    labels: str
    others: list[str]


class Layout(NamedTuple):
    """Class folders of a store, as `find_classes` finds them.

    Attributes:
        classes: class names.
        samples: the samples of each tree, by class.
        left_out: all other entries.
        doubts: why they may not be classes.
        flat: images that are in no folder.
    """

    classes: tuple[str, ...]
    samples: list[list[list[TreeSample]]]
    left_out: LeftOut
    doubts: Doubts
    flat: list[TreeSample]

    @property
    def nums(self) -> dict[str, int]:
        """The number of samples of each class."""
        every = zip(self.classes, *self.samples, strict=True)
        return {name: sum(map(len, of_trees)) for name, *of_trees in every}


def suffix_of(name: str) -> str:
    """Return the suffix of a file's name, in lower case, with the dot."""
    return PurePosixPath(name).suffix.lower()


_Found = tuple[int, str, Any]
"""Number of a tree, and a sample of it."""


@dataclass
class _Files:
    """The files of a folder and of all folders below it, in all trees."""

    images: list[_Found] = field(default_factory=list)
    arrays: list[_Found] = field(default_factory=list)
    others: list[str] = field(default_factory=list)
    # those of the others that belong to images
    of_images: list[str] = field(default_factory=list)
    # folders that hold images or arrays
    folders: list[str] = field(default_factory=list)
    num_hidden: int = 0

    @property
    def samples(self) -> list[_Found]:
        return self.images or self.arrays

    @property
    def suffixes(self) -> LeftOut:
        """Return the number of other files of each suffix."""
        return LeftOut(suffix_of(path) or "without a suffix" for path in self.others)


def find_classes(trees: Sequence[FileTree], where: str) -> Layout:
    """Find the classes of trees, which share them, and their samples; there may be none.

    Args:
        trees: several tars are several trees.
        where: name of the store, for errors.

    Raises:
        StoreError: an entry with an image's name is not a file.
    """
    root = ""
    flat, names, num_hidden, others = _top(trees, root)
    by_class = {name: _files(trees, name, where) for name in sorted(names)}
    for folder in _folders_around(trees, by_class):
        siblings = (join(root, name) for name in sorted(names))
        others += (f"{sibling}/" for sibling in siblings if sibling != folder)
        root = folder
        _, names, hidden, beside = _top(trees, root)
        num_hidden += hidden
        others += beside
    if root:
        by_class = {
            name: _files(trees, f"{root}/{name}", where) for name in sorted(names)
        }
    every = by_class.values()
    has_images = any(files.images for files in every)
    left_out = sum((files.suffixes for files in every), LeftOut())
    left_out[_HIDDEN] = num_hidden + sum(files.num_hidden for files in every)
    if has_images:
        left_out[ARRAY_SUFFIX] = sum(len(files.arrays) for files in every)
    return Layout(
        classes=tuple(by_class),
        samples=_by_tree(len(trees), list(every), has_images),
        left_out=+left_out,
        doubts=_doubts_of(root, by_class, others),
        flat=sorted(flat),
    )


def _by_tree(
    num_trees: int, by_class: Sequence[_Files], has_images: bool
) -> list[list[list[TreeSample]]]:
    """Return the samples of each tree, by class, sorted by their paths."""
    samples: list[list[list[TreeSample]]] = [
        [[] for _ in by_class] for _ in range(num_trees)
    ]
    for label, files in enumerate(by_class):
        for number, path, value in files.images if has_images else files.arrays:
            samples[number][label].append((path, value))
    for of_class in itertools.chain(*samples):
        of_class.sort(key=lambda sample: sample[0])
    return samples


def join(folder: str, name: str) -> str:
    """Return the path of an entry of a folder."""
    return f"{folder}/{name}" if folder else name


def tell_left_out(
    where: str,
    num_samples: int,
    left_out: LeftOut,
    one_class: str = "",
    others: Sequence[str] = (),
) -> None:
    """Say in one line what a store leaves out, and whether all of its samples have one class."""
    told = f"{where}: {num_samples:,} samples"
    if one_class:
        told = f"{where}: all {num_samples:,} samples have the class {one_class}"
    if left_out:
        told += f"; left out: {words_of(left_out)}"
    if others:
        told += f"; not read: {_first_of(others)}"
    if one_class or left_out or others:
        logger.warning("%s", told)


def _first_of(names: Sequence[str]) -> str:
    """Return the first names of a list, and how many more there are."""
    more = f" and {len(names) - _NUM_NAMED:,} more" if len(names) > _NUM_NAMED else ""
    return f"{', '.join(names[:_NUM_NAMED]):.300}{more}"


def words_of(left_out: LeftOut) -> str:
    """Return what is left out in words, the most frequent first."""
    return _first_of([f"{num:,} {reason}" for reason, num in left_out.most_common()])


def _top(
    trees: Sequence[FileTree], root: str
) -> tuple[list[TreeSample], set[str], int, list[str]]:
    """Return a folder's own images, the names of its folders, the number of hidden entries, and its files."""
    flat = list[TreeSample]()
    names = set[str]()
    num_hidden = 0
    others = list[str]()
    for name, kind, value in itertools.chain.from_iterable(
        tree.entries(root) for tree in trees
    ):
        if is_left_out(name):
            num_hidden += 1
        elif kind == FOLDER:
            names.add(name)
        else:
            others.append(join(root, name))
            if kind == FILE and suffix_of(name) in IMAGE_SUFFIXES:
                flat.append((join(root, name), value))
    return flat, names, num_hidden, sorted(others)


def _files(trees: Sequence[FileTree], top: str, where: str) -> _Files:
    """Return the files of a folder and of all folders below it, unordered."""
    files = _Files()
    for number, tree in enumerate(trees):
        visited = set[Hashable]()
        folders = [top]
        for folder in folders:  # the loop appends to the list
            identity = tree.identity(folder)
            if identity not in visited:
                visited.add(identity)
                folders += _add_folder(files, number, tree, folder, where)
    return files


def _add_folder(
    files: _Files, number: int, tree: FileTree, folder: str, where: str
) -> list[str]:
    """Add the files of a folder; return the folders in it. `a.txt` belongs to `a.jpg`, and `a.jpg.json` too."""
    within = list[str]()
    unknown = list[str]()
    images = set[str]()
    num_samples = len(files.images) + len(files.arrays)
    for name, kind, value in tree.entries(folder):
        path = f"{folder}/{name}"
        suffix = suffix_of(name)
        if is_left_out(name):
            files.num_hidden += 1
        elif kind == FOLDER:
            within.append(path)
        elif suffix not in _SUFFIXES:
            unknown.append(name)
        elif kind != FILE:
            raise StoreError(
                f"{where}/{path} is not an image: it is {kind}, not a regular file; remove it"
            )
        elif suffix == ARRAY_SUFFIX:
            files.arrays.append((number, path, value))
        else:
            images |= {name, name[: -len(suffix)]}
            files.images.append((number, path, value))
    if len(files.images) + len(files.arrays) > num_samples:
        files.folders.append(folder)
    for name in sorted(unknown):
        files.others.append(f"{folder}/{name}")
        starts = itertools.accumulate(name.split("."), "{}.{}".format)
        if not images.isdisjoint(starts):
            files.of_images.append(f"{folder}/{name}")
    return sorted(within)


def _folders_around(
    trees: Sequence[FileTree], by_class: Mapping[str, _Files]
) -> Iterator[str]:
    """Yield the paths of the folders, each in the one before, that all samples are below, none of them directly.

    An empty folder next to one is a class without samples, so the other is a class too.
    """
    if sum(bool(files.samples) for files in by_class.values()) != 1:
        return
    parts = [
        path.split("/") for files in by_class.values() for _, path, _ in files.samples
    ]
    root = ""
    for depth in range(min(map(len, parts)) - 2):
        name = parts[0][depth]
        if any(path[depth] != name for path in parts):
            return
        names = _top(trees, root)[1]
        if any(_is_empty(trees, join(root, sibling)) for sibling in names - {name}):
            return
        root = join(root, name)
        yield root


def _is_empty(trees: Sequence[FileTree], folder: str) -> bool:
    """Return whether a folder has no visible entry in any tree."""
    return all(
        is_left_out(entry.name) for tree in trees for entry in tree.entries(folder)
    )


def _doubts_of(root: str, by_class: Mapping[str, _Files], others: list[str]) -> Doubts:
    """Return the doubts about folders in a root; `others` are the files next to them, or to the root."""
    holding = {name: files for name, files in by_class.items() if files.samples}
    every = by_class.values()
    full = {folder for files in every for folder in files.folders}
    within = _folders_in(full, root)
    splits = [[join(root, name) for name in splits_in(by_class)]]
    reasons = list[str]()
    for parent, names in sorted(within.items()):
        splits.append([join(parent, name) for name in splits_in(names)])
        reasons.append(_no_classes(parent, within, full))
    for name in [name for name in by_class if name not in holding]:
        folder = join(root, name)
        if (found := by_class[name].suffixes) and len(holding) > 1:
            reasons.append(f"the folder {folder}, with {words_of(found)} and no image")
        elif found:
            others = [*others, f"{folder}/"]
    if len(holding) == 1:
        others = [*others, *(path for files in every for path in files.others)]
    elif all(map(_numbers_images, holding, holding.values())):
        listed = ", ".join(holding)
        reasons.append(f"the folders {listed:.300}, which number their images")
    return Doubts(
        next(filter(None, splits), []),
        list(filter(None, reasons)),
        _labels_beside(every),
        [path for path in others if not _DOCUMENTS.match(path.rpartition("/")[2])],
    )


def _labels_beside(every: Iterable[_Files]) -> str:
    """Return that files may be labels, in words, since they belong to images; empty if there are none."""
    of_images = sorted(path for files in every for path in files.of_images)
    if not of_images:
        return ""
    return (
        f"{_first_of(of_images)}, which belong to images by their names, and may be the labels (in a tar, "
        "store.target_column is then their suffix)"
    )


def _numbers_images(name: str, files: _Files) -> bool:
    """Return whether a folder has the number of its first image."""
    first = min(path for _, path, _ in files.samples)
    return name.isdecimal() and PurePosixPath(first).stem == name


def _folders_in(full: Collection[str], root: str) -> dict[str, set[str]]:
    """Return the names of the folders in each folder, of those with samples in or below them."""
    within = defaultdict[str, set[str]](set)
    for folder in full:
        while folder != root:
            parent, _, name = folder.rpartition("/")
            if name in within[parent]:
                break
            within[parent].add(name)
            folder = parent
    return dict(within)


def _no_classes(parent: str, within: dict[str, set[str]], full: Collection[str]) -> str:
    """Return why folders next to each other are not classes, in words; empty if they may be."""

    def inner(folder: str) -> set[str]:
        """Return the names of the folders in a folder, or in the only one that it has."""
        names = within.get(folder, set())
        while len(names) == 1 and folder not in full:
            folder = join(folder, *names)
            names = within.get(folder, set())
        return set() if folder in full else names

    names = sorted(within[parent])
    if len(names) < 2:
        return ""
    listed = ", ".join(join(parent, name) for name in names)
    words = [split_of(name)[1] for name in names]
    parts = set(words[0].split()) if len(set(words)) == 1 else set()
    parts |= {word.replace(" ", "") for word in words}
    if any(map(_IMAGES_OR_LABELS.fullmatch, parts)):
        return f"the folders {listed:.300}, which look like images and their labels, or parts of them"
    contents = [inner(join(parent, name)) for name in names]
    alike = set.intersection(*contents)
    if len(alike) > 1:
        held = ", ".join(sorted(alike))
        return f"the folders {listed:.300}, which all have the folders {held:.300}"
    if all(
        inner[:1].lower() == name.lower()
        for name in names
        for inner in within.get(join(parent, name), [""])
    ):
        return f"the folders {listed:.300}, which are the first letters of the folders in them"
    return ""


def check_classes(
    where: str, target_column: str, layout: Layout
) -> tuple[str, list[str]]:
    """Raise StoreError if folders are not classes, unless the target column takes them for classes in any case.

    Returns:
        The class that all samples have, empty if there are several; and the files that are not read.
    """
    doubts = layout.doubts
    num_by_class = layout.nums
    holding = [name for name, num in num_by_class.items() if num]
    told = holding[0] if len(holding) == 1 else "", doubts.others
    if target_column == BY_FOLDER:
        return told
    refuse_splits(where, doubts.splits)
    if not target_column:
        return told
    for reason in filter(None, (*doubts.reasons, doubts.labels)):
        raise StoreError(
            f"{where} has {reason}: the layout is root/class/image.jpg. Choose one folder, or set {_TAKE_FOLDERS}"
        )
    if doubts.others and len(holding) == 1:
        raise StoreError(
            f"{where}: all {sum(num_by_class.values()):,} samples have the class {holding[0]}, and their labels "
            f"may be in {_first_of(doubts.others)}, which raypipe does not read here: if it is a table that names "
            f"the images, open it instead. Or set {_TAKE_FOLDERS}"
        )
    return told


def refuse_splits(where: str, splits: Sequence[str]) -> None:
    """Raise StoreError for folders that are splits, which would be learned as classes."""
    if splits:
        example = max(splits, key=lambda name: "train" in name.lower())
        raise StoreError(
            f"{where} has the folders {', '.join(splits):.300}, which are splits, not classes: choose one, such "
            f"as the folder {example}. If they are classes, set store.target_column to {BY_FOLDER!r}"
        )
