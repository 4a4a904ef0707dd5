"""A .pt of tensors, by torch.load(…, weights_only=True): a dict of them, a pair of images and labels, or one."""

from __future__ import annotations

import contextlib
import functools
import zipfile
from collections.abc import Mapping
from typing import Any

from raypipe.errors import StoreError
from raypipe.storage.filesystem import is_remote
from raypipe.storage.local_file import regular_path
from raypipe.storage.read_limit import check_read
from raypipe.stores.sources.arrays import ArrayRows, arrays_source
from raypipe.stores.sources.format_source import (
    Asked,
    Source,
    explained,
    opened,
    size_of,
)


def open_tensors(address: str, asked: Asked) -> Source:
    """Open the tensors of one file; those of a local one are mapped into memory, and not read at once."""
    import torch

    with explained(address):
        content = _load(torch, address)
        named: Any = content
        if isinstance(content, torch.Tensor):
            named = {"image": content}
        elif isinstance(content, list | tuple) and len(content) == 2:
            named = dict(zip(("image", "label"), content, strict=True))
        if not isinstance(named, Mapping) or not all(
            isinstance(tensor, torch.Tensor) for tensor in named.values()
        ):
            raise StoreError(
                f"{address} has a {type(content).__name__}; raypipe takes a dict of tensors, a pair of images and "
                "labels, or a tensor of images. Yield samples of others from your own function, MODULE:NAME"
            )
        return arrays_source(
            address,
            {str(name): _rows(torch, tensor) for name, tensor in named.items()},
            asked,
        )


def _load(torch: Any, address: str) -> Any:
    load = functools.partial(torch.load, map_location="cpu", weights_only=True)
    with opened(address) as file:
        if zipfile.is_zipfile(file):
            # parts, which torch stores as they are, may be compressed to far less
            num_bytes = sum(
                member.file_size
                for member in zipfile.ZipFile(file).infolist()
                if member.compress_type != zipfile.ZIP_STORED
            )
            check_read(address, num_bytes, size_of(file))
        file.seek(0)
        if not is_remote(address):
            # the format before torch 1.6 cannot be mapped
            with contextlib.suppress(RuntimeError), regular_path(address) as path:
                return load(path, mmap=True)
        return load(file)


def _rows(torch: Any, tensor: Any) -> ArrayRows:
    shape = tuple(tensor.shape)
    if (
        tensor.layout != torch.strided
        or tensor.dtype == torch.bfloat16
        or tensor.is_complex()
    ):
        return ArrayRows(f"{tensor.dtype} in the layout {tensor.layout}", shape)
    array = tensor.numpy()
    return ArrayRows("numbers", shape, array.dtype, array.__getitem__)
