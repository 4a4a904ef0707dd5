"""A share of each micro-batch for the device's decoder: which rows, by which rule, with which bits."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from conftest import CLASSES, picture, samples
from PIL import Image
from raypipe.transform.device_share import num_for_device
from without_ray import digests, host_batches

from raypipe.config import PlanConfig, PoolConfig, TransformConfig
from raypipe.errors import ConfigError
from raypipe.plan.places import MicroBatchId
from raypipe.stores.base import MemoryStore
from raypipe.stores.destination import write_atomically
from raypipe.streaming.digest import batch_digest
from raypipe.streaming.inline import inline_batches
from raypipe.streaming.maker import MicroBatchMaker, try_samples
from raypipe.streaming.row import READ_SCHEMA, batches_of, made_row, reads_of, source_row
from raypipe.streaming.spec import StreamSpec
from raypipe.transform.batch import HostBatch, read_samples
from raypipe.transform.decode import decode
from raypipe.transform.encoded import is_made

B, SIZE = 6, 16
PLAN = PlanConfig(epochs=1, micro_batch_size=B, global_batch_size=2 * B)


def png(seed: int) -> bytes:
    return cv2.imencode(".png", decode(picture(seed)))[1].tobytes()


def pillow(seed: int, mode: str, orientation: int = 0) -> bytes:
    options: dict[str, Any] = {}
    if orientation:
        options["exif"] = tags = Image.Exif()
        tags[0x0112] = orientation
    file = io.BytesIO()
    Image.fromarray(decode(picture(seed))).convert(mode).save(file, "JPEG", **options)
    return file.getvalue()


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """48 samples: 7's header is damaged, 13 is a PNG, 17 is CMYK, 19 grey, and 23 lies on its side."""
    made: list[dict[str, Any]] = samples(48)
    made[7]["image"] = b"no image"
    made[13]["image"], made[17]["image"], made[19]["image"] = png(13), pillow(17, "CMYK"), pillow(19, "L")
    made[23]["image"] = pillow(23, "RGB", orientation=6)
    folder = tmp_path_factory.mktemp("share")
    write_atomically(str(folder / "train.lmdb"), made, CLASSES)
    return folder / "train.lmdb"


def spec(store: Path, share: float, decode: str = "gpu", **options: Any) -> StreamSpec:
    settings = {"train": "light", "val": "center", "size": SIZE, "decode": decode, **options}
    transform = TransformConfig(gpu_share=share, **settings)
    return StreamSpec(store, store, plan=PLAN, transform=transform, pool=PoolConfig(engine="inline"))


def taken(batch: HostBatch, row: int) -> tuple[bytes, list[int], bool]:
    """What a row is for the device."""
    assert batch.encoded is not None
    start, end = batch.encoded["offsets"][row : row + 2]
    return (
        batch.encoded["data"][start:end].tobytes(),
        batch.encoded["crop"][row].tolist(),
        batch.encoded["flip"][row],
    )


@pytest.mark.parametrize(
    ("share", "num_samples", "num"),
    [(0.5, 6, 3), (0.25, 256, 64), (0.01, 6, 1), (0.99, 6, 5), (0.25, 6, 2), (0.75, 2, 1), (1e-9, 2, 1)],
)
def test_the_share_is_rounded_and_neither_side_goes_without(share: float, num_samples: int, num: int) -> None:
    assert num_for_device(share, num_samples) == num


@pytest.mark.parametrize("share", [0.2, 0.5, 0.9])
def test_each_row_has_the_bits_that_it_has_with_all_or_none_on_the_device(store: Path, share: float) -> None:
    num, kinds = num_for_device(share, B), set()
    streams = (host_batches(spec(store, each)) for each in (share, 0.0, 1.0))
    for batch, pixels, encoded in zip(*streams, strict=True):
        assert batch.encoded is not None and encoded.encoded is not None and pixels.encoded is None
        assert np.array_equal(batch.index, pixels.index) and np.array_equal(batch.label, pixels.label)
        assert np.array_equal(batch.weight, pixels.weight)
        assert batch.image.shape == (B - num, SIZE, SIZE, 3) and np.array_equal(batch.image, pixels.image[num:])
        made = is_made(batch.encoded["crop"], batch.encoded["ok"])
        assert batch.encoded["ok"].tolist() == (batch.weight[:num] > 0).tolist()
        for row in np.flatnonzero(batch.encoded["ok"]):
            index = batch.index[row]
            kinds.add(index)
            assert made[row] == (index in (13, 17))
            if made[row]:
                assert taken(batch, row) == (pixels.image[row].tobytes(), [0, 0, 0, 0], False)
            else:
                assert taken(batch, row) == taken(encoded, row)
    assert share < 0.9 or {13, 17, 19, 23} <= kinds


def test_with_exif_what_has_to_be_turned_is_made_by_the_cpu(store: Path) -> None:
    for batch, pixels in zip(
        host_batches(spec(store, 0.99, apply_exif=True)),
        host_batches(spec(store, 1.0, "cpu", apply_exif=True)),
        strict=True,
    ):
        assert batch.encoded is not None
        made = is_made(batch.encoded["crop"], batch.encoded["ok"])
        assert set(batch.index[:-1][made]) <= {13, 17, 23}
        for row in np.flatnonzero(batch.index[:-1] == 23):
            assert taken(batch, row)[0] == pixels.image[row].tobytes()


def test_none_on_the_device_is_the_stream_that_cpus_decode(store: Path) -> None:
    assert digests(spec(store, 0.0)) == digests(spec(store, 1.0, "cpu"))
    assert len({tuple(digests(spec(store, share))) for share in (0.0, 0.3, 0.5, 1.0)}) == 4


def through(spec: StreamSpec, block: int) -> list[bytes]:
    """The digests of micro-batches that came through rows of blocks."""
    maker, places = MicroBatchMaker(*spec.recipe), list(spec.plan.micro_batches(spec.plan.start()))
    found = []
    for split in ("train", "val"):
        own = [at for at in places if at.split == split]
        for first in range(0, len(own), block):
            part = own[first : first + block]
            room = maker.room(part)
            row = made_row([maker.make(at, room=room) for at in part], room)
            found += [(batch.at, batch_digest(batch)) for batch in batches_of(row)]
    order = {at: number for number, at in enumerate(places)}
    return [digest for _, digest in sorted(found, key=lambda each: order[each[0]])]


@pytest.mark.parametrize("sizes", [SIZE, {0: 8, 1: SIZE}])
def test_blocks_and_threads_and_starts_change_no_bit(store: Path, sizes: Any) -> None:
    mixed = spec(store, 0.5, size=sizes)
    wanted = digests(mixed)
    assert through(mixed, 1) == through(mixed, 3) == wanted
    threaded = mixed.replace(pool=PoolConfig(engine="inline", threads=3))
    assert [batch_digest(batch) for batch in inline_batches(threaded, mixed.plan.start())] == wanted
    assert digests(mixed, 2) == wanted[2 * 2 :]


def test_the_pixels_of_a_block_are_not_copied(store: Path) -> None:
    mixed = spec(store, 0.5)
    maker = MicroBatchMaker(*mixed.recipe)
    block = [MicroBatchId("train", 0, step, 0) for step in range(2)]
    room = maker.room(block)
    row = made_row([maker.make(at, room=room) for at in block], room)
    assert list(room.arrays) == ["image"] and np.shares_memory(row["image"], room.arrays["image"])
    assert all(np.shares_memory(batch.image, room.arrays["image"]) for batch in batches_of(row))


def test_padding_alone_is_black_and_for_nobody(store: Path) -> None:
    val = StreamSpec(store, MemoryStore([picture(0)], [0]), plan=PLAN, transform=spec(store, 0.5).transform)
    batches = [batch for batch in host_batches(val) if batch.at.split == "val"]
    assert [int(batch.weight.sum()) for batch in batches] == [1, 0]
    for batch in batches:
        assert batch.encoded is not None and not batch.image.any()
        assert batch.encoded["ok"].tolist() == (batch.weight[:3] > 0).tolist()


def test_a_first_look_sees_pixels(store: Path) -> None:
    mixed = spec(store, 0.5)
    found = try_samples(mixed.plan, mixed.stores, mixed.transforms, mixed.transform, len(CLASSES))
    assert found == {"train": (SIZE, SIZE), "val": (SIZE, SIZE)}


REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "without a device": (
        lambda store: TransformConfig(gpu_share=0.5),
        "gpu_share must be 1.0 with .*decode='cpu'",
    ),
    "more than all": (
        lambda store: TransformConfig(decode="gpu", gpu_share=1.5),
        "must be a number from 0 to 1",
    ),
    "of one": (
        lambda store: StreamSpec(
            store,
            plan=PlanConfig(micro_batch_size=1, global_batch_size=1),
            transform=TransformConfig(decode="gpu", gpu_share=0.5),
        ),
        "no share",
    ),
    "of what needs pixels": (lambda store: spec(store, 0.5, train="heavy"), "needs pixels"),
    "of a cache": (
        lambda store: StreamSpec(store, transform=spec(store, 0.5).transform, pool=PoolConfig(cache="disk")),
        "decode='gpu'",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_shares_that_cannot_be_are_refused(what: str, store: Path) -> None:
    make, message = REFUSED[what]
    with pytest.raises(ConfigError, match=message):
        make(store)


def test_what_a_reader_has_read_becomes_the_same(store: Path) -> None:
    mixed = spec(store, 0.5)
    maker, plan = MicroBatchMaker(*mixed.recipe), mixed.plan
    block = [MicroBatchId("train", 0, step, 0) for step in range(3)]
    reads = [read_samples(mixed.stores["train"], plan.indices(at)) for at in block]
    found = reads_of(source_row(block, reads, READ_SCHEMA))
    assert found is not None
    for at, read in zip(block, found, strict=True):
        assert batch_digest(maker.make(at, read).host_batch()) == batch_digest(maker.make(at).host_batch())
