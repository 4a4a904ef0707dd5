"""Blocks of remembered and new micro-batches, with a memory of the test in the place of the cluster's."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from raypipe.config import PlanConfig, TransformConfig
from raypipe.plan.places import MicroBatchId
from raypipe.rayext import kv_store
from raypipe.stores.memory import MemoryStore
from raypipe.streaming.hashes import batch_hash
from raypipe.streaming.maker import MicroBatchMaker
from raypipe.streaming.memory.alike import Alike
from raypipe.streaming.memory.cluster_memory import Collector
from raypipe.streaming.memory.content import Contents
from raypipe.streaming.memory.recall import Recall, _BlockParts, _keep_up, _num_repeats
from raypipe.streaming.memory.stored import Stored
from raypipe.streaming.opening import open_stream
from raypipe.streaming.row import batches_of, block_row
from raypipe.streaming.spec import StreamSpec

from pictures import CLASSES, picture  # isort: skip


class Shelf:
    """A memory: what is kept, what others make, and what comes of it at the second question.

    Args:
        hands_over: whether the rank collects what is remembered.
        num_new: and so many new ones.
    """

    def __init__(self, hands_over: bool = False, num_new: int = 0) -> None:
        self.hands_over = hands_over
        self.num_new = num_new
        self.kept = dict[bytes, Stored]()
        self.made_by_others = dict[bytes, Stored | None]()
        self.dropped = set[bytes]()
        self.num_questions = 0
        self.turns: list[int] = []

    def find(
        self, keys: Sequence[bytes], most: int, comes_back: bool
    ) -> tuple[dict[bytes, Stored], list[bytes]]:
        self.num_questions += 1
        if self.num_questions > 1:
            made = self.made_by_others.items()
            self.kept |= {key: stored for key, stored in made if stored}
        found = {key: self.kept[key] for key in keys if key in self.kept}
        free = [key for key in keys if key not in (found | self.made_by_others)]
        self.turns.append(len(free[:most]))
        if self.hands_over:
            found = {key: stored.outline() for key, stored in found.items()}
        return found, free[:most]

    def keep(
        self, finished: dict[bytes, Stored], dropped: list[bytes], comes_back: bool
    ) -> dict[bytes, Stored]:
        self.kept |= finished
        self.dropped |= set(dropped)
        collected = list(finished)[: self.num_new]
        self.num_new -= len(collected)
        return {key: finished[key].outline() for key in collected}


def spec_of(bad: tuple[int, ...] = (), **transform: Any) -> StreamSpec:
    images = [picture(number) for number in range(22)]
    for number in bad:
        images[number] = b"damaged"
    store = MemoryStore(images, [number % 5 for number in range(22)], CLASSES)
    settings = {"train": "light", "val": "center", "size": 16, **transform}
    plan = PlanConfig(epochs=2, micro_batch_size=4, global_batch_size=4, seed=3)
    return open_stream(store, store, plan=plan, transform=TransformConfig(**settings))


def recall(spec: StreamSpec, shelf: Shelf) -> Recall:
    maker = MicroBatchMaker(spec)
    contents = Contents(spec, maker.sample_makers.recipes, "s")
    return Recall(maker.block, contents, shelf, frozenset({"val"}))


def block_of(split: Any, epoch: int, num: int = 6) -> list[MicroBatchId]:
    return [MicroBatchId(split, epoch, step, 0) for step in range(num)]


def by_row(recalled: Recall, block: list[MicroBatchId]) -> tuple[list[bytes], int, Any]:
    """Digests of a block as a rank gets it, how many were remembered, and its bad samples."""
    batches, bad, arrays = recalled.block(block)
    found = list(batches_of(block_row(batches, arrays)))
    num = sum(batch.num_remembered for batch in found)
    return [batch_hash(batch) for batch in found], num, bad


def expected(spec: StreamSpec, block: list[MicroBatchId]) -> tuple[list[bytes], Any]:
    batches, bad, _ = MicroBatchMaker(spec).block(block)
    return [batch_hash(batch) for batch in batches], bad


def test_a_block_of_remembered_and_new_ones_is_that_of_the_maker() -> None:
    spec = spec_of()
    shelf = Shelf()
    recalled = recall(spec, shelf)
    for part in ([1], [4, 2], list(range(6)), list(range(6))):
        block = [block_of("val", 1)[number] for number in part]
        before = len(shelf.kept)
        digests, num, _ = by_row(recalled, block)
        assert digests == expected(spec, block)[0]
        assert num == len(part) - (len(shelf.kept) - before)
    assert len(shelf.kept) == 6


def test_a_bad_sample_of_a_validation_is_reported_at_each_place() -> None:
    spec = spec_of(bad=(5, 6), max_bad_fraction=0.5)
    recalled = recall(spec, Shelf())
    for epoch in (0, 1):
        block = block_of("val", epoch)
        digests, num, bad = by_row(recalled, block)
        assert (digests, bad) == expected(spec, block)
        assert num == 6 * epoch
        assert {sample.position.epoch for sample in bad} == {epoch} and len(bad) == 2


def test_a_training_micro_batch_with_a_substitute_is_made_again() -> None:
    spec = spec_of(bad=(5,), max_bad_fraction=0.5)
    shelf = Shelf()
    recalled = recall(spec, shelf)
    block = block_of("train", 0, 5)
    digests, bad = expected(spec, block)
    assert len(bad) == 1
    assert by_row(recalled, block) == (digests, 0, bad)
    assert by_row(recalled, block) == (digests, 4, bad)
    assert len(shelf.dropped) == 1 and len(shelf.kept) == 4


@pytest.mark.parametrize("comes", [True, False])
def test_what_another_makes_is_waited_for_or_made_in_the_end(
    comes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("raypipe.streaming.memory.recall._WAIT_S", 0.01)
    spec = spec_of()
    shelf = Shelf()
    recalled = recall(spec, shelf)
    block = block_of("train", 1, 5)
    digests = by_row(recalled, block)[0]
    keys = list(shelf.kept)
    for key in (keys[0], keys[3]):
        stored = shelf.kept.pop(key)
        shelf.made_by_others[key] = stored if comes else None
    del shelf.kept[keys[1]]
    shelf.num_questions = 0
    again, num, _ = by_row(recalled, block)
    assert again == digests == expected(spec, block)[0]
    assert num == (4 if comes else 2)


def test_an_actor_that_shares_makes_a_few_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("raypipe.streaming.memory.recall._TURN_S", 0.0)
    spec = spec_of()
    shelf = Shelf()
    recalled = recall(spec, shelf)
    block = block_of("train", 0, 5)
    recalled.is_shared = True
    assert by_row(recalled, block)[:2] == (expected(spec, block)[0], 0)
    assert shelf.turns == [1] * 5 and len(shelf.kept) == 5
    recalled.is_shared = False
    shelf.turns.clear()
    by_row(recalled, block_of("train", 1, 5))
    assert shelf.turns == [5]


@pytest.mark.parametrize("remembered", [[], [1, 4], [0, 1, 2, 3, 4]])
@pytest.mark.parametrize("num_new", [0, 2, 5])
@pytest.mark.parametrize("is_shared", [True, False])
def test_what_is_handed_over_by_its_key_has_the_same_bits(
    remembered: list[int],
    num_new: int,
    is_shared: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("raypipe.streaming.memory.recall._TURN_S", 0.0)
    spec = spec_of()
    shelf = Shelf(hands_over=True)
    block = block_of("train", 0, 5)
    if remembered:
        recall(spec, shelf).block([block[number] for number in remembered])
    shelf.num_new = num_new
    recalled = recall(spec, shelf)
    recalled.is_shared = is_shared
    batches, _, arrays = recalled.block(block)
    row = block_row(batches, arrays)
    collected = list[MicroBatchId]()

    def collect(keys: Mapping[MicroBatchId, bytes]) -> dict[MicroBatchId, Any]:
        collected.extend(keys)
        return {at: shelf.kept[key].fields for at, key in keys.items()}

    found = [batch_hash(batch) for batch in batches_of(row, collect)]
    assert found == expected(spec, block)[0]
    new = [number for number in range(5) if number not in remembered]
    numbers = sorted(remembered + new[:num_new])
    assert collected == [block[number] for number in numbers]
    of_pixels = sum(array.nbytes for array in row.values() if array.ndim > 4)
    assert of_pixels == (5 - len(numbers)) * 4 * 16 * 16 * 3


def test_made_ones_that_come_out_of_order_are_put_in_order() -> None:
    spec = spec_of()
    block = block_of("train", 0, 5)
    made = dict(enumerate(MicroBatchMaker(spec).block(block)[0]))
    parts = _BlockParts(block, [bytes([n]) for n in range(5)], 0.0)
    for number in (3, 0, 4, 1, 2):
        parts.add_made({number: made[number]})
    row = block_row(*parts.in_order())
    found = [batch_hash(batch) for batch in batches_of(row)]
    assert found == expected(spec, block)[0]


def test_what_was_forgotten_on_the_way_is_made_by_the_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "raypipe.streaming.memory.cluster_memory.running_memory", lambda: None
    )
    spec = spec_of()
    block = block_of("train", 0, 3)
    fields = Collector(spec, "s")(dict.fromkeys(block, b"gone"))
    made, _, _ = MicroBatchMaker(spec).block(block)
    for batch in made:
        again = replace(batch, fields=fields[batch.position])
        assert batch_hash(again) == batch_hash(batch)


def test_parts_of_different_shapes_come_together() -> None:
    spec = spec_of()
    parts = _BlockParts(block_of("train", 0, 2), [b"0", b"1"], 0.0)
    first, second = (
        MicroBatchMaker(spec).make(at)[0] for at in block_of("train", 0, 2)
    )
    wide = np.zeros((4, 16, 20, 3), np.uint8)
    name = next(name for name, array in second.arrays().items() if array.ndim == 4)
    second = replace(second, fields={**second.fields, name: wide})
    parts.add_made({1: second})
    parts.add_made({0: first})
    batches, arrays = parts.in_order()
    assert name not in arrays
    by_name = [batch.arrays()[name] for batch in batches]
    assert np.array_equal(by_name[0], first.arrays()[name])
    assert np.array_equal(by_name[1], wide)


def test_samples_that_a_reader_has_read_stay_with_their_micro_batches() -> None:
    spec = spec_of()
    recalled = recall(spec, Shelf())
    block = block_of("val", 0)
    maker = MicroBatchMaker(spec)

    def reads(of_block: list[MicroBatchId]) -> Any:
        return [maker.read_store(at, maker.plan.indices(at)) for at in of_block]

    recalled.block([block[2]], reads([block[2]]), 1.0)
    batches, _, _ = recalled.block(block, reads(block), 6.0)
    assert [batch_hash(batch) for batch in batches] == expected(spec, block)[0]
    assert [round(batch.read_s, 9) for batch in batches] == [1.0] * 6


def test_a_stream_that_shares_nothing_is_asked_for_no_key() -> None:
    recalled = recall(spec_of(), Shelf())
    assert recalled.wants(block_of("val", 0))
    assert not recalled.wants(block_of("train", 0))
    recalled.is_shared = True
    assert recalled.wants(block_of("train", 0))


@pytest.mark.parametrize(
    ("is_alike", "needs_memory", "num_calls"),
    [(False, False, 0), (True, False, 1), (False, True, 1), (True, True, 1)],
)
def test_a_stream_like_no_other_never_calls_the_memory(
    is_alike: bool,
    needs_memory: bool,
    num_calls: int,
) -> None:
    recalled = recall(spec_of(), Shelf())
    calls = list[str]()
    cluster: Any = SimpleNamespace(
        check_in=lambda: calls.append("check in"), checked_in_at=-math.inf
    )
    alike: Any = SimpleNamespace(look=lambda: is_alike)
    for _ in range(3):
        _keep_up(recalled, cluster, alike, needs_memory)
    assert len(calls) == num_calls and recalled.is_shared == is_alike


def test_an_actor_looks_ever_more_seldom_for_streams_alike(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0
    looks = list[float]()

    def keys(prefix: str) -> list[str]:
        looks.append(now)
        return [f"{prefix}other"] if now > 300 else []

    monkeypatch.setattr(kv_store, "publish", lambda *_: None)
    monkeypatch.setattr(kv_store, "published_keys", keys)
    monkeypatch.setattr(kv_store, "published", lambda _: now)
    alike = Alike("content", "stream", clock=lambda: now)
    found = list[bool]()
    for second in range(1, 600):
        now = float(second)
        found.append(alike.look())
    assert len(looks) < 40 and max(np.diff(looks)) <= 31
    assert not any(found[:300]) and all(found[331:])


def repeated(bad: tuple[int, ...] = (), train: str = "center") -> tuple[Any, Any]:
    """Recall of a stream with two repeats of each sample in a step of four micro-batches, and its spec."""
    spec = spec_of(bad, train=train, max_bad_fraction=0.5 if bad else 0)
    config = replace(spec.plan.config, aug_repeats=2, global_batch_size=16)
    store = spec.stores["train"]
    spec = open_stream(store, store, plan=config, transform=spec.transform)
    shelf = Shelf()
    recalled = recall(spec, shelf)
    recalled.num_repeats = _num_repeats(spec, recalled._contents)
    return recalled, spec


@pytest.mark.parametrize("micros", [[0, 1, 2, 3], [0, 2], [1], [1, 2, 3], [1, 3]])
@pytest.mark.parametrize("bad", [(), (5, 6)])
def test_repeats_that_nothing_tells_apart_are_made_once(
    micros: list[int], bad: tuple[int, ...]
) -> None:
    recalled, spec = repeated(bad)
    assert recalled.num_repeats == 2
    steps = [
        [MicroBatchId("train", 1, step, micro) for micro in micros] for step in (0, 1)
    ]
    seen = 0
    for block in steps:
        assert recalled.wants(block)
        digests, num, samples = by_row(recalled, block)
        found, expected_samples = expected(spec, block)
        assert digests == found
        assert sorted(samples, key=str) == sorted(expected_samples, key=str)
        seen += num
    if not bad:
        pairs = len({micro // 2 for micro in micros})
        assert seen == 2 * (len(micros) - pairs)
        # what has no repeat in its block is kept for the block that has
        is_whole = len(micros) == 2 * pairs
        assert len(recalled._cache.kept) == (0 if is_whole else 2 * pairs)
        other = [[replace_micro(at, at.micro ^ 1) for at in block] for block in steps]
        more = sum(by_row(recalled, block)[1] for block in other)
        assert more == (2 * (len(micros) - pairs) if is_whole else 2 * len(micros))


def replace_micro(at: MicroBatchId, micro: int) -> MicroBatchId:
    return MicroBatchId(at.split, at.epoch, at.step, micro)


def test_repeats_of_a_random_transform_are_made_each() -> None:
    recalled, _ = repeated(train="light")
    assert recalled.num_repeats == 1
    assert not recalled.wants([MicroBatchId("train", 0, 0, 0)])
