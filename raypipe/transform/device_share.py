"""A share of each micro-batch left to the training device's decoder, the rest made here: `transform.gpu_share`.

    rows of a micro-batch        become
    0 … n - 1, n by the share    what `EncodedTransform` makes of them, in an EncodedMicroBatch of n rows; those
                                 that the device does not decode (`raypipe.transform.nvjpeg`) are made here, and
                                 stand in it as pixels
    n … B - 1                    what `Images` makes of them: image uint8 (B - n, H, W, 3)

Which rows they are is a matter of their places alone, and who decodes one of them, of its bytes: so the stream is
the same whatever makes it. A row has the pixels, or the box, that it has with a share of 0 or 1.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from raypipe.config import TransformConfig
from raypipe.transform.batch import Arrays, Content, Make, Take
from raypipe.transform.encoded import EncodedTransform, made, pack
from raypipe.transform.nvjpeg import nvjpeg_pixels
from raypipe.transform.sample_transform import Decoded, EncodedSample, Key


def num_for_device(share: float, num_samples: int) -> int:
    """How many of so many samples, at least 2, are left to the device: one or more, and not all.

    Args:
        share: above 0 and below 1.
    """
    return min(num_samples - 1, max(1, round(share * num_samples)))


class DeviceShare:
    """What samples become where a share of them is left to the device: a pure function of place, bytes and key.

    An object serves one thread at a time.

    Args:
        encoded: of the samples that are left to the device.
        images: `Images` of the others; of the same preset and size.
        config: says the share.
    """

    def __init__(self, encoded: EncodedTransform, images: Content, config: TransformConfig) -> None:
        self._encoded, self._images, self._config = encoded, images, config
        self._for_device = False
        self.draws_globally = images.draws_globally

    def one(self, sample: EncodedSample | Decoded, key: Key, out: np.ndarray | None = None) -> Any:
        """As of `Images`, or within `pack`, of rows for the device, as of `EncodedTransform`."""
        if not self._for_device:
            return self._images.one(sample, key, out)
        assert isinstance(sample, EncodedSample)
        if sample.image is not None and nvjpeg_pixels(sample.image, exif=self._config.apply_exif) is not None:
            return self._encoded.one(sample, key)
        return made(self._images.one(sample, key)["image"])

    def pack(self, make: Make, num_samples: int, take: Take) -> Arrays:
        """The arrays of a micro-batch."""
        num = num_for_device(self._config.gpu_share, num_samples)
        self._for_device = True
        try:
            encoded = pack(make(position, None) for position in range(num))
        finally:
            self._for_device = False
        images = self._images.pack(lambda position, out: make(num + position, out), num_samples - num, take)
        return {**images, **encoded}
