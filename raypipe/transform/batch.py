"""Samples → the rows of a micro-batch: the loop that every image passes, bad samples and substitutes included."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from raypipe.errors import ConfigError, SampleError
from raypipe.plan.places import PADDING
from raypipe.stores.base import title_of
from raypipe.transform.contents import Content
from raypipe.transform.draws import Key
from raypipe.transform.fields import BlockMemory, Rows
from raypipe.transform.samples import EncodedSample, Samples

Sample = EncodedSample | Callable[[], EncodedSample]
"""Of a store, or read when it is its turn."""

Candidate = tuple[Sample, int, Key]
"""(sample, index, key)."""

Substitutes = Callable[[int], Iterable[Candidate]]
"""Row → samples to try in place of its own. For the whole to be reproducible they must follow from the plan."""

NUM_SUBSTITUTES = 8  # at the default budget of 1 % bad samples, 8 bad substitutes in a row have a chance of 1e-16


@dataclass(frozen=True)
class Attempt:
    """Knowledge from earlier attempts at a micro-batch.

    Attributes:
        bad: index → reason of samples that must not be touched.
        before_sample: called with the index of each sample before it is touched, which begins with reading it.
    """

    bad: Mapping[int, str] = field(default_factory=dict)
    before_sample: Callable[[int], None] | None = None


FIRST_ATTEMPT = Attempt()


class MicroBatchTransform:
    """Fills the rows of micro-batches of a split, and judges bad samples.

    Args:
        content: contents of samples.
        tolerant: a bad sample is replaced by another one; otherwise its error is raised.
        exact: for validation: a bad sample is not substituted, its row has weight 0.
        store_address: named in errors and records.
        sample_name: returns the store's name of a sample by its index, for errors and records.
        probe: samples that show the size of images if the first micro-batch is all padding.
    """

    def __init__(
        self,
        content: Content,
        *,
        tolerant: bool = True,
        exact: bool = False,
        store_address: str = "",
        sample_name: Callable[[int], str] = lambda _: "",
        probe: Callable[[], Iterable[EncodedSample]] = tuple,
    ) -> None:
        self.content = content
        self._probe = probe
        self._tolerant = tolerant
        self._exact = exact
        self._store_address = store_address
        self._sample_name = sample_name

    def run(
        self,
        samples: Samples | Sequence[Callable[[], EncodedSample]],
        indices: np.ndarray,
        keys: np.ndarray,
        substitutes: Substitutes | None = None,
        attempt: Attempt = FIRST_ATTEMPT,
        memory: BlockMemory | None = None,
        num: int = 1,
    ) -> tuple[Rows, dict[int, dict[str, Any]]]:
        """Make a micro-batch, or several end to end, with one call for their images.

        A call costs as much as some tens of small images, however many it makes.

        Args:
            samples: num·B samples, read already or when needed; those of padding are ignored.
            indices: int64 (num·B,), PADDING among them.
            keys: uint64 (num·B, 2), one key per sample.
            substitutes: replacements for a bad sample; the first good one is used.
            attempt: knowledge from earlier attempts.
            memory: memory for their arrays; None = new memory.
            num: number of micro-batches.

        Returns:
            The rows, and a record per bad sample, by its row: `store` (address), `index`, `name` (the store's own,
            "" where it has none), `substitute` (index, or None during validation), `error` (reason), `fault`
            ("store", or "transform").

        Raises:
            SampleError: a bad sample under "raise"; or one for which no good substitute was found.
            ConfigError: a result has a wrong kind or size.
        """
        rows = Rows(
            memory or BlockMemory(self.content.fields), len(indices) // num, num
        )
        bad = dict[int, dict[str, Any]]()
        if isinstance(samples, Samples) and not attempt.before_sample:
            wanted = (indices != PADDING) & ~np.isin(indices, list(attempt.bad))
            self.content.fill(rows, samples, indices, keys, wanted)
        for row in np.flatnonzero(rows.weight == 0).tolist():
            index = int(indices[row])
            key = keys[row].tolist()
            if index == PADDING:
                rows.leave_out(row)
                continue
            try:
                rows.put(row, index, self.one(samples[row], index, key, attempt))
            except SampleError as error:
                record = bad[row] = self._record(index, error)
                if self._exact and self._tolerant:
                    rows.leave_out(row, index)
                    continue
                for other, substitute, other_key in self._substitutes(
                    index, error, substitutes, row
                ):
                    try:
                        stand_in = self.one(other, substitute, other_key, attempt)
                    except SampleError as further:
                        last = further, substitute
                    else:
                        rows.put(row, substitute, stand_in)
                        record["substitute"] = substitute
                        break
                else:
                    raise self._none_is_good(index, error, *last) from error
        if rows.arrays is None:
            rows.begun(self._first())
        return rows, bad

    def one(
        self, sample: Sample, index: int, key: Key, attempt: Attempt = FIRST_ATTEMPT
    ) -> dict[str, Any]:
        """Make the fields of one sample.

        Raises:
            SampleError: it is bad.
            ConfigError: the result has a wrong kind or size.
        """
        if attempt.before_sample:
            attempt.before_sample(index)
        if index in attempt.bad:
            raise SampleError(attempt.bad[index])
        if callable(sample):
            sample = sample()
        try:
            return self.content.one(sample, key)
        except ConfigError as error:
            raise ConfigError(f"{self._title(index)}: {error}") from error

    def _substitutes(
        self, index: int, error: SampleError, substitutes: Substitutes | None, row: int
    ) -> Iterable[Candidate]:
        """The stand-ins for a bad sample; raises its error where there are to be none."""
        bad = f"{self._title(index)}: {error}"
        if not self._tolerant:
            hint = f"with a transform.max_bad_fraction above 0 the run would use another one; or {error.advice}"
            raise type(error)(f"{bad} ({hint})") from error
        if substitutes is None:
            raise SampleError(
                f"{bad} (and there is nothing to read a substitute with)"
            ) from error
        return substitutes(row)

    def _none_is_good(
        self, index: int, error: SampleError, last: SampleError, substitute: int
    ) -> SampleError:
        return type(last)(
            f"{self._title(index)}: {error}; {NUM_SUBSTITUTES} substitutes were bad as well, the last one "
            f"{self._title(substitute)}: {last}; {last.advice}"
        )

    def _record(self, index: int, error: SampleError) -> dict[str, Any]:
        where = {
            "store": self._store_address,
            "index": index,
            "name": self._sample_name(index),
        }
        return {**where, "substitute": None, "error": str(error), "fault": error.fault}

    def _first(self) -> dict[str, Any]:
        """A sample that shows the shapes of the fields, where a micro-batch has none."""
        reason = ""
        for sample in self._probe():
            try:
                return self.content.one(sample, (0, 0))
            except SampleError as error:
                reason = f" ({error}; {error.advice})"
        raise ConfigError(
            f"{self._store_address or 'the store'} has no readable sample among its first{reason}: "
            "the size of its images cannot be told"
        )

    def _title(self, index: int) -> str:
        return title_of(self._store_address, index, self._sample_name(index))
