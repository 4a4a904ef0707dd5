"""The command `trace`."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from raypipe.commands.short_run import ShortRun, check_has_settings
from raypipe.config import Positive, RunConfig
from raypipe.errors import ConfigError
from raypipe.metrics.chrome_trace import TRACE_FILE
from raypipe.storage.files import check_place, read_whole, write_text
from raypipe.storage.filesystem import as_uri, exists, join_address


def trace(
    run: RunConfig,
    target: str = "",
    *,
    output: str = "trace.json",
    seconds: Positive = 60.0,
) -> dict[str, Any]:
    """Write what all processes of a stream do, for Perfetto.

    It trains for a minute with the settings of a run, in a new folder, and draws reader, actors, ring, waits,
    steps, checkpoints and faults on one clock, with arrows along each micro-batch. Open the file at
    https://ui.perfetto.dev. If the run itself was traced (train.trace_s), its trace is copied.

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
    check_has_settings(target, "trace it with raypipe.loader(spec, trace='trace.json')")
    found = _trace_of(target)
    if found is None:
        train = dataclasses.replace(run.train, trace_s=seconds)
        traced = dataclasses.replace(run, train=train)
        short = ShortRun(traced, "trace", seconds + 1)
        with short.done():
            found = _trace_of(short.uri)
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
