"""Tables that name image files: formats, paths, labels, and what is wrong with them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from refused import store_refused
from tars import put

from raypipe.errors import ConfigError, RaypipeError
from raypipe.stores import Store, open_store
from raypipe.stores.filter import matching
from raypipe.stores.tables import TableStore

PATHS = ["img/0.jpg", "img/1.jpg", "img/0.jpg"]
NAMES = ["dog", "cat", "dog"]
LINES = "path,label\nimg/0.jpg,dog\nimg/1.jpg,cat\nimg/0.jpg,dog\n"
ROWS = [{"path": path, "label": name} for path, name in zip(PATHS, NAMES, strict=True)]
FILE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "img").mkdir()
    for number in range(2):
        (tmp_path / "img" / f"{number}.jpg").write_bytes(b"%d" % number)
    return tmp_path


def write(path: Path, content: str | bytes | pa.Table) -> Path:
    if isinstance(content, pa.Table):
        pq.write_table(content, path)
    else:
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def read(store: Store, *columns: str) -> Any:
    columns = columns or ("image", "label", "name")
    values = store.read(np.arange(len(store)), columns).values()
    listed = [np.asarray(column, object).tolist() for column in values]
    return listed if len(listed) > 1 else listed[0]


FORMATS: dict[str, str | bytes | pa.Table] = {
    "a.csv": LINES,
    "bom.csv": b"\xef\xbb\xbf" + LINES.encode(),
    "crlf.csv": LINES.replace("\n", "\r\n").replace("path", '"path"'),
    "spaces.csv": LINES.replace("label", " Class ").replace(",dog", ", dog"),
    "semicolons.csv": LINES.replace(",", ";"),
    "pandas.csv": ",path,label\n0,img/0.jpg,dog\n1,img/1.jpg,cat\n2,img/0.jpg,dog\n",
    "a.tsv": LINES.replace(",", "\t"),
    "A.JSONL": "\n".join(map(json.dumps, ROWS)),
    "blank.jsonl": "\r\n" + "\r\n\r\n".join(map(json.dumps, ROWS)) + "\r\n",
    "bom.jsonl": b"\xef\xbb\xbf" + "\n".join(map(json.dumps, ROWS)).encode() + b"\n\n",
    "a.parquet": pa.Table.from_pylist(ROWS),
    "dictionary.parquet": pa.table(
        {"file_name": PATHS, "category": pa.array(NAMES).dictionary_encode()}
    ),
    "hugging face.parquet": pa.table(
        {
            "image": pa.array([{"bytes": None, "path": path} for path in PATHS], FILE),
            "label": NAMES,
        }
    ),
}


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_is_the_same_store(name: str, root: Path) -> None:
    store = open_store(write(root / name, FORMATS[name]))
    assert read(store) == [[b"0", b"1", b"0"], [1, 0, 1], PATHS]
    assert store.classes == ("cat", "dog") and store.groups is None


def test_several_files_are_one_table(root: Path) -> None:
    for name in ("part-0.csv", "part-1.csv"):
        write(root / name, LINES)
    store = open_store(root / "part-*.csv")
    assert isinstance(store, TableStore) and read(store, "label") == [1, 0, 1] * 2
    write(root / "part-1.csv", "path,label\nimg/0.jpg,bee\n")
    assert open_store(root / "part-{0..1}.csv").classes == ("bee", "cat", "dog")


def test_files_of_a_table_may_have_few_and_many_texts(root: Path) -> None:
    many = [f"img/0.jpg,dog,{number}th" for number in range(99)]
    for name, rows in (("part-0.csv", many[:1] * 9), ("part-1.csv", many)):
        write(root / name, "\n".join(["path,label,note", *rows]))
    notes = read(open_store(root / "part-*.csv"), "note")
    assert notes == ["0th"] * 9 + [f"{number}th" for number in range(99)]


def test_other_columns_stay_columns(root: Path) -> None:
    text = 'path,label,width,note\nimg/0.jpg,5,8,"a\nb, c"\nimg/1.jpg,7,,\n'
    store = open_store(write(root / "a.csv", text))
    assert read(store, "path", "width", "note") == [
        PATHS[:2],
        [8, None],
        ["a\nb, c", None],
    ]
    objects = {"path": "img/0.jpg", "boxes": [[0, 0, 1, 1, 3]], "tags": {"a": None}}
    store = open_store(write(root / "a.jsonl", json.dumps(objects)))
    assert read(store, "boxes") == [[[0, 0, 1, 1, 3]]]


def test_dates_are_compared_as_text(root: Path) -> None:
    text = "path,day\na,2024-05-01\nb,2024-11-30\nc,\n"
    store = open_store(write(root / "a.csv", text))
    assert matching(store, "day > '2024-05-01'").tolist() == [False, True, False]


@pytest.mark.parametrize(
    ("labels", "expected", "classes"),
    [
        (["3", "1", "007"], [3, 1, 7], None),
        (["0.5", "1", "-2e3"], [0.5, 1, -2000], None),
        (["b", "A", "b"], [1, 0, 1], ("A", "b")),
        (["NA", "None", "true"], [0, 1, 2], ("NA", "None", "true")),
    ],
)
def test_labels_are_numbers_or_names(
    labels: list[str], expected: list[float], classes: Any, root: Path
) -> None:
    rows = [f"{path},{label}" for path, label in zip(PATHS, labels, strict=True)]
    store = open_store(write(root / "a.csv", "\n".join(["image,target", *rows])))
    assert read(store, "label") == expected and store.classes == classes


def test_labels_may_be_lists_and_booleans(root: Path) -> None:
    rows = [{"path": "a", "label": [0, 1], "ok": True}] * 2
    path = write(root / "a.jsonl", "\n".join(map(json.dumps, rows)))
    assert read(open_store(path), "label") == [[0, 1]] * 2
    assert read(open_store(path, target_column="ok"), "label") == [True, True]


def test_a_file_of_classes_gives_their_order(root: Path) -> None:
    path = write(root / "a.csv", LINES)
    before = open_store(path).fingerprint
    (root / "classes.txt").write_bytes(b"\xef\xbb\xbfdog\r\nemu \ncat\n4\n\n")
    store = open_store(path)
    assert store.classes == ("dog", "emu", "cat", "4") and store.fingerprint != before
    assert read(store, "label") == [0, 2, 0]
    write(path, "path,label\nimg/0.jpg,dog\nimg/1.jpg,4\n")
    assert read(open_store(path), "label") == [0, 3]
    (root / "classes.txt").write_text("dog\n4\ndog\n")
    store_refused("classes.txt next to the table has 'dog' 2 times", path)


PATTERNS = {
    r"/(?P<label>\d)": ([0, 1], None),
    r"(?P<PredictionString>\w+)": ([1, 0], ("n01", "n02")),
}


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_pattern_finds_labels(pattern: str, root: Path) -> None:
    text = "ImageId,PredictionString\n0,n02 1 2 3 4\n1,n01 5 6 7 8 n01 1 1 1 1\n"
    options = {"image_column": "img/{ImageId}.jpg", "target_column": pattern}
    store = open_store(write(root / "a.csv", text), **options)
    labels, classes = PATTERNS[pattern]
    assert read(store) == [[b"0", b"1"], labels, PATHS[:2]]
    assert store.classes == classes


def test_a_pattern_finds_labels_in_the_names_of_a_folder(
    root: Path, bucket: str
) -> None:
    (root / "img" / "notes.txt").touch()
    pattern = r"(?P<label>\d)\."
    here = open_store(root / "img", target_column=pattern)
    assert read(here) == [[b"0", b"1"], [0, 1], ["0.jpg", "1.jpg"]]
    for name in ("0.jpg", "1.jpg"):
        put(root / "img" / name, f"{bucket}/img/{name}")
    there = open_store(f"{bucket}/img", target_column=pattern)
    assert read(there) == read(here)
    store_refused(
        r"0\.jpg has no label: .*if this is a patt",
        root / "img",
        target_column=r"(?P<label>x)",
    )
    store_refused(
        "Invalid regular expression", root / "img", target_column=r"(?P<label>("
    )


def test_a_pattern_takes_all_images_of_a_folder_or_says_which_not(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pattern = r"(?P<label>\d)\."
    store_refused("no images outside of folders", root, target_column=pattern)
    for name in ("_2.jpg", "3.jpg", ".4.jpg"):
        (root / name).write_bytes(b"x")
    store = open_store(root, target_column=pattern)
    assert read(store, "label", "name") == [[3, 2], ["3.jpg", "_2.jpg"]]
    assert "2 samples; left out: 2 in folders" in caplog.text


def test_ids_keep_their_zeros(root: Path) -> None:
    (root / "007.jpg").write_bytes(b"7")
    path = write(root / "a.csv", "id\n007\n")
    assert read(open_store(path, image_column="{id}.jpg"), "image") == [b"7"]


def test_paths_are_links(root: Path) -> None:
    (root / "lists").mkdir()
    (root / "img" / "1 é.jpg").write_bytes(b"1")
    uri = (root / "img" / "1 é.jpg").as_uri()
    rows = ["../img/0.jpg", f"{root}/img/1.jpg", uri, "0.jpg"]
    path = write(root / "lists" / "a.csv", "\n".join(["path", *rows, '""']))
    assert read(open_store(path), "image") == [b"0", b"1", b"1", None, None]
    path = write(root / "lists" / "b.csv", "path\n0.jpg\n")
    moved = open_store(path, image_column=f"{root}/img/{{path}}")
    assert read(moved, "image") == [b"0"]


def test_a_table_in_a_bucket_names_objects_there(root: Path, bucket: str) -> None:
    rows = ["0 é.jpg", "../0%20.jpg", "/b.jpg", "../../../b.jpg", f"{bucket}/b.jpg"]
    rows += ["gone.jpg", f"file://{root}/img/0.jpg"]
    write(root / "a.csv", "\n".join(["path", *rows]))
    put(root / "a.csv", f"{bucket}/lists/a.csv")
    for name in ("lists/0%20%C3%A9.jpg", "0%2520.jpg", "b.jpg"):
        put(root / "img" / "1.jpg", f"{bucket}/{name}")
    store = open_store(f"{bucket}/lists/a.csv")
    assert read(store, "image") == [b"1"] * 5 + [None] * 2
    assert store.sample_name(0) == f"{bucket}/lists/0%20%C3%A9.jpg"  # type: ignore[attr-defined]
    put(root / "img" / "1.jpg", f"{bucket}/lists/classes.txt")
    local = open_store(write(root / "b.csv", f"path\nimg/0.jpg\n{bucket}/b.jpg\n"))
    assert read(local, "image") == [b"0", b"1"]


WRONG: dict[str, tuple[str, str | bytes, dict[str, str], str]] = {
    "no header": ("a.csv", "img/0.jpg,3\n", {}, "write a line of names above the rows"),
    "empty": ("a.csv", "", {}, "Empty CSV file; write UTF-8, a line of names"),
    "two columns of paths": (
        "a.csv",
        "path,file\na,b\n",
        {},
        "columns path, file: choose the image, store.image_column: NAME",
    ),
    "two columns of labels": (
        "a.csv",
        "path,class,target\na,1,2\n",
        {},
        "choose the label, store.target_column: NAME",
    ),
    "no such column": (
        "a.csv",
        LINES,
        {"image_column": "{pth}.jpg"},
        "no column 'pth'; did you mean path",
    ),
    "no such label": (
        "a.csv",
        LINES,
        {"target_column": "labels"},
        "no column 'labels'; did you mean label",
    ),
    "numbers and names": (
        "a.csv",
        "path,label\na,1\nb,cat\n",
        {},
        r"the label '1' is not among the names .* classes\.txt next to the table",
    ),
    "negative numbers and names": (
        "a.csv",
        "path,label\na,-1\nb,cat\n",
        {},
        r"the label '-1' is not among the names of classes, such as 'cat'",
    ),
    "not a number": (
        "a.csv",
        "path,label\na,1\nb,nan\n",
        {},
        r"the label '1' is not among the names of classes, such as 'nan'",
    ),
    "blank label": ("a.csv", "path,label\na,cat\nb, \n", {}, "b has no label"),
    "numbers and names in JSON": (
        "a.jsonl",
        '{"path": "a", "label": 1}\n{"path": "b", "label": "cat"}',
        {},
        "one type of values for each name",
    ),
    "no label": ("a.csv", "path,label\na,1\nb,\n", {}, r"a\.csv: b has no label"),
    "labels of another type": (
        "a.jsonl",
        '{"path": "a", "label": {"x": "y"}}',
        {},
        "labels must be numbers, or lists of numbers",
    ),
    "a row that is short": (
        "a.csv",
        "path,label\na,1\nb\n",
        {},
        "Expected 2 columns, got 1: b; .* as many values in each row",
    ),
    "Latin-1": ("a.csv", "path\né.jpg\n".encode("latin1"), {}, "write UTF-8"),
    "not JSON": ("a.jsonl", "path,label\n", {}, "an object in each line"),
    "deep JSON": ("a.jsonl", '{"path":' + "[" * 99999, {}, "recursion"),
    "no expression": (
        "a.csv",
        LINES,
        {"target_column": "(?P<path>["},
        "Invalid regular expression: missing ]",
    ),
}


@pytest.mark.parametrize("fault", WRONG)
def test_what_is_wrong_is_one_sentence_with_the_remedy(fault: str, root: Path) -> None:
    name, content, options, message = WRONG[fault]
    path = write(root / name, content)
    with pytest.raises(RaypipeError, match=message) as told:
        len(open_store(path, **options))
    assert str(path) in str(told.value) and "\n" not in str(told.value)


def test_credentials_in_a_table_are_refused_and_not_shown(root: Path) -> None:
    store = open_store(write(root / "a.csv", "path\ns3://me:PASS@b/a.jpg\n"))
    with pytest.raises(ConfigError, match="contains credentials") as told:
        read(store, "image")
    assert "PASS" not in str(told.value)


def test_fields_that_later_rows_add_cost_nothing(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of n rows with n names, pyarrow would make n² values; of deep ones it would overflow the stack."""
    rows = ['{"path": "img/0.jpg"}']
    rows += [f'{{"path": "img/1.jpg", "k{number}": 1}}' for number in range(20_000)]
    rows.append('{"path": "img/0.jpg", "deep": ' + "[" * 10**5 + "]" * 10**5 + "}")
    store = open_store(write(root / "a.jsonl", "\n".join(rows)))
    assert store.schema.names == ["image", "path", "name"] and len(store) == 20_002
    assert "left out, as the first row lacks them: k0, k1, k10, " in caplog.text


@pytest.mark.parametrize(
    "change",
    [
        lambda root: write(root / "a.csv", LINES + "img/1.jpg,cat\n"),
        lambda root: write(root / "img" / "1.jpg", b"longer"),
        lambda root: write(root / "classes.txt", "dog\ncat\n"),
    ],
    ids=["rows", "files", "classes"],
)
def test_the_fingerprint_shows_other(
    change: Callable[[Path], Path], root: Path
) -> None:
    path = write(root / "a.csv", LINES)
    before = open_store(path).fingerprint
    assert open_store(path).fingerprint == before
    change(root)
    assert open_store(path).fingerprint != before


def test_parquet_with_images_is_read_as_before(root: Path) -> None:
    columns = {"jpg": [b"1", b"2"], "url": ["http://a/1", "http://a/2"]}
    path = write(root / "a.parquet", pa.table(columns))
    store_refused("no column 'image' for image_column", path)
    assert open_store(path, image_column="jpg").read(np.arange(2), ("image",))[
        "image"
    ] == [b"1", b"2"]
    assert open_store(path, image_column="url").sample_name(1) == "http://a/2"  # type: ignore[attr-defined]
