"""Facts about Datasets, which say whether two have the same items."""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import Any

import numpy as np
import pytest
import torch

from raypipe.errors import ConfigError
from raypipe.transform.item_facts import facts_of_dataset


class Base:
    def __init__(self, **members: Any) -> None:
        self.__dict__ |= members

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> int:
        return index + 1


class Child(Base):
    def __init__(self, **members: Any) -> None:
        super().__init__(**members)


class OtherChild(Base):
    def __init__(self, **members: Any) -> None:
        super().__init__(**members)

    def __getitem__(self, index: int) -> int:
        return index + 2


def digests(dataset: Any) -> dict[str, str]:
    return {name: part.digest() for name, part in facts_of_dataset(dataset).items()}


def changed(first: Any, second: Any) -> set[str]:
    """The names of parts that differ."""
    one = digests(first)
    two = digests(second)
    return {name for name in one.keys() | two.keys() if one.get(name) != two.get(name)}


@pytest.mark.parametrize(
    ("one", "two"),
    [
        (["a.png"], ["b.png"]),
        (np.zeros(3), np.zeros(4)),
        (np.zeros(2), np.zeros(2, np.float32)),
        (torch.zeros(2), torch.ones(2)),
        ({"a", "b"}, {"a", "c"}),
        ({"a": 1}, {"a": 2}),
        (lambda x: x + 1, lambda x: x + 2),
        (Base(a=1), Base(a=2)),
    ],
)
def test_the_part_that_differs_is_named(one: Any, two: Any) -> None:
    assert changed(Child(part=one, other=1), Child(part=two, other=1)) == {"part"}


def test_code_and_length_are_parts() -> None:
    assert changed(Child(a=1), OtherChild(a=1)) == {"Child", "OtherChild"}
    assert changed([1, 2], [1, 2, 3]) == {"len", "items"}


def test_the_state_of_a_generator_is_no_part() -> None:
    one, two = (np.random.default_rng(seed) for seed in (1, 2))
    assert changed(Child(rng=one), Child(rng=two)) == set()
    one, two = (torch.Generator().manual_seed(seed) for seed in (1, 2))
    assert changed(Child(rng=one), Child(rng=two)) == set()


_SCRIPT = """
from raypipe.transform.item_facts import facts_of_dataset

class Words:
    def __init__(self, **members): self.__dict__ |= members
    def __len__(self): return 5
    def __getitem__(self, index): return index + 1

def scaled(x, by=2): return [x * by, sorted({"u", "v"})]

words = {"b", "a", "cc", "ddd"}
facts = facts_of_dataset(Words(words=words, scaled=scaled, inner=Words(x=words)))
print(sorted((name, part.digest()) for name, part in facts.items()))
"""


def test_each_process_finds_the_same_facts() -> None:
    found = {
        subprocess.run(
            [sys.executable, "-c", _SCRIPT],
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(found) == 1 and "words" in found.pop()


def test_a_member_that_refers_to_itself_has_a_fact() -> None:
    loop: list[Any] = []
    loop.append(loop)
    assert set(digests(Child(loop=loop))) == {"len", "Child", "loop"}


@pytest.mark.parametrize(
    ("member", "problem"),
    [
        (threading.Lock(), "its part cannot be sent to the actors .TypeError: .*lock"),
        (torch.ones(2, device="meta"), "its part holds a tensor on meta"),
    ],
)
def test_a_member_that_no_actor_can_have_is_named(member: Any, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        facts_of_dataset(Child(part=member))


def test_a_class_leaves_out_what_it_opens_again() -> None:
    class Opens(Child):
        def __getstate__(self) -> dict[str, Any]:
            return {"path": "a"}

    assert set(digests(Opens(file=threading.Lock()))) >= {"path", "len"}
