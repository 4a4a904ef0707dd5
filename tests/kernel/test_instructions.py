"""The kernel takes as many instructions as benchmarks/results/instructions.json says, at each level of vectors."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections import Counter

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


WRITTEN = """
ob=(1) /usr/lib/python3.11
fn=(1) py_call
1 100
cob=(2) /build/_raypipe_kernel.abi3.so
cfn=(2) py_run
calls=1 0
+3 900
ob=(2)
fn=(2)
10 20
cfn=(3) resize'2
calls=4 0
* 700
+1 5
fn=(3)
-2 700
"""


def test_the_kernels_own_instructions_are_counted_by_function() -> None:
    assert instructions.of_kernel(WRITTEN) == {"py_run": 25, "resize": 700}


def test_a_change_beyond_five_percent_names_the_functions_that_moved() -> None:
    before = {"all": 1000, "functions": {"blend": 300, "resize": 700}}
    assert not instructions.moved(before, Counter(blend=345, resize=700))
    told = instructions.moved(before, Counter(blend=900, resize=690))
    assert told == "1,000 → 1,590 (+59.0%): blend +600, resize -10"
