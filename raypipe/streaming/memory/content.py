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
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from raypipe.library_settings import of_this_process
from raypipe.packages import versions
from raypipe.plan.places import MicroBatchId, Split
from raypipe.streaming.sample_makers import Maker, SampleMakers
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


class Code(NamedTuple):
    """The code of a maker of samples: all of a key but samples and strength.

    Attributes:
        digest: hash over store, transform, size, settings and versions.
        is_fixed: no step is random, so that keys of samples decide nothing.
        is_public: other streams can have the same content, since no code of the user's is part of it.
    """

    digest: bytes
    is_fixed: bool
    is_public: bool


class Contents:
    """Contents of a stream, as one of its processes makes them.

    Args:
        makers: those of the stream's samples.
        stream: name that no other stream has; content with code of the user's belongs only to it.
    """

    def __init__(self, makers: SampleMakers, stream: str) -> None:
        self._makers = makers
        self._spec = makers.spec
        self._stream = stream
        self._codes: dict[tuple[Split, Maker], Code] = {}

    def of_training(self) -> str:
        """Return a hash of all that a training makes: streams of one hash are alike. "" = like no other."""
        code = self.first("train")
        if not code.is_public:
            return ""
        config = self._spec.plan.config
        rank, world_size = self._spec.share
        share = f"{rank}-{world_size}"
        return f"{code.digest.hex()}-{config.seed}-{config.micro_batch_size}-{share}"

    def keys(self, block: Sequence[MicroBatchId]) -> list[bytes]:
        """Return the key of each micro-batch of a block."""
        plan = self._spec.plan
        draws = plan.draw_block(block)
        keys = []
        for number, position in enumerate(block):
            drawn = draws.at(number)
            code = self._of(position, int(drawn.buckets[0]))
            strength = self._makers.strength(position)
            digest = hashlib.blake2b(code.digest, digest_size=_KEY_BYTES)
            digest.update(f"{strength!r} {len(drawn.indices)} ".encode())
            digest.update(np.ascontiguousarray(drawn.indices).data)
            if not code.is_fixed:
                of_samples = plan.sample_keys(position.split, drawn)
                digest.update(np.ascontiguousarray(of_samples).data)
            keys.append(digest.digest())
        return keys

    def first(self, split: Split) -> Code:
        """The code of a split's first micro-batch."""
        return self._of(MicroBatchId(split, 0, 0, 0))

    def _of(self, position: MicroBatchId, bucket: int | None = None) -> Code:
        maker = self._makers.get(position, bucket)
        pair = (position.split, maker)
        if pair not in self._codes:
            size = self._makers.size(position, bucket)
            self._codes[pair] = self._code(position.split, maker, size)
        return self._codes[pair]

    def _code(self, split: Split, maker: Maker, size: Size) -> Code:
        spec = self._spec
        maker.weaken(1.0)  # a key has its own strength
        transforms = [transform for _, transform in maker.transforms]
        steps = [
            (field, _described(transform)) for field, transform in maker.transforms
        ]
        are_described = all(description is not None for _, description in steps)
        of_store = spec.store_facts.get(split)
        is_public = of_store is not None and not maker.has_user_code and are_described
        is_exact = not any(transform.has_rest for transform in transforms)
        # without a transform, a Dataset makes the items
        has_function = spec.columns.function is not None or not transforms
        is_fixed = not has_function and all(one.is_fixed for one in transforms)
        settings = dataclasses.asdict(spec.transform)
        columns = dataclasses.replace(spec.columns, function=None)
        facts = [
            split,
            of_store,
            steps,
            size,
            {name: settings[name] for name in settings if name not in _ELSEWHERE},
            repr(columns),
            spec.transform.max_bad_fraction > 0,
            {"machine": platform.machine(), "versions": versions()},
            of_this_process(),
            "" if is_exact and is_public else processor(),
            "" if is_public else self._stream,
        ]
        content = json.dumps(facts, default=_plain).encode()
        digest = hashlib.blake2b(content, digest_size=_KEY_BYTES).digest()
        return Code(digest, is_fixed, is_public)


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


def _plain(value: Any) -> Any:
    """Return a value of a library's as JSON has it, with each of its numbers."""
    if isinstance(value, np.ndarray):
        return [value.dtype.str, value.tolist()]
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} has no description")
