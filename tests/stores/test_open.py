"""How an address becomes a store or a writer."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raypipe.errors import ConfigError, StoreError
from raypipe.stores import open_store, open_writer, store_options
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


def test_importing_is_cheap() -> None:
    heavy = "('lmdb', 'pyarrow', 'torch', 'ray')"
    program = (
        f"import sys, raypipe.stores; print([m for m in {heavy} if m in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize("address", ["absent", "absent.lmdb", "absent.parquet"])
def test_absent(tmp_path: Path, address: str) -> None:
    with pytest.raises(StoreError, match=rf"(?s){address} does not exist$"):
        open_store(tmp_path / address)


def test_unknown(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(StoreError, match=r"(?s)notes\.txt is not a store.*LMDB"):
        open_store(tmp_path / "notes.txt")
    with pytest.raises(StoreError, match=r"contains no store"):
        open_store(tmp_path)


def test_a_tar_of_another_compression_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "a.tar.lz4").write_bytes(b"x")
    with pytest.raises(
        StoreError, match=r"raypipe reads \.tar\.gz, \.tar\.bz2 and \.tar\.xz"
    ):
        open_store(tmp_path / "a.tar.lz4")


@pytest.mark.parametrize(
    "name",
    ["train.h5", "train.rec", "train-00000-of-00001", "train.zip", "module:samples"],
)
def test_a_source_is_named_with_the_command_that_converts_it(
    tmp_path: Path, name: str
) -> None:
    address = name if ":" in name else str(tmp_path / name)
    Path(tmp_path, name).write_bytes(b"")
    with pytest.raises(
        StoreError,
        match=rf"read once, in order: `raypipe convert {address} train\.lmdb` makes a",
    ):
        open_store(address)


@pytest.mark.parametrize("address", ["a.lmdb", "a.parquet", "class"])
def test_an_option_that_the_store_has_not(tmp_path: Path, address: str) -> None:
    write(tmp_path / "a.lmdb")
    write(tmp_path / "a.parquet")
    (tmp_path / "class" / "x").mkdir(parents=True)
    with pytest.raises(
        ConfigError, match=rf"{address} is \w+, which has no option 'colour'"
    ):
        open_store(tmp_path / address, colour="red")


def test_options_are_those_that_are_not_usual() -> None:
    assert store_options() == store_options("image", "label") == {}
    assert store_options("img") == {"image_column": "img"}


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


def test_memory_extras() -> None:
    store = MemoryStore(
        [b"a", None], None, columns={"size": [1, 2], "name": ["x", "y"]}
    )
    assert tuple(store.schema.names) == ("image", "size", "name")
    batch = store.read(np.array([1, 0]), columns=tuple(store.schema.names))
    assert batch["image"] == [None, b"a"]
    assert batch["size"].tolist() == [2, 1]
    assert batch["name"] == ["y", "x"]
    with pytest.raises(ValueError, match="3 values for 2 images"):
        MemoryStore([b"a", b"b"], [1, 2, 3])


def test_a_pattern_that_only_a_shell_knows_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"\{train,val\}\.tar does not exist"):
        open_store(tmp_path / "{train,val}.tar")


def test_a_name_near_the_missing_one_is_proposed(tmp_path: Path) -> None:
    (tmp_path / "train.lmdb").touch()
    with pytest.raises(
        StoreError, match=r"trian\.lmdb does not exist; did you mean .*/train\.lmdb\?$"
    ):
        open_store(tmp_path / "trian.lmdb")


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
