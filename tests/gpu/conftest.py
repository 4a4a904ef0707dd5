"""Where there is no CUDA device, these tests are skipped; with --pretend-cuda they run as far as that goes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from eager_cuda import UNLIKE, EagerCuda
from without_ray import one_thread

HAS_CUDA = torch.cuda.is_available()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    ours = [item for item in items if Path(item.path).parent == Path(__file__).parent]
    of_test: dict[str, list[pytest.Item]] = {}
    for item in ours:
        item.add_marker(pytest.mark.gpu)
        of_test.setdefault(f"{item.path}::{getattr(item, 'originalname', '')}", []).append(item)
    if HAS_CUDA:
        return
    if not config.getoption("--pretend-cuda"):
        for item in ours:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        return
    for first, *others in of_test.values():
        for item in (first, *others):
            name, module = getattr(item, "originalname", ""), Path(item.path).stem
            if reason := UNLIKE.get(item.name) or UNLIKE.get(name) or UNLIKE.get(module):
                item.add_marker(pytest.mark.skip(reason=f"pretended device: {reason}"))
        for item in others[:-1]:
            if not config.getoption("--soak"):
                item.add_marker(pytest.mark.skip(reason="long: run with --soak, which runs it with all parameters"))


@pytest.fixture(autouse=True)
def pretended_cuda(request: pytest.FixtureRequest) -> Iterator[None]:
    """The device of eager_cuda.py, if asked for; then nothing may have been left unordered."""
    if HAS_CUDA or not request.config.getoption("--pretend-cuda"):
        yield
        return
    cuda = EagerCuda()
    with one_thread(), cuda.installed():
        yield
    assert not cuda.errors
