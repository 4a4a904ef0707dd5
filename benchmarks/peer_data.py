"""The same images in the format of each loader, written once, by each format's own writer."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np
import simplejpeg

from raypipe import kernel
from raypipe.stores import open_store
from raypipe.stores.destination import write_atomically

_SHARDS = 16  # of the formats that are read by shards: several for each worker
_SHARD_BYTES = 1 << 26


@dataclass(frozen=True)
class Work:
    """What a loader is to do.

    Attributes:
        folder: with one subfolder or file per format.
        transform: "light", "heavy" or "flip-crop".
        size: side of the images that come out of it, pixels.
        workers: processes, actors or threads.
        batch: samples of a batch.
        epochs: passes.
    """

    folder: Path
    transform: str
    size: int
    workers: int
    batch: int
    epochs: int


@dataclass(frozen=True)
class Sample:
    """A JPEG and its class."""

    image: bytes
    label: int


def read_samples(address: str, num: int) -> list[Sample]:
    """Samples of any store; they begin anew where there are fewer."""
    store = open_store(address)
    rows = store.read(np.arange(min(num, len(store))))
    found = [
        Sample(bytes(image), int(label))
        for image, label in zip(rows["image"], rows["label"], strict=True)
    ]
    return repeated(found, num)


def repeated(samples: list[Sample], num: int) -> list[Sample]:
    """So many samples: the same again and again."""
    return [samples[i % len(samples)] for i in range(num)]


def tiny(samples: list[Sample], side: int) -> list[Sample]:
    """JPEGs of side x side pixels; those that are so are taken as they are, others are made smaller."""
    found = []
    for sample in samples:
        image = sample.image
        if simplejpeg.decode_jpeg_header(image)[:2] != (side, side):
            small = cv2.resize(
                simplejpeg.decode_jpeg(image),
                (side, side),
                interpolation=cv2.INTER_AREA,
            )
            image = simplejpeg.encode_jpeg(small, 95, "RGB", "420")
        found.append(Sample(image, sample.label))
    return found


def short_side(samples: list[Sample], side: int) -> list[Sample]:
    """JPEGs whose short side is no longer than this, quality 90: what people convert to and train from."""
    converted = list[Sample]()
    for sample in samples:
        pixels = simplejpeg.decode_jpeg(sample.image)
        scale = side / min(pixels.shape[:2])
        if scale < 1:
            width, height = (round(n * scale) for n in pixels.shape[1::-1])
            pixels = cv2.resize(pixels, (width, height), interpolation=cv2.INTER_AREA)
        converted.append(
            Sample(simplejpeg.encode_jpeg(pixels, 90, "RGB", "420"), sample.label)
        )
    return converted


def photos(samples: list[Sample], seed: int = 0) -> list[Sample]:
    """JPEGs of 4000 x 3000 pixels, 4:2:0, quality 90, of about 4 MB, as cameras make them.

    Images enlarged, with the noise of a sensor: without it they would compress to a tenth of a photo's size.
    """
    rng = np.random.default_rng(seed)
    noise = rng.normal(0, 8, (3000, 4000, 3)).astype(np.int16)
    made = []
    for sample in samples:
        pixels = simplejpeg.decode_jpeg(sample.image)
        large = cv2.resize(pixels, (4000, 3000), interpolation=cv2.INTER_CUBIC)
        large = np.clip(
            large + np.roll(noise, int(rng.integers(4000)), axis=1), 0, 255
        ).astype(np.uint8)
        made.append(
            Sample(simplejpeg.encode_jpeg(large, 90, "RGB", "420"), sample.label)
        )
    return made


def write_all(
    folder: Path, formats: set[str], make: Callable[[], list[Sample]]
) -> dict[str, str]:
    """Write what is not there yet; returns why a format could not be written, by its name.

    Args:
        formats: that are read, by their names in the folder.
        make: makes the images, if any format of them is missing.
    """
    folder.mkdir(parents=True, exist_ok=True)
    failed = {}
    missing = [
        name for name in _WRITERS if name in formats and not (folder / name).exists()
    ]
    samples = make() if missing else []
    for name in missing:
        path = folder / name
        write = _WRITERS[name]
        try:
            with Path(os.devnull).open("w") as null, contextlib.redirect_stdout(null):
                write(path, samples)
        except BaseException as error:
            shutil.rmtree(path, ignore_errors=True)
            if not isinstance(error, ImportError):
                raise
            failed[name] = str(error)
    return failed


def _write_lmdb(path: Path, samples: list[Sample]) -> None:
    classes = tuple(str(i) for i in range(max(s.label for s in samples) + 1))
    write_atomically(
        str(path), ({"image": s.image, "label": s.label} for s in samples), classes
    )


def _write_seekable(path: Path, samples: list[Sample]) -> None:
    """As `raypipe convert --seekable`, which leaves what cannot be made seekable as it is."""
    seekable = []
    for sample in samples:
        image = sample.image
        with contextlib.suppress(ValueError):
            image = kernel.to_seekable(image)
        seekable.append(Sample(image, sample.label))
    _write_lmdb(path, seekable)


def _write_folder(path: Path, samples: list[Sample]) -> None:
    for number, sample in enumerate(samples):
        folder = path / f"{sample.label:04d}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{number:08d}.jpg").write_bytes(sample.image)


def _write_parquet(path: Path, samples: list[Sample]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path.mkdir(parents=True)
    for shard in range(_SHARDS):
        part = samples[shard::_SHARDS]
        table = pa.table(
            {"image": [s.image for s in part], "label": [s.label for s in part]}
        )
        pq.write_table(
            table, path / f"{shard:04d}.parquet", row_group_size=100, compression="none"
        )


def _write_tar(path: Path, samples: list[Sample]) -> None:
    import webdataset

    path.mkdir(parents=True)
    for shard in range(_SHARDS):
        with webdataset.TarWriter(str(path / f"{shard:04d}.tar")) as writer:
            for number in range(shard, len(samples), _SHARDS):
                sample = samples[number]
                writer.write(
                    {
                        "__key__": f"{number:08d}",
                        "jpg": sample.image,
                        "cls": sample.label,
                    }
                )


def _write_mds(path: Path, samples: list[Sample]) -> None:
    from streaming import MDSWriter

    with MDSWriter(
        out=str(path),
        columns={"image": "bytes", "label": "int"},
        size_limit=_SHARD_BYTES,
    ) as writer:
        for sample in samples:
            writer.write({"image": sample.image, "label": sample.label})


def _write_litdata(path: Path, samples: list[Sample]) -> None:
    import litdata

    litdata.optimize(
        fn=_AsLitData(samples),
        inputs=list(range(len(samples))),
        output_dir=str(path),
        chunk_bytes=_SHARD_BYTES,
        num_workers=1,
        start_method="fork",  # it would have to import this script again
    )


class _AsLitData:
    def __init__(self, samples: list[Sample]) -> None:
        self._samples = samples

    def __call__(self, number: int) -> dict[str, object]:
        return {
            "image": self._samples[number].image,
            "label": self._samples[number].label,
        }


def _write_lance(path: Path, samples: list[Sample]) -> None:
    import lancedb
    import pyarrow as pa

    schema = pa.schema({"image": pa.large_binary(), "label": pa.int64()})
    table = lancedb.connect(str(path)).create_table("train", schema=schema)
    for shard in range(_SHARDS):
        part = samples[shard::_SHARDS]
        table.add(
            pa.table([[s.image for s in part], [s.label for s in part]], schema=schema)
        )


_WRITERS: dict[str, Callable[[Path, list[Sample]], None]] = {
    "train.lmdb": _write_lmdb,
    "seekable.lmdb": _write_seekable,
    "folder": _write_folder,
    "parquet": _write_parquet,
    "tar": _write_tar,
    "mds": _write_mds,
    "litdata": _write_litdata,
    "lance": _write_lance,
}
