"""Headspace: a loop gets batches that are on its device, at the places of the plan, and all else is as it is."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bucketed import spec_of as bucketed_spec
from pictures import picture
from torch.utils._python_dispatch import TorchDispatchMode

import raypipe
from raypipe.config import AugmentConfig, PlanConfig, PoolConfig, TransformConfig
from raypipe.device.prefetcher import Batch
from raypipe.errors import ConfigError
from raypipe.metrics.records import read_records
from raypipe.stores.memory import MemoryStore
from raypipe.streaming.maker import MicroBatchMaker
from raypipe.streaming.record.headspace import HeadspaceRecord, to_gain
from raypipe.streaming.resident_stream import NUM_KEPT, ResidentStream
from raypipe.streaming.spec import StreamSpec

AUGMENT = AugmentConfig(preset="light", mixup_alpha=0.4)


def spec_of(epochs: int = 3, **options: Any) -> StreamSpec:
    store = MemoryStore(
        [picture(i, 20, 24) for i in range(36)], [i % 3 for i in range(36)]
    )
    val = MemoryStore([picture(100 + i, 20, 24) for i in range(9)], [0] * 9)
    return raypipe.open_stream(
        store,
        val,
        plan=PlanConfig(epochs=epochs, micro_batch_size=4, global_batch_size=8),
        transform=TransformConfig(train="small", val="resize", size=16),
        pool=PoolConfig(engine="inline"),
        **options,
    )


def taken(loader: Any) -> tuple[list[Batch], list[Batch]]:
    train = list[Batch]()
    val = list[Batch]()
    for epoch in loader.epochs():
        train += epoch.train
        val += epoch.val
    return train, val


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts the micro-batches that are made, by split."""
    counts = Counter[str]()
    make = MicroBatchMaker.make

    def counted(
        self: MicroBatchMaker, position: Any, *args: Any, **options: Any
    ) -> Any:
        counts[position.split] += 1
        return make(self, position, *args, **options)

    monkeypatch.setattr(MicroBatchMaker, "make", counted)
    return counts


def test_places_seeds_steps_and_shapes_are_those_of_the_stream() -> None:
    streams = taken(raypipe.loader(spec_of(), augment=AUGMENT))
    nothing = taken(raypipe.loader(spec_of(), augment=AUGMENT, headspace=True))
    for from_stream, found in zip(streams, nothing, strict=True):
        assert len(from_stream) == len(found)
        for batch, other in zip(from_stream, found, strict=True):
            for name in ("position", "seed", "ends_step", "ends_split"):
                assert getattr(batch, name) == getattr(other, name)
            assert batch.image.shape == other.image.shape
            assert batch.image.dtype == other.image.dtype
            assert batch.image.stride() == other.image.stride()
            assert batch.fields.keys() == other.fields.keys()
            assert batch.target.dtype == other.target.dtype
            assert (batch.mix is None) == (other.mix is None)
            assert torch.equal(batch.weight, other.weight)
            assert ((batch.index < 0) == (other.index < 0)).all()


def test_a_few_micro_batches_are_made_however_long_the_run(made: Counter[str]) -> None:
    train, val = taken(raypipe.loader(spec_of(epochs=20), headspace=True))
    assert len(train) == 160 and len(val) == 80
    assert made == {"train": NUM_KEPT, "val": NUM_KEPT}


def test_what_is_handed_out_is_real_samples_with_their_labels() -> None:
    spec = spec_of()
    train, _ = taken(raypipe.loader(spec, headspace=True))
    first, _ = taken(raypipe.loader(spec))
    kept = {batch.index.tobytes(): batch for batch in first[:NUM_KEPT]}
    for batch in train:
        stored = kept[batch.index.tobytes()]
        assert torch.equal(batch.image, stored.image)
        assert torch.equal(batch.target, stored.target)
        assert (batch.target.numpy() == batch.index % 3).all()
    assert len({batch.index.tobytes() for batch in train}) == NUM_KEPT


def test_the_augmentation_draws_anew_for_each_place() -> None:
    train, _ = taken(raypipe.loader(spec_of(), augment=AUGMENT, headspace=True))
    same = [batch for batch in train if (batch.index == train[0].index).all()]
    assert len(same) > 3
    images = [batch.image for batch in same]
    assert not any(torch.equal(images[0], image) for image in images[1:])


def test_a_loop_may_normalize_floats_in_place() -> None:
    spec = spec_of(epochs=20)
    plain = raypipe.loader(spec, headspace=True)
    floats = raypipe.loader(spec_of(epochs=20), dtype=torch.float32, headspace=True)
    assert next(iter(next(plain.epochs()).train)).image.dtype == torch.uint8
    for epoch in floats.epochs():
        for batch in epoch.train:
            if batch.image.is_floating_point():
                batch.image.sub_(100.0).mul_(100.0)
                assert batch.image.abs().max() < 1e6


def test_ranks_get_their_shares() -> None:
    positions = []
    for rank in range(2):
        spec = spec_of()
        stream = ResidentStream(spec, rank, 2, torch.device("cpu"))
        host = stream.open(spec.plan.start())
        assert host.resident is not None
        positions += [batch.position for batch in host.resident]
    spec = spec_of()
    assert sorted(map(str, positions)) == sorted(
        map(str, spec.plan.micro_batches(spec.plan.start()))
    )


def test_buckets_have_their_shapes() -> None:
    spec = bucketed_spec()
    shapes = [tuple(batch.image.shape) for batch in taken(raypipe.loader(spec))[0]]
    train, _ = taken(raypipe.loader(bucketed_spec(), headspace=True))
    assert [tuple(batch.image.shape) for batch in train] == shapes
    assert len(set(shapes)) > 1


def test_a_skipped_epoch_and_a_repeated_validation_are_as_in_a_stream() -> None:
    loader = raypipe.loader(spec_of(), headspace=True)
    found = []
    for epoch in loader.epochs():
        for batch in epoch.train:
            found.append(batch.position)
            break
        assert sum(int(batch.weight.sum()) for batch in epoch.val) == 9
        assert sum(int(batch.weight.sum()) for batch in loader.validation()) == 9
    assert [position.epoch for position in found] == [0, 1, 2]


def test_checkpoints_are_written_and_nothing_of_them_is_left(tmp_path: Path) -> None:
    run = tmp_path / "run"
    model = torch.nn.Linear(2, 2)
    with raypipe.loader(spec_of(), run_dir=run) as loader:
        for epoch in loader.epochs():
            list(epoch.train)
            loader.checkpoint(model=model)
            break
    before = {path.name: path.stat().st_mtime_ns for path in run.iterdir()}
    with raypipe.loader(spec_of(), run_dir=run, headspace=True) as loader:
        assert loader.restore(model=model) is None
        assert loader.global_step == 0
        seen = set()
        for epoch in loader.epochs():
            list(epoch.train)
            loader.checkpoint(model=torch.nn.Linear(3, 3))
            seen |= {path.name for path in (run / "headspace").glob("checkpoint_*")}
    assert seen
    after = {path.name: path.stat().st_mtime_ns for path in run.iterdir()}
    assert after.pop("headspace.json")
    assert after == before
    with raypipe.loader(spec_of(), run_dir=run) as loader:
        assert loader.restore(model=model) is not None and loader.global_step == 4


def test_the_diagnosis_says_what_is_to_gain_once_it_is_known(tmp_path: Path) -> None:
    run = tmp_path / "run"

    def diagnosis(**options: Any) -> str:
        with raypipe.loader(spec_of(), run_dir=run, **options) as loader:
            taken(loader)
            if not options:
                loader.checkpoint()
            log = loader.metrics.run_log.log
            assert log
            folder = Path(log._folder)
            records = read_records(str(folder))
        last = [record for record in records if record["kind"] == "diagnosis"][-1]
        return last["text"]

    assert "data for nothing" not in diagnosis()
    measured = diagnosis(headspace=True)
    assert "From the stream" in measured and "with data for nothing" in measured
    kept = json.loads((run / "headspace.json").read_text())
    assert kept["workers"] == 1 and kept["images_per_s"] > 0
    for checkpoint in run.glob("checkpoint_*"):
        checkpoint.rename(tmp_path / checkpoint.name)
    assert f"with data for nothing {kept['images_per_s']:,.0f}" in diagnosis()


def test_the_share_to_gain_is_in_words() -> None:
    assert to_gain(1163, 1204) == (
        "From the stream 1,163 images/s, with data for nothing 1,204: 3.4% to gain."
    )
    assert "nothing to gain" in to_gain(1000, 990)
    assert to_gain(0, 1204) == "With data for nothing: 1,204 images/s."


@pytest.mark.parametrize("content", ["", "no JSON", "[]", '{"workers": 1}', '{"a": 2}'])
def test_a_damaged_headspace_is_unknown(tmp_path: Path, content: str) -> None:
    (tmp_path / "headspace.json").write_text(content)
    assert HeadspaceRecord(str(tmp_path), 1, measures=False).told(100.0) == ""


def test_the_headspace_of_other_workers_is_not_compared(tmp_path: Path) -> None:
    HeadspaceRecord(str(tmp_path), 2, measures=True).write(200.0)
    assert HeadspaceRecord(str(tmp_path), 2, measures=False).read() == 200.0
    assert HeadspaceRecord(str(tmp_path), 1, measures=False).told(100.0) == ""


def test_a_wrong_argument_is_one_clear_error() -> None:
    with pytest.raises(ConfigError, match="headspace"):
        raypipe.loader(spec_of(), headspace="yes")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="trace_s"):
        raypipe.loader(spec_of(), trace="t.json", trace_s=-1.0)


def test_padding_of_a_validation_is_left_out_of_its_indices() -> None:
    _, val = taken(raypipe.loader(spec_of(), headspace=True))
    of_epoch = [batch for batch in val if batch.position.epoch == 1]
    weights = np.concatenate([batch.weight.numpy() for batch in of_epoch])
    indices = np.concatenate([batch.index for batch in of_epoch])
    assert weights.sum() == 9 and ((indices >= 0) == (weights > 0)).all()


class Work(TorchDispatchMode):
    """Counts the calls of torch's operations in a block, and the bytes of new tensors that they make."""

    def __init__(self) -> None:
        super().__init__()
        self.num_calls = 0
        self.num_bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        self.num_calls += 1
        results = made if isinstance(made, tuple | list) else (made,)
        for result in results:
            if isinstance(result, torch.Tensor) and not result._is_view():
                self.num_bytes += result.nbytes
        return made


def work_of_steps(batches: Iterator[Batch], num: int) -> Work:
    """The work of a small training's steps on batches, after two that warm it up."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 16, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.AdaptiveAvgPool2d(1),
        torch.nn.Flatten(),
        torch.nn.Linear(16, 3),
    )
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    work = Work()
    # A loop is a generator, so what it does for a batch happens while the next one is asked for.
    for number, batch in enumerate(itertools.islice(batches, num + 2)):
        if number == 1:
            work.__enter__()
        loss = torch.nn.functional.cross_entropy(model(batch.image), batch.target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    work.__exit__(None, None, None)
    return work


def test_a_step_does_the_work_of_one_on_resident_data(made: Counter[str]) -> None:
    # Their throughput agrees because their work does: the bytes that torch's operations write, to 3 %, and no more
    # calls. benchmarks/resident_loops.py has the images/s.
    side = 32
    images = [picture(number, side, side) for number in range(32)]
    store = MemoryStore(images, [number % 3 for number in range(32)])
    plan = PlanConfig(epochs=10, micro_batch_size=8, global_batch_size=8)
    augment = AugmentConfig(preset="standard")
    spec = raypipe.open_stream(
        store,
        plan=plan,
        transform=TransformConfig(train="none", size=side),
        pool=PoolConfig(engine="inline"),
    )

    def of_headspace() -> Iterator[Batch]:
        with raypipe.loader(spec, augment=augment, headspace=True) as loader:
            for epoch in loader.epochs():
                yield from epoch.train

    def of_resident() -> Iterator[Batch]:
        data = raypipe.resident(store, plan=plan, augment=augment)
        for number in range(plan.epochs):
            yield from data.epoch(number)

    headspace = work_of_steps(of_headspace(), 20)
    num_made = made["train"]
    resident = work_of_steps(of_resident(), 20)
    assert 0.97 < headspace.num_bytes / resident.num_bytes < 1.03
    assert headspace.num_calls <= resident.num_calls
    assert num_made == NUM_KEPT
