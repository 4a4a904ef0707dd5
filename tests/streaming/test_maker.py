from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from image_files import saved
from PIL import Image

from raypipe.config import PlanConfig, TransformConfig
from raypipe.plan.places import MicroBatchId
from raypipe.stores.base import Columns
from raypipe.stores.memory import MemoryStore
from raypipe.streaming import maker as module
from raypipe.streaming.bad_samples import BadSample
from raypipe.streaming.hashes import batch_hash
from raypipe.streaming.maker import NONE_EXCLUDED, MicroBatchMaker
from raypipe.streaming.opening import open_stream
from raypipe.transform.fields import MicroBatch

from pictures import CLASSES, picture  # isort: skip


class Noted(MemoryStore):
    """A store that notes what is read of it, and where one sample must not be."""

    deadly = -1

    def read(
        self, indices: np.ndarray, columns: tuple[str, ...] = ("image", "label")
    ) -> Columns:
        assert self.deadly not in indices, "it is dead now"
        self.notes += [("read", index) for index in indices.tolist()]
        return super().read(indices, columns)


def noted() -> Noted:
    store = Noted(
        [picture(number) for number in range(16)],
        [number % 5 for number in range(16)],
        CLASSES,
    )
    store.notes = []
    return store


def maker_of(store: Noted, micro_batch: int, **more: Any) -> MicroBatchMaker:
    plan = PlanConfig(epochs=1, micro_batch_size=micro_batch)
    config = TransformConfig(train="small", size=16, val="center")
    spec = open_stream(store, store, plan=plan, transform=config)
    return MicroBatchMaker(spec, **more)


def batches(
    maker: MicroBatchMaker, **how: Any
) -> list[tuple[MicroBatch, list[BadSample]]]:
    """Each micro-batch as a block of its own, and its bad samples."""
    blocks = (
        maker.block([at], **how) for at in maker.plan.micro_batches(maker.plan.start())
    )
    return [(batch, bad) for (batch,), bad, _ in blocks]


DEAD = "its process died twice while at it"


@pytest.mark.parametrize("micro_batch", [1, 4])
def test_one_by_one_each_sample_is_read_alone_and_no_excluded_one(
    micro_batch: int,
) -> None:
    damaged = noted()
    damaged._images[0] = b"damaged"
    expected = batches(maker_of(damaged, micro_batch))
    store = noted()
    # the first of a validation, and of those that tell the size of padding
    store.deadly = 0

    def read(at: MicroBatchId, indices: np.ndarray) -> Columns:
        store.notes += [("asked for", index) for index in indices[indices >= 0]]
        return maker.read_store(at, indices)

    maker = maker_of(store, micro_batch, read=read)
    found = batches(maker, excluded={0: DEAD}, one_by_one=True)
    for (made, _), (same, _) in zip(found, expected, strict=True):
        assert batch_hash(made) == batch_hash(same)
    reads = [number for number, (what, _) in enumerate(store.notes) if what == "read"]
    assert len(reads) >= 30 and all(
        store.notes[n - 1] == ("asked for", store.notes[n][1]) for n in reads
    )


def test_an_excluded_sample_is_not_read_with_its_micro_batch() -> None:
    store = noted()
    store.deadly = 5
    found = batches(maker_of(store, 4), excluded={5: DEAD})
    assert sum(len(bad) for _, bad in found) == 2


@pytest.mark.parametrize("excluded", [NONE_EXCLUDED, {7: DEAD}], ids=str)
def test_micro_batches_made_in_one_call_are_those_made_alone(
    excluded: Mapping[int, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bad samples of any of them, and PNGs that the kernel leaves to others, included."""
    images = [picture(number) for number in range(40)]
    for bad in (3, 17, 31):
        images[bad] = images[bad][:200]
    images[8] = saved(Image.open(io.BytesIO(picture(8))), "PNG")
    store = MemoryStore(images, [number % 5 for number in range(40)], CLASSES)
    spec = open_stream(
        store,
        plan=PlanConfig(epochs=1, micro_batch_size=4),
        transform=TransformConfig(train="light", size=16, max_bad_fraction=0.5),
    )
    monkeypatch.setattr(module, "_AT_ONCE_BYTES", 3 * 4 * 16 * 16 * 3 + 200)
    maker = MicroBatchMaker(spec)
    places = list(spec.plan.micro_batches(spec.plan.start()))
    alone = [maker.make(place, excluded=excluded) for place in places]
    together, bad_of_all, arrays = maker.block(places, excluded=excluded)
    assert bad_of_all == [sample for _, bad in alone for sample in bad] != []
    for number, (batch, _) in enumerate(alone):
        assert batch_hash(batch) == batch_hash(together[number])
        assert np.array_equal(arrays["image"][number], batch["image"])
