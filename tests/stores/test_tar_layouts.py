"""Tars of class folders: which members are samples, which folders classes, in which order."""

from __future__ import annotations

import tarfile
from pathlib import Path

import numpy as np
import pytest
from tars import write_members

from raypipe.errors import StoreError
from raypipe.stores import open_store
from raypipe.stores.tar import TarStore

pytestmark = pytest.mark.usefixtures("in_own_folder")


def make(name: str, *members: str | tuple[str, bytes]) -> TarStore:
    """A tar of members, whose content is their name or what is given."""
    given = [
        member if isinstance(member, tuple) else (member, member.encode())
        for member in members
    ]
    return TarStore(write_members(Path(name), given))


def images_of(store: TarStore) -> list[bytes]:
    return store.read(np.arange(len(store)))["image"]


@pytest.mark.parametrize(
    ("names", "classes"),
    [
        (["./a/1.png", "./b/1.png"], ("a", "b")),
        (["train/a/1.png", "train/b/1.png"], ("a", "b")),
        (["data/train/a/1.png", "data/train/b/x/1.png"], ("a", "b")),
        (["train/a/1.png"], ("a",)),
        (["a/1.png", "a/2.png"], ("a",)),
        (["one/a/1.png", "two/a/1.png"], ("one", "two")),
    ],
)
def test_a_folder_around_the_classes_is_none(
    names: list[str], classes: tuple[str, ...]
) -> None:
    assert make("a.tar", *names).classes == classes


def test_the_last_member_of_a_name_counts() -> None:
    members = [("a/1.png", b"old"), ("a/2.png", b"2"), ("./a/1.png", b"new")]
    assert images_of(make("a.tar", *members)) == [b"new", b"2"]


def test_the_classes_of_several_tars_are_those_of_all() -> None:
    make("t-0.tar", "b/1.png", "c/1.png")
    make("t-1.tar", "a/1.png", "c/2.png")
    store = open_store("t-{0..1}.tar")
    columns = store.read(np.arange(4))
    assert store.classes == ("a", "b", "c")
    assert columns["image"] == [b"b/1.png", b"c/1.png", b"a/1.png", b"c/2.png"]
    assert columns["label"].tolist() == [1, 2, 0, 2]


def test_tars_of_one_class_each_may_have_folders_within() -> None:
    make("t-0.tar", "cat/a/1.png", "cat/b/2.png")
    make("t-1.tar", "dog/x/1.png", "dog/y/2.png")
    store = open_store("t-{0..1}.tar")
    assert store.classes == ("cat", "dog")
    assert store.read(np.arange(4))["label"].tolist() == [0, 0, 1, 1]


def test_arrays_are_samples_where_there_is_no_image() -> None:
    assert len(make("a.tar", "a/1.npy", "b/2.npy")) == 2
    assert len(make("b.tar", "a/1.npy", "b/2.png")) == 1


def test_the_fingerprint_is_of_names_and_sizes() -> None:
    store, same = (
        make("a.tar", "a/1.png", "b/2.png"),
        make("b.tar", "b/2.png", "a/1.png"),
    )
    other = make("c.tar", "a/1.png", "b/3.png")
    assert store.fingerprint == same.fingerprint != other.fingerprint


@pytest.mark.parametrize("names", [["a/1.png", "b/2.png"], ["1.png", "1.txt"]])
def test_the_fingerprint_shows_when_members_were_modified(names: list[str]) -> None:
    def fingerprint(seconds: int) -> str:
        with tarfile.open("a.tar", "w") as tar:
            for name in names:
                member = tarfile.TarInfo(name)
                member.mtime = seconds
                tar.addfile(member)
        return TarStore("a.tar").fingerprint

    assert fingerprint(1) == fingerprint(1) != fingerprint(2)


@pytest.mark.parametrize("names", [["0001.jpg", "0002.jpg"], ["a/notes.txt"], []])
def test_a_tar_without_labels_is_an_error_that_says_the_layouts(
    names: list[str],
) -> None:
    with pytest.raises(
        StoreError,
        match=r"a\.tar has no labels: the layout is class/image\.jpg, or WebDataset's",
    ):
        len(make("a.tar", *names))
    make("b.tar", "a/1.png")
    with pytest.raises(StoreError, match="has no"):
        len(TarStore("b.tar", target_column="kind"))
