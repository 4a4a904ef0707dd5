from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from conftest import CLASSES, picture

from raypipe.commands.cli import main
from raypipe.commands.inspection import sampled
from raypipe.commands.store_page import mixing, render, write_page
from raypipe.errors import ConfigError
from raypipe.stores.base import MemoryStore

SORTED = MemoryStore([picture(i % 7) for i in range(400)], np.repeat(np.arange(4), 100).tolist(), CLASSES[:4])


def test_the_mixing_of_a_full_shuffle_is_full_and_that_of_none_is_none() -> None:
    full, off = mixing(SORTED, "global", 20), mixing(SORTED, "off", 20)
    assert full is not None and off is not None
    assert 0.9 < full <= 1 and off == pytest.approx(3 * (20 - 1 / 20) / 3 / 400)
    assert mixing(SORTED, "window", 20) is None


def test_a_micro_batch_larger_than_the_store_is_the_store() -> None:
    whole = mixing(SORTED, "off", 10_000)
    assert whole == pytest.approx(1, abs=0.01)


def test_the_page_shows_samples_classes_sizes_and_mixing(stores: dict[str, Path]) -> None:
    text = render(SORTED, sampled(SORTED), 20)
    assert text.count("data:image/jpeg;base64,") == 24 and "a</td>" in text and "100</td>" in text
    for title in ("height, pixels", "KiB of an image"):
        assert f'aria-label="{title}' in text
    for shuffle in ("global", "off"):
        assert f"<tr><td>{shuffle}</td>" in text


def test_bad_samples_and_odd_labels_are_shown_as_what_they_are() -> None:
    images: list[bytes | None] = [picture(0), None, b"<html>", picture(1)[:-50]]
    store = MemoryStore(images, [0, 1, 2, 9], ("<b>", "y", "z"))
    text = render(store, sampled(store), 2)
    assert "sample 1: no value" in text and "sample 2: not an image" in text and "truncated JPEG" in text
    assert "&lt;b&gt;" in text and "label 9" in text


def test_an_empty_store_and_one_of_many_classes_have_a_page() -> None:
    empty = MemoryStore([], [], CLASSES)
    assert "0 samples" in render(empty, sampled(empty))
    many = MemoryStore([picture(0)] * 100, list(range(100)), tuple(map(str, range(100))))
    assert "100 classes in 100 labels" in render(many, sampled(many))


def test_the_command_writes_it_and_names_it(
    stores: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["inspect", str(stores["parquet"]), "--html", str(tmp_path / "page.html")])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["html"] == f"file://{tmp_path}/page.html" and (tmp_path / "page.html").stat().st_size > 10_000
    assert found["samples"] == 100 and found["classes"] == 5 and found["bytes"] > 0


def test_a_place_that_cannot_be_written_is_one_error(stores: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match=r"/nowhere/page\.html cannot be written"):
        write_page(SORTED, sampled(SORTED), "/nowhere/page.html")
    with pytest.raises(SystemExit):
        main(["inspect", str(stores["train"]), "--verify", "--html", "x.html"])
