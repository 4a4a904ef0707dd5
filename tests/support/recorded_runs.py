"""What runs have recorded: of real ones, and of folders that are written by hand."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from raypipe.metrics.records import METRICS
from raypipe.storage.files import read_whole
from raypipe.storage.filesystem import join

_HAPPENED = ("start", "fault", "scale")
"""Kinds of records that hold whatever the run did over again: they tell of what happened, and not of a step."""


@dataclass(frozen=True)
class Records:
    """The contents of a file of records.

    Attributes:
        kept: the objects in their order, without those of steps that the run has done over again.
        unreadable: lines that are not records, cut off by a crash or a full disk.
    """

    kept: list[dict[str, Any]]
    unreadable: int = 0


def read_records(run_uri: str, name: str = METRICS) -> Records | None:
    """Read a file of records of a run, as docs/reference.md says; None where there is none."""
    content = read_whole(join(run_uri, name))
    return None if content is None else parse(content)


def parse(content: bytes) -> Records:
    """The records of a file's content. The last line counts once it has its end."""
    kept: list[dict[str, Any]] = []
    unreadable = 0
    for line in filter(None, content.split(b"\n")[:-1]):
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if not isinstance(record, dict) or not isinstance(record.get("step"), int | float):
            unreadable += 1
            continue
        if record.get("kind") == "start":
            kept = [earlier for earlier in kept if _stands(earlier, record)]
        kept.append(record)
    return Records(kept, unreadable)


def _stands(record: dict[str, Any], start: dict[str, Any]) -> bool:
    """Return whether a record still holds once a run has started from a later record's step."""
    if record.get("kind") in _HAPPENED:
        return True
    if start.get("validates") and record.get("kind") in ("val", "diagnosis"):
        return record["step"] < start["step"]
    return record["step"] <= start["step"]


def train(step: int, **changed: Any) -> dict[str, Any]:
    values = {"loss": 2 / step, "lr": 0.1, "images_per_s": 100.0 + step, "wait_fraction": 0.25, "strength": 1.0}
    stages = {"transfer_s": 0.1, "augment_s": 0.2, "compute_s": 0.7}
    return {"kind": "train", "step": step, "epoch": 0, **values, **stages, **changed}


RECORDS: list[dict[str, Any]] = [
    {"kind": "start", "step": 0, "workers": 2},
    train(10),
    {"kind": "scale", "step": 10, "text": "1 → 3 transform actors: the ranks waited 40 % of the last 5 s"},
    {"kind": "fault", "step": 12, "text": "a transform actor died <at> train-0-1-2"},
    train(20),
    {"kind": "val", "step": 20, "epoch": 0, "accuracy": 0.5, "loss": 1.0, "samples": 10},
    train(30),
    {"kind": "val", "step": 30, "epoch": 1, "accuracy": 0.4, "loss": 1.1, "samples": 10},
    {"kind": "diagnosis", "step": 30, "text": "The model limits the run."},
]
CONFIG = {"plan": {"epochs": 2, "seed": 0}, "name": "one", "augment": {"ops": [{"flip": 0.5}]}}


def make_run(folder: Path, records: list[dict[str, Any]] = RECORDS, **config: Any) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(CONFIG | config))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


def records(result: dict[str, Any], kind: str, *fields: str) -> list[tuple[Any, ...]]:
    found = read_records(Path(result["run_dir"]).as_uri())
    assert found is not None
    return [tuple(r[f] for f in fields) for r in found.kept if r["kind"] == kind]
