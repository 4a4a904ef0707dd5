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
from torch.utils.data import default_collate

from raypipe.errors import ConfigError
from raypipe.transform.fields import Ragged
from raypipe.transform.nest import TENSORS, Packer, difference, is_plain, unpack

Point = namedtuple("Point", "x y")


@dataclass
class Scene:
    boxes: Any
    title: str


def through(nest: Any) -> Any:
    """A nest that was packed and unpacked, as a rank gets it."""
    fields: dict[str, Any] = {}
    for name, value in Packer(pickle.dumps).pack(nest).items():
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
        torch.tensor([1 + 2j]).conj(),
        torch.arange(5.0)[None][:, 4],  # the class of a single box
        torch.tensor([1 + 2j]).conj().imag,
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


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_quantized_and_nested_tensors_come_back_whole() -> None:
    quantized = torch.quantize_per_tensor(torch.arange(4.0), 0.5, 3, torch.quint8)
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    one, other = through([quantized, nested])
    assert one.q_zero_point() == 3 and torch.equal(one.dequantize(), torch.arange(4.0))
    assert [part.tolist() for part in other.unbind()] == [[1, 1], [1, 1, 1]]


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
    fields: dict[str, Any] = Packer().pack(Scene(torch.ones(1000, 1000), "g"))
    assert len(fields["nest.form"].values) < 1000


def image(number: int, side: int = 300) -> torch.Tensor:
    return torch.full((3, side, side), number, dtype=torch.uint8)


@pytest.mark.parametrize(
    "item",
    [
        lambda i: (image(i), i),
        lambda i: {"label": i, "image": image(i)},
        lambda i: {"image": image(i), "depth": np.float64(i), "name": str(i)},
        lambda i: [image(i), image(i + 1), (image(i, side=4), 0.5)],
        lambda i: image(i, side=300 + i // 8),  # others in each micro-batch
        lambda i: torch.full((400, 200), i / 3, dtype=torch.bfloat16),
        lambda i: torch.ones(500, 500).mul(i).requires_grad_(),
        lambda i: np.full((200, 900), i, np.int64),
        lambda i: (torch.zeros(0, 3), torch.tensor(i)),
        lambda i: Point(torch.tensor(i), str(i)),
    ],
)
def test_items_are_collated_as_by_torch_and_packed_as_before(item: Any) -> None:
    packer = Packer()
    for first in range(0, 32, 8):
        items = [item(number) for number in range(first, first + 8)]
        expected = default_collate(items)
        nest = packer.collate(items)
        assert difference(nest, expected) == ""
        assert difference(through(expected), nest) == ""
        found = packer.pack(nest)
        for name, values in Packer().pack(expected).items():
            one, other = found[name], values
            if isinstance(one, Ragged) and isinstance(other, Ragged):
                one, other = one.values, other.values
            np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


def test_large_tensors_are_stacked_where_they_are_packed() -> None:
    packer = Packer()
    shared = []
    for first in range(3):
        nest = packer.collate([(number, image(first)) for number in range(8)])
        packed = packer.pack(nest)[TENSORS]
        shared.append(np.shares_memory(packed, nest[1].numpy()))
    assert shared == [False, True, True]
    # a validation's padding, say
    packer.pack(None)
    assert packer.collate([(3, image(7))] * 2)[1].unique().tolist() == [7]


@pytest.mark.parametrize(
    "items",
    [
        [torch.ones(2), torch.ones(3)],
        [torch.ones(2), "a"],
        [(1, 2), (1,)],
        [torch.ones(2).to_sparse()] * 2,
        [object()] * 2,
    ],
)
def test_items_that_torch_cannot_join_have_torchs_error(items: list[Any]) -> None:
    with pytest.raises(Exception) as expected:
        default_collate(items)
    with pytest.raises(expected.type) as found:
        Packer().collate(items)
    assert str(found.value) == str(expected.value)


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
    assert is_plain(Packer().pack((torch.ones(2), {"a": [np.ones(2), "b"]})))
    assert not is_plain(Packer().pack(Point(1, 2)))
    assert is_plain({"image": np.ones(3)})


def test_a_tensor_on_another_device_is_refused() -> None:
    with pytest.raises(ConfigError, match="on meta, and actors have no such device"):
        Packer().pack([torch.ones(2, device="meta")])
