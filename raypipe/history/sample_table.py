"""Samples of a micro-batch as rows: their place in the store, the numbers drawn for them, and their partners."""

from __future__ import annotations

from typing import Any

import numpy as np

from raypipe.device.mixing import draw_mix, partner_rows
from raypipe.device.prefetcher import Batch
from raypipe.errors import RaypipeError
from raypipe.history.device_words import (
    draws_by_kornia,
    kornia_words,
    preset_words,
    view_words,
)
from raypipe.history.recorded_stream import MicroBatchDraws, RecordedStream
from raypipe.history.step_maker import StepMaker
from raypipe.history.words import drawn_words
from raypipe.plan.order import Domain
from raypipe.plan.places import PADDING, MicroBatchId
from raypipe.stores.base import Store, name_of
from raypipe.transform.samples import NO_LABEL, Samples, read_samples
from raypipe.transform.views import makes_views


class SampleTable:
    """Describes samples of a recorded stream, as rows.

    Args:
        maker: makes its micro-batches; None = only the order is known.
    """

    def __init__(self, stream: RecordedStream, maker: StepMaker | None) -> None:
        self._stream = stream
        self._maker = maker
        self._finished: Batch | None = None  # the micro-batch as the model saw it

    def rows(self, draws: MicroBatchDraws) -> list[dict[str, Any]]:
        """Return a row for each sample of a micro-batch."""
        labels, names, classes = self._of_store(draws)
        drawn = self._drawn(draws)
        augmented = self._augmented(draws)
        mixed = self._mixed(draws)
        rows = []
        for row, index in enumerate(draws.indices.tolist()):
            label = labels[row]
            of_class = None
            if label is not None and classes and 0 <= label < len(classes):
                of_class = classes[label]
            rows.append(
                {
                    "row": row,
                    "index": index,
                    "name": names[row],
                    "label": label,
                    "class": of_class,
                    "weight": float(draws.weights[row]),
                    "seed": "".join(
                        f"{word:016x}" for word in draws.keys[row].tolist()
                    ),
                    "drawn": drawn[row],
                    "augmented": augmented[row],
                    "mixed": mixed[row],
                    "bad": draws.bad.get(row, ""),
                }
            )
        return rows

    def _of_store(
        self, draws: MicroBatchDraws
    ) -> tuple[list[int | None], list[str], tuple[str, ...] | None]:
        """Labels and names of samples, and the names of the classes, as far as the store can be read."""
        num = len(draws.indices)
        if not self._stream.is_open:
            return [None] * num, [""] * num, None
        spec = self._stream.spec
        store = spec.stores[draws.place.split]
        names = [
            "" if index == PADDING else name_of(store, index)
            for index in draws.indices.tolist()
        ]
        labels: list[int | None] = [None] * num
        if spec.columns.has_target and spec.columns.target is None:
            labels = _labels(store, draws.indices)
        return labels, names, store.classes

    def _drawn(self, draws: MicroBatchDraws) -> list[list[str]]:
        """The numbers that programs drew, in words."""
        words: list[list[str]] = [[] for _ in draws.indices]
        if self._maker is None:
            return words
        maker = self._maker.maker
        place = draws.place
        sample_maker = maker.sample_makers.get(place, maker.plan.draw(place))
        if all(transform.program is None for _, transform in sample_maker.transforms):
            return words
        sample_maker.weaken(maker.sample_makers.strength(place))
        samples: Samples = maker.read_store(place, draws.indices)
        several = len(sample_maker.transforms) > 1
        for field, program, params, is_known in sample_maker.drawn(samples, draws.keys):
            for row in np.flatnonzero(is_known & (draws.weights > 0)).tolist():
                phrases = drawn_words(program, params[row])
                if several:
                    phrases = [f"{field.partition('.')[2]}: {', '.join(phrases)}"]
                words[row] += phrases
        return words

    def _augmented(self, draws: MicroBatchDraws) -> list[list[str]]:
        """The numbers that the augmentation on the device drew, in words."""
        nothing: list[list[str]] = [[] for _ in draws.indices]
        maker = self._maker
        if maker is None or maker.device is None or draws.place.split != "train":
            return nothing
        augment = maker.device
        place = draws.place
        strength = maker.strength_at(place)
        if makes_views(maker.spec.transforms["train"]):
            if augment.preset is None:
                return nothing
            return view_words(augment, maker.arrive(maker.on_cpu(place)), strength)
        words = nothing
        if augment.preset is not None:
            height, width = self._size_of_host(place)
            seed = maker.spec.plan.micro_batch_seed(place)
            shape = (len(draws.indices), height, width)
            words = preset_words(augment, seed, shape, strength)
        if draws_by_kornia(augment):
            self._finish(place)
            of_kornia = kornia_words(augment, len(draws.indices))
            words = [
                phrases + others
                for phrases, others in zip(words, of_kornia, strict=True)
            ]
        is_sample = draws.indices != PADDING
        return [
            phrases if shows else []
            for phrases, shows in zip(words, is_sample.tolist(), strict=True)
        ]

    def _finish(self, place: MicroBatchId) -> Batch:
        """Make the table's micro-batch, once."""
        assert self._maker is not None
        if self._finished is None or self._finished.position != place:
            self._finished = self._maker.batch(place)
        return self._finished

    def _mixed(self, draws: MicroBatchDraws) -> list[str]:
        """The partner of each row, and the share of the row's target, where the settings mix."""
        nothing = [""] * len(draws.indices)
        augment = self._maker.augment if self._maker else None
        if (
            augment is None
            or draws.place.split != "train"
            or not sum(augment.mix_shares)
        ):
            return nothing
        assert self._maker is not None
        plan = self._maker.spec.plan
        size = self._size(draws.place)
        seed = plan.micro_batch_seed(draws.place)
        rng = np.random.Generator(np.random.Philox(key=[seed, Domain.MIXING]))
        mixing = draw_mix(augment, rng, *size, self._maker.strength_at(draws.place))
        if mixing is None:
            return nothing
        share, box = mixing
        partners = partner_rows(draws.indices >= 0).tolist()
        phrases = []
        for row, partner in enumerate(partners):
            other = f"row {partner} (sample {draws.indices[partner]})"
            if partner == row:
                phrases.append("")
            elif box is None:
                phrases.append(f"MixUp: {share:.2f}, and {1 - share:.2f} of {other}")
            else:
                top, bottom, left, right = box
                where = f"{bottom - top} x {right - left} at ({top}, {left})"
                phrases.append(f"CutMix: {share:.2f}, and a box of {where} of {other}")
        return phrases

    def _size(self, place: MicroBatchId) -> tuple[int, int]:
        """The (height, width) of the images that are mixed."""
        assert self._maker is not None
        augment = self._maker.augment
        if augment is not None and bool(augment.ops or augment.module):
            height, width = self._finish(place).image.shape[-2:]
            return int(height), int(width)
        return self._size_of_host(place)

    def _size_of_host(self, place: MicroBatchId) -> tuple[int, int]:
        """The (height, width) of the images that the CPU transform makes."""
        assert self._maker is not None
        maker = self._maker.maker
        shape = maker.sample_makers.get(place, maker.plan.draw(place)).image_shape
        if shape:
            return int(shape[0]), int(shape[1])
        height, width = self._maker.arrive(self._maker.on_cpu(place)).image.shape[-2:]
        return int(height), int(width)


def _labels(store: Store, indices: np.ndarray) -> list[int | None]:
    """The classes of samples; None for padding, and for labels that are missing or damaged."""
    (rows,) = np.nonzero(indices != PADDING)
    labels: list[int | None] = [None] * len(indices)
    try:
        read = read_samples(store, indices[rows]).labels
    except RaypipeError:
        return labels
    for row, label in zip(rows.tolist(), read.tolist(), strict=True):
        if label != NO_LABEL:
            labels[row] = label
    return labels
