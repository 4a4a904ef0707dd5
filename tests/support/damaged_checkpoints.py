"""Ways to damage a run's newest checkpoint."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path


def newest(run: Path, before: int = 0) -> Path:
    return sorted(run.glob("checkpoint_*/"))[-1 - before]


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def cut(path: Path) -> None:
    os.truncate(path, 40)


def of_another(path: Path) -> None:
    shutil.copy(newest(path.parents[1], before=1) / path.name, path)


# What is done to which file, and what the error says.
DAMAGE: dict[str, tuple[str, Callable[[Path], None], str]] = {
    "state missing": ("state.pt", Path.unlink, "its state.pt is missing"),
    "state empty": ("state.pt", empty, "state.pt has 0 bytes instead of 5000"),
    "state cut": ("state.pt", cut, "state.pt has 40 bytes"),
    "state flipped": ("state.pt", flip, "the content of its state.pt has changed"),
    "cursor missing": ("cursor.json", Path.unlink, "its cursor.json is missing"),
    "cursor empty": ("cursor.json", empty, "cursor.json has 0 bytes"),
    "cursor changed": (
        "cursor.json",
        flip,
        "the content of its cursor.json has changed",
    ),
    "manifest empty": ("checkpoint.json", empty, "checkpoint.json is empty"),
    "manifest cut": ("checkpoint.json", cut, "checkpoint.json is damaged"),
    "manifest foreign": (
        "checkpoint.json",
        lambda path: path.write_text("[1]"),
        "is damaged",
    ),
    "state of another": (
        "state.pt",
        of_another,
        "the content of its state.pt has changed",
    ),
}
