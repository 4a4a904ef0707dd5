"""Headspace: the speed of a loop whose data cost nothing, which no input can exceed.

The loop gets micro-batches that are on its device already, again and again, at the places of the plan. All else is
as it is: their shapes, fields and labels, the augmentation and its seeds, steps, epochs, validations, checkpoints.
What is learned is of no use, so no run continues from it.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pyarrow as pa
import torch

from raypipe.device.prefetcher import Batch, on_device
from raypipe.errors import RaypipeError
from raypipe.metrics.observer import Observer
from raypipe.metrics.records import read_records
from raypipe.plan.places import PADDING, Cursor, MicroBatchId, Split
from raypipe.plan.schedule import Plan, Segment
from raypipe.storage.files import read_whole, write_json
from raypipe.storage.filesystem import join_address, open_filesystem
from raypipe.streaming.decoding import Decoding
from raypipe.streaming.head_start import micro_batches_of_rank
from raypipe.streaming.lifetime import HostStream
from raypipe.streaming.maker import MicroBatchMaker
from raypipe.streaming.spec import StreamSpec
from raypipe.transform.sizes import Size, size_in

logger = logging.getLogger(__name__)

HEADSPACE_FILE = "headspace.json"
HEADSPACE_FOLDER = "headspace"
"""In the folder of a run: what its loop does with data for nothing, and its checkpoints meanwhile."""
NUM_KEPT = 4
"""Micro-batches of each size that take turns: together they exceed a CPU's caches, as those of a stream do."""
# Micro-batches of the schedule among which each bucket is looked for before the loop begins.
_NUM_LOOKED_AT = 256


class ResidentStream:
    """Stream of one rank, of micro-batches that stay on its device. `open` makes them.

    Args:
        spec: the stream.
        rank, world_size: number of this rank, and W.
        device: where they stay.
    """

    def __init__(
        self, spec: StreamSpec, rank: int, world_size: int, device: torch.device
    ) -> None:
        self._spec = spec
        self._rank = rank
        self._world_size = world_size
        self._device = device
        self._kept: dict[tuple[Split, Size], list[Batch]] = {}
        self._maker: MicroBatchMaker | None = None
        self._num_handed_out = 0

    def open(self, start: Cursor, only: Segment | None = None) -> HostStream:
        """Open the stream at a place; `only` is the one segment that it brings, None = all from there on."""
        plan = self._spec.plan.only(only) if only else self._spec.plan
        return HostStream(iter(()), resident=self._batches(plan, start))

    def _batches(self, plan: Plan, start: Cursor) -> Iterator[Batch]:
        spec = replace(self._spec, plan=plan)
        places = micro_batches_of_rank(spec, start, self._rank, self._world_size)
        for position in places:
            key = self._key(position)
            if key not in self._kept:
                self._keep(plan, start, position)
            yield self._at(position, self._kept[key])

    def _key(self, position: MicroBatchId) -> tuple[Split, Size]:
        """What micro-batches have in common that can stand for each other."""
        plan = self._spec.plan
        bucket = plan.bucket_of(position)
        size = size_in(self._spec.transform, position.split, position.epoch, bucket)
        return position.split, size

    def _keep(self, plan: Plan, start: Cursor, first: MicroBatchId) -> None:
        """Make micro-batches of a place's size, and, before the first, of all sizes that come soon."""
        spec = replace(self._spec, plan=plan)
        wanted = {self._key(first): [first]}
        places = micro_batches_of_rank(spec, start, self._rank, self._world_size)
        for _, position in zip(range(_NUM_LOOKED_AT), places, strict=False):
            key = self._key(position)
            if key in self._kept or position.split != first.split:
                continue
            found = wanted.setdefault(key, [])
            if position not in found and len(found) < NUM_KEPT:
                found.append(position)
        for key, found in wanted.items():
            self._kept[key] = self._made(found)

    def _made(self, places: list[MicroBatchId]) -> list[Batch]:
        """Make micro-batches as a pool does, and bring them onto the device."""
        if self._maker is None:
            self._maker = MicroBatchMaker(self._spec)
        maker = self._maker
        decode = None
        if self._spec.transform.decode == "device":
            decode = Decoding(self._spec, self._device)
        return list(
            on_device(
                (maker.batch(position) for position in places),
                self._device,
                self._spec.plan.micro_batch_seed,
                ring=False,
                decode=decode,
            )
        )

    def _at(self, position: MicroBatchId, kept: list[Batch]) -> Batch:
        """One of the batches in turn, at another place."""
        batch = kept[self._num_handed_out % len(kept)]
        self._num_handed_out += 1
        fields = {name: _own(value) for name, value in batch.fields.items()}
        weight = batch.weight
        index = batch.index
        if position.split == "val":
            # each sample is counted once, and the batch may be one with padding
            index = self._spec.plan.indices(position)
            counts = torch.from_numpy(index != PADDING)
            weight = counts.to(self._device, weight.dtype)
        return replace(
            batch,
            position=position,
            seed=self._spec.plan.micro_batch_seed(position),
            fields=fields,
            weight=weight,
            index=index,
            num_bad=0,
            read_s=0.0,
            work_s=0.0,
            outage_s=0.0,
        )


def _own(value: Any) -> Any:
    """A copy of floats, which a loop may normalize in place: after some rounds they would not be finite."""
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return value.clone()
    return value


class MeasuringFolder(Observer):
    """Folder for what a loop writes while its headspace is measured; it is removed at the end.

    Args:
        run_uri: the folder of the run.

    Attributes:
        uri: its address.
    """

    def __init__(self, run_uri: str) -> None:
        self.uri = join_address(run_uri, HEADSPACE_FOLDER)

    def clear(self) -> None:
        """Remove it, with what a loop that was killed has left. What cannot be removed is a warning."""
        filesystem, path = open_filesystem(self.uri)
        try:
            filesystem.delete_dir(path)
        except FileNotFoundError:
            pass
        except (RaypipeError, pa.ArrowException, OSError) as error:
            logger.warning("%s cannot be removed: %s", self.uri, error)

    def closed(self) -> None:
        self.clear()


class HeadspaceRecord:
    """What a run's loop does with data for nothing, and from the stream, as its folder knows it.

    Args:
        run_uri: the run's folder; empty = it has none.
        world_size: W.
        measures: whether the loop has data for nothing.
    """

    def __init__(self, run_uri: str, world_size: int, measures: bool) -> None:
        self._run_uri = run_uri
        self._world_size = world_size
        self._measures = measures

    def told(self, images_per_s: float) -> str:
        """Note the speed of the loop, all ranks together, if that is its headspace; say what is to gain.

        Empty if nobody has measured it.
        """
        if self._measures:
            self.write(images_per_s)
            return to_gain(self._of_stream(), images_per_s)
        nothing = self.read()
        return to_gain(images_per_s, nothing) if nothing else ""

    def write(self, images_per_s: float) -> None:
        """Note what the loop does with data for nothing; a failure is a warning."""
        if not self._run_uri:
            return
        address = join_address(self._run_uri, HEADSPACE_FILE)
        found = {"images_per_s": images_per_s, "workers": self._world_size}
        try:
            write_json(address, found)
        except (RaypipeError, pa.ArrowException, OSError) as error:
            logger.warning("%s cannot be written: %s", address, error)

    def read(self) -> float:
        """Return what the loop does with data for nothing, with as many workers; 0 = nobody has measured it."""
        if not self._run_uri:
            return 0.0
        try:
            content = read_whole(join_address(self._run_uri, HEADSPACE_FILE))
            found = json.loads(content or b"{}")
            if found.get("workers") == self._world_size:
                return float(found["images_per_s"])
        except Exception:  # a diagnosis says what it can
            logger.debug("no headspace of %s is known", self._run_uri, exc_info=True)
        return 0.0

    def _of_stream(self) -> float:
        """Return what the run has done from the stream, as its last diagnosis has it; 0 = there is none."""
        if not self._run_uri:
            return 0.0
        try:
            workers = 0
            images_per_s = 0.0
            for record in read_records(self._run_uri):
                if record["kind"] == "start":
                    workers = record["workers"]
                elif record["kind"] == "diagnosis" and workers == self._world_size:
                    images_per_s = _speed_of(record) * workers
            return images_per_s
        except Exception:
            logger.debug("no speed of %s is known", self._run_uri, exc_info=True)
        return 0.0


def _speed_of(diagnosis: Mapping[str, Any]) -> float:
    """A rank's images/s in the record of a diagnosis."""
    stages = ("wait_s", "augment_s", "compute_s", "checkpoint_s")
    return diagnosis["images"] / sum(diagnosis[stage] for stage in stages)


def to_gain(of_stream: float, nothing: float) -> str:
    """Say what a loop would gain by an input that costs nothing, by its images/s from the stream (0 = unknown)."""
    if not of_stream:
        return f"With data for nothing: {nothing:,.0f} images/s."
    gain = 1 - of_stream / nothing
    if gain > 0:
        gained = f"{gain:.1%} to gain"
    else:
        gained = "nothing to gain"
    return (
        f"From the stream {of_stream:,.0f} images/s, with data for nothing {nothing:,.0f}: "
        f"{gained}."
    )
