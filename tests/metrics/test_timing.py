"""Stage times, and the sentences that are made of them."""

from __future__ import annotations

from typing import Any

import torch

from raypipe.metrics.timing import (
    Situation,
    StageClock,
    StageTimes,
    diagnose,
)

CPU = torch.device("cpu")


def text(times: StageTimes, world_size: int = 1, actors: int = 4, **more: Any) -> str:
    """Of a run that takes ten times as long: a short one gets no advice."""
    long = sum([times] * 10, StageTimes())
    return " ".join(diagnose(long, Situation(world_size, actors, **more)))


def test_a_run_that_has_just_begun_gets_no_advice() -> None:
    # as the first run of the digits
    starving = StageTimes(images=1000, wait_s=8.0, compute_s=11.0, work_s=9.0)
    assert diagnose(StageTimes(), Situation(1, 1)) == ["Nothing was measured yet."]
    for world_size, images_per_s in ((1, 53), (2, 105)):
        found = " ".join(diagnose(starving, Situation(world_size, 4)))
        assert found == (
            f"{images_per_s} images/s; the time of a trainer is 42% wait, 0% augment, 58% compute. After its "
            "first batch the run took 19 s, too short to say what limits it."
        )
    assert "too short" not in text(starving) and "pool.max_in_flight" in text(starving)
    minute = StageTimes(images=1000, wait_s=0.0, compute_s=60.0, work_s=9.0)
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


def test_a_run_whose_model_is_the_limit_is_told_how_few_actors_would_do() -> None:
    times = StageTimes(
        images=1000, wait_s=0.01, compute_s=9.0, augment_s=0.99, work_s=10.0
    )
    found = text(times, actors=8)
    assert "100 images/s" in found and "The model limits the run" in found
    less = StageTimes(images=1000, wait_s=0.9, compute_s=9.1, work_s=60.0)
    assert "The model limits the run" in text(less)
    more = StageTimes(images=1000, wait_s=1.1, compute_s=8.9, work_s=60.0)
    assert "limits the run, 11%" in text(more)
    assert "2 CPU actors would be enough" in found and "the pool may shrink" in found


def test_a_starving_run_is_told_how_many_actors_are_needed() -> None:
    # 10 s of device work, 60 s of actor work: 6 actors, 7 with the headroom.
    times = StageTimes(images=1000, wait_s=5.0, compute_s=10.0, work_s=60.0)
    found = text(times)
    assert (
        "Decoding and transforming on CPUs limits the run, 33% of the trainer's time goes by waiting"
        in found
    )
    assert "pool.max_actors" in found and "7 CPU actors would be enough" in found
    of_ranks = text(times, world_size=2, device="cuda")
    assert "14 CPU actors would be enough, 6.9 per GPU" in of_ranks


def test_each_limit_has_advice_of_its_own() -> None:
    starving = {"images": 100, "wait_s": 5.0, "compute_s": 10.0}
    assert "Reading the store limits" in text(
        StageTimes(**starving, work_s=90.0, read_s=60.0)
    )
    assert "pool.max_in_flight" in text(StageTimes(**starving, work_s=9.0))
    assert "The copy to the device limits" in text(
        StageTimes(**starving, work_s=90.0, transfer_s=20.0)
    )
    assert "device augmentation limits" in text(
        StageTimes(images=100, augment_s=6.0, compute_s=4.0)
    )


def test_a_slow_reader_is_not_taken_for_too_few_blocks_in_flight() -> None:
    # 15 s in which one reader read for 14; actors are idle.
    starving = StageTimes(
        images=1000, wait_s=10.0, compute_s=5.0, work_s=3.0, read_s=14.0
    )
    found = text(starving, readers=1)
    assert (
        "its reader reads for 93% of the time" in found
        and "convert the store to LMDB" in found
    )
    assert "pool.max_in_flight" not in found and "max_actors" not in found
    assert "its reader reads for 93% of the time" in text(
        starving, world_size=2, readers=2
    )
    fast = StageTimes(images=1000, wait_s=10.0, compute_s=5.0, work_s=3.0, read_s=4.0)
    assert "pool.max_in_flight" in text(fast, readers=1)
    slow_actors = StageTimes(
        images=1000, wait_s=10.0, compute_s=5.0, work_s=60.0, read_s=4.0
    )
    assert "Decoding and transforming on CPUs limits" in text(slow_actors, readers=1)


def test_slow_checkpoints_are_not_taken_for_a_slow_model() -> None:
    found = text(StageTimes(images=1000, compute_s=5.0, checkpoint_s=10.0, work_s=1.0))
    assert "0% wait, 0% augment, 33% compute, 67% checkpoint" in found
    assert (
        "Checkpoints hold up the run for 67% of its time" in found
        and "The model limits" not in found
    )
    assert "67 images/s" in found
    less = text(StageTimes(images=1000, compute_s=9.0, checkpoint_s=1.0, work_s=1.0))
    assert "for 10% of its time" in less and "The model limits the run" in less
    assert "Checkpoints" not in text(
        StageTimes(images=1000, compute_s=99.0, checkpoint_s=1.0, work_s=1.0)
    )


def test_a_host_that_is_behind_is_told_apart_from_a_slow_model() -> None:
    busy = {
        "images": 1000,
        "wait_s": 0.2,
        "compute_s": 9.0,
        "augment_s": 1.0,
        "work_s": 10.0,
        "micro_batches": 100,
    }

    def told(**more: Any) -> str:
        return text(StageTimes(**busy | more), actors=2, device="cuda")

    for drained in (0, 5, 50):
        found = told(drained=drained)
        assert "The model limits the run" in found and "The host" not in found
    behind = told(drained=93)
    assert (
        "The host limits the run, not the model: the GPU had finished its work before 93% of"
        in behind
    )
    for advice in (
        "loss.item()",
        "plan.micro_batch_size",
        "compile: true in train.model",
        "CUDA graph",
    ):
        assert advice in behind
    assert "augment.preset" not in behind and "The model limits" not in behind
    assert "augment.preset" in told(
        drained=93, augment_s=20.0
    ) and "device augmentation" in told(augment_s=20.0)
    # A device that has nothing to do because nothing comes is idle as well.
    assert "Decoding and transforming" in told(drained=100, wait_s=5.0, work_s=90.0)
    assert "The host" not in told(drained=100, wait_s=5.0, work_s=90.0)


def test_an_idle_gpu_that_is_fed_is_told_apart_from_a_slow_model() -> None:
    fed = StageTimes(
        images=1000,
        wait_s=0.1,
        compute_s=9.9,
        work_s=10.0,
        micro_batches=100,
        drained=10,
    )
    found = text(fed, device="cuda", gpu_utilization=0.4)
    assert "it executes kernels for 40% of it." in found
    assert (
        "Neither the input nor the speed of the GPU limits the run: 1% of its time goes by waiting"
        in found
    )
    assert "compile: true in train.model" in found and "The model limits" not in found
    assert "torch.compile" in text(
        fed, device="cuda", gpu_utilization=0.4, is_run=False
    )
    busy = text(fed, device="cuda", gpu_utilization=0.97)
    assert (
        "The model limits the run: the stream keeps up." in busy
        and "for 97% of it" in busy
    )
    assert "Neither" not in text(fed, device="cuda") and "executes" not in text(
        fed, device="cuda"
    )
    starved = StageTimes(images=1000, wait_s=5.0, compute_s=5.0, work_s=90.0)
    assert "Decoding and transforming" in text(
        starved, device="cuda", gpu_utilization=0.4
    )
    behind = StageTimes(
        images=1000, compute_s=9.9, work_s=10.0, micro_batches=100, drained=90
    )
    assert "had finished its work before 90%" in text(
        behind, device="cuda", gpu_utilization=0.4
    )
    saving = StageTimes(images=1000, compute_s=6.0, checkpoint_s=4.0, work_s=1.0)
    assert "Neither" not in text(saving, device="cuda", gpu_utilization=0.5)


def test_a_starving_run_without_actors_is_told_to_have_some() -> None:
    found = text(
        StageTimes(images=1000, wait_s=5.0, compute_s=10.0, work_s=5.0), actors=0
    )
    assert (
        "The trainer makes its micro-batches itself" in found
        and "pool.engine=ray" in found
    )
    assert "1 CPU actor would be enough, for this trainer; there are none" in found


# 15 s, of which 5 wait; the actors could make it in time.
LATE = {"images": 1000, "wait_s": 5.0, "compute_s": 10.0, "work_s": 9.0}


def test_blocks_that_lie_ready_and_come_late_name_the_network() -> None:
    found = text(StageTimes(**LATE), ready=0.9)
    assert (
        "The network to the trainers limits the run: a finished block lay ready for 90% of the time"
        in found
    )
    assert "transform.decode=device" in found and "max_in_flight" not in found
    assert "max_in_flight" in text(StageTimes(**LATE), ready=0.1)
    slow = StageTimes(images=1000, wait_s=5.0, compute_s=10.0, work_s=90.0)
    assert "Decoding and transforming" in text(slow, ready=0.1)


def test_a_full_object_store_is_named() -> None:
    found = text(StageTimes(**LATE), ready=0.9, spilled_bytes=7 * 10**9)
    assert "The object store is full, and Ray has written 7.0 GB to disk" in found
    assert (
        "--object-store-memory" in found
        and "lower pool.max_in_flight" in found
        and "network" not in found
    )


def test_an_outage_of_storage_is_not_taken_for_a_slow_store() -> None:
    slow = StageTimes(images=1000, wait_s=5.0, compute_s=10.0, work_s=90.0, read_s=80.0)
    assert "convert the store to LMDB" in text(slow)
    found = text(slow + StageTimes(outage_s=60.0))
    assert (
        "Outages of object storage limit the run, with 67% of an actor's time" in found
    )
    assert "LMDB" not in found
    read = StageTimes(
        images=1000, wait_s=10.0, compute_s=5.0, work_s=3.0, read_s=14.0, outage_s=7.0
    )
    assert "with 50% of the reading time" in text(read, readers=1)


def test_a_loop_of_ones_own_gets_no_advice_about_settings_that_it_lacks() -> None:
    cases = [
        StageTimes(images=1000, compute_s=5.0, checkpoint_s=10.0, work_s=1.0),
        StageTimes(
            images=1000, compute_s=9.0, work_s=1.0, micro_batches=100, drained=99
        ),
        StageTimes(images=100, wait_s=5.0, compute_s=10.0, work_s=90.0, read_s=60.0),
        StageTimes(**LATE),
    ]
    for times in cases:
        for ready, spilled_bytes in ((0.0, 0), (0.9, 0), (0.9, 1 << 30)):
            found = text(
                times,
                device="cuda",
                ready=ready,
                spilled_bytes=spilled_bytes,
                is_run=False,
            )
            assert "train." not in found and "storage_path" not in found, found
    assert "train.checkpoint_interval" in text(cases[0]) and "loader.report" in text(
        cases[0], is_run=False
    )
    assert "compile: true" in text(cases[1], device="cuda")
