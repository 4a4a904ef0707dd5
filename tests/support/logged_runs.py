"""Runs whose ranks record the hashes of their micro-batches, all ranks in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from raypipe.config import AugmentConfig
from raypipe.device.prefetcher import Batch
from raypipe.plan.places import Cursor, MicroBatchId
from raypipe.storage.filesystem import open_filesystem
from raypipe.streaming.inline import inline_batches
from raypipe.streaming.loader import Loader
from raypipe.streaming.rank_stream import HostSource
from raypipe.streaming.record.digest_log import (
    DIGESTS,
    DigestLog,
    EpochRecord,
    read_epoch,
)
from raypipe.streaming.record.opened import settings_record
from raypipe.streaming.shares import Share
from raypipe.streaming.spec import StreamSpec
from raypipe.transform.fields import MicroBatch

CPU = torch.device("cpu")
Changes = Callable[[Iterator[Any]], Iterator[Any]]


def logging_loader(
    spec: StreamSpec,
    run: Path,
    rank: int = 0,
    world_size: int = 1,
    cursor: Cursor | None = None,
    augment: AugmentConfig | None = None,
    changed: Changes | None = None,
) -> Loader:
    """The loader of one of several ranks of an own loop, as `raypipe.loader` makes it.

    Args:
        changed: changes the micro-batches of the stream on their way to the rank; None = nobody does.
    """
    folder = open_filesystem(run.as_uri())

    def open_at(place: MicroBatchId) -> Iterator[MicroBatch]:
        batches = inline_batches(spec, place, rank, world_size)
        return changed(batches) if changed else batches

    return Loader(
        spec,
        HostSource(open_at),
        Share(rank, world_size, rank, world_size),
        CPU,
        cursor=cursor or spec.plan.start(),
        augment=augment,
        folder=folder,
        digest_log=DigestLog(
            folder,
            settings_record(spec, augment, None),
            rank,
            world_size,
            CPU,
        ),
    )


def train_all(loader: Loader) -> list[Batch]:
    """Take all that a loader has left, and close it."""
    with loader:
        return [
            batch
            for epoch in loader.epochs()
            for batches in (epoch.train, epoch.val)
            for batch in batches
        ]


def run_logged(
    spec: StreamSpec, run: Path, world_size: int = 1, **options: Any
) -> None:
    """Train to the end with a number of ranks, one after the other."""
    for rank in range(world_size):
        train_all(logging_loader(spec, run, rank, world_size, **options))


def record_of(run: Path, epoch: int = 0) -> EpochRecord:
    """The record of an epoch."""
    filesystem, path = open_filesystem(run.as_uri())
    return read_epoch((filesystem, f"{path}/{DIGESTS}"), epoch)
