"""Copies number their classes as they are told, keep names, and arguments without effect are errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from copied import written

from raypipe.commands.convert import convert
from raypipe.commands.copied_samples import store_samples
from raypipe.commands.copies import (
    CopySettings,
    class_numbers,
)
from raypipe.errors import ConfigError, StoreError
from raypipe.stores import MemoryStore, Store, open_store

PNG = cv2.imencode(".png", np.zeros((4, 4, 3), np.uint8))[1].tobytes()


def folder(root: Path, *names: str) -> Store:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(PNG)
    return open_store(root)


def copy(store: Store, file: Path, classes: tuple[str, ...], **options: Any) -> Store:
    file.mkdir()
    numbers = class_numbers("x", True, store.classes, classes)
    columns = {"image": "binary", "label": "int64", "name": "string"}
    settings = CopySettings(
        classes=classes, numbers=numbers, suffix=file.suffix, **options
    )
    written(store, file, settings.of_columns(columns))
    return open_store(file)


def test_a_copy_has_the_labels_of_the_classes_that_it_is_given(tmp_path: Path) -> None:
    store = folder(tmp_path / "val", "a/0.png", "c/1.png")
    copied = copy(store, tmp_path / "val.lmdb", ("c", "b", "a"))
    read = copied.read(np.arange(2), ("label", "name"))
    assert copied.classes == ("c", "b", "a") and read["label"].tolist() == [2, 0]
    assert read["name"] == ["a/0.png", "c/1.png"]
    with pytest.raises(ConfigError, match="has the class 'c' too: add it"):
        class_numbers("x", True, store.classes, ("a", "b"))


def test_classes_name_the_labels_of_a_store_without_names(tmp_path: Path) -> None:
    store = MemoryStore([PNG, PNG], [1, 0])
    copied = copy(store, tmp_path / "a.parquet", ("x", "y"))
    assert copied.read(np.arange(2))["label"].tolist() == [1, 0]
    with pytest.raises(StoreError, match="has the label 1, and classes names 1"):
        copy(store, tmp_path / "b.lmdb", ("x",))
    with pytest.raises(ConfigError, match="has no integer labels to name"):
        class_numbers("x", False, None, ("x",))


def test_a_copy_without_a_target_has_no_labels() -> None:
    """Labels that are null then stop no copy."""
    samples = store_samples(
        MemoryStore([PNG], [1], classes=["a", "b"]), has_label=False
    )
    assert "label" not in samples.first and samples.classes is None


def test_a_copy_keeps_the_names_of_samples_that_follow_a_bad_one(
    tmp_path: Path,
) -> None:
    store = folder(tmp_path / "d", "a/0.png", "a/2.png", "b/1.png")
    (tmp_path / "d" / "a" / "2.png").write_bytes(b"")
    copied = copy(store, tmp_path / "d.lmdb", ("a", "b"), on_bad_sample="skip")
    assert copied.read(np.arange(2), ("name",))["name"] == ["a/0.png", "b/1.png"]
    assert copied.sample_name(1).endswith("b/1.png")  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quality": 80}, "quality=80 has no effect without short_side"),
        ({"exif": True, "sizes": False}, "exif has no effect without sizes"),
        ({"trust_pickles": True}, "trust_pickles=True are for an address"),
        ({"classes": ("x",)}, "has no integer labels to name"),
        ({"classes": ("x", "x")}, "needs a different name for each label"),
        ({"classes": "xy"}, "classes='xy': give a list of names"),
    ],
)
def test_an_argument_without_effect_is_an_error(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    store = MemoryStore([PNG], None)
    with pytest.raises(ConfigError, match=message):
        convert(store, tmp_path / "a.lmdb", **options)
