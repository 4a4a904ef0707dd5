from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raypipe.plan.places import MicroBatchId
from raypipe.streaming.bad_samples import BadSample
from raypipe.streaming.memory.remembered_files import RememberedFiles, _name
from raypipe.streaming.memory.stored import Stored
from raypipe.transform.fields import Ragged

KEYS = [bytes([number]) * 16 for number in range(8)]
BAD = BadSample(MicroBatchId("val", 0, 1, 0), "s", 3, "é", None, "cut off", "store")


def stored(number: int = 0, bad: tuple[BadSample, ...] = ()) -> Stored:
    rng = np.random.default_rng(number)
    ragged = Ragged("text", np.frombuffer(b"abc", np.uint8), np.array([0, 1, 3]))
    fields: dict[str, Any] = {
        "image": rng.integers(0, 256, (2, 5, 7, 3), np.uint8),
        "label": np.array([1, 2]),
        "column.height": rng.random((2, 1), np.float32),
        "column.caption": ragged,
        "column.pages": rng.integers(0, 256, (2, 8192), np.uint8),
    }
    return Stored(np.array([4, -1]), np.array([1, 0], np.float32), fields, list(bad))


def same(first: Stored | None, second: Stored) -> bool:
    assert first is not None and list(first.fields) == list(second.fields)
    pairs = [(first.index, second.index), (first.weight, second.weight)]
    for name, value in second.fields.items():
        other = first.fields[name]
        if isinstance(value, Ragged):
            assert isinstance(other, Ragged) and other.kind == value.kind
            pairs += [(other.values, value.values), (other.offsets, value.offsets)]
        else:
            pairs.append((other, value))
    equal = [a.dtype == b.dtype and np.array_equal(a, b) for a, b in pairs]
    return all(equal) and first.bad == second.bad


def found_in(files: RememberedFiles) -> dict[bytes, Stored]:
    return files.find(KEYS, len(KEYS), comes_back=True)[0]


def kept(files: RememberedFiles, key: bytes, value: Stored) -> None:
    files.keep({key: value}, [], comes_back=True)


def test_another_process_finds_all_fields_and_bad_samples(tmp_path: Path) -> None:
    kept(RememberedFiles(folder=tmp_path), KEYS[0], stored(bad=(BAD,)))
    found, missing = RememberedFiles(folder=tmp_path).find(KEYS[:2], 1, True)
    assert missing == KEYS[1:2]
    assert list(found) == KEYS[:1] and same(found[KEYS[0]], stored(bad=(BAD,)))


def large() -> Stored:
    pixels = np.random.default_rng(0).integers(0, 256, (2, 512, 512, 3), np.uint8)
    return Stored(np.array([4, 7]), np.ones(2, np.float32), {"image": pixels}, [])


def test_an_actor_whose_ranks_have_its_folder_reads_only_heads(tmp_path: Path) -> None:
    ranks_files = RememberedFiles(folder=tmp_path)
    (tmp_path / "elsewhere").mkdir()
    name = _name(tmp_path)
    assert name == _name(tmp_path) != _name(tmp_path / "elsewhere")
    files = RememberedFiles(folder=tmp_path, ranks_folder=name)
    made = {KEYS[0]: large(), KEYS[1]: stored(), KEYS[2]: replace(large(), bad=[BAD])}
    handed_over = files.keep(made, [], comes_back=True)
    found = found_in(files)
    assert list(handed_over) == [KEYS[0]] and list(found) == KEYS[:3]
    for outline in (handed_over[KEYS[0]], found[KEYS[0]]):
        assert not outline.fields and outline.collected_bytes >= 2 * 512 * 512 * 3
        assert np.array_equal(outline.index, [4, 7]) and outline.weight.tolist() == [
            1,
            1,
        ]
    assert all(same(found[key], made[key]) for key in KEYS[1:3])
    assert same(found_in(ranks_files)[KEYS[0]], large())
    others = RememberedFiles(folder=tmp_path, ranks_folder="of another machine")
    assert same(found_in(others)[KEYS[0]], large())
    path = tmp_path / KEYS[0].hex()
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)
    assert KEYS[0] in found_in(files)
    assert KEYS[0] not in found_in(ranks_files) and not path.exists()
    path.write_bytes(content[:-4096])
    assert KEYS[0] not in found_in(files) and not path.exists()


def test_training_that_never_comes_back_is_not_written(tmp_path: Path) -> None:
    files = RememberedFiles(folder=tmp_path)
    files.keep({KEYS[0]: stored()}, [], comes_back=False)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "damage", ["flipped", "swapped", "cut", "empty", "another's", "text"]
)
def test_a_damaged_file_is_removed_and_made_again(tmp_path: Path, damage: str) -> None:
    files = RememberedFiles(folder=tmp_path)
    kept(files, KEYS[0], stored())
    path = tmp_path / KEYS[0].hex()
    content = bytearray(path.read_bytes())
    if damage == "another's":
        kept(files, KEYS[1], stored(1))
        content[:] = (tmp_path / KEYS[1].hex()).read_bytes()
    elif damage == "flipped":
        content[len(content) // 2] ^= 4
    elif damage == "swapped":
        content[-8192:-4096], content[-4096:] = content[-4096:], content[-8192:-4096]
    else:
        content = {
            "cut": content[:-70],
            "empty": bytearray(),
            "text": bytearray(b"no micro-batch " * 9),
        }[damage]
    path.write_bytes(content)
    assert KEYS[0] not in found_in(files)
    assert not path.exists()
    kept(files, KEYS[0], stored())
    assert same(found_in(files)[KEYS[0]], stored())


def test_files_stay_below_the_limit_and_the_oldest_go(tmp_path: Path) -> None:
    kept(RememberedFiles(folder=tmp_path), KEYS[0], stored())
    size = (tmp_path / KEYS[0].hex()).stat().st_size
    os.utime(tmp_path / KEYS[0].hex(), (1, 1))
    files = RememberedFiles(4 * size, tmp_path)
    for number in (1, 2, 3):
        kept(files, KEYS[number], stored(number))
        os.utime(tmp_path / KEYS[number].hex(), (number + 1, number + 1))
    assert len(found_in(files)) == 4  # which touches them
    os.utime(tmp_path / KEYS[2].hex(), (5, 5))
    for number in (4, 5):
        kept(files, KEYS[number], stored(number))
        total = sum(path.stat().st_size for path in tmp_path.iterdir())
        assert total <= 4 * size + 100
    found = found_in(files)
    assert {KEYS[4], KEYS[5]} <= set(found) and KEYS[2] not in found
    kept(RememberedFiles(size - 1, tmp_path), KEYS[6], stored(6))
    assert KEYS[6] not in found_in(files)


def test_files_that_others_are_writing_count(tmp_path: Path) -> None:
    kept(RememberedFiles(folder=tmp_path), KEYS[0], stored())
    one = (tmp_path / KEYS[0].hex()).stat().st_size
    others = tmp_path / f".{KEYS[1].hex()}.0123"
    others.touch()
    os.truncate(others, one)
    (tmp_path / ".room").write_text("unknown")
    files = RememberedFiles(3 * one, tmp_path)
    kept(files, KEYS[2], stored())
    assert set(found_in(files)) == {KEYS[0], KEYS[2]}
    kept(files, KEYS[3], stored())  # the limit is reached: one of three may stay
    assert list(found_in(files)) == [KEYS[3]] and others.exists()
    os.truncate(others, 3 * one)
    (tmp_path / ".room").write_text("unknown")
    kept(files, KEYS[4], stored())
    assert not found_in(files)
    assert {path.name for path in tmp_path.iterdir()} == {others.name, ".room"}


def test_a_disk_that_fails_is_left_alone(tmp_path: Path) -> None:
    files = RememberedFiles(folder=tmp_path / "missing")
    kept(files, KEYS[0], stored())
    (tmp_path / "missing").mkdir()
    kept(files, KEYS[0], stored())
    assert found_in(files) == {}
