"""Micro-batches for the device to decode: what to cut from each sample; bad samples are treated as with pixels."""

from __future__ import annotations

from typing import Any

import numpy as np

from raypipe.config import TransformConfig
from raypipe.errors import ConfigError
from raypipe.transform.encoded import EncodedMicroBatch, EncodedTransform, pack
from raypipe.transform.micro_batch import MicroBatchTransform
from raypipe.transform.sample_transform import Key


def encoded_transform(transform: Any, config: TransformConfig) -> EncodedTransform:
    """What a split's transform means where the device decodes.

    Raises:
        ConfigError: it cannot be done there.
    """
    if not isinstance(transform, str):
        raise ConfigError(
            "transform.decode='gpu' knows presets only (light, center, resize): steps and callables need pixels, "
            "so decode='cpu'"
        )
    if config.decode_min_side:
        raise ConfigError("transform.decode_min_side is of the CPU's decoder: leave it out with decode='gpu'")
    return EncodedTransform(transform, config.size, config.exif)


class EncodedMicroBatchTransform(MicroBatchTransform):
    """Describes and packs micro-batches; results have an EncodedMicroBatch as their `image`.

    A sample is bad when its header cannot be read, or a JPEG is cut short; what is damaged further in shows on the
    device.

    Args:
        transform: what to cut.
        on_bad_sample, exact, store_address, sample_name: as for `MicroBatchTransform`.
    """

    def __init__(
        self,
        transform: EncodedTransform,
        **options: Any,
    ) -> None:
        super().__init__(None, **options)
        self.encoded = transform

    def one(self, data: Any, key: Key) -> Any:
        box, flip = self.encoded.describe(data, key)
        return data, box, flip

    def _put(self, out: Any, position: int, image: Any, num_samples: int, index: int) -> Any:
        out = [None] * num_samples if out is None else out
        out[position] = image
        return out

    def _finish(self, out: Any, weight: np.ndarray) -> EncodedMicroBatch:
        return pack(out or [None] * len(weight))
