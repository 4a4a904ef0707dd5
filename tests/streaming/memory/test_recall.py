"""Blocks of remembered and new micro-batches, and streams that share a folder, in one process."""

from __future__ import annotations

import random
import shutil
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from raypipe.config import PlanConfig, PoolConfig, TransformConfig
from raypipe.plan.places import MicroBatchId
from raypipe.stores.memory import MemoryStore
from raypipe.streaming.hashes import batch_hash
from raypipe.streaming.maker import MicroBatchMaker
from raypipe.streaming.memory import made_folder as module
from raypipe.streaming.memory.rank_memory import RankMemory
from raypipe.streaming.memory.recall import Made, recall_of
from raypipe.streaming.opening import open_stream
from raypipe.streaming.row import batches_of, block_row
from raypipe.streaming.spec import StreamSpec

from pictures import CLASSES, picture  # isort: skip

EPOCHS = 2
STEPS = 5
NUM = 22


def spec_of(
    folder: Path | str,
    bad: tuple[int, ...] = (),
    plan: dict[str, Any] | None = None,
    pool: dict[str, Any] | None = None,
    **transform: Any,
) -> StreamSpec:
    images = [picture(number) for number in range(NUM)]
    for number in bad:
        images[number] = b"damaged"
    store = MemoryStore(images, [number % 5 for number in range(NUM)], CLASSES)
    order = {"epochs": EPOCHS, "micro_batch_size": 4, "global_batch_size": 4, "seed": 3}
    settings = {"train": "light", "val": "center", "size": 16, **transform}
    if bad:
        settings["max_bad_fraction"] = 0.5
    return open_stream(
        store,
        store,
        plan=PlanConfig(**{**order, **(plan or {})}),
        transform=TransformConfig(**settings),
        pool=PoolConfig(**{"remember": {str(folder): 1 << 30}, **(pool or {})}),
    )


class Stream:
    """An actor of a stream, and its rank.

    Args:
        made: gets what it makes.
    """

    def __init__(
        self,
        spec: StreamSpec,
        name: str = "s",
        made: Counter[MicroBatchId] | None = None,
    ) -> None:
        self.spec = spec
        self.made = Counter[MicroBatchId]() if made is None else made
        self.maker = MicroBatchMaker(spec)
        self.rank = RankMemory(spec, name)
        recall = recall_of(self.make, self.maker.sample_makers, name)
        assert recall is not None
        self.recall = recall

    def make(self, block: Sequence[MicroBatchId], *given: Any) -> Made:
        self.made.update(block)
        return self.maker.block(block, *given)

    def read(self, block: list[MicroBatchId]) -> tuple[list[bytes], int, Any]:
        """Digests of a block as a rank gets it, how many were remembered, and its bad samples."""
        batches, bad, arrays = self.recall.block(block)
        found = list(batches_of(block_row(batches, arrays)))
        num = sum(batch.num_remembered for batch in found)
        return [batch_hash(batch) for batch in found], num, bad


def block_of(split: Any, epoch: int = 0, num: int = STEPS) -> list[MicroBatchId]:
    return [MicroBatchId(split, epoch, step, 0) for step in range(num)]


def expected(spec: StreamSpec, block: list[MicroBatchId]) -> tuple[list[bytes], Any]:
    batches, bad, _ = MicroBatchMaker(spec).block(block)
    return [batch_hash(batch) for batch in batches], bad


def test_a_block_of_remembered_and_new_ones_is_that_of_the_maker(
    tmp_path: Path,
) -> None:
    spec = spec_of(tmp_path)
    stream = Stream(spec)
    for numbers in ([1], [4, 2], list(range(6)), list(range(6))):
        block = [block_of("val", 1, 6)[number] for number in numbers]
        num_before = stream.made.total()
        digests, num, _ = stream.read(block)
        assert digests == expected(spec, block)[0]
        assert num == len(numbers) - (stream.made.total() - num_before)
    assert stream.made.total() == 6


def test_a_bad_sample_of_a_validation_is_reported_at_each_place(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, bad=(5, 6), size=224)
    stream = Stream(spec)
    for epoch in (0, 1):
        block = block_of("val", epoch, 6)
        assert stream.read(block) == (
            expected(spec, block)[0],
            6 * epoch,
            expected(spec, block)[1],
        )


def test_a_training_micro_batch_with_a_substitute_is_made_again(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, bad=(5,))
    stream = Stream(spec)
    block = block_of("train")
    digests, bad = expected(spec, block)
    assert len(bad) == 1
    assert stream.read(block) == (digests, 0, bad)
    assert stream.read(block) == (digests, 4, bad)


def test_samples_that_a_reader_has_read_stay_with_their_micro_batches(
    tmp_path: Path,
) -> None:
    spec = spec_of(tmp_path)
    stream = Stream(spec)
    block = block_of("val", num=6)

    def given(of_block: list[MicroBatchId], read_s: float) -> Any:
        indices = spec.plan.draw_block(of_block).indices.ravel()
        samples = stream.maker.read_store(of_block[0], indices)
        samples.read_s = read_s
        return samples

    stream.recall.block([block[2]], given([block[2]], 1.0))
    batches, _, _ = stream.recall.block(block, given(block, 6.0))
    assert [batch_hash(batch) for batch in batches] == expected(spec, block)[0]
    assert [round(batch.read_s, 9) for batch in batches] == [1.0] * 6


def test_training_is_looked_for_only_while_others_make_the_same(tmp_path: Path) -> None:
    first = Stream(spec_of(tmp_path))
    assert first.recall.wants("val") and not first.recall.wants("train")
    seed = {"seed": 4}
    other = Stream(spec_of(tmp_path, plan=seed), "other")
    # the learning rate and the model are none of a stream's, and a larger step only changes where an epoch ends
    second = Stream(spec_of(tmp_path, plan={"global_batch_size": 8}), "second")
    assert second.recall.wants("train") and second.rank.are_others()
    assert not other.recall.wants("train") and not other.rank.are_others()
    first.recall.streams._look_at = 0.0  # type: ignore[union-attr]
    assert first.recall.wants("train")


def test_training_never_goes_to_the_nodes_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAYPIPE_CACHE", str(tmp_path))
    first, second = (Stream(spec_of("disk"), name) for name in ("one", "two"))
    assert not (first.recall.wants("train") or second.recall.wants("train"))
    assert first.recall.wants("val") and not first.rank.are_others()


class Trial(threading.Thread):
    """A stream that is read to its end."""

    def __init__(self, stream: Stream) -> None:
        super().__init__(daemon=True)
        self.stream = stream
        self.digests: list[bytes] = []
        self.num_remembered = 0

    def run(self) -> None:
        for epoch in range(EPOCHS):
            digests, num, _ = self.stream.read(block_of("train", epoch))
            self.digests += digests
            self.num_remembered += num


def finish(trials: Sequence[Trial]) -> None:
    for trial in trials:
        trial.start()
    for trial in trials:
        trial.join(200)
        assert not trial.is_alive()


def of_all(spec: StreamSpec) -> list[bytes]:
    blocks = (block_of("train", epoch) for epoch in range(EPOCHS))
    return [digest for block in blocks for digest in expected(spec, block)[0]]


def test_eight_trials_make_each_micro_batch_once_and_a_late_one_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MAKING_S", 1e9)  # whatever the pace of the machine
    made = Counter[MicroBatchId]()
    spec = spec_of(tmp_path, size=160)
    trials = [Trial(Stream(spec, str(number), made)) for number in range(8)]
    finish(trials)
    assert set(made.values()) == {1} and len(made) == EPOCHS * STEPS
    assert sum(trial.num_remembered for trial in trials) == 7 * EPOCHS * STEPS
    late = Trial(Stream(spec, "late", made))
    finish([late])
    assert late.num_remembered == EPOCHS * STEPS == made.total()
    assert {tuple(trial.digests) for trial in [*trials, late]} == {tuple(of_all(spec))}


def test_little_room_and_a_folder_that_is_wiped_cost_no_pixel(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, pool={"remember": {str(tmp_path): 3 << 20}}, size=224)
    trials = [Trial(Stream(spec, str(number))) for number in range(3)]
    ended = threading.Event()

    def wipe() -> None:
        choose = random.Random(1)
        while not ended.wait(choose.random() / 100):
            shutil.rmtree(tmp_path / "remembered", ignore_errors=True)

    wiping = threading.Thread(target=wipe)
    wiping.start()
    finish(trials)
    ended.set()
    wiping.join()
    assert [trial.digests for trial in trials] == [of_all(spec)] * 3


def test_the_last_rank_empties_the_memory_and_keeps_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAYPIPE_CACHE", str(tmp_path))
    for remember in ("memory", "disk"):
        first, second = (
            Stream(spec_of(remember, size=224), name) for name in ("first", "second")
        )
        assert first.rank._folder is not None
        path = first.rank._folder.path
        first.recall.block(block_of("val"))
        first.rank.close()
        assert second.read(block_of("val", 1))[1] == STEPS
        second.rank.close()
        assert path.exists() == (remember == "disk")


def repeated(folder: Any, bad: tuple[int, ...] = (), **settings: Any) -> StreamSpec:
    """A stream with two repeats of each sample in a step of four micro-batches."""
    plan = {"aug_repeats": 2, "global_batch_size": 16}
    return spec_of(folder, bad, plan=plan, **settings)


@pytest.mark.parametrize("bad", [(), (5, 6)])
@pytest.mark.parametrize("micros", [[0, 1, 2, 3], [0, 2]])
def test_repeats_that_nothing_tells_apart_are_made_once(
    tmp_path: Path, micros: list[int], bad: tuple[int, ...]
) -> None:
    spec = repeated(tmp_path, bad, train="center")
    stream = Stream(spec)
    assert stream.recall.wants("train")
    for step in (0, 1):
        block = [MicroBatchId("train", 1, step, micro) for micro in micros]
        digests, num, samples = stream.read(block)
        found, expected_samples = expected(spec, block)
        assert digests == found
        assert sorted(samples, key=str) == sorted(expected_samples, key=str)
        assert bad or num == len(micros) - len({micro // 2 for micro in micros})


def test_repeats_are_made_once_where_the_folder_keeps_no_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAYPIPE_CACHE", str(tmp_path))
    spec = repeated(tmp_path, train="center", pool={"remember": "disk"})
    block = [MicroBatchId("train", 0, 0, micro) for micro in range(4)]
    digests, num, _ = Stream(spec).read(block)
    assert digests == expected(spec, block)[0] and num == 2


def test_repeats_of_a_random_transform_are_made_each(tmp_path: Path) -> None:
    stream = Stream(repeated(tmp_path))
    assert not stream.recall.wants("train")


def test_a_fixed_training_in_order_comes_back(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, plan={"shuffle": "off"}, train="center")
    stream = Stream(spec)
    for epoch in (0, 1):
        block = block_of("train", epoch)
        assert stream.read(block) == (expected(spec, block)[0], epoch * STEPS, [])
