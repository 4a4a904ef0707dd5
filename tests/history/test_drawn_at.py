"""The draws of samples by a run's folder, against the batches that its loop got."""

from __future__ import annotations

import json
import shutil
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import without_ray
from logged_runs import logging_loader
from small_runs import run_command

import raypipe
from raypipe.commands.when import index_or_name, print_when, when
from raypipe.config import PlanConfig, PoolConfig, TransformConfig
from raypipe.errors import ConfigError
from raypipe.history.drawn_at import History, index_of
from raypipe.history.recorded import RecordedRun

from pictures import picture  # isort: skip

NUM_QUERIES = 1000
Seen = dict[tuple[str, int], list[tuple[int, int, int, int]]]
"""The epoch, step, micro-batch and row of each time that a sample was in a batch, by split and index."""

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "filter": {"filter": "label != 2"},
    "weights": {"plan": {"weights": 1.0, "epoch_samples": 32}},
    "repeats": {"plan": {"aug_repeats": 2}},
    "skipped": {"plan": {"skip": ["2..3", 8]}},
    "mixture": {"plan": {"mixture": {"a": 1, "b": 2}}, "train": ["a", "b"]},
    "weighted mixture": {
        "plan": {"mixture": {0: {"a": 1, "b": 2}, 1: {"a": 3, "b": 1}}, "weights": 0.5},
        "train": ["a", "b"],
    },
    "windows": {"train": "a.parquet", "plan": {"shuffle": 2}},
    "buckets": {
        "plan": {"buckets": ["8x10", "10x8"], "aug_repeats": 2, "shuffle": "global"},
        "train": "a.parquet",
    },
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stores a and b of 40 images in three classes, of two shapes, two of a no images; and a as Parquet."""
    rows = []
    root = tmp_path_factory.mktemp("stores")
    for number in range(80):
        name = "a" if number < 40 else "b"
        path = root / name / f"class{number % 3}" / f"{number:03}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        sides = (8, 10) if number % 4 else (10, 8)
        image = b"no image" if number in (4, 9) else picture(number, *sides)
        path.write_bytes(image)
        row = {"image": image, "label": number % 3}
        rows.append(row | {"height": sides[0], "width": sides[1]})
    table = pa.Table.from_pylist(rows[:40])
    pq.write_table(table, root / "a.parquet", row_group_size=6)
    return root


def spec_of(
    folder: Path, plan: dict[str, Any], train: Any = "a", **options: Any
) -> Any:
    sizes = {"epochs": 3, "micro_batch_size": 4, "global_batch_size": 8, "seed": 5}
    if isinstance(train, list):
        address: Any = {name: str(folder / name) for name in train}
    else:
        address = str(folder / train)
    return raypipe.open_stream(
        address,
        str(folder / "b"),
        plan=PlanConfig(**sizes | plan),
        transform=TransformConfig(train="small", size=8, max_bad_fraction=0.5),
        pool=PoolConfig(engine="inline"),
        **options,
    )


def trained(spec: Any, run_dir: Path, world_size: int) -> Seen:
    """What the ranks saw of a run that was killed in its second epoch, and continued from its third step on."""
    seen: Seen = defaultdict(list)
    by_place: dict[Any, list[int]] = {}
    killed_at = spec.plan.steps_per_epoch + 2
    for begin, end in ((0, killed_at), (2, 1 << 20)):
        for rank in range(world_size):
            cursor = spec.plan.cursor_at(begin)
            with logging_loader(spec, run_dir, rank, world_size, cursor) as loader:
                for batch in until(loader, end):
                    by_place[batch.position] = batch.index.tolist()
    for at, indices in by_place.items():
        step = spec.plan.global_step(at) + (at.split == "train")
        for row, index in enumerate(indices):
            seen[at.split, index].append((at.epoch, step, at.micro, row))
    return seen


def until(loader: Any, step: int) -> Iterator[Any]:
    for batch in without_ray.every_batch(loader):
        yield batch
        if loader.global_step >= step:
            return


# Each kind but the slowest is of the default tier, with one rank or two.
RANKS = [
    pytest.param(kind, ranks, marks=[pytest.mark.system] * is_slow)
    for number, kind in enumerate(KINDS)
    for ranks in (1, 2)
    for is_slow in [kind == "windows" or number % 2 == ranks % 2]
]


@pytest.mark.parametrize(("kind", "world_size"), RANKS)
def test_samples_are_found_where_a_killed_runs_loop_saw_them(
    kind: str, world_size: int, folder: Path, tmp_path: Path
) -> None:
    options = {"plan": {}} | KINDS[kind]
    quarantine = str(tmp_path / "run" / "quarantine")
    spec = spec_of(folder, **options, quarantine=quarantine)
    seen = trained(spec, tmp_path / "run", world_size)
    history = History(RecordedRun(tmp_path / "run"))
    rng = np.random.default_rng(1)
    num_samples = len(spec.stores["train"])
    num_found = 0
    for index in rng.integers(0, num_samples, NUM_QUERIES // len(KINDS)).tolist():
        found = history.of(index)
        draws = [
            tuple(draw[name] for name in ("epoch", "step", "micro", "row"))
            for draw in found["draws"]
            if not draw["was_bad"]
        ]
        assert sorted(draws) == sorted(seen["train", index])
        assert all(draw["has_come"] for draw in found["draws"])
        assert all(
            draw["rank"] == draw["micro"] % world_size for draw in found["draws"]
        )
        num_found += len(draws)
    assert num_found
    for index in range(40):
        steps = [draw["step"] for draw in history.of(index, "val")["draws"]]
        assert steps == [step for _, step, *_ in sorted(seen["val", index])]


def test_validations_of_an_earlier_start_are_found(
    folder: Path, tmp_path: Path
) -> None:
    for epochs in (1, 3):
        plan = {"epochs": epochs, "val_interval": 2}
        spec = spec_of(folder, plan, "b", quarantine=str(tmp_path / "quarantine"))
        with raypipe.loader(spec, run_dir=tmp_path) as loader:
            for _ in without_ray.every_batch(loader):
                pass
            loader.checkpoint()
    replay = raypipe.replay(tmp_path)
    steps = [5 * epoch for epoch in (1, 2, 3)]
    assert [draw["step"] for draw in replay.when(3, "val")["draws"]] == steps
    place = replay.place_of("val-e0000-s000000-m000")
    assert replay.batch(place).position == place


def test_bad_samples_of_epochs_that_a_resume_left_out_are_no_error(
    folder: Path, tmp_path: Path
) -> None:
    for epochs, begin in ((2, 0), (1, 3)):
        quarantine = str(tmp_path / "quarantine")
        spec = spec_of(folder, {"epochs": epochs}, quarantine=quarantine)
        cursor = spec.plan.cursor_at(begin)
        with logging_loader(spec, tmp_path, cursor=cursor) as loader:
            assert list(without_ray.every_batch(loader))
    found = when(str(tmp_path), bad=True)["samples"]
    assert {Path(sample["name"]).name for sample in found} == {"004.png", "009.png"}
    assert {draw["epoch"] for sample in found for draw in sample["draws"]} == {0}


# The command


@pytest.fixture(scope="module")
def run_dir(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was left after 7 of 15 steps."""
    root = tmp_path_factory.mktemp("runs") / "run"
    spec = spec_of(folder, {}, quarantine=str(root / "quarantine"))
    with raypipe.loader(spec, run_dir=root) as loader:
        for epoch in loader.epochs():
            for batch in epoch.train:
                if batch.ends_step and loader.global_step == 7:
                    return root
    raise AssertionError


def test_draws_have_come_or_are_to_come_by_the_runs_step(run_dir: Path) -> None:
    found = when(str(run_dir), "20")
    (sample,) = found["samples"]
    assert (found["step"], found["to_step"], sample["index"]) == (7, 15, 20)
    draws = sample["draws"]
    assert all(draw["has_come"] == (draw["step"] <= 7) for draw in draws)
    assert sample["num_drawn"] + sample["num_to_come"] == len(draws) > 0
    *_, folder, file = sample["name"].split("/")
    for name in (sample["name"], f"{folder}/{file}", file):
        assert when(str(run_dir), name)["samples"] == [sample]


def test_a_step_of_the_records_has_come_before_the_status_says_so(
    run_dir: Path, tmp_path: Path
) -> None:
    """A kill leaves a status of some seconds before."""
    killed = shutil.copytree(run_dir, tmp_path / "killed")
    status = json.loads((killed / "status.json").read_text())
    (killed / "status.json").write_text(json.dumps(status | {"step": 1}))
    with (killed / "metrics.jsonl").open("a") as records:
        records.write('{"kind": "train", "step": 6, "loss": 1.0}\n')
    assert when(str(killed), "20")["step"] == 6


def test_a_run_that_has_moved_keeps_its_bad_samples(
    run_dir: Path, tmp_path: Path
) -> None:
    shutil.copytree(run_dir, tmp_path / "moved")
    for path in (tmp_path / "moved" / "quarantine").iterdir():
        path.write_text(path.read_text().replace("not an image", "moved"))
    bad = when(str(tmp_path / "moved"), bad=True)["samples"]
    assert bad and all("moved" in sample["error"] for sample in bad)
    replayed = raypipe.replay(tmp_path / "moved")
    assert [replayed.when(sample["index"])["draws"][0] for sample in bad] == [
        sample["draws"][0] for sample in bad
    ]


def test_bad_samples_are_found_with_their_substitutes(run_dir: Path) -> None:
    samples = when(str(run_dir), bad=True)["samples"]
    assert {Path(sample["name"]).name for sample in samples} == {"004.png", "009.png"}
    for sample in samples:
        assert "not an image" in sample["error"]
        replaced = [draw for draw in sample["draws"] if draw["has_come"]]
        assert replaced
        for draw in replaced:
            other = when(str(run_dir), str(draw["replaced_by"]))["samples"][0]
            place = ("step", "micro", "row")
            assert [
                [each[name] for name in place]
                for each in other["draws"]
                if each["instead_of"] == sample["index"]
            ] == [[draw[name] for name in place]]


def test_what_is_not_there_is_named(run_dir: Path) -> None:
    with pytest.raises(ConfigError, match="has the samples 0 to 39, and no sample 40"):
        when(str(run_dir), "40")
    with pytest.raises(ConfigError, match=r"no sample of .* has the name 'x.png'"):
        when(str(run_dir), "x.png")
    with pytest.raises(ConfigError, match="needs one of: a sample, --bad"):
        when(str(run_dir))
    with pytest.raises(ConfigError, match="needs one of: a sample, --bad"):
        when(str(run_dir), "1", bad=True)
    assert index_or_name("12") == 12 and index_or_name("012") == "012"


def test_a_name_of_several_samples_is_rejected(tmp_path: Path) -> None:
    class Store:
        address = "store"
        schema = pa.schema([])

        def __len__(self) -> int:
            return 3

        def sample_name(self, index: int) -> str:
            return f"{index}/same.png"

    with pytest.raises(ConfigError, match=r"3 samples .* such as 0 \(0/same.png\)"):
        index_of(Store(), "same.png")  # type: ignore[arg-type]
    assert index_of(Store(), "1/same.png") == 1  # type: ignore[arg-type]


def test_the_command_prints_rows(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = when(str(run_dir), "20")
    print_when(told)
    first, *lines = capsys.readouterr().out.splitlines()
    assert first == f"{run_dir}: step 7 of 15"
    num = len(told["samples"][0]["draws"])
    assert lines[-num].split()[5:] == ["yes", "no", "none", "none"]
    assert lines[-1].split()[5] == "no"
    print_when(when(str(run_dir), bad=True))
    out = capsys.readouterr().out
    assert "004.png" in out and "not an image" in out


# Flags


def test_flagged_batches_are_listed_with_their_samples(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = spec_of(folder, {"epochs": 1}, "b")
    expected = []
    with raypipe.loader(spec, run_dir=tmp_path) as loader:
        epoch = next(loader.epochs())
        for batch in epoch.train:
            at = batch.position
            if at.step in (1, 3):
                loader.flag(batch, f"loss {at.micro}")
                samples = batch.index.tolist()
                expected.append((str(at), at.step + 1, f"loss {at.micro}", samples))
        (batch, *_) = epoch.val
        for reason in ("odd", "odd", "very odd"):
            loader.flag(batch, reason)
    samples = batch.index.tolist()
    expected += [
        (str(batch.position), 5, each, samples) for each in ("odd", "very odd")
    ]
    told = run_command(capsys, "when", tmp_path, "--flagged", "--json")
    found = []
    for flag in told["flags"]:
        assert all(sample["name"].endswith(".png") for sample in flag["samples"])
        indices = [sample["index"] for sample in flag["samples"]]
        found.append((flag["place"], flag["step"], flag["reason"], indices))
    assert found == expected
    print_when(told)
    assert "very odd" in capsys.readouterr().out.splitlines()[-1]


def test_a_flag_needs_a_folder_and_survives_one_that_fails(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spec = spec_of(folder, {"epochs": 1}, "b")
    with raypipe.loader(spec) as loader:
        batch = next(iter(next(loader.epochs()).train))
        with pytest.raises(ConfigError, match=r"run_dir=…"):
            loader.flag(batch, "odd")
    with raypipe.loader(spec, run_dir=tmp_path) as loader:
        batch = next(iter(next(loader.epochs()).train))
        (tmp_path / "flags").write_text("in the way")
        loader.flag(batch, "odd")
    assert "cannot be written" in caplog.text


def test_a_replay_goes_around_steps_that_were_skipped_after_a_resume(
    folder: Path, tmp_path: Path
) -> None:
    for skip, end in (([], 4), (["7..8", 10], 1 << 20)):
        spec = spec_of(folder, {"skip": skip}, "b")
        with raypipe.loader(spec, run_dir=tmp_path) as loader:
            for batch in until(loader, end):
                if batch.ends_step and loader.global_step == end:
                    loader.checkpoint()
    replay = raypipe.replay(tmp_path)
    assert [len(batches) for batches in replay] == [2] * 12
    assert replay[9, 1].ends_split and not replay[6, 1].ends_split
    assert replay[15, 1].ends_split
    with pytest.raises(ConfigError, match=r"step 8 was left out by plan\.skip"):
        replay[8, 0]
