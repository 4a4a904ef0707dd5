"""The headspace of a run: its training from the stream, and with data for nothing, in turn."""

from __future__ import annotations

import dataclasses
import statistics
from itertools import pairwise
from typing import Any

from raypipe.commands.short_run import ShortRun, check_has_settings
from raypipe.config import RunConfig
from raypipe.cpus import num_cpus
from raypipe.errors import ConfigError
from raypipe.packages import versions
from raypipe.storage.filesystem import as_uri
from raypipe.streaming.record.headspace import HeadspaceRecord, to_gain

# A run must not end before it was measured.
_MIN_EPOCHS = 10_000
# Records of the training that a rate needs, after those in which the pool still grows.
_MIN_RECORDS = 3
# With these so many are left.
_MIN_RECORDS_OF_RUN = 5


def bench_headspace(
    run: RunConfig, target: str, seconds: float, repeats: int
) -> dict[str, Any]:
    """Train with a configuration, from the stream and with data for nothing, and compare.

    Args:
        target: the folder of a run, which then keeps the result, or the address of a store.
        seconds: how long each training takes, from its first step on; longer until it has some records.
        repeats: how often to do both; their order changes.

    Raises:
        ConfigError: the folder is an own loop's, or the time is too short.
    """
    check_has_settings(
        target,
        "run it with raypipe.loader(spec, run_dir=…, headspace=True), and its diagnosis says the same",
    )
    run = lasting(run)
    rates: dict[bool, list[float]] = {False: [], True: []}
    workers = 1
    for repeat in range(repeats):
        for headspace in (bool(repeat % 2), not repeat % 2):
            train = dataclasses.replace(run.train, headspace=headspace)
            name = "headspace" if headspace else "stream"
            short = ShortRun(
                dataclasses.replace(run, train=train),
                name,
                seconds,
                _MIN_RECORDS_OF_RUN,
            )
            with short.done():
                if not short.records:
                    raise ConfigError("the run was stopped before it was measured")
                workers = short.records[0]["workers"]
                rate = rate_of(short.records, run.plan.global_batch_size)
            rates[headspace].append(rate)
    of_stream = statistics.median(rates[False])
    nothing = statistics.median(rates[True])
    if target and as_uri(target) != as_uri(str(run.store.train)):
        HeadspaceRecord(as_uri(target), workers, measures=True).write(nothing)
    return {
        "headspace_images_per_s": nothing,
        "stream_images_per_s": of_stream,
        "to_gain": 1 - of_stream / nothing,
        "workers": workers,
        "repeats": repeats,
        "cpus": num_cpus(),
        "versions": versions(),
        "text": to_gain(of_stream, nothing),
    }


def lasting(run: RunConfig) -> RunConfig:
    """Return settings of a run that does not end, with the augmentation of the middle of the run throughout. Pure.

    Ramps of its strength would stay at their beginning, where nothing is augmented.
    """
    epochs = max(run.plan.epochs, _MIN_EPOCHS)
    transform = run.transform.strength_at(0.5)
    augment = run.augment.strength_at(0.5)
    return dataclasses.replace(
        run,
        plan=dataclasses.replace(run.plan, epochs=epochs),
        transform=dataclasses.replace(run.transform, strength=transform),
        augment=dataclasses.replace(run.augment, strength=augment),
    )


def rate_of(records: list[dict[str, Any]], global_batch_size: int) -> float:
    """A run's images/s by its records, without the first third, in which its pool grows. Pure.

    Raises:
        ConfigError: there are too few.
    """
    trained = [record for record in records if record["kind"] == "train"]
    kept = trained[len(trained) // 3 :]
    if len(kept) < _MIN_RECORDS:
        raise ConfigError(
            f"the run wrote {len(trained)} records, too few for a rate: raise --seconds, or lower "
            "train.log_interval"
        )
    images = 0
    seconds = 0.0
    for before, after in pairwise(kept):
        done = (after["step"] - before["step"]) * global_batch_size
        images += done
        seconds += done / after["images_per_s"]
    return images / seconds
