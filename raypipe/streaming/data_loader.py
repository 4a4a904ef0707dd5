"""`DataLoader`, in the place of torch's: the same arguments, and for a seed the same batches in any place.

    dataset         any with __getitem__ and __len__; items are made by actors, or in this process
    recognized      those that `raypipe.streaming.recognized` knows become a store and a transform
    sampler         an order of the plan: a position in an epoch → an item, on any process

A position is counted in samples, so a state continues with any batch size and number of ranks.
"""

from __future__ import annotations

import copy
import functools
import logging
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.utils import data

import raypipe
from raypipe.config import AtLeast1, PlanConfig, PoolConfig
from raypipe.device.prefetcher import Batch
from raypipe.errors import ConfigError, CursorError
from raypipe.plan.custom import Population
from raypipe.plan.order import Domain, derive_keys
from raypipe.plan.places import Cursor
from raypipe.progress import print_progress
from raypipe.rayext.agreement import from_rank_zero, processes
from raypipe.section import check
from raypipe.streaming.items import Collate, DatasetItems
from raypipe.streaming.open_items import check_has_index
from raypipe.streaming.plain import PlainLoader, SharedEpochs
from raypipe.streaming.planning import make_plan
from raypipe.streaming.recognized import Recognized, recognized
from raypipe.streaming.shares import share_of
from raypipe.streaming.spec import StreamSpec
from raypipe.transform.process_state import process_kept, seed_process
from raypipe.transform.reach import ReachedGenerators

_logger = logging.getLogger(__name__)

# A loop may take as many as it likes: nothing takes longer for more.
_EPOCHS = 1 << 20

# Arguments of torch's that mean nothing here → what to do instead.
_REFUSED = {
    "batch_sampler": "give batch_size and sampler, since all ranks share batches of one size",
    "timeout": "leave it out, a stream that stalls ends by itself",
    "multiprocessing_context": "leave it out, since Ray starts the workers",
}


class DataLoader:
    """Batches of a dataset, as torch's DataLoader makes them, with the items made on the cluster's CPUs.

        loader = raypipe.DataLoader(dataset, batch_size=128, shuffle=True, num_workers=8)
        for epoch in range(90):
            for images, targets in loader:
                ...

    Each iteration is the next epoch; one that is left after its first batch was a look. Order and items depend on
    the seed, not on workers, ranks or restarts. Under Ray Train or torch.distributed each rank gets its share: a
    DistributedSampler is not needed, and does no harm.

    Args:
        dataset: a map-style Dataset.
        batch_size: of each rank.
        shuffle, drop_last: as torch has them. Without drop_last, the last batches of all ranks have as many items,
            for which fewer than W items come twice.
        sampler: one of torch's, of all items; it is iterated once in an epoch, under the epoch's seed, which the
            initial seed of its generator changes. Or what `plan.sampler` may be.
        num_workers: most actors; 0 = this process makes the items, without Ray.
        collate_fn: makes a batch of items, in the actor; None = torch's default_collate.
        pin_memory: put batches on the current CUDA device, through pinned memory; see `device`.
        worker_init_fn: called once in each actor.
        generator: its initial seed is the seed; None = that of torch.manual_seed. Rank 0's holds for all.
        prefetch_factor: transfers ahead of the loop, on CUDA; None = 2.
        persistent_workers, in_order: always so.
        pin_memory_device: the device for pin_memory.
        device: device of the batches; None = the one that Ray Train gave this worker, or the CPU.

    Attributes:
        spec: the stream.

    Raises:
        ConfigError: an argument has no meaning here; the message has the remedy.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int = 1,
        shuffle: bool | None = None,
        sampler: Any = None,
        batch_sampler: Any = None,
        num_workers: int = 0,
        collate_fn: Collate | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], Any] | None = None,
        multiprocessing_context: Any = None,
        generator: torch.Generator | None = None,
        *,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
        in_order: bool = True,
        device: torch.device | str | None = None,
    ) -> None:
        _check_refused(batch_sampler, timeout, multiprocessing_context)
        _check_dataset(dataset)
        if sampler is not None and shuffle:
            raise ConfigError(
                "raypipe.DataLoader: sampler and shuffle are both given, and each chooses the order: leave one out"
            )
        self.dataset = dataset
        self.batch_size = _checked("batch_size", batch_size, AtLeast1)
        self.num_workers = _checked("num_workers", num_workers, int)
        self.drop_last = bool(drop_last)
        self.sampler = sampler
        if sampler is None:
            in_turn = data.RandomSampler if shuffle else data.SequentialSampler
            self.sampler = in_turn(dataset)
        self.batch_sampler = None
        self.collate_fn = collate_fn or data.default_collate
        self.worker_init_fn = worker_init_fn
        self.generator = generator
        self.prefetch_factor = _checked(
            "prefetch_factor", prefetch_factor or 2, AtLeast1
        )
        if device is None and pin_memory and torch.cuda.is_available():
            current = torch.cuda.current_device()
            device = pin_memory_device or torch.device("cuda", current)
        self._device = device
        self._rank, self._world_size = share_of()[:2]
        self._start: Cursor | None = None
        self._own_collate = collate_fn
        seed = _agreed_seed(self.generator, self.sampler, self._world_size)
        self.spec = self._opened(seed)

    def _opened(self, seed: int) -> StreamSpec:
        """Open the stream; a recognized dataset as a store and a transform."""
        collate_fn = self._own_collate
        plan = PlanConfig(
            epochs=_EPOCHS,
            micro_batch_size=self.batch_size,
            global_batch_size=self.batch_size * self._world_size,
            seed=seed,
            val_interval=0,
            drop_last=self.drop_last,
            **_order_of(self.sampler, len(self.dataset), self._world_size),
        )
        found = None
        if collate_fn is None and self.worker_init_fn is None:
            found = recognized(self.dataset)
        self._recognized = found
        if found is not None:
            if self._rank == 0:
                kind = type(self.dataset).__name__
                line = f"{kind} is read as a store, with its pipeline as the transform"
                print_progress(_logger, f"{line}: {found.store.address}")
            return raypipe.open_stream(
                found.store,
                plan=plan,
                pool=self._pool,
                transform=found.config,
                train_transform=found.transform,
            )
        prepare = self.worker_init_fn if self.num_workers else None
        items = DatasetItems(self.dataset, collate_fn, prepare)
        return raypipe.open_stream(items, plan=plan, pool=self._pool)

    @property
    def _pool(self) -> PoolConfig:
        if not self.num_workers:
            return PoolConfig(engine="inline")
        # worker_init_fn is for other processes than this one
        head_start = -1 if self.worker_init_fn is None else 0
        return PoolConfig(max_actors=self.num_workers, head_start=head_start)

    def __len__(self) -> int:
        """Return the batches of an epoch that this rank gets."""
        return self.spec.plan.steps_per_epoch

    def __iter__(self) -> Iterator[Any]:
        """Return the batches of the next epoch, or the rest of one behind `load_state_dict`."""
        if type(self.sampler) is data.DistributedSampler:
            # set_epoch of a loop that was resumed
            self._epochs.skip_to(self.sampler.epoch, self._cursor().epoch)
        return iter(self._epochs)

    @functools.cached_property
    def _epochs(self) -> _Epochs:
        """The stream, which begins when it is first used."""
        self._stream = raypipe.loader(
            self.spec,
            device=self._device,
            cursor=self._start,
            prefetch_factor=self.prefetch_factor,
        )
        nest = functools.partial(_nest, self._recognized)
        return _Epochs(SharedEpochs(self._stream), "train", nest)

    def _cursor(self) -> Cursor:
        if "_epochs" in self.__dict__:
            return Cursor.from_dict(self._epochs.state_dict())
        return self._start or self.spec.plan.cursor(0, 0)

    # The place

    @functools.cached_property
    def _order(self) -> str:
        """A hash of the order of single samples, which batches and ranks do not change."""
        config = replace(self.spec.plan.config, micro_batch_size=1, global_batch_size=1)
        return make_plan(config, self.spec.stores["train"]).fingerprint

    def state_dict(self) -> dict[str, Any]:
        """The place after the last batch that was handed out: epoch, samples of it, the seed, the order's hash."""
        cursor = self._cursor()
        plan = self.spec.plan
        return {
            "epoch": cursor.epoch,
            "samples": cursor.step * plan.global_batch_size,
            "seed": plan.config.seed,
            "order": self._order,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next iteration be what comes after a `state_dict`, of any batch size and number of ranks.

        The seed is the state's, as a program without torch.manual_seed has another one each time.

        Raises:
            CursorError: the dataset or the sampler differs, or batch_size does not divide the samples.
        """
        if set(state) != {"epoch", "samples", "seed", "order"}:
            raise CursorError(
                f"not a state of raypipe.DataLoader: {str(dict(state))[:200]!r}"
            )
        seed = state["seed"]
        if seed != self.spec.plan.config.seed:
            if "_epochs" in self.__dict__:
                self._stream.close()
            for name in ("_epochs", "_order"):
                self.__dict__.pop(name, None)
            self.spec = self._opened(seed)
        if state["order"] != self._order:
            raise CursorError(
                "the state has another order of samples: dataset, sampler, shuffle or drop_last differ; make them "
                "as they were, or start a new run"
            )
        plan = self.spec.plan
        step, rest = divmod(state["samples"], plan.global_batch_size)
        if rest:
            raise CursorError(
                f"the state is after {state['samples']} samples of an epoch, and all ranks take "
                f"{plan.global_batch_size} at a time: give a batch_size that divides them"
            )
        cursor = plan.cursor(state["epoch"], step)
        if "_epochs" in self.__dict__:
            self._epochs.load_state_dict(cursor.__dict__)
        else:
            self._start = cursor


class _Epochs(PlainLoader):
    """The training of a stream, of whose batches a loop may accumulate gradients as it likes."""

    def _training(self) -> Iterator[Batch]:
        for batch in super()._training():
            self.end_of_dataloader = batch.ends_split
            yield batch

    def skip_to(self, epoch: int, upcoming: int) -> None:
        """Go to the start of an epoch, if it comes later."""
        if epoch > upcoming:
            self._shared.go_to(epoch, 0)


def _nest(found: Recognized | None, batch: Batch) -> Any:
    """Return what collate_fn made, in new memory, since a loop may keep it.

    Args:
        found: the dataset as a store and a transform; None = it is not recognized.
    """
    if found is None:
        return batch.collated
    rows = np.flatnonzero(batch.index >= 0)
    if len(rows) < len(batch.index):
        batch = batch.with_rows(rows)
    # pixels have their channels last in memory
    image = batch.image.clone(memory_format=torch.contiguous_format)
    return [found.finished(image), batch.target.clone()]


def _check_refused(*values: Any) -> None:
    """Raise ConfigError for an argument that is given, of those of `_REFUSED`, in their order."""
    for (name, instead), value in zip(_REFUSED.items(), values, strict=True):
        if value:
            raise ConfigError(
                f"raypipe.DataLoader: {name} has no meaning here: {instead}"
            )


def _checked(name: str, value: object, kind: Any) -> Any:
    return check(f"raypipe.DataLoader: {name}", value, kind)


def _check_dataset(dataset: Any) -> None:
    """Raise ConfigError unless it is a map-style Dataset."""
    check_has_index(dataset)
    kind = type(dataset)
    is_indexed = hasattr(kind, "__getitem__") and hasattr(kind, "__len__")
    if issubclass(kind, str) or not is_indexed:
        raise ConfigError(
            f"raypipe.DataLoader takes a Dataset with __getitem__ and __len__, not a {kind.__name__}; "
            "raypipe.open_stream opens addresses and stores"
        )


def _agreed_seed(
    generator: torch.Generator | None, sampler: Any, world_size: int
) -> int:
    """Return rank 0's seed, in [0, 2^64), with the seed of the sampler's own generator."""
    seed = generator.initial_seed() if generator else torch.initial_seed()
    if world_size > 1:
        if processes() is None:
            raise ConfigError(
                f"a launcher started {world_size} processes, which have to agree on the seed: call "
                "torch.distributed.init_process_group() before raypipe.DataLoader"
            )
        seed = from_rank_zero(seed)
    own = 0
    if type(sampler) is data.DistributedSampler:
        own = sampler.seed
    elif isinstance(getattr(sampler, "generator", None), torch.Generator):
        own = sampler.generator.initial_seed()
    if own:
        return int(derive_keys(1, seed, Domain.TORCH_SAMPLER, own)[0])
    return seed


# Samplers


def _order_of(sampler: Any, num_items: int, world_size: int) -> dict[str, Any]:
    """Return the settings of the plan that are the order of a sampler."""
    kind = type(sampler)
    if isinstance(sampler, str | type | Mapping):
        return {"sampler": sampler}
    is_shared = kind is data.DistributedSampler
    num_ranks = getattr(sampler, "num_replicas", 1)
    if num_ranks != (world_size if is_shared else 1):
        raise ConfigError(
            f"the {kind.__name__} has the order of one of {num_ranks} ranks, and raypipe.DataLoader shares one "
            f"order among all {world_size}: give a sampler of all items, or leave it out"
        )
    if is_shared and len(sampler.dataset) != num_items:
        raise ConfigError(
            f"the DistributedSampler is of a dataset of {len(sampler.dataset)} items, and that of "
            f"raypipe.DataLoader has {num_items}: make it of the same one, or leave it out"
        )
    shuffles = {data.SequentialSampler: False, data.RandomSampler: True}
    is_whole = kind in shuffles and len(sampler) == num_items
    if is_shared or (is_whole and not getattr(sampler, "replacement", False)):
        is_shuffled = sampler.shuffle if is_shared else shuffles[kind]
        return {"shuffle": "global" if is_shuffled else "off"}
    if kind in shuffles:
        # only the length of its dataset counts, which would travel with the plan
        sampler = copy.copy(sampler)
        sampler.data_source = range(len(sampler.data_source))
    # a new class, since a fingerprint holds no object, but its draws
    return {"sampler": type(kind.__name__, (ListedOrder,), {"given": sampler})}


class ListedOrder:
    """Order of any sampler of torch's: it is iterated under the seed of an epoch, and its list is kept.

    Attributes:
        given: the sampler, of each subclass.
    """

    given: Iterable[int]

    def __init__(self, population: Population) -> None:
        self._seed = population.seed
        self._lists = dict[int, np.ndarray]()
        listed = self._list(0)
        self._length = len(listed)

    def __len__(self) -> int:
        return self._length

    def draw(self, epoch: int, positions: np.ndarray) -> np.ndarray:
        """See `Sampler.draw`."""
        listed = self._list(epoch)
        if len(listed) != self._length:
            raise ConfigError(
                f"the sampler {type(self).__name__} lists {len(listed)} items in epoch {epoch}, and "
                f"{self._length} in epoch 0: let it list as many in each"
            )
        return listed[positions]

    def _list(self, epoch: int) -> np.ndarray:
        lists = self._lists
        if epoch not in lists:
            k0, k1 = derive_keys(2, self._seed, Domain.TORCH_SAMPLER, epoch).tolist()
            if hasattr(self.given, "set_epoch"):
                self.given.set_epoch(epoch)
            reached = ReachedGenerators(self.given)
            with process_kept(), reached.kept():
                seed_process(k0, k1)
                reached.rewind((k0, k1))
                # one epoch at a time, so that the check of a sampler sees whether it comes again
                listed = list(map(operator.index, self.given))
                lists = self._lists = {epoch: np.array(listed, np.int64)}
        return lists[epoch]

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_lists": {}}
