"""A nest of tensors, arrays and other values, as a collate function makes it, in fields of a micro-batch.

    nest.tensors   uint8 (n,), the values of all tensors, which go to the device in one transfer
    nest.form      bytes, on the host: the nest as a pickle without its tensors and arrays; the values of all
                   arrays; and `objects` if the pickle names classes, so that nobody reads it from a file
    nest.classes   bytes, on the host: a pickle of the classes that a script defines; it decides nothing in a hash

No tensor or array is pickled, and their dtypes and shapes may differ from micro-batch to micro-batch.
"""

from __future__ import annotations

import io
import itertools
import math
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from raypipe.errors import ConfigError
from raypipe.importing import loaded_module
from raypipe.transform.block_memory import reused_memory
from raypipe.transform.fields import BatchFields, Field, Ragged, SampleFields
from raypipe.transform.user_code import unpickled

if TYPE_CHECKING:
    import torch

NEST = "nest"
TENSORS = f"{NEST}.tensors"
FORM = f"{NEST}.form"
CLASSES = f"{NEST}.classes"

_OBJECTS = b"objects"
_NOTHING = np.empty(0, np.uint8)
# views of a buffer may have any dtype
_ALIGNMENT = 64
_KINDS = "biufcmMSU"
# Bytes of a stack for which threads pay, or cost.
_LARGE = 1 << 20


class Packer:
    """Packs nests, one after the other, as fields of micro-batches.

    Args:
        dump: pickles the classes that a script defines.
    """

    def __init__(self, dump: Callable[[Any], bytes] = lambda classes: b"") -> None:
        self._dump = dump
        # start and bytes of each tensor of the last nest
        self._places = list[tuple[int, int]]()
        # those that the next nest has not filled yet, in its memory
        self._free = list[tuple[int, int]]()
        self._memory = _NOTHING

    def collate(self, items: list[Any]) -> Any:
        """Join items as torch's default_collate does, and stack tensors where `pack`, called next, wants them.

        Most micro-batches of a stream have tensors of the same sizes, which are then written once.
        """
        from torch import Tensor  # this imports torch
        from torch.utils.data._utils import collate as of_torch

        kinds = of_torch.default_collate_fn_map
        if kinds[Tensor] is of_torch.collate_tensor_fn:
            kinds = {**kinds, Tensor: self._stacked}
        self._free = self._places
        ends = [_aligned(start + num_bytes) for start, num_bytes in self._places]
        self._memory = reused_memory(max(ends, default=0))
        return of_torch.collate(items, collate_fn_map=kinds)

    def pack(self, nest: Any) -> BatchFields:
        """Return a nest as fields of a micro-batch."""
        try:
            values = _Pickler(keeps_memo=False)
            values.dump(nest)
        except (ValueError, RecursionError):  # it refers to itself
            values = _Pickler(keeps_memo=True)
            values.dump(nest)
        objects = _OBJECTS if values.has_objects else b""
        classes = self._dump(values.classes) if values.classes else b""
        parts = [values.file.getvalue(), _joined(values.arrays).tobytes(), objects]
        tensors = _joined(values.tensors, self._memory)
        self._memory = _NOTHING
        self._places = values.places
        return {
            TENSORS: tensors,
            FORM: Ragged.of("bytes", parts, Field("bytes")),
            CLASSES: Ragged.of("bytes", [classes], Field("bytes")),
        }

    def _stacked(self, batch: Sequence[torch.Tensor], **kinds: Any) -> torch.Tensor:
        """Stack tensors, large ones by NumPy: torch waits for threads of all CPUs, which Ray and actors have."""
        import torch
        from torch.utils.data._utils.collate import collate_tensor_fn

        num_bytes = _bytes_of_stack(batch)
        if num_bytes < 0:
            return collate_tensor_fn(batch, **kinds)
        place = next((free for free in self._free if free[1] == num_bytes), None)
        if place is None:
            memory = reused_memory(num_bytes)
        else:
            self._free = [free for free in self._free if free is not place]
            memory = self._memory[place[0] :][:num_bytes]
        first = batch[0]
        stacked = torch.from_numpy(memory).view(first.dtype)
        stacked = stacked.view(len(batch), *first.shape)
        if num_bytes < _LARGE:
            return torch.stack(list(batch), out=stacked)
        rows = memory.reshape(len(batch), -1)
        for row, values in zip(rows, batch, strict=True):
            row[:] = values.reshape(-1).view(torch.uint8).numpy()
        return stacked


def unpack(fields: Mapping[str, Any]) -> Any:
    """Return the nest of a batch's fields: its tensors are views of `nest.tensors`, on any device."""
    pickled, arrays, _ = fields[FORM]
    (classes,) = fields[CLASSES]
    return _Unpacker(pickled, fields[TENSORS], arrays, classes).load()


def difference(first: Any, second: Any) -> Literal["", "numbers", "others"]:
    """Return whether two nests differ: in tensors or arrays, only in other values, or in none, bit by bit."""
    one, two = (_content(nest) for nest in (first, second))
    if one[1:] != two[1:]:
        return "numbers"
    return "others" if one[0] != two[0] else ""


def _content(nest: Any) -> list[bytes]:
    fields: SampleFields = Packer().pack(nest)
    return [*fields[FORM].unpacked()[:2], fields[TENSORS].tobytes()]


def is_plain(fields: Mapping[str, Any]) -> bool:
    """Return whether fields have no pickled objects, whose classes a file would name."""
    form = fields.get(FORM)
    return form is None or form.unpacked()[2] != _OBJECTS


class _Pickler(pickle.Pickler):
    """Pickles a nest without its tensors and arrays.

    Args:
        keeps_memo: values may refer to themselves. Without a memo, equal nests have equal pickles, whichever
            objects they share.

    Attributes:
        file: the pickle.
        tensors, arrays: the values of each, uint8 (n,).
        places: start and bytes of each tensor.
        classes: those that no module has by their names.
        has_objects: whether there are values other than Python's own.
    """

    def __init__(self, keeps_memo: bool) -> None:
        self.file = io.BytesIO()
        super().__init__(self.file, protocol=5)
        self.fast = not keeps_memo
        self.classes = list[type]()
        self.tensors = list[np.ndarray]()
        self.places = list[tuple[int, int]]()
        self.arrays = list[np.ndarray]()
        self.has_objects = False
        self._torch = loaded_module("torch")

    def persistent_id(self, value: Any) -> Any:
        """Take a tensor, an array or a script's class; return what stands for it, None for other values."""
        if isinstance(value, type) and value.__module__ == "__main__":
            self.has_objects = True
            self.classes.append(value)
            return "class", len(self.classes) - 1, value.__qualname__, (), None
        if type(value) is np.ndarray and value.dtype.kind in _KINDS:
            start = _append(self.arrays, bytes_of(value))
            return "array", start, value.dtype.str, value.shape, None
        torch = self._torch
        if torch is None or not isinstance(value, torch.Tensor):
            return None
        if not _is_strided(value):
            return None
        as_bytes = bytes_of_tensor(value)
        start = _append(self.tensors, as_bytes)
        self.places.append((start, len(as_bytes)))
        kind = type(value)
        # what a subclass has besides its values, such as the format of boxes
        more = None if kind is torch.Tensor else (kind, vars(value))
        dtype = str(value.dtype).removeprefix("torch.")
        return "tensor", start, dtype, tuple(value.shape), more

    def reducer_override(self, value: Any) -> Any:
        self.has_objects = True
        return NotImplemented


class _Unpacker(pickle.Unpickler):
    def __init__(
        self, pickled: bytes, tensors: torch.Tensor, arrays: bytes, classes: bytes
    ) -> None:
        super().__init__(io.BytesIO(pickled))
        self._tensors = tensors
        # a copy, so that arrays can be written to
        self._arrays = np.frombuffer(bytearray(arrays), np.uint8)
        self._classes = unpickled(classes) if classes else []

    def persistent_load(self, pid: Any) -> Any:
        kind, start, name, shape, more = pid
        if kind == "class":
            return self._classes[start]
        content: Any
        dtype: Any
        if kind == "array":
            content = self._arrays
            dtype = np.dtype(name)
        else:
            import torch

            content = self._tensors
            dtype = getattr(torch, name)
            if 0 in shape:
                # a slice without values may have any stride
                content = content.new_empty(0, dtype=dtype)
        end = start + math.prod(shape) * dtype.itemsize
        values = content[start:end].view(dtype).reshape(shape)
        if more is None:
            return values
        subclass, attributes = more
        tensor = values.as_subclass(subclass)
        tensor.__dict__.update(attributes)
        return tensor


def bytes_of(array: np.ndarray) -> np.ndarray:
    """Return the values of an array, uint8 (n,)."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def bytes_of_tensor(tensor: torch.Tensor) -> np.ndarray:
    """Return the values of a tensor, which may have a type that numpy lacks, uint8 (n,).

    Raises:
        ConfigError: it is not on the CPU.
    """
    import torch

    if tensor.device.type != "cpu":
        raise ConfigError(
            f"a tensor on {tensor.device}, and actors have no such device: make it on the CPU, from where raypipe "
            "moves batches to the device of the rank"
        )
    values = tensor.detach().as_subclass(torch.Tensor)
    values = values.resolve_conj().resolve_neg().contiguous()
    # a single value may have any stride
    flat = values.as_strided((values.numel(),), (1,))
    return flat.view(torch.uint8).numpy()


def _append(parts: list[np.ndarray], values: np.ndarray) -> int:
    """Add values, and what fills the space behind them; return where they start."""
    start = sum(map(len, parts))
    parts.append(values)
    parts.append(np.zeros(_aligned(len(values)) - len(values), np.uint8))
    return start


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _joined(parts: list[np.ndarray], memory: np.ndarray = _NOTHING) -> np.ndarray:
    """Join parts end to end: in this memory, if it is as long and all parts that lie in it are in their places."""
    ends = list(itertools.accumulate(map(len, parts)))
    num_bytes = ends[-1] if ends else 0
    missing = list[tuple[np.ndarray, np.ndarray]]()
    if len(memory) == num_bytes:
        for part, end in zip(parts, ends, strict=True):
            place = memory[end - len(part) : end]
            if not len(part) or _address(part) == _address(place):
                continue
            if np.may_share_memory(part, memory):
                break
            missing.append((place, part))
        else:
            for place, part in missing:
                place[:] = part
            return memory
    memory = reused_memory(num_bytes)
    return np.concatenate([memory[:0], *parts], out=memory)


def _address(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])


def _bytes_of_stack(batch: Sequence[Any]) -> int:
    """Return the bytes of tensors that are stacked; -1 = they are not all plain and alike, or are empty."""
    torch = loaded_module("torch")
    if any(type(values) is not torch.Tensor for values in batch):
        return -1
    first = batch[0]
    is_plain_kind = _is_strided(first) and not first.is_complex()
    if not is_plain_kind or first.device.type != "cpu":
        return -1
    kind = _kind_of(first)
    if any(values.requires_grad or _kind_of(values) != kind for values in batch):
        return -1
    return len(batch) * first.numel() * first.element_size() or -1


def _is_strided(tensor: torch.Tensor) -> bool:
    """True for a tensor whose values are all that is in it, besides dtype and shape."""
    import torch

    is_whole = not (tensor.is_nested or tensor.is_quantized)
    return is_whole and tensor.layout == torch.strided


def _kind_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.layout, tensor.device, tensor.shape
