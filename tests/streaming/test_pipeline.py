from __future__ import annotations

import dataclasses
import json
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import without_ray
from patience import until
from ray import cloudpickle

from raypipe.config import PlanConfig, PoolConfig, TransformConfig
from raypipe.errors import (
    BadSamplesError,
    ConfigError,
    CursorError,
    ResourceError,
    SampleError,
    TransformError,
)
from raypipe.rayext.allocation import preflight
from raypipe.rayext.iteration import begun
from raypipe.stores.memory import MemoryStore
from raypipe.streaming.digest import iterate_digests
from raypipe.streaming.hashes import batch_hash
from raypipe.streaming.opening import open_stream
from raypipe.streaming.pipeline import block_dataset, splits
from raypipe.streaming.remake import NUM_REMADE
from raypipe.streaming.row import batches_of, host_batches
from raypipe.streaming.spec import StreamSpec
from raypipe.streaming.supervisor import end_actors, start_supervisor
from raypipe.transform.fields import MicroBatch

from pictures import CLASSES, picture, samples  # isort: skip

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("ray_cluster")]

cloudpickle.register_pickle_by_value(sys.modules[__name__])

PLAN = PlanConfig(epochs=2, micro_batch_size=8, global_batch_size=16, seed=5)
SMALL = TransformConfig(train="light", val="center", size=24)


def spec_of(
    stores: dict[str, Path], train: str = "train", **changes: Any
) -> StreamSpec:
    return open_stream(
        str(stores[train]),
        str(stores["val"]),
        **{"plan": PLAN, "transform": SMALL, **changes},
    )


def corner(image: np.ndarray) -> np.ndarray:
    """A transform that needs no library: an actor is there 2 s earlier."""
    return np.ascontiguousarray(image[:9, :9])


def pool_actors() -> dict[str, str]:
    """The live actors of streams: id → class. (Ray Data keeps others of its own, one of each in a cluster.)"""
    import ray

    states = [
        actor
        for actor in ray._private.state.actors().values()
        if actor["State"] != "DEAD"
    ]
    names = ("MapWorker", "SplitCoordinator")
    return {
        a["ActorID"]: a["ActorClassName"]
        for a in states
        if a["ActorClassName"].startswith(names)
    }


def wait_for_end(before: dict[str, str]) -> None:
    """Wait until no actor of a stream lives, beside those there were before."""
    until(lambda: pool_actors().keys() <= before.keys(), pool_actors)


def test_blocks_grow_as_soon_as_it_is_known_what_a_micro_batch_takes(
    stores: dict[str, Path],
) -> None:
    plan = PlanConfig(epochs=3, micro_batch_size=2, global_batch_size=4, seed=5)
    spec = spec_of(stores, plan=plan, train_transform=corner, val_transform=corner)
    dataset = block_dataset(spec, spec.plan.start(), max_actors=1)
    rows = list(dataset.iter_batches(batch_size=None))
    found = [batch_hash(batch) for row in rows for batch in batches_of(row)]
    assert found == without_ray.digests(spec)
    sizes = [row["micro"].shape[1] for row in rows]
    assert sizes[:16] == [1] * 16 and max(sizes) > 2


@pytest.mark.system
def test_a_pool_works_before_its_ranks_ask_and_ends_with_them(
    stores: dict[str, Path],
) -> None:
    import ray

    spec = spec_of(stores, train_transform=corner, val_transform=corner)
    before, start = pool_actors(), spec.plan.start()
    for asks in (True, False):
        supervisor = start_supervisor()
        iterators = splits(
            spec, start, max_actors=1, world_size=2, supervisor=supervisor
        )
        ranks = [begun(iterator) for iterator in iterators]
        has_started = "1 transform actor has started"
        progress = supervisor.describe_progress
        while not ray.get(progress.remote()).startswith(has_started):
            time.sleep(0.1)
        if asks:
            found = [one.digest for one in iterate_digests(spec.plan, start, ranks)]
            assert found == without_ray.digests(spec)
        for rank in range(len(ranks)):
            end_actors(supervisor, iterators, rank, len(iterators))
    wait_for_end(before)


def test_a_dataset_has_rows_of_blocks_of_micro_batches(stores: dict[str, Path]) -> None:
    spec = open_stream(
        stores["train"],
        plan=PlanConfig(epochs=1, micro_batch_size=25, shuffle="off"),
        train_transform=lambda image: np.ascontiguousarray(image[:10, :12]),
        pool=PoolConfig(max_in_flight=(0, 3)),
    )
    rows = list(
        block_dataset(spec, spec.plan.start(), max_actors=1).iter_batches(
            batch_size=None
        )
    )
    assert [row["step"].tolist() for row in rows] == [[[0, 1, 2]], [[3]]]
    assert [row["image"].shape for row in rows] == [
        (1, 3, 25, 10, 12, 3),
        (1, 1, 25, 10, 12, 3),
    ]
    batches = [batch for row in rows for batch in batches_of(row)]
    assert [batch.position.step for batch in batches] == [0, 1, 2, 3]
    assert np.concatenate([batch.index for batch in batches]).tolist() == list(
        range(100)
    )


def test_an_idle_consumer_has_little_in_flight_and_nothing_spins(
    stores: dict[str, Path], tmp_path: Path
) -> None:
    def traced(image: np.ndarray) -> np.ndarray:
        with (tmp_path / "count").open("a") as file:
            file.write("x")
        return np.zeros((4, 4, 3), np.uint8)

    spec = open_stream(
        stores["train"],
        plan=PlanConfig(epochs=20, micro_batch_size=4),
        train_transform=traced,
        pool=PoolConfig(max_in_flight=6),
    )
    batches = host_batches(splits(spec, spec.plan.start(), max_actors=1)[0])
    before = set(threading.enumerate())
    for _ in range(5):
        next(batches)
    time.sleep(2)  # until all is full
    began = time.process_time()
    asked = time.monotonic()
    time.sleep(2)
    spun_s = time.process_time() - began
    assert spun_s < 0.9 * (time.monotonic() - asked), "Ray Data's own loop never rests"
    # by the actor, to compare them; and one more for the other actors
    remade = NUM_REMADE + 1
    done = ((tmp_path / "count").stat().st_size - remade) / 4
    assert done <= 5 + 6 + 4, (
        "beside what is in flight: one ahead for the rank, Ray's prefetch, what it unpacks"
    )
    # Ray Data's own threads, in a call after `ray.shutdown()`, would end the process without a word.
    threads = [
        t
        for t in threading.enumerate()
        if t.name == "iter_threaded" and t not in before
    ]
    batches.close()
    assert threads and not any(thread.is_alive() for thread in threads)


def with_bad(bad: dict[int, bytes | None], num: int = 64) -> MemoryStore:
    images = [bad.get(i, picture(i)) for i in range(num)]
    return MemoryStore(images, [i % 5 for i in range(num)], classes=CLASSES)


BAD = {3: b"", 17: picture(17)[:-200], 40: None}
ONE_EPOCH = PlanConfig(epochs=1, micro_batch_size=8)


def test_bad_samples_are_substituted_by_the_plan_and_quarantined(
    tmp_path: Path,
) -> None:
    spec = open_stream(
        with_bad(BAD),
        with_bad(BAD),
        plan=ONE_EPOCH,
        transform=SMALL,
        pool=PoolConfig(min_actors=2, cpus_per_actor=0.5),
        quarantine=(tmp_path / "one").as_uri(),
    )

    def rows_of(batches: Iterable[MicroBatch]) -> list[Any]:
        return [
            (
                b.position,
                b.index.tolist(),
                b["label"].tolist(),
                b.weight.tolist(),
                b.num_bad,
            )
            for b in batches
        ]

    rows = rows_of(host_batches(splits(spec, spec.plan.start(), max_actors=2)[0]))
    other = dataclasses.replace(spec, quarantine=(tmp_path / "two").as_uri())
    assert rows_of(without_ray.host_batches(other)) == rows
    assert sum(row[4] for row in rows) == 6
    for at, index, label, weight, _ in rows:
        if at.split == "train":
            assert (
                not set(index) & set(BAD)
                and label == [i % 5 for i in index]
                and min(weight) == 1
            )
        else:
            assert [i for i, w in zip(index, weight, strict=True) if w == 0] == [
                i for i in index if i in BAD
            ]
    records = [
        json.loads(line)
        for file in sorted((tmp_path / "one").iterdir())
        for line in file.read_text().splitlines()
    ]
    assert sorted(r["index"] for r in records if r["split"] == "train") == sorted(BAD)
    assert all(r["store"].startswith("memory:") and r["error"] for r in records)
    assert {p.name for p in (tmp_path / "one").iterdir()} == {
        p.name for p in (tmp_path / "two").iterdir()
    }


def test_an_error_of_user_code_names_its_line_and_opencv_has_one_thread() -> None:
    def broken(image: np.ndarray) -> np.ndarray:
        raise LookupError(f"{cv2.getNumThreads()} thread")

    config = dataclasses.replace(SMALL, max_bad_fraction=0)
    spec = open_stream(
        with_bad({}), plan=ONE_EPOCH, transform=config, train_transform=broken
    )
    place = r"the transform failed at .*test_pipeline\.py:\d+ in broken: LookupError: 1 thread "
    with pytest.raises(
        TransformError, match=rf"memory:\w+ sample \d+: {place}.*pool\.engine=inline"
    ) as caught:
        list(host_batches(splits(spec, spec.plan.start(), max_actors=1)[0]))
    assert type(caught.value) is TransformError


@pytest.mark.parametrize(
    ("transform", "num_bad", "error", "message"),
    [
        (
            dataclasses.replace(SMALL, max_bad_fraction=0),
            1,
            SampleError,
            r"memory:\w+ sample \d+: .*",
        ),
        # Of another transform the same, by tests without a cluster.
        pytest.param(
            SMALL, 12, BadSamplesError, "max_bad_fraction", marks=pytest.mark.soak
        ),
        pytest.param(
            dataclasses.replace(SMALL, train="none"),
            1,
            ConfigError,
            "crop or resize",
            marks=pytest.mark.soak,
        ),
    ],
)
def test_an_error_in_an_actor_reaches_the_consumer_as_one_clear_error(
    transform: TransformConfig, num_bad: int, error: type[Exception], message: str
) -> None:
    store = with_bad(
        {**BAD, 5: picture(5, 30, 30), **dict.fromkeys(range(6, 6 + num_bad), b"")}
    )
    spec = open_stream(store, plan=ONE_EPOCH, transform=transform)
    with pytest.raises(error, match=message) as caught:
        list(host_batches(splits(spec, spec.plan.start(), max_actors=1)[0]))
    assert type(caught.value) is error


def test_a_transform_that_cannot_be_sent_or_exits_is_one_clear_error() -> None:
    lock = threading.Lock()

    def locks(image: np.ndarray) -> np.ndarray:
        with lock:
            return image[:9, :9]

    def leaves(image: np.ndarray) -> np.ndarray:
        sys.exit("no license")

    cases = (
        (
            locks,
            ConfigError,
            r"^train_transform cannot be sent to the actors \(cannot pickle '_thread.lock' object\)",
        ),
        (
            leaves,
            TransformError,
            r"test_pipeline.py:\d+ in leaves: SystemExit: no license",
        ),
    )
    for transform, error, message in cases:
        spec = open_stream(with_bad({}), plan=ONE_EPOCH, train_transform=transform)
        with pytest.raises(error, match=message):
            list(host_batches(splits(spec, spec.plan.start(), max_actors=1)[0]))


def test_a_validation_whose_last_micro_batches_are_all_padding_is_exact(
    stores: dict[str, Path],
) -> None:
    few = [s["image"] for s in samples(3)]
    spec = open_stream(
        stores["train"],
        MemoryStore(few, [0, 1, 2], classes=CLASSES),
        plan=PlanConfig(epochs=1, micro_batch_size=10, global_batch_size=50),
        transform=dataclasses.replace(SMALL, val="none", train="none"),
    )
    found = list(without_ray.host_batches(spec))
    assert (
        len(found) == 15
        and sum(int((batch.weight > 0).sum()) for batch in found) == 103
    )


def test_a_cursor_of_another_plan_is_refused(stores: dict[str, Path]) -> None:
    spec, other = (
        spec_of(stores),
        spec_of(stores, plan=dataclasses.replace(PLAN, seed=6)),
    )
    with pytest.raises(CursorError, match=other.plan.fingerprint):
        block_dataset(spec, other.plan.start(), max_actors=1)


def test_a_run_that_the_cluster_cannot_hold_is_refused_at_once() -> None:
    with pytest.raises(
        ResourceError,
        match=r"100 transform actors.*has or can scale to 4:.*pool\.min_actors",
    ):
        preflight(PoolConfig(min_actors=100))
