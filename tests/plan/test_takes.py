from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypipe.errors import ConfigError
from raypipe.plan.takes import taken


def share(words: str, size: int, is_val: bool = False) -> set[int]:
    classes = np.arange(size) % 3 if "by class" in words else None
    return set(np.flatnonzero(taken(words, size, classes, is_val)).tolist())


percents = st.integers(1, 100)
endings = st.sampled_from(["", " by class", " seed 7", " by class seed 7"])


@given(st.integers(1, 400), percents, percents, endings)
def test_training_and_validation_never_overlap(
    size: int, percent: int, of_val: int, ending: str
) -> None:
    of_val = min(of_val, 100 - percent)
    if percent * size < 100 or of_val * size < 100:
        return
    train = share(f"{percent}%{ending}", size)
    val = share(f"{of_val}%{ending}", size, is_val=True)
    assert (len(train), len(val)) == (percent * size // 100, of_val * size // 100)
    assert not train & val


@given(st.integers(2, 400), st.data(), endings, st.booleans())
def test_a_smaller_share_is_a_part_of_a_larger_one(
    size: int, data: st.DataObject, ending: str, is_val: bool
) -> None:
    more = data.draw(st.integers(2, size))
    less = data.draw(st.integers(1, more - 1))
    small, large = (share(f"{n}{ending}", size, is_val) for n in (less, more))
    assert small < large and len(small) == less


def test_a_share_by_class_has_as_much_of_each_class() -> None:
    rng = np.random.default_rng(0)
    classes = rng.permutation(np.repeat([5, 1, 9, 2], [4000, 300, 40, 7]))
    for is_val in (False, True):
        keep = taken("25% by class", len(classes), classes, is_val)
        for label, count in zip(*np.unique(classes, return_counts=True), strict=True):
            assert abs((keep & (classes == label)).sum() - count / 4) < 2


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("50%", [0, 3, 4, 5]),
        ("3 seed 1", [0, 5, 6]),
        ("first 3", [0, 1, 2]),
        ("last 25%", [6, 7]),
        ("33.3%", [0, 5]),
    ],
)
def test_shares_of_eight_samples(words: str, expected: list[int]) -> None:
    """Literally, so that no change of the hashes passes unseen."""
    assert sorted(share(words, 8)) == expected


@pytest.mark.parametrize(
    "words",
    ["", "0.8", "80 %", "first", "first 3 by class", "10% of train", "1e3", "٣"],
)
def test_unknown_words_are_named_with_those_that_are_known(words: str) -> None:
    with pytest.raises(
        ConfigError, match=r'store\.take must be .* "last 10%", .*, got'
    ):
        taken(words, 8, None, False)


@pytest.mark.parametrize("words", ["0", "9", "1%", "150%", "first 9"])
def test_a_share_of_no_sample_or_too_many_names_both_numbers(words: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"store\.take '{words}' has \d+ samples, and the store 8"
    ):
        taken(words, 8, None, False)
