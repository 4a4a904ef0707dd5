from __future__ import annotations

from typing import Any

import pytest

from raypipe.config import TransformConfig
from raypipe.errors import ConfigError
from raypipe.transform.sizes import size_in

SCHEDULE = TransformConfig(size={20: 224, 0: 128, 10: 160})


def test_a_schedule_holds_from_its_epochs_and_validations_have_the_last() -> None:
    assert [size_in(SCHEDULE, "train", epoch) for epoch in (0, 9, 10, 19, 20, 99)] == [
        128,
        128,
        160,
        160,
        224,
        224,
    ]
    assert {size_in(SCHEDULE, "val", epoch) for epoch in (0, 10, 20)} == {224}


def test_a_bucket_grows_with_the_schedule_to_its_written_size() -> None:
    bucket = (192, 256)
    assert [size_in(SCHEDULE, "train", epoch, bucket) for epoch in (0, 10, 20)] == [
        (110, 146),
        (137, 183),
        bucket,
    ]
    assert (
        size_in(SCHEDULE, "val", 0, bucket)
        == bucket
        == size_in(TransformConfig(size=7), "train", 0, bucket)
    )


@pytest.mark.parametrize(
    "size", [0, {}, {1: 32}, {0: 0}, {0: 32, -1: 16}, {0: 32, 2: -1}]
)
def test_a_size_that_is_none_is_refused(size: Any) -> None:
    with pytest.raises(
        ConfigError,
        match=r"transform\.size.* must be (a whole number|one, or {EPOCH: SIZE, …})",
    ):
        TransformConfig(size=size)
