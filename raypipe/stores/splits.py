"""Names of splits: which files or folders next to each other are parts of one data set, such as train and test.

A split is a word of the name, in any case: train, Training, TRAIN, train2017, seg_train, train_images, testA,
imagenet-val, PublicTest.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection

_WORDS = {
    "train": ("train", "training", "trn"),
    "trainval": ("trainval",),
    "val": ("val", "valid", "validation", "dev", "eval", "evaluation", "minival"),
    "test": ("test", "testing", "tst"),
    "holdout": ("holdout", "heldout"),
    "pred": ("pred", "predict", "prediction", "unlabeled", "unlabelled"),
    "query": ("query",),
    "gallery": ("gallery",),
}
_SPLIT_OF = {
    f"{word}{end}": split
    for split, words in _WORDS.items()
    for word in words
    for end in ("", "set")
}
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")


def split_of(name: str) -> tuple[str, str]:
    """Return the split that a name has, empty if it has none, and its other words, without digits."""
    words = [word.lower() for word in _WORD.findall(name)]
    splits = [_SPLIT_OF[word] for word in words if word in _SPLIT_OF]
    others = [word for word in words if word not in _SPLIT_OF]
    return "+".join(splits), " ".join(others)


def splits_in(names: Collection[str]) -> list[str]:
    """Return the names that are splits, sorted; none if there are not several splits.

    Splits differ in nothing but the split, so the classes train_station and test_tube are none among others.
    """
    every: dict[str, str] = {}
    alike = defaultdict[str, dict[str, str]](dict)
    for name in names:
        split, others = split_of(name)
        if split:
            every[name] = alike[others][name] = split
    groups = list(alike.values())
    if len(every) == len(names):
        groups.append(every)
    return sorted(
        {name for group in groups if len(set(group.values())) > 1 for name in group}
    )
