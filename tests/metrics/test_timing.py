"""Stage times, and the sentences that are made of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from raypipe.metrics.timing import (
    Situation,
    StageClock,
    StageTimes,
    diagnose,
)

CPU = torch.device("cpu")


def text(
    times: StageTimes,
    world_size: int = 1,
    actors: int = 4,
    used: float = 0,
    **more: Any,
) -> str:
    """Of a run that takes ten times as long: a short one gets no advice."""
    long = sum(
        [times] * 10, StageTimes(utilization_sum=used, utilization_samples=used > 0)
    )
    return " ".join(diagnose(long, Situation(world_size, actors, **more)))


def times_of(**times: float) -> StageTimes:
    """Of a thousand images, unless told otherwise."""
    return StageTimes(**{"images": 1000, **times})  # type: ignore[arg-type]


def test_a_run_that_has_just_begun_gets_no_advice() -> None:
    # as the first run of the digits
    starving = times_of(wait_s=8.0, compute_s=11.0, work_s=9.0)
    assert diagnose(StageTimes(), Situation(1, 1)) == ["Nothing was measured yet."]
    for world_size, images_per_s in ((1, 53), (2, 105)):
        found = " ".join(diagnose(starving, Situation(world_size, 4)))
        assert found == (
            f"{images_per_s} images/s; the time of a trainer is 42% wait, 0% augment, 58% compute. After its "
            "first batch the run took 19 s, too short to say what limits it."
        )
    assert "too short" not in text(starving) and "pool.max_in_flight" in text(starving)
    minute = times_of(wait_s=0.0, compute_s=60.0, work_s=9.0)
    assert "The model limits the run" in " ".join(diagnose(minute, Situation(1, 4)))


def test_a_mark_that_the_device_has_not_passed_is_read_later() -> None:
    class Event:
        def __init__(self) -> None:
            self.passed = False

        def query(self) -> bool:
            return self.passed

        def elapsed_time(self, end: Event) -> float:
            return 1500.0

    clock, start, end = StageClock(CPU), Event(), Event()
    clock.add("train", "augment", start, end)
    assert clock.times("train").augment_s == 0
    end.passed = True
    assert clock.times("train").augment_s == 1.5


MODEL = "The model limits the run"
ACTORS = "Decoding and transforming on CPUs limits"
READER = "its reader reads for 93% of the time"

# 15 s, of which 5 wait; the actors could make it in time, or could not.
LATE = {"wait_s": 5.0, "compute_s": 10.0, "work_s": 9.0}
STARVING = LATE | {"work_s": 90.0}
# 15 s in which one reader read for 14; actors are idle.
READING = {"wait_s": 10.0, "compute_s": 5.0, "work_s": 3.0, "read_s": 14.0}
SAVING = {"compute_s": 5.0, "checkpoint_s": 10.0, "work_s": 1.0}
BUSY = {
    "wait_s": 0.2,
    "compute_s": 9.0,
    "augment_s": 1.0,
    "work_s": 10.0,
    "micro_batches": 100,
}
HOST = BUSY | {"drained": 93}
FED = BUSY | {"wait_s": 0.1, "compute_s": 9.9, "augment_s": 0.0, "drained": 10}

ON_GPU = {"actors": 2, "device": "cuda"}
IDLE = {"device": "cuda", "used": 0.4}
NETWORK = "The network to the trainers limits the run"

ADVICE: dict[str, tuple[dict[str, float], dict[str, Any], list[str], list[str]]] = {
    # A model that is the limit: how few actors would do
    "a slow model": (
        {"wait_s": 0.01, "compute_s": 9.0, "augment_s": 0.99, "work_s": 10.0},
        {"actors": 8},
        [
            "100 images/s",
            MODEL,
            "2 CPU actors would be enough",
            "the pool may shrink",
        ],
        [],
    ),
    "a wait of 9%": (
        {"wait_s": 0.9, "compute_s": 9.1, "work_s": 60.0},
        {},
        [MODEL],
        [],
    ),
    "a wait of 11%": (
        {"wait_s": 1.1, "compute_s": 8.9, "work_s": 60.0},
        {},
        ["limits the run, 11%"],
        [],
    ),
    # 10 s of device work, 60 s of actor work: 6 actors, 7 with the headroom
    "too few actors": (
        LATE | {"work_s": 60.0},
        {},
        [
            f"{ACTORS} the run, 33% of the trainer's time goes by waiting",
            "pool.max_actors",
            "7 CPU actors would be enough",
        ],
        [],
    ),
    "too few actors of two ranks": (
        LATE | {"work_s": 60.0},
        {"world_size": 2, "device": "cuda"},
        ["14 CPU actors would be enough, 6.9 per GPU"],
        [],
    ),
    "no actors": (
        LATE | {"work_s": 5.0},
        {"actors": 0},
        [
            "The trainer makes its micro-batches itself",
            "pool.engine=ray",
            "1 CPU actor would be enough, for this trainer; there are none",
        ],
        [],
    ),
    "a slow store": (
        STARVING | {"read_s": 60.0},
        {},
        ["Reading the store limits"],
        [],
    ),
    "few blocks in flight": (LATE, {}, ["pool.max_in_flight"], []),
    "a slow copy": (
        STARVING | {"transfer_s": 20.0},
        {},
        ["The copy to the device limits"],
        [],
    ),
    "a slow augmentation": (
        {"augment_s": 6.0, "compute_s": 4.0},
        {},
        ["device augmentation limits"],
        [],
    ),
    # A slow reader is not taken for too few blocks in flight
    "a slow reader": (
        READING,
        {"readers": 1},
        [READER, "convert the store to LMDB"],
        ["pool.max_in_flight", "max_actors"],
    ),
    "two slow readers": (READING, {"world_size": 2, "readers": 2}, [READER], []),
    "a fast reader": (
        READING | {"read_s": 4.0},
        {"readers": 1},
        ["pool.max_in_flight"],
        [],
    ),
    "a fast reader and slow actors": (
        READING | {"read_s": 4.0, "work_s": 60.0},
        {"readers": 1},
        [ACTORS],
        [],
    ),
    # Slow checkpoints are not taken for a slow model
    "slow checkpoints": (
        SAVING,
        {},
        [
            "0% wait, 0% augment, 33% compute, 67% checkpoint",
            "Checkpoints hold up the run for 67% of its time",
            "67 images/s",
        ],
        ["The model limits"],
    ),
    "checkpoints beside a slow model": (
        SAVING | {"compute_s": 9.0, "checkpoint_s": 1.0},
        {},
        ["for 10% of its time", MODEL],
        [],
    ),
    "fast checkpoints": (
        SAVING | {"compute_s": 99.0, "checkpoint_s": 1.0},
        {},
        [],
        ["Checkpoints"],
    ),
    # A host that is behind is told apart from a slow model
    "a device that never drained": (BUSY, ON_GPU, [MODEL], ["The host"]),
    "a device that drained at times": (
        BUSY | {"drained": 50},
        ON_GPU,
        [MODEL],
        ["The host"],
    ),
    "a slow host": (
        HOST,
        ON_GPU,
        [
            "The host limits the run, not the model: the GPU had finished its work before 93% of",
            "loss.item()",
            "plan.micro_batch_size",
            "compile: true in train.model",
            "CUDA graph",
        ],
        ["augment.preset", "The model limits"],
    ),
    "a slow host that augments": (
        HOST | {"augment_s": 20.0},
        ON_GPU,
        ["augment.preset"],
        [],
    ),
    "a busy device that augments": (
        BUSY | {"augment_s": 20.0},
        ON_GPU,
        ["device augmentation"],
        [],
    ),
    # it has nothing to do because nothing comes
    "a starving device": (
        HOST | {"wait_s": 5.0, "work_s": 90.0},
        ON_GPU,
        [ACTORS],
        ["The host"],
    ),
    # An idle GPU that is fed is told apart from a slow model
    "an idle GPU": (
        FED,
        IDLE,
        [
            "it executes kernels for 40% of it.",
            "Neither the input nor the speed of the GPU limits the run: 1% of its time goes by waiting",
            "compile: true in train.model",
        ],
        ["The model limits"],
    ),
    "an idle GPU of an own loop": (
        FED,
        IDLE | {"is_run": False},
        ["torch.compile"],
        [],
    ),
    "a busy GPU": (
        FED,
        IDLE | {"used": 0.97},
        [f"{MODEL}: the stream keeps up.", "for 97% of it"],
        [],
    ),
    "a GPU that nobody counts": (
        FED,
        {"device": "cuda"},
        [],
        ["Neither", "executes"],
    ),
    "an idle GPU that starves": (
        STARVING | {"compute_s": 5.0},
        IDLE,
        [ACTORS],
        [],
    ),
    "an idle GPU of a slow host": (
        FED | {"drained": 90},
        IDLE,
        ["had finished its work before 90%"],
        [],
    ),
    "an idle GPU at checkpoints": (
        SAVING | {"compute_s": 6.0, "checkpoint_s": 4.0},
        IDLE,
        [],
        ["Neither"],
    ),
    # Blocks that lie ready and come late name the network, or a full object store
    "a slow network": (
        LATE,
        {"ready": 0.9},
        [
            f"{NETWORK}: a finished block lay ready for 90% of the time",
            "transform.decode=device",
        ],
        ["max_in_flight"],
    ),
    "blocks that are seldom ready": (LATE, {"ready": 0.1}, ["max_in_flight"], []),
    "slow actors": (STARVING, {"ready": 0.1}, [ACTORS], []),
    "a full object store": (
        LATE,
        {"ready": 0.9, "spilled_bytes": 7 * 10**9},
        [
            "The object store is full, and Ray has written 7.0 GB to disk",
            "--object-store-memory",
            "lower pool.max_in_flight",
        ],
        ["network"],
    ),
    # An outage of storage is not taken for a slow store
    "no outage": (STARVING | {"read_s": 80.0}, {}, ["convert the store to LMDB"], []),
    "an outage": (
        STARVING | {"read_s": 80.0, "outage_s": 60.0},
        {},
        ["Outages of object storage limit the run, with 67% of an actor's time"],
        ["LMDB"],
    ),
    "an outage of a reader": (
        READING | {"outage_s": 7.0},
        {"readers": 1},
        ["with 50% of the reading time"],
        [],
    ),
}


@pytest.mark.parametrize("case", ADVICE)
def test_each_limit_has_advice_of_its_own(case: str) -> None:
    times, situation, said, unsaid = ADVICE[case]
    found = text(times_of(**times), **situation)
    assert [part for part in said if part not in found] == [], found
    assert [part for part in unsaid if part in found] == [], found


@pytest.mark.parametrize("times", [SAVING, HOST, STARVING | {"read_s": 60.0}, LATE])
@pytest.mark.parametrize(
    ("ready", "spilled_bytes"), [(0.0, 0), (0.9, 0), (0.9, 1 << 30)]
)
def test_a_loop_of_ones_own_gets_no_advice_about_settings_that_it_lacks(
    times: dict[str, float], ready: float, spilled_bytes: int
) -> None:
    given = {"device": "cuda", "ready": ready, "spilled_bytes": spilled_bytes}
    found = text(times_of(**times), is_run=False, **given)
    assert "train." not in found and "storage_path" not in found, found
    assert ("loader.report" in found) == (times is SAVING)
    if times is SAVING:
        assert "train.checkpoint_interval" in text(times_of(**times), **given)
