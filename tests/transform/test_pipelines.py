"""Pipelines as projects write them run, and make the pixels of the projects' own loops."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from written_pipelines import WRITTEN, by_script

import raypipe
from raypipe.config import PlanConfig, PoolConfig


@pytest.fixture(scope="module")
def pixels() -> np.ndarray:
    small = np.random.default_rng(3).integers(0, 256, (8, 7, 3), np.uint8)
    return np.array(Image.fromarray(small).resize((56, 48), Image.Resampling.BICUBIC))


@pytest.fixture(scope="module")
def folder(pixels: np.ndarray, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("images")
    for name in ("a/0.png", "b/1.png"):
        (root / name).parent.mkdir()
        Image.fromarray(pixels).save(root / name)
    return root


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", WRITTEN)
def test_a_projects_pipeline_makes_what_its_own_loop_makes(
    name: str, folder: Path, pixels: np.ndarray
) -> None:
    written = WRITTEN[name]

    def made() -> torch.Tensor:
        spec = raypipe.open_stream(
            str(folder),
            plan=PlanConfig(epochs=1, micro_batch_size=2),
            train_transform=written.make(),
            pool=PoolConfig(engine="inline"),
        )
        with raypipe.loader(spec) as loader:
            return next(next(loader.epochs()).train).image

    found = made()
    expected = by_script(written, pixels)
    assert found.shape[1:] == expected.shape
    if written.is_random:
        assert torch.equal(found, made())
    else:
        is_float = expected.is_floating_point()
        assert found.dtype == expected.dtype or not is_float
        for image in found:
            torch.testing.assert_close(
                image, expected.to(image.dtype), atol=2e-6, rtol=1e-6
            )
