"""The record of hashes: one root for any number of ranks and through any crash, and what does not count."""

from __future__ import annotations

import itertools
import json
import logging
import shutil
from pathlib import Path

import pyarrow.fs
import pytest
from logged_runs import (
    CPU,
    logging_loader,
    record_of,
    run_logged,
    train_all,
)
from small_streams import spec_of
from without_ray import host_batches

import raypipe
from raypipe.config import AugmentConfig, PlanConfig
from raypipe.errors import ConfigError
from raypipe.plan.places import Cursor, MicroBatchId
from raypipe.streaming.hashes import batch_hash
from raypipe.streaming.record import digest_log
from raypipe.streaming.record.digest_log import (
    DigestLog,
    read_epoch,
    recorded_files,
)
from raypipe.streaming.record.opened import settings_record
from raypipe.streaming.spec import StreamSpec

PER_EPOCH = 4 * 4 + 4  # micro-batches of training and validation


@pytest.fixture(scope="module")
def spec(stores: dict[str, Path]) -> StreamSpec:
    plan = PlanConfig(epochs=2, micro_batch_size=6, global_batch_size=24, seed=3)
    return spec_of(stores["train"], stores["val"], plan=plan)


def lines_of(run: Path) -> list[dict[str, str]]:
    files = sorted((run / "digests").glob("*.jsonl"))
    return [
        json.loads(line) for path in files for line in path.read_text().splitlines()
    ]


def test_the_root_is_of_the_streams_hashes(spec: StreamSpec, tmp_path: Path) -> None:
    run_logged(spec, tmp_path)
    of_epoch = [batch for batch in host_batches(spec) if batch.position.epoch == 1]
    hashes = {batch.position: batch_hash(batch).hex() for batch in of_epoch}
    record = record_of(tmp_path, epoch=1)
    found = {place: each.stream for place, each in record.recorded.items()}
    assert found == hashes and len(hashes) == PER_EPOCH


def test_one_rank_and_two_give_one_root_with_device_augmentation(
    spec: StreamSpec, tmp_path: Path
) -> None:
    augment = AugmentConfig(preset="light", mixup_alpha=0.4)
    roots = []
    for world_size in (1, 2):
        run = tmp_path / str(world_size)
        run_logged(spec, run, world_size, augment=augment)
        assert len(list((run / "digests").iterdir())) == 4 * world_size
        roots.append([record_of(run, epoch).root for epoch in range(2)])
    assert roots[0] == roots[1] and roots[0][0] != roots[0][1]


def test_a_killed_run_that_goes_on_with_two_ranks_has_the_same_root(
    spec: StreamSpec, tmp_path: Path
) -> None:
    whole, killed, resumed = (
        tmp_path / name for name in ("whole", "killed", "resumed")
    )
    run_logged(spec, whole)
    loader = logging_loader(spec, killed)
    (epoch,) = itertools.islice(loader.epochs(), 1)
    for number, _ in enumerate(epoch.train):
        if number == 8:
            state = loader.state_dict()
        if number == 10:
            break
    shutil.copytree(killed, resumed)  # as a kill would leave it
    loader.close()
    (file,) = (resumed / "digests").glob("*.jsonl")
    assert len(lines_of(resumed)) >= 1 + 9, "all that the state is behind is written"
    with file.open("a") as record:
        record.write('{"micro_batch": "train-e0000-s0000')
    run_logged(spec, resumed, 2, cursor=Cursor.from_dict(state))
    for number in range(2):
        expected, found = (record_of(run, number) for run in (whole, resumed))
        assert found.root == expected.root and len(found.recorded) == PER_EPOCH


def test_what_is_no_line_of_a_rank_does_not_count(
    spec: StreamSpec, tmp_path: Path
) -> None:
    run_logged(spec, tmp_path)
    expected = record_of(tmp_path)
    place = '"micro_batch": "train-e0000-s000000-m000"'
    foreign = [
        "[1, 2]",
        "not JSON",
        f'{{{place}, "hash": "g"}}',
        f'{{{place}, "hash": 5}}',
        '{"micro_batch": "train-e0001-s000000-m000", "hash": "' + "0" * 32 + '"}',
        '{"kind": "start", "seal": "another"}',
        f'{{{place}, "hash": "{"0" * 32}"}}',
    ]
    file = next((tmp_path / "digests").glob("epoch-0000-*.jsonl"))
    with file.open("a") as record:
        record.write("\n".join(foreign) + "\n" + f'{{{place}, "hash": "{"1" * 32}"}}')
    found = record_of(tmp_path)
    assert found.recorded == expected.recorded and found.damaged == [file.stem]


def test_of_two_hashes_of_one_place_the_newest_files_counts(
    spec: StreamSpec, tmp_path: Path
) -> None:
    run_logged(spec, tmp_path)
    (place,) = [MicroBatchId("train", 0, 1, 2)]
    start = {"kind": "start"}
    for number, time in enumerate(("f" * 16, "f" * 9)):  # of microseconds, hexadecimal
        lines = [
            json.dumps(start),
            json.dumps({"micro_batch": str(place), "hash": str(number) * 32}),
        ]
        path = tmp_path / f"digests/epoch-0000-rank-000{number + 1}-{time}.jsonl"
        path.write_text("\n".join(lines) + "\n")
    assert record_of(tmp_path).recorded[place].stream == "0" * 32


def test_a_file_in_object_storage_is_continued(
    spec: StreamSpec, tmp_path: Path
) -> None:
    elsewhere = pyarrow.fs.SubTreeFileSystem(
        str(tmp_path), pyarrow.fs.LocalFileSystem()
    )
    elsewhere.create_dir("run/digests")
    whole = tmp_path / "whole"
    run_logged(spec, whole)
    batches = train_all(logging_loader(spec, tmp_path / "unused"))
    for part in (batches[:7], batches[5:]):
        record = settings_record(spec, None, None)
        log = DigestLog((elsewhere, "run"), record, 0, 1, CPU)
        for batch in part:
            log.add(batch)
        log.closed()
    files = recorded_files((elsewhere, "run/digests"))
    assert [of_file for *of_file, _ in files] == [[0, 0], [0, 0], [1, 0]]
    for epoch in range(2):
        found = read_epoch((elsewhere, "run/digests"), epoch)
        assert found.root == record_of(whole, epoch).root
        assert found.damaged == []


def test_a_long_epoch_has_several_files(
    spec: StreamSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_logged(spec, tmp_path / "whole")
    monkeypatch.setattr(digest_log, "_MOST_LINES", 3)
    parts = tmp_path / "parts"
    run_logged(spec, parts)
    assert len(list(parts.glob("digests/epoch-0000-*.jsonl"))) > 1
    assert record_of(parts).root == record_of(tmp_path / "whole").root


def test_a_record_that_cannot_be_written_does_not_end_the_run(
    spec: StreamSpec, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "digests").write_text("a file where the folder would be")
    with caplog.at_level(logging.WARNING):
        batches = train_all(logging_loader(spec, tmp_path))
    assert len(batches) == 2 * PER_EPOCH
    warnings = [text for text in caplog.messages if "cannot be written" in text]
    assert len(warnings) == 1 and "its record has gaps" in warnings[0]


def test_an_own_loop_records_into_its_run_folder(
    spec: StreamSpec, tmp_path: Path
) -> None:
    with raypipe.loader(spec, run_dir=tmp_path, log_digest=True) as loader:
        batch = next(iter(next(loader.epochs()).train))
        loader.checkpoint()
    assert len(batch.stream_hash) == 16
    (hashes,) = record_of(tmp_path).recorded.values()
    assert hashes[:2] == (batch.stream_hash.hex(), batch.finished_hash.hex())
    with raypipe.loader(spec, run_dir=tmp_path / "without") as loader:
        assert next(iter(next(loader.epochs()).train)).stream_hash == b""
    assert not (tmp_path / "without/digests").exists()
    with pytest.raises(ConfigError, match="log_digest writes into the run's folder"):
        raypipe.loader(spec, log_digest=True)
