"""The stream without Ray: the same bits, in this process."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import without_ray

from raypipe.config import PlanConfig, PoolConfig, TransformConfig
from raypipe.errors import ConfigError, SampleError
from raypipe.streaming.digest import batch_digest
from raypipe.streaming.handover import loader
from raypipe.streaming.inline import inline_batches
from raypipe.streaming.pipeline import stream
from raypipe.streaming.spec import StreamSpec

INLINE = PoolConfig(engine="inline")


@pytest.fixture(scope="module")
def spec(stores: dict[str, Path]) -> StreamSpec:
    plan = PlanConfig(epochs=2, micro_batch_size=6, global_batch_size=24)
    transform = TransformConfig(train="light", val="resize", size=12)
    return StreamSpec(stores["train"], stores["val"], plan=plan, transform=transform, pool=INLINE)


@pytest.mark.parametrize("threads", [0, 1, 3])
def test_it_has_the_bits_of_a_cluster_from_any_step(spec: StreamSpec, threads: int) -> None:
    threaded = spec.replace(pool=PoolConfig(engine="inline", threads=threads))
    for step in (0, 3):
        found = [batch_digest(batch) for batch in inline_batches(threaded, spec.plan.cursor_at(step))]
        assert found == without_ray.digests(spec, step)
    before = threading.active_count()
    next(inline_batches(threaded, spec.plan.start()))
    assert threading.active_count() == before, "one that is left early ends its threads"


def test_each_rank_has_its_own_micro_batches(spec: StreamSpec) -> None:
    start = spec.plan.start()
    ranks = [[batch.at for batch in inline_batches(spec, start, rank, 2)] for rank in range(2)]
    assert sorted(map(str, ranks[0] + ranks[1])) == sorted(map(str, spec.plan.micro_batches(start)))
    assert {at.micro % 2 for at in ranks[0]} == {0}


def test_a_transform_runs_in_the_thread_that_asks_where_a_debugger_stops(stores: dict[str, Path]) -> None:
    seen = []

    def transform(image: np.ndarray) -> np.ndarray:
        seen.append(threading.current_thread())
        return image[:8, :8]

    spec = StreamSpec(
        stores["train"], plan=PlanConfig(epochs=1, micro_batch_size=4), train_transform=transform, pool=INLINE
    )
    batch = next(next(loader(spec).epochs()).train)
    assert batch.image.shape == (4, 3, 8, 8) and seen == [threading.main_thread()] * 4


def test_threads_refuse_a_transform_that_draws_from_what_they_share(stores: dict[str, Path]) -> None:
    pool = PoolConfig(engine="inline", threads=2)
    spec = StreamSpec(stores["train"], train_transform=lambda image: image[:8, :8], pool=pool)
    with pytest.raises(ConfigError, match=r"pool\.threads is 2, and the train transform draws .*pool\.threads=0"):
        next(inline_batches(spec, spec.plan.start()))


@pytest.mark.parametrize("threads", [0, 2])
def test_what_a_transform_raises_names_the_sample(stores: dict[str, Path], threads: int) -> None:
    def broken(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        raise ValueError("no")

    spec = StreamSpec(
        stores["train"],
        train_transform=broken,
        transform=TransformConfig(on_bad_sample="raise"),
        pool=PoolConfig(engine="inline", threads=threads),
    )
    with pytest.raises(SampleError, match=r"train\.lmdb.* sample \d+ .*: the transform raised ValueError: no"):
        list(inline_batches(spec, spec.plan.start()))


def test_a_dataset_of_ray_is_not_made_without_ray(stores: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match=r"is a Dataset.*pool\.engine is 'inline': raypipe\.loader"):
        stream(stores["train"], pool=INLINE)


def test_no_cluster_is_started_and_nothing_of_ray_data_or_train_is_imported(stores: dict[str, Path]) -> None:
    program = f"""
import sys, raypipe
spec = raypipe.StreamSpec({str(stores["train"])!r}, pool=raypipe.PoolConfig(engine="inline"))
for epoch in raypipe.loader(spec).epochs():
    for batch in epoch.train:
        assert batch.image.shape == (64, 3, 224, 224)
        import ray
        assert not ray.is_initialized() and not {{"ray.data", "ray.train"}} & set(sys.modules)
        sys.exit(7)
"""
    done = subprocess.run([sys.executable, "-c", program], check=False, timeout=100)
    assert done.returncode == 7
