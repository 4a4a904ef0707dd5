"""Class folders of images, `class/image.jpg`, in an archive, by the names of its members."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from pathlib import PurePosixPath

from raypipe.errors import StoreError
from raypipe.stores.base import ARRAY_SUFFIX, IMAGE_SUFFIXES


def is_visible(name: PurePosixPath) -> bool:
    """Whether a member counts: hidden members, absolute names and names that lead out of the folder do not."""
    return not name.is_absolute() and not any(part.startswith(".") or part == "__MACOSX" for part in name.parts)


def is_sample(name: PurePosixPath, suffixes: Collection[str] = IMAGE_SUFFIXES) -> bool:
    """Whether a member may be a sample."""
    return name.suffix.lower() in suffixes and is_visible(name)


def sample_suffixes(names: Iterable[str]) -> Collection[str]:
    """Those of an archive's samples: of images, or, where it has none, of arrays."""
    return IMAGE_SUFFIXES if any(is_sample(PurePosixPath(name)) for name in names) else {ARRAY_SUFFIX}


def class_samples(
    address: str, archives: Sequence[Iterable[str]], hint: str = ""
) -> tuple[tuple[str, ...], list[list[tuple[int, str]]]]:
    """Class names, position = label; and of each archive the label and name of its samples, sorted by both.

    Args:
        address: of the archives, for errors.
        archives: the names of each one's samples.
        hint: what else such archives may hold, for errors.
    """
    shards = [list(names) for names in archives]
    shared = [name.split("/") for names in shards for name in names if "/" in name]
    if not shared:
        where = "only images at its top, so their labels are unknown" if any(shards) else "no images"
        raise StoreError(f"{address} has {where}: the layout is class/image.jpg, maybe below common folders{hint}")
    depth = 0
    # A folder that all share is a wrapper such as `train/`, as long as a class folder is left below it.
    while len({parts[depth] for parts in shared}) == 1 and min(map(len, shared)) > depth + 2:
        depth += 1
    found = [sorted((name.split("/")[depth], name) for name in names if "/" in name) for names in shards]
    classes = tuple(sorted({name for samples in found for name, _ in samples}))
    labels = {name: label for label, name in enumerate(classes)}
    return classes, [[(labels[folder], name) for folder, name in samples] for samples in found]
