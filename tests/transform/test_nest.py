"""Nests as fields of a micro-batch, and back."""

from __future__ import annotations

import pickle
from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from raypipe.errors import ConfigError
from raypipe.transform.nest import difference, is_plain, pack, unpack

Point = namedtuple("Point", "x y")


@dataclass
class Scene:
    boxes: Any
    title: str


def through(nest: Any) -> Any:
    """A nest that was packed and unpacked, as a rank gets it."""
    fields: dict[str, Any] = {}
    for name, value in pack(nest, pickle.dumps).items():
        fields[name] = (
            torch.from_numpy(value)
            if isinstance(value, np.ndarray)
            else value.unpacked()
        )
    return unpack(fields)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(24).reshape(2, 3, 4).transpose(0, 2),
        torch.tensor(3.5),
        torch.zeros(0, 4),
        torch.ones(3, dtype=torch.bfloat16),
        torch.tensor([True, False]),
        torch.tensor([1 + 2j]),
        torch.ones(2, requires_grad=True),
    ],
)
def test_tensors_come_back_with_their_dtypes_and_shapes(tensor: torch.Tensor) -> None:
    (again,) = through([tensor])
    assert again.dtype == tensor.dtype and torch.equal(again, tensor.detach())


@pytest.mark.parametrize(
    "nest",
    [
        None,
        ("a", ["b", 1, 2.5, None, True], {"c": b"d", 3: ()}),
        Point(1, ["e"]),
        Scene([1.0], "f"),
        {"g", "h"},
        np.float64(2),
    ],
)
def test_other_values_come_back_with_their_types(nest: Any) -> None:
    again = through(nest)
    assert again == nest and type(again) is type(nest)


def test_arrays_stay_arrays_and_can_be_written_to() -> None:
    nest = {
        "a": np.arange(6, dtype=np.uint16).reshape(2, 3),
        "b": np.array(["x", "yy"]),
    }
    again = through(nest)
    assert again["a"].dtype == np.uint16 and (again["b"] == nest["b"]).all()
    again["a"] += 1
    assert (again["a"] == nest["a"] + 1).all()


def test_tensors_in_objects_are_not_pickled() -> None:
    scene = through(Scene(torch.ones(1000, 1000), "g"))
    assert isinstance(scene, Scene) and scene.boxes.sum() == 1_000_000
    fields: dict[str, Any] = pack(Scene(torch.ones(1000, 1000), "g"))
    assert len(fields["nest.form"].values) < 1000


def test_a_nest_that_contains_itself_comes_back() -> None:
    nest: list[Any] = [torch.ones(2)]
    nest.append(nest)
    again = through(nest)
    assert again[1] is again and torch.equal(again[0], nest[0])


def test_equal_nests_have_equal_fields_whatever_they_share() -> None:
    text = "".join(["a", "b"])
    assert difference([text, text], ["ab", "".join(["a", "b"])]) == ""
    image = Image.new("L", (3, 3))
    assert difference(image, image.copy()) == ""


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ([torch.zeros(2)], [torch.tensor([0.0, -0.0])], "numbers"),
        (np.ones(2), np.zeros(2), "numbers"),
        ((1,), [1], "others"),
        ((torch.ones(2), 1), (torch.ones(2), 2), "others"),
    ],
)
def test_a_difference_in_numbers_is_told_from_others(
    first: Any, second: Any, expected: str
) -> None:
    assert difference(first, second) == expected


def test_only_a_nest_of_objects_names_classes() -> None:
    assert is_plain(pack((torch.ones(2), {"a": [np.ones(2), "b"]})))
    assert not is_plain(pack(Point(1, 2)))
    assert is_plain({"image": np.ones(3)})


def test_a_tensor_on_another_device_is_refused() -> None:
    with pytest.raises(ConfigError, match="on meta, and actors have no such device"):
        pack([torch.ones(2, device="meta")])
