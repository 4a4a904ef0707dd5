"""Boxes beside their labels: structs of lists and lists of structs, as datasets of Hugging Face have them."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from raypipe.errors import ConfigError, SampleError
from raypipe.stores.memory import MemoryStore
from raypipe.transform.checks import check_target_columns
from raypipe.transform.targets import decode_boxes

CORNERS = [[1, 2, 5, 8, 3], [0, 0, 4, 4, 0]]
SIZES = [[1, 2, 4, 6], [0, 0, 4, 4]]


def layouts(boxes: list[list[int]]) -> dict[str, Any]:
    """Structs of lists and lists of structs, with the names that datasets of the Hub have, and as JSON."""
    found: dict[str, Any] = {}
    for name, label in (
        ("bbox", "category"),
        ("bboxes", "labels"),
        ("bbox", "categories"),
        ("boxes", "category_id"),
    ):
        struct = {"id": [7, 8], name: boxes, label: [3, 0]}
        rows = [{name: boxes[0], label: 3}, {name: boxes[1], label: 0}]
        found |= {f"struct {label}": struct, f"rows {label}": rows}
        found |= {
            f"JSON {label}": json.dumps(struct),
            f"JSON rows {label}": json.dumps(rows).encode(),
        }
    return found


@pytest.mark.parametrize("layout", layouts(SIZES))
def test_boxes_beside_their_labels_are_those_of_one_list(layout: str) -> None:
    expected = decode_boxes(CORNERS, (10, 10))
    by_size = layouts(SIZES)[layout]
    by_corner = layouts([row[:4] for row in CORNERS])[layout]
    assert np.array_equal(decode_boxes(by_size, (10, 10), "xywh"), expected)
    assert np.array_equal(decode_boxes(by_corner, (10, 10), "xyxy"), expected)
    with pytest.raises(ConfigError, match=r"set transform\.targets\.boxes_xywh"):
        decode_boxes(by_size, (10, 10))
    flat = [[*SIZES[0], 3], [*SIZES[1], 0]]
    assert np.array_equal(decode_boxes(flat, (10, 10), "xywh"), expected)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"bbox": SIZES}, "exactly one of category, .* must have the labels"),
        ({"category": [1]}, "exactly one of bbox, .* must have the boxes"),
        (
            {"bbox": SIZES, "category": [1, 2], "label": [1, 2]},
            "exactly one of category",
        ),
        (
            {"bbox": SIZES, "category": [1]},
            "2 boxes of 4 numbers need as many labels, and there are 1",
        ),
        ({"bbox": [[1, 2, 3]], "category": [1]}, "boxes of 4 numbers"),
        ({"bbox": [[1, 2, 3, 4]], "category": ["cat"]}, "the boxes are not numbers"),
        ({"bbox": [[1, 2, 30, 4]], "category": [1]}, "reaches out of the image"),
    ],
)
def test_a_struct_that_holds_no_boxes_is_a_bad_sample(value: Any, message: str) -> None:
    with pytest.raises(SampleError, match=message):
        decode_boxes(value, (10, 10), "xywh")


def test_a_struct_without_boxes_is_an_image_without_boxes() -> None:
    assert decode_boxes({"bbox": [], "category": []}, (10, 10), "xywh").shape == (0, 5)


def test_a_part_of_a_struct_of_boxes_is_told_with_the_whole() -> None:
    store = MemoryStore(
        [b"x"], None, columns={"objects": [{"bbox": [], "category": []}]}
    )
    with pytest.raises(
        ConfigError,
        match=r"name the column that has the labels next to 'bbox' too, 'objects'",
    ):
        check_target_columns(store, {"boxes": "objects.bbox"})
