"""Micro-batches of encoded samples → one uint8 array, each sample transformed under its own key.

MicroBatchTransform   B encoded samples and their keys → image (1, B, H, W, 3), label, index, weight
BadSampleBudget       how many bad samples a run puts up with
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from raypipe.config import CropDecode
from raypipe.errors import BadSamplesError, ConfigError, SampleError
from raypipe.stores.base import title_of
from raypipe.transform.crop_decode import CropDecoder
from raypipe.transform.crop_first import Box
from raypipe.transform.decode import decode
from raypipe.transform.sample_cache import Decoded, SampleCache
from raypipe.transform.sample_transform import Key, SampleTransform

ReadSample = Callable[[], tuple[Any, int]]
"""Reads a sample: its image bytes, None or Decoded, and its label."""

ReadSubstitute = Callable[[int, int], tuple[Any, int, int, Key]]
"""(position in the micro-batch, attempt from 0) → (image bytes or ReadSample, label, index, key) of another one.
For the whole to be reproducible it must be a pure function of the plan."""

NUM_SUBSTITUTES = 8  # at the default budget of 1 % bad samples, 8 bad substitutes in a row have a chance of 1e-16


@dataclass(frozen=True)
class Attempt:
    """What earlier attempts at a micro-batch have taught.

    Attributes:
        bad: index → reason, of samples that must not be touched.
        before_sample: called with the index of each sample before it is touched, which begins with reading it.
    """

    bad: Mapping[int, str] = field(default_factory=dict)
    before_sample: Callable[[int], None] | None = None


FIRST_ATTEMPT = Attempt()


@dataclass
class MicroBatchResult:
    """B transformed samples. Padding, and bad samples of a validation, have weight 0, label 0 and black pixels.

    Attributes:
        image: uint8 (1, B, H, W, 3), the row of one Ray Data block; instead, where the device decodes, an
            EncodedMicroBatch, and, where there are masks or boxes, a dict of arrays (B, …).
        label: int64 (B,); 0 for padding.
        index: int64 (B,), the sample that was delivered, so a substitute's own; -1 for padding.
        weight: float32 (B,), 1 or 0.
        bad: one record per bad sample: `store` (address), `index`, `name` (the store's own, "" where it has
            none), `substitute` (index, or None in a validation), `error` (reason).
    """

    image: Any
    label: np.ndarray
    index: np.ndarray
    weight: np.ndarray
    bad: list[dict[str, Any]] = field(default_factory=list)


class MicroBatchTransform:
    """Decodes and transforms micro-batches into one array each, and judges bad samples.

    A sample is bad when its bytes cannot be decoded or the transform raises on its pixels.

    Args:
        transform: for `SampleTransform`.
        decode_min_side: pixels, see `raypipe.transform.decode.decode`.
        crop_decode, check_whole: what is decoded, and checked, where the transform begins with a random resized
            crop, see `raypipe.transform.crop_decode`.
        exif: turn images upright.
        on_bad_sample: "raise", or "substitute" another sample.
        exact: for a validation: a bad sample is not substituted, its row has weight 0.
        store_address: named in errors and records.
        sample_name: what the store calls a sample, by its index, for errors and records.
        cache: where decoded samples are kept; it must be of this store, and of the same settings of the decode.
        probe: encoded samples to learn the size of the results by, should a micro-batch of nothing but
            padding come first; else the first result decides it.
    """

    def __init__(
        self,
        transform: Callable[..., Any] | None,
        *,
        decode_min_side: int | None = None,
        crop_decode: CropDecode = "exact",
        check_whole: bool = True,
        exif: bool = False,
        on_bad_sample: Literal["substitute", "raise"] = "substitute",
        exact: bool = False,
        store_address: str = "",
        sample_name: Callable[[int], str] = lambda _: "",
        cache: SampleCache | None = None,
        probe: Callable[[], Iterable[Any]] | None = None,
    ) -> None:
        if on_bad_sample not in ("substitute", "raise"):
            raise ConfigError(f"transform.on_bad_sample is {on_bad_sample!r}; it is 'substitute' or 'raise'")
        self.sample_transform = SampleTransform(transform)
        self.decode_min_side, self.exif = decode_min_side, exif
        target = self.sample_transform.crop_target
        self._crop_decoder = (
            CropDecoder(crop_decode, target, check_whole=check_whole, exif=exif, min_side=decode_min_side)
            if target and crop_decode != "off"
            else None
        )
        self.on_bad_sample, self.store_address, self.sample_name = on_bad_sample, store_address, sample_name
        self.exact, self.probe = exact, probe
        self._cache = cache
        self.size: tuple[int, int] | None = None

    def run(
        self,
        columns: dict[str, Any],
        keys: np.ndarray,
        read_substitute: ReadSubstitute | None = None,
        attempt: Attempt = FIRST_ATTEMPT,
    ) -> MicroBatchResult:
        """Transform one micro-batch.

        Args:
            columns: `image`, a list of B bytes, None, Decoded, or ReadSample, which then also gives the label;
                `label` and `index`, int64 (B,). A row whose index is -1 is padding, its image is not looked at.
            keys: uint64 (B, 2), one key per sample.
            read_substitute: gives the stand-ins for bad samples, up to 8 for each.
            attempt: what is known of the micro-batch.

        Raises:
            SampleError: a bad sample under "raise"; or one for which no good substitute was found.
            ConfigError: a result is not uint8 HWC, or not of the size of the others.
        """
        images, keys_list = columns["image"], keys.tolist()
        label = np.array(columns["label"], np.int64)
        index = np.array(columns["index"], np.int64)
        num_samples = len(index)
        weight = np.ones(num_samples, np.float32)
        bad: list[dict[str, Any]] = []
        out: Any = None
        for position in range(num_samples):
            if index[position] < 0:
                label[position], index[position], weight[position] = 0, -1, 0
                continue
            wanted = int(index[position])
            try:
                image, label[position] = self._try(
                    wanted, int(label[position]), images[position], keys_list[position], attempt
                )
            except SampleError as error:
                if self.on_bad_sample == "raise":
                    hint = "transform.on_bad_sample='substitute' would go on without it"
                    raise SampleError(f"{self._name(wanted)}: {error} ({hint})") from error
                record = {
                    "store": self.store_address,
                    "index": wanted,
                    "name": self.sample_name(wanted),
                    "substitute": None,
                    "error": str(error),
                }
                bad.append(record)
                if self.exact:
                    label[position], weight[position] = 0, 0
                    continue
                image, label[position], index[position] = self._substitute(
                    position, record, read_substitute, attempt
                )
                record["substitute"] = int(index[position])
            out = self._put(out, position, image, num_samples, int(index[position]))
        return MicroBatchResult(self._finish(out, weight), label, index, weight, bad)

    def _put(self, out: Any, position: int, image: Any, num_samples: int, index: int) -> Any:
        """Add one result to those of the micro-batch, `out`, which is None for the first."""
        out = self._room(num_samples, image, index, out)
        out[0, position] = image
        return out

    def _finish(self, out: Any, weight: np.ndarray) -> Any:
        """The whole micro-batch; rows without weight are zeros."""
        if out is None:
            out = self._empty(len(weight))
        out[0, weight == 0] = 0
        return out

    def _try(self, index: int, label: int, data: Any, key: Key, attempt: Attempt) -> tuple[Any, int]:
        if attempt.before_sample:
            attempt.before_sample(index)
        if index in attempt.bad:
            raise SampleError(attempt.bad[index])
        if callable(data):
            data, label = data()
        if self._cache is not None and not self._cache.full:
            data = self._kept(self._cache, index, label, data)
        return self.one(data, key), label

    def one(self, data: Any, key: Key) -> Any:
        """Decode and transform one sample; raises SampleError for a bad one."""
        try:
            return self._transformed(data, key)
        except (SampleError, ConfigError, MemoryError):
            # The decoder's own; the user's set-up, or the machine's state: not the sample's fault.
            raise
        except Exception as error:
            raise SampleError(f"the transform raised {type(error).__name__}: {error}") from error

    def _transformed(self, data: Any, key: Key) -> Any:
        if isinstance(data, Decoded):
            return self._of_pixels(data.pixels, key)
        jpeg = self._crop_decoder.open(data) if self._crop_decoder else None
        if jpeg is not None:
            return self.sample_transform.on_crop(*jpeg, key)
        return self.sample_transform(decode(data, min_side=self.decode_min_side, exif=self.exif), key)

    def _of_pixels(self, pixels: np.ndarray, key: Key) -> np.ndarray:
        """What becomes of a whole image, which may be read-only."""
        if self._crop_decoder is None:
            return self.sample_transform(pixels if pixels.flags.writeable else pixels.copy(), key)

        def cut(box: Box) -> np.ndarray:
            top, left, height, width = box
            return pixels[top : top + height, left : left + width].copy()

        return self.sample_transform.on_crop(pixels.shape[:2], cut, key)

    def _kept(
        self, cache: SampleCache, index: int, label: int, data: bytes | Decoded | None
    ) -> bytes | Decoded | None:
        """A sample, decoded and in the cache from now on; a bad one as it is, for `one` to judge."""
        if isinstance(data, Decoded):
            return data
        try:
            pixels = decode(data, min_side=self.decode_min_side, exif=self.exif)
        except SampleError:
            return data
        cache.put(index, label, pixels)
        return Decoded(pixels, label)

    def _substitute(
        self, position: int, record: dict[str, Any], read_substitute: ReadSubstitute | None, attempt: Attempt
    ) -> tuple[Any, int, int]:
        bad = f"{self._name(record['index'])}: {record['error']}"
        if read_substitute is None:
            raise SampleError(f"{bad} (and there is nothing to read a substitute with)")
        for number in range(NUM_SUBSTITUTES):
            data, label, index, key = read_substitute(position, number)
            try:
                return *self._try(int(index), int(label), data, key, attempt), int(index)
            except SampleError as error:
                last = f"{self._name(int(index))}: {error}"
        raise SampleError(f"{bad}; {NUM_SUBSTITUTES} substitutes were bad as well, the last one {last}")

    def _room(self, num_samples: int, image: np.ndarray, index: int, out: np.ndarray | None) -> np.ndarray:
        height, width = image.shape[:2]
        if self.size is None:
            self.size = (height, width)
        if self.size != (height, width):
            raise ConfigError(
                f"{self._name(index)} came out of the transform as {height}x{width} (height x width), where"
                f" {self.size[0]}x{self.size[1]} is expected as for the others: end the transform with a crop"
                " or resize to a fixed size"
            )
        return self._empty(num_samples) if out is None else out

    def _empty(self, num_samples: int) -> np.ndarray:
        if self.size is None:
            self.size = self._probed_size()
        return np.empty((1, num_samples, *self.size, 3), np.uint8)

    def _probed_size(self) -> tuple[int, int]:
        for data in self.probe() if self.probe else ():
            try:
                height, width, _ = self.one(data, (0, 0)).shape
            except SampleError:
                continue
            return height, width
        raise ConfigError(
            f"{self.store_address or 'the store'} has no readable sample among its first: "
            "the size of its images cannot be told"
        )

    def _name(self, index: int) -> str:
        return title_of(self.store_address, index, self.sample_name(index))


@dataclass
class BadSampleBudget:
    """How many bad samples a run puts up with before it stops.

    Attributes:
        max_fraction: of the samples seen, in [0, 1].
        grace: this many are let pass at any time, since one in the first ten says little about a rate.
    """

    max_fraction: float = 0.01
    grace: int = 10
    num_bad: int = 0
    num_seen: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.max_fraction <= 1:
            raise ConfigError(f"transform.max_bad_fraction is {self.max_fraction}; it lies in [0, 1]")
        if self.grace < 0:
            raise ConfigError(f"grace is {self.grace}; it is at least 0")

    def spend(self, num_bad: int, num_seen: int, last_record: dict[str, Any] | None) -> None:
        """Count `num_bad` more bad samples among `num_seen` more seen; the record is the latest of the bad.

        Raises:
            BadSamplesError: more than max(grace, max_fraction × seen) have been bad.
        """
        self.num_bad += num_bad
        self.num_seen += num_seen
        if num_bad and self.num_bad > max(self.grace, self.max_fraction * self.num_seen):
            last = last_record or {}
            title = title_of(last.get("store"), last.get("index"), last.get("name"))
            raise BadSamplesError(
                f"{self.num_bad} of {self.num_seen} samples are bad, more than"
                f" transform.max_bad_fraction={self.max_fraction:g} allows (the first {self.grace} are free);"
                f" the last one is {title}: {last.get('error')}."
                " Mend the store, or raise transform.max_bad_fraction"
            )
