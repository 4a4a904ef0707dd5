"""The fuzzer that is guided by the code that inputs reach (.ci/fuzz), for a moment."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from fuzz_guided import TARGETS, changed, without_key

from raypipe.stores.lmdb_file import LMDBFile

ROOT = Path(__file__).parents[1]


@pytest.mark.system
@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs a compiler")
def test_inputs_that_reach_new_code_join_the_corpus(tmp_path: Path) -> None:
    done = subprocess.run(
        [ROOT / ".ci" / "fuzz", "0.05", "lmdb"],
        env={**os.environ, "PYTHON": sys.executable, "FUZZ_OUT": str(tmp_path / "out")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    told = re.search(
        r"lmdb: \d+ inputs, .* (\d+) reached new code, (\d+) edges; 0 wr", done.stdout
    )
    assert told and int(told[1]) > 0 and int(told[2]) > 200
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", TARGETS)
def test_a_corpus_is_made_of_what_its_target_accepts(name: str) -> None:
    target = TARGETS[name]
    rng = np.random.default_rng(0)
    corpus = target.corpus()
    checked = [target.check(data, rng) for data in corpus[:20]]
    assert True in checked and False not in checked


def test_changes_of_an_input_stay_within_its_limit() -> None:
    rng = np.random.default_rng(0)
    operands = np.array([1 << 40], np.uint64)
    some = {changed(b"abcd", b"other", operands, rng) for _ in range(200)}
    assert len(some) > 150


def test_a_store_with_an_empty_key_is_listed(tmp_path: Path) -> None:
    """Its list of keys has no bytes: .ci/sanitize sees what is done with their place."""
    path = tmp_path / "a.lmdb"
    path.write_bytes(without_key(TARGETS["lmdb"].corpus()[2]))
    (entries,) = LMDBFile(path).entries()
    assert entries.keys.to_pylist() == [b""]
