"""The first micro-batches of a stream, which a rank makes itself while its pool starts."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from noisy_dataset import Noisy
from patience import until
from pictures import picture
from ray import cloudpickle
from tars import put, write_tar
from torchvision.transforms import v2

import raypipe
from raypipe.config import MAX_INT, PlanConfig, PoolConfig, TransformConfig
from raypipe.errors import TransformError
from raypipe.plan.places import MicroBatchId
from raypipe.streaming.hashes import batch_hash
from raypipe.streaming.inline import inline_batches
from raypipe.streaming.lifetime import HeadStartLostError
from raypipe.streaming.opening import open_stream
from raypipe.streaming.ray_stream import RayStreams
from raypipe.streaming.spec import StreamSpec
from raypipe.streaming.start import head_start
from raypipe.streaming.start.head_marks import Marks
from raypipe.streaming.start.head_start import (
    HeadStart,
    place_is_at_hand,
)
from raypipe.transform.fields import MicroBatch

Stores = dict[str, Path]

cloudpickle.register_pickle_by_value(sys.modules[__name__])

PLAN = PlanConfig(epochs=2, micro_batch_size=8, global_batch_size=16, seed=5)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYPIPE_CACHE", str(tmp_path / "cache"))


def stream(stores: Stores, **changes: Any) -> StreamSpec:
    transform = TransformConfig(train="light", val="center", size=24)
    options = {"plan": PLAN, "transform": transform, **changes}
    return open_stream(str(stores["train"]), str(stores["val"]), **options)


def of_address(address: str) -> StreamSpec:
    transform = TransformConfig(train="light", size=24)
    return open_stream(address, plan=PLAN, transform=transform)


def place_of(spec: StreamSpec) -> MicroBatchId:
    """The first place of a stream."""
    return next(spec.plan.micro_batches(spec.plan.start()))


def begun(
    spec: StreamSpec, rank: int = 0, world_size: int = 1, is_apart: bool = False
) -> HeadStart:
    place = place_of(spec)
    head = HeadStart(spec, place, rank, world_size, is_apart=is_apart)
    head.start()
    return head


def assert_leaves_all_to_actors(head: HeadStart) -> None:
    assert head.fix() == 0
    assert list(head.batches()) == []
    assert not head.is_lost


def hashes(batches: Iterator[MicroBatch]) -> list[bytes]:
    return list(map(batch_hash, batches))


def test_a_rank_makes_only_a_few_where_other_streams_make_the_same(
    stores: Stores,
) -> None:
    spec = stream(stores)
    expected = hashes(inline_batches(spec, place_of(spec)))
    head = begun(spec)
    assert head.fix(are_others=True) == 4
    assert hashes(head.batches()) == expected[:4]
    asked_for = begun(stream(stores, pool=PoolConfig(head_start=7)))
    assert asked_for.fix(are_others=True) == 7
    asked_for.stop()


@pytest.mark.parametrize("kind", ["lmdb", "tar"])
def test_a_rank_makes_what_the_node_has_cached_of_a_bucket(
    bucket: str, stores: Stores, tmp_path: Path, kind: str
) -> None:
    path = stores["train"]
    if kind == "tar":
        path = write_tar(tmp_path / "train.tar", [(picture(i), i) for i in range(100)])
    spec = of_address(put(path, f"{bucket}/{path.name}"))
    if kind == "lmdb":  # a small tar is fetched to be listed
        assert not place_is_at_hand(spec, place_of(spec))
        assert_leaves_all_to_actors(begun(spec))
    # an actor of this node has read all
    expected = hashes(inline_batches(spec, place_of(spec)))
    head = begun(spec)
    num = head.fix()
    assert num > 0
    assert hashes(head.batches()) == expected[:num]


def test_a_rank_fetches_what_others_count_on(bucket: str, stores: Stores) -> None:
    spec = of_address(put(stores["train"], f"{bucket}/train.lmdb"))
    head = begun(spec, 1, 2)
    head.let(2)
    head.pool_is_there()
    expected = hashes(islice(inline_batches(spec, place_of(spec), 1, 2), 2))
    assert hashes(head.batches()) == expected


def test_rank_0_makes_what_covers_the_start_of_the_pool(
    stores: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head_start, "_COVER_S", 0.2)
    spec = stream(stores, plan=dataclasses.replace(PLAN, epochs=1000))
    head = begun(spec)
    batches = head.batches()
    for _ in range(4):
        next(batches)
    num = head.fix()
    head.pool_is_there()
    assert 4 + len(list(batches)) == head._num_made >= num > 4


@pytest.mark.parametrize("num_taken", [1, 5])
def test_a_rank_goes_on_while_its_pool_is_not_there(
    stores: Stores, num_taken: int
) -> None:
    spec = stream(stores)
    head = begun(spec)
    head.let(3)
    batches = head.batches()
    got = hashes(islice(batches, num_taken))
    until(lambda: head._num_begun == 6)
    head.pool_is_there()
    # what was begun is not thrown away
    got += hashes(batches)
    assert got == hashes(islice(inline_batches(spec, place_of(spec)), 6))
    assert head.num_beyond == 3


def test_the_pool_starts_behind_the_first_and_knows_how_long_one_takes(
    stores: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head_start, "_FIRST_S", 600.0)
    head = begun(stream(stores))
    head.await_first()
    assert head._num_made >= 1
    batches = head.batches()
    next(batches)
    second = next(batches)
    assert head.measured
    split, seconds, num_bytes = head.measured
    assert split == "train" and seconds > 0
    assert num_bytes == sum(array.nbytes for array in second.arrays().values())
    head.stop()
    # nobody waits for a rank that leaves
    begun(stream(stores, pool=PoolConfig(head_start=0))).await_first()


class Slow:
    """Waits for each item, as for a disk, without CPU time."""

    def __len__(self) -> int:
        return 99

    def __getitem__(self, index: int) -> int:
        time.sleep(0.01)
        return index


def test_the_time_of_one_counts_what_its_items_wait_for() -> None:
    head = begun(open_stream(Slow(), plan=PLAN))
    batches = head.batches()
    while not head.measured:
        next(batches)
    assert head.measured[1] >= 0.08
    head.stop()


def test_micro_batches_that_nobody_takes_are_bounded(
    stores: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = stream(stores, plan=dataclasses.replace(PLAN, epochs=1000))
    size = head_start._size(next(inline_batches(spec, place_of(spec))))
    monkeypatch.setattr(head_start, "_MAX_AHEAD_BYTES", 10 * size)
    head = begun(spec)

    def made(num: int) -> bool:
        until(lambda: head._num_made >= num)
        time.sleep(0.2)
        return head._num_made == num

    # a step's, while the loop has not asked for any
    assert made(2)
    next(head.batches())
    assert made(1 + 10)
    head.stop()


def broken(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    raise SystemExit("no more")


def test_an_error_is_raised_at_its_micro_batch_if_no_pool_makes_it(
    stores: Stores,
) -> None:
    spec = stream(stores, train_transform=broken, val_transform=None)
    head = begun(spec)
    until(lambda: head._is_done)
    # known in time, it is left to an actor
    assert_leaves_all_to_actors(head)
    head = begun(spec, 1, 2)
    head.let(3)
    with pytest.raises(TransformError, match="no more"):
        next(head.batches())
    assert head.is_lost


def drawing(image: np.ndarray) -> np.ndarray:
    return image[: np.random.randint(9, 10), :9].copy()


def of_items(stores: Stores) -> StreamSpec:
    return raypipe.open_stream(Noisy(), plan=PlanConfig(micro_batch_size=4))


def of_torchvision(stores: Stores) -> StreamSpec:
    steps = v2.Compose([v2.RandomCrop(9), v2.RandomHorizontalFlip()])
    return stream(stores, train_transform=steps, val_transform=None)


def test_a_function_that_may_draw_from_the_process_is_left_to_actors(
    stores: Stores,
) -> None:
    spec = stream(stores, train_transform=drawing, val_transform=None)
    assert_leaves_all_to_actors(begun(spec))


@pytest.mark.parametrize("spec_of", [of_items, of_torchvision])
def test_what_draws_from_the_process_is_made_while_the_loop_waits(
    stores: Stores, spec_of: Any
) -> None:
    spec = spec_of(stores)
    head = begun(spec)
    until(lambda: head._is_ready)
    head.let(3)
    head.pool_is_there()
    before = np.random.get_state(legacy=False)["state"]["pos"]
    batches = head.batches()
    places = spec.plan.micro_batches(place_of(spec))
    for number, batch in enumerate(batches):
        assert batch.position == next(places)
        # nothing is made while the loop has it
        assert head._num_begun == number + 1
        assert np.random.get_state(legacy=False)["state"]["pos"] == before
    assert number == 2 and not head.is_lost


@pytest.mark.parametrize("spec_of", [of_items, of_torchvision])
def test_what_draws_from_the_process_is_never_made_beside_a_ring(
    stores: Stores, spec_of: Any
) -> None:
    assert_leaves_all_to_actors(begun(spec_of(stores), is_apart=True))


never = threading.Event()


def hanging(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    never.wait()
    return image[:9, :9].copy()


def test_a_micro_batch_over_its_time_is_given_up(stores: Stores) -> None:
    transform = TransformConfig(time_limit_s=0.2)
    spec = stream(
        stores, train_transform=hanging, val_transform=None, transform=transform
    )
    head = begun(spec)
    head.let(3)
    with pytest.raises(HeadStartLostError, match="time_limit_s"):
        next(head.batches())
    never.set()


def die_at(fingerprint: str, place: MicroBatchId) -> None:
    """Let a process end in its head start."""
    dies = f"import os; from {Marks.__module__} import Marks; "
    dies += f"Marks('{fingerprint}', 0, None).set('{place}'); os._exit(1)"
    subprocess.run([sys.executable, "-c", dies], check=False)


def test_a_mark_of_a_process_that_is_gone_is_found(tmp_path: Path) -> None:
    first, second = (MicroBatchId("train", 0, step, 0) for step in (0, 17))
    marks = Marks("ab12", 0, None)
    assert marks.set(first) and marks.set(second) and not marks.found()
    die_at("ab12", second)
    assert not Marks("cd34", 0, None).found()
    assert marks.found() == {str(second)}
    assert not marks.found(), "it holds for one start"
    marks.remove()
    assert list((tmp_path / "cache" / "head-starts").iterdir()) == []


@pytest.mark.parametrize(
    ("world_size", "first", "expected"), [(1, 0, 7), (2, 0, 3), (1, 8, MAX_INT)]
)
def test_ranks_stop_before_what_was_in_work_when_a_process_ended(
    stores: Stores, world_size: int, first: int, expected: int
) -> None:
    spec = stream(stores)
    places = list(islice(spec.plan.micro_batches(place_of(spec)), 9))
    streams = RayStreams(spec, 0, world_size, False, None, apart=False)
    die_at(spec.plan.fingerprint, places[7])
    assert streams._head_start_at(places[first]) == expected
    # a loop may go back
    streams._has_started = True
    assert streams._head_start_at(places[first]) == expected
    again = RayStreams(spec, 0, world_size, False, None, apart=False)
    assert again._head_start_at(places[first]) == MAX_INT
    head = HeadStart(spec, places[0], 0, world_size, most=3)
    head.start()
    assert head.fix() == 3
    assert len(list(head.batches())) == 3
