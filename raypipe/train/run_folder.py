"""The folder of a run: who may have it, how it is asked to stop, and what it records.

RUN/config.yaml        the effective configuration, below a first line by which a run is known
RUN/metrics.jsonl      one object per log interval ("train"), per validation ("val"), per start of the trainers
                       ("start"), per fault of the stream ("fault") and per change of the pool's size ("scale");
                       see `raypipe.metrics.records`, and `raypipe.streaming.chronicle`, which writes them
RUN/status.json        where its loop stands, and whom it waits for, written every few seconds
RUN/samples.jsonl      with train.log_samples: which samples each micro-batch had
RUN/stop               is made to end the run within seconds, with a checkpoint; the run removes it
RUN/figures.json       sums over the training, the newest validation, and where it stands, once it has ended
RUN/error.txt          the traceback of what has ended the run, where that was other code's
RUN/quarantine/        one JSON-lines object per micro-batch that had bad samples
RUN/report.html        all of it as one page, see `raypipe.pages.report`
RUN/checkpoint_*/      see `raypipe.streaming.checkpoints`
RUN/lease/             who has the folder, see `raypipe.storage.lease`
RUN/ray/               Ray Train's own
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import logging
import secrets
from collections.abc import Iterator
from typing import Any

import yaml

from raypipe.config import RunConfig
from raypipe.errors import ConfigError
from raypipe.storage.files import open_input, read_text, read_whole, write_synced, write_text
from raypipe.storage.filesystem import (
    as_uri,
    check_bucket,
    check_lasting,
    exists,
    explained,
    join,
    open_filesystem,
    split,
)
from raypipe.storage.lease import RunExistsError, check_owner, leased
from raypipe.streaming.checkpoints import has_checkpoints
from raypipe.streaming.opening import with_digits
from raypipe.transform.transform_steps import config_without_files

FIGURES_FILE = "figures.json"
CONFIG_FILE = "config.yaml"
CONFIG_HEAD = "# A run of raypipe: its settings.\n"
"""The first line of a run's configuration. Data sets and other programs' folders have a config.yaml too."""

logger = logging.getLogger(__name__)

_STOP_FILE = "stop"
_MAX_CONFIG_BYTES = 16 << 20  # the steps of a transform are 1 MiB at most, see `transform_steps`


def request_stop(run_uri: str) -> None:
    """Ask the trainers of a run to end, with a checkpoint, as soon as they look; see `loop.Trainer`."""
    filesystem, path = open_filesystem(join(run_uri, _STOP_FILE))
    write_synced(filesystem, path, b"")


def stop_requested(run_uri: str) -> bool:
    """Whether the trainers of a run were asked to end."""
    return exists(join(run_uri, _STOP_FILE))


def answer_stop(run_uri: str) -> None:
    """Say for the trainers that they have seen the request: what they still do is to write the checkpoint."""
    write_text(join(run_uri, _STOP_FILE), "seen")


def stop_answered(run_uri: str) -> bool:
    return bool(read_whole(join(run_uri, _STOP_FILE)))


def remove_stop(run_uri: str) -> None:
    """Take the request back."""
    if stop_requested(run_uri):
        filesystem, path = open_filesystem(join(run_uri, _STOP_FILE))
        filesystem.delete_file(path)


@contextlib.contextmanager
def located(run: RunConfig, prefix: str = "") -> Iterator[tuple[RunConfig, str, str]]:
    """Within, a run has its folder for itself alone.

    Args:
        run: the name is that of the run to resume, or its own, or made from the date.
        prefix: of a name that is made from the date.

    Yields:
        The run with its name, its stores and the steps of its transforms; the URI of its folder; and its lease.

    Raises:
        ConfigError: there is a run in the folder, and it is not resumed; or there is none, and it is; or it is
            going on; or the folder does not outlast the job; or a file of steps cannot be read.
    """
    run = dataclasses.replace(run, resume=folder_to_resume(run.resume, run.storage_path, run.name))
    if not (run.name or run.resume):
        # Several may start in one second.
        now = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
        run = dataclasses.replace(run, name=f"{prefix}{now}-{secrets.token_hex(2)}")
    if run.resume:
        check_owner(run.resume, run.trust_run_code)
        parent, name = split(run.resume)
        run = dataclasses.replace(run, storage_path=parent or ".", name=name)
    run_uri = join(as_uri(run.storage_path), run.name)
    check_lasting(run_uri, "storage_path")
    check_run_folder(run_uri, bool(run.resume))
    if start_from := run.train.start_from:
        run = dataclasses.replace(run, train=dataclasses.replace(run.train, start_from=as_uri(start_from)))
    run = with_digits(run)
    run = dataclasses.replace(run, transform=config_without_files(run.transform))
    with leased(run_uri) as lease:
        check_run_folder(run_uri, bool(run.resume))  # once more: nobody else can make it one now
        yield run, run_uri, lease


def folder_to_resume(resume: str, storage_path: str, name: str) -> str:
    """The folder of the run to go on with; empty = a new one starts. "auto" is that of a name, once it has a run.

    Raises:
        ConfigError: "auto" without a name, or a folder that cannot be read.
    """
    if resume != "auto":
        return resume
    if not name:
        raise ConfigError("resume=auto needs a name, by which each start finds the run: set --name")
    folder = join(storage_path, name)
    with explained(ConfigError, f"{folder} cannot be used"):
        return folder if has_run(as_uri(folder)) else ""


def has_run(run_uri: str) -> bool:
    """Whether a folder is a run's. Checkpoints make a run, even one that has lost its configuration."""
    return has_config(run_uri) or has_checkpoints(run_uri)


def check_run_folder(run_uri: str, resume: bool) -> None:
    """Raise ConfigError where there is no run and one is to be resumed, or there is one and none is."""
    check_bucket(run_uri)
    with explained(ConfigError, f"{run_uri} cannot be used"):
        is_run = has_run(run_uri)
        is_foreign = not is_run and exists(join(run_uri, CONFIG_FILE))
    if resume and not is_run:
        raise ConfigError(f"there is no run at {run_uri}: give the folder that `run_dir` names")
    if is_foreign:
        raise ConfigError(f"{run_uri} holds a {CONFIG_FILE} that is not a run's: choose another --name")
    if not resume and is_run:
        raise RunExistsError(f"there is a run at {run_uri} already: go on with it by --resume, or choose --name")


def has_config(run_uri: str) -> bool:
    """Whether a folder holds the configuration of a run, by its first line; OSError where it cannot be read."""
    try:
        with open_input(*open_filesystem(join(run_uri, CONFIG_FILE))) as file:
            return file.read(len(CONFIG_HEAD.encode())) == CONFIG_HEAD.encode()
    except FileNotFoundError:
        return False


def read_config(run_uri: str) -> str:
    """The configuration of a run as YAML; "" where there is none; ConfigError where it is not a run's."""
    address = join(run_uri, CONFIG_FILE)
    if not exists(address):
        return ""
    text = read_text(address, _MAX_CONFIG_BYTES)
    if not text.startswith(CONFIG_HEAD):
        raise ConfigError(f"{address} is not a run's: the first line of a run's is {CONFIG_HEAD.strip()!r}")
    return text


def store_config(run: RunConfig, run_uri: str) -> None:
    with explained(ConfigError, f"{run_uri} cannot be written to"):
        filesystem, path = open_filesystem(run_uri)
        filesystem.create_dir(path, recursive=True)
    write_text(join(run_uri, CONFIG_FILE), CONFIG_HEAD + yaml.safe_dump(as_plain(run), sort_keys=False))


def as_plain(run: RunConfig) -> dict[str, Any]:
    """A configuration as dicts, lists and scalars, as YAML has it; `resume` and `trust_run_code` left out."""
    plain = dataclasses.asdict(run)
    del plain["resume"], plain["trust_run_code"]
    return json.loads(json.dumps(plain))  # tuples become lists
