from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
from memory import most_per_s, object_store_bound, private_bytes

# A process that takes memory in one of its own: 64 MiB, written, so that the pages are there.
PROGRAM = """
import subprocess, sys
held = "held = bytearray(b'x') * (64 << 20); print('held', flush=True); input()"
subprocess.run([sys.executable, "-c", held])
"""


def test_the_memory_of_a_process_is_that_of_its_descendants_too() -> None:
    before = private_bytes(os.getpid())
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdin=-1, stdout=-1, text=True
    ) as child:
        assert child.stdout and child.stdout.readline() == "held\n"
        alone, all_of_it = private_bytes(child.pid), private_bytes(os.getpid())
        child.communicate("\n")
    assert 64 << 20 < alone < 110 << 20
    assert alone <= all_of_it - before + (8 << 20)


def test_a_process_that_has_ended_has_no_memory() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    assert private_bytes(child.pid) == 0


def test_the_bound_is_what_is_in_flight_held_or_just_released() -> None:
    assert object_store_bound(16, 1, 0, 1000) == 19 * 1000
    assert object_store_bound(16, 2, 5.5, 1000, 3) == 71_500


def test_the_fastest_second_is_found_wherever_it_is() -> None:
    assert most_per_s(np.array([0.0, 2.0, 2.1, 2.9, 3.05, 6.0])) == 3
    assert most_per_s(np.array([0.0])) == 1
