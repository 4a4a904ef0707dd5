from __future__ import annotations

import json

from raypipe.metrics.records import parse_records


def lines(*records: dict[str, object]) -> bytes:
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


def start(step: int, validates: bool = False) -> dict[str, object]:
    return {"kind": "start", "step": step, "validates": validates}


def train(step: int) -> dict[str, object]:
    return {"kind": "train", "step": step, "loss": 0.0}


def test_what_happened_holds_even_where_the_steps_were_done_again() -> None:
    fault, scale = (
        {"kind": "fault", "step": 5, "text": "x"},
        {"kind": "scale", "step": 5, "text": "y"},
    )
    assert parse_records(lines(start(0), train(5), fault, scale, start(0))) == [
        start(0),
        fault,
        scale,
        start(0),
    ]


def test_a_validation_that_is_done_again_holds_once() -> None:
    val, told_of = (
        {"kind": "val", "step": 4, "accuracy": 0.5},
        {"kind": "diagnosis", "step": 4},
    )
    before = [start(0), train(4), val, told_of]
    again = start(4, validates=True)
    assert parse_records(lines(*before, again, val)) == [start(0), train(4), again, val]
    assert parse_records(lines(*before, start(4))) == [*before, start(4)]


def test_lines_that_are_no_record_are_left_out() -> None:
    bad = [
        b'{"kind": "train", "st',
        b"\xff\xfe",
        b"[1]",
        b'{"kind": "train"}',
        b'{"step": "3"}',
        b"\x00" * 9,
    ]
    found = parse_records(
        lines(train(1)) + b"\n".join(bad) + b"\n" + lines(train(2)) + b'{"kind": "tra'
    )
    assert found == [train(1), train(2)]
