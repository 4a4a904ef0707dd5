"""Ranks that skip, alone or together, in any order of what they say; and the warning about half a validation."""

from __future__ import annotations

import itertools

import pytest

from raypipe.streaming.moves import END, Move, Moves, StreamPlace

TRAIN, MID, VAL, NEXT = (0, 0, 0), (0, 0, 5), (0, 1, 0), (1, 0, 0)


def said(
    world_size: int, *moves: tuple[int, StreamPlace, StreamPlace, bool]
) -> tuple[Moves, list[str]]:
    ranks = Moves(world_size)
    told = [
        ranks.says(rank, Move(stands, goes, leaves))
        for rank, stands, goes, leaves in moves
    ]
    return ranks, [text for text in told if text]


@pytest.mark.parametrize("goes", [VAL, NEXT, END])
@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_ranks_leave_an_execution_together_or_not_at_all(
    goes: StreamPlace, order: tuple[int, ...]
) -> None:
    ranks = Moves(3)
    for rank in range(3):
        ranks.says(rank, Move(TRAIN, TRAIN))
    for number, rank in enumerate(order):
        # each may have stopped at another step
        ranks.says(rank, Move((0, 0, 5 + rank), goes, leaves=True))
        assert {ranks.answer(of) for of in order[: number + 1]} == {
            "leave" if number == 2 else "wait"
        }
    assert ranks.answer(order[0], is_last=True) == "leave"


@pytest.mark.parametrize(
    "other",
    [
        Move(VAL, VAL),
        Move(NEXT, NEXT),
        Move(MID, NEXT),
        Move(END, END),
        Move(VAL, END, True),
    ],
)
@pytest.mark.parametrize("is_first", [True, False])
def test_a_rank_reads_on_if_another_does_not_leave_with_it(
    other: Move, is_first: bool
) -> None:
    ranks, own = Moves(2), Move(MID, NEXT, leaves=True)
    if is_first:
        ranks.says(0, other)
        ranks.says(1, own)
    else:
        ranks.says(1, own)
        assert ranks.answer(1) == "wait"
        ranks.says(0, other)
    assert ranks.answer(1) == "read on"
    if other.leaves:
        assert ranks.answer(0) == "read on"


def test_a_rank_that_waits_no_longer_keeps_the_others_from_leaving() -> None:
    ranks, _ = said(3, (0, MID, NEXT, True), (1, MID, NEXT, True))
    assert ranks.answer(0, is_last=True) == "read on"
    ranks.says(2, Move(MID, NEXT, leaves=True))
    assert [ranks.answer(rank) for rank in (1, 2)] == ["read on", "read on"]
    # the Supervisor was restarted, and knows nothing
    assert Moves(3).answer(0) == "read on"


def test_a_validation_that_some_ranks_leave_out_is_told_once() -> None:
    for stands in (VAL, MID):
        for leaves in (False, True):
            _, told = said(
                2,
                (0, VAL, VAL, False),
                (1, stands, NEXT, leaves),
                (1, VAL, NEXT, False),
            )
            (text,) = told
            assert (
                "rank 0 iterates the validation of epoch 0, and rank 1 does not" in text
            )
            _, told = said(2, (1, stands, END, leaves), (0, VAL, VAL, False))
            assert len(told) == 1
    for move in (
        (MID, NEXT, True),
        (VAL, VAL, False),
        (VAL, END, True),
        (MID, VAL, True),
    ):
        assert said(2, (0, *move), (1, *move), (0, NEXT, NEXT, False))[1] == []
