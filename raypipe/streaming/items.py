"""Items of a user's Dataset: a map-style one makes a sample by its index, and a collate function joins B of them.

DatasetItems   a Dataset and its collate function, where other streams have a transform: it pickles
ItemMaker      makes items under their keys, with the interface of `raypipe.transform.sample_maker.SampleMaker`
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from ray import cloudpickle

from raypipe.errors import ConfigError
from raypipe.importing import import_name
from raypipe.stores.indexed import index_in
from raypipe.transform.columns import CLASS
from raypipe.transform.fields import LABEL, Field, Ragged, Rows
from raypipe.transform.item_facts import LARGE_BYTES, Part, facts_of_dataset, part_of
from raypipe.transform.keys import Key
from raypipe.transform.nest import pack
from raypipe.transform.process_state import seed_process
from raypipe.transform.reach import ReachedGenerators
from raypipe.transform.sample_transform import SampleTransform
from raypipe.transform.samples import EncodedSample, Samples
from raypipe.transform.user_code import NOT_OF_A_SAMPLE, copied, failed

logger = logging.getLogger(__name__)

ITEM = "item"
# a collate function must not draw the numbers of its first item
_OF_COLLATE = 0x9E3779B97F4A7C15

Collate = Callable[[list[Any]], Any]
"""Makes a batch, any nest, of B items."""


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
    """

    def __init__(
        self,
        dataset: Any,
        collate: Collate | None = None,
        prepare: Callable[[int], Any] | None = None,
    ) -> None:
        self._given = dataset
        self._content = b""
        self._code = collate, prepare
        if isinstance(dataset, str):
            self.name = dataset
        else:
            self.name = type(dataset).__qualname__

    @functools.cached_property
    def dataset(self) -> Any:
        """The Dataset, as this process has opened it."""
        _, prepare = self._code
        given = self._given
        if isinstance(given, str):
            given = import_name(given, "the Dataset", trusted=True)()
        elif isinstance(given, bytes):
            given = cloudpickle.loads(given)
        if prepare is not None and given is not self._given:
            _prepare(prepare, given)
        return given

    @functools.cached_property
    def facts(self) -> dict[str, Part]:
        """The parts of the Dataset and its code that decide the items, see `facts_of_dataset`."""
        collate, _ = self._code
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
        if collate is not None:
            facts["collate_fn"] = part_of("collate_fn", collate)
        return facts

    @property
    def collate(self) -> Collate:
        """The collate function."""
        collate, _ = self._code
        if collate is not None:
            return collate
        from torch.utils.data import default_collate  # this imports torch

        return default_collate

    def __reduce__(self) -> Any:
        collate, prepare = self._code
        # modules that a script has found by sys.path are there, too, on this machine or a shared disk
        return _unpickled_elsewhere, (
            sys.path,
            self._given_or_bytes(),
            self.name,
            cloudpickle.dumps((collate, prepare)),
        )

    def _given_or_bytes(self) -> Any:
        """The Dataset's pickle, which is made once; or its name."""
        if isinstance(self._given, str | bytes):
            return self._given
        if not self._content:
            self._content = cloudpickle.dumps(self._given)
        return self._content

    def __deepcopy__(self, memo: Any) -> DatasetItems:
        """A copy with other objects, as another process has them."""
        collate, prepare = self._code
        collate = copied(collate)
        return _unpickled(self._given_or_bytes(), self.name, collate, prepare)


def _unpickled_elsewhere(
    paths: list[str], dataset: Any, name: str, code: bytes
) -> DatasetItems:
    sys.path += [path for path in paths if path not in sys.path and Path(path).exists()]
    return _unpickled(dataset, name, *cloudpickle.loads(code))


def _prepare(prepare: Callable[[int], Any], dataset: Any) -> None:
    from torch.utils.data._utils import worker  # this imports torch

    worker._worker_info = worker.WorkerInfo(
        id=0, num_workers=1, seed=0, dataset=dataset
    )
    prepare(0)


def _unpickled(
    dataset: Any, name: str, collate: Collate | None, prepare: Any
) -> DatasetItems:
    items = DatasetItems(dataset, collate, prepare)
    items.name = name
    return items


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
        self._collate = items.collate
        self._is_settled = False

    @functools.cached_property
    def _reached(self) -> ReachedGenerators:
        """The generators of the Dataset, which is opened for its first item."""
        return ReachedGenerators(self._items.dataset)

    def weaken(self, strength: float) -> None:
        """Do nothing: a Dataset has no strength."""

    def fast(
        self,
        samples: Samples,
        indices: np.ndarray,
        keys: np.ndarray,
        is_wanted: np.ndarray,
        out: Rows,
        first: int = 0,
    ) -> np.ndarray:
        """Return that no row is made, bool (B,): `slow` makes each."""
        return np.zeros(len(samples), bool)

    def slow(self, sample: EncodedSample, key: Key) -> dict[str, Any]:
        """Make an item; raises TransformError if the Dataset fails on it."""
        index = index_in(sample.image)
        try:
            item = self._item(index, key)
            if not self._is_settled:
                self._is_settled = True
                if self._reached.look():
                    # A generator that it has made drew without a seed.
                    item = self._item(index, key)
        except NOT_OF_A_SAMPLE:
            raise
        except Exception as error:
            raise failed(f"{self._items.name}[{index}]", error) from error
        return {LABEL: 0, ITEM: item}

    def _item(self, index: int, key: Key) -> Any:
        k0, k1 = map(int, key)
        keyed = self._reached.keyed((k0, k1))  # this opens the Dataset
        seed_process(k0, k1)
        with keyed:
            return self._items.dataset[index]

    def finish(
        self, out: Rows, rows: slice, key: Callable[[], Key]
    ) -> dict[str, np.ndarray | Ragged]:
        """Join the items of the rows that count into the fields of a micro-batch.

        Args:
            key: returns the key of its first sample; the draws of the collate function have another.
        """
        fields = out.finish(rows)
        counts = out.weight[rows] > 0
        made = out.values(ITEM)[rows]
        items = [made[row] for row in np.flatnonzero(counts).tolist()]
        nest = None
        if items:
            k0, k1 = key()
            collate_key = (k0 ^ _OF_COLLATE, k1)
            nest = self._collated(items, out.index[rows][counts], collate_key)
        return fields | pack(nest, cloudpickle.dumps)

    def _collated(self, items: list[Any], index: np.ndarray, key: Key) -> Any:
        seed_process(*key)
        try:
            with self._reached.keyed(key):
                return self._collate(items)
        except NOT_OF_A_SAMPLE:
            raise
        except Exception as error:
            raise ConfigError(self._why_not(items, index, error)) from error

    def _why_not(
        self, items: Sequence[Any], index: np.ndarray, error: Exception
    ) -> str:
        """Say which item does not go with the first one of its micro-batch."""
        odd = ""
        for number in range(1, len(items)):
            try:
                self._collate([items[0], items[number]])
            except Exception:
                odd = f", where item {index[number]} does not go with item {index[0]}"
                break
        words = " ".join(str(error).split())
        return (
            f"collate_fn cannot join items of {self._items.name}{odd}: {type(error).__name__}: {words:.500}; let "
            "the Dataset make items of one shape, or give a collate_fn that pads them"
        )
