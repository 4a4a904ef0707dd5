"""Traces for Perfetto: the format's rules, and arrows along micro-batches."""

from __future__ import annotations

import json
from typing import Any

from traces import checked, ways

from raypipe.metrics.chrome_trace import Chunk, to_json

ACTOR = "transform actor (20 on 10.0.0.2)"
TRAINER = "trainer 0 (20 on 10.0.0.1)"
READER = "reader (21 on 10.0.0.1)"
FIRST = "train-e0000-s000000-m000"
SECOND = "train-e0000-s000000-m001"
THIRD = "train-e0000-s000001-m000"


def work(name: str, begin_ms: float, end_ms: float, *places: str) -> dict[str, Any]:
    return {
        "name": name,
        "ph": "X",
        "tid": "main",
        "ts": begin_ms * 1e3,
        "dur": (end_ms - begin_ms) * 1e3,
        "args": {"micro_batches": [*places]} if places else {},
    }


def small_trace() -> list[Chunk]:
    """Two micro-batches of a block from the reader to the trainer, and a third that is made there."""
    trained = [
        work("wait", 9_000, 9_041),
        work("split", 9_001, 9_040, FIRST, SECOND),
        work("compute", 9_041, 9_050, FIRST),
        work("compute", 9_050, 9_060, SECOND),
        work("make", 9_060, 9_070, THIRD),
        work("compute", 9_070, 9_080, THIRD),
    ]
    block = [
        work("block", 9_012, 9_030, FIRST, SECOND),
        work("read", 9_013, 9_020, FIRST),
    ]
    died = work("died", 9_061, 9_066, THIRD)
    row = work("row", 9_005, 9_010, FIRST, SECOND)
    return [
        Chunk(TRAINER, json.dumps(trained)),
        Chunk(ACTOR, "[]"),
        Chunk(ACTOR, json.dumps(block)),
        Chunk(READER, json.dumps([row])),
        Chunk(ACTOR, json.dumps([died | {"tid": "lost work"}])),
    ]


def test_arrows_follow_micro_batches_through_the_processes() -> None:
    found = ways(checked(json.loads(to_json(small_trace(), {}))))
    assert found[FIRST] == found[SECOND] == ["row", "block", "split", "compute"]
    assert found[THIRD] == ["died", "make", "compute"]
