"""Fixtures: one local Ray cluster for the whole session, and small real stores."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import cv2
import numpy as np
import pytest

import raypipe  # noqa: F401  first of all: it sets what Ray and Albumentations read at import
from raypipe.stores.atomic import write_atomically


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--soak", action="store_true", help="run the long forms of the tests that have one")


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """A local cluster of 4 logical CPUs and a small object store."""
    import ray

    from raypipe.cluster import connect

    connect(num_cpus=4, object_store_bytes=300 << 20)
    yield
    ray.shutdown()


@pytest.fixture(autouse=True)
def cluster_outlives_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command ends its own local cluster; run in this process, it would end that of all tests."""
    monkeypatch.setattr("raypipe.cli._shutdown", lambda: None)


def picture(index: int, height: int = 40, width: int = 48) -> bytes:
    """A JPEG that no other index has: a blurred random field."""
    rng = np.random.default_rng(index)
    pixels = cv2.resize(rng.integers(0, 256, (5, 6, 3), np.uint8), (width, height))
    return cv2.imencode(".jpg", pixels)[1].tobytes()


def samples(num: int, num_classes: int = 5, first: int = 0) -> list[dict[str, object]]:
    return [{"image": picture(first + i), "label": i % num_classes} for i in range(num)]


CLASSES = tuple("abcde")


@pytest.fixture(scope="session")
def stores(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """`train` (100 samples) and `val` (22) as LMDB, and `parquet`, the training samples in groups of 10."""
    folder = tmp_path_factory.mktemp("stores")
    paths = {name: folder / f"{name}.lmdb" for name in ("train", "val")}
    write_atomically(str(paths["train"]), samples(100), CLASSES)
    write_atomically(str(paths["val"]), samples(22, first=1000), CLASSES)
    from raypipe.stores.parquet import ParquetWriter

    paths["parquet"] = folder / "train.parquet"
    with ParquetWriter(paths["parquet"], classes=CLASSES, row_group_size=10) as writer:
        for sample in samples(100):
            writer.append(sample)
    return paths
