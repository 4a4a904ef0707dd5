"""Which files an address means; splits that lie in one folder are not mixed, and not taken in part."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from raypipe.errors import StoreError
from raypipe.stores.addresses import list_files


def make(folder: Path, *names: str) -> Path:
    folder.mkdir(exist_ok=True)
    for name in names:
        (folder / name).write_bytes(b"")
    return folder


def listed(address: Path) -> list[str]:
    return [
        Path(file.address).name
        for file in list_files(str(address), lambda name: name.endswith(".x"), "*.x")
    ]


def test_a_file_a_folder_a_pattern_and_a_range(tmp_path: Path) -> None:
    folder = make(tmp_path / "f", "b.x", "a.x", ".hidden.x", "_x.x", "c.y")
    (folder / "d.x").mkdir()
    assert listed(folder / "b.x") == ["b.x"]
    assert listed(folder) == ["a.x", "b.x"]
    assert listed(folder / "*.x") == ["a.x", "b.x"]
    assert listed(folder / "b*") == ["b.x"]
    assert listed(folder / "s-{08..11}.x") == ["s-08.x", "s-09.x", "s-10.x", "s-11.x"]
    make(folder, "odd*name.x")
    assert listed(folder / "odd*name.x") == ["odd*name.x"]


def test_nothing_is_an_error_that_names_the_address(tmp_path: Path) -> None:
    for address in (tmp_path, tmp_path / "*.x", tmp_path / "absent" / "*.x"):
        with pytest.raises(
            StoreError, match=rf"{re.escape(str(address))} has no \*\.x files"
        ):
            listed(address)
    with pytest.raises(StoreError, match="stands for 0 shards"):
        listed(tmp_path / "{9..1}.x")


# Splits


@pytest.mark.parametrize(
    "names",
    [
        ["train-00000-of-00002.x", "train-00001-of-00002.x", "test-00000-of-00001.x"],
        ["train.x", "validation.x"],
        ["train_0.x", "val_0.x"],
        ["Train-1.x", "TEST-1.x"],
        ["cifar_train.x", "cifar_test.x"],
        ["train2017-0.x", "train2017-1.x", "val2017-0.x"],
    ],
)
def test_several_splits_in_one_folder_are_never_mixed(
    tmp_path: Path, names: list[str]
) -> None:
    folder = make(tmp_path / "f", *names)
    with pytest.raises(
        StoreError,
        match=r"f has files of several splits: .*train \([12]\).*choose it, such as .*/f/[\w-]+\.x, or a pattern",
    ):
        listed(folder)
    assert listed(folder / f"{names[0][:5]}*.x") == [
        name for name in sorted(names) if name[:5] == names[0][:5]
    ]


@pytest.mark.parametrize(
    "names",
    [
        ["a.x", "b.x"],
        ["train-0.x", "train-1.x"],
        ["train.x", "training_more.x", "latest.x"],
        ["trains.x"],
    ],
)
def test_other_names_are_one_store(tmp_path: Path, names: list[str]) -> None:
    assert listed(make(tmp_path / "f", *names)) == sorted(names)


def test_a_part_that_is_missing_is_missed(tmp_path: Path) -> None:
    folder = make(tmp_path / "f", *(f"train-{i:05d}-of-00004.x" for i in (0, 1, 3)))
    with pytest.raises(
        StoreError,
        match="has only 3 of the 4 files of train: fetch the rest, or choose these with a pattern",
    ):
        listed(folder)
    assert len(listed(folder / "train-*.x")) == 3
    make(folder, "train-00002-of-00004.x", "train-00001-of-00004-9f.x")
    with pytest.raises(
        StoreError,
        match=r"has part 00001 of train twice, train-00001-of-00004-9f\.x and train-00001-of-00004\.x: remove",
    ):
        listed(folder)
    (folder / "train-00001-of-00004-9f.x").unlink()
    assert len(listed(folder)) == 4
