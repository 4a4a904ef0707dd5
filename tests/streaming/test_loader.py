"""This rank's share of the stream on the device; the stream is made in this process, without Ray's execution."""

from __future__ import annotations

import dataclasses
import gc
import json
import threading
from collections.abc import Callable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from patience import PATIENCE_S
from ray.train import ScalingConfig
from small_streams import spec_of
from without_ray import every_batch

from raypipe.config import PlanConfig, PoolConfig
from raypipe.errors import ConfigError, CursorError, RaypipeError
from raypipe.plan.places import Cursor, MicroBatchId
from raypipe.rayext.allocation import Resources
from raypipe.stores.memory import MemoryStore
from raypipe.streaming.epochs import Epoch
from raypipe.streaming.handover import check_resources, loader
from raypipe.streaming.inline import inline_batches
from raypipe.streaming.lifetime import GAVE_WAY, end_oldest, supervisors
from raypipe.streaming.loader import Loader
from raypipe.streaming.opening import open_stream
from raypipe.streaming.rank_stream import HostSource
from raypipe.streaming.ray_stream import RayStreams, _Opening
from raypipe.streaming.run_log import RunLog
from raypipe.streaming.shares import Share
from raypipe.streaming.spec import StreamSpec
from raypipe.transform.fields import MicroBatch

from pictures import CLASSES, picture  # isort: skip


PLAN = PlanConfig(epochs=2, micro_batch_size=6, global_batch_size=24)
EIGHT = MemoryStore([b""] * 8, [0] * 8)


@pytest.fixture(scope="module")
def spec(stores: dict[str, Path]) -> StreamSpec:
    return spec_of(stores["train"], stores["val"], plan=PLAN)


# Epochs, steps, and where a run stands


def test_an_epoch_trains_then_validates_and_tells_where_steps_end(
    spec: StreamSpec,
) -> None:
    one, places, cursors = loader(spec), [], []
    for epoch in one.epochs():
        assert (len(epoch.train), len(epoch.val)) == (4 * 4, 4)
        for batch in chain(epoch.train, epoch.val):
            places.append(batch.position)
            assert (
                batch.ends_step == (batch.position.micro == 3)
                and batch.position.epoch == epoch.number
            )
            cursors.append((one.cursor.epoch, one.cursor.step))
    assert places == list(spec.plan.micro_batches(spec.plan.start()))
    # A step counts once its last micro-batch is handed out, a validation likewise.
    first = [(0, step) for step in range(4) for _ in range(4)]
    expected = [*first[1:], (0, 4), *[(0, 4)] * 3, (1, 0)]
    assert cursors == [*expected, *[(epoch + 1, step) for epoch, step in expected]]


def test_what_a_loop_leaves_over_is_skipped_and_cannot_be_asked_for_later(
    spec: StreamSpec,
) -> None:
    one, seen = loader(spec), []
    epochs: list[Epoch] = []
    for epoch in one.epochs():
        if epochs:
            with pytest.raises(
                RaypipeError,
                match="the rest of epoch 0's train batches was skipped when the next",
            ):
                next(epochs[0].train)
        seen.append(next(epoch.train).position)
        seen.append(next(epoch.val).position)
        epochs.append(epoch)
    assert [(at.split, at.epoch, at.step) for at in seen] == [
        (split, epoch, 0) for epoch in range(2) for split in ("train", "val")
    ]
    assert one.state_dict() == {
        "epoch": 2,
        "step": 0,
        "fingerprint": spec.plan.fingerprint,
    }
    assert [*every_batch(loader(spec, cursor=one.cursor))] == []


# of a module: threads have their own copies of what a transform itself holds
CALLS_LEFT = [0]


@pytest.mark.parametrize("max_actors", [0, 2])
@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_after_an_error_a_stream_names_it_and_can_go_on(
    spec: StreamSpec, error: type[BaseException], max_actors: int
) -> None:
    CALLS_LEFT[0] = 5 * 6 + 1

    def fails_once(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        CALLS_LEFT[0] -= 1
        if not CALLS_LEFT[0]:
            raise error
        return image[:8, :8]

    transforms: Any = {"train": fails_once, "val": fails_once}
    spec = dataclasses.replace(
        spec,
        transforms=transforms,
        pool=PoolConfig(engine="inline", max_actors=max_actors),
    )
    one = loader(spec)
    train = next(one.epochs()).train
    with pytest.raises(error):
        list(train)
    for again in (lambda: next(train), lambda: next(one.epochs())):
        with pytest.raises(
            RaypipeError,
            match=rf"its next batch failed with {error.__name__}: .* restarts it",
        ):
            again()
    one.load_state_dict(one.state_dict())
    assert [batch.position for batch in every_batch(one)] == [
        *spec.plan.micro_batches(one._progress.start)
    ]


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_state_goes_on_at_the_next_step_with_any_number_of_workers(
    spec: StreamSpec, world_size: int
) -> None:
    plan, states = spec.plan, []
    whole = loader(spec)
    for batch in every_batch(whole):
        if batch.ends_step:
            states.append(json.loads(json.dumps(whole.state_dict())))
    for state in states:
        left = set(plan.micro_batches(Cursor.from_dict(state)))
        for rank in range(world_size):
            rest = ranked(spec, rank, world_size)
            rest.load_state_dict(state)
            places = [batch.position for batch in every_batch(rest)]
            assert places == sorted(places, key=places.index) and len(places) == len(
                left
            ) / (world_size - rank)
            left -= set(places)
        assert not left


def ranked(spec: StreamSpec, rank: int, world_size: int) -> Loader:
    return Loader(
        spec,
        HostSource(lambda place: inline_batches(spec, place, rank, world_size)),
        Share(rank, world_size, rank, world_size),
        begins=False,
    )


def test_a_loader_does_not_begin_anew_in_silence(
    spec: StreamSpec,
) -> None:
    one = ranked(spec, 0, 1)
    with pytest.raises(CursorError, match=r"with loader\.report or loader\.save"):
        next(every_batch(one))


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"epoch": 0, "step": 1, "fingerprint": "0" * 16}, "made under plan 0000"),
        ({"epoch": 0}, "not a cursor"),
        ([], "not a cursor"),
    ],
)
def test_a_state_of_something_else_is_refused(
    spec: StreamSpec, state: Any, message: str
) -> None:
    one = loader(spec)
    with pytest.raises(CursorError, match=message):
        one.load_state_dict(state)
    assert next(every_batch(one)).position.step == 0


def told(
    batches: Iterator[MicroBatch], end: Callable[[], None]
) -> Iterator[MicroBatch]:
    """The same, and a call once they have ended."""
    try:
        yield from batches
    finally:
        end()


@pytest.mark.parametrize(
    "held",
    [
        "nothing",
        "the loader",
        "an epoch",
        "its batches",
        "its epochs",
        "a loop's epoch",
    ],
)
def test_a_stream_ends_when_nothing_holds_it_without_the_collector(
    spec: StreamSpec, held: str
) -> None:
    ends: list[str] = []

    def opened() -> Any:
        batches = inline_batches(spec, spec.plan.start())
        source = told(batches, lambda: ends.append("ended"))
        one = Loader(spec, HostSource(lambda _: source), cursor=spec.plan.start())
        epochs = one.epochs()
        for epoch in epochs:  # noqa: B007  a person leaves it at once
            break
        next(epoch.train)
        assert ends == []  # as in the next cell of a notebook
        return {
            "the loader": one,
            "an epoch": epoch,
            "a loop's epoch": next(one.epochs()),
            "its batches": epoch.train,
            "its epochs": epochs,
        }.get(held)

    gc.disable()
    try:
        kept = opened()
        assert ends == ([] if kept else ["ended"])
        del kept
        assert ends == ["ended"]
    finally:
        gc.enable()


def test_a_stream_whose_loop_was_left_goes_on_until_it_is_closed(
    spec: StreamSpec,
) -> None:
    one = loader(spec)
    for epoch in one.epochs():
        places = [batch.position for batch in islice(epoch.train, 6)]
        break
    assert one._stream.why is None
    # as in the next cell of a notebook
    places += [batch.position for batch in islice(epoch.train, 3)]
    assert places == list(islice(spec.plan.micro_batches(spec.plan.start()), 9))
    for epoch in one.epochs():  # the cell is run again: on, after the last whole step
        again = [batch.position for batch in islice(epoch.train, 2)]
        assert again == [places[8], dataclasses.replace(places[8], micro=1)]
        break
    one.close()
    for ask in (
        lambda: next(one.epochs()),
        lambda: next(epoch.train),
        lambda: next(iter(epoch.val)),
    ):
        with pytest.raises(
            RaypipeError, match=r"since the loader was closed: .* restarts it after"
        ):
            ask()
    one.load_state_dict(one.state_dict())
    assert next(next(one.epochs()).train).position == places[8]


class OwnPool:
    """The pool of a stream that this process makes."""

    supervisor: Any = object()
    actors, num_readers, has_begun, is_shared = 1, 0, True, False

    def __init__(self, spec: StreamSpec) -> None:
        self.spec = spec

    def awaited(self) -> str:
        return ""

    def open(self, place: MicroBatchId) -> Iterator[MicroBatch]:
        self.on_start()
        return inline_batches(self.spec, place)


def test_an_earlier_stream_makes_room_for_trainers_and_goes_on_later(
    spec: StreamSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    while end_oldest():  # other tests may have left some
        pass
    pool = OwnPool(spec)
    one = Loader(spec, HostSource(pool.open, pool), cursor=spec.plan.start())
    train = next(one.epochs()).train
    next(train)

    def cluster() -> Resources:
        return Resources(
            cpus=2.0, gpus=0.0, free_cpus=2.0 * (not supervisors()), free_gpus=0.0
        )

    monkeypatch.setattr("raypipe.rayext.allocation.cluster_resources", cluster)
    monkeypatch.setattr("raypipe.streaming.start.room.cluster_resources", cluster)
    monkeypatch.setattr("raypipe.streaming.start.room._SETTLE_S", 0.0)
    monkeypatch.setattr("ray.is_initialized", lambda: True)
    # a loader of a notebook, before the notebook trains
    check_resources(spec, ScalingConfig(num_workers=2))
    assert one._stream.why == GAVE_WAY and not end_oldest()
    monkeypatch.setattr(RunLog, "opened", lambda *_: None)
    assert next(train).position.micro == 1  # it starts again
    assert supervisors() == [pool.supervisor]


@pytest.mark.parametrize(
    ("workers", "world_size", "message"),
    [
        (8, None, "8 workers cannot share the 4 micro-batches of a step"),
        (8, 3, "world_size=3 shares of the data do not go evenly to num_workers=8"),
        ((4, 8), 4, "world_size=4 .* num_workers=\\(4, 8\\)"),
        (8, 4, ""),
    ],
)
def test_workers_of_a_mesh_need_not_divide_the_micro_batches_of_a_step(
    stores: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    workers: Any,
    world_size: int | None,
    message: str,
) -> None:
    spec = open_stream(stores["train"], plan=PLAN)
    many = Resources(cpus=64.0, gpus=0.0, free_cpus=64.0, free_gpus=0.0)
    for module in ("rayext.allocation", "streaming.start.room"):
        monkeypatch.setattr(f"raypipe.{module}.cluster_resources", lambda: many)
    monkeypatch.setattr("ray.is_initialized", lambda: True)
    config = ScalingConfig(num_workers=workers)
    if not message:
        check_resources(spec, config, world_size=world_size)
        return
    with pytest.raises(ConfigError, match=message):
        check_resources(spec, config, world_size=world_size)


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        (
            {"plan": {"epochs": 3}},
            "open_stream: plan must be a PlanConfig or none, got {'epochs': 3}",
        ),
        ({"plan": {}}, "open_stream: plan must be a PlanConfig or none, got {}"),
        (
            {"transform": "light"},
            "open_stream: transform must be a TransformConfig or none, got 'light'",
        ),
        (
            {"pool": PlanConfig()},
            r"open_stream: pool must be a PoolConfig or none, got PlanConfig\(",
        ),
        (
            {"columns": "caption"},
            r"store.columns must be \[string, …\] or .*, got 'caption'",
        ),
        ({"columns": 3}, "store.columns must be .*, got 3"),
    ],
)
def test_an_argument_of_a_stream_that_is_of_another_type_is_named(
    argument: Any, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        open_stream(EIGHT, **argument)


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        (
            {"augment": {"preset": "light"}},
            "raypipe.loader: augment must be an AugmentConfig, a module or none",
        ),
        ({"cursor": 3}, "raypipe.loader: cursor must be a Cursor or none, got 3"),
        (
            {"prefetch_factor": 0},
            "raypipe.loader: prefetch_factor must be a whole number of at least 1, got 0",
        ),
        (
            {"keep_batches": 1.5},
            "raypipe.loader: keep_batches must be a whole number of at least 0, got 1.5",
        ),
        (
            {"max_actors": "8"},
            "raypipe.loader: max_actors must be a whole number of at least 1 or none, got '8'",
        ),
    ],
)
def test_an_argument_of_a_loader_that_is_of_another_type_is_named(
    argument: Any, message: str
) -> None:
    spec = open_stream(EIGHT, plan=PlanConfig(micro_batch_size=4))
    with pytest.raises(ConfigError, match=message):
        loader(spec, **argument)
    with pytest.raises(
        ConfigError, match=r"raypipe\.loader: spec must be a StreamSpec, got <"
    ):
        loader(EIGHT, **argument)  # type: ignore[arg-type]


def test_a_run_started_again_after_its_end_says_that_nothing_is_left(
    spec: StreamSpec, caplog: pytest.LogCaptureFixture
) -> None:
    num_steps = 2 * spec.plan.steps_per_epoch
    loader(spec, cursor=spec.plan.cursor_at(num_steps - 1))
    assert caplog.messages == []
    ended = loader(spec, cursor=spec.plan.cursor_at(num_steps))
    assert list(ended.epochs()) == []
    (told,) = caplog.messages
    assert "all 2 epochs are done" in told
    assert "set a larger plan.epochs" in told


def test_a_function_of_ray_tune_gets_the_whole_stream(
    spec: StreamSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> None:
        raise DeprecationWarning(
            "`ray.train.get_context` is deprecated when running in a function passed to Ray Tune"
        )

    monkeypatch.setattr("ray.train.get_context", refuse)
    monkeypatch.setattr("ray.train.get_checkpoint", refuse)
    one = loader(spec)
    assert one.world_size == 1
    one.restore()


def test_ranks_of_other_plans_or_places_are_refused(
    spec: StreamSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    never = threading.Event()
    first = MicroBatchId("train", 0, 0, 0)

    def hand_over(
        plan: str, place: MicroBatchId | None = first, again: bool = False
    ) -> Any:
        def broadcast(_: Any) -> Any:
            if place is None:
                never.wait()
            assert place
            return _Opening(plan, place, None, head_start=9)

        monkeypatch.setattr("raypipe.streaming.ray_stream.from_rank_zero", broadcast)
        limit_s = PATIENCE_S if place else 0.2
        quick = dataclasses.replace(spec, pool=PoolConfig(stall_timeout_s=limit_s))
        streams = RayStreams(quick, 1, 2, True, None, apart=False)
        streams._has_started = again
        return streams._agree(dataclasses.replace(first, micro=1))

    assert hand_over(spec.plan.fingerprint).head_start == 9
    assert hand_over(spec.plan.fingerprint, again=True).head_start == 9
    with pytest.raises(
        ConfigError,
        match=r"rank 1 has plan \w+, and rank 0 has another: give all ranks the same",
    ):
        hand_over("another")
    with pytest.raises(
        RaypipeError,
        match="rank 1 starts the stream at epoch 0, step 0, and rank 0 at epoch 1,",
    ):
        second = MicroBatchId("train", 1, 0, 0)
        hand_over(spec.plan.fingerprint, second, again=True)
    with pytest.raises(
        RaypipeError,
        match="rank 1 starts the stream again at epoch 0, step 0, and other ranks have",
    ):
        hand_over(spec.plan.fingerprint, None, again=True)
    never.set()


def test_a_loader_outside_of_ray_train_connects_to_ray_by_itself(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def no_ray(*_: Any, **__: Any) -> None:
        raise ConnectionRefusedError

    monkeypatch.setenv("RAYPIPE_CACHE", str(tmp_path))
    monkeypatch.setattr("raypipe.streaming.start.pool_start.connect", no_ray)
    monkeypatch.setattr("raypipe.streaming.start.pool_start.connect_by_thread", no_ray)
    spec = open_stream(EIGHT, plan=PlanConfig(epochs=1, micro_batch_size=4))
    # the loader does not wait for it: the first batch does
    epoch = next(loader(spec).epochs())
    with pytest.raises(ConnectionRefusedError):
        next(epoch.train)
    at_once = dataclasses.replace(spec, pool=PoolConfig(head_start=0))
    with pytest.raises(ConnectionRefusedError):
        loader(at_once)


def test_a_class_that_no_loss_takes_is_told_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    labels = [0, 1, -1, 0, -1, 1]
    store = MemoryStore([picture(i) for i in range(6)], labels, classes=CLASSES)
    spec = spec_of(store, plan=PlanConfig(epochs=2, micro_batch_size=2))
    with loader(spec) as one:
        seen = [label for batch in every_batch(one) for label in batch.target.tolist()]
    assert sorted(seen) == sorted(labels * 2)
    (told,) = [text for text in caplog.messages if "has label -1" in text]
    assert told.startswith(("train sample 2 ", "train sample 4 "))
    assert "ignore_index=-1" in told and "store.exclude" in told
