"""Fields of samples, the memory of a block, and the rows that are filled in it."""

from __future__ import annotations

from typing import Any

import numpy as np
from micro_batches import AT, run, samples_of, transform_of

from raypipe.transform.decode.rgb import encode_jpeg
from raypipe.transform.fields import (
    Field,
    MicroBatch,
    Ragged,
    Rows,
    images_in,
)

ALL = slice(None)
KEYS = np.arange(20, dtype=np.uint64).reshape(10, 2)


def fields() -> dict[str, Field]:
    """Of each kind; the shape of the image is not known yet."""
    return {
        "image": Field(),
        "boxes": Field("array", "float32", (3, 2), (0.0, -1.0), is_padded=True),
        "label": Field("array", "int64", ()),
        "column.score": Field("array", "float32", (), 0.5),
        "column.tags": Field("ragged", "int16"),
        "column.text": Field("text"),
        "column.raw": Field("bytes"),
        "column.meta": Field("json"),
    }


def sample(number: int, num_boxes: int = 1) -> dict[str, Any]:
    return {
        "image": np.full((2, 3, 3), number, np.uint8),
        "boxes": np.full((num_boxes, 2), number, np.float32),
        "label": number,
        "column.score": np.float32(number),
        "column.tags": np.arange(number, dtype=np.int16),
        "column.text": "é".encode() * number,
        "column.raw": bytes([number]) * number,
        "column.meta": b'{"number": %d}' % number,
    }


def filled(
    fields: dict[str, Field], *numbers: int | None, num_boxes: int = 1
) -> MicroBatch:
    """Of samples by their numbers; None = a row that is left out."""
    rows = Rows(fields, len(numbers))
    fill(rows, *numbers, num_boxes=num_boxes)
    return MicroBatch(AT, rows.index, rows.weight, rows.finish(ALL))


def fill(rows: Rows, *numbers: int | None, first: int = 0, num_boxes: int = 1) -> None:
    for row, number in enumerate(numbers, first):
        if number is None:
            rows.leave_out(row)
        else:
            rows.put(row, 10 + number, sample(number, num_boxes))


def unpacked(batch: MicroBatch, name: str) -> list[Any]:
    values = batch.fields[name]
    assert isinstance(values, Ragged)
    return values.unpacked()


# Rows


def test_omitted_rows_hold_the_fill_of_each_field_and_do_not_count() -> None:
    rows = Rows(fields(), 3)
    rows.learn(sample(3))
    for array in rows.arrays.values():
        array[...] = 7  # what lies there before
    fill(rows, None, 4, None)
    batch = MicroBatch(AT, rows.index, rows.weight, rows.finish(ALL))
    assert batch.index.tolist() == [-1, 14, -1] and batch.weight.tolist() == [0, 1, 0]
    for row in (0, 2):
        assert (
            not batch["image"][row].any()
            and batch["label"][row] == 0
            and batch["column.score"][row] == 0.5
        )
        assert batch["boxes"][row].tolist() == [[0, -1]] * 3
    assert [tags.tolist() for tags in unpacked(batch, "column.tags")] == [
        [],
        [0, 1, 2, 3],
        [],
    ]
    assert unpacked(batch, "column.text") == ["", "éééé", ""] and unpacked(
        batch, "column.raw"
    )[::2] == [b"", b""]
    assert unpacked(batch, "column.meta") == [None, {"number": 4}, None]


def test_a_row_may_be_left_out_before_the_first_sample_shows_the_shapes() -> None:
    batch = filled(fields(), None, 2)
    assert (
        batch["image"].shape == (2, 2, 3, 3)
        and not batch["image"][0].any()
        and batch["image"][1].all()
    )


# Learning


def test_a_function_of_views_shows_them_by_its_first_sample() -> None:
    def views(image: np.ndarray) -> dict[str, np.ndarray]:
        return {"left": image[:, :4], "right": image[:, 4:]}

    jpeg = encode_jpeg(np.full((8, 8, 3), 99, np.uint8))
    padded = transform_of(views, probe=lambda: samples_of([None, jpeg]))
    batch, _ = run(padded, [], KEYS, padding=2)
    assert {
        name: array.shape for name, array in images_in(batch.arrays()).items()
    } == dict.fromkeys(("view.left", "view.right"), (2, 8, 4, 3))
    assert "image" not in batch.fields and not batch["view.left"].any()


# Ragged


def test_lists_of_arrays_keep_their_dtype_and_shape_even_if_empty() -> None:
    like = Field("ragged", "float32", (2, 3))
    some = Ragged.of("ragged", [np.ones((4, 2, 3), np.float32), None], like)
    assert some.values.shape == (4, 2, 3) and some.values.dtype == np.float32
    nothing = Ragged.of("ragged", [None, None], like)
    assert nothing.values.shape == (0, 2, 3) and nothing.values.dtype == np.float32
    assert [part.shape for part in nothing.unpacked()] == [(0, 2, 3)] * 2
