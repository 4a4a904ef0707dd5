"""What runs have recorded: of real ones, and of folders that are written by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from raypipe.metrics.records import read_records


def train(step: int, **changed: Any) -> dict[str, Any]:
    values = {
        "loss": 2 / step,
        "lr": 0.1,
        "images_per_s": 100.0 + step,
        "wait_fraction": 0.25,
        "strength": 1.0,
    }
    stages = {"transfer_s": 0.1, "augment_s": 0.2, "compute_s": 0.7}
    return {"kind": "train", "step": step, "epoch": 0, **values, **stages, **changed}


RECORDS: list[dict[str, Any]] = [
    {"kind": "start", "step": 0, "workers": 2},
    train(10),
    {
        "kind": "scale",
        "step": 10,
        "text": "1 → 3 transform actors: the ranks waited 40 % of the last 5 s",
    },
    {"kind": "fault", "step": 12, "text": "a transform actor died <at> train-0-1-2"},
    train(20),
    {
        "kind": "val",
        "step": 20,
        "epoch": 0,
        "accuracy": 0.5,
        "loss": 1.0,
        "samples": 10,
    },
    train(30),
    {
        "kind": "val",
        "step": 30,
        "epoch": 1,
        "accuracy": 0.4,
        "loss": 1.1,
        "samples": 10,
    },
    {"kind": "diagnosis", "step": 30, "text": "The model limits the run."},
]


def records(result: dict[str, Any], kind: str, *fields: str) -> list[tuple[Any, ...]]:
    found = read_records(Path(result["run_dir"]).as_uri())
    return [tuple(r[f] for f in fields) for r in found if r["kind"] == kind]
