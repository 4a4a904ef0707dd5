"""The command `trace`."""

from __future__ import annotations

import dataclasses
import json
import secrets
from importlib import import_module

from raypipe.config import Positive, RunConfig
from raypipe.errors import ConfigError
from raypipe.metrics.chrome_trace import TRACE_FILE
from raypipe.metrics.records import RECORDS
from raypipe.printing import Result
from raypipe.storage.files import check_place, read_whole, write_text
from raypipe.storage.filesystem import as_uri, exists, join_address, open_filesystem


def trace(
    run: RunConfig,
    target: str = "",
    *,
    output: str = "trace.json",
    seconds: Positive = 60.0,
) -> Result:
    """Write what all processes of a stream do, for Perfetto.

    It trains for a minute with the settings of a run, in a new folder, and draws reader, actors, ring, waits,
    steps, checkpoints and faults on one clock, with arrows along each micro-batch. Open the file at
    https://ui.perfetto.dev. If the run itself was traced (train.log), its trace is copied.

    Examples:
        raypipe trace runs/20261121-104600-3fa2 -o trace.json
        raypipe trace --config run.yaml --seconds 20

    Args:
        run: All settings of a run.
        target: the folder of a run, or the training store; empty = store.train.
        output: the file to write, JSON of Chrome trace events.
        seconds: how long to trace, from the first micro-batch on.
    """
    check_place(output)
    check_has_settings(target)
    found = _trace_of(target)
    if found is None:
        log = [*run.train.log, f"trace {round(seconds, 3)}s"]
        train = dataclasses.replace(run.train, log=log)
        found = _traced(dataclasses.replace(run, train=train))
    if found is None:
        raise ConfigError(f"{output} cannot be made: the run wrote no trace")
    write_text(output, found.decode())
    events = json.loads(found)["traceEvents"]
    return {
        "store": output,
        "events": len(events),
        "processes": len({event["pid"] for event in events}),
        "seconds": round(max(event["ts"] for event in events) / 1e6, 1),
        "arrows": sum(event["ph"] == "s" for event in events),
    }


def _trace_of(folder: str) -> bytes | None:
    """The trace in a run's folder; None = there is none."""
    if not (folder and exists(join_address(as_uri(folder), TRACE_FILE))):
        return None
    return read_whole(join_address(as_uri(folder), TRACE_FILE))


def _traced(run: RunConfig) -> bytes | None:
    """Train in a new folder until the trace is there, and remove the folder; it stays if the run fails."""
    run = dataclasses.replace(run, name=f"trace-{secrets.token_hex(4)}", resume="")
    uri = join_address(as_uri(run.storage_path), run.name)
    # no other command but `train` needs the whole program
    import_module("raypipe.launch.run").launch(run, until=TRACE_FILE)
    found = _trace_of(uri)
    filesystem, path = open_filesystem(uri)
    filesystem.delete_dir(path)
    return found


def check_has_settings(target: str) -> None:
    """Raise ConfigError for the folder of an own loop, whose code is not there; a target may be a store too."""
    if not target:
        return
    has_records = exists(join_address(as_uri(target), RECORDS))
    if has_records and not exists(join_address(as_uri(target), "config.yaml")):
        raise ConfigError(
            f"{target} is the folder of an own loop, whose code is not in it: trace it with "
            "raypipe.loader(spec, trace='trace.json')"
        )
