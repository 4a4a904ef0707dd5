"""The content of a micro-batch as a key: all that determines its arrays, whichever stream makes it.

    store        fingerprint, schema and options, and when its files were written, as the driver sees them
    transform    each step with its arguments, columns, and the settings of decode and targets
    versions     of the packages that pixels depend on, and of raypipe's own code; but for steps that are exact on
                 any processor, also its model
    micro-batch  the samples and their strength; their keys, unless no step is random; whether bad samples are
                 tolerated

Code of the user's has no key beyond its stream: two functions may differ in a detail.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import pickle
import platform
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from raypipe.packages import versions
from raypipe.plan.places import MicroBatchId, Split
from raypipe.plan.samplers import Draws
from raypipe.streaming.sample_makers import Maker
from raypipe.streaming.spec import StreamSpec
from raypipe.transform.albumentations import described
from raypipe.transform.sample_transform import SampleTransform
from raypipe.transform.sizes import Size

_KEY_BYTES = 16
# Settings that the key has in another form, or that decide nothing in a micro-batch.
_ELSEWHERE = ("train", "val", "size", "strength", "max_bad_fraction", "time_limit_s")


def processor() -> str:
    """The model of this machine's processor."""
    with contextlib.suppress(OSError), Path("/proc/cpuinfo").open() as lines:
        return next(
            (
                line.split(":")[1].strip()
                for line in lines
                if line.startswith("model name")
            ),
            "",
        )
    return platform.processor()


Recipe = tuple[Maker, Size, float, Draws]
"""Maker of samples, size, strength and draws of a micro-batch, from `SampleMakers.recipes`."""
Recipes = Callable[[Sequence[MicroBatchId]], Sequence[Recipe]]


class Content(NamedTuple):
    """Common part of the keys of one split and one image size.

    Attributes:
        digest: hash over store, transform, settings and versions.
        is_fixed: no step is random, so keys of samples decide nothing.
        is_public: other streams can have the same content, since no code of the user's is part of it.
    """

    digest: bytes
    is_fixed: bool
    is_public: bool

    def key(self, strength: float, indices: np.ndarray, keys: np.ndarray) -> bytes:
        """Return the key of a micro-batch.

        Args:
            strength: see `transform.strength`.
            indices: int64 (B,), its samples.
            keys: uint64 (B, 2), of their transforms.
        """
        digest = hashlib.blake2b(self.digest, digest_size=_KEY_BYTES)
        digest.update(f"{strength!r} {len(indices)} ".encode())
        digest.update(np.ascontiguousarray(indices).data)
        if not self.is_fixed:
            digest.update(np.ascontiguousarray(keys).data)
        return digest.digest()


class Contents:
    """Contents of a stream, as one of its processes makes them.

    Args:
        spec: the stream.
        recipes: describes the micro-batches of a block.
        stream: name that no other stream has; content with code of the user's belongs only to it.
    """

    def __init__(
        self,
        spec: StreamSpec,
        recipes: Recipes,
        stream: str,
    ) -> None:
        self._spec = spec
        self._recipes = recipes
        self._stream = stream
        self._contents: dict[tuple[Split, Maker], Content] = {}

    def of_split(self, split: Split) -> Content:
        """Return the content of a split's first micro-batches."""
        ((code, size, _, _),) = self._recipes([MicroBatchId(split, 0, 0, 0)])
        return self._of(split, code, size)

    def of_training(self) -> str:
        """Return a hash of all that a training makes: streams of one hash are alike. "" = like no other."""
        training = self.of_split("train")
        config = self._spec.plan.config
        if not training.is_public:
            return ""
        rank, world_size = self._spec.share
        share = f"{rank}-{world_size}"
        digest = training.digest.hex()
        return f"{digest}-{config.seed}-{config.micro_batch_size}-{share}"

    def keys(self, block: Sequence[MicroBatchId]) -> list[bytes]:
        """Return the key of each micro-batch of a block."""
        split = block[0].split
        keys = []
        for code, size, strength, draws in self._recipes(block):
            content = self._of(split, code, size)
            of_samples = self._spec.plan.sample_keys(split, draws)
            keys.append(content.key(strength, draws.indices, of_samples))
        return keys

    def _of(self, split: Split, code: Maker, size: Size) -> Content:
        pair = (split, code)
        if pair not in self._contents:
            self._contents[pair] = _content_of(
                self._spec, split, code, size, self._stream
            )
        return self._contents[pair]


def _content_of(
    spec: StreamSpec, split: Split, code: Maker, size: Size, stream: str
) -> Content:
    code.weaken(1.0)  # the key of a micro-batch has its strength
    transforms = code.transforms
    steps = [(field, _described(transform)) for field, transform in transforms]
    store = spec.store_facts.get(split)
    is_public = (
        store is not None
        and not code.has_user_code
        and all(description is not None for _, description in steps)
    )
    every = [transform for _, transform in transforms]
    is_exact = all(not transform.has_rest for transform in every)
    settings = dataclasses.asdict(spec.transform)
    columns = dataclasses.replace(spec.columns, function=None)
    facts = [
        split,
        store,
        steps,
        size,
        {name: settings[name] for name in settings if name not in _ELSEWHERE},
        repr(columns),
        spec.transform.max_bad_fraction > 0,
        {"machine": platform.machine(), "versions": versions()},
        "" if is_exact and is_public else processor(),
        "" if is_public else stream,
    ]
    digest = hashlib.blake2b(
        json.dumps(facts, default=_plain).encode(), digest_size=_KEY_BYTES
    )
    has_function = spec.columns.function is not None
    # without a transform, a Dataset makes the items
    is_fixed = bool(every) and not has_function and all(map(_is_fixed, every))
    return Content(digest.digest(), is_fixed, is_public)


def _described(transform: SampleTransform) -> str | None:
    """Describe a transform with all of its arguments; None = it has parts that nobody but their author knows."""
    if transform.has_user_code:
        return None
    parts: list[Any] = [transform.kind]
    try:
        if transform.program:
            parts.append(
                [
                    [type(step).__name__, dataclasses.asdict(step)]
                    for step in transform.program.steps
                ]
            )
        if transform.has_rest and transform.kind == "albumentations":
            pipeline = described(transform.transform)
            if pipeline is None:
                return None
            parts.append(pipeline)
        elif transform.has_rest:
            # None, or modules of torchvision and torch, which pickle as their arguments
            content = pickle.dumps(transform.transform, protocol=4)
            parts.append(hashlib.blake2b(content).hexdigest())
        return json.dumps(parts, default=_plain)
    except Exception:  # a library raises any type for parts that it cannot describe
        return None


def _is_fixed(transform: SampleTransform) -> bool:
    """Return whether no step draws a random number."""
    if transform.kind == "none":
        return transform.transform is None
    if transform.program is None or transform.has_rest:
        return False
    return all(
        step.p >= 1 and step.num_uniforms == 0 for step in transform.program.steps
    )


def _plain(value: Any) -> Any:
    """Return a value of a library's as JSON has it, with each of its numbers."""
    if isinstance(value, np.ndarray):
        return [value.dtype.str, value.tolist()]
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} has no description")
