"""Threads share a plan: what one of them draws does not depend on where another one is."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from raypipe.plan.order import Shuffle
from raypipe.plan.samplers import Weighted
from raypipe.plan.selection import Selection

GROUPS = np.array([0, 3, 5, 5, 9, 12])


def windowed() -> Shuffle:
    return Shuffle("window", 12, 7, GROUPS, 2)


def weighted() -> Weighted:
    return Weighted(np.arange(1, 13), windowed(), Selection([], 12), 12)


def interrupted(shared: Any, memo: str, interrupt: Any) -> Any:
    """The same, but another thread comes in between before each reading of a memo."""
    state, within = "_of_" + memo, [False]

    def read(self: Any) -> Any:
        if not within[0]:
            within[0] = True
            interrupt(self)
            within[0] = False
        return self.__dict__[state]

    kind = type(shared)
    watched = property(
        read, lambda self, value: self.__dict__.__setitem__(state, value)
    )
    shared.__dict__[state] = shared.__dict__.pop(memo)
    shared.__class__ = type(kind.__name__, (kind,), {memo: watched})
    return shared


@pytest.mark.parametrize("pass_number", [0, 1, 5])
def test_a_pass_is_the_same_while_another_thread_is_in_another_pass(
    pass_number: int,
) -> None:
    positions = np.arange(12)
    shuffle = interrupted(
        windowed(), "_pass", lambda other: other.numbers(3, positions)
    )
    assert (
        shuffle.numbers(pass_number, positions).tolist()
        == windowed().numbers(pass_number, positions).tolist()
    )
    sampler = interrupted(
        weighted(), "_pass_shuffle", lambda other: other.draw_pass(3, positions)
    )
    drawn, expected = (
        sampler.draw_pass(pass_number, positions),
        weighted().draw_pass(pass_number, positions),
    )
    assert all(
        np.array_equal(one, other) for one, other in zip(drawn, expected, strict=True)
    )
