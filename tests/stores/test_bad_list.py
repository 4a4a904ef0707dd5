"""A list of bad samples, from the one who writes it to the run that leaves them out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raypipe.config import PlanConfig
from raypipe.errors import ConfigError
from raypipe.stores.bad_list import read_bad_list, write_bad_list
from raypipe.stores.memory import MemoryStore
from raypipe.streaming.opening import open_stream

from pictures import picture  # isort: skip

pytestmark = pytest.mark.usefixtures("in_own_folder")

STORE = MemoryStore([bytes([i]) for i in range(10)], [0] * 10)
OTHER = MemoryStore([b"x"] * 10, [0] * 10)
BAD = [{"index": 7, "error": "empty value"}, {"index": 2, "error": "no value"}]


def read(address: str | Path, store: MemoryStore | None = STORE) -> list[int]:
    return read_bad_list(address, store, "store.exclude").tolist()


@pytest.mark.parametrize("as_uri", [False, True])
def test_what_is_written_is_read(as_uri: bool) -> None:
    file = Path("a list.json").absolute()
    address = file.as_uri() if as_uri else str(file)
    for bad in (BAD, BAD[:1], []):  # in place of the one before
        write_bad_list(address, STORE, bad)
        assert read(address) == sorted(entry["index"] for entry in bad)
    write_bad_list(address, STORE, BAD)
    assert json.loads(file.read_text()) == {
        "store": STORE.address,
        "fingerprint": STORE.fingerprint,
        "num_samples": 10,
        "bad": BAD,
    }
    assert [path.name for path in Path().iterdir()] == [file.name]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "null",
        "[]",
        "[3, 4]",
        "{}",
        '{"bad": []}',
        '{"fingerprint": "FINGERPRINT"}',
        '{"fingerprint": "FINGERPRINT", "bad": 3}',
        '{"fingerprint": "FINGERPRINT", "bad": [3]}',
        '{"fingerprint": "FINGERPRINT", "bad": [{"error": "x"}]}',
        b"\xff\xfe",
    ],
)
def test_a_file_that_is_no_list(text: str | bytes) -> None:
    file = Path("list.json")
    file.write_bytes(
        text
        if isinstance(text, bytes)
        else text.replace("FINGERPRINT", STORE.fingerprint).encode()
    )
    expected = r"exclude: .*list.json is not (JSON|text|a list of bad samples .*raypipe verify memory:\w+`)"
    with pytest.raises(ConfigError, match=expected):
        read(file)


@pytest.mark.parametrize("index", [-1, 10, 2.0, "3", None, True])
def test_an_index_that_is_no_sample(index: Any) -> None:
    write_bad_list("list.json", STORE, [{"index": index, "error": ""}])
    with pytest.raises(
        ConfigError, match=f"names sample {index!r}, outside the samples 0 to 9"
    ):
        read("list.json")


def test_the_list_of_another_store_names_both() -> None:
    write_bad_list("list.json", OTHER, BAD)
    expected = (
        f"{STORE.fingerprint} .*made for {OTHER.address} with .*{OTHER.fingerprint}"
    )
    with pytest.raises(ConfigError, match=expected):
        read("list.json")


def test_a_list_of_all_samples() -> None:
    write_bad_list("list.json", STORE, [{"index": i, "error": ""} for i in range(10)])
    with pytest.raises(ConfigError, match="excludes all 10 samples"):
        read("list.json")


def test_a_list_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match=r"store.exclude: .*none.json cannot be read"):
        read("none.json")


# A run


def test_a_spec_leaves_out_what_its_lists_name() -> None:
    write_bad_list("train.json", STORE, BAD)
    write_bad_list("val.json", OTHER, BAD[:1])
    spec = open_stream(
        STORE,
        OTHER,
        plan=PlanConfig(epochs=1, micro_batch_size=2),
        exclude={"train": Path("train.json"), "val": "val.json"},
    )
    assert (spec.plan.num_train, spec.plan.num_val) == (8, 9)
    stream = [
        (at.split, spec.plan.indices(at))
        for at in spec.plan.micro_batches(spec.plan.start())
    ]
    train, val = (
        np.concatenate([found for split, found in stream if split == name])
        for name in ("train", "val")
    )
    assert sorted(train.tolist()) == [0, 1, 3, 4, 5, 6, 8, 9]
    assert val.tolist() == [0, 1, 2, 3, 4, 5, 6, 8, 9, -1]
    with pytest.raises(
        ConfigError,
        match=r"store.exclude: there is .*val\.json.* for validation, and no store\.val",
    ):
        open_stream(STORE, exclude={"val": "val.json"})


def test_the_size_of_a_validation_is_not_told_by_excluded_samples() -> None:
    from raypipe.plan.places import MicroBatchId
    from raypipe.streaming.maker import MicroBatchMaker

    class Broken(MemoryStore):
        def read(
            self, indices: np.ndarray, columns: tuple[str, ...] = ("image", "label")
        ) -> Any:
            assert (indices > 1).all(), "a sample that is left out was read"
            return super().read(indices, columns)

    val = Broken([None, None, picture(2)], [0, 0, 0])
    write_bad_list(
        "val.json",
        val,
        [{"index": 0, "error": ""}, {"index": 1, "error": ""}],
    )
    spec = open_stream(
        STORE,
        val,
        plan=PlanConfig(epochs=1, micro_batch_size=2, global_batch_size=4),
        train_transform=None,
        val_transform=None,
        exclude={"val": "val.json"},
    )
    # nothing but padding
    batch = MicroBatchMaker(spec).batch(MicroBatchId("val", 0, 0, 1))
    assert batch["image"].shape == (2, 40, 48, 3) and batch.index.tolist() == [-1, -1]
