"""Samples that are read once, in order: their shards, uploads, and bad ones, with tasks that run in this process.

tests/commands/test_convert_sources.py runs them in a cluster.
"""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from pictures import picture

from raypipe.commands import copied_samples, tasks
from raypipe.commands.convert import convert
from raypipe.commands.copied_samples import Block, Samples, shards_of
from raypipe.commands.copies import num_shards
from raypipe.errors import StoreError
from raypipe.rayext import cluster
from raypipe.storage.filesystem import open_filesystem
from raypipe.stores import open_store
from raypipe.stores.addresses import names_in


def samples(num: int) -> list[dict[str, Any]]:
    return [
        {"image": picture(i, 8, 8), "label": i % 5, "name": f"n{i}"} for i in range(num)
    ]


def names(address: object, num: int) -> list[str]:
    return open_store(str(address)).read(np.arange(num), ("name",))["name"]


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tasks run here, and Ray's memory is this process's."""

    def run(
        work: str, here: bool, function: Any, calls: Any, *others: object
    ) -> Iterator[Any]:
        for arguments in calls:
            yield from function(*pickle.loads(pickle.dumps(arguments)))

    monkeypatch.setattr(tasks, "run_tasks", run)
    monkeypatch.setattr(tasks, "count_cpus", lambda work, here: 2)
    monkeypatch.setattr(cluster, "connect", lambda: None)
    monkeypatch.setattr(ray, "put", lambda table: table)
    monkeypatch.setattr(ray, "get", lambda table: table)


@pytest.mark.parametrize(
    ("shards", "shard_bytes", "bounds"),
    [
        (0, 100, [0, 10]),
        (3, 100, [0, 3, 6, 10]),
        (3, 5, [0, 3, 6, 10]),
        (20, 100, list(range(11))),
        (0, 40, [0, 4, 8, 10]),
        (0, 1, list(range(11))),
    ],
)
def test_shards_have_all_samples_in_order(
    shards: int, shard_bytes: int, bounds: list[int]
) -> None:
    named: list[tuple[Any, int]] = [("a", 6), ("b", 1), ("c", 3)]
    parts = [Block(name, 10 * num, num) for name, num in named]
    found = list(shards_of(Samples("x", {}, iter(parts), shard_bytes), shards, 2))
    assert [first for first, _ in found] == bounds[:-1]
    rows = [
        [
            (block.read, block.start + i)
            for block in rows.args[0]
            for i in range(block.num)
        ]
        for _, rows in found
    ]
    assert [len(of_shard) for of_shard in rows] == np.diff(bounds).tolist()
    expected = [(block.read, i) for block in parts for i in range(block.num)]
    assert list(itertools.chain.from_iterable(rows)) == expected


def test_a_thousand_samples_for_each_cpu_are_a_shard() -> None:
    assert [num_shards(num, 1, 4) for num in (999, 2999, 9000)] == [1, 2, 4]
    assert num_shards(999, 5 << 29, 4) == 3


def test_more_than_a_shard_holds_is_written_as_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copied_samples, "SHARD_BYTES", 80 * len(picture(0, 8, 8)))
    dst = tmp_path / "a.lmdb"
    num_written = []

    def every() -> Iterator[dict[str, Any]]:
        for number, sample in enumerate(samples(300)):
            if number == 299:
                num_written.extend(tmp_path.glob(".a.lmdb.partial.lmdb/*"))
            yield sample

    convert(every(), dst)
    assert len(num_written) > 1
    assert names(dst, 300) == [f"n{i}" for i in range(300)]


def test_in_a_bucket_new_shards_replace_the_old_ones_and_what_was_left(
    bucket: str,
) -> None:
    address = f"{bucket}/a.lmdb"
    for num, shards in ((40, 1), (60, 3), (20, 2)):
        convert(samples(num), address, shards=shards, overwrite=True)
        assert names(address, num) == [f"n{i}" for i in range(num)]
        filesystem, path = open_filesystem(address)
        assert len(names_in(filesystem, path)) == shards + 1
        with filesystem.open_output_stream(f"{path}/00000-0123abcd.lmdb") as file:
            # by a task that died
            file.write(b"x")


@pytest.mark.parametrize("suffix", ["lmdb", "parquet"])
def test_bad_samples_are_skipped_and_a_shard_of_none_is_left_out(
    tmp_path: Path, suffix: str
) -> None:
    some_bad = samples(30)
    for i in (*range(10, 20), 25):
        some_bad[i]["image"] = None
    dst = tmp_path / f"a.{suffix}"
    counts = convert(some_bad, dst, shards=3, on_bad_sample="skip")
    assert (counts["samples"], counts["skipped"]) == (19, 11)
    assert names(dst, 19) == [f"n{i}" for i in range(30) if some_bad[i]["image"]]
    assert sorted(file.name for file in dst.iterdir()) == [
        f"0000{n}.{suffix}" for n in (0, 1)
    ]


def test_a_source_without_a_readable_sample(tmp_path: Path) -> None:
    bad = [{"image": None, "label": 1}, {"image": b"x", "label": 2}]
    with pytest.raises(
        StoreError,
        match="the source has no readable sample; the first: sample 0: it has no bytes",
    ):
        convert(bad, tmp_path / "a.lmdb", shards=2, on_bad_sample="skip")
    assert list(tmp_path.iterdir()) == []
