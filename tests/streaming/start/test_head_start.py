"""The first micro-batches of a stream, which a rank makes itself while its pool starts."""

from __future__ import annotations

import dataclasses
import os
import sys
import threading
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pictures import picture
from ray import cloudpickle
from tars import put, write_tar

import raypipe
from raypipe.config import PlanConfig, PoolConfig, TransformConfig
from raypipe.errors import RaypipeError
from raypipe.stores.parquet import ParquetStore
from raypipe.streaming.hashes import batch_hash
from raypipe.streaming.inline import inline_batches
from raypipe.streaming.opening import open_stream
from raypipe.streaming.spec import StreamSpec
from raypipe.streaming.start.head_marks import Marks
from raypipe.streaming.start.head_start import (
    HeadStart,
    micro_batches_of_rank,
    place_is_at_hand,
)
from raypipe.streaming.start.takeover import joined

cloudpickle.register_pickle_by_value(sys.modules[__name__])

PLAN = PlanConfig(epochs=2, micro_batch_size=8, global_batch_size=16, seed=5)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYPIPE_CACHE", str(tmp_path / "cache"))


def stream(stores: dict[str, Path], **changes: Any) -> StreamSpec:
    transform = TransformConfig(train="light", val="center", size=24)
    options = {"plan": PLAN, "transform": transform, **changes}
    return open_stream(str(stores["train"]), str(stores["val"]), **options)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("head_start", [1, 5, 10_000])
@pytest.mark.parametrize("step", [0, 4])
def test_a_rank_and_a_pool_behind_it_make_the_stream_of_one_process(
    stores: dict[str, Path], world_size: int, head_start: int, step: int
) -> None:
    spec = stream(stores, pool=PoolConfig(head_start=head_start))
    start = spec.plan.cursor_at(step)
    for rank in range(world_size):
        expected = list(inline_batches(spec, start, rank, world_size))
        head = HeadStart(spec, start, rank, world_size)
        head.start()
        places = micro_batches_of_rank(spec, start, rank, world_size)
        got = list(joined(head.batches(), iter(expected[head_start:]), places))
        assert list(map(batch_hash, got)) == list(map(batch_hash, expected))
        assert head.num_claimed == min(head_start, len(expected))


@pytest.mark.parametrize("head_start", [1, 5, 10_000])
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_rank_reads_groups_as_readers_do_and_frees_them(
    stores: dict[str, Path], world_size: int, head_start: int
) -> None:
    parquet = ParquetStore(stores["parquet"])
    mixed = {"groups": parquet, "singles": str(stores["train"])}
    plan = dataclasses.replace(PLAN, mixture=dict.fromkeys(mixed, 1))
    pool = PoolConfig(head_start=head_start)
    for train, settings in ((parquet, PLAN), (mixed, plan)):
        transform = TransformConfig(train="light", size=24)
        spec = open_stream(train, plan=settings, transform=transform, pool=pool)
        assert spec.readers()
        start = spec.plan.start()
        for rank in range(world_size):
            expected = list(inline_batches(spec, start, rank, world_size))
            head = HeadStart(spec, start, rank, world_size)
            head.start()
            got = list(head.batches())
            assert list(map(batch_hash, got)) == list(
                map(batch_hash, expected[:head_start])
            )
            head.stop()
            assert parquet._opened is None


def test_a_rank_makes_only_a_few_where_other_streams_make_the_same(
    stores: dict[str, Path],
) -> None:
    spec = stream(stores)
    start = spec.plan.start()
    expected = list(map(batch_hash, inline_batches(spec, start)))
    head = HeadStart(spec, start, 0, 1)
    head.be_brief()
    assert head.reserve() == 4
    head.start()
    batches = head.batches()
    got = [batch_hash(batch) for batch in islice(batches, 4)]
    time.sleep(0.2)
    assert head.num_claimed == 4 and head.reserve() == 4
    # what the pool counts on is made all the same
    head.hear(6, is_final=True)
    assert got + list(map(batch_hash, batches)) == expected[:6]
    head.stop()
    asked_for = HeadStart(stream(stores, pool=PoolConfig(head_start=7)), start, 0, 1)
    asked_for.be_brief()
    assert asked_for.reserve() == 7


@pytest.mark.parametrize("kind", ["lmdb", "tar"])
def test_a_rank_makes_what_the_node_has_cached_of_a_bucket(
    bucket: str, stores: dict[str, Path], tmp_path: Path, kind: str
) -> None:
    path = stores["train"]
    if kind == "tar":
        path = write_tar(tmp_path / "train.tar", [(picture(i), i) for i in range(100)])
    address = put(path, f"{bucket}/{path.name}")
    spec = open_stream(
        address, plan=PLAN, transform=TransformConfig(train="light", size=24)
    )
    start = spec.plan.start()
    if kind == "lmdb":  # a small tar is fetched to be listed
        assert not place_is_at_hand(spec, next(spec.plan.micro_batches(start)))
        head = HeadStart(spec, start, 0, 1)
        assert head.reserve() == 0
        head.start()
        while not head.is_short:
            time.sleep(0.01)
        # the pool begins at once
        head.hear(0, is_final=True)
        assert list(head.batches()) == [] and head.num_claimed == 0
    # an actor of this node has read all
    expected = list(inline_batches(spec, start))
    head = HeadStart(spec, start, 0, 1)
    assert head.reserve() == 1
    head.start()
    got = list(islice(head.batches(), len(expected)))
    assert list(map(batch_hash, got)) == list(map(batch_hash, expected))
    head.stop()


def test_a_rank_fetches_what_others_count_on(
    bucket: str, stores: dict[str, Path]
) -> None:
    address = put(stores["train"], f"{bucket}/train.lmdb")
    spec = open_stream(
        address, plan=PLAN, transform=TransformConfig(train="light", size=24)
    )
    start = spec.plan.start()
    head = HeadStart(spec, start, 1, 2, num_free=1)
    head.start()
    while not head.is_short:
        time.sleep(0.01)
    head.hear(2, is_final=True)
    got = list(map(batch_hash, head.batches()))
    assert got == list(map(batch_hash, islice(inline_batches(spec, start, 1, 2), 2)))


def test_a_rank_makes_no_more_than_it_has_heard_of(stores: dict[str, Path]) -> None:
    spec = stream(stores)
    head = HeadStart(spec, spec.plan.start(), 1, 2, num_free=1)
    head.start()
    batches = head.batches()
    next(batches)
    assert head.num_claimed == 1 and not head.is_done
    head.hear(3, is_final=True)
    assert len(list(batches)) == 2 and head.num_claimed == 3


def test_the_end_is_told_before_the_loop_has_taken_what_was_made(
    stores: dict[str, Path],
) -> None:
    spec = stream(stores)
    told = threading.Event()
    head = HeadStart(spec, spec.plan.start(), 0, 1, num_free=2, on_last=told.set)
    head.start()
    head.hear(2, is_final=True)
    assert told.wait()
    assert len(list(head.batches())) == 2


@pytest.mark.skipif(sys.platform != "linux", reason="threads have no priority")
def test_a_rank_leaves_the_cpus_to_ray_after_its_first_micro_batch(
    stores: dict[str, Path],
) -> None:
    def niceness(thread: threading.Thread) -> int:
        return os.getpriority(os.PRIO_PROCESS, thread.native_id)

    spec = stream(stores)
    own = niceness(threading.main_thread())
    head = HeadStart(spec, spec.plan.start(), 1, 2, num_free=1)
    head.start()
    batches = head.batches()
    next(batches)
    head.hear(2, is_final=False)
    next(batches)
    assert niceness(head._thread) == max(own, 5)
    assert niceness(threading.main_thread()) == own
    head.stop()


def test_rank_0_reserves_what_covers_the_start_of_the_pool(
    stores: dict[str, Path],
) -> None:
    spec = stream(stores, plan=dataclasses.replace(PLAN, epochs=1000))
    head = HeadStart(spec, spec.plan.start(), 0, 1)
    head.start()
    batches = head.batches()
    for _ in range(4):
        next(batches)
    num = head.reserve()
    assert num > head.num_claimed >= 4
    head.hear(num, is_final=True)
    assert 4 + len(list(batches)) == num == head.num_claimed


def test_micro_batches_that_nobody_takes_are_bounded(stores: dict[str, Path]) -> None:
    spec = stream(stores, plan=dataclasses.replace(PLAN, epochs=1000))
    head = HeadStart(spec, spec.plan.start(), 0, 1)
    head.start()

    def claimed(num: int) -> bool:
        deadline = time.monotonic() + 300
        while head.num_claimed < num and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.2)
        return head.num_claimed == num

    # a step's, while the loop has not asked for any
    assert claimed(2)
    next(head.batches())
    assert claimed(1 + 64)
    head.stop()


def broken(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    raise SystemExit("no more")


def test_an_error_ends_the_head_start_before_its_micro_batch(
    stores: dict[str, Path],
) -> None:
    spec = stream(stores, train_transform=broken, val_transform=None)
    head = HeadStart(spec, spec.plan.start(), 0, 1)
    head.start()
    assert list(head.batches()) == []
    assert head.num_claimed == 0 and "no more" in str(head.error) and head.is_short


def drawing(image: np.ndarray) -> np.ndarray:
    return image[: np.random.randint(9, 10), :9].copy()


def test_a_transform_that_draws_from_the_process_is_left_to_actors(
    stores: dict[str, Path],
) -> None:
    spec = stream(stores, train_transform=drawing, val_transform=None)
    head = HeadStart(spec, spec.plan.start(), 0, 1)
    head.start()
    assert list(head.batches()) == [] and head.error is None and head.is_short


never = threading.Event()


def hanging(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    never.wait()
    return image[:9, :9].copy()


def test_a_micro_batch_over_its_time_is_given_up(stores: dict[str, Path]) -> None:
    transform = TransformConfig(time_limit_s=0.2)
    spec = stream(
        stores, train_transform=hanging, val_transform=None, transform=transform
    )
    head = HeadStart(spec, spec.plan.start(), 0, 1)
    head.start()
    assert list(head.batches()) == [] and head.num_claimed == 0
    assert isinstance(head.error, RaypipeError) and "time_limit_s" in str(head.error)
    never.set()


def test_a_mark_of_a_process_that_is_gone_is_found(tmp_path: Path) -> None:
    marks = Marks("ab12", 0, None)
    assert marks.set() and not marks.found()
    folder = tmp_path / "cache" / "head-starts"
    (own,) = folder.iterdir()
    own = own.rename(folder / "ab12-999999999")
    assert not marks.found(), "it waited when it was ended"
    marks.making(True)
    assert marks.found()
    marks.making(False)
    assert not marks.found()
    marks.making(True)
    assert marks.found() and not Marks("cd34", 0, None).found()
    marks.forget()
    assert not marks.found() and marks.set()
    marks.remove()
    assert list(folder.iterdir()) == []


def left() -> Iterator[str]:
    """What head starts have left."""
    yield from (
        thread.name
        for thread in threading.enumerate()
        if thread.name
        in ("raypipe-head-start", "raypipe-pool-start", "raypipe-takeover")
    )
    yield from map(str, Path(os.environ["RAYPIPE_CACHE"], "head-starts").glob("*"))


@pytest.mark.cluster
def test_ten_streams_that_are_peeked_into_leave_nothing(
    stores: dict[str, Path], idle_cluster: None
) -> None:
    import ray

    spec = stream(stores)
    for _ in range(10):
        loader = raypipe.loader(spec)
        next(next(loader.epochs()).train)
        del loader
    deadline = time.monotonic() + 300
    while ray.available_resources().get("CPU", 0) < 4 or list(left()):
        assert time.monotonic() < deadline, list(left())
        time.sleep(0.2)
