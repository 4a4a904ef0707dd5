"""Random programs of passes, as loops and notebooks make them, against what the plan alone says of each."""

from __future__ import annotations

import functools
import sys
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import ray
from loop_programs import Program, Reference, loader_of, train_on_two
from small_streams import spec_of

from raypipe.config import PlanConfig, PoolConfig, TransformConfig
from raypipe.streaming.handover import loader
from raypipe.streaming.opening import open_stream
from raypipe.streaming.spec import StreamSpec

Stores = dict[str, Path]

PLAN = PlanConfig(epochs=3, micro_batch_size=6, global_batch_size=24)


@pytest.fixture(scope="module", params=[1, 2])
def spec(stores: Stores, request: pytest.FixtureRequest) -> StreamSpec:
    plan = replace(PLAN, val_interval=request.param)
    return spec_of(stores["train"], stores["val"], plan=plan)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("world_size", [1, 2])
def test_each_pass_of_a_random_program_is_what_the_plan_says(
    spec: StreamSpec, world_size: int, seed: int
) -> None:
    for rank in range(world_size):
        Program(
            spec,
            functools.partial(loader_of, spec, rank, world_size),
            rank,
            world_size,
            seed,
        ).run(40)


@pytest.mark.parametrize("leave", ["break", "next", "epochs"])
def test_what_a_loop_leaves_out_is_not_made(stores: Stores, leave: str) -> None:
    made: list[int] = []

    def corner(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        made.append(1)
        return np.ascontiguousarray(image[:8, :8])

    transforms = {"train_transform": corner, "val_transform": corner}
    spec = spec_of(stores["train"], stores["val"], plan=PLAN, **transforms)
    one, num = loader(spec), 0
    made.clear()  # of checks before the stream
    for epoch in one.epochs():
        if leave == "next":
            num += len(next(epoch.train).index)
            num += len(next(epoch.val).index)
            continue
        num += sum(len(batch.index) for batch in islice(epoch.train, 5))
        num += sum(len(batch.index) for batch in islice(epoch.val, 2))
        if leave == "epochs":
            break
    # the first block is made twice, once to learn its shapes
    assert 0 < num <= len(made) <= num + 6


def test_passes_by_actors_are_what_the_plan_says(
    stores: Stores, ray_cluster: None
) -> None:
    pool = PoolConfig(max_actors=2)
    plan = replace(PLAN, epochs=2)
    spec = spec_of(stores["train"], stores["val"], plan=plan, pool=pool)
    program = Program(spec, lambda cursor: loader(spec, cursor=cursor), 0, 1, seed=3)
    turns = (
        "validation",
        "train",
        "val",
        "val",
        "cell",
        "hold",
        "val",
        "train",
        "next epoch",
        "train",
        "earlier val",
    )
    program.next_epoch()
    for turn in (*turns, "val", "next epoch", "validation"):
        getattr(program, turn.replace(" ", "_"))()
        assert program.loader.cursor == program.reference.cursor
    program.loader.close()


@pytest.mark.system
def test_two_loaders_of_one_process_share_the_cluster(
    stores: Stores, idle_cluster: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # on a slow machine actors take longer to finish their blocks, and Ray to tell which CPUs are free
    for limit in ("_GIVE_WAY_S", "_SETTLE_S"):
        monkeypatch.setattr(f"raypipe.streaming.start.room.{limit}", 1000.0)

    def opened(size: int) -> StreamSpec:
        return open_stream(
            stores["train"],
            plan=PlanConfig(epochs=30, micro_batch_size=6, global_batch_size=24),
            transform=TransformConfig(train="small", val="resize", size=size),
            pool=PoolConfig(head_start=0),
        )

    first, probe = loader(opened(8)), None
    batches = iter(next(first.epochs()).train)
    # its pool is to have all 4 CPUs, and its last actors may still have to start
    seen = [next(batches).position for _ in range(3)]
    assert first.metrics.actors == 4
    probe = loader(opened(12))
    seen_by_probe = [
        batch.image.shape[-1] for batch in islice(next(probe.epochs()).train, 3)
    ]
    assert seen_by_probe == [12] * 3 and first._stream.why is None
    seen += [batch.position for batch in batches]
    assert seen == Reference(first._spec, 0, 1).of("train", 0)
    probe.close()
    first.close()


@pytest.mark.system
def test_two_ranks_skip_together_and_a_validation_by_one_is_told(
    stores: Stores, idle_cluster: None, tmp_path: Path
) -> None:
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    ray.cloudpickle.register_pickle_by_value(sys.modules[train_on_two.__module__])
    pool = PoolConfig(head_start=100)
    spec = spec_of(stores["train"], stores["val"], plan=PLAN, pool=pool)
    trainer = TorchTrainer(
        train_on_two,
        train_loop_config={"spec": spec, "folder": str(tmp_path)},
        scaling_config=ScalingConfig(num_workers=2, use_gpu=False),
        run_config=RunConfig(storage_path=str(tmp_path)),
    )
    trainer.fit()
    assert [(tmp_path / rank).read_text() for rank in ("0", "1")] == [
        "0 0 1 1 2",
        "0 0 1 1",
    ]
