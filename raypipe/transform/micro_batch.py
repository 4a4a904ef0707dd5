"""Encoded samples of a micro-batch → the arrays of its row, each sample transformed under its own key.

MicroBatchTransform     B encoded samples and their keys → arrays (B, …), label, index, weight; judges bad samples
read_encoded            what it is given of a store
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from raypipe.errors import ConfigError, SampleError
from raypipe.stores.base import title_of
from raypipe.transform.batch import MicroBatchResult
from raypipe.transform.contents import Content
from raypipe.transform.pixels import Room
from raypipe.transform.sample_cache import SampleCache
from raypipe.transform.sample_transform import Decoded, EncodedSample, Key

Sample = EncodedSample | Decoded

ReadSample = Callable[[], tuple[EncodedSample, int]]
"""Reads a sample, and its label."""

ReadSubstitute = Callable[[int, int], tuple[EncodedSample | ReadSample, int, int, Key]]
"""(position in the micro-batch, attempt from 0) → (sample, label, index, key) of another one.
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


class MicroBatchTransform:
    """Makes the arrays of micro-batches, and judges bad samples.

    Args:
        content: what samples become.
        on_bad_sample: "raise", or "substitute" another sample.
        exact: for a validation: a bad sample is not substituted, its row has weight 0.
        store_address: named in errors and records.
        sample_name: what the store calls a sample, by its index, for errors and records.
        cache: where decoded samples are kept; it must be of this store, and of the same settings of the decode.
    """

    def __init__(
        self,
        content: Content,
        *,
        on_bad_sample: Literal["substitute", "raise"] = "substitute",
        exact: bool = False,
        store_address: str = "",
        sample_name: Callable[[int], str] = lambda _: "",
        cache: SampleCache | None = None,
    ) -> None:
        self.content = content
        self._on_bad_sample, self._exact, self._cache = on_bad_sample, exact, cache
        self._store_address, self._sample_name = store_address, sample_name

    def run(
        self,
        columns: dict[str, Any],
        keys: np.ndarray,
        read_substitute: ReadSubstitute | None = None,
        attempt: Attempt = FIRST_ATTEMPT,
        room: Room | None = None,
    ) -> MicroBatchResult:
        """Transform one micro-batch.

        Args:
            columns: `image`, a list of B EncodedSample, Decoded, or ReadSample, which then also gives the label;
                `label` and `index`, int64 (B,). A row whose index is -1 is padding, its sample is not looked at.
            keys: uint64 (B, 2), one key per sample.
            read_substitute: gives the stand-ins for bad samples, up to 8 for each.
            attempt: what is known of the micro-batch.
            room: where its arrays are put; None = it has its own.

        Raises:
            SampleError: a bad sample under "raise"; or one for which no good substitute was found.
            ConfigError: a result is of another kind or size than it must be.
        """
        label = np.array(columns["label"], np.int64)
        index = np.array(columns["index"], np.int64)
        result = MicroBatchResult({}, label, index, np.ones(len(index), np.float32))
        samples, key_of = columns["image"], keys.tolist()

        def make(position: int, out: np.ndarray | None) -> Any:
            return self._judged(
                result, position, samples[position], key_of[position], out, read_substitute, attempt
            )

        result.arrays = self.content.pack(make, len(index), (room or Room()).take)
        return result

    def _judged(
        self,
        result: MicroBatchResult,
        position: int,
        sample: Sample | ReadSample,
        key: Key,
        out: np.ndarray | None,
        read_substitute: ReadSubstitute | None,
        attempt: Attempt,
    ) -> Any:
        """The content of a sample, None for weight 0; the rest of its row in the result is filled."""
        label, index, weight = result.label, result.index, result.weight
        wanted = int(index[position])
        if wanted < 0:
            label[position], index[position], weight[position] = 0, -1, 0
            return None
        try:
            made, label[position] = self._try(wanted, int(label[position]), sample, key, out, attempt)
        except SampleError as error:
            bad = f"{self._title(wanted)}: {error}"
            if self._on_bad_sample == "raise":
                hint = "transform.on_bad_sample='substitute' would go on without it"
                raise SampleError(f"{bad} ({hint})") from error
            substitute = None
            if self._exact:
                made, label[position], weight[position] = None, 0, 0
            else:
                stand_in = self._substitute(position, bad, out, read_substitute, attempt)
                made, label[position], substitute = stand_in
                index[position] = substitute
            record = {"store": self._store_address, "index": wanted, "name": self._sample_name(wanted)}
            result.bad.append(record | {"substitute": substitute, "error": str(error)})
        return made

    def _try(
        self,
        index: int,
        label: int,
        sample: Sample | ReadSample,
        key: Key,
        out: np.ndarray | None,
        attempt: Attempt,
    ) -> tuple[Any, int]:
        if attempt.before_sample:
            attempt.before_sample(index)
        if index in attempt.bad:
            raise SampleError(attempt.bad[index])
        if callable(sample):
            sample, label = sample()
        if self._cache is not None and isinstance(sample, EncodedSample):
            sample = self._cache.decoded(index, label, sample.image) or sample
        try:
            return self.content.one(sample, key, out), label
        except ConfigError as error:
            raise ConfigError(f"{self._title(index)}: {error}") from error

    def _substitute(
        self,
        position: int,
        bad: str,
        out: np.ndarray | None,
        read_substitute: ReadSubstitute | None,
        attempt: Attempt,
    ) -> tuple[Any, int, int]:
        if read_substitute is None:
            raise SampleError(f"{bad} (and there is nothing to read a substitute with)")
        for number in range(NUM_SUBSTITUTES):
            sample, label, index, key = read_substitute(position, number)
            try:
                return *self._try(int(index), int(label), sample, key, out, attempt), int(index)
            except SampleError as error:
                last = f"{self._title(int(index))}: {error}"
        raise SampleError(f"{bad}; {NUM_SUBSTITUTES} substitutes were bad as well, the last one {last}")

    def _title(self, index: int) -> str:
        return title_of(self._store_address, index, self._sample_name(index))
