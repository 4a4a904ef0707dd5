"""The sample makers of a stream, one for each split and size of its images, and the check of user code in them.

A transform's draws are seeded, as far as its generators are found. Other state (a counter, a running statistic, a
generator made from the clock) shows itself where the same samples are made again in another copy of the transform,
last first.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from raypipe.errors import ConfigError, SampleError
from raypipe.plan.places import MicroBatchId, Sides, Split
from raypipe.stores.base import Columns
from raypipe.streaming.items import ITEM, DatasetItems, ItemMaker
from raypipe.transform.columns import SampleColumns
from raypipe.transform.fields import COLUMN, Rows
from raypipe.transform.nest import difference
from raypipe.transform.presets import build_transform
from raypipe.transform.sample_maker import SampleMaker
from raypipe.transform.sizes import Size, has_sizes, sides_of, size_in
from raypipe.transform.transform_steps import brief
from raypipe.transform.user_code import copied

if TYPE_CHECKING:
    from raypipe.streaming.spec import StreamSpec

logger = logging.getLogger(__name__)

NUM_REMADE = 4

Maker = SampleMaker | ItemMaker


class SampleMakers:
    """Makes the sample makers of a stream as their sizes come up, and keeps them.

    Attributes:
        spec: the stream.
    """

    def __init__(self, spec: StreamSpec) -> None:
        self.spec = spec
        self._makers: dict[tuple[Split, Size], Maker] = {}
        # Copies of makers whose code is the user's, until their first samples were made twice, see `check`. Code
        # that is named gets the size, so each maker has its own.
        self._unchecked: dict[Maker, Callable[[], Maker]] = {}

    def get(self, position: MicroBatchId, bucket: int | None = None) -> Maker:
        """Return the maker of a micro-batch's samples; make it if its image size is new.

        Args:
            bucket: that of its samples; None = as the plan draws it.
        """
        split = position.split
        size = self.size(position, bucket)
        if (split, size) in self._makers:
            return self._makers[split, size]
        spec = self.spec
        sides = None
        if has_sizes(spec.transform, split, spec.plan.config.sides_in(split)):
            sides = sides_of(size)
        code = spec.transforms[split]
        sample_maker = self._new_maker(code, spec.columns, size, sides)
        self._makers[split, size] = sample_maker
        if sample_maker.has_user_code:
            if isinstance(code, str) and ":" in code:  # it may name an object
                code = build_transform(code, size)
            # Before its first use, of which it may keep something.
            code = copied(code)
            columns = replace(spec.columns, function=copied(spec.columns.function))
            self._unchecked[sample_maker] = lambda: self._new_maker(
                copied(code), columns, size, sides
            )
        return sample_maker

    def _new_maker(
        self, code: Any, columns: SampleColumns, size: Size, sides: Sides | None
    ) -> Maker:
        """Make the maker of a transform, or of a Dataset in its place."""
        if isinstance(code, DatasetItems):
            return ItemMaker(code)
        return SampleMaker(
            code,
            self.spec.transform,
            columns,
            size,
            sides,
            self.spec.pool.kernel_threads,
        )

    def size(self, position: MicroBatchId, bucket: int | None = None) -> Size:
        """The size of a micro-batch's images, see `get`."""
        plan = self.spec.plan
        sides = None
        if buckets := plan.config.sides_in(position.split):
            if bucket is None:
                bucket = int(plan.draw(position).buckets[0])
            sides = buckets[bucket]
        return size_in(self.spec.transform, position.split, position.epoch, sides)

    @property
    def has_user_code(self) -> bool:
        """True if a transform runs code of the user's."""
        return any(sample_maker.has_user_code for sample_maker in self._makers.values())

    @property
    def draws_globally(self) -> bool:
        """True if a transform draws from generators of the process."""
        return any(
            sample_maker.draws_globally for sample_maker in self._makers.values()
        )

    def strength(self, position: MicroBatchId) -> float:
        """The strength of a micro-batch's transform; a validation's is whole."""
        if position.split == "val":
            return 1.0
        plan = self.spec.plan
        return self.spec.transform.strength_at(
            plan.progress(plan.global_step(position))
        )

    def is_unchecked(self, sample_maker: Maker) -> bool:
        """True until the first samples of a maker whose code is the user's were made twice."""
        return sample_maker in self._unchecked

    def check(
        self,
        sample_maker: Maker,
        position: MicroBatchId,
        originals: Mapping[int, dict[str, Any]],
        samples: Columns,
        keys: np.ndarray,
    ) -> None:
        """Compare the first samples of a maker with what a copy of the user's code makes of them, last first.

        Args:
            originals: the fields that `sample_maker` has made, by the number of the sample.
            samples, keys: those samples, and others; and their keys.

        Raises:
            ConfigError: they differ.
        """
        again = self._unchecked.pop(sample_maker)()
        again.weaken(self.strength(position))
        remade = dict[int, dict[str, Any]]()
        try:
            for number in sorted(originals, reverse=True):
                rows = Rows(again.fields, 1)
                rows.put(0, 0, again.slow(samples, number, keys[number].tolist()))
                remade[number] = rows.sample(0)
        except SampleError:  # the stream's own errors say what such a sample is
            return
        for number, original in originals.items():
            if name := _differing(original, remade[number]):
                is_column = name.startswith(f"{COLUMN}.")
                code = "make_columns" if is_column else self.title(position.split)
                raise ConfigError(
                    f"{code} does not make the same of the same sample: it keeps state from sample to sample, or "
                    f"draws elsewhere ({name} differs). Let it take an argument `rng`, and draw from that alone, "
                    "or from the generators of random, numpy and torch, which raypipe seeds for each sample; make "
                    "generators and pipelines outside of the call; and keep no counter, buffer or statistic from "
                    "sample to sample (docs/reproducibility.md)"
                )

    def title(self, split: Split) -> str:
        """The transform or the Dataset of a split, as errors name it."""
        code = self.spec.transforms[split]
        if isinstance(code, DatasetItems):
            return code.name
        return f"transform.{split} is {brief(code)}, which"


def _differing(first: Mapping[str, Any], second: Mapping[str, Any]) -> str:
    """The name of a field that differs; empty: none does."""
    for name in first:
        differs = difference(first[name], second.get(name))
        if differs == "others" and name == ITEM:
            logger.warning(
                "an item has values besides its tensors and arrays, such as ids of objects, that differ each "
                "time it is made, and a digest of the stream will differ too"
            )
        elif differs:
            return name
    return ""
