"""Names of splits: which files or folders next to each other are parts of one data set, such as train and test.

A split is a word of the name, in any case: train, Training, TRAIN, train2017, seg_train, train_images, testA,
imagenet-val, PublicTest.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection

_SPLIT = re.compile(
    r"(?:(?P<train>train|training|trn)|(?P<trainval>trainval)|(?P<test>test|testing|tst)"
    r"|(?P<val>val|valid|validation|dev|eval|evaluation|minival)|(?P<holdout>holdout|heldout)"
    r"|(?P<pred>pred|predict|prediction|unlabell?ed)|(?P<query>query)|(?P<gallery>gallery))(?:set)?"
)
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")


def split_of(name: str) -> tuple[str, str]:
    """Return the split that a name has, empty if it has none, and its other words, without digits."""
    words = " ".join(_WORD.findall(name)).lower().split()
    found = [(_SPLIT.fullmatch(word), word) for word in words]
    split = "+".join(str(match.lastgroup) for match, _ in found if match)
    return split, " ".join(word for match, word in found if not match)


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
