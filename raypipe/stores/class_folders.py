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
_IMAGES_OR_LABELS = frozenset(
    {
        *("image", "images", "img", "imgs", "jpegimages", "pngimages", "leftimgbit"),
        *("annotation", "annotations", "labels", "masks", "groundtruth", "gt"),
        *("segmentationclass", "segmentationobject", "trimaps", "jpg", "jpegs", "xmls"),
    }
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
        folders: why folders are not classes, in words.
        others: files and folders that are not read, and that may have labels.
        of_images: other files that belong to images by their names.
    """

    splits: list[str]
    folders: str
    others: list[str]
    of_images: list[str]


NO_DOUBTS = Doubts([], "", [], [])


class Layout(NamedTuple):
    """Class folders of a store, as `find_classes` finds them.

    Attributes:
        root: path of the folder that the classes are in.
        classes: class names.
        samples: the samples of each tree, by class.
        left_out: all other entries.
        doubts: why they may not be classes.
        has_images: False if the samples are arrays.
        flat: images that are in no folder.
        has_tars: whether there are tars next to the folders.
    """

    root: str
    classes: tuple[str, ...]
    samples: list[list[list[TreeSample]]]
    left_out: LeftOut
    doubts: Doubts
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
    # folders that hold images or arrays
    folders: list[str] = field(default_factory=list)
    # some other files of each folder
    others: list[str] = field(default_factory=list)
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
        StoreError: an entry with an image's name is not a file.
    """
    flat, names, outside, others = _top(trees, "")
    by_class = _files_by_class(trees, "", names, where)
    root = ""
    for folder in _folders_around(trees, by_class):
        others += (
            f"{join(root, name)}/"
            for name in sorted(names)
            if join(root, name) != folder
        )
        root = folder
        _, names, hidden, beside = _top(trees, root)
        outside += hidden
        others += beside
    if root:
        by_class = _files_by_class(trees, root, names, where)
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
        doubts=_doubts_of(root, by_class, others),
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
    told = [f"{num:,} {reason}" for reason, num in left_out.most_common(6)]
    num_untold = left_out.total() - sum(num for _, num in left_out.most_common(6))
    if num_untold:
        told.append(f"{num_untold:,} others")
    return ", ".join(told)


def _top(
    trees: Sequence[FileTree], root: str
) -> tuple[list[TreeSample], set[str], LeftOut, list[str]]:
    """Return a folder's own images, the names of its folders, the hidden entries, and its other files."""
    flat = list[TreeSample]()
    names = set[str]()
    hidden = LeftOut()
    others = list[str]()
    for name, kind, value in itertools.chain.from_iterable(
        tree.entries(root) for tree in trees
    ):
        if is_left_out(name):
            hidden[_HIDDEN] += 1
        elif kind == FOLDER:
            names.add(name)
        else:
            others.append(join(root, name))
            if kind == FILE and suffix_of(name) in IMAGE_SUFFIXES:
                flat.append((join(root, name), value))
    return flat, names, hidden, sorted(others)


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
        num_arrays = len(files.arrays)
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
        if images or len(files.arrays) > num_arrays:
            files.folders.append(folder)
        if unknown:
            _count_unknown(files, folder, images, unknown)
    return files


def _count_unknown(
    files: _Files, folder: str, images: list[str], unknown: list[str]
) -> None:
    """Note files that are neither images nor arrays, and which of them belong to an image: `a.txt` to `a.jpg`, and
    `a.jpg.json` too."""
    files.others += (f"{folder}/{name}" for name in sorted(unknown)[:_NUM_NAMED])
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
        names = _top(trees, root)[1]
        if any(_is_empty(trees, join(root, sibling)) for sibling in names - {name}):
            return
        root = join(root, name)
        yield root


def _holds(of_trees: list[_Files]) -> bool:
    return bool(_samples_of(of_trees))


def _samples_of(of_trees: list[_Files]) -> list[list[TreeSample]]:
    """Return the samples of each tree that has some."""
    return [files.samples for files in of_trees if files.samples]


def _is_empty(trees: Sequence[FileTree], folder: str) -> bool:
    """Return whether a folder has no visible entry in any tree."""
    return all(
        is_left_out(entry.name) for tree in trees for entry in tree.entries(folder)
    )


def _doubts_of(
    root: str, by_class: dict[str, list[_Files]], others: list[str]
) -> Doubts:
    """Return the doubts about folders in a root; `others` are the files next to them, or to the root."""
    every = [files for of_trees in by_class.values() for files in of_trees]
    holding = [name for name, of_trees in by_class.items() if _holds(of_trees)]
    full = {folder for files in every for folder in files.folders}
    within = _folders_in(full, root)
    splits = splits_in(by_class)
    if len(holding) == 1 < len(by_class) and join(root, holding[0]) not in full:
        splits = splits or [name for name in holding if split_of(name)[0]]
    splits = [join(root, name) for name in splits]
    folders = ""
    for parent, names in sorted(within.items()):
        splits = splits or [join(parent, name) for name in splits_in(names)]
        folders = folders or _no_classes(parent, within, full)
    for name, of_trees in by_class.items():
        found = sum((files.left_out for files in of_trees), LeftOut())
        del found[_HIDDEN]
        if not found or name in holding:
            continue
        folder = join(root, name)
        if len(holding) == 1:
            others = [*others, f"{folder}/"]
        else:
            folders = (
                folders or f"the folder {folder}, with {words_of(found)} and no image"
            )
    if len(holding) > 1 and all(map(str.isdecimal, holding)):
        firsts = {name: min(map(min, _samples_of(by_class[name]))) for name in holding}
        if all(PurePosixPath(path).stem == name for name, (path, _) in firsts.items()):
            folders = folders or (
                f"the folders {', '.join(holding):.300}, which number their images"
            )
    if len(holding) == 1:
        others = [*others, *(path for files in every for path in files.others)]
    kept = [path for path in others if not _DOCUMENTS.match(path.rpartition("/")[2])]
    of_images = sorted(path for files in every for path in files.with_images)
    return Doubts(splits, folders, kept, of_images)


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
    if not _IMAGES_OR_LABELS.isdisjoint(
        {*parts, *(word.replace(" ", "") for word in words)}
    ):
        return f"the folders {listed:.300}, which look like images and their labels, or parts of them"
    contents = [inner(join(parent, name)) for name in names]
    alike = set.intersection(*contents)
    if len(alike) > 1:
        held = ", ".join(sorted(alike))
        return f"the folders {listed:.300}, which all have the folders {held:.300}"
    of_first = {name: within.get(join(parent, name), [""]) for name in names}
    if all(
        inner[:1].lower() == name.lower()
        for name, inners in of_first.items()
        for inner in inners
    ):
        return f"the folders {listed:.300}, which are the first letters of the folders in them"
    return ""


def check_classes(
    where: str,
    target_column: str,
    doubts: Sequence[Doubts],
    num_by_class: Mapping[str, int],
) -> None:
    """Raise StoreError if folders are not classes, unless the target column takes them for classes in any case.

    Args:
        doubts: of each tree of the store.
        num_by_class: the samples of each class.
    """
    if target_column == BY_FOLDER:
        return
    all_splits = [splits for doubt in doubts if (splits := doubt.splits)]
    refuse_splits(where, *all_splits, splits_in(num_by_class))
    if not target_column:
        return
    for doubt in doubts:
        if doubt.folders:
            raise StoreError(
                f"{where} has {doubt.folders}: the layout is root/class/image.jpg. Choose one folder, or set "
                f"{_TAKE_FOLDERS}"
            )
    refuse_files_of_images(
        where, sorted(itertools.chain(*(d.of_images for d in doubts)))
    )
    one_class = only_class(num_by_class)
    others = list(itertools.chain(*(doubt.others for doubt in doubts)))
    if one_class and others:
        num_samples = sum(num_by_class.values())
        raise StoreError(
            f"{where}: all {num_samples:,} samples have the class {one_class}, and their labels may "
            f"be in {_first_of(others)}, which raypipe does not read. Set {_TAKE_FOLDERS}"
        )


def only_class(num_by_class: Mapping[str, int]) -> str:
    """Return the class that all samples have; empty if there are several."""
    holding = [name for name, num in num_by_class.items() if num]
    return holding[0] if len(holding) == 1 else ""


def refuse_splits(where: str, *found: Sequence[str]) -> None:
    """Raise StoreError for folders that are splits, which would be learned as classes."""
    for splits in filter(None, found):
        example = max(splits, key=lambda name: "train" in name.lower())
        raise StoreError(
            f"{where} has the folders {', '.join(splits):.300}, which are splits, not classes: choose one, such "
            f"as the folder {example}. If they are classes, set store.target_column to {BY_FOLDER!r}"
        )


def refuse_files_of_images(where: str, of_images: Sequence[str]) -> None:
    """Raise StoreError if other files belong to images by their names, since they may be the labels."""
    if not of_images:
        return
    suffixes = ", ".join(sorted({suffix_of(path)[1:] for path in of_images}))
    raise StoreError(
        f"{where}: {_first_of(of_images)} belong to images by their names, so the labels "
        f"may be in them and not in the names of the folders. Set store.target_column to {BY_FOLDER!r} to train "
        f"on the folders' names, to '' for no target, or, in a tar, to the labels' suffix ({suffixes:.100})"
    )
