"""The command `when`, which finds the steps of a run that draw a sample. Starts no Ray."""

from __future__ import annotations

import re
from typing import Any, Literal

from raypipe.errors import ConfigError
from raypipe.printing import print_rows

_INDEX = re.compile(r"-?(0|[1-9]\d{0,17})", re.ASCII)
_MAX_ROWS = 40
_NUM_STEPS = 3  # the table shows these of a bad sample


def when(
    folder: str,
    sample: str = "",
    *,
    bad: bool = False,
    flagged: bool = False,
    split: Literal["train", "val"] = "train",
    train: str | dict[str, str] = "",
    val: str = "",
    trust_run_code: bool = False,
) -> dict[str, Any]:
    """Find the steps of a run that drew a sample, and those that will draw it.

    Steps are counted as in metrics.jsonl and by `raypipe replay`. All draws of the run are made to find the
    sample's, some ten million a second. A name is looked for among all names of the store.

    Examples:
        raypipe when runs/20261121-104600-3fa2 48211
        raypipe when runs/20261121-104600-3fa2 cat/0001.jpg --json
        raypipe when runs/20261121-104600-3fa2 --bad
        raypipe when runs/20261121-104600-3fa2 --flagged

    Args:
        folder: the run's folder: the `run_dir` that it printed, a path or a URI.
        sample: the sample's index, or the store's name for it, or the end of the name, such as cat/0001.jpg; in a
            mixture the index counts through all stores.
        bad: find all samples that the run could not use instead, which its quarantine/ records.
        flagged: list the micro-batches that the loop has flagged instead, by `loader.flag`.
        split: the store that has the sample, train or val.
        train: the training store, where it is now; {NAME: STORE, …} of a mixture.
        val: the validation store, where it is now.
        trust_run_code: open the folder although another user owns it, and run the code that it names.

    Returns:
        `run_dir`, `step` (the steps that are done), `to_step` (the last one), and `samples`: `index`, `name`,
        `split`, `error` (why it is bad), `num_drawn`, `num_to_come`, and its `draws`. A draw has `epoch`, `step`,
        `rank`, `micro`, `row`, `has_come`, `was_bad`, and `replaced_by` or `instead_of` where one was replaced.
        With `flagged`, `flags` instead: `epoch`, `step`, `rank`, `micro`, `reason`, `samples`.

    Raises:
        ConfigError: there is no such run or sample.
    """
    from raypipe.history.drawn_at import History
    from raypipe.history.recorded import RecordedRun, given_of

    if [bool(sample), bad, flagged].count(True) != 1:
        raise ConfigError(
            "raypipe when needs one of: a sample, --bad for all bad ones, --flagged for what the loop has flagged"
        )
    run = RecordedRun(folder, trust_run_code, **given_of(train=train, val=val))
    history = History(run)
    samples: list[dict[str, Any]] = []
    if bad:
        samples = history.bad()
    elif sample:
        samples = [history.of(index_or_name(sample), split)]
    return {
        "run_dir": folder,
        "step": history.num_done,
        "to_step": len(run),
        "differences": run.differences,
        "flags": history.flags() if flagged else None,
        "samples": samples,
    }


def index_or_name(text: str) -> int | str:
    """Return an index as a number, also a negative one, for the error; with leading zeros it is a name."""
    return int(text) if _INDEX.fullmatch(text) else text


def print_when(result: dict[str, Any]) -> None:
    """Print the result of `when`: the draws of a sample, or a line for each bad one."""
    print(f"{result['run_dir']}: step {result['step']:,} of {result['to_step']:,}")
    for sentence in result["differences"]:
        print(f"note: {sentence}")
    samples = result["samples"]
    names = ["epoch", "step", "rank", "micro"]
    if result["flags"] is not None:
        names += ["reason"]
        rows = result["flags"]
    elif len(samples) == 1:
        names += ["row", "state"]
        rows = _states(samples[0])
    else:
        names = ["index", "name", "split", "num_drawn", "num_to_come", "steps", "error"]
        rows = []
        for sample in samples:
            steps = [str(draw["step"]) for draw in sample["draws"][:_NUM_STEPS]]
            rows.append({**sample, "steps": " ".join(steps)})
    if not rows:
        print("none")
        return
    header = [name.removeprefix("num_").replace("_", " ") for name in names]
    print_rows([header, *([str(row[name]) for name in names] for row in rows)])


def _states(sample: dict[str, Any]) -> list[dict[str, Any]]:
    """Print a sample, and return its draws with their states, those around the run's place if there are many."""
    name = f" ({sample['name']})" if sample["name"] else ""
    error = f", bad: {sample['error']}" if sample["error"] else ""
    print(f"sample {sample['index']}{name}{error}")
    print(f"drawn {sample['num_drawn']} times, {sample['num_to_come']} to come")
    draws = sample["draws"]
    first = max(0, min(sample["num_drawn"] - _MAX_ROWS // 2, len(draws) - _MAX_ROWS))
    if len(draws) > _MAX_ROWS:
        print(f"{len(draws) - _MAX_ROWS} more: --json has all")
    shown = draws[first : first + _MAX_ROWS]
    return [{**draw, "state": _state(draw)} for draw in shown]


def _state(draw: dict[str, Any]) -> str:
    """Say in words whether a draw has come."""
    if draw["instead_of"] is not None:
        return f"in place of bad sample {draw['instead_of']}"
    if not draw["has_come"]:
        return "to come"
    if not draw["was_bad"]:
        return "drawn"
    if draw["replaced_by"] is None:
        return "left out, with weight 0"
    return f"replaced by {draw['replaced_by']}"
