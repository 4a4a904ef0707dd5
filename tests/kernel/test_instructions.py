"""The kernel takes as many instructions as benchmarks/results/instructions.json says, at each level of vectors."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import instructions
import pytest

from raypipe import kernel


@pytest.mark.system
def test_no_case_takes_more_or_fewer_instructions_than_it_did() -> None:
    if not shutil.which("valgrind") or not kernel.available():
        pytest.skip("valgrind counts the instructions of the compiled kernel")
    known = json.loads(instructions.FILE.read_text())["compiler"]
    if known != instructions.compiler():
        pytest.skip(f"the numbers are of {known}")
    command = [sys.executable, instructions.__file__]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
