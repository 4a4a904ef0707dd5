"""Fields of samples, the memory of a block, and the rows that are filled in it."""

from __future__ import annotations

from typing import Any

import numpy as np
from micro_batches import run, samples_of, transform_of

from raypipe.transform.decode.rgb import encode_jpeg
from raypipe.transform.fields import (
    Field,
    Ragged,
    Rows,
    images_in,
)

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


def sample(number: int) -> dict[str, Any]:
    return {
        "image": np.full((2, 3, 3), number, np.uint8),
        "boxes": np.full((1, 2), number, np.float32),
        "label": number,
        "column.score": np.float32(number),
        "column.tags": np.arange(number, dtype=np.int16),
        "column.text": "é".encode() * number,
        "column.raw": bytes([number]) * number,
        "column.meta": b'{"number": %d}' % number,
    }


def filled(rows: Rows, *numbers: int | None) -> dict[str, Any]:
    """The fields of samples by their numbers; None = a row that is left out."""
    for row, number in enumerate(numbers):
        if number is None:
            rows.leave_out(row)
        else:
            rows.put(row, 10 + number, sample(number))
    return rows.finish(slice(None))


# Rows


def test_omitted_rows_hold_the_fill_of_each_field_and_do_not_count() -> None:
    rows = Rows(fields(), 3)
    rows.learn(sample(3))
    for array in rows.arrays.values():
        array[...] = 7  # what lies there before
    made = filled(rows, None, 4, None)
    assert rows.index.tolist() == [-1, 14, -1] and rows.weight.tolist() == [0, 1, 0]
    for row in (0, 2):
        assert not made["image"][row].any()
        assert made["label"][row] == 0 and made["column.score"][row] == 0.5
        assert made["boxes"][row].tolist() == [[0, -1]] * 3
    tags, text, raw, meta = (
        made[f"column.{name}"].unpacked() for name in ("tags", "text", "raw", "meta")
    )
    assert [part.tolist() for part in tags] == [[], [0, 1, 2, 3], []]
    assert text == ["", "éééé", ""] and raw[::2] == [b"", b""]
    assert meta == [None, {"number": 4}, None]


def test_a_row_may_be_left_out_before_the_first_sample_shows_the_shapes() -> None:
    image = filled(Rows(fields(), 2), None, 2)["image"]
    assert image.shape == (2, 2, 3, 3) and not image[0].any() and image[1].all()


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
