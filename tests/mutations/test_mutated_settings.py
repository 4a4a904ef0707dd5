"""Every field of every section with values of every kind: a configuration that works, or one error that names it.

A field that is new in raypipe/config.py is among them: sections, fields, properties and methods are looked up, and
a value that a field takes must serve all of these, and a small plan, within 1 GiB and 10 s.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from odd_settings import (
    CPU_S,
    FIELDS,
    MEMORY_BYTES,
    PLANS,
    VALUES,
    edges,
    made,
    plan_of,
)
from tiers import in_system

from raypipe.config import AugmentConfig, PlanConfig, TransformConfig
from raypipe.device.augment import DeviceAugment
from raypipe.errors import ConfigError
from raypipe.section import kinds_of
from raypipe.transform.decode.limits import MAX_PIXELS
from raypipe.transform.presets import build_transform
from raypipe.transform.sizes import pixel_range


@pytest.fixture(autouse=True)
def bounded() -> Iterator[None]:
    """A gigabyte more than there is, and 10 s of CPU."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before, start = resource.getrlimit(resource.RLIMIT_AS), time.process_time()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)
    assert time.process_time() - start < CPU_S * 3, (
        "a whole field has thrice the time of one value"
    )


@pytest.mark.parametrize(
    ("section", "field"), FIELDS, ids=lambda value: getattr(value, "__name__", value)
)
def test_a_field_takes_a_value_and_works_or_one_error_names_it(
    section: Any, field: str
) -> None:
    kind = kinds_of(section)[field]
    taken = [
        made(section, [field], {field: value}) is not None
        for value in [*VALUES, *edges(kind)]
    ]
    assert any(taken) and not all(taken)


@pytest.mark.parametrize("field", in_system(kinds_of(PlanConfig), "weights"))
def test_a_plan_of_any_settings_is_laid_out_or_one_error_says_why(field: str) -> None:
    for base in PLANS:
        for value in VALUES:
            plan_of({**base, field: value})


@given(
    st.dictionaries(
        st.sampled_from(list(kinds_of(PlanConfig))), st.sampled_from(VALUES), max_size=4
    )
)
def test_a_plan_of_several_odd_settings_is_laid_out_or_refused(
    values: dict[str, Any],
) -> None:
    plan_of(values)


@pytest.mark.parametrize("field", kinds_of(TransformConfig))
def test_a_transform_of_any_settings_is_checked_or_refused(field: str) -> None:
    for value in VALUES:
        config = made(TransformConfig, [field], {field: value})
        if config is None:
            continue
        try:
            buckets = [(192, 256), (13_000, 13_000)]
            assert max(pixel_range(config, buckets)) <= MAX_PIXELS
            for transform in (config.train, config.val):
                build_transform(transform, config.final_size)
        except ConfigError:
            pass


@pytest.mark.parametrize("field", kinds_of(AugmentConfig))
def test_an_augmentation_of_any_settings_is_made_or_refused(field: str) -> None:
    for value in VALUES:
        config = made(
            AugmentConfig,
            [field],
            {"mixup_alpha": 0.2, "cutmix_alpha": 0.2, field: value},
        )
        if config is None:
            continue
        try:
            augment = DeviceAugment(config, torch.device("cpu"))
        except ConfigError:
            continue
        images = torch.zeros(2, len(config.mean), 8, 8, dtype=torch.uint8)
        try:
            image, _ = augment(images, torch.zeros(2), np.ones(2, bool), seed=1)
        except ConfigError:
            assert callable(value), (
                "only code of the user's may be refused as late as this"
            )
            continue
        out = augment.normalize(image)
        assert out.shape[:2] == images.shape[:2] and torch.isfinite(out).all()
