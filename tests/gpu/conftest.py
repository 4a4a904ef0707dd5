"""Where there is no CUDA device, these tests are skipped; with --pretend-cuda they run as far as that goes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from eager_cuda import UNLIKE, EagerCuda

HAS_CUDA = torch.cuda.is_available()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(item.path).parent != Path(__file__).parent:
            continue
        item.add_marker(pytest.mark.gpu)
        name = getattr(item, "originalname", item.name)
        reason = UNLIKE.get(name) or UNLIKE.get(Path(item.path).stem)
        if HAS_CUDA:
            continue
        if not item.config.getoption("--pretend-cuda"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        elif reason:
            item.add_marker(pytest.mark.skip(reason=f"pretended device: {reason}"))


@pytest.fixture(autouse=True)
def pretended_cuda(request: pytest.FixtureRequest) -> Iterator[None]:
    """The device of eager_cuda.py, if asked for; then nothing may have been left unordered."""
    if HAS_CUDA or not request.config.getoption("--pretend-cuda"):
        yield
        return
    cuda = EagerCuda()
    with cuda.installed():
        yield
    assert not cuda.errors
