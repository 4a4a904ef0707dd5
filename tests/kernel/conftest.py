"""What tests of the kernel share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(params=[0, 1, 2], ids=["scalar", "ssse3", "avx2"])
def simd(request: pytest.FixtureRequest) -> Iterator[int]:
    """A level of vector instructions, which the kernel does not go beyond."""
    module = pytest.importorskip("_raypipe_kernel")
    try:
        if module.set_simd(request.param) < request.param:
            pytest.skip("the processor does not have it")
        yield request.param
    finally:
        module.set_simd(2)
