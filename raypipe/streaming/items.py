"""Items of a user's Dataset: a map-style one makes a sample by its index, and a collate function joins B of them.

DatasetItems   a Dataset and its collate function, where other streams have a transform: it pickles
ItemMaker      makes items under their keys, with the interface of `raypipe.transform.sample_maker.SampleMaker`
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from ray import cloudpickle

from raypipe.errors import ConfigError
from raypipe.importing import import_name, raised_at
from raypipe.stores.base import Columns
from raypipe.stores.indexed import index_in
from raypipe.transform.columns import CLASS
from raypipe.transform.fields import LABEL, Field, Ragged, Rows
from raypipe.transform.item_facts import LARGE_BYTES, Part, facts_of_dataset, part_of
from raypipe.transform.keys import Key
from raypipe.transform.nest import Packer, difference
from raypipe.transform.process_state import SeedsOfItems, seed_for_item
from raypipe.transform.reach import ReachedGenerators
from raypipe.transform.sample_transform import SampleTransform
from raypipe.transform.user_code import NOT_OF_A_SAMPLE, copied, failing, unpickled

logger = logging.getLogger(__name__)

ITEM = "item"
# a collate function must not draw the numbers of its first item
_OF_COLLATE = 0x9E3779B97F4A7C15
_NUM_CHECKED = 4  # items that show whether it keeps state

Collate = Callable[[list[Any]], Any]
"""Makes a batch, any nest, of B items."""


class _Datasets:
    """Datasets that are pickled together, as bytes, so that a process opens once what they share.

    Args:
        given: the Datasets; empty = they are in the pickle.
        pickled: see above; empty = it is made when it is needed.
    """

    def __init__(self, given: list[Any], pickled: bytes = b"") -> None:
        self.given = given
        self._pickled = pickled

    @functools.cached_property
    def opened(self) -> list[Any]:
        """The Datasets, as this process has them."""
        return self.given or unpickled(self._pickled)

    def copied(self) -> _Datasets:
        """Return the same Datasets with other objects, as another process has them."""
        if not self._pickled:
            self._pickled = cloudpickle.dumps(self.given)
        return _Datasets([], self._pickled)

    def __reduce__(self) -> Any:
        # modules that a script has found by sys.path are there, too, on this machine or a shared disk
        return _elsewhere, (sys.path, self.copied()._pickled)


def _elsewhere(paths: list[str], pickled: bytes) -> _Datasets:
    sys.path += [path for path in paths if path not in sys.path and Path(path).exists()]
    return _Datasets([], pickled)


class DatasetItems:
    """A Dataset, its collate function, and what prepares a process for them.

    It pickles with the Dataset as bytes, from which each process that makes items opens it once.

    Args:
        dataset: a map-style Dataset, or `module:function` that makes one.
        collate: see `Collate`; None = torch's default.
        prepare: called with 0 where another process has opened the Dataset, which torch's `get_worker_info` then
            has, before its first item; None = nothing is.

    Attributes:
        name: name of the Dataset's class, for messages.
        collate: the collate function; None = torch's default.
    """

    def __init__(
        self,
        dataset: Any,
        collate: Collate | None = None,
        prepare: Callable[[int], Any] | None = None,
    ) -> None:
        self._datasets = _Datasets([dataset])
        self._number = 0
        self.collate = collate
        self._prepare = prepare
        self.name = dataset if isinstance(dataset, str) else type(dataset).__qualname__

    def share_with(self, other: DatasetItems) -> None:
        """Let both Datasets be pickled together, unless they come from a pickle themselves."""
        first = self._datasets.given
        second = other._datasets.given
        if first is second or not (first and second):
            return
        self._datasets = _Datasets([*first, *second])
        other._datasets = self._datasets
        other._number += len(first)

    @functools.cached_property
    def dataset(self) -> Any:
        """The Dataset, as this process has opened it."""
        dataset = self._datasets.opened[self._number]
        is_users = bool(self._datasets.given)
        if isinstance(dataset, str):
            dataset = import_name(dataset, "the Dataset", trusted=True)()
            is_users = False
        if self._prepare is not None and not is_users:
            _prepare(self._prepare, dataset)
        return dataset

    @functools.cached_property
    def facts(self) -> dict[str, Part]:
        """The parts of the Dataset and its code that decide the items, see `facts_of_dataset`."""
        facts = facts_of_dataset(self.dataset)
        for name, part in facts.items():
            if part.num_bytes >= LARGE_BYTES:
                logger.warning(
                    "%s: each actor holds its own copy of %s, %.1f GB: keep it in a file that the Dataset maps, "
                    "such as an .npy with mmap_mode='r', if memory is short",
                    self.name,
                    name,
                    part.num_bytes / 1e9,
                )
        if self.collate is not None:
            facts["collate_fn"] = part_of("collate_fn", self.collate)
        return facts

    def __getstate__(self) -> dict[str, Any]:
        opened = ("dataset", "facts")
        return {name: value for name, value in vars(self).items() if name not in opened}

    def __deepcopy__(self, memo: Any) -> DatasetItems:
        """A copy with other objects, as another process has them; itself in a process that is prepared, once."""
        if self._prepare is not None and not self._datasets.given:
            return self
        copy = DatasetItems("")
        copy.__dict__ |= self.__getstate__()
        copy._prepare = None
        copy._datasets = self._datasets.copied()
        copy.collate = copied(self.collate)
        return copy


def _prepare(prepare: Callable[[int], Any], dataset: Any) -> None:
    from torch.utils.data._utils import worker  # this imports torch

    worker._worker_info = worker.WorkerInfo(
        id=0, num_workers=1, seed=0, dataset=dataset
    )
    prepare(0)


class ItemMaker:
    """Makes items of a Dataset whose values depend only on the Dataset, the index and the key.

    Args:
        items: the Dataset.

    Attributes:
        fields: fields of an item; see `SampleMaker`.
    """

    has_user_code = True
    # whether code that nobody has seen draws from them cannot be told
    draws_globally = True
    image_shape: tuple[int, ...] = ()
    transforms: tuple[tuple[str, SampleTransform], ...] = ()

    def __init__(self, items: DatasetItems) -> None:
        self.fields = {LABEL: CLASS, ITEM: Field("item")}
        self._items = items
        self._packer = Packer(cloudpickle.dumps)
        self._collate = items.collate or self._packer.collate
        self._is_settled = False
        self._is_collate_checked = items.collate is None
        self._seeds = SeedsOfItems()

    @functools.cached_property
    def _reached(self) -> ReachedGenerators:
        """The generators of the Dataset, which is opened for its first item, and of the collate function."""
        importlib.import_module("torch")  # so that its generator is seeded
        return ReachedGenerators((self._items.dataset, self._items.collate))

    def weaken(self, strength: float) -> None:
        """Do nothing: a Dataset has no strength."""

    def fast(
        self,
        samples: Columns,
        indices: np.ndarray,
        keys: np.ndarray,
        is_wanted: np.ndarray,
        out: Rows,
        first: int = 0,
    ) -> np.ndarray:
        """Make the rows that are wanted, up to an item that fails: from there on, `slow` makes them, and says why.

        Returns:
            Which rows are made, bool (B,).
        """
        is_made = np.zeros(len(indices), bool)
        if not self._is_settled:
            return is_made
        rows = np.flatnonzero(is_wanted)
        wanted = [index_in(samples.images[row]) for row in rows.tolist()]
        wanted_keys = [(k0, k1) for k0, k1 in keys[rows].tolist()]
        items = self._seeds.made(lambda: self._made(wanted, wanted_keys))
        made = rows[: len(items)]
        is_made[made] = True
        out.put_items(ITEM, first + made, indices[made], items)
        return is_made

    def _made(self, indices: Sequence[int], keys: Sequence[Key]) -> list[Any]:
        """Make items up to one that fails."""
        items = list[Any]()
        dataset = self._items.dataset
        with contextlib.suppress(Exception), self._reached.kept():
            rewound = self._reached.rewound(keys)
            for index, key in zip(indices, rewound, strict=True):
                self._seeds.seed(*key)
                items.append(dataset[index])
        return items

    def slow(self, samples: Columns, row: int, key: Key) -> dict[str, Any]:
        """Make an item; raises TransformError if the Dataset fails on it."""
        index = index_in(samples.images[row])
        with failing(f"{self._items.name}[{index}]"):
            item = self._item(index, key)
            if not self._is_settled:
                self._is_settled = True
                if self._reached.look():
                    # A generator that it has made drew without a seed.
                    item = self._item(index, key)
        return {LABEL: 0, ITEM: item}

    def _item(self, index: int, key: Key) -> Any:
        with self._reached.kept():
            self._seed(key)
            return self._items.dataset[index]

    def _seed(self, key: Key) -> None:
        """Seed the generators of the process, and those that the Dataset holds."""
        self._reached.rewind(key)
        seed_for_item(*key)

    def finish(
        self, out: Rows, rows: slice, key: Key
    ) -> dict[str, np.ndarray | Ragged]:
        """Join the items of the rows that count into the fields of a micro-batch.

        Args:
            key: that of its first sample; the draws of the collate function have another.
        """
        fields = out.finish(rows)
        counts = out.weight[rows] > 0
        made = out.values(ITEM)[rows]
        items = [made[row] for row in np.flatnonzero(counts).tolist()]
        nest = None
        if items:
            k0, k1 = key
            collate_key = (k0 ^ _OF_COLLATE, k1)
            index = out.index[rows][counts]
            nest = self._collated(items, index, collate_key)
            if not self._is_collate_checked:
                self._is_collate_checked = True
                self._check_collate(index[:_NUM_CHECKED].tolist(), collate_key)
        return fields | self._packer.pack(nest)

    def _collated(self, items: list[Any], index: np.ndarray, key: Key) -> Any:
        try:
            return self._joined(items, key)
        except NOT_OF_A_SAMPLE:
            raise
        except Exception as error:
            raise ConfigError(self._why_not(items, index, error)) from error

    def _joined(self, items: list[Any], key: Key) -> Any:
        with self._reached.kept():
            self._seed(key)
            return self._collate(items)

    def _check_collate(self, indices: Sequence[int], key: Key) -> None:
        """Raise ConfigError if a collate function makes something else of the same items, made again."""
        made = []
        # one that needs a whole micro-batch is not checked
        with contextlib.suppress(Exception):
            for _ in range(2):
                items = [self._item(index, key) for index in indices]
                # a copy, since it may have items that a Dataset keeps
                made.append(copied(self._joined(items, key)))
        if len(made) == 2 and difference(*made) == "numbers":
            raise ConfigError(
                f"collate_fn does not make the same of the same items of {self._items.name}: it changes items "
                "that the Dataset keeps, keeps state from batch to batch, or draws elsewhere. Let it work on "
                "copies, and draw from the generators of random, numpy and torch, or from one that it holds, "
                "which raypipe seeds for each micro-batch (docs/reproducibility.md)"
            )

    def _why_not(
        self, items: Sequence[Any], index: np.ndarray, error: Exception
    ) -> str:
        """Say which item does not go with the first one of its micro-batch, if that goes with itself."""
        odd = ""
        remedy = "give a collate_fn that takes such items"
        for number in range(len(items)):
            with contextlib.suppress(Exception):
                self._collate([items[0], items[number]])
                continue
            if number:
                odd = f", where item {index[number]} does not go with item {index[0]}"
                remedy = "let the Dataset make items of one shape, or give a collate_fn that pads them"
            break
        words = " ".join(str(error).split())
        return (
            f"collate_fn cannot join items of {self._items.name}{odd}: {type(error).__name__} at "
            f"{raised_at(error)}: {words:.500}; {remedy}"
        )
