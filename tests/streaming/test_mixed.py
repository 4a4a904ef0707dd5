"""Streams of plans that are not plain, made in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_streams import spec_of

from raypipe.config import PlanConfig, TransformConfig
from raypipe.errors import ConfigError
from raypipe.streaming.handover import loader
from raypipe.streaming.opening import open_stream
from raypipe.streaming.spec import StreamSpec

Stores = dict[str, Path]
LIGHT = TransformConfig(train="light", size=12)


def mixed(stores: Stores, config: dict[str, Any], **options: Any) -> StreamSpec:
    plan = PlanConfig(micro_batch_size=6, global_batch_size=24, **config)
    train = {"big": stores["train"], "small": stores["val"]}
    return spec_of(train, plan=plan, transform=LIGHT, **options)


def test_mixed_batches_say_their_sources_and_copies_differ(
    stores: Stores,
) -> None:
    spec = mixed(stores, {"mixture": {"big": 2, "small": 1}, "aug_repeats": 2})
    sources = []
    batches = list(next(loader(spec).epochs()).train)
    for one, other in zip(batches[::2], batches[1::2], strict=True):
        assert one.source is not None
        assert one.source.tolist() == spec.plan.source_of(one.index).tolist()
        assert one.index.tolist() == other.index.tolist()
        assert not all(
            bool((a == b).all()) for a, b in zip(one.image, other.image, strict=True)
        )
        sources += one.source.tolist()
    assert np.bincount(sources).tolist() == [len(sources) * 2 // 3, len(sources) // 3]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"exclude": "bad.json"},
            r"store\.exclude must be \{NAME: …\} by big, small, val, got 'bad.json'",
        ),
        (
            {"filter": {"large": "label > 1"}},
            r"store\.filter must be .* big, small, val, got \{'large'",
        ),
        (
            {"filter": "labl > 1"},
            r"no column 'labl' for store\.filter; did you mean label",
        ),
        (
            {"filter": {"val": "label > 1"}},
            r"store\.filter: there is 'label > 1' for validation, and no store\.val",
        ),
    ],
)
def test_what_is_given_for_sources_that_are_not_there_is_named(
    stores: Stores, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        mixed(stores, {}, **options)


def test_a_filter_by_names_is_for_mixtures(stores: Stores) -> None:
    with pytest.raises(
        ConfigError, match=r"store\.filter must be .* by train, val, got \{'big'"
    ):
        open_stream(stores["train"], filter={"big": "label > 1"})
    with pytest.raises(ConfigError, match=r"store\.train names no store"):
        open_stream({})
    with pytest.raises(
        ConfigError, match=r"store\.train: 'val' is the name of the validation store"
    ):
        open_stream({"a": stores["train"], "val": stores["val"]})
