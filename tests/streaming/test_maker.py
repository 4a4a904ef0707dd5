from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from PIL import Image

from raypipe.config import PlanConfig, TransformConfig
from raypipe.stores.base import Columns
from raypipe.stores.memory import MemoryStore
from raypipe.streaming.digest import batch_digest
from raypipe.streaming.maker import MicroBatchMaker, Outcome
from raypipe.streaming.opening import open_stream
from raypipe.transform.at_once import ProgramsAtOnce
from raypipe.transform.batch import FIRST_ATTEMPT, Attempt

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


def batches(
    store: Noted, micro_batch: int, attempt: Attempt = FIRST_ATTEMPT
) -> list[Outcome]:
    plan = PlanConfig(epochs=1, micro_batch_size=micro_batch)
    config = TransformConfig(train="small", size=16, val="center")
    maker = MicroBatchMaker(open_stream(store, store, plan=plan, transform=config))
    return [
        maker.make(at, attempt=attempt)
        for at in maker.plan.micro_batches(maker.plan.start())
    ]


def png_of(number: int) -> bytes:
    file = io.BytesIO()
    Image.open(io.BytesIO(picture(number))).save(file, "PNG")
    return file.getvalue()


def after_deaths_of(bad: int, touch: Any = None) -> Attempt:
    return Attempt({bad: "its process died twice while at it"}, touch)


@pytest.mark.parametrize("micro_batch", [1, 4])
def test_a_careful_attempt_announces_each_sample_and_reads_no_bad_one(
    micro_batch: int,
) -> None:
    damaged = noted()
    damaged._images[0] = b"damaged"
    expected = batches(damaged, micro_batch)
    store = noted()
    # the first of a validation, and of those that tell the size of padding
    store.deadly = 0
    attempt = after_deaths_of(0, lambda index: store.notes.append(("announced", index)))
    for made, same in zip(batches(store, micro_batch, attempt), expected, strict=True):
        assert batch_digest(made.batch) == batch_digest(same.batch)
    reads = [number for number, (what, _) in enumerate(store.notes) if what == "read"]
    assert len(reads) >= 30 and all(
        store.notes[n - 1] == ("announced", store.notes[n][1]) for n in reads
    )


def test_a_known_bad_sample_is_not_read_with_its_micro_batch() -> None:
    store = noted()
    store.deadly = 5
    assert sum(len(made.bad) for made in batches(store, 4, after_deaths_of(5))) == 2


@pytest.mark.parametrize(
    "knowledge", [FIRST_ATTEMPT, after_deaths_of(7)], ids=["first", "after deaths"]
)
@pytest.mark.parametrize("preset", ["light", "center"])
def test_micro_batches_made_in_one_call_are_those_made_alone(
    preset: str, knowledge: Attempt, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bad samples of any of them, PNGs that the kernel leaves to others, and a last call of fewer included."""
    images = [picture(number) for number in range(40)]
    for bad in (3, 17, 31):
        images[bad] = images[bad][:200]
    images[8] = png_of(8)
    store = MemoryStore(images, [number % 5 for number in range(40)], CLASSES)
    transform = TransformConfig(
        train=preset, size=16, val="center", max_bad_fraction=0.5
    )
    spec = open_stream(
        store, store, plan=PlanConfig(epochs=1, micro_batch_size=4), transform=transform
    )
    calls, make = list[int](), ProgramsAtOnce.make
    monkeypatch.setattr(
        ProgramsAtOnce,
        "make",
        lambda *args: (calls.append(len(args[1])), make(*args))[1],
    )
    maker = MicroBatchMaker(spec)
    for split in ("train", "val"):
        places = [
            at for at in spec.plan.micro_batches(spec.plan.start()) if at.split == split
        ]
        alone = [maker.make(at, attempt=knowledge) for at in places]
        assert set(calls) == {4} and sum(len(outcome.bad) for outcome in alone) >= 3
        calls.clear()
        monkeypatch.setattr(
            "raypipe.streaming.maker._AT_ONCE_BYTES", 3 * 4 * 16 * 16 * 3 + 200
        )
        together, _ = maker.block(places, attempt=lambda _: knowledge)
        assert calls == ([12, 12, 12, 4] if knowledge is FIRST_ATTEMPT else [4] * 10)
        calls.clear()
        for one, same in zip(alone, together, strict=True):
            assert (
                batch_digest(one.batch) == batch_digest(same.batch)
                and one.bad == same.bad
            )
