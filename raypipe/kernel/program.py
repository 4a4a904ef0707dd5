"""Programs: pipelines of known steps, drawn and carried out for a whole micro-batch at once.

A program's result depends only on the pixels, the key and the steps: the numbers are drawn here (`draws.py`), and
operations are integer arithmetic (`ops.py`).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

import numpy as np

from raypipe.kernel.color_steps import COLOR_STEPS
from raypipe.kernel.draws import uniforms
from raypipe.kernel.geometry_steps import GEOMETRY_STEPS, TURNS, RandomResizedCrop, Turn
from raypipe.kernel.ops import Op, sizes_behind
from raypipe.kernel.step import SIZING, Step

_KINDS = {kind.__name__: kind for kind in (*GEOMETRY_STEPS, *COLOR_STEPS)}


class Program:
    """Program of known steps, in order.

    Attributes:
        steps: the pipeline's steps.
        ops: int32 (n, 2): the code of each operation, and where its parameters begin.
        num_params: P, see `draw`.
        size: (height, width) of its results; None = it depends on the image.
        takes_points: whether boxes and keypoints can follow, see `raypipe.kernel.annotations`.
        crop_target: (height, width) to which the first step resizes the crop that it begins with; None: it begins
            with another.
    """

    def __init__(self, steps: Sequence[Step]) -> None:
        self.steps = tuple(steps)
        ops = []
        offset = 0
        for step in self.steps:
            for op in step.ops:
                ops.append((int(op), offset))
                offset += 1 + step.num_params(op)
        self.ops = np.array(ops, np.int32).reshape(-1, 2)
        self.num_params = offset
        self._num_uniforms = sum(1 + step.num_uniforms for step in self.steps)
        self.takes_points = all(step.takes_points for step in self.steps)
        # many draws, for images of two sizes
        sizes = np.repeat([(1009, 2003), (2003, 1009)], 16, axis=0)
        _, made = self.draw(np.arange(64, dtype=np.uint64).reshape(32, 2), sizes)
        height, width = made[0].tolist()
        self.size = (height, width) if (made == made[0]).all() else None
        first = self.steps[0] if self.steps else None
        self.crop_target: tuple[int, int] | None = None
        if isinstance(first, RandomResizedCrop):
            self.crop_target = first.size[0], first.size[1]

    def at(self, strength: float) -> Program:
        """The program with weaker steps, for a strength in [0, 1]; operations, size and parameters stay."""
        if strength == 1:
            return self
        weaker = copy.copy(self)
        weaker.steps = tuple(step.weaker(strength) for step in self.steps)
        return weaker

    def draw(
        self, keys: np.ndarray, sizes: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Draw the parameters of B samples.

        Args:
            keys: uint64 (B, 2), see `Plan.sample_keys`.
            sizes: (height, width) of their images, int (B, 2), at least 1.

        Returns:
            The parameters, int64 (B, P), see `raypipe.kernel.ops`; and the (height, width) of what they make.
        """
        params = np.empty((len(keys), self.num_params), np.int64)
        u = uniforms(keys, self._num_uniforms)
        sizes, column, uniform_column = sizes.astype(np.int64), 0, 0
        for step in self.steps:
            applies = u[:, uniform_column] < step.p
            first_uniform = uniform_column + 1
            uniform_column = first_uniform + step.num_uniforms
            numbers = iter(step.draw(u[:, first_uniform:uniform_column], sizes))
            resized = sizes
            for op in step.ops:
                params[:, column] = applies
                first = column = column + 1
                while column < first + step.num_params(op):
                    drawn = np.asarray(next(numbers))
                    width = drawn.shape[1] if drawn.ndim == 2 else 1
                    rows = drawn.reshape(-1, width)
                    params[:, column : column + width] = rows
                    column += width
                resized = sizes_behind(op, params[:, first:column], resized)
            sizes = np.where(applies[:, None], resized, sizes)
        return params, sizes

    def applied(self, params: np.ndarray) -> Iterator[tuple[Step, Op, list[int]]]:
        """The operations that apply to an image, in order, with their steps and parameters."""
        column = 0
        for step in self.steps:
            for op in step.ops:
                end = column + 1 + step.num_params(op)
                if params[column]:
                    yield step, op, params[column + 1 : end].tolist()
                column = end


def native_step(name: str, arguments: Mapping[str, Any]) -> Step | None:
    """Return the step of a name; None = the name or an argument's value is unknown here.

    Args:
        arguments: as a transform of the library keeps them; those with no effect on an image are ignored.
    """
    if name in TURNS:
        codes, p = TURNS[name]
        return Turn(codes=codes, p=arguments.get("p", p))
    kind = _KINDS.get(name)
    if kind is None or any(
        arguments.get(name, of[0]) not in of for name, of in kind.supported.items()
    ):
        return None
    step = kind(
        **{
            field.name: arguments[field.name]
            for field in fields(kind)
            if field.name in arguments
        }
    )
    if step.is_known and (step.p >= 1 or not SIZING & {*step.ops}):
        return step
    return None


def program_of(steps: Sequence[Mapping[str, Mapping[str, Any]]]) -> Program:
    """The program of steps `{NAME: {argument: value}}` that are all known; for presets."""
    native = [
        native_step(name, arguments)
        for entry in steps
        for name, arguments in entry.items()
    ]
    assert all(native), steps
    return Program([step for step in native if step])
