"""Bad samples are recorded by their names, a run goes on where they cannot be, and it stops at too many."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from full_disk import fill
from torchvision.transforms import v2
from without_ray import digests, host_batches

from raypipe.config import PlanConfig, TransformConfig
from raypipe.errors import BadSamplesError, SampleError, TransformError
from raypipe.plan.places import MicroBatchId
from raypipe.stores.memory import MemoryStore
from raypipe.streaming import maker
from raypipe.streaming.bad_samples import BadSample, BadSampleBudget, record_bad
from raypipe.streaming.inline import inline_batches
from raypipe.streaming.opening import open_stream
from raypipe.streaming.spec import StreamSpec
from raypipe.transform.fields import MicroBatch

from pictures import picture  # isort: skip


def place(step: int) -> MicroBatchId:
    return MicroBatchId("train", 0, step, 0)


def bad_in(step: int) -> BadSample:
    name = "a.lmdb, key 7"
    return BadSample(place(step), "a.lmdb", 7, name, 3, "no value", "store")


def records_in(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for file in folder.iterdir() for line in file.open()]


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        record.getMessage()
        for record in caplog.records
        if record.name == "raypipe.streaming.bad_samples"
        and not record.getMessage().startswith("bad sample: ")
    ]


def test_a_full_disk_is_warned_of_once_and_leaves_no_torn_record(
    full_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = full_disk / "quarantine"
    record_bad(folder.as_uri(), place(0), [bad_in(0)])
    fill(full_disk)
    for step in (1, 2, 3):
        record_bad(folder.as_uri(), place(step), [bad_in(step)] * 50)
    assert [path.name for path in folder.iterdir()] == [f"{place(0)}.jsonl"]
    (warned,) = warnings(caplog)
    assert str(folder) in warned and "No space left" in warned
    assert len(caplog.messages) == 1 + 150 + 1  # each is in the log
    assert json.loads((folder / f"{place(0)}.jsonl").read_text()) == {
        **vars(place(0)),
        "store": "a.lmdb",
        "index": 7,
        "name": "a.lmdb, key 7",
        "substitute": 3,
        "error": "no value",
        "fault": "store",
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Class folders of 16 images, of which one is damaged and has a name that would write into a terminal."""
    root = tmp_path / "images" / "a"
    root.mkdir(parents=True)
    for number in range(15):
        (root / f"{number:02d}.jpg").write_bytes(picture(number))
    (root / "07\x1b[31m.jpg").write_bytes(b"no image")
    return root.parent


def spec_of(folder: Path, records: Path, **config: Any) -> StreamSpec:
    return open_stream(
        str(folder),
        str(folder),
        plan=PlanConfig(epochs=1, micro_batch_size=4),
        transform=TransformConfig(train="small", size=16, **config),
        quarantine=records.as_uri(),
    )


def test_bad_samples_are_named_without_control_characters(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"{folder}/a/07\\x1b[31m.jpg"
    digests(spec_of(folder, tmp_path / "quarantine"))
    records = records_in(tmp_path / "quarantine")
    assert sorted(record["split"] for record in records) == ["train", "val"]
    assert {(record["index"], record["name"]) for record in records} == {(7, name)}
    monkeypatch.setattr(maker, "BadSampleBudget", partial(BadSampleBudget, grace=0))
    for error, config in (
        (SampleError, {"max_bad_fraction": 0}),
        (BadSamplesError, {}),
    ):
        with pytest.raises(error) as failure:
            digests(spec_of(folder, tmp_path / "quarantine", **config))
        assert f"{folder} sample 7 ({name}): not an image" in str(failure.value)


# The budget

LAST = BadSample(place(0), "x.lmdb", 77, "cats/7.jpg", None, "no value", "store")


def test_budget_lets_a_few_pass_and_stops_a_rate() -> None:
    budget = BadSampleBudget(max_fraction=0.01, grace=10)
    budget.spend([LAST] * 10, 10)  # within grace
    with pytest.raises(BadSamplesError) as caught:
        budget.spend([LAST], 100)
    assert str(caught.value) == (
        "11 of 110 samples are bad, more than transform.max_bad_fraction=0.01 allows (the first 10 are free);"
        " the last one is x.lmdb sample 77 (cats/7.jpg): no value. Raise transform.max_bad_fraction,"
        " or repair the store"
    )


def test_faulty_user_code_is_named_by_line_in_error_record_and_log(
    folder: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def picky(image: np.ndarray) -> np.ndarray:
        if image.mean() > 0:
            raise LookupError("too bright")
        return image[:16, :16]

    place = r"test_bad_samples\.py:\d+ in picky: LookupError: too bright"
    given: Any = {
        "train_transform": picky,
        "val_transform": None,
        "plan": PlanConfig(micro_batch_size=4),
    }
    for fraction, advice in (
        (0, "pool.engine=inline"),
        (1, "fail on other samples as well, so the code .*pool.engine=inline"),
    ):
        spec = open_stream(
            str(folder),
            transform=TransformConfig(size=16, max_bad_fraction=fraction),
            **given,
        )
        with pytest.raises(
            TransformError,
            match=rf"sample \d+ .*the transform failed at .*{place}.*{advice}",
        ):
            digests(spec)

    def now_and_then(image: np.ndarray) -> np.ndarray:
        return picky(image) if image[0, 0, 0] % 2 else image[:16, :16]

    given |= {
        "train_transform": now_and_then,
        "quarantine": (tmp_path / "records").as_uri(),
    }
    monkeypatch.setattr(maker, "BadSampleBudget", partial(BadSampleBudget, grace=1))
    spec = open_stream(str(folder), transform=TransformConfig(size=16), **given)
    with pytest.raises(
        BadSamplesError,
        match=rf"{place}\. Raise .*, or fix the transform: .*pool.engine=inline",
    ):
        digests(spec)
    records = records_in(tmp_path / "records")
    of_transform = [record for record in records if record["fault"] == "transform"]
    assert of_transform and all(
        re.search(place, record["error"]) for record in of_transform
    )
    assert any(re.search(place, text) for text in caplog.messages)


@pytest.mark.parametrize("split", ["train", "val"])
def test_code_that_fails_in_a_branch_ends_the_run_at_once(
    folder: Path, split: str
) -> None:
    """Old torchvision's blur of PIL images on tensors: a quarter of the images, whatever they are, draw it."""
    blur = v2.Lambda(lambda image: image.filter(None))
    code = v2.Compose([v2.CenterCrop(16), v2.RandomApply([blur], p=0.25)])
    spec = open_stream(
        str(folder),
        str(folder),
        plan=PlanConfig(epochs=2, micro_batch_size=4),
        transform=TransformConfig(size=16, max_bad_fraction=1),
        **{
            f"{split}_transform": code,
            f"{'val' if split == 'train' else 'train'}_transform": "center",
        },
    )
    with pytest.raises(TransformError, match=r"'filter'.*so the code is at fault"):
        digests(spec)


def test_a_label_beyond_int64_makes_a_bad_sample_and_no_other_class(
    tmp_path: Path,
) -> None:
    store = tmp_path / "labels.parquet"
    labels = pa.array([1] * 5 + [(1 << 64) - 1, 1, 1], pa.uint64())
    pq.write_table(
        pa.table({"image": [picture(number) for number in range(8)], "label": labels}),
        store,
    )
    spec = open_stream(
        store,
        store,
        plan=PlanConfig(epochs=1, micro_batch_size=4),
        transform=TransformConfig(train="none", val="none"),
        quarantine=(tmp_path / "quarantine").as_uri(),
    )
    rows = [
        row
        for batch in inline_batches(spec, spec.plan.start())
        for row in zip(*rows_of(batch), strict=True)
    ]
    assert {label for label, index, weight in rows if weight} == {1}
    # of the validation
    assert [weight for _, index, weight in rows if index == 5] == [0]
    records = records_in(tmp_path / "quarantine")
    assert {record["split"] for record in records} == {"train", "val"}
    for record in records:
        assert (
            record["index"] == 5 and record["name"] and "the label" in record["error"]
        )


def rows_of(batch: MicroBatch) -> list[list[float]]:
    return [batch["label"].tolist(), batch.index.tolist(), batch.weight.tolist()]


def noise(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)


def test_a_substitute_has_other_pixels_than_its_own_draw() -> None:
    images = [picture(number) for number in range(8)]
    images[3] = images[5] = b"no image"
    spec = open_stream(
        MemoryStore(images, np.zeros(8, np.int64)),
        plan=PlanConfig(epochs=3, micro_batch_size=8),
        transform=TransformConfig(max_bad_fraction=1.0),
        train_transform=noise,
    )
    seen = [batch["image"] for batch in host_batches(spec)]
    again = [batch["image"] for batch in host_batches(spec)]
    assert all(
        np.array_equal(one, other) for one, other in zip(seen, again, strict=True)
    )
    pixels = [image.tobytes() for batch in seen for image in batch]
    assert len(set(pixels)) == len(pixels) == 24
