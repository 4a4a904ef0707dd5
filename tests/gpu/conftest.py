"""Where there is no CUDA device, these tests run on a pretended one, as far as that goes: see eager_cuda.py.

Of what takes long there, and of tests with many parameters, all run with --soak.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from eager_cuda import LONG, UNLIKE, EagerCuda
from without_ray import one_thread

HAS_CUDA = torch.cuda.is_available()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    of_test: dict[tuple[str, str], list[pytest.Item]] = {}
    for item in items:
        if Path(item.path).parent == Path(__file__).parent:
            item.add_marker(pytest.mark.gpu)
            of_test.setdefault((Path(item.path).stem, getattr(item, "originalname", "")), []).append(item)
    if HAS_CUDA:
        return
    for (module, name), found in of_test.items():
        long = [] if config.getoption("--soak") else found if name in LONG else found[1:-1]
        for item in found:
            if reason := UNLIKE.get(item.name) or UNLIKE.get(name) or UNLIKE.get(module):
                item.add_marker(pytest.mark.skip(reason=f"needs a CUDA device: {reason}"))
            elif item in long:
                item.add_marker(pytest.mark.skip(reason="long without a CUDA device: run with --soak"))


@pytest.fixture(autouse=True)
def pretended_cuda() -> Iterator[None]:
    """In the end nothing may have been left unordered."""
    if HAS_CUDA:
        yield
        return
    cuda = EagerCuda()
    with one_thread(), cuda.installed():
        yield
    assert not cuda.errors
