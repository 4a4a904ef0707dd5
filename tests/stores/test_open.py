"""How an address becomes a store or a writer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raypipe.errors import ConfigError, StoreError
from raypipe.stores import open_store, open_writer
from raypipe.stores.folder import FolderStore
from raypipe.stores.lmdb import LMDBStore
from raypipe.stores.memory import MemoryStore
from raypipe.stores.parquet import ParquetStore
from raypipe.stores.tar import TarStore

from pictures import samples, write_tar  # isort: skip

SAMPLES = [{"image": b"x", "label": 1}]


def write(path: Path, **options: object) -> Path:
    with open_writer(path, **options) as writer:
        writer.append({"image": b"x", "label": 1})
    return path


SOURCE = r"read once, in order: `raypipe convert \S+ train\.lmdb` makes a"
# Address → a file that is there, and what is said.
REFUSED = {
    "absent": ("", "absent does not exist$"),
    "absent.lmdb": ("", r"absent\.lmdb does not exist$"),
    "absent.parquet": ("", r"absent\.parquet does not exist$"),
    "trian.lmdb": ("train.lmdb", r"did you mean .*/train\.lmdb\?$"),
    "{train,val}.tar": ("train.tar", r"\{train,val\}\.tar does not exist"),
    "notes.txt": ("notes.txt", r"(?s)notes\.txt is not a store.*LMDB"),
    "": ("notes.txt", "contains no store"),
    "a.tar.lz4": ("a.tar.lz4", r"raypipe reads \.tar\.gz, \.tar\.bz2 and \.tar\.xz"),
    "train.h5": ("train.h5", SOURCE),
    "train.rec": ("train.rec", SOURCE),
    "train-00000-of-00001": ("train-00000-of-00001", SOURCE),
    "train.zip": ("train.zip", SOURCE),
}


@pytest.mark.parametrize("address", REFUSED)
def test_what_is_no_store_is_told_with_what_it_may_be(
    tmp_path: Path, address: str
) -> None:
    there, message = REFUSED[address]
    if there:
        (tmp_path / there).write_bytes(b"x")
    with pytest.raises(StoreError, match=message):
        open_store(tmp_path / address)
    with pytest.raises(StoreError, match=SOURCE):
        open_store("module:samples")


@pytest.mark.parametrize("address", ["a.lmdb", "a.parquet", "class"])
def test_an_option_that_the_store_has_not(tmp_path: Path, address: str) -> None:
    write(tmp_path / "a.lmdb")
    write(tmp_path / "a.parquet")
    (tmp_path / "class" / "x").mkdir(parents=True)
    with pytest.raises(
        ConfigError, match=rf"{address} is \w+, which has no option 'colour'"
    ):
        open_store(tmp_path / address, colour="red")


@pytest.mark.parametrize(
    ("address", "kind"),
    [
        ("train.lmdb", LMDBStore),
        ("train.parquet/", ParquetStore),
        ("{00..99}.tar", TarStore),
    ],
)
def test_a_remote_store_is_known_by_its_name_and_opened_later(
    address: str, kind: type
) -> None:
    store = open_store(f"s3://bucket/{address}")
    assert type(store) is kind and store.address == f"s3://bucket/{address}"


@pytest.mark.parametrize("name", ["a b.lmdb", "a b.parquet"])
def test_file_uri(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name)
    assert open_store(path.as_uri()).read(np.array([0]))["image"] == [b"x"]


def test_a_folder_of_tars_is_one_store_and_class_folders_stay_so(
    tmp_path: Path,
) -> None:
    for name in ("b.tar", "a.tar", ".hidden.tar"):
        write_tar(tmp_path / name, SAMPLES)
    assert isinstance(open_store(tmp_path), TarStore) and len(open_store(tmp_path)) == 2
    (tmp_path / "class").mkdir()
    (tmp_path / "class" / "image.jpg").write_bytes(b"x")
    assert isinstance(open_store(tmp_path), FolderStore)


def test_relative_address_becomes_absolute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "a.lmdb")
    monkeypatch.chdir(tmp_path)
    store = open_store("a.lmdb")
    monkeypatch.chdir("/")
    assert store.address == str(tmp_path / "a.lmdb")
    assert len(store) == 1


def test_a_home_folder_is_found_as_in_every_other_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "a" / "cat").mkdir(parents=True)
    (tmp_path / "a" / "cat" / "1.jpg").touch()
    assert len(open_store("~/a")) == 1


@pytest.mark.parametrize("suffix", [".lmdb", ".parquet"])
class TestWriters:
    def test_unknown_suffix(self, tmp_path: Path, suffix: str) -> None:
        with pytest.raises(StoreError, match=r"must be one of \.lmdb, \.parquet"):
            open_writer(tmp_path / f"a{suffix}.zip")

    def test_never_overwrites(self, tmp_path: Path, suffix: str) -> None:
        path = tmp_path / f"a{suffix}"
        path.write_bytes(b"precious")
        with pytest.raises(StoreError, match="File exists"), open_writer(path):
            pass
        assert path.read_bytes() == b"precious"

    def test_empty_store(self, tmp_path: Path, suffix: str) -> None:
        with open_writer(tmp_path / f"a{suffix}"):
            pass
        store = open_store(tmp_path / f"a{suffix}")
        assert len(store) == 0
        assert store.read(np.array([]))["image"] == []

    def test_no_labels(self, tmp_path: Path, suffix: str) -> None:
        with open_writer(tmp_path / f"a{suffix}", {"image": "binary"}) as writer:
            writer.append({"image": b"x"})
        store = open_store(tmp_path / f"a{suffix}")
        assert tuple(store.stored.names) == ("image",)
        assert store.classes is None
        with pytest.raises(StoreError, match="no column 'label'"):
            store.read(np.array([0]), columns=("label",))

    @pytest.mark.parametrize(
        ("sample", "message"),
        [
            ({"image": b"x"}, "were declared"),
            ({"image": b"x", "label": 1, "more": 2}, "were declared"),
            ({"image": "x", "label": 1}, "is binary, not str"),
            ({"image": b"x", "label": 1 << 63}, "do not fit"),
            ({"image": b"x", "label": None}, "do not fit"),
        ],
    )
    def test_bad_sample(
        self, tmp_path: Path, suffix: str, sample: dict, message: str
    ) -> None:
        with (
            pytest.raises(StoreError, match=message),
            open_writer(tmp_path / f"a{suffix}") as writer,
        ):
            writer.append(sample)
        assert list(tmp_path.iterdir()) == []

    def test_bad_column_type(self, tmp_path: Path, suffix: str) -> None:
        with pytest.raises(StoreError, match="'int8'; types are"):
            open_writer(tmp_path / f"a{suffix}", {"image": "binary", "label": "int8"})


def test_a_column_in_memory_has_a_value_for_each_image() -> None:
    with pytest.raises(ValueError, match="3 values for 2 images"):
        MemoryStore([b"a", b"b"], [1, 2, 3])


def test_a_folder_of_img2dataset_is_its_tars(tmp_path: Path) -> None:
    for number in range(2):
        write_tar(tmp_path / f"0000{number}.tar", samples(2))
        pq.write_table(pa.table({"key": ["0"]}), tmp_path / f"0000{number}.parquet")
    (tmp_path / "00000_stats.json").write_text("{}")
    assert len(open_store(tmp_path)) == 4
    pq.write_table(pa.table({"key": ["0"]}), tmp_path / "00002.parquet")
    with pytest.raises(
        StoreError, match=r"both \*\.parquet and \*\.tar files; .* such as .*/\*\.tar"
    ):
        open_store(tmp_path)
