"""`raypipe.DataLoader` in the place of torch's, in this process: arguments, orders, ranks, states."""

from __future__ import annotations

import functools
import gc
import inspect
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from data_ranks import Ranks
from data_ranks import ranks as ranks
from ray import cloudpickle
from torch.utils import data

import raypipe
from raypipe.errors import ConfigError, CursorError

NUM = 22


class Numbers(data.Dataset):
    """Items that are their index, and a random number."""

    def __init__(self, num: int = NUM) -> None:
        self.num = num

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return index, torch.rand(2)


class Stream(data.IterableDataset):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


class Endless:
    def __getitem__(self, index: int) -> int:
        return index


def loader_of(**options: Any) -> raypipe.DataLoader:
    return raypipe.DataLoader(Numbers(), **{"batch_size": 4, **options})


def taken(loader: Any, epochs: int = 1) -> list[list[int]]:
    """The indices of each batch."""
    batches = (batch for _ in range(epochs) for batch in loader)
    return [indices.tolist() for indices, _ in batches]


def flat(batches: list[list[int]]) -> list[int]:
    return [index for batch in batches for index in batch]


# Arguments


def test_arguments_have_the_names_order_and_defaults_of_torchs() -> None:
    ours, theirs = (
        list(inspect.signature(kind).parameters.values())
        for kind in (raypipe.DataLoader, data.DataLoader)
    )
    for parameter in theirs:
        assert parameter.name in [known.name for known in ours]
    for one, other in zip(ours, theirs, strict=False):
        assert (one.name, one.kind, one.default) == (
            other.name,
            other.kind,
            other.default,
        )


@pytest.mark.parametrize(
    ("dataset", "options", "message"),
    [
        (
            Numbers(),
            {"batch_sampler": [[0]]},
            "batch_sampler has no meaning here: give",
        ),
        (Numbers(), {"timeout": 5}, "timeout has no meaning here: leave it out"),
        (Numbers(), {"multiprocessing_context": "spawn"}, "Ray starts the workers"),
        (Numbers(), {"batch_size": None}, "batch_size must be a whole number"),
        (Numbers(), {"num_workers": -1}, "num_workers must be a whole number"),
        (Numbers(), {"sampler": [0], "shuffle": True}, "leave one out"),
        (Stream(), {}, "Stream is an IterableDataset.*raypipe.convert"),
        ("train.lmdb", {}, "not a str; raypipe.open_stream opens"),
        (Endless(), {}, "with __getitem__ and __len__, not a Endless"),
    ],
)
def test_what_cannot_be_met_is_one_error_with_a_remedy(
    dataset: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        raypipe.DataLoader(dataset, **options)


def test_attributes_are_those_that_programs_read() -> None:
    loader = loader_of(shuffle=True)
    assert len(loader.dataset) == NUM and loader.batch_size == 4
    assert isinstance(loader.sampler, data.RandomSampler)
    assert (loader.num_workers, loader.drop_last) == (0, False)


# Order


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("batch_size", [1, 4, 11, 30])
def test_batches_without_shuffle_are_torchs(batch_size: int, drop_last: bool) -> None:
    if drop_last and batch_size > NUM:
        pytest.skip("torch has none, and raypipe an error")
    options: Any = {"batch_size": batch_size, "drop_last": drop_last}
    ours = raypipe.DataLoader(Numbers(), **options)
    theirs = data.DataLoader(Numbers(), **options)
    assert taken(ours) == taken(theirs)
    assert len(ours) == len(theirs)


def test_each_iteration_is_an_epoch_with_an_order_and_draws_of_its_own() -> None:
    loader = loader_of(shuffle=True)
    first, second = list(loader), list(loader)
    for epoch in (first, second):
        indices = torch.cat([indices for indices, _ in epoch])
        assert [len(indices) for indices, _ in epoch] == [4, 4, 4, 4, 4, 2]
        assert sorted(indices.tolist()) == list(range(NUM))
    assert not torch.equal(first[0][0], second[0][0])
    assert not torch.equal(first[0][1], second[0][1])


def test_a_seed_decides_all_and_is_torchs_or_the_generators() -> None:
    def drawn(seed: int, generator: torch.Generator | None = None) -> torch.Tensor:
        torch.manual_seed(seed)
        loader = loader_of(shuffle=True, generator=generator)
        return torch.cat([torch.column_stack(batch) for batch in loader])

    first = drawn(1)
    assert torch.equal(first, drawn(1))
    assert not torch.equal(first, drawn(2))
    assert torch.equal(first, drawn(2, torch.Generator().manual_seed(1)))


class Backwards(data.Sampler):
    """From an epoch's number down, in a random half."""

    epoch = 0

    def __len__(self) -> int:
        return NUM // 2

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        chosen = np.random.permutation(NUM)[: len(self)]
        return iter(np.sort(chosen)[::-1].tolist() if self.epoch else chosen.tolist())


class Counting(data.Sampler):
    """It has a memory."""

    begun = 0

    def __iter__(self) -> Iterator[int]:
        self.begun += 1
        return iter([self.begun % NUM] * 8)


class InTurn(raypipe.Sampler):
    def __init__(self, population: raypipe.Population) -> None:
        self.size = population.size

    def __len__(self) -> int:
        return self.size

    def draw(self, epoch: int, positions: np.ndarray) -> np.ndarray:
        return (positions + epoch) % self.size


SAMPLERS: dict[str, tuple[Any, int | list[int]]] = {
    "sequential": (data.SequentialSampler(Numbers()), list(range(NUM))),
    "random": (data.RandomSampler(Numbers()), list(range(NUM))),
    "with replacement": (data.RandomSampler(Numbers(), True, 9), 9),
    "generator": (
        data.RandomSampler(Numbers(), num_samples=50, generator=torch.Generator()),
        50,
    ),
    "subset": (data.SubsetRandomSampler([3, 5, 7, 11, 13]), [3, 5, 7, 11, 13]),
    "weighted": (data.WeightedRandomSampler([0, 1] * (NUM // 2), 40), 40),
    "distributed": (
        data.DistributedSampler(Numbers(), 1, 0, seed=3),
        list(range(NUM)),
    ),
    "list": ([1, 2, 3, 5, 8, 13, 21], [1, 2, 3, 5, 8, 13, 21]),
    "own": (Backwards(), NUM // 2),
    "raypipe's": (InTurn, list(range(NUM))),
}
"""By name: a sampler, and the items of an epoch, or their number."""


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_sampler_decides_the_order_and_a_state_continues_it(name: str) -> None:
    sampler, items = SAMPLERS[name]
    loader = loader_of(sampler=sampler, batch_size=2)
    batches = taken(loader, 2)
    first, second = (flat(batches[at : at + len(loader)]) for at in (0, len(loader)))
    for epoch in (first, second):
        assert items in (len(epoch), sorted(epoch))
    assert (first == second) == (name in ("sequential", "list"))
    if name == "weighted":
        assert all(index % 2 for index in first)
    if name == "own":
        assert second == sorted(second, reverse=True) and first != second

    stopped = loader_of(sampler=sampler, batch_size=2)
    seen = iter(stopped)
    assert next(seen)[0].tolist() == batches[0]
    next(seen)
    resumed = loader_of(sampler=sampler, batch_size=2)
    resumed.load_state_dict(stopped.state_dict())
    assert taken(resumed, 2) == batches[2:]


def test_a_samplers_own_seed_is_part_of_the_order() -> None:
    def order(make: Any, seed: int) -> list[list[int]]:
        torch.manual_seed(1)
        generator = torch.Generator().manual_seed(seed)
        return taken(loader_of(sampler=make(generator=generator)))

    for make in (
        functools.partial(data.RandomSampler, Numbers()),
        functools.partial(data.SubsetRandomSampler, range(NUM)),
        functools.partial(data.WeightedRandomSampler, [1] * NUM, NUM),
    ):
        assert order(make, 1) == order(make, 1) != order(make, 2)


def test_a_dataset_does_not_travel_with_its_sampler() -> None:
    dataset = data.TensorDataset(torch.zeros(NUM, 10_000))
    sampler = data.RandomSampler(dataset, replacement=True)
    loader = raypipe.DataLoader(dataset, sampler=sampler)
    assert len(cloudpickle.dumps(loader.spec.plan)) < 100_000
    assert sampler.data_source is dataset


@pytest.mark.parametrize(
    ("sampler", "problem"),
    [
        ([1.5, 2.0], "'float' object cannot be interpreted as an integer"),
        (data.DistributedSampler(range(5), 1, 0), "of a dataset of 5 items.*has 22"),
    ],
)
def test_a_sampler_of_other_items_is_refused(sampler: Any, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        loader_of(sampler=sampler)


def test_a_sampler_that_is_no_function_of_the_seed_is_named() -> None:
    with pytest.raises(ConfigError, match="'Counting' is not a pure function"):
        loader_of(sampler=Counting())


# Ranks


@pytest.mark.parametrize("num", [22, 21, 17, 3])
def test_ranks_share_an_epoch_and_have_as_many_batches(num: int, ranks: Ranks) -> None:
    alone = raypipe.DataLoader(
        Numbers(num), 8, True, generator=torch.Generator().manual_seed(5)
    )
    expected = taken(alone)
    shares = []
    for rank in (0, 1):
        ranks(rank, 2)
        shares.append(taken(raypipe.DataLoader(Numbers(num), 4, shuffle=True)))
    assert [len(batch) for batch in shares[0]] == [len(batch) for batch in shares[1]]
    for together, *apart in zip(expected, *shares, strict=True):
        repeated = flat(apart)[len(together) :]
        assert flat(apart)[: len(together)] == together
        assert repeated == flat(expected)[: len(repeated)] and len(repeated) < 2


@pytest.mark.parametrize("drop_last", [False, True])
def test_a_state_of_two_ranks_continues_on_one(drop_last: bool, ranks: Ranks) -> None:
    options: Any = {"shuffle": True, "drop_last": drop_last}
    ranks(0, 2)
    loader = loader_of(batch_size=2, **options)
    seen = iter(loader)
    for _ in range(3):
        next(seen)
    state = loader.state_dict()
    assert state["samples"] == 12
    ranks(0, 1)
    whole = taken(loader_of(**options), 2)
    other = loader_of(**options)
    other.load_state_dict(state)
    assert taken(other, 2) == whole[3:]
    larger = loader_of(batch_size=5, **options)
    with pytest.raises(CursorError, match=r"after 12 samples.*5 at a time"):
        larger.load_state_dict(state)
    with pytest.raises(CursorError, match="another order"):
        loader_of().load_state_dict(state)
    with pytest.raises(CursorError, match="not a state"):
        other.load_state_dict({"epoch": 1})


def test_samplers_of_one_rank_are_refused_among_several(ranks: Ranks) -> None:
    class Own(data.DistributedSampler):
        pass

    ranks(1, 2)
    with pytest.raises(ConfigError, match="Own has the order of one of 2 ranks"):
        loader_of(sampler=Own(Numbers()))
    with pytest.raises(ConfigError, match="the order of one of 3 ranks"):
        loader_of(sampler=data.DistributedSampler(Numbers(), 3, 1))
    shares = loader_of(sampler=data.DistributedSampler(Numbers(), shuffle=False))
    assert taken(shares)[0] == [4, 5, 6, 7]


def test_processes_of_a_launcher_agree_on_the_seed_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=r"2 processes.*init_process_group"):
        loader_of()


# The place


def test_a_look_costs_nothing_and_a_loop_that_is_left_is_over() -> None:
    loader = loader_of(shuffle=True)
    whole = taken(loader_of(shuffle=True), 3)
    assert next(iter(loader))[0].tolist() == whole[0]
    for number, _ in enumerate(loader):
        if number == 2:
            break
    assert taken(loader) == whole[6:12]


def test_set_epoch_goes_forward_and_never_back() -> None:
    sampler = data.DistributedSampler(Numbers(), 1, 0)
    whole = taken(loader_of(sampler=sampler), 5)
    loader = loader_of(sampler=sampler)
    seen = []
    for epoch in (0, 1, 3, 2):
        sampler.set_epoch(epoch)
        seen += taken(loader)
    assert seen == whole[:12] + whole[18:24] + whole[24:30]


def test_batches_stay_as_they_are_when_a_loop_keeps_them() -> None:
    loader = loader_of()
    kept = list(loader)
    copies = [indices.clone() for indices, _ in kept]
    list(loader)
    for (indices, _), copy in zip(kept, copies, strict=True):
        assert torch.equal(indices, copy)


def test_a_loader_without_a_name_is_gone_at_once() -> None:
    gc.disable()
    try:
        loader = loader_of()
        next(iter(loader))
        held = weakref.ref(loader)
        del loader
        assert held() is None
    finally:
        gc.enable()
