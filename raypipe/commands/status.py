"""What a run is at, from what its folder holds: any machine that sees the folder can tell, without Ray."""

from __future__ import annotations

import time
from typing import Any

from raypipe.errors import ConfigError
from raypipe.logs import table
from raypipe.metrics.records import STATUS, read_records
from raypipe.storage.files import read_json
from raypipe.storage.filesystem import as_uri, exists, join
from raypipe.train.checkpoints import newest_name
from raypipe.train.run_folder import check_run_folder, stop_requested

# A file of where the loop stands that is older than so many of its periods has not come.
_LATE = 4


def status(folder: str) -> dict[str, Any]:
    """Print and return what a run is at; ConfigError where it has not begun to train."""
    run_uri = as_uri(folder.rstrip("/"))
    if not exists(join(run_uri, STATUS)):
        check_run_folder(run_uri, resume=True)
        raise ConfigError(f"{folder} has no {STATUS}: it has not begun to train")
    records = read_records(run_uri)
    kept = records.kept if records else []
    found = told(read_json(join(run_uri, STATUS)), time.time())
    found |= {
        "checkpoint": newest_name(run_uri) or None,
        "stop_requested": stop_requested(run_uri),
        "faults": [each.get("text", "") for each in kept if each.get("kind") == "fault"],
    }
    rows = [
        ("state", found["state"]),
        ("step", f"{found['step']:,} of {found['to_step']:,}"),
        ("age of the step", f"{found['step_age_s']:.0f} s"),
        ("waits for", f"{found['waits_for']}, for {found['since_s']:.0f} s" if found["waits_for"] else "nothing"),
        ("whom", found["whom"] or ""),
        ("last checkpoint", found["checkpoint"] or "none"),
        ("faults", str(len(found["faults"]))),
        ("last fault", found["faults"][-1] if found["faults"] else "none"),
    ]
    table(folder, [row for row in rows if row[1]])
    return {"run_dir": folder, **found}


def told(status: dict[str, Any], now: float) -> dict[str, Any]:
    """What a run's status.json says at a moment of time.time(), by this machine's clock. Pure.

    Returns:
        Its values, with ages in place of moments, and `state`: "runs"; "silent", where rank 0 has not written for
        four of its periods, so it is stopped, dead, or cut off from the folder; or "ended", where it has left its
        loop.
    """
    age_s = now - status["time"]
    state = "runs" if age_s <= _LATE * status["every_s"] else "silent"
    moments = {"time": "age_s", "step_at": "step_age_s", "since": "since_s"}
    ages = {name: max(0.0, now - status[moment]) for moment, name in moments.items()}
    rest = {name: value for name, value in status.items() if name not in (*moments, "every_s")}
    return {"state": state if status["every_s"] else "ended", **rest, **ages}
