"""The audit of a run's record: it finds whatever was altered, and has nothing to say of an honest run."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from logged_runs import Changes, logging_loader, run_logged
from pictures import CLASSES, picture, samples

import raypipe
from raypipe.config import AugmentConfig, PlanConfig, PoolConfig, TransformConfig
from raypipe.errors import ConfigError
from raypipe.history.audited import AuditedRecord
from raypipe.history.recorded import RecordedRun
from raypipe.packages import versions
from raypipe.plan.places import MicroBatchId
from raypipe.stores.destination import write_atomically
from raypipe.streaming.bad_samples import BadSample, record_bad
from raypipe.streaming.hashes import batch_hash
from raypipe.streaming.opening import open_stream
from raypipe.streaming.record.digest_log import sum_of
from raypipe.streaming.spec import StreamSpec

STEPS = 3
PER_EPOCH = STEPS * 2 + 2
PLACE = MicroBatchId("train", 0, 1, 1)
OTHER = MicroBatchId("train", 0, 2, 0)
AUGMENT = AugmentConfig(preset="light", mixup_alpha=0.4)


def stream(
    folder: Path, transform: str = "small", epochs: int = 3, **plan: Any
) -> StreamSpec:
    sizes = {"micro_batch_size": 4, "global_batch_size": 8, "seed": 3}
    return open_stream(
        folder / "train.lmdb",
        folder / "val.lmdb",
        plan=PlanConfig(epochs=epochs, **sizes | plan),
        transform=TransformConfig(train=transform, val="resize", size=8),
        pool=PoolConfig(engine="inline", max_actors=0),
    )


def trained(
    spec: StreamSpec,
    run: Path,
    ranks: int = 1,
    begin: int = 0,
    until: int = 100,
    lost: int = 0,
    augment: AugmentConfig = AUGMENT,
    **options: Any,
) -> None:
    """Train from a step on to another one, at which the ranks are killed, with a number of lines that are lost."""
    for rank in range(ranks):
        cursor = spec.plan.cursor_at(begin)
        loader = logging_loader(spec, run, rank, ranks, cursor, augment, **options)
        with loader:
            for _ in batches(loader, until):
                pass
            log = loader._digest_log
            assert log
            if loader.global_step < spec.plan.config.epochs * STEPS and lost:
                del log._lines[-lost:]


def batches(loader: Any, until: int) -> Iterator[Any]:
    for epoch in loader.epochs():
        if loader.global_step >= until:
            return
        for batch in epoch.train:
            yield batch
            if loader.global_step >= until:
                return
        yield from epoch.val


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two stores, and runs: whole with one rank and with two, and stopped in their second epoch."""
    root = tmp_path_factory.mktemp("audited")
    write_atomically(str(root / "train.lmdb"), samples(27), CLASSES)
    write_atomically(str(root / "val.lmdb"), samples(8), CLASSES)
    spec = stream(root)
    trained(spec, root / "whole")
    trained(spec, root / "two", 2)
    trained(spec, root / "killed", until=5)
    trained(spec, root / "killed two", 2, until=5)
    return root


def audited(run: Path, num: int | None = None, **given: Any) -> AuditedRecord:
    """The audit of a run with all micro-batches, or a number of random ones, made again."""
    record = AuditedRecord(RecordedRun(run, **given))
    record.check_record()
    record.compare(record.places if num is None else record.choose(num, seed=7))
    return record


# Changes of a record

Change = Callable[[Path], Any]


def digest_file(run: Path, epoch: int, rank: int = 0) -> Path:
    name = f"epoch-{epoch:04d}-rank-{rank:04d}-*.jsonl"
    (path,) = (run / "digests").glob(name)
    return path


def lines_of(path: Path) -> list[str]:
    return path.read_text().splitlines(keepends=True)


def rewritten(change: Callable[[list[str]], list[str]], *place: int) -> Change:
    """Changes the lines of a file."""

    def forge(run: Path) -> None:
        path = digest_file(run, *place)
        path.write_text("".join(change(lines_of(path))))

    return forge


def without_last(num: int, epoch: int) -> Change:
    return rewritten(lambda lines: lines[:-num], epoch)


def removed(names: str) -> Change:
    return lambda run: [path.unlink() for path in (run / "digests").glob(names)]


def flipped(text: str) -> str:
    return ("1" if text[0] == "0" else "0") + text[1:]


def entry(number: int, epoch: int = 0, **changed: Any) -> Change:
    """Changes the values of a micro-batch's line: to the result of a function, or removes them (None)."""

    def change(lines: list[str]) -> list[str]:
        record = json.loads(lines[1 + number])
        for name, value in changed.items():
            if value is None:
                del record[name]
            else:
                record[name] = value(record[name])
        return [*lines[: 1 + number], json.dumps(record) + "\n", *lines[2 + number :]]

    return rewritten(change, epoch)


def appended(*place: int, **changed: Any) -> Change:
    def change(lines: list[str]) -> list[str]:
        record = json.loads(lines[1])
        for name, value in changed.items():
            record[name] = value(record[name])
        return [*lines, json.dumps(record) + "\n"]

    return rewritten(change, *place)


def exchanged(names: tuple[str, ...], epoch: int = 0) -> Change:
    """Exchanges the hashes of the first line of epoch 0 and the fourth of an epoch."""

    def forge(run: Path) -> None:
        first = json.loads(lines_of(digest_file(run, 0))[1])
        second = json.loads(lines_of(digest_file(run, epoch))[4])
        for name in names:
            entry(0, 0, **{name: lambda _, name=name: second[name]})(run)
            entry(3, epoch, **{name: lambda _, name=name: first[name]})(run)

    return forge


def redone(*changes: Change) -> Change:
    """Changes, and then the sums of what was made of the record, as whoever has the folder can write them."""

    def forge(run: Path) -> None:
        for change in changes:
            change(run)
        for path in (run / "digests").glob("*.jsonl"):
            path.with_suffix(".json").write_text(json.dumps(sum_of(path.read_bytes())))

    return forge


def started(change: Callable[[dict[str, Any]], Any]) -> Change:
    """Changes the records of the run's starts."""

    def forge(run: Path) -> None:
        path = run / "metrics.jsonl"
        records = [json.loads(line) for line in lines_of(path)]
        for record in records:
            if record["kind"] == "start":
                change(record)
        path.write_text("".join(json.dumps(record) + "\n" for record in records))

    return forge


def setting(section: str, name: str, value: Any) -> Change:
    def change(start: dict[str, Any]) -> None:
        stream = start["stream"]
        sections = {**stream["arguments"], "augment": stream["augment"]}
        sections[section]["settings"][name] = value

    return started(change)


def other_cpu(run: Path) -> None:
    for path in (run / "digests").glob("*.jsonl"):
        path.write_text(path.read_text().replace('"cpu": "', '"cpu": "other '))


BOTH = ("hash", "finished")
EPOCHS = range(3)
FORGED: dict[str, dict[str, Change]] = {
    "whole": {
        "exchanged in an epoch": exchanged(BOTH),
        "exchanged, redone": redone(exchanged(BOTH)),
        "exchanged across epochs, redone": redone(exchanged(BOTH, 1)),
        "exchanged, finished alone, redone": redone(exchanged(("finished",))),
        "a hash": entry(2, 1, hash=flipped),
        "a hash, redone": redone(entry(2, 1, hash=flipped)),
        "finished": entry(2, 1, finished=flipped),
        "finished, redone": redone(entry(2, 1, finished=flipped)),
        "finished removed": entry(2, 1, finished=None),
        "finished removed, redone": redone(entry(2, 1, finished=None)),
        "another CPU": other_cpu,
        **{
            f"the last {num} lines of epoch {epoch}": without_last(num, epoch)
            for epoch in EPOCHS
            for num in (1, 2, 6)
        },
        "the last bytes": lambda run: os.truncate(digest_file(run, 1), 700),
        **{f"file of epoch {n}": removed(f"epoch-{n:04d}-*.jsonl") for n in EPOCHS},
        "appended with another hash": appended(1, hash=flipped),
        "appended with other finished tensors": appended(1, finished=flipped),
        "appended, of no place": appended(
            1, micro_batch=lambda _: "train-e0001-s000099-m000"
        ),
        "appended, of another kind": rewritten(
            lambda lines: [*lines, '{"kind": "root", "root": ""}\n'], 1
        ),
        "seed": setting("plan", "seed", 9),
        "transform": setting("transform", "train", "light"),
        "augmentation": setting("augment", "mixup_alpha", 0.9),
        "plan": started(lambda start: start["stream"].update(plan="0" * 16)),
        "epochs lowered": setting("plan", "epochs", 2),
    },
    "two": {
        **{
            f"rank 1 of epoch {n}": removed(f"epoch-{n:04d}-rank-0001-*.jsonl")
            for n in EPOCHS
        },
        "all of rank 1": removed("*-rank-0001-*"),
        "a sum": removed("epoch-0001-rank-0001-*.json"),
        "appended to another rank's file": appended(1, 1, hash=flipped),
        "workers": started(lambda start: start.update(workers=1)),
    },
    "killed": {
        "a killed epoch": removed("epoch-0001-*.jsonl"),
        "a killed epoch cut": without_last(2, 1),
    },
    "killed two": {
        "rank 1 of a killed epoch": removed("epoch-0001-rank-0001-*.jsonl"),
        "rank 0 of a killed epoch": removed("epoch-0001-rank-0000-*.jsonl"),
        "rank 1 of a killed epoch cut": rewritten(lambda lines: lines[:2], 1, 1),
    },
}


@pytest.mark.parametrize(
    ("base", "change"),
    [(base, change) for base, changes in FORGED.items() for change in changes],
)
def test_each_change_of_a_record_is_found(
    base: str, change: str, folder: Path, tmp_path: Path
) -> None:
    run = Path(shutil.copytree(folder / base, tmp_path / "run"))
    FORGED[base][change](run)
    assert audited(run, None if "redone" in change else 0).findings


SAME: dict[str, Change] = {
    "nothing": lambda run: None,
    "a line again": appended(1),
    "more epochs": setting("plan", "epochs", 4),
}


@pytest.mark.parametrize("change", SAME)
@pytest.mark.parametrize("base", ["whole", "two", "killed", "killed two"])
def test_what_says_the_same_is_no_finding(
    base: str, change: str, folder: Path, tmp_path: Path
) -> None:
    run = Path(shutil.copytree(folder / base, tmp_path / "run"))
    SAME[change](run)
    assert audited(run, 2).findings == []


Starts = list[tuple[int, int, int, dict[str, Any]]]
"""Starts of a run: from a step to a step, with a number of ranks, and settings."""

_RANKS = itertools.cycle([(1, 2), (2, 1), (2, 2), (1, 1)])
HONEST: dict[str, Starts] = {
    f"killed at {end}, {ranks} then {later} ranks from {begin}": [
        (0, end, ranks, {}),
        (begin, 100, later, {}),
    ]
    for end, begin in itertools.product((2, 4, 6, 8), (0, 2, 3))
    for ranks, later in [next(_RANKS)]
    if begin < end
}
HONEST |= {
    "another transform": [(0, 5, 1, {}), (3, 100, 1, {"transform": "light"})],
    "another transform, killed again": [
        (0, 8, 2, {}),
        (2, 5, 1, {"transform": "light"}),
    ],
    "another transform in a whole epoch": [
        (0, 8, 1, {}),
        (3, 5, 2, {"transform": "resize"}),
        (4, 100, 1, {}),
    ],
    "fewer epochs": [(0, 8, 1, {}), (3, 100, 1, {"epochs": 2})],
    "more epochs": [(0, 100, 2, {"epochs": 1}), (3, 100, 1, {"epochs": 3})],
    "validations left out": [(0, 5, 1, {}), (3, 100, 1, {"val_interval": 2})],
    "steps left out": [(0, 5, 1, {}), (4, 100, 2, {"skip": ["6..7"]})],
    "another plan": [(0, 2, 1, {"seed": 4}), (0, 100, 1, {})],
    "begun late": [(2, 100, 2, {})],
    "killed before its first batch": [(0, 0, 2, {}), (0, 100, 1, {})],
}


@pytest.mark.parametrize("kind", HONEST)
def test_an_honest_run_has_no_findings(kind: str, folder: Path, tmp_path: Path) -> None:
    lost = [*HONEST].index(kind) % 2  # lines that a killed rank has not written
    for begin, end, ranks, settings in HONEST[kind]:
        spec = stream(folder, **settings)
        trained(spec, tmp_path / "run", ranks, begin, end, lost)
    record = audited(tmp_path / "run", 3)
    assert record.findings == [] and record.num_compared == 3


def test_strengths_of_a_run_that_was_made_longer_are_those_of_each_start(
    folder: Path, tmp_path: Path
) -> None:
    growing = replace(AUGMENT, preset="strong", strength=(0.3, 1.0, 0.5))
    trained(stream(folder, epochs=1), tmp_path, augment=growing)
    trained(stream(folder, epochs=2), tmp_path, begin=STEPS, augment=growing)
    record = audited(tmp_path)
    assert record.findings == [] and record.num_compared == 2 * PER_EPOCH


def test_hashes_may_be_recorded_from_a_resume_on(folder: Path, tmp_path: Path) -> None:
    spec = stream(folder)
    trained(spec, tmp_path, 2, until=2)
    shutil.rmtree(tmp_path / "digests")
    trained(spec, tmp_path, begin=2)
    assert audited(tmp_path, 1).findings == []


def test_lines_that_a_crash_left_without_their_sum_are_no_finding(
    folder: Path, tmp_path: Path
) -> None:
    run = Path(shutil.copytree(folder / "killed two", tmp_path / "run"))
    path = digest_file(run, 1, rank=1)
    earlier = "".join(lines_of(path)[:-1]).encode()
    path.with_suffix(".json").write_text(json.dumps(sum_of(earlier)))
    assert audited(run, 1).findings == []


def test_a_validation_of_an_earlier_start_is_of_the_run(
    folder: Path, tmp_path: Path
) -> None:
    trained(stream(folder, epochs=1, val_interval=2), tmp_path)
    trained(stream(folder, epochs=4, val_interval=2), tmp_path, begin=STEPS)
    record = audited(tmp_path, 1)
    assert record.findings == []
    assert [epoch["is_complete"] for epoch in record.epochs.values()] == [True] * 4


def test_a_sample_that_is_good_again_after_a_resume_is_of_its_batch(
    folder: Path, tmp_path: Path
) -> None:
    """It had killed its actors, say, and the step was done over again."""
    uri = (tmp_path / "quarantine").as_uri()
    spec = replace(stream(folder), quarantine=uri)
    trained(spec, tmp_path, until=2)
    index = int(spec.plan.indices(PLACE)[0])
    for place in (PLACE, OTHER):
        bad = BadSample(place, "train.lmdb", index, "", 0, "it killed", "store")
        record_bad(uri, place, [bad])
    trained(spec, tmp_path, until=2)
    assert audited(tmp_path).findings == []
    left = [path.stem for path in (tmp_path / "quarantine").iterdir()]
    assert left == [str(OTHER)], "this step was not done again"


def test_a_loops_own_validations_are_of_the_run(folder: Path, tmp_path: Path) -> None:
    """Where the plan has none: before the training, and behind the last epoch."""
    spec = stream(folder, epochs=2, val_interval=2)
    with logging_loader(spec, tmp_path, augment=AUGMENT) as loader:
        taken = list(loader.validation())
        for epoch in loader.epochs():
            taken += [*epoch.train, *epoch.val]
        taken += loader.validation()
    record = audited(tmp_path)
    assert record.findings == []
    assert record.num_compared == len({batch.position for batch in taken})
    assert all(epoch["is_complete"] for epoch in record.epochs.values())
    replay = raypipe.replay(tmp_path)
    for batch in (taken[0], taken[-1]):
        place = replay.place_of(str(batch.position))
        assert batch_hash(replay.batch(place)) == batch_hash(batch)


def test_other_versions_on_a_resume_may_make_other_pixels(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = stream(folder)
    trained(spec, tmp_path, until=2, changed=brighter)
    assert audited(tmp_path).findings
    from raypipe.streaming.record import opened

    older = {**versions(), "numpy": "1.0"}
    shutil.rmtree(tmp_path / "digests")
    (tmp_path / "metrics.jsonl").unlink()
    monkeypatch.setattr(opened, "versions", lambda: older)
    trained(spec, tmp_path, until=2, changed=brighter)
    monkeypatch.undo()
    trained(spec, tmp_path, begin=1)
    assert audited(tmp_path).findings == []


def test_other_rounding_by_an_earlier_starts_versions_is_no_finding(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from raypipe.streaming.record import opened

    spec = stream(folder, epochs=2)
    older = {**versions(), "torch": "1.0"}
    with monkeypatch.context() as before:
        before.setattr(opened, "versions", lambda: older)
        trained(spec, tmp_path, until=STEPS)
    redone(entry(2, 0, finished=flipped))(tmp_path)
    trained(spec, tmp_path, begin=STEPS)
    record = audited(tmp_path)
    assert record.findings == []
    assert "torch has changed since the run" in record.uncompared


def test_a_step_that_a_restart_made_again_differently_is_found(
    folder: Path, tmp_path: Path
) -> None:
    spec = stream(folder)
    trained(spec, tmp_path, until=2, changed=brighter)
    trained(spec, tmp_path)
    record = audited(tmp_path)
    assert [finding.kind for finding in record.findings] == ["twice"]
    assert str(PLACE) in record.findings[0].text


# What is told


def test_a_sound_run_is_compared_as_a_whole(folder: Path) -> None:
    record = audited(folder / "two")
    assert record.findings == [] and record.uncompared == ""
    assert record.num_compared == record.num_finished == 3 * PER_EPOCH
    assert all(epoch["is_complete"] for epoch in record.epochs.values())
    assert re.fullmatch("[0-9a-f]{64}", record.root)
    assert record.root == audited(folder / "whole", 0).root


def other_batch(batches: Iterator[Any]) -> Iterator[Any]:
    """At one place the model gets the micro-batch of another one a second time."""
    kept = None
    for batch in batches:
        if batch.position == PLACE:
            kept = batch
        if batch.position == OTHER:
            batch = replace(kept, position=OTHER)
        yield batch


def brighter(batches: Iterator[Any]) -> Iterator[Any]:
    """At one place one pixel is another one."""
    for batch in batches:
        if batch.position == PLACE:
            image = batch["image"].copy()
            image[3, 5, 5, 0] ^= 1
            batch = replace(batch, fields={**batch.fields, "image": image})
        yield batch


@pytest.mark.parametrize(
    ("changed", "place"),
    [(other_batch, OTHER), (brighter, PLACE)],
    ids=["exchanged", "pixel"],
)
def test_a_batch_that_the_model_should_not_have_got_is_found(
    folder: Path, tmp_path: Path, changed: Changes, place: MicroBatchId
) -> None:
    run_logged(stream(folder), tmp_path, changed=changed)
    assert audited(tmp_path, num=0).findings == [], "the record itself is whole"
    batch = audited(tmp_path).findings[0]
    assert (batch.kind, batch.micro_batch) == ("batch", str(place))


def test_changed_bytes_of_a_store_are_found_where_they_were_drawn(
    folder: Path, tmp_path: Path
) -> None:
    for name in ("train", "val"):
        shutil.copy(folder / f"{name}.lmdb", tmp_path)
    spec = stream(tmp_path)
    run_logged(spec, tmp_path / "run")
    path = tmp_path / "train.lmdb"
    content = bytearray(path.read_bytes())
    image = picture(int(spec.plan.indices(PLACE)[0]))
    content[content.index(image) + len(image) // 2] ^= 0x55
    path.write_bytes(content)
    findings = audited(tmp_path / "run").findings
    assert {finding.kind for finding in findings} == {"batch"}
    assert str(PLACE) in {finding.micro_batch for finding in findings}
    path.unlink()
    assert {finding.kind for finding in audited(tmp_path / "run").findings} == {"store"}


def test_a_run_without_hashes_says_so(folder: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(folder / "whole", tmp_path / "run"))
    shutil.rmtree(run / "digests")
    with pytest.raises(ConfigError, match=r"train\.log=\[digest\]"):
        AuditedRecord(RecordedRun(run))
