"""The audit of a run's record: it finds whatever was altered, says what, and has nothing to say of a sound one."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from logged_runs import Changes, logging_loader, record_of, run_logged
from pictures import CLASSES, picture, samples

from raypipe.config import AugmentConfig, PlanConfig, PoolConfig, TransformConfig
from raypipe.errors import ConfigError
from raypipe.history.audited import AuditedRecord
from raypipe.history.recorded import open_run
from raypipe.plan.places import Cursor, MicroBatchId
from raypipe.stores.destination import write_atomically
from raypipe.streaming.opening import open_stream
from raypipe.streaming.record import digest_log
from raypipe.streaming.spec import StreamSpec

PER_EPOCH = 4 * 4 + 4
PLACE = MicroBatchId("train", 0, 1, 2)
OTHER = MicroBatchId("train", 0, 3, 1)


def stream(train: Path, val: Path, **plan: Any) -> StreamSpec:
    return open_stream(
        train,
        val,
        plan=PlanConfig(
            epochs=2, micro_batch_size=6, global_batch_size=24, seed=3, **plan
        ),
        transform=TransformConfig(train="small", val="resize", size=12),
        pool=PoolConfig(engine="inline", max_actors=0),
    )


@pytest.fixture(scope="module")
def spec(stores: dict[str, Path]) -> StreamSpec:
    return stream(stores["train"], stores["val"])


@pytest.fixture(scope="module")
def sound(spec: StreamSpec, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole run with two ranks and augmentation on the device."""
    run = tmp_path_factory.mktemp("runs") / "sound"
    run_logged(spec, run, 2, augment=AugmentConfig(preset="light", mixup_alpha=0.4))
    return run


@pytest.fixture
def altered(sound: Path, tmp_path: Path) -> Path:
    """A copy of the run, to be altered."""
    return Path(shutil.copytree(sound, tmp_path / "altered"))


def audited(run: Path, num: int | None = None, **given: Any) -> AuditedRecord:
    """The audit of a run with all micro-batches, or a number of random ones, made again."""
    record = AuditedRecord(open_run(run, **given))
    record.check_tree()
    record.compare(record.places() if num is None else record.choose(num, seed=7))
    return record


def found(run: Path, **given: Any) -> list[tuple[str, int | None, str]]:
    return [
        (finding.kind, finding.epoch, finding.micro_batch)
        for finding in audited(run, **given).findings
    ]


def edit(run: Path, name: MicroBatchId | str, changed: str, epoch: int = 0) -> None:
    """Replace a part of the line of a micro-batch or a kind: by re.sub's text, in all ranks' files of an epoch."""
    for path in (run / "digests").glob(f"epoch-{epoch:04d}-*"):
        lines = path.read_text().splitlines(keepends=True)
        path.write_text(
            "".join(changed if f'"{name}"' in line else line for line in lines)
        )


def line(place: MicroBatchId, hash_hex: str, finished: str) -> str:
    entry = {"micro_batch": str(place), "hash": hash_hex, "finished": finished}
    return json.dumps(entry) + "\n"


def recorded(run: Path, spec: StreamSpec, place: MicroBatchId) -> digest_log.Hashes:
    return record_of(spec, run, place.epoch).hashes[place]


def write_true_roots(spec: StreamSpec, run: Path) -> None:
    """Forge the roots too, as whoever has the folder can."""
    root = record_of(spec, run).computed_root()
    text = {"kind": "root", "micro_batches": root[0], "root": root[1]}
    text |= {"finished_root": root[2]}
    edit(run, "root", json.dumps(text) + "\n")


def test_a_sound_run_has_no_findings_and_its_pixels_are_the_recorded_ones(
    sound: Path,
) -> None:
    record = audited(sound)
    assert record.findings == [] and record.uncompared == ""
    assert record.num_compared == record.num_finished == 2 * PER_EPOCH
    assert all(epoch.is_complete and epoch.fits for epoch in record.epochs.values())
    assert re.fullmatch("[0-9a-f]{64}", record.root)


def test_random_micro_batches_are_chosen_by_the_seed_over_all_epochs(
    sound: Path,
) -> None:
    record = AuditedRecord(open_run(sound))
    record.check_tree()
    chosen = record.choose(12, seed=1)
    assert len(set(chosen)) == 12 and {place.epoch for place in chosen} == {0, 1}
    assert chosen == record.choose(12, seed=1) != record.choose(12, seed=2)
    assert record.choose(1000, seed=1) == record.places()


def test_a_forged_hash_is_found_by_the_root_and_named_when_made_again(
    spec: StreamSpec, altered: Path
) -> None:
    hashes = recorded(altered, spec, PLACE)
    edit(altered, PLACE, line(PLACE, "0" * 32, hashes.finished))
    assert [f.kind for f in audited(altered, num=0).findings] == ["root"]
    assert found(altered) == [("root", 0, ""), ("hash", 0, str(PLACE))]


def test_a_forged_hash_under_a_forged_root_is_found_when_made_again(
    spec: StreamSpec, altered: Path
) -> None:
    published = audited(altered, num=0).root
    hashes = recorded(altered, spec, PLACE)
    edit(altered, PLACE, line(PLACE, "0" * 32, hashes.finished))
    write_true_roots(spec, altered)
    assert audited(altered, num=0).root != published
    assert found(altered)[0] == ("batch", 0, str(PLACE))


def test_a_forged_hash_of_a_finished_micro_batch_is_found(
    spec: StreamSpec, altered: Path
) -> None:
    hashes = recorded(altered, spec, PLACE)
    edit(altered, PLACE, line(PLACE, hashes.stream, "0" * 32))
    (root, finished) = audited(altered).findings
    assert root.kind == "root" and "finished micro-batches" in root.text
    assert (finished.kind, finished.micro_batch) == ("finished", str(PLACE))


def test_two_exchanged_lines_are_found(spec: StreamSpec, altered: Path) -> None:
    one, other = (recorded(altered, spec, place) for place in (PLACE, OTHER))
    edit(altered, PLACE, line(PLACE, *other))
    edit(altered, OTHER, line(OTHER, *one))
    root, *exchanged = audited(altered).findings
    assert root.kind == "root"
    assert [(f.kind, f.micro_batch) for f in exchanged] == [
        ("exchanged", str(PLACE)),
        ("exchanged", str(OTHER)),
    ]
    assert str(OTHER) in exchanged[0].text


def test_a_removed_line_is_found_and_named(altered: Path) -> None:
    edit(altered, PLACE, "")
    missing, root = audited(altered, num=0).findings
    assert (missing.kind, missing.micro_batch) == ("missing", str(PLACE))
    assert root.kind == "root" and "of 20 micro-batches, and 19 are" in root.text


def test_a_changed_root_is_found_and_told_from_a_changed_hash(altered: Path) -> None:
    text = {"kind": "root", "micro_batches": PER_EPOCH, "root": "0" * 64}
    edit(altered, "root", json.dumps(text) + "\n", epoch=1)
    first, second = audited(altered).findings
    assert first.kind == second.kind == "root" and second.epoch == 1
    assert "all its hashes are right, so its root was changed" in second.text


def test_removed_roots_and_epochs_are_found(altered: Path) -> None:
    edit(altered, "root", "")
    (finding,) = audited(altered, num=0).findings
    assert finding.kind == "root" and "has no root" in finding.text


@pytest.mark.parametrize(("epoch", "named"), [(0, 20), (1, 4)])
def test_removed_files_are_found_at_the_begin_and_at_the_end(
    altered: Path, epoch: int, named: int
) -> None:
    for path in (altered / "digests").glob(f"epoch-{epoch:04d}-*"):
        path.unlink()
    (missing,) = audited(altered, num=0).findings
    assert (missing.kind, missing.epoch) == ("missing", epoch)
    assert f"and {named - 3} more" in missing.text


def test_a_micro_batch_recorded_twice_with_two_hashes_is_found(
    spec: StreamSpec, altered: Path
) -> None:
    first = recorded(altered, spec, PLACE)
    edit(altered, PLACE, line(PLACE, "1" * 32, first.finished) + line(PLACE, *first))
    assert found(altered) == [("twice", 0, str(PLACE))]


def exchanged(batches: Iterator[Any]) -> Iterator[Any]:
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
    ("changed", "kind", "place"),
    [(exchanged, "exchanged", OTHER), (brighter, "batch", PLACE)],
    ids=["exchanged", "pixel"],
)
def test_a_batch_that_the_model_should_not_have_got_is_found(
    spec: StreamSpec, tmp_path: Path, changed: Changes, kind: str, place: MicroBatchId
) -> None:
    run_logged(spec, tmp_path, changed=changed)
    assert audited(tmp_path, num=0).findings == [], "the record itself is whole"
    assert found(tmp_path)[0] == (kind, 0, str(place))


def other_picture(original: bytes) -> bytes:
    """A valid JPEG of as many bytes with other pixels."""
    pixels = cv2.imdecode(np.frombuffer(original, np.uint8), cv2.IMREAD_COLOR)
    assert pixels is not None
    pixels[10:20, 10:20] = 255 - pixels[10:20, 10:20]
    smaller = cv2.imencode(".jpg", pixels, [cv2.IMWRITE_JPEG_QUALITY, 60])[1].tobytes()
    num = len(original) - len(smaller) - 2
    comment = b"\xff\xfe" + num.to_bytes(2, "big") + bytes(num - 2)
    return smaller[:2] + comment + smaller[2:]


def test_changed_bytes_of_a_store_are_traced_to_their_sample(
    stores: dict[str, Path], tmp_path: Path
) -> None:
    for name in ("train", "val"):
        shutil.copy(stores[name], tmp_path / f"{name}.lmdb")
    spec = stream(tmp_path / "train.lmdb", tmp_path / "val.lmdb")
    run_logged(spec, tmp_path / "run")
    index = int(spec.plan.indices(PLACE)[0])
    file = tmp_path / "train.lmdb"
    content = file.read_bytes()
    assert content.count(picture(index)) == 1
    file.write_bytes(content.replace(picture(index), other_picture(picture(index))))
    *batches, store = audited(tmp_path / "run").findings
    assert {finding.kind for finding in batches} == {"batch"} and len(batches) == 2
    assert store.kind == "store" and store.text.startswith(f"sample {index} (")


def test_a_store_that_was_written_again_with_another_sample_is_found(
    tmp_path: Path,
) -> None:
    train, val = (tmp_path / f"{name}.lmdb" for name in ("train", "val"))
    write_atomically(str(train), samples(48), CLASSES)
    write_atomically(str(val), samples(12), CLASSES)
    run_logged(stream(train, val), tmp_path / "run")
    train.unlink()
    changed = samples(48)
    changed[17]["image"] = picture(1000)
    write_atomically(str(train), changed, CLASSES)
    store, *batches, sample = audited(tmp_path / "run").findings
    assert store.kind == "store" and "has other contents than in the run" in store.text
    assert [finding.kind for finding in batches] == ["batch"] * 2
    assert sample.text.startswith("sample 17 (")
    train.unlink()
    assert [kind for kind, _, _ in found(tmp_path / "run")] == ["store"]


def test_runs_that_were_left_killed_or_begun_later_have_no_findings(
    spec: StreamSpec, tmp_path: Path
) -> None:
    left = tmp_path / "left"
    with logging_loader(spec, left) as loader:
        for epoch in loader.epochs():
            for batch in epoch.train:
                if batch.position.step == 2:
                    break
    assert found(left) == []
    later = tmp_path / "later"
    run_logged(spec, later, 2, cursor=Cursor(0, 2, spec.plan.fingerprint))
    record = audited(later)
    assert record.findings == [] and not record.epochs[0].is_complete
    edit(later, OTHER, "")
    assert [kind for kind, _, _ in found(later)] == ["missing"]


def test_a_run_without_hashes_or_of_other_settings_says_so(
    spec: StreamSpec, stores: dict[str, Path], tmp_path: Path, altered: Path
) -> None:
    other = stream(stores["train"], stores["val"], shuffle="off")
    logging_loader(other, altered).close()
    with logging_loader(other, altered) as loader:
        next(loader.epochs())
    (finding,) = audited(altered).findings
    assert finding.kind == "store" and "other settings made them" in finding.text
    shutil.rmtree(altered / "digests")
    with pytest.raises(ConfigError, match=r"train\.log_digest=true"):
        AuditedRecord(open_run(altered))
