"""Finished blocks that a node takes with it: who made them is known until their ranks have them."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest

from raypipe.rayext import block_flow
from raypipe.rayext.block_flow import Deliveries


class Block:
    """A reference to a block that an actor made."""

    def __init__(self, name: str, maker: str) -> None:
        self.name, self.maker = name, maker

    def binary(self) -> bytes:
        return self.name.encode()

    def hex(self) -> str:
        return self.name

    def task_id(self) -> Any:
        return SimpleNamespace(actor_id=lambda: SimpleNamespace(hex=lambda: self.maker))


class Queue:
    """Ray Data's queue, with one split for each rank."""

    def __init__(self, ranks: int) -> None:
        self._splits = [deque[Any]() for _ in range(ranks)]

    def append(self, bundle: Any) -> None:
        self._splits[bundle.output_split_idx or 0].append(bundle)

    def pop(self, output_split_idx: int | None = None) -> Any:
        split = self._splits[output_split_idx or 0]
        return split.popleft() if split else None


def bundle(name: str, maker: str, rank: int | None = None) -> Any:
    return SimpleNamespace(block_refs=[Block(name, maker)], output_split_idx=rank)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_makers_of_blocks_that_ranks_may_still_wait_for_are_known(
    ranks: int,
) -> None:
    queue = Queue(ranks)
    known = Deliveries(queue)
    for number in range(4 * ranks):
        queue.append(
            bundle(f"b{number}", f"a{number}", number % ranks if ranks > 1 else None)
        )
    assert known.makers() == {f"a{number}" for number in range(4 * ranks)}
    taken = [
        queue.pop(rank if ranks > 1 else None)
        for rank in range(ranks)
        for _ in range(3)
    ]
    assert all(taken) and {f"a{number}" for number in range(ranks)}.isdisjoint(
        known.makers()
    )
    assert known.makers() == {f"a{number}" for number in range(ranks, 4 * ranks)}, (
        "the last two, and those queued"
    )
    while any(queue.pop(rank if ranks > 1 else None) for rank in range(ranks)):
        pass
    assert len(known.makers()) == 2 * ranks
    known.drop()
    assert known.makers() == set()


def test_a_block_without_a_copy_on_a_living_node_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    queue = Queue(1)
    known = Deliveries(queue)
    places = {
        "lost": {"object_size": 1 << 20, "node_ids": []},
        "dead": {"object_size": 1 << 20, "node_ids": ["gone" * 8]},
    }
    others: list[dict[str, Any]] = [
        {"object_size": 1 << 20, "node_ids": ["alive"]},
        {"object_size": 1 << 20, "node_ids": [], "did_spill": True},
        {"object_size": 100, "node_ids": []},
    ]
    monkeypatch.setattr(block_flow, "nodes", lambda: [{"NodeID": "alive"}])
    monkeypatch.setattr(
        block_flow,
        "get_object_locations",
        lambda blocks, limit: {block: at[block.name] for block in blocks},
    )
    for at in [
        places,
        {"lost": others[0], "dead": others[1]},
        {"lost": others[2], "dead": others[0]},
    ]:
        for name in at:
            queue.append(bundle(name, "a"))
            queue.pop()
        lost = (
            ["object lost was on a node that is gone", "object dead was on gonegone"]
            if at is places
            else []
        )
        assert known.lost() == lost
