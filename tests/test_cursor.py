from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypipe.cursor import Cursor, ahead_of
from raypipe.errors import CursorError, RaypipeError


def test_a_cursor_survives_json() -> None:
    for cursor in (Cursor(1, 2, "f"), Cursor(0, 3, "f", (7, 9))):
        assert Cursor.from_json(cursor.to_json()) == cursor


def test_a_cursor_of_before_the_relaxed_order_is_read() -> None:
    assert Cursor.from_json('{"epoch": 1, "step": 2, "fingerprint": "f"}') == Cursor(1, 2, "f")


@pytest.mark.parametrize(
    "text", ["", "[]", "3", "null", '{"epoch": 1}', '{"epoch": "x", "step": 1}', '{"epoch": 1e999}']
)
def test_what_is_no_cursor_is_refused_with_its_text(text: str) -> None:
    with pytest.raises(CursorError, match="not a cursor"):
        Cursor.from_json(text)


def test_the_frontier_is_the_first_that_is_not_done() -> None:
    assert Cursor(0, 3, "f").frontier(per_step=4) == 12
    assert Cursor(0, 3, "f", (11, 13)).frontier(per_step=4) == 10


@given(st.integers(0, 40), st.integers(1, 8), st.data())
def test_what_is_ahead_and_the_frontier_are_what_was_done(frontier: int, window: int, data: st.DataObject) -> None:
    ahead = sorted(data.draw(st.sets(st.integers(frontier + 1, frontier + window - 1)))) if window > 1 else []
    done = frontier + len(ahead)
    known = [n for n in range(frontier) if n >= done - window or data.draw(st.booleans())] + ahead
    assert ahead_of(done, window, known) == tuple(ahead)
    assert Cursor(0, done, "f", tuple(ahead)).frontier(per_step=1) == frontier


def test_a_micro_batch_that_was_lost_sight_of_is_told() -> None:
    with pytest.raises(RaypipeError, match="5 micro-batches are done, but 4 were seen"):
        ahead_of(5, 3, [2, 4])
