"""Programs: pipelines of known steps, drawn and carried out for a whole micro-batch at once.

    Program          steps, and their draws for B samples under their keys
    find_program     the program at the beginning of an Albumentations Compose, and the steps that are left to it

A program's result depends only on the pixels, the key and the steps: raypipe draws the numbers itself
(`raypipe.transform.draws`), and operations are integer arithmetic (`raypipe.transform.ops`).
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

import numpy as np

from raypipe.plan.places import Sides
from raypipe.transform.color_steps import COLOR_STEPS
from raypipe.transform.draws import uniforms
from raypipe.transform.geometry_steps import (
    GEOMETRY_STEPS,
    TURNS,
    RandomResizedCrop,
    Turn,
)
from raypipe.transform.ops import Op, sizes_behind
from raypipe.transform.step import SIZING, Step

_KINDS = {kind.__name__: kind for kind in (*GEOMETRY_STEPS, *COLOR_STEPS)}


class Program:
    """Program of known steps, in order.

    Attributes:
        steps: the pipeline's steps.
        ops: int32 (n, 2): the code of each operation, and where its parameters begin.
        num_params: P, see `draw`.
        size: (height, width) of its results; None = it depends on the image.
        takes_points: whether boxes and keypoints can follow, see `raypipe.transform.follow`.
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
        self.size = self._find_size()
        first = self.steps[0] if self.steps else None
        self.crop_target: Sides | None = None
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
            The parameters, int64 (B, P), see `raypipe.transform.ops`; and the (height, width) of what they make.
        """
        params = np.empty((len(keys), self.num_params), np.int64)
        u = uniforms(keys, self._num_uniforms)
        sizes, column, place = sizes.astype(np.int64), 0, 0
        for step in self.steps:
            applies = u[:, place] < step.p
            parts = iter(
                step.draw(u[:, place + 1 : place + 1 + step.num_uniforms], sizes)
            )
            place += 1 + step.num_uniforms
            resized = sizes
            for op in step.ops:
                params[:, column] = applies
                first = column = column + 1
                while column < first + step.num_params(op):
                    part = next(parts)
                    columns = (
                        part[:, None]
                        if isinstance(part, np.ndarray) and part.ndim == 1
                        else part
                    )
                    if isinstance(columns, np.ndarray):
                        width = columns.shape[1]
                    else:
                        width = 1
                    params[:, column : column + width] = columns
                    column += width
                resized = sizes_behind(op, params[:, first:column], resized)
            if step.p >= 1:
                sizes = resized
            else:
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

    def _find_size(self) -> Sides | None:
        """Return the size of all results: equal for images of two sizes, for all draws."""
        keys = np.array([(k, 1) for k in range(16)], np.uint64)
        sizes = np.concatenate(
            [
                self.draw(keys, np.array([size] * 16))[1]
                for size in ((1009, 2003), (2003, 1009))
            ]
        )
        height, width = sizes[0].tolist()
        return (height, width) if (sizes == sizes[0]).all() else None


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


def _native(step: Any) -> Step | None:
    """The step of a transform of Albumentations', None = it is unknown here."""
    name = type(step).__name__
    is_library = type(step) is getattr(sys.modules["albumentations"], name, None)
    return native_step(name, vars(step)) if is_library else None


def why_no_program(pipeline: Any) -> str:
    """Say in a few words, which name the step, why a pipeline is not a program as a whole; empty: it is one."""
    program, rest = find_program(pipeline)
    if program and not rest:
        return ""
    library = sys.modules.get("albumentations")
    if library is None or type(pipeline) is not library.Compose:
        return f"{type(pipeline).__name__} is not a list of Albumentations' steps"
    for number, step in enumerate(pipeline.transforms, 1):
        if _native(step) is None:
            return f"step {number}, {type(step).__name__}, is not among those that raypipe makes itself"
    return "its images have no fixed size, or it is more than its steps (boxes, a chance, saved parameters)"


def find_program(pipeline: Any) -> tuple[Program | None, list[Any]]:
    """The program that a pipeline begins with, and the steps of Albumentations' that are left after it.

    None: the library does it all. That is so where the first step is not known, where what the program would make
    has no fixed size, and where the pipeline is more than its steps (a chance, boxes, saved parameters, …).

    Args:
        pipeline: a program, an Albumentations Compose, or any transform.
    """
    if isinstance(pipeline, Program):
        return pipeline, []
    library = sys.modules.get("albumentations")
    if library is None or type(pipeline) is not library.Compose:
        return None, []
    special = (
        pipeline.processors
        or pipeline.additional_targets
        or pipeline.save_applied_params
    )
    steps = list(pipeline.transforms)
    replays = any(
        getattr(step, "deterministic", False) or getattr(step, "replay_mode", False)
        for step in steps
    )
    if special or replays or pipeline.p != 1:
        return None, []
    native = list[Step]()
    for step in steps:
        known = _native(step)
        if known is None:
            break
        native.append(known)
    program = Program(native)
    rest = steps[len(native) :]
    return (program, rest) if native and program.size else (None, [])
