"""Headspace: the speed of a loop whose data cost nothing, which no input can exceed, in the folder of its run.

`raypipe.streaming.resident_stream` gives a loop such data. The loop learns nothing useful, so no run continues
from its checkpoints.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from raypipe.errors import RaypipeError
from raypipe.metrics.observer import Observer
from raypipe.metrics.records import read_records
from raypipe.storage.files import read_whole, write_json
from raypipe.storage.filesystem import join_address, open_filesystem

logger = logging.getLogger(__name__)

HEADSPACE_FILE = "headspace.json"
"""The speed, in the folder of a run."""
HEADSPACE_FOLDER = "headspace"
"""The folder in that of a run for the checkpoints of a loop that is measured, and for its records."""


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
        """Remove it, also one that a killed loop has left. A failure is a warning."""
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
    """Speed of a run's loop with data for nothing, and from the stream, as its folder knows it.

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
        """Note the loop's speed with data for nothing; a failure is a warning."""
        if not self._run_uri:
            return
        address = join_address(self._run_uri, HEADSPACE_FILE)
        found = {"images_per_s": images_per_s, "workers": self._world_size}
        try:
            write_json(address, found)
        except (RaypipeError, pa.ArrowException, OSError) as error:
            logger.warning("%s cannot be written: %s", address, error)

    def read(self) -> float:
        """Return the loop's speed with data for nothing, with as many workers; 0 = nobody has measured it."""
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
        """Return the run's speed from the stream, by its last diagnosis; 0 = there is none."""
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
