"""What runs have recorded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from raypipe.metrics.records import read_records


def records(result: dict[str, Any], kind: str, *fields: str) -> list[tuple[Any, ...]]:
    found = read_records(Path(result["run_dir"]).as_uri())
    return [tuple(r[f] for f in fields) for r in found if r["kind"] == kind]
