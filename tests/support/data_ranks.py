"""This process as one of several of torch.distributed, which have seeds that differ until rank 0's holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

Ranks = Callable[[int, int], None]


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Ranks:
    """Return what makes this process one of several."""

    def become(rank: int, size: int) -> None:
        def broadcast(values: list[Any], src: int = 0) -> None:
            values[0] = 5

        torch.manual_seed(5 + rank)
        facts = {"is_initialized": True, "get_rank": rank, "get_world_size": size}
        for name, fact in facts.items():
            monkeypatch.setattr(torch.distributed, name, lambda fact=fact: fact)
        monkeypatch.setattr(torch.distributed, "broadcast_object_list", broadcast)

    return become
