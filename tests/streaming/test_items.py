"""Streams of Datasets: items under their keys, in this process and by actors."""

from __future__ import annotations

import copy
import io
import itertools
import json
import pickle
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import cv2
import noisy_dataset
import numpy as np
import pytest
import torch
from micro_batches import EncodedSample, slow_one
from noisy_dataset import Noisy
from PIL import Image, ImageFile
from ray import cloudpickle
from same_stream import Way, assert_same_stream
from torch.utils.data import (
    ConcatDataset,
    Dataset,
    IterableDataset,
    Subset,
    get_worker_info,
)

import raypipe
from raypipe.config import PlanConfig, PoolConfig, TransformConfig
from raypipe.device.prefetcher import Batch, on_device
from raypipe.errors import ConfigError, CursorError, TransformError
from raypipe.streaming.inline import inline_batches
from raypipe.streaming.items import DatasetItems
from raypipe.streaming.sample_makers import SampleMakers

PLAN = PlanConfig(epochs=2, micro_batch_size=4, global_batch_size=8, seed=3)
INLINE = PoolConfig(engine="inline")
UNIT: Any = (0.0, 1.0)


class Told(Dataset[Any]):
    """Fails, or gives another shape, on some items."""

    def __init__(self, bad: Sequence[int] = (), odd: Sequence[int] = ()) -> None:
        self.bad = bad
        self.odd = odd

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> torch.Tensor:
        if index in self.bad:
            raise ValueError("the file is empty")
        return torch.full((3,) if index in self.odd else (2,), float(index))


class Counts(Told):
    num = 0

    def __getitem__(self, index: int) -> torch.Tensor:
        self.num += 1
        return torch.tensor(self.num)


def stream(train: Any, val: Any = None, **more: Any) -> raypipe.StreamSpec:
    return raypipe.open_stream(train, val, **{"plan": PLAN, "pool": INLINE} | more)


def batches(spec: raypipe.StreamSpec, split: str = "train") -> list[Batch]:
    """The batches of the first epoch."""
    with raypipe.loader(spec) as loader:
        epoch = next(loader.epochs())
        train = list(epoch.train)
        return train if split == "train" else list(epoch.val)


@pytest.fixture
def for_actors() -> Iterator[None]:
    """Actors do not find modules of tests."""
    cloudpickle.register_pickle_by_value(noisy_dataset)
    yield
    cloudpickle.unregister_pickle_by_value(noisy_dataset)


@pytest.mark.cluster
@pytest.mark.usefixtures("for_actors", "ray_cluster")
def test_actors_make_the_items_that_this_process_makes() -> None:
    spec = stream(Noisy(), Noisy(11), pool=PoolConfig(max_actors=2))
    assert_same_stream(
        spec,
        Way(actors=2),
        Way(workers=2, block=3, from_step=2),
        Way(head_start=3),
        Way(actors=2, kills=1),
    )


def test_a_batch_has_what_collate_fn_makes_of_its_items() -> None:
    for batch in batches(stream(Noisy())):
        noise, facts = batch.collated
        assert noise.shape == (4, 6) and facts["index"].dtype == torch.int64
        assert facts["index"].tolist() == batch.index.tolist()
        assert facts["name"] == [f"sample {index}" for index in batch.index]
    spec = stream(Told(), collate_fn=lambda items: {"sum": sum(items), "items": items})
    for batch in batches(spec):
        assert batch.collated["sum"].tolist() == [batch.index.sum()] * 2
        assert len(batch.collated["items"]) == 4


def test_items_may_differ_in_shape_from_batch_to_batch() -> None:
    spec = stream(Told(odd=range(20)), collate_fn=tuple)
    sizes = [[len(item) for item in batch.collated] for batch in batches(spec)]
    assert {size for batch in sizes for size in batch} == {2, 3}


class DrawsSometimes(Told):
    """Draws on few items, each time from other generators."""

    def __getitem__(self, index: int) -> Any:
        value = super().__getitem__(index)
        if index == 13:
            return value + random.random()
        if index == 14:
            return value + torch.rand(())
        if index == 16:
            return value + 1 / (2 + torch.initial_seed() % 1000)
        if index == 15:
            return value + float(cv2.randu(np.zeros(1), *UNIT).item())
        return value + np.random.normal() if index % 17 == 8 else value


@pytest.mark.parametrize("micro_batch_size", [4, 20])
def test_rare_draws_are_under_the_keys_of_their_items(micro_batch_size: int) -> None:
    plan = PlanConfig(epochs=3, micro_batch_size=micro_batch_size, seed=3)
    spec = stream(DrawsSometimes(), plan=plan)
    drawn = set[float]()
    with raypipe.loader(spec) as loader:
        for batch in (batch for epoch in loader.epochs() for batch in epoch.train):
            draws = spec.plan.draw(batch.position)
            maker = SampleMakers(spec).get(batch.position)
            for row, key in enumerate(spec.plan.sample_keys("train", draws).tolist()):
                index = int(batch.index[row])
                sample = EncodedSample(index.to_bytes(8, "little"))
                alone = slow_one(maker, sample, key)["item"]
                assert alone.equal(batch.collated[row]), index
                drawn |= {float(alone[0])} if alone[0] % 1 else set()
    assert len(drawn) == 6 * 3


_GENERATOR = np.random.default_rng()
_SHIFT = 0


class OfScript(Told):
    """Its code uses globals of its script."""

    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index) + _SHIFT + _GENERATOR.random()


@pytest.fixture
def as_script() -> Iterator[None]:
    """Classes of this module are pickled as those of a script or a notebook."""
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    yield
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


class OfLibraries(Told):
    """What it makes depends on settings of torch and Pillow, and on torch's number of threads."""

    def __init__(self, *data: bytes) -> None:
        super().__init__()
        self.data = data

    def __getitem__(self, index: int) -> Any:
        pictures = [Image.open(io.BytesIO(data)).convert("L") for data in self.data]
        sums = torch.rand(3, 512, 512).sum()
        threads = torch.get_num_threads()
        return sums, torch.tensor(0.5), threads, *map(np.array, pictures)


@pytest.mark.cluster
@pytest.mark.usefixtures("as_script", "ray_cluster")
def test_actors_have_the_users_settings_of_libraries_and_one_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    for name in ("OPEN", "ID", "SAVE"):
        monkeypatch.setattr(Image, name, copy.copy(getattr(Image, name)))
    pillow_heif = pytest.importorskip("pillow_heif")
    pillow_heif.register_heif_opener()
    gray = Image.new("L", (64, 64), 200)
    files = [io.BytesIO(), io.BytesIO()]
    for file, kind in zip(files, ("jpeg", "heif"), strict=True):
        gray.save(file, kind)
    data = files[0].getvalue()[:-20], files[1].getvalue()
    num_threads = torch.get_num_threads()
    torch.set_num_threads(2)
    torch.set_default_dtype(torch.float64)
    try:
        spec = stream(OfLibraries(*data), pool=PoolConfig(max_actors=2))
        assert_same_stream(spec, Way(actors=2), Way(head_start=3))
        for batch in batches(stream(OfLibraries(*data))):
            sums, half, threads, *_ = batch.collated
            assert sums.dtype == half.dtype == torch.float64
            assert threads.tolist() == [1] * 4
        assert torch.get_num_threads() == 2
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_num_threads(num_threads)


@pytest.mark.usefixtures("as_script")
def test_a_class_of_a_script_keeps_its_methods_and_what_they_refer_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    method = OfScript.__getitem__
    made = dict[int, set[float]]()
    for size in (1, 4):
        plan = PlanConfig(epochs=1, micro_batch_size=size, seed=3)
        for batch in batches(stream(OfScript(), plan=plan)):
            for index, item in zip(batch.index.tolist(), batch.collated, strict=True):
                made.setdefault(index, set()).add(float(item[0]))
    assert len(made) == 40 and all(len(values) == 1 for values in made.values())
    assert OfScript.__getitem__ is method
    monkeypatch.setattr(sys.modules[__name__], "_SHIFT", 1000)
    assert OfScript()[0][0] >= 1000


def test_a_nest_outlives_the_slot_of_the_ring_that_it_came_in() -> None:
    spec = stream(Told(odd=range(20)), collate_fn=tuple)
    hosts = inline_batches(spec, spec.plan.start())
    ring = on_device(hosts, torch.device("cpu"), spec.plan.micro_batch_seed, ring=True)
    kept = [batch.collated for batch in itertools.islice(ring, 10)]
    for nest, batch in zip(kept, batches(spec), strict=True):
        assert all(map(torch.equal, nest, batch.collated))


def test_a_validation_has_each_sample_once() -> None:
    validation = batches(stream(Told(), Noisy(11)), "val")
    nests = [batch.collated for batch in validation]
    indices = [nest[1]["index"] for nest in nests if nest is not None]
    assert torch.cat(indices).tolist() == list(range(11))


def test_a_share_of_a_dataset_is_held_out_for_its_validation(tmp_path: Path) -> None:
    bad = {"fingerprint": stream(Told()).stores["train"].fingerprint}
    exclude = tmp_path / "bad.json"
    exclude.write_text(json.dumps(bad | {"bad": [{"index": 3}]}))
    spec = stream(Told(), take={"val": "25%"}, exclude=exclude)
    trained = {index for batch in batches(spec) for index in batch.index}
    nests = [batch.collated for batch in batches(spec, "val")]
    held_out = {int(row[0]) for nest in nests if nest is not None for row in nest}
    assert trained and held_out and not trained & held_out
    assert len(held_out | {3}) >= 10 and 3 not in trained | held_out


@pytest.mark.parametrize(
    "dataset",
    [
        Subset(Told(), range(7, 40)),
        ConcatDataset([Told(), Told()]),
        [torch.tensor([float(number)]) for number in range(40)],
        np.arange(80.0).reshape(40, 2),
    ],
)
def test_whatever_is_read_by_index_is_a_dataset(dataset: Any) -> None:
    for batch in batches(stream(dataset)):
        expected = [torch.as_tensor(dataset[index]) for index in batch.index]
        assert torch.equal(batch.collated, torch.stack(expected))


def mixed(items: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(items) + torch.rand(())


class Mixes:
    def __init__(self) -> None:
        self.rng = np.random.default_rng()

    def __call__(self, items: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack(items) + self.rng.random()


@pytest.mark.parametrize("collate_fn", [mixed, Mixes()])
def test_collate_fn_draws_under_the_seed_of_its_micro_batch(collate_fn: Any) -> None:
    first, second = (batches(stream(Told(), collate_fn=collate_fn)) for _ in range(2))
    for one, two in zip(first, second, strict=True):
        assert torch.equal(one.collated, two.collated)
    assert len({batch.collated[0, 0].item() % 1 for batch in first}) == len(first)


class Keeps(Told):
    """Gives the same objects in each epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = [torch.ones(2) for _ in range(40)]

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.kept[index]


def changing(items: list[torch.Tensor]) -> list[torch.Tensor]:
    return [item.add_(1) for item in items]


def drawing(items: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(items) + np.random.default_rng().random()


def of_whole_batches(items: list[torch.Tensor]) -> torch.Tensor:
    assert len(items) > 4
    return torch.stack(items)


@pytest.mark.parametrize("collate_fn", [changing, drawing])
def test_state_from_batch_to_batch_is_found(collate_fn: Any) -> None:
    with pytest.raises(ConfigError, match="collate_fn does not make the same of the"):
        batches(stream(Keeps(), collate_fn=collate_fn))


def test_a_collate_fn_may_need_a_whole_batch() -> None:
    plan = PlanConfig(epochs=1, micro_batch_size=8, seed=3)
    assert len(batches(stream(Told(), collate_fn=of_whole_batches, plan=plan))) == 5


def test_a_failing_item_is_a_bad_sample(caplog: pytest.LogCaptureFixture) -> None:
    transform = TransformConfig(max_bad_fraction=0.5)
    spec = stream(Told(bad=[5]), transform=transform)
    indices = [index for batch in batches(spec) for index in batch.index]
    assert len(indices) == 40 and 5 not in indices
    assert "Told[5] failed at tests/streaming/test_items.py" in caplog.text
    assert "ValueError: the file is empty" in caplog.text
    with pytest.raises(TransformError, match=r"Told sample 5: Told\[5\] failed"):
        batches(stream(Told(bad=[5]), transform=TransformConfig(max_bad_fraction=0)))


def test_a_collate_fn_that_fails_on_any_item_is_not_a_fault_of_two() -> None:
    def joined(items: list[Any]) -> Any:
        raise KeyError("boxes")

    with pytest.raises(ConfigError, match=r"KeyError at .*test_items.py:\d+ in joined"):
        batches(stream(Told(), collate_fn=joined))
    problem = "NoneType.*give a collate_fn that takes such items"
    with pytest.raises(ConfigError, match=problem) as raised:
        batches(stream([None] * 40))
    assert "does not go with" not in str(raised.value)


def test_items_that_do_not_go_together_are_named() -> None:
    with pytest.raises(ConfigError, match=r"item \d+ does not go with item") as raised:
        batches(stream(Told(odd=[8])))
    assert "equal size" in str(raised.value) and " 8 " in str(raised.value)


@pytest.mark.parametrize("prepare", [None, abs])
def test_state_from_item_to_item_is_found(
    prepare: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.utils.data._utils.worker, "_worker_info", None)
    items = DatasetItems(Counts(), prepare=prepare)
    for each in (items, cloudpickle.loads(cloudpickle.dumps(items))):
        with pytest.raises(ConfigError, match="Counts does not make the same"):
            batches(stream(each))


class Tells(Told):
    def __getitem__(self, index: int) -> Any:
        return torch.tensor(index), next(_counted)


_counted = itertools.count()


def test_numbers_besides_tensors_that_differ_are_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert len(batches(stream(Tells()))) == 10
    assert "a digest of the stream will differ" in caplog.text


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Iterator[int]:
        return itertools.count()


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"train": Endless()}, "Endless is an IterableDataset, whose samples have no"),
        ({"train": Told(), "val": "val.lmdb"}, "val is a str, and the other split is"),
        ({"train": Told(), "columns": ["a"]}, "columns is for stores"),
        (
            {"train": Told(), "transform": TransformConfig(size=32)},
            "transform.size is for stores",
        ),
        ({"train": "no_such_module:make"}, "'no_such_module:make' cannot be imported"),
        ({"train": []}, "lacks address"),
    ],
)
def test_a_mistake_with_a_dataset_is_one_line(arguments: Any, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as raised:
        stream(**arguments)
    assert "\n" not in str(raised.value)


def test_a_resume_with_another_dataset_names_the_part(tmp_path: Path) -> None:
    with raypipe.loader(stream(Told(bad=[50])), run_dir=tmp_path) as loader:
        for batch in next(loader.epochs()).train:
            if batch.ends_step:
                loader.checkpoint()
                break
    with pytest.raises(CursorError, match=r"Changed: .*store\.bad="):
        raypipe.loader(stream(Told(bad=[51])), run_dir=tmp_path)


def told() -> Told:
    return Told()


def test_a_dataset_by_name_is_made_in_each_process() -> None:
    named = batches(stream(f"{__name__}:told"))
    given = batches(stream(Told()))
    for one, two in zip(named, given, strict=True):
        assert torch.equal(one.collated, two.collated)


def test_a_process_is_prepared_once_and_never_that_of_the_user(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    log = tmp_path / "prepared"

    def prepare(number: int) -> None:
        with log.open("a") as file:
            file.write(str(number))

    monkeypatch.setattr(torch.utils.data._utils.worker, "_worker_info", None)
    items = DatasetItems(Noisy(), prepare=prepare)
    assert isinstance(items.dataset, Noisy)
    batches(stream(items))  # its check makes items with a copy
    assert not log.exists() and get_worker_info() is None
    elsewhere = cloudpickle.loads(cloudpickle.dumps(items))
    assert not log.exists()
    batches(stream(elsewhere))
    assert log.read_text() == "0"
    assert get_worker_info().dataset is elsewhere.dataset  # type: ignore[union-attr]


def test_two_parts_of_one_dataset_share_it_wherever_they_are_opened() -> None:
    base = Told()
    parts = Subset(base, range(30)), Subset(base, [35, 36])
    splits = tuple(map(DatasetItems, parts))
    stream(*splits)
    stream(*splits)  # they may be given again
    train, val = pickle.loads(pickle.dumps(splits))
    assert train.dataset.dataset is val.dataset.dataset is not base
    assert len(train.dataset) == 30 and list(val.dataset.indices) == [35, 36]
    stream(train, val)
    twin = copy.deepcopy(train)
    assert twin.dataset.dataset is not train.dataset.dataset


def test_a_batch_of_a_dataset_says_where_its_items_are() -> None:
    batch = batches(stream(Told()))[0]
    with pytest.raises(ConfigError, match="collated is what collate_fn"):
        _ = batch.image
