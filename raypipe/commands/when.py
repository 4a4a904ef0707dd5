"""The command `when`, which finds the steps of a run that draw a sample. Starts no Ray."""

from __future__ import annotations

import re
from typing import Literal

from raypipe.config import ByStore
from raypipe.errors import ConfigError
from raypipe.printing import Result, print_objects, print_table, told

_INDEX = re.compile(r"-?(0|[1-9]\d{0,17})", re.ASCII)
# The columns of the tables, which leave out what --json has besides.
_OF_SAMPLE = ("index", "name", "split", "num_drawn", "num_to_come", "error")
_OF_PLACE = ("epoch", "step", "rank", "micro")
_OF_DRAW = (*_OF_PLACE, "row", "has_come", "was_bad", "replaced_by", "instead_of")


def when(
    folder: str,
    sample: str = "",
    *,
    bad: bool = False,
    flagged: bool = False,
    split: Literal["train", "val"] = "train",
    train: ByStore = "",
    val: str = "",
    trust_run_code: bool = False,
) -> Result:
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
    samples: list[Result] = []
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


def print_when(result: Result) -> None:
    """Print the result of `when`: the draws of a sample, or a row for each bad one or flag."""
    print(f"{result['run_dir']}: step {result['step']:,} of {result['to_step']:,}")
    for sentence in result["differences"]:
        print(f"note: {sentence}")
    samples = result["samples"]
    if result["flags"] is not None:
        print_objects(result["flags"], *_OF_PLACE, "reason")
    elif len(samples) == 1:
        print_table("sample", told(samples[0], "draws"))
        print_objects(samples[0]["draws"], *_OF_DRAW)
    else:
        print_objects(samples, *_OF_SAMPLE)
