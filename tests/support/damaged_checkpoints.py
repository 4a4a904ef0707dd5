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


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "state missing": (
        lambda folder: (folder / "state.pt").unlink(),
        "its state.pt is missing",
    ),
    "state empty": (
        lambda folder: (folder / "state.pt").write_bytes(b""),
        "state.pt has 0 bytes instead of 5000",
    ),
    "state cut": (
        lambda folder: os.truncate(folder / "state.pt", 4096),
        "state.pt has 4096 bytes",
    ),
    "state flipped": (
        lambda folder: flip(folder / "state.pt"),
        "the content of its state.pt has changed",
    ),
    "cursor missing": (
        lambda folder: (folder / "cursor.json").unlink(),
        "its cursor.json is missing",
    ),
    "cursor empty": (
        lambda folder: (folder / "cursor.json").write_bytes(b""),
        "cursor.json has 0 bytes",
    ),
    "cursor changed": (
        lambda folder: flip(folder / "cursor.json"),
        "the content of its cursor.json has changed",
    ),
    "manifest empty": (
        lambda folder: (folder / "checkpoint.json").write_bytes(b""),
        "checkpoint.json is empty",
    ),
    "manifest cut": (
        lambda folder: os.truncate(folder / "checkpoint.json", 40),
        "checkpoint.json is damaged",
    ),
    "manifest foreign": (
        lambda folder: (folder / "checkpoint.json").write_bytes(b"[1]"),
        "is damaged",
    ),
    "state of another": (
        lambda folder: shutil.copy(
            newest(folder.parent, before=1) / "state.pt", folder
        ),
        "the content of its state.pt has changed",
    ),
}
