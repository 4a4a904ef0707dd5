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

`check_classes` makes errors of the reasons why the folders may not be classes: they are splits, or hold the
classes, or images and masks; or all samples have one class, and other files may have the labels.
"""

from __future__ import annotations

import itertools
import logging
import posixpath
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
from operator import itemgetter
from pathlib import PurePosixPath
from typing import Any, NamedTuple, Protocol

from raypipe.errors import StoreError
from raypipe.stores.addresses import is_left_out
from raypipe.stores.base import ARRAY_SUFFIX, IMAGE_SUFFIXES
from raypipe.stores.splits import split_of, splits_in

logger = logging.getLogger(__name__)

FOLDER = "folder"
FILE = "file"
LINK = "-> "  # its target follows
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


class Entry(NamedTuple):
    """An entry of a tree: `kind` is FOLDER, FILE, LINK and its target, or the words for anything else."""

    name: str
    kind: str
    value: Any = None


class FileTree(Protocol):
    """A tree of files; paths are relative to its root, "" is the root."""

    def entries(self, folder: str) -> Iterable[Entry]:
        """Yield the entries of a folder, links followed, unordered; none of a folder that is not there."""
        ...

    def identity(self, folder: str) -> Hashable:
        """Return what is equal for two paths of one folder."""
        ...


class TreeSample(NamedTuple):
    """A sample of a tree: its class, its path from the root, and what the tree knows of the file."""

    label: int
    path: str
    value: Any


class _File(NamedTuple):
    """A file in or below one of the top folders."""

    top: str
    folder: str
    path: str
    suffix: str
    value: Any


class Layout(NamedTuple):
    """Class folders of a store, as `find_classes` finds them.

    Attributes:
        classes: class names.
        samples: the samples of each tree, by class, then by path.
        left_out: all other entries.
        flat: images that are in no folder.
        root: the folder that the class folders are in.
        files: all files of each tree in the class folders.
        beside: the files and folders next to the class folders, or to the root.
    """

    classes: tuple[str, ...]
    samples: list[list[TreeSample]]
    left_out: LeftOut
    flat: list[TreeSample]
    root: str
    files: list[list[_File]]
    beside: list[str]

    @property
    def num_samples(self) -> int:
        return sum(map(len, self.samples))


def suffix_of(name: str) -> str:
    """Return the suffix of a file's name, in lower case, with the dot."""
    stem, _, suffix = name.rpartition("/")[2].rpartition(
        "."
    )  # a Path takes six times as long
    return f".{suffix.lower()}" if stem and suffix else ""


def join(folder: str, name: str) -> str:
    """Return the path of an entry of a folder."""
    return f"{folder}/{name}" if folder else name


def find_classes(trees: Sequence[FileTree], where: str) -> Layout:
    """Find the classes of trees, which share them, and their samples; there may be none.

    Args:
        trees: several tars are several trees.
        where: name of the store, for errors.

    Raises:
        StoreError: an entry with an image's name is not a file.
    """
    root = ""
    classes, beside, num_hidden = _listed(trees, root)
    flat = [
        TreeSample(0, path, value)
        for path, kind, value in beside
        if kind == FILE and suffix_of(path) in IMAGE_SUFFIXES
    ]
    files, num_within = _walked(trees, root, classes, where)
    for name in _around(files):
        others = [join(root, other) for other in classes if other != name]
        if not all(any(_listed(trees, other)[:2]) for other in others):
            break  # one is a class without samples, so the folder is a class too
        root = join(root, name)
        classes, inner, num_inner = _listed(trees, root)
        beside += [*(Entry(f"{other}/", FOLDER) for other in others), *inner]
        num_hidden += num_inner
    if root:
        files, num_within = _walked(trees, root, classes, where)
    every = list(itertools.chain(*files))
    has_images = any(file.suffix in IMAGE_SUFFIXES for file in every)
    kept = IMAGE_SUFFIXES if has_images else {ARRAY_SUFFIX}
    left_out = _suffixes(file for file in every if file.suffix not in kept)
    left_out[_HIDDEN] = num_hidden + num_within
    labels = {name: label for label, name in enumerate(classes)}
    samples = [_labelled(of_tree, kept, labels) for of_tree in files]
    paths = [path for path, _, _ in beside]
    return Layout(tuple(classes), samples, +left_out, flat, root, files, paths)


def _labelled(
    files: Iterable[_File], suffixes: Collection[str], labels: Mapping[str, int]
) -> list[TreeSample]:
    """Return the samples of a tree, in order, with the number of their class."""
    return sorted(
        TreeSample(labels[file.top], file.path, file.value)
        for file in files
        if file.suffix in suffixes
    )


def _listed(
    trees: Sequence[FileTree], folder: str
) -> tuple[list[str], list[Entry], int]:
    """Return the names of the folders in a folder, its other entries by their paths, and how many are hidden."""
    entries = [entry for tree in trees for entry in tree.entries(folder)]
    visible = [entry for entry in entries if not is_left_out(entry.name)]
    names = {name for name, kind, _ in visible if kind == FOLDER}
    others = [
        Entry(join(folder, name), kind, value)
        for name, kind, value in visible
        if kind != FOLDER
    ]
    others.sort(key=itemgetter(0))
    return sorted(names), others, len(entries) - len(visible)


def _walked(
    trees: Sequence[FileTree], root: str, tops: Sequence[str], where: str
) -> tuple[list[list[_File]], int]:
    """Return the files of each tree in and below the top folders of a root, each folder once, and how many are
    hidden."""
    files: list[list[_File]] = [[] for _ in trees]
    num_hidden = 0
    for (tree, of_tree), top in itertools.product(zip(trees, files, strict=True), tops):
        visited = set[Hashable]()
        folders = [join(root, top)]
        for folder in folders:  # the loop appends to the list
            identity = tree.identity(folder)
            if identity in visited:
                continue
            visited.add(identity)
            names, entries, num_inner = _listed([tree], folder)
            folders += [join(folder, name) for name in names]
            num_hidden += num_inner
            for path, kind, value in entries:
                suffix = suffix_of(path)
                if kind != FILE and suffix in _SUFFIXES:
                    raise StoreError(
                        f"{where}/{path} is not an image: it is {kind}, not a regular file; remove it"
                    )
                of_tree.append(_File(top, folder, path, suffix, value))
    return files, num_hidden


def _suffixes(files: Iterable[_File]) -> LeftOut:
    """Return the number of files of each suffix."""
    return LeftOut(file.suffix or "without a suffix" for file in files)


def _holding(files: Iterable[Iterable[_File]]) -> dict[str, list[_File]]:
    """Return the images of each top folder that has any, or its arrays."""
    holding = defaultdict[str, list[_File]](list)
    for file in itertools.chain(*files):
        if file.suffix in _SUFFIXES:
            holding[file.top].append(file)
    for top, every in holding.items():
        images = [file for file in every if file.suffix in IMAGE_SUFFIXES]
        holding[top] = images or every
    return holding


def _around(files: Iterable[Iterable[_File]]) -> list[str]:
    """Return the names of folders, each in the one before, that all samples are below, none of them directly."""
    samples = itertools.chain(*_holding(files).values())
    folders = {posixpath.dirname(file.folder) for file in samples}
    common = posixpath.commonpath(folders) if folders else ""
    return common.split("/") if common else []


def tell_left_out(
    where: str,
    num_samples: int,
    left_out: Mapping[str, int],
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


def words_of(left_out: Mapping[str, int]) -> str:
    """Return what is left out in words, the most frequent first."""
    most = LeftOut(left_out).most_common()
    return _first_of([f"{num:,} {reason}" for reason, num in most])


def check_classes(
    where: str, target_column: str, layout: Layout
) -> tuple[str, list[str]]:
    """Raise StoreError if folders are not classes, unless the target column takes them for classes in any case.

    Returns:
        The class that all samples have, empty if there are several; and the files that are not read.
    """
    labels = {label for of_tree in layout.samples for label, _, _ in of_tree}
    one_class = layout.classes[min(labels)] if len(labels) == 1 else ""
    not_read = _not_read(layout)
    if target_column == BY_FOLDER:
        return one_class, not_read
    every = itertools.chain(*layout.files)
    full = {file.folder for file in every if file.suffix in _SUFFIXES}
    within = _folders_within(full, layout.root)
    for parent, names in [(layout.root, layout.classes), *sorted(within.items())]:
        refuse_splits(where, [join(parent, name) for name in splits_in(names)])
    if not target_column:
        return one_class, not_read
    why_none = (_no_classes(parent, within, full) for parent in sorted(within))
    for reason in filter(None, itertools.chain(why_none, _doubts(layout))):
        raise StoreError(
            f"{where} has {reason}: the layout is root/class/image.jpg. Choose one folder, or set {_TAKE_FOLDERS}"
        )
    if not_read and one_class:
        raise StoreError(
            f"{where}: all {layout.num_samples:,} samples have the class {one_class}, and their labels "
            f"may be in {_first_of(not_read)}, which raypipe does not read here: if it is a table that names "
            f"the images, open it instead. Or set {_TAKE_FOLDERS}"
        )
    return one_class, not_read


def _not_read(layout: Layout) -> list[str]:
    """Return the files and folders that are not read, and that may have labels."""
    paths = list(layout.beside)
    holding = _holding(layout.files)
    if len(holding) == 1:
        every = itertools.chain(*layout.files)
        others = [file for file in every if file.suffix not in _SUFFIXES]
        tops = dict.fromkeys(file.top for file in others if file.top not in holding)
        paths += [f"{join(layout.root, top)}/" for top in tops]
        paths += [file.path for file in others]
    return [path for path in paths if not _DOCUMENTS.match(posixpath.basename(path))]


def _folders_within(full: Collection[str], root: str) -> dict[str, set[str]]:
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


def _doubts(layout: Layout) -> Iterator[str]:
    """Yield the reasons why files show that folders may not be classes, in words."""
    holding = _holding(layout.files)
    if len(holding) > 1:
        every = list(itertools.chain(*layout.files))
        for top in dict.fromkeys(file.top for file in every):
            if top not in holding:
                found = words_of(_suffixes(file for file in every if file.top == top))
                folder = join(layout.root, top)
                yield f"the folder {folder}, with {found} and no image"
        if all(map(_numbers_images, holding, holding.values())):
            listed = ", ".join(sorted(holding))
            yield f"the folders {listed:.300}, which number their images"
    if of_images := sorted(itertools.chain(*map(_of_images, layout.files))):
        yield (
            f"{_first_of(of_images)}, which belong to images by their names, and may be the labels (in a tar, "
            "store.target_column is then their suffix)"
        )


def _of_images(files: Sequence[_File]) -> Iterator[str]:
    """Yield the paths that belong to images: `a.txt` belongs to `a.jpg`, and `a.jpg.json` too."""
    images = [file.path for file in files if file.suffix in IMAGE_SUFFIXES]
    names = {*images, *(path.rpartition(".")[0] for path in images)}
    for _, folder, path, suffix, _ in files:
        if suffix not in _SUFFIXES:
            parts = path.removeprefix(f"{folder}/").split(".")
            starts = itertools.accumulate(parts, "{}.{}".format)
            if any(f"{folder}/{start}" in names for start in starts):
                yield path


def _numbers_images(name: str, files: Iterable[_File]) -> bool:
    """Return whether a folder has the number of its first image."""
    first = min(file.path for file in files)
    return name.isdecimal() and PurePosixPath(first).stem == name


def _no_classes(
    parent: str, within: Mapping[str, set[str]], full: Collection[str]
) -> str:
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
    words = [split_of(name)[1] for name in names]
    parts = {word.replace(" ", "") for word in words}
    if len(set(words)) == 1:
        parts.update(words[0].split())
    alike = set.intersection(*(inner(join(parent, name)) for name in names))
    reason = ""
    if any(map(_IMAGES_OR_LABELS.fullmatch, parts)):
        reason = "look like images and their labels, or parts of them"
    elif len(alike) > 1:
        reason = f"all have the folders {', '.join(sorted(alike)):.300}"
    elif all(
        inner[:1].lower() == name.lower()
        for name in names
        for inner in within.get(join(parent, name), [""])
    ):
        reason = "are the first letters of the folders in them"
    listed = ", ".join(join(parent, name) for name in names)
    return f"the folders {listed:.300}, which {reason}" if reason else ""


def refuse_splits(where: str, splits: Sequence[str]) -> None:
    """Raise StoreError for folders that are splits, which would be learned as classes."""
    if splits:
        example = max(splits, key=lambda name: "train" in name.lower())
        raise StoreError(
            f"{where} has the folders {', '.join(splits):.300}, which are splits, not classes: choose one, such "
            f"as the folder {example}. If they are classes, set store.target_column to {BY_FOLDER!r}"
        )
