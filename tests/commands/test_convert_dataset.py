"""The tasks that copy a Dataset, run in this process: records, shards, uploads, and bad rows.

tests/commands/test_convert_sources.py runs them in a cluster.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pictures import picture

from raypipe.commands import convert_dataset
from raypipe.commands.convert_dataset import Copy, make_copy
from raypipe.commands.copies import CopySettings
from raypipe.errors import SampleError, StoreError
from raypipe.storage.filesystem import open_filesystem
from raypipe.stores import open_store
from raypipe.stores.addresses import names_in


def rows(num: int) -> list[dict[str, Any]]:
    return [
        {"image": picture(i, 8, 8), "label": i % 5, "name": f"n{i}"} for i in range(num)
    ]


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows stand for a Dataset; each shard gets an equal part of them."""

    def parts(
        samples: list[dict[str, Any]], copy: Copy, shards: int, first: object
    ) -> Iterator[dict[str, Any]]:
        for part in np.array_split(np.arange(len(samples)), shards):
            batch = pa.Table.from_pylist(
                [convert_dataset._make(samples[i], copy) for i in part]
            )
            yield json.loads(convert_dataset._write(batch, copy)["part"][0])

    monkeypatch.setattr(convert_dataset, "_parts", parts)
    monkeypatch.setattr(convert_dataset, "_first_rows", lambda samples: samples[:64])
    monkeypatch.setattr(convert_dataset, "count_cpus", lambda what, here: 1)


def copied(
    samples: list[dict[str, Any]], dst: object, shards: int, policy: str = "raise"
) -> dict[str, int]:
    settings = CopySettings(on_bad_sample=policy)
    return make_copy(samples, str(dst), shards, True, None, settings)  # type: ignore[arg-type]


def test_in_a_bucket_new_shards_replace_the_old_ones_and_what_was_left(
    bucket: str,
) -> None:
    address = f"{bucket}/a.lmdb"
    for num, shards in ((40, 1), (60, 3), (20, 2)):
        copied(rows(num), address, shards)
        store = open_store(address)
        assert store.read(np.arange(num), ("name",))["name"] == [
            f"n{i}" for i in range(num)
        ]
        filesystem, path = open_filesystem(address)
        assert len(names_in(filesystem, path)) == shards + 1
        with filesystem.open_output_stream(f"{path}/00000-0123abcd.lmdb") as file:
            # by a task that died
            file.write(b"x")


def test_in_a_bucket_an_error_leaves_the_old_store(bucket: str) -> None:
    copied(rows(20), f"{bucket}/a.lmdb", 2)
    before = names_in(*open_filesystem(f"{bucket}/a.lmdb"))
    bad = [*rows(30), {"image": b"no image", "label": 1, "name": "bad"}]
    with pytest.raises(
        SampleError,
        match=r"the Dataset: sample 30: .* Exclude such samples with --on-bad-sample",
    ):
        copied(bad, f"{bucket}/a.lmdb", 3)
    assert names_in(*open_filesystem(f"{bucket}/a.lmdb")) == before


@pytest.mark.parametrize("suffix", ["lmdb", "parquet"])
def test_bad_rows_are_skipped_and_a_shard_of_none_is_left_out(
    tmp_path: Path, suffix: str
) -> None:
    samples = rows(30)
    for i in (*range(10, 20), 25):
        samples[i]["image"] = None
    counts = copied(samples, tmp_path / f"a.{suffix}", 3, "skip")
    assert (counts["samples"], counts["skipped"]) == (19, 11)
    store = open_store(tmp_path / f"a.{suffix}")
    assert store.read(np.arange(19), ("name",))["name"] == [
        f"n{i}" for i in range(30) if samples[i]["image"]
    ]
    assert sorted(file.name for file in (tmp_path / f"a.{suffix}").iterdir()) == [
        f"0000{n}.{suffix}" for n in (0, 1)
    ]


def test_a_dataset_without_a_readable_row(tmp_path: Path) -> None:
    samples = [{"image": None, "label": 1}, {"image": b"x", "label": 2}]
    with pytest.raises(
        StoreError,
        match="the Dataset has no readable sample; the first: sample 0: it has no bytes",
    ):
        copied(samples, tmp_path / "a.lmdb", 2, "skip")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [({"label": None}, "do not fit"), ({"more": 1}, "has the columns")],
)
def test_a_row_that_does_not_fit_the_columns_is_named(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    samples = rows(100)
    samples[80] |= change
    with pytest.raises(StoreError, match=rf"the Dataset: sample 80: .*{message}"):
        copied(samples, tmp_path / "a.lmdb", 4, "skip")


def test_a_file_that_a_task_left_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = convert_dataset._parts

    def parts_and_file(
        samples: Any, copy: Copy, *others: Any
    ) -> Iterator[dict[str, Any]]:
        (Path(copy.dst) / "0123.lmdb").write_bytes(b"x")
        yield from parts(samples, copy, *others)

    monkeypatch.setattr(convert_dataset, "_parts", parts_and_file)
    copied(rows(5), tmp_path / "a.lmdb", 1)
    assert (tmp_path / "a.lmdb").is_file() and len(open_store(tmp_path / "a.lmdb")) == 5
    assert [file.name for file in tmp_path.iterdir()] == ["a.lmdb"]
