"""The sample makers of a stream, one for each split and size of its images, and the check of user code in them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from raypipe.plan.places import MicroBatchId, Sides, Split
from raypipe.stores.base import Columns
from raypipe.streaming.items import DatasetItems, ItemMaker
from raypipe.streaming.remake import check_remade
from raypipe.transform.columns import SampleColumns
from raypipe.transform.fields import Rows
from raypipe.transform.presets import build_transform
from raypipe.transform.sample_maker import SampleMaker
from raypipe.transform.sizes import Size, has_sizes, sides_of, size_in
from raypipe.transform.transform_steps import brief
from raypipe.transform.user_code import copied

if TYPE_CHECKING:
    from raypipe.streaming.spec import StreamSpec


Maker = SampleMaker | ItemMaker


class SampleMakers:
    """Makes the sample makers of a stream as their sizes come up, and keeps them."""

    def __init__(self, spec: StreamSpec) -> None:
        self._spec = spec
        self._makers: dict[tuple[Split, Size], Maker] = {}
        # Copies of makers whose code is the user's, until their first samples were made twice, see `remake`. Code
        # that is named gets the size, so each maker has its own.
        self._unchecked: dict[Maker, Callable[[], Maker]] = {}

    def get(self, position: MicroBatchId, bucket: int | None = None) -> Maker:
        """Return the maker of a micro-batch's samples; make it if its image size is new.

        Args:
            bucket: that of its samples; None = as the plan draws it.
        """
        split = position.split
        size = self._size(position, bucket)
        if (split, size) in self._makers:
            return self._makers[split, size]
        spec = self._spec
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
            self._spec.transform,
            columns,
            size,
            sides,
            self._spec.pool.kernel_threads,
        )

    def _size(self, position: MicroBatchId, bucket: int | None) -> Size:
        """The size of a micro-batch's images."""
        plan = self._spec.plan
        sides = None
        if buckets := plan.config.sides_in(position.split):
            if bucket is None:
                bucket = int(plan.draw(position).buckets[0])
            sides = buckets[bucket]
        return size_in(self._spec.transform, position.split, position.epoch, sides)

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
        plan = self._spec.plan
        return self._spec.transform.strength_at(
            plan.progress(plan.global_step(position))
        )

    def recipes(
        self, block: Sequence[MicroBatchId]
    ) -> list[tuple[Maker, Size, float, np.ndarray, np.ndarray]]:
        """Return the sample maker, size, strength, indices and keys of each micro-batch of a block."""
        plan = self._spec.plan
        draws = plan.draw_block(block)
        recipes = []
        for number, position in enumerate(block):
            drawn = draws.at(number)
            bucket = int(drawn.buckets[0])
            keys = plan.sample_keys(position.split, drawn)
            recipes.append(
                (
                    self.get(position, bucket),
                    self._size(position, bucket),
                    self.strength(position),
                    drawn.indices,
                    keys,
                )
            )
        return recipes

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
        """Make the first samples of a maker again; raises ConfigError as `check_remade`.

        Args:
            originals: the fields that `sample_maker` has made, by the number of the sample.
            samples, keys: those samples, and others; and their keys.
        """
        again = self._unchecked.pop(sample_maker)()
        again.weaken(self.strength(position))

        def make(number: int) -> dict[str, Any]:
            """The fields of a sample as a micro-batch has them."""
            rows = Rows(again.fields, 1)
            rows.put(0, 0, again.slow(samples, number, keys[number].tolist()))
            return rows.sample(0)

        check_remade(originals, make, self.title(position.split))

    def title(self, split: Split) -> str:
        """The transform or the Dataset of a split, as errors name it."""
        code = self._spec.transforms[split]
        if isinstance(code, DatasetItems):
            return code.name
        return f"transform.{split} is {brief(code)}, which"
