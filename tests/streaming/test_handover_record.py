"""What a loader says of a checkpoint of another plan, by the record beside it."""

from __future__ import annotations

from pathlib import Path

import pytest
from pictures import picture
from without_ray import every_batch

import raypipe
from raypipe.config import PlanConfig, PoolConfig, TransformConfig
from raypipe.errors import CursorError
from raypipe.stores.memory import MemoryStore


def test_a_checkpoint_of_another_plan_names_the_settings(tmp_path: Path) -> None:
    def opened(seed: int) -> raypipe.StreamSpec:
        return raypipe.open_stream(
            MemoryStore([picture(number) for number in range(8)], range(8)),
            plan=PlanConfig(epochs=1, micro_batch_size=4, seed=seed),
            transform=TransformConfig(train="center", size=8),
            pool=PoolConfig(engine="inline"),
        )

    with raypipe.loader(opened(1), run_dir=tmp_path) as loader:
        assert [*every_batch(loader)]
        loader.checkpoint({})
    with pytest.raises(CursorError, match=r"Changed: plan\.seed=2 \(was 1\)$"):
        raypipe.loader(opened(2), run_dir=tmp_path)
