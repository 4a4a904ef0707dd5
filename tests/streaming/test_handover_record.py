"""What a loader says of a checkpoint of another plan, by the record beside it."""

from __future__ import annotations

from pathlib import Path

import pytest
from small_streams import CountingStore, spec_of
from without_ray import every_batch

import raypipe
from raypipe.config import PlanConfig
from raypipe.errors import CursorError


def test_a_checkpoint_of_another_plan_names_the_settings(tmp_path: Path) -> None:
    def opened(seed: int) -> raypipe.StreamSpec:
        plan = PlanConfig(epochs=1, micro_batch_size=8, seed=seed)
        return spec_of(CountingStore(), plan=plan)

    with raypipe.loader(opened(1), run_dir=tmp_path) as loader:
        assert [*every_batch(loader)]
        loader.checkpoint({})
    with pytest.raises(CursorError, match=r"Changed: plan\.seed=2 \(was 1\)$"):
        raypipe.loader(opened(2), run_dir=tmp_path)
