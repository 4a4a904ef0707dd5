"""The commands on a run by its folder, from any machine that sees it: its state, and a request to stop it."""

from __future__ import annotations

import time

from raypipe.errors import ConfigError
from raypipe.history.record_checks import damage_told
from raypipe.metrics.records import RECORDS, STATUS, Record, read_records
from raypipe.printing import Result, print_table
from raypipe.storage.files import read_json
from raypipe.storage.filesystem import as_uri, exists, join_address
from raypipe.storage.lease import holder
from raypipe.streaming.saving.checkpoints import newest_name

# Rank 0 counts as silent after this many periods without writing.
_LATE = 4


def stop(folder: str) -> Result:
    """Stop a run within seconds, with a checkpoint.

    `raypipe train --resume RUN` continues it. Your own loop stops if it asks `loader.should_checkpoint()`.

    Examples:
        raypipe stop runs/20261121-104600-3fa2
        raypipe stop s3://my-bucket/runs/20261121-104600-3fa2

    Args:
        folder: the run's folder: the `run_dir` that it printed, a path or a URI.
    """
    from raypipe.launch.run_folder import check_run_folder
    from raypipe.streaming.stop_file import request_stop

    run_uri = as_uri(folder.rstrip("/"))
    if not exists(join_address(run_uri, STATUS)):
        check_run_folder(run_uri, resume=True)
    request_stop(run_uri)
    return {"run_dir": folder, "stop_requested": True}


def status(folder: str) -> Result:
    """Show the step of a run, its age, and the process that the run waits for.

    Examples:
        raypipe status runs/20261121-104600-3fa2
        raypipe status s3://my-bucket/runs/20261121-104600-3fa2 --json

    Args:
        folder: the run's folder: the `run_dir` that it printed, a path or a URI.

    Returns:
        What `standing` gives, and `run_dir`; `held_by`, the process that has the folder; `checkpoint`, the newest;
        `stop_requested`; `error`, the one that ended the run, empty if none did; `faults`, their texts; and
        `start_s`, the seconds of each phase of its last start until the first batch.

    Raises:
        ConfigError: the run is missing, or has not begun to train.
    """
    from raypipe.launch.run_folder import check_run_folder, read_error
    from raypipe.streaming.stop_file import stop_requested

    run_uri = as_uri(folder.rstrip("/"))
    if not exists(join_address(run_uri, STATUS)):
        check_run_folder(run_uri, resume=True)
        error = read_error(run_uri)
        if error:
            began = f"has failed before it began to train: {error}"
        else:
            began = "has not begun to train"
        raise ConfigError(
            f"{folder} has no {STATUS}: {holder(run_uri) or 'the run'} {began}"
        )
    held_by = holder(run_uri)
    records = read_records(run_uri)
    error = read_error(run_uri)
    told = read_json(join_address(run_uri, STATUS))
    run: Result = {
        "run_dir": folder,
        "error": error,
        "held_by": held_by,
        "checkpoint": newest_name(run_uri) or None,
        "stop_requested": stop_requested(run_uri),
    }
    with damage_told(f"{folder}: {STATUS} or {RECORDS}"):
        died_at = max(
            (record["time"] for record in records if "reason" in record), default=0.0
        )
        run |= standing(told, time.time(), bool(held_by), died_at, error)
        run["faults"] = [
            record["text"] for record in records if record["kind"] == "fault"
        ]
        starts = [each["seconds"] for each in records if each["kind"] == "phases"]
        # a loop of the user's own has no phases
        run["start_s"] = starts[-1] if starts else {}
        _rows_of(run)
    return run


def print_status(run: Result) -> None:
    """Print the result of `status` in some lines, and the error of a run that has failed."""
    print_table(run["run_dir"], _rows_of(run))


def _rows_of(run: Result) -> dict[str, str | None]:
    """Return the lines of a run; raises other errors than raypipe's where a value has the wrong kind."""
    waits = f"{run['waits_for']} for {run['since_s']:.0f} s: {run['whom']}"
    return {
        "state": run["state"],
        "step": f"{run['step']:,} of {run['to_step']:,}, {run['step_age_s']:.0f} s ago"
        if run["to_step"]
        else "none",
        "speed": _speed(run) or None,
        "waits for": waits if run["waits_for"] else "nothing",
        "first batch": _phases_in_words(run["start_s"]) or None,
        "last checkpoint": run["checkpoint"] or "none",
        "last fault": run["faults"][-1] if run["faults"] else "none",
        "error": run["error"] or None,
    }


def _phases_in_words(seconds: dict[str, float]) -> str:
    """Return the seconds until the first batch, and those of each phase; empty if they are unknown."""
    if not seconds:
        return ""
    each = ", ".join(f"{name} {spent_s:.1f}" for name, spent_s in seconds.items())
    return f"after {sum(seconds.values()):.1f} s ({each})"


def _speed(run: Result) -> str:
    """Return the figures of the last record of the training, as far as there are any."""
    parts = {
        "images_per_s": "{:,.0f} images/s",
        "wait_fraction": "waiting for data {:.0%}",
        "gpu_utilization": "GPU {:.0%}",
        "remembered": "{:.0%} remembered",
        "val_remembered": "{:.0%} in validation",
    }
    return ", ".join(
        text.format(run[name]) for name, text in parts.items() if name in run
    )


def standing(
    status: Record, now: float, is_held: bool, died_at: float, error: str = ""
) -> Result:
    """Interpret a run's status.json at a moment of time.time(), by this machine's clock. Pure.

    Args:
        is_held: whether a process has the run's folder.
        died_at: when its trainers last died, by time.time().
        error: the error that ended the run; empty if none did.

    Returns:
        Its values, with ages instead of times, and `state`: "running"; "silent": rank 0 has not written for four
        of its periods, so it is stopped, dead, or cut off from the folder; "waiting": its trainers wait for
        resources, as for nodes that are about to come; "restarting": its trainers have ended
        and the run has not; "failed": an error ended it; "stopped": it ended before its last step; or "ended".
    """
    times = {
        "time": "age_s",
        "step_at": "step_age_s",
        "since": "since_s",
        "begun": "begun_s",
    }
    ages = {name: max(0.0, now - status[moment]) for moment, name in times.items()}
    every_s = status["every_s"]
    is_late = ages["age_s"] > _LATE * every_s
    state = "silent" if is_late else status.get("state", "running")
    if died_at > status["begun"] or not every_s:
        state = "stopped"
        if is_held:
            state = "restarting"
        elif status["step"] >= status["to_step"]:
            state = "ended"
    if error and not is_held:
        state = "failed"
    return {
        "state": state,
        **{name: status[name] for name in status.keys() - {*times, "every_s", "state"}},
        **ages,
    }
