"""Zips of class folders and of pairs, as Python's zipfile writes them, and those that are refused."""

from __future__ import annotations

import stat
import struct
import zipfile
from pathlib import Path
from typing import Any

import pytest
from refused import source_refused

from raypipe.stores.sources import Asked, open_source
from raypipe.stores.sources.format_source import Source

pytestmark = pytest.mark.usefixtures("in_own_folder")


def write(
    name: str, members: dict[str, bytes | str], method: int = zipfile.ZIP_DEFLATED
) -> Path:
    with zipfile.ZipFile(name, "w", method) as archive:
        for member, content in members.items():
            archive.writestr(member, content)
    return Path(name)


def opened(
    address: str | Path, label: str = "label"
) -> tuple[Source, list[dict[str, Any]]]:
    source = open_source(address, Asked("image", label))
    assert source is not None
    rows = list(source.samples)
    assert source.num_samples == len(rows)
    return source, rows


def test_several_zips_share_their_classes() -> None:
    write("a-0.zip", {"cat/1.jpg": b"1", "owl/2.jpg": b"2"})
    write("a-1.zip", {"cat/3.jpg": b"3", "dog/4.jpg": b"4"}, zipfile.ZIP_STORED)
    for address in (".", "a-*.zip", "a-{0..1}.zip"):
        source, rows = opened(address)
        assert source.classes == ("cat", "dog", "owl")
        assert [(row["image"], row["label"]) for row in rows] == [
            (b"1", 0),
            (b"2", 2),
            (b"3", 0),
            (b"4", 1),
        ]


def test_links_lead_to_members() -> None:
    file = write("a.zip", {"cat/a.jpg": b"a"})
    with zipfile.ZipFile(file, "a") as archive:
        link = zipfile.ZipInfo("dog/link.jpg")
        link.external_attr = (stat.S_IFLNK | 0o777) << 16
        archive.writestr(link, "../cat/a.jpg")
    assert [(row["image"], row["label"]) for row in opened(file)[1]] == [
        (b"a", 0),
        (b"a", 1),
    ]


def test_pairs_as_in_a_tar() -> None:
    members = {}
    for i in range(3):
        members |= {
            f"{i}.jpg": b"%d" % i,
            f"{i}.cls": str(i % 2),
            f"{i}.txt": f"text {i}",
            f"{i}.npy": b"n%d" % i,
        }
    _, rows = opened(write("a.zip", members))
    assert rows[2] == {
        "image": b"2",
        "label": 0,
        "txt": "text 2",
        "npy": b"n2",
        "name": "2",
    }
    by_json = {
        "a.jpg": b"a",
        "a.json": '{"label": 7, "id": 3}',
        "b.jpg": b"b",
        "b.json": '{"label": 8, "id": 4}',
    }
    _, rows = opened(write("b.zip", by_json), "id")
    assert [row["label"] for row in rows] == [3, 4]


def test_images_alone_need_no_target() -> None:
    file = write("a.zip", {"a.jpg": b"a", "b.jpg": b"b"})
    source_refused(
        r"has no labels: the layout is class/image\.jpg, or WebDataset's pairs", file
    )
    assert opened(file, "")[1] == [
        {"image": b"a", "name": "a"},
        {"image": b"b", "name": "b"},
    ]


def test_no_target_is_no_label() -> None:
    folders = write("a.zip", {"cat/1.jpg": b"1", "owl/2.jpg": b"2"})
    source, rows = opened(folders, "")
    assert source.classes is None and rows[0] == {"image": b"1", "name": "cat/1.jpg"}


# What is refused, by name


@pytest.mark.parametrize(
    "name", ["../cat/a.jpg", "/cat/a.jpg", "cat/../../a.jpg", "cat\\..\\a.jpg"]
)
def test_a_name_that_leads_out(name: str) -> None:
    file = write("a.zip", {"cat/a.jpg": b"a", name: b"x"})
    source_refused(r"a\.zip: '.*a\.jpg' leads out of the zip", file)


def test_encryption_is_named() -> None:
    file = write("a.zip", {"cat/a.jpg": b"a"})
    content = bytearray(file.read_bytes())
    content[content.index(b"PK\x01\x02") + 8] |= (
        1  # the flags of the member in the directory
    )
    file.write_bytes(content)
    source_refused(
        r"'cat/a\.jpg' is encrypted: zip the folder again, without a password", file
    )


def _declaring(file: Path, num_bytes: int) -> Path:
    content = bytearray(file.read_bytes())
    struct.pack_into("<I", content, content.index(b"PK\x01\x02") + 24, num_bytes)
    file.write_bytes(content)
    return file


@pytest.mark.parametrize(
    ("num_bytes", "message"),
    [
        (600 << 20, r"would unpack to 629,145,600 bytes; the limit is 536,870,912"),
        (1 << 20, "from 3: a zip bomb"),
    ],
)
def test_sizes_that_no_image_has(num_bytes: int, message: str) -> None:
    file = write("a.zip", {"cat/a.jpg": b"a"})
    source_refused(rf"'cat/a\.jpg' .*{message}", _declaring(file, num_bytes))


def test_members_that_overlap() -> None:
    """As in a zip bomb of D. Fifield: all members unpack the same bytes."""
    file = write(
        "a.zip",
        {"cat/a.jpg": b"a" * 500, "cat/b.jpg": b"a" * 500},
        zipfile.ZIP_STORED,
    )
    content = bytearray(file.read_bytes())
    second = content.index(b"PK\x01\x02", content.index(b"PK\x01\x02") + 1)
    struct.pack_into("<I", content, second + 42, 10)  # where the second member begins
    file.write_bytes(content)
    source_refused(r"'cat/a\.jpg' overlaps 'cat/b\.jpg': a zip bomb", file)


def test_a_damaged_member_is_a_bad_sample(caplog: pytest.LogCaptureFixture) -> None:
    file = write(
        "a.zip",
        {"cat/a.jpg": b"a" * 50, "cat/b.jpg": b"b"},
        zipfile.ZIP_STORED,
    )
    content = bytearray(file.read_bytes())
    content[content.index(b"aaaa")] = 0
    file.write_bytes(content)
    assert [row["image"] for row in opened(file)[1]] == [None, b"b"]
    assert "'cat/a.jpg': Bad CRC-32" in caplog.text


def test_names_of_windows_are_parted_by_backslashes() -> None:
    file = write("a.zip", {"cat\\a.jpg": b"a", "dog\\b.jpg": b"b"})
    source, rows = opened(file)
    assert source.classes == ("cat", "dog")
    assert rows == [
        {"image": b"a", "label": 0, "name": "cat/a.jpg"},
        {"image": b"b", "label": 1, "name": "dog/b.jpg"},
    ]
