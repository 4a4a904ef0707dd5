"""Stores at `hf://` addresses, on a hub of this machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hub_server import TOKEN, hub_server

from raypipe.errors import RaypipeError
from raypipe.stores import open_store

FILE = "data/train-00000-of-00001.parquet"


@pytest.fixture
def hub(
    stores: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    with hub_server({FILE: stores["parquet"].read_bytes(), "README.md": b"#"}) as url:
        file = f"{url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        constants = "huggingface_hub.constants"
        monkeypatch.setattr(f"{constants}.ENDPOINT", url)
        monkeypatch.setattr(f"{constants}.HUGGINGFACE_CO_URL_TEMPLATE", file)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.setenv("RAYPIPE_CACHE", str(tmp_path))
        monkeypatch.setenv("RAYPIPE_STORAGE_PATIENCE_S", "0")
        yield


@pytest.mark.parametrize("name", [FILE, "data", "data/train-*.parquet"])
def test_parquet_of_a_data_set_on_the_hub_is_read_in_place(
    hub: None, stores: dict[str, Path], name: str
) -> None:
    store = open_store(f"hf://datasets/me/photos/{name}")
    local = open_store(stores["parquet"])
    indices = np.array([3, 97, 42])
    assert len(store) == len(local) and store.classes == local.classes
    assert list(store.read(indices)["image"]) == list(local.read(indices)["image"])


def test_a_private_data_set_without_its_token_is_one_error(
    hub: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_of_nobody")
    with pytest.raises(RaypipeError) as told:
        len(open_store(f"hf://datasets/me/photos/{FILE}"))
    assert "hf://datasets/me/photos" in str(told.value)
