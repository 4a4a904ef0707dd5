"""The road of a stream by Ray, without Ray: ranks, their head start, and a pool that this process makes."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray
from patience import until

from raypipe.config import PlanConfig, PoolConfig, TransformConfig
from raypipe.plan.places import MicroBatchId
from raypipe.streaming import pipeline, ray_stream
from raypipe.streaming.blocks import cut
from raypipe.streaming.hashes import batch_hash
from raypipe.streaming.inline import inline_batches
from raypipe.streaming.lifetime import HeadStartLostError, PoolLostError
from raypipe.streaming.maker import MicroBatchMaker
from raypipe.streaming.memory.rank_memory import RankMemory
from raypipe.streaming.opening import open_stream
from raypipe.streaming.ray_stream import RayStreams
from raypipe.streaming.row import block_row
from raypipe.streaming.spec import StreamSpec
from raypipe.streaming.start import head_start, pool_start
from raypipe.streaming.start.head_start import HeadStart
from raypipe.streaming.start.pool_start import PooledStream
from raypipe.streaming.supervisor import Supervisor

Stores = dict[str, Path]

PLAN = PlanConfig(epochs=2, micro_batch_size=8, global_batch_size=16, seed=5)


class Split:
    """A rank's part of the execution: blocks of two micro-batches behind the first ones."""

    def __init__(self, spec: StreamSpec, start: Any, first: int, share: Any) -> None:
        self.spec, self.start, self.first = spec, start, first
        self.rank, self.world_size = share

    def iter_batches(self, **_: Any) -> Iterator[dict[str, np.ndarray]]:
        maker = MicroBatchMaker(self.spec)
        places = self.spec.plan.micro_batches(self.start, self.first)
        blocks = cut(places, self.world_size, {"train": 2, "val": 2})
        for number, block in enumerate(blocks):
            if number % self.world_size == self.rank:
                batches, _, arrays = maker.block(block)
                yield block_row(batches, arrays)


class DyingSplit(Split):
    """A rank's part of an execution whose process dies behind so many blocks of this rank."""

    def __init__(self, split: Split, num_blocks: int) -> None:
        vars(self).update(vars(split))
        self._num_blocks = num_blocks
        begins = SimpleNamespace(remote=lambda split: None)
        self._coord_actor = SimpleNamespace(start_epoch=begins)
        self._output_split_idx = self.rank

    def iter_batches(self, **options: Any) -> Iterator[dict[str, np.ndarray]]:
        yield from islice(super().iter_batches(**options), self._num_blocks)
        raise ray.exceptions.ActorDiedError


handles = dict[int, Any]()


def handle_of(number: int) -> Any:
    return handles[number]


class Handle:
    """A handle of a Supervisor that lives in this process."""

    def __init__(self) -> None:
        self._supervisor = Supervisor(3)
        self._actor_id = SimpleNamespace(hex=lambda: "5" * 32)
        handles[id(self)] = self

    def __reduce__(self) -> Any:
        return handle_of, (id(self),)

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=getattr(self._supervisor, name))


@pytest.fixture(autouse=True)
def without_ray(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    opened = list[Any]()

    def broadcast(opening: Any) -> Any:
        if opening.supervisor:
            opened.append(opening)
        return opened[-1]

    def splits(
        spec: StreamSpec,
        start: MicroBatchId,
        *,
        world_size: int,
        num_first: int,
        **_: Any,
    ) -> list[Split]:
        shares = [(rank, world_size) for rank in range(world_size)]
        return [Split(spec, start, num_first, share) for share in shares]

    monkeypatch.setenv("RAYPIPE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(PooledStream, "connect", lambda *_: None)
    monkeypatch.setattr(ray_stream.ActorRoom, "make", lambda *_: None)
    monkeypatch.setattr(ray, "get", lambda answer: answer)
    monkeypatch.setattr(pipeline, "splits", splits)
    for name, value in {
        "from_rank_zero": broadcast,
        "remember_group": lambda: None,
        "is_local": lambda: False,
        "start_supervisor": lambda *_, **__: Handle(),
        "preflight": lambda pool, wait: SimpleNamespace(max_actors=2),
    }.items():
        monkeypatch.setattr(ray_stream, name, value)


def stream(stores: Stores, head_start: int, **changes: Any) -> StreamSpec:
    options = {"transform": TransformConfig(train="light", val="center", size=24)}
    return open_stream(
        str(stores["train"]),
        str(stores["val"]),
        plan=PLAN,
        pool=PoolConfig(head_start=head_start),
        **options | changes,
    )


def streams_of(spec: StreamSpec, world_size: int) -> list[RayStreams]:
    return [
        RayStreams(spec, rank, world_size, world_size > 1, None, apart=False)
        for rank in range(world_size)
    ]


def first_place(spec: StreamSpec) -> MicroBatchId:
    return next(spec.plan.micro_batches(spec.plan.start()))


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("head_start", [0, 1, 5, 10_000, -1])
def test_ranks_and_pool_make_the_stream_of_one_process_from_any_place(
    stores: Stores, world_size: int, head_start: int
) -> None:
    spec = stream(stores, head_start)
    places = list(spec.plan.micro_batches(spec.plan.start()))
    for start in (places[0], places[-1]):
        ranks = streams_of(spec, world_size)
        opened = [one.open(start) for one in ranks]
        for rank, batches in enumerate(opened):
            expected = inline_batches(spec, start, rank, world_size)
            assert list(map(batch_hash, batches)) == list(map(batch_hash, expected))
            until(lambda one=ranks[rank]: one.has_begun)
        for batches in opened:
            batches.close()


def test_ranks_call_the_supervisor_from_before_their_head_start_on(
    stores: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = Handle()
    calling = list[list[str]]()

    def begins(head: HeadStart) -> None:
        calling.append(handle._supervisor._watch.state()[1])
        begin(head)

    begin = HeadStart.start
    monkeypatch.setattr(HeadStart, "start", begins)
    monkeypatch.setattr(ray_stream, "start_supervisor", lambda *_, **__: handle)
    spec = stream(stores, 1)
    for one in streams_of(spec, 2):
        one.open(first_place(spec)).close()
    assert calling == [["rank 0"], ["rank 0", "rank 1"]]
    assert not [one for one in threading.enumerate() if "watchdog" in one.name]


@pytest.mark.parametrize("head_start", [0, 1])
def test_each_rank_holds_its_nodes_folder_of_finished_micro_batches(
    stores: Stores, monkeypatch: pytest.MonkeyPatch, head_start: int
) -> None:
    held = list[RankMemory]()

    class Held(RankMemory):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            held.append(self)

    monkeypatch.setattr(ray_stream, "RankMemory", Held)
    spec = stream(stores, head_start)
    place = first_place(spec)
    opened = [one.open(place) for one in streams_of(spec, 2)]
    for batches in opened:
        list(batches)
        batches.close()
    assert len(held) == 2


def fails(*_: Any, **options: Any) -> Any:
    raise ConnectionRefusedError


@pytest.mark.parametrize("world_size", [1, 2])
def test_an_error_of_the_pool_comes_behind_the_ranks_own_micro_batches(
    stores: Stores, monkeypatch: pytest.MonkeyPatch, world_size: int
) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(pool_start, "end_actors", lambda *_: None)
    spec = stream(stores, 3)
    start = first_place(spec)
    monkeypatch.setattr(pipeline, "splits", fails)
    for batches in [one.open(start) for one in streams_of(spec, world_size)]:
        for _ in range(3):
            next(batches)
        with pytest.raises(ConnectionRefusedError):
            next(batches)
        batches.close()


class Broken:
    def __call__(self, image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        if threading.current_thread().name == "raypipe-head-start":
            raise SystemExit("no more")
        return np.ascontiguousarray(image[:9, :9])


def test_a_rank_that_cannot_make_its_own_leaves_all_to_the_pool_next_time(
    stores: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = stream(stores, 3, train_transform=Broken(), val_transform=None)
    start = first_place(spec)
    (streams,) = streams_of(spec, 1)
    fix: Callable[..., int] = ray_stream.HeadStart.fix
    # it is known too late
    monkeypatch.setattr(ray_stream.HeadStart, "fix", lambda head, *_: head.let(3) or 3)
    batches = streams.open(start)
    with pytest.raises(HeadStartLostError, match="no more"):
        next(batches)
    batches.close()
    monkeypatch.setattr(ray_stream.HeadStart, "fix", fix)
    with_pool = streams.open(start)
    assert with_pool.head is None and next(with_pool).position == start
    with_pool.close()


def hashes_of(streams: RayStreams, spec: StreamSpec) -> Iterator[bytes]:
    """The micro-batches of a rank, whose stream is opened again where it was lost."""
    share = (streams._rank, streams._world_size)
    places = list(spec.plan.micro_batches(spec.plan.start(), share=share))
    batches = streams.open(places[0])
    num = 0
    while num < len(places):
        try:
            batch = next(batches)
        except PoolLostError:
            batches.close()
            batches = streams.open(places[num])
            continue
        if batch.position == places[num]:  # it was opened at a step
            num += 1
            yield batch_hash(batch)
    batches.close()


def dies(
    monkeypatch: pytest.MonkeyPatch, num_blocks: tuple[int, ...], times: int
) -> list[Any]:
    """Let the processes of the first executions die, behind so many blocks of each rank; return all executions."""
    executions = list[Any]()
    splits = pipeline.splits

    def first_dies(*args: Any, **options: Any) -> list[Any]:
        executions.append(splits(*args, **options))
        if len(executions) > times:
            return executions[-1]
        return list(map(DyingSplit, executions[-1], num_blocks))

    monkeypatch.setattr(pipeline, "splits", first_dies)
    monkeypatch.setattr(ray, "kill", lambda actor: None)
    # ranks have a process each: there they do not wait for each other's start
    monkeypatch.setattr(pool_start, "_starting", threading.Semaphore(2))
    return executions


@pytest.mark.parametrize(
    ("num_blocks", "times"),
    [((2,), 1), ((1, 1), 4), ((1, 3), 1), ((3, 1), 1), ((0, 0), 2)],
)
@pytest.mark.parametrize("last_first", [False, True])
def test_each_rank_goes_on_from_its_own_step_when_the_coordinator_dies(
    stores: Stores,
    monkeypatch: pytest.MonkeyPatch,
    num_blocks: tuple[int, ...],
    times: int,
    last_first: bool,
) -> None:
    dies(monkeypatch, num_blocks, times)
    spec = stream(stores, 1)
    world_size = len(num_blocks)
    ranks = [hashes_of(one, spec) for one in streams_of(spec, world_size)]
    got = [[next(hashes)] for hashes in ranks]
    # the others find the loss once one has ended
    for rank in sorted(range(world_size), reverse=last_first):
        got[rank] += ranks[rank]
    for rank in range(world_size):
        expected = inline_batches(spec, first_place(spec), rank, world_size)
        assert got[rank] == list(map(batch_hash, expected))


def test_a_rank_leaves_a_lost_stream_that_it_needs_no_more(
    stores: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    dies(monkeypatch, (1, 1), 1)
    left = list[int]()
    monkeypatch.setattr(pool_start, "end_actors", lambda *args: left.append(args[2]))
    spec = stream(stores, 1)
    batches = streams_of(spec, 2)[0].open(first_place(spec))
    with pytest.raises(PoolLostError) as lost:
        list(batches)
    lost.value.accept()
    batches.close()
    assert left == [0]


def test_the_pool_that_starts_after_a_loss_takes_over_from_the_ranks(
    stores: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    executions = dies(monkeypatch, (1, 1), 3)
    # ranks make no more than the one that is asked for, until they know where the pool begins
    monkeypatch.setattr(head_start, "_COVER_S", 0.0)
    monkeypatch.setattr(head_start, "_MAX_AHEAD_BYTES", 0)
    spec = stream(stores, 1)
    ranks = streams_of(spec, 2)
    for _ in zip(*[hashes_of(one, spec) for one in ranks], strict=True):
        for one in ranks:
            until(one._now._is_ready.is_set)
    assert len(executions) == 4
    last = executions[-1][0]
    assert last.first < spec.plan.num_micro_batches(last.start)


@pytest.mark.parametrize(("head_start", "num_blocks"), [(0, (1, 1)), (1, (0,))])
def test_a_loss_is_an_error_if_no_rank_can_make_what_it_lacks(
    stores: Stores,
    monkeypatch: pytest.MonkeyPatch,
    head_start: int,
    num_blocks: tuple[int, ...],
) -> None:
    dies(monkeypatch, num_blocks, 100)
    spec = stream(stores, head_start)
    for one in streams_of(spec, len(num_blocks)):
        with pytest.raises(ray.exceptions.ActorDiedError):
            list(hashes_of(one, spec))


def test_a_stream_is_closed_while_another_thread_waits_for_it(
    stores: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on = threading.Event()
    monkeypatch.setattr(PooledStream, "connect", lambda *_: goes_on.wait())
    spec = stream(stores, 1)
    (streams,) = streams_of(spec, 1)
    batches = streams.open(first_place(spec))
    left = list[Any]()
    reader = threading.Thread(target=lambda: left.extend(batches))
    reader.start()
    until(lambda: batches.head and batches.head._num_made == 1)
    closing = threading.Thread(target=batches.close)
    closing.start()
    goes_on.set()
    closing.join()
    reader.join()
    assert len(left) <= 1 and list(batches) == []


def test_a_batch_is_let_go_before_the_pools_next_one_is_asked_for(
    stores: Stores,
) -> None:
    kept = list[Any]()

    def made() -> Iterator[Any]:
        for _ in range(3):
            assert [held for held in kept if held() is not None] == []
            batch = np.zeros(1)
            kept.append(weakref.ref(batch))
            yield batch
            del batch

    batches = PooledStream(stream(stores, 1), lambda _: [], 0)
    batches._from_pool = made()
    batches._is_ready.set()
    while (batch := next(batches, None)) is not None:
        del batch
    assert len(kept) == 3
