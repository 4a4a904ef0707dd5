"""Steps of recorded runs, made again by their folders."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from logged_runs import logging_loader, train_all
from pictures import CLASSES, samples
from without_ray import every_batch

import raypipe
from raypipe.config import AugmentConfig, PlanConfig, PoolConfig, TransformConfig
from raypipe.errors import ConfigError
from raypipe.stores.destination import write_atomically
from raypipe.stores.memory import MemoryStore
from raypipe.streaming.hashes import batch_hash
from raypipe.streaming.spec import StreamSpec

INLINE = PoolConfig(engine="inline")
PLAN: dict[str, Any] = {
    "epochs": 3,
    "micro_batch_size": 4,
    "global_batch_size": 16,
    "seed": 3,
}
TRANSFORM = TransformConfig(
    train="small", val="resize", size=16, strength=(0.3, 1.0, 0.5)
)

PLAIN = TransformConfig(size=16)


def stream(
    train: Any, val: Any = None, plan: dict[str, Any] | None = None, **options: Any
) -> StreamSpec:
    options = {"transform": TRANSFORM, "pool": INLINE, **options}
    return raypipe.open_stream(
        train, val, plan=PlanConfig(**PLAN | (plan or {})), **options
    )


def recorded(
    folder: Path, spec: StreamSpec, workers: int = 1, **options: Any
) -> list[Any]:
    """All batches of a run by an own loop, of each rank, which is recorded in a folder."""
    batches = []
    for rank in range(workers):
        batches += train_all(logging_loader(spec, folder, rank, workers, **options))
    return batches


def check_same(folder: Path, batches: list[Any], **options: Any) -> None:
    """Check that a replay makes each batch of a run, to the bit, and lists its samples."""
    replay = raypipe.replay(folder, **options)
    assert replay.differences == []
    for batch in batches:
        place = batch.position
        again = replay.batch(place)
        assert batch_hash(batch) == batch_hash(again), place
        assert again.seed == batch.seed
        assert (again.ends_step, again.ends_split) == (
            batch.ends_step,
            batch.ends_split,
        )
        rows = replay.samples_of(place)
        assert [row["index"] for row in rows] == batch.index.tolist()
        assert [row["weight"] for row in rows] == batch.weight.tolist()
        if place.split == "train" and batch.mix is not None:
            shares = {row["mixed"]["share"] for row in rows if row["mixed"]}
            assert shares == {batch.mix.lam}


AUGMENTS = {
    "none": None,
    "mixing": AugmentConfig(
        preset="strong", mixup_alpha=(0.4, 0.35), cutmix_alpha=(1.0, 0.35)
    ),
    "kornia": AugmentConfig(
        ops=[{"op": "RandomHorizontalFlip", "p": 0.5}], strength=(0.2, 1.0, 0.5)
    ),
}


@pytest.mark.parametrize("augment", AUGMENTS.values(), ids=AUGMENTS)
def test_a_replay_makes_the_batches_of_a_loop_again(
    stores: dict[str, Path], tmp_path: Path, augment: AugmentConfig | None
) -> None:
    spec = stream(stores["train"], stores["val"], {"micro_batch_size": 8})
    with raypipe.loader(spec, run_dir=tmp_path / "run", augment=augment) as loader:
        batches = list(every_batch(loader))
    assert len(batches) == 3 * (12 + 4)
    check_same(tmp_path / "run", batches)


def sized(num: int, bad: tuple[int, ...] = ()) -> MemoryStore:
    sizes = [[(40, 60), (50, 50), (60, 40)][i % 3] for i in range(num)]
    images = [
        b"none" if i in bad else samples(1, first=i)[0]["image"] for i in range(num)
    ]
    heights, widths = zip(*sizes, strict=True)
    columns = {"width": widths, "height": heights}
    return MemoryStore(images, np.arange(num) % 5, columns=columns)


def mixture(stores: dict[str, Path]) -> StreamSpec:
    plan = {
        "mixture": {0: {"big": 3, "small": 1}, 2: {"big": 1, "small": 1}},
        "weights": 0.5,
        "aug_repeats": 2,
    }
    train_stores = {"big": stores["train"], "small": stores["val"]}
    return stream(train_stores, plan=plan, filter={"big": "label != 3"})


def buckets(stores: dict[str, Path]) -> StreamSpec:
    sizes = ["12x16", "14x14", "16x12"]
    plan = {"buckets": {"train": sizes, "val": sizes}}
    return stream(
        sized(50, bad=(3, 7)),
        sized(9),
        plan,
        transform=TransformConfig(train="light", val="center"),
    )


def windows(stores: dict[str, Path]) -> StreamSpec:
    return stream(
        stores["parquet"], stores["val"], {"shuffle": "window", "epoch_samples": 64}
    )


@pytest.mark.parametrize(
    ("made", "workers"), [(mixture, 1), (mixture, 2), (buckets, 2), (windows, 1)]
)
def test_plans_of_all_kinds_are_replayed_for_one_rank_and_two(
    stores: dict[str, Path],
    tmp_path: Path,
    made: Callable[..., StreamSpec],
    workers: int,
) -> None:
    spec = made(stores)
    batches = recorded(tmp_path / "run", spec, workers, augment=AUGMENTS["mixing"])
    given = spec.stores if made is buckets else {}
    check_same(tmp_path / "run", batches[::3], **given)
    replay = raypipe.replay(tmp_path / "run", **given)
    of_rank = replay.samples(2, rank=workers - 1)
    assert {row["rank"] for row in of_rank} == {workers - 1}
    assert {row["micro"] % workers for row in of_rank} == {workers - 1}
    assert len(of_rank) == 16 // workers


def test_samples_are_described_by_their_numbers(
    stores: dict[str, Path], tmp_path: Path
) -> None:
    steps = [
        {"RandomCrop": {"height": 16, "width": 24}},
        {"HorizontalFlip": {"p": 0.5}},
    ]
    spec = stream(
        stores["train"], transform=TransformConfig(train=steps, val="resize", size=16)
    )
    (first, *_) = recorded(tmp_path / "run", spec)
    rows = raypipe.replay(tmp_path / "run").samples(1, micro=0)
    assert [row["label"] for row in rows] == first.target.tolist()
    assert [row["class"] for row in rows] == [CLASSES[row["label"]] for row in rows]
    stored = raypipe.open_store(stores["train"])
    assert [row["name"] for row in rows] == [
        stored.sample_name(row["index"]) for row in rows
    ]
    assert len({row["seed"] for row in rows}) == 4
    from raypipe.transform.decode.rgb import decode

    for row, image in zip(rows, first.image, strict=True):
        crop, *flips = row["drawn"]
        assert crop["op"] == "crop"
        top, left, height, width = crop["numbers"]
        assert (height, width) == (16, 24)
        pixels = decode(stored.read(np.array([row["index"]]))["image"][0])[
            top : top + 16, left : left + 24
        ]
        if flips:
            assert flips == [{"op": "turn", "numbers": [1]}]
            pixels = pixels[:, ::-1]
        assert np.array_equal(image.permute(1, 2, 0).numpy(), pixels)


NOT_NORMALIZED: dict[str, Any] = {"mean": (0.0,) * 3, "std": (1.0,) * 3}


def augmented(replay: Any, batches: list[Any]) -> Iterator[tuple[Any, ...]]:
    """Yield what is told of each sample, and its pixels before and after the augmentation."""
    for batch in batches:
        host = replay.remade(batch.position).host["image"]
        before = torch.from_numpy(host).movedim(-1, 1) / 255
        rows = replay.samples_of(batch.position)
        yield from zip(rows, before, batch.image, strict=True)


def test_device_presets_are_described_by_their_numbers(
    stores: dict[str, Path], tmp_path: Path
) -> None:
    augment = AugmentConfig(**NOT_NORMALIZED, preset="light")
    batches = recorded(tmp_path / "run", stream(stores["train"]), augment=augment)
    replay = raypipe.replay(tmp_path / "run")
    flips = set()
    for row, pixels, image in augmented(replay, batches[:6]):
        (drawn,) = row["augmented"]
        assert drawn["op"] == "preset" and len(drawn["box"]) == 4
        flips.add(drawn["flip"])
        expected = pixels.flip(2) if drawn["flip"] else pixels
        assert torch.allclose(image, expected, atol=1e-4)
    assert flips == {False, True}


@pytest.mark.parametrize("as_module", [False, True], ids=["ops", "module"])
def test_kornias_operations_are_described_by_their_numbers(
    as_module: bool, stores: dict[str, Path], tmp_path: Path
) -> None:
    from kornia.augmentation import RandomSolarize

    numbers = {"thresholds": 0.4, "additions": 0.0, "p": 0.5}
    if as_module:
        module = torch.nn.Sequential(RandomSolarize(0.4, 0.0, p=0.5))
        augment = AugmentConfig(**NOT_NORMALIZED, module=module)
    else:
        augment = AugmentConfig(
            **NOT_NORMALIZED, ops=[{"op": "RandomSolarize", **numbers}]
        )
    batches = recorded(tmp_path / "run", stream(stores["train"]), augment=augment)
    given = {"augment": augment} if as_module else {}
    replay = raypipe.replay(tmp_path / "run", **given)
    num_applied = 0
    for row, pixels, image in augmented(replay, batches[:4]):
        for applied in row["augmented"]:
            is_kept = pixels < applied["thresholds"]
            pixels = torch.where(is_kept, pixels, 1 - pixels)
        num_applied += len(row["augmented"])
        assert torch.allclose(image, pixels, atol=1e-4)
    assert 0 < num_applied < 16


@pytest.mark.parametrize("has_record", [True, False], ids=["recorded", "found again"])
def test_substitutes_of_bad_samples_are_listed(
    tmp_path: Path, has_record: bool
) -> None:
    quarantine = str(tmp_path / "bad") if has_record else ""
    spec = stream(sized(40, bad=(3, 7)), sized(9, bad=(2,)), quarantine=quarantine)
    batches = recorded(tmp_path / "run", spec)
    assert sum(batch.num_bad for batch in batches) > 3
    check_same(tmp_path / "run", batches, **spec.stores)
    replay = raypipe.replay(tmp_path / "run", **spec.stores)
    bad = [
        row for step in replay.steps_in(0) for row in replay.samples(step) if row["bad"]
    ]
    assert bad and not {3, 7} & {row["index"] for row in bad}


def test_a_sample_that_only_the_run_could_not_read_is_left_out_again(
    stores: dict[str, Path], tmp_path: Path
) -> None:
    """As one that killed its actors, or took too long: it can be read here."""
    spec = stream(stores["train"], quarantine=str(tmp_path / "bad"))
    recorded(tmp_path / "run", spec)
    replay = raypipe.replay(tmp_path / "run")
    (place,) = replay.micro_batches(2, micro=1)
    index = replay.draws(place).indices[2]
    made, bad = replay.remade(place).maker.maker.make(
        place, excluded={int(index): "it killed its actor"}
    )
    from raypipe.streaming.bad_samples import record_bad

    record_bad((tmp_path / "bad").as_uri(), place, bad)
    rows = raypipe.replay(tmp_path / "run").samples(2, micro=1)
    assert (
        [row["index"] for row in rows]
        == made.index.tolist()
        != replay.plan.indices(place).tolist()
    )
    assert rows[2]["bad"] == "it killed its actor"
    assert raypipe.replay(tmp_path / "run")[2, 1].index.tolist() == made.index.tolist()


def test_a_pipeline_of_albumentations_is_in_the_record(
    stores: dict[str, Path], tmp_path: Path
) -> None:
    import albumentations.pytorch

    pipeline = albumentations.Compose(
        [
            albumentations.RandomResizedCrop((16, 16)),
            albumentations.GaussNoise(p=1),
            albumentations.Normalize(),
            albumentations.pytorch.ToTensorV2(),
        ]
    )
    spec = stream(stores["train"], train_transform=pipeline, transform=PLAIN)
    batches = recorded(tmp_path / "run", spec)
    assert batches[0].image.dtype == torch.float32
    check_same(tmp_path / "run", batches[:8])


def test_an_object_is_given_again(stores: dict[str, Path], tmp_path: Path) -> None:
    offset = 3

    def shifted(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        return image[:16, :16] + np.uint8(offset + rng.integers(3))

    module = torch.nn.Sequential(torch.nn.AvgPool2d(2))
    spec = stream(stores["train"], train_transform=shifted, transform=PLAIN)
    with raypipe.loader(spec, run_dir=tmp_path / "run", augment=module) as loader:
        batches = list(every_batch(loader))
    replay = raypipe.replay(tmp_path / "run")
    with pytest.raises(
        ConfigError, match=r"train_transform was an object.*replay\(run, train_transf"
    ):
        replay[1]
    with pytest.raises(
        ConfigError, match=r"augment\.module was an object.*replay\(run, augment=…\)"
    ):
        raypipe.replay(tmp_path / "run", train_transform=shifted)[1]
    indices = [row["index"] for row in replay.samples(1)]
    assert indices == [index for batch in batches[:4] for index in batch.index.tolist()]
    check_same(tmp_path / "run", batches[:4], train_transform=shifted, augment=module)


def test_a_resume_with_other_ranks_and_settings_holds_from_its_step_on(
    stores: dict[str, Path], tmp_path: Path
) -> None:
    spec = stream(stores["train"])
    batches: list[Any] = []
    # after 8 steps the run goes back to step 5, with two ranks and another augmentation
    strong = AugmentConfig(preset="strong")
    for step, workers, num, augment in ((0, 1, 4 * 8, None), (5, 2, None, strong)):
        cursor = spec.plan.cursor_at(step)
        with logging_loader(
            spec, tmp_path / "run", 0, workers, cursor, augment
        ) as loader:
            of_start = itertools.islice(next(loader.epochs()).train, num)
            batches = batches[: 4 * step] + list(of_start)
    check_same(tmp_path / "run", batches)
    replay = raypipe.replay(tmp_path / "run")
    assert {row["rank"] for row in replay.samples(5)} == {0}
    assert {row["rank"] for row in replay.samples(6)} == {0, 1}
    with pytest.raises(
        ConfigError,
        match=r"number m on rank m mod 1: rank 1 had no number None",
    ):
        replay.samples(5, rank=1)
    with pytest.raises(ConfigError, match=r"m mod 2: rank 0 had no number 3"):
        replay.samples(6, rank=0, micro=3)


def test_a_store_that_has_gone_leaves_the_order(tmp_path: Path) -> None:
    store = tmp_path / "train.lmdb"
    write_atomically(str(store), samples(50), CLASSES)
    batches = recorded(tmp_path / "run", stream(store))
    shutil.move(store, tmp_path / "moved.lmdb")
    replay = raypipe.replay(tmp_path / "run")
    assert "train.lmdb" in replay.differences[0]
    rows = replay.samples(1, micro=0)
    assert [row["index"] for row in rows] == batches[0].index.tolist()
    assert {row["label"] for row in rows} == {None}
    with pytest.raises(
        ConfigError, match=r"pixels of .* cannot be made again: .*train\.lmdb.*order"
    ):
        replay[1]
    check_same(tmp_path / "run", batches[:8], train=tmp_path / "moved.lmdb")


def test_a_store_with_other_contents_is_named_before_pixels_are_made(
    tmp_path: Path,
) -> None:
    store = tmp_path / "train.lmdb"
    write_atomically(str(store), samples(50), CLASSES)
    recorded(tmp_path / "run", stream(store))
    shutil.rmtree(store) if store.is_dir() else store.unlink()
    write_atomically(str(store), samples(50, first=7), CLASSES)
    replay = raypipe.replay(tmp_path / "run")
    assert "other contents than in the run" in replay.differences[0]
    with pytest.raises(ConfigError, match=r"other contents.*anyway=True"):
        replay[1]
    assert raypipe.replay(tmp_path / "run", anyway=True)[1, 0].image.shape == (
        4,
        3,
        16,
        16,
    )


def test_versions_and_code_that_changed_are_named(
    stores: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = recorded(tmp_path / "run", stream(stores["train"]))
    from raypipe.history import recorded_stream

    monkeypatch.setattr(recorded_stream, "versions", lambda: {"numpy": "9.9"})
    monkeypatch.setattr(recorded_stream, "user_code", lambda: {"test_replay": "x"})
    replay = raypipe.replay(tmp_path / "run")
    code = replay.stream.record.code["test_replay"]
    assert replay.differences == [
        f"test_replay has changed since the run: it is x, and was {code}.",
        f"numpy has changed since the run: it is 9.9, and was {np.__version__}.",
    ]
    assert batch_hash(replay[1, 0]) == batch_hash(batches[0])


def test_code_that_changed_between_two_starts_is_named(
    stores: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from raypipe.history import recorded_stream
    from raypipe.streaming.record import opened

    spec = stream(stores["train"])
    for step, code in ((0, "a"), (5, "b")):
        now = {"mod": code}
        monkeypatch.setattr(opened, "user_code", now.copy)
        cursor = spec.plan.cursor_at(step)
        with logging_loader(spec, tmp_path / "run", cursor=cursor) as loader:
            next(iter(next(loader.epochs()).train))
    monkeypatch.setattr(recorded_stream, "user_code", now.copy)
    assert raypipe.replay(tmp_path / "run").differences == [
        "mod has changed since the run: it is b, and was a."
    ]


def test_wrong_steps_and_folders_are_errors_that_say_what_there_is(
    stores: dict[str, Path], tmp_path: Path
) -> None:
    recorded(tmp_path / "run", stream(stores["train"]))
    replay = raypipe.replay(tmp_path / "run")
    with pytest.raises(
        ConfigError, match=r"counted as in metrics.jsonl, and no step 0"
    ):
        replay[0]
    with pytest.raises(ConfigError, match="has the epochs 0 to 2, and no epoch 3"):
        replay.steps_in(3)
    with pytest.raises(ConfigError, match="step 1 had the micro-batches 0 to 3"):
        replay[1, 4]
    with pytest.raises(ConfigError, match="nowhere does not exist, or has no start"):
        raypipe.replay(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(
        ConfigError, match=r"has no start in its metrics.jsonl: give the folder"
    ):
        raypipe.replay(tmp_path / "empty")
    with pytest.raises(
        ConfigError, match=r"unknown argument 'trian'.*did you mean train"
    ):
        raypipe.replay(tmp_path / "run", trian="x")


def test_a_comparison_says_where_two_runs_part(
    stores: dict[str, Path], tmp_path: Path
) -> None:
    def compared(name: str, plan: Any = None, **changes: Any) -> dict[str, Any]:
        """The comparison of a run with the first one."""
        spec = stream(stores["train"], stores["val"], plan, **changes)
        recorded(tmp_path / name, spec)
        first, second = (raypipe.replay(tmp_path / each) for each in ("first", name))
        return first.compare(second)

    same = compared("first")
    assert same["equal"] and not same["settings"] and same["loss"] is None
    assert (same["order"], same["compared_steps"]) == (None, 18)
    assert (same["pixels"], same["made_steps"]) == (None, [1, 7, 13])
    seed = compared("seed", {"seed": 4})
    assert (seed["equal"], seed["order"], seed["made_steps"]) == (False, 1, [])
    assert seed["settings"]["plan.seed"] == (3, 4)
    larger = replace(TRANSFORM, size={0: 16, 1: 24})
    resized = compared("resized", transform=larger)
    assert (resized["order"], resized["pixels"]) == (None, 7)
    skipped = compared("skipped", {"skip": ["1..2", 7]})
    assert (skipped["order"], skipped["equal"]) == (1, False)
    itself = raypipe.replay(tmp_path / "skipped")
    same = itself.compare(itself)
    assert (same["equal"], same["unknown"], same["made_steps"]) == (True, "", [13])
