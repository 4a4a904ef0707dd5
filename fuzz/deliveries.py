"""What raypipe delivers of files: by each kind of store, in each reading, with and without the extension."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import cv2
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from tars import write_members

from raypipe import kernel, open_stream
from raypipe.config import PlanConfig, PoolConfig, TransformConfig
from raypipe.stores.destination import write_atomically
from raypipe.streaming.maker import MicroBatchMaker
from raypipe.streaming.spec import StreamSpec
from raypipe.transform.decode import jpeg

SIZE = 12
LAYOUTS = ("folder", "tar", "lmdb", "parquet")
CLASS = "c"
NAMES = {
    "folder": "folder",
    "tar": "files.tar",
    "lmdb": "files.lmdb",
    "parquet": "files.parquet",
}

READINGS: dict[str, dict[str, Any]] = {
    "rgb": {"train": "light", "val": "center", "size": SIZE},
    "upright": {"train": "light", "val": "center", "size": SIZE, "apply_exif": True},
    "array": {"decode": "array"},
}
"""Settings of `transform`, by what they read of a file: see `readings`. Arrays go through `cornered`."""


class Refusal(NamedTuple):
    """Of a sample: the name by which it is refused, and why."""

    name: str
    reason: str


Delivered = np.ndarray | Refusal
Outcomes = dict[str, list[Delivered | None]]
"""By split, train with random crops and val with central ones: what came of each sample."""


def write_store(folder: Path, layout: str, files: Sequence[tuple[str, bytes]]) -> str:
    """The address of a new store of files, which are sorted by name."""
    address = folder / NAMES[layout]
    if layout == "folder":
        (address / CLASS).mkdir(parents=True)
        for name, data in files:
            (address / CLASS / name).write_bytes(data)
    elif layout == "tar":
        write_members(address, ((f"{CLASS}/{name}", data) for name, data in files))
    elif layout == "lmdb":
        samples = [{"image": data, "label": 0} for _, data in files]
        write_atomically(str(address), samples, (CLASS,))
    else:  # as Hugging Face has it
        images = pa.array([{"bytes": data, "path": name} for name, data in files])
        pq.write_table(pa.table({"image": images, "label": [0] * len(files)}), address)
    return str(address)


@contextlib.contextmanager
def extension(is_used: bool) -> Iterator[None]:
    """Within, the compiled extension is as it is, or as if it were not built."""
    with contextlib.ExitStack() as stack:
        if not is_used:
            for module in (kernel, kernel.extension, jpeg):
                stack.enter_context(
                    mock.patch.object(module, "why_no_kernel", lambda: "not built")
                )
        yield


def opened(
    address: str, reading: str, num: int, *, tolerant: bool = True
) -> StreamSpec:
    """The stream of a store of `num` samples in a reading.

    Args:
        tolerant: bad samples are replaced, or left out; otherwise the first one's error is raised.
    """
    transform = TransformConfig(**READINGS[reading], max_bad_fraction=float(tolerant))
    own = cornered if reading == "array" else ""
    return open_stream(
        address,
        address,
        plan=PlanConfig(epochs=1, micro_batch_size=num),
        transform=transform,
        pool=PoolConfig(engine="inline"),
        train_transform=own,
        val_transform=own,
        target_column="",
    )


def delivered(spec: StreamSpec, *, with_extension: bool = True) -> Outcomes:
    """What comes of each sample of a stream."""
    with extension(with_extension):
        return _delivered(spec, spec.plan.config.micro_batch_size)


def _delivered(spec: StreamSpec, num: int) -> Outcomes:
    maker = MicroBatchMaker(spec)
    found: Outcomes = {"train": [None] * num, "val": [None] * num}
    for at in spec.plan.micro_batches(spec.plan.cursor_at(0)):
        planned = spec.plan.draw_block([at]).indices[0]
        batch, bad = maker.make(at)
        of_split = found[at.split]
        for row in np.flatnonzero(
            (planned == batch.index) & (batch.weight > 0)
        ).tolist():
            of_split[planned[row]] = batch["image"][row]
        for sample in bad:
            of_split[sample.index] = Refusal(sample.name, sample.error)
    return found


def cornered(image: np.ndarray) -> np.ndarray:
    """The upper left corner of an array of any size, dtype and channels, filled up with zeros."""
    corner = np.zeros((2 * SIZE, 2 * SIZE, image.shape[2]), image.dtype)
    part = image[: 2 * SIZE, : 2 * SIZE]
    corner[: part.shape[0], : part.shape[1]] = part
    return corner


def as_png(pixels: np.ndarray) -> bytes:
    """Pixels (H, W, 3) in a PNG that has nothing else."""
    done, data = cv2.imencode(
        ".png", pixels[:, :, ::-1], [cv2.IMWRITE_PNG_COMPRESSION, 0]
    )
    assert done
    return data.tobytes()


def as_npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=False)
    return file.getvalue()
