"""Samples → the rows of a micro-batch: the loop that every image passes, bad samples and substitutes included."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from raypipe.errors import ConfigError, SampleError
from raypipe.plan.places import PADDING
from raypipe.stores.base import title_of
from raypipe.transform.columns import ColumnMaker
from raypipe.transform.draws import Key
from raypipe.transform.fields import LABEL, BlockMemory, Drawn, Field, MadeAtOnce, Rows
from raypipe.transform.samples import NO_LABEL, WRONG_LABEL, EncodedSample, Samples

Sample = EncodedSample | Callable[[], EncodedSample]
"""Of a store, or read when it is its turn."""

Candidate = tuple[Sample, int, Key]
"""(sample, index, key)."""

Substitutes = Callable[[int], Iterable[Candidate]]
"""Row → samples to try in place of its own. For the whole to be reproducible they must follow from the plan."""

NUM_SUBSTITUTES = 8  # at the default budget of 1 % bad samples, 8 bad substitutes in a row have a chance of 1e-16


class Content(Protocol):
    """Contents of samples, see `raypipe.transform.contents`.

    Attributes:
        fields: fields of a sample, by name; the first sample sets unknown shapes.
        draws_globally: whether it draws from generators that all threads share.
        makes_images_alone: whether samples have only images, label and columns.
    """

    fields: dict[str, Field]
    draws_globally: bool
    makes_images_alone: bool

    def one(self, sample: EncodedSample, key: Key, out: np.ndarray | None = None) -> dict[str, Any]:
        """The fields of one sample but label and columns; its image may be made in `out`."""
        ...

    def at_once(
        self, samples: Samples, wanted: np.ndarray, keys: np.ndarray, arrays: dict[str, np.ndarray]
    ) -> MadeAtOnce:
        """Make the images of a micro-batch in the arrays of its fields, where one call can make them.

        Args:
            wanted: bool (B,), the rows to make.
            keys: uint64 (B, 2).
            arrays: arrays by field, (B, …).

        Returns:
            The rows that are made; `one` makes or rejects the others.
        """
        ...

    def following(self, sample: EncodedSample, drawn: Drawn) -> dict[str, Any]:
        """The other fields that `one` would make, of a row that `at_once` has made the images of."""
        ...


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
        columns: makes the columns of each sample; None = no columns.
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
        columns: ColumnMaker | None = None,
        probe: Callable[[], Iterable[EncodedSample]] = tuple,
    ) -> None:
        self.content, self._columns, self._probe = content, columns, probe
        self._tolerant, self._exact = tolerant, exact
        self._store_address, self._sample_name = store_address, sample_name

    @property
    def draws_globally(self) -> bool:
        """True if it draws from generators that all threads share."""
        return self.content.draws_globally or bool(self._columns and self._columns.draws_globally)

    def run(
        self,
        samples: Samples | Sequence[Callable[[], EncodedSample]],
        indices: np.ndarray,
        keys: np.ndarray,
        substitutes: Substitutes | None = None,
        attempt: Attempt = FIRST_ATTEMPT,
        memory: BlockMemory | None = None,
    ) -> tuple[Rows, list[dict[str, Any]]]:
        """Make one micro-batch.

        Args:
            samples: B samples, read already or when needed; those of padding are ignored.
            indices: int64 (B,), PADDING among them.
            keys: uint64 (B, 2), one key per sample.
            substitutes: replacements for a bad sample; the first good one is used.
            attempt: knowledge from earlier attempts.
            memory: memory for its arrays; None = new memory.

        Returns:
            The rows, and a record per bad sample: `store` (address), `index`, `name` (the store's own, "" where it
            has none), `substitute` (index, or None during validation), `error` (reason), `fault` ("store", or
            "transform").

        Raises:
            SampleError: a bad sample under "raise"; or one for which no good substitute was found.
            ConfigError: a result has a wrong kind or size.
        """
        ((rows, bad),) = self.run_several(1, samples, indices, keys, substitutes, attempt, memory)
        return rows, bad

    def run_several(
        self,
        num: int,
        samples: Samples | Sequence[Callable[[], EncodedSample]],
        indices: np.ndarray,
        keys: np.ndarray,
        substitutes: Substitutes | None = None,
        attempt: Attempt = FIRST_ATTEMPT,
        memory: BlockMemory | None = None,
    ) -> Iterator[tuple[Rows, list[dict[str, Any]]]]:
        """Make micro-batches that lie one after the other in a block's memory, with one call for their images.

        A call costs as much as some tens of small images, however many it makes.

        Args:
            num: how many; the other arguments are `run`'s, end to end.

        Yields:
            The rows and records of each micro-batch.
        """
        memory, size = memory or BlockMemory(self.content.fields), len(indices) // num
        all_rows = [Rows(memory, size) for _ in range(num)]
        made = self._at_once(all_rows, samples, indices, keys, attempt)
        for number, rows in enumerate(all_rows):
            yield rows, self._fill(rows, number * size, samples, indices, keys, made, substitutes, attempt)

    def _fill(
        self,
        rows: Rows,
        first: int,
        samples: Samples | Sequence[Callable[[], EncodedSample]],
        indices: np.ndarray,
        keys: np.ndarray,
        made: MadeAtOnce,
        substitutes: Substitutes | None,
        attempt: Attempt,
    ) -> list[dict[str, Any]]:
        """Fill a micro-batch's rows, of which `first` is the first among all; returns a record per bad sample."""
        bad = list[dict[str, Any]]()
        is_filled = self._put_labels(rows, first, samples, indices, made)
        for row in np.flatnonzero(~is_filled).tolist():
            place = first + row
            index, key = int(indices[place]), keys[place].tolist()
            if index == PADDING:
                rows.leave_out(row)
                continue
            try:
                sample = self.one(samples[place], index, key, attempt, rows.image(row), made.drawn(place))
                rows.put(row, index, sample)
            except SampleError as error:
                record = self._record(index, error)
                bad.append(record)
                if self._exact and self._tolerant:
                    rows.leave_out(row, index)
                    continue
                for other, substitute, other_key in self._substitutes(index, error, substitutes, place):
                    try:
                        stand_in = self.one(other, substitute, other_key, attempt, rows.image(row))
                    except SampleError as further:
                        last = further, substitute
                    else:
                        rows.put(row, substitute, stand_in)
                        record["substitute"] = substitute
                        break
                else:
                    raise self._none_is_good(index, error, *last) from error
        if not rows.has_begun:
            rows.begin(self._first())
        return bad

    def _at_once(
        self,
        rows: Sequence[Rows],
        samples: Samples | Sequence[Any],
        indices: np.ndarray,
        keys: np.ndarray,
        attempt: Attempt,
    ) -> MadeAtOnce:
        """Have the images of all rows made in one call, as far as possible; see `Content.at_once`."""
        if not isinstance(samples, Samples) or attempt.before_sample or not rows[0].has_begun:
            return MadeAtOnce.nothing(len(indices))
        wanted = indices != PADDING
        if attempt.bad:
            wanted &= ~np.isin(indices, list(attempt.bad))
        return self.content.at_once(samples, wanted, keys, rows[0].memory.latest(len(rows)))

    def _put_labels(
        self,
        rows: Rows,
        first: int,
        samples: Samples | Sequence[Any],
        indices: np.ndarray,
        made: MadeAtOnce,
    ) -> np.ndarray:
        """Fill the rows that need no more than their label; which they are, bool (B,)."""
        part = slice(first, first + rows.num_samples)
        needs_more = self._columns is not None or not self.content.makes_images_alone
        if needs_more or not isinstance(samples, Samples) or not made.rows[part].any():
            return np.zeros(rows.num_samples, bool)
        return rows.put_labels(made.rows[part], indices[part], samples.labels[part], NO_LABEL)

    def one(
        self,
        sample: Sample,
        index: int,
        key: Key,
        attempt: Attempt = FIRST_ATTEMPT,
        out: np.ndarray | None = None,
        drawn: Drawn | None = None,
    ) -> dict[str, Any]:
        """Make the fields of one sample; for finished images, return only the draws.

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
        label = sample.label
        if label == NO_LABEL:
            raise SampleError(WRONG_LABEL)
        try:
            columns: dict[str, Any] = {}
            if self._columns is not None:
                columns = self._columns.one(sample.columns, key)  # first: it costs less than an image
            if drawn is not None:
                made = self.content.following(sample, drawn)
            else:
                made = self.content.one(sample, key, out)
        except ConfigError as error:
            raise ConfigError(f"{self._title(index)}: {error}") from error
        made[LABEL] = label
        made.update(columns)
        return made

    def _substitutes(
        self, index: int, error: SampleError, substitutes: Substitutes | None, row: int
    ) -> Iterable[Candidate]:
        """The stand-ins for a bad sample; raises its error where there are to be none."""
        bad = f"{self._title(index)}: {error}"
        if not self._tolerant:
            hint = f"with a transform.max_bad_fraction above 0 the run would use another one; or {error.advice}"
            raise type(error)(f"{bad} ({hint})") from error
        if substitutes is None:
            raise SampleError(f"{bad} (and there is nothing to read a substitute with)") from error
        return substitutes(row)

    def _none_is_good(self, index: int, error: SampleError, last: SampleError, substitute: int) -> SampleError:
        return type(last)(
            f"{self._title(index)}: {error}; {NUM_SUBSTITUTES} substitutes were bad as well, the last one "
            f"{self._title(substitute)}: {last}; {last.advice}"
        )

    def _record(self, index: int, error: SampleError) -> dict[str, Any]:
        where = {"store": self._store_address, "index": index, "name": self._sample_name(index)}
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
