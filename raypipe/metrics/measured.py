"""What has been measured before, read back and checked: a bench report, and the trainers of a run."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from raypipe.errors import ConfigError

# A run that waits for more of its time does not tell how fast its trainers are.
_MAX_WAIT = 0.95


@dataclass(frozen=True)
class Report:
    """What a cluster is sized by, from `raypipe bench --output FILE`.

    Attributes:
        stream_images_per_s: of the whole pipe.
        actors: transform actors that it had.
        micro_batch: B.
        micro_batch_bytes: pixels of one micro-batch.
        encoded_bytes_per_image: mean size of an image in the store.
        read_cpu_s_per_image, transform_cpu_s_per_image: CPU time of an actor, s.
        read: "actor", or "stage" where readers bring encoded images through the object store.
    """

    stream_images_per_s: float
    actors: int
    micro_batch: int
    micro_batch_bytes: int
    encoded_bytes_per_image: float
    read_cpu_s_per_image: float
    transform_cpu_s_per_image: float
    read: str

    @staticmethod
    def of(content: Any, address: str) -> Report:
        """The report that a file holds.

        Args:
            content: of the file.
            address: of the file, for messages.

        Raises:
            ConfigError: a field is missing, or is no positive number.
        """
        if not isinstance(content, dict):
            raise ConfigError(f"{address} is no bench report: make one by `raypipe bench STORE --output FILE`")
        values: dict[str, Any] = {}
        for field in dataclasses.fields(Report):
            value = content.get(field.name)
            if value is None:
                raise ConfigError(
                    f"{address} has no field {field.name!r}: make it anew by `raypipe bench STORE --output FILE`"
                )
            if field.name == "read":
                if value not in ("actor", "stage"):
                    raise ConfigError(f"{address}: read must be 'actor' or 'stage', got {value!r}")
            elif isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
                raise ConfigError(f"{address}: {field.name} must be a positive number, got {value!r}")
            values[field.name] = value
        return Report(**values)

    @property
    def images_per_s_per_actor(self) -> float:
        """As streamed, with what Ray and the consumer took of the same CPUs."""
        return self.stream_images_per_s / self.actors

    @property
    def pixel_bytes_per_image(self) -> float:
        """Bytes of an image as it travels to the trainers."""
        return self.micro_batch_bytes / self.micro_batch


def trainer_images_per_s(records: Iterable[dict[str, Any]], run: str) -> tuple[float, int]:
    """How fast the trainers of a run are when they never wait for data.

    Args:
        records: of its metrics.jsonl, in order.
        run: its address, for messages.

    Returns:
        Images/s of one trainer, the median over the lines of progress since the last start, the first line left
        out; and the number of trainers.

    Raises:
        ConfigError: the run has made no progress, or it waits for data most of its time.
    """
    try:
        workers, lines = _lines_since_start(records)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"{run}: metrics.jsonl is no record of a run ({type(error).__name__}: {error})"
        ) from error
    steady = lines[1:] or lines
    if not steady:
        raise ConfigError(f"{run} has recorded no training: give --target-images-per-s")
    wait = statistics.median(share for _, share in steady)
    if wait > _MAX_WAIT:
        raise ConfigError(
            f"{run} waits for data {wait:.0%} of its time, which hides how fast its trainers are: give "
            "--target-images-per-s"
        )
    rate = statistics.median(per_s / (1 - share) for per_s, share in steady if share <= _MAX_WAIT)
    return rate / workers, workers


def _lines_since_start(records: Iterable[dict[str, Any]]) -> tuple[int, list[tuple[float, float]]]:
    """Trainers, and (images/s, share of waiting) of each line of progress, of the last start that made any."""
    workers = found_workers = 1
    lines: list[tuple[float, float]] = []
    found: list[tuple[float, float]] = []
    for record in records:
        if record.get("kind") == "start":
            workers, lines = int(record["workers"]), []
        elif record.get("kind") == "train" and record["images_per_s"]:
            lines.append((float(record["images_per_s"]), float(record["wait_fraction"])))
            found_workers, found = workers, lines
    return found_workers, found
