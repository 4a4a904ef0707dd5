"""Folder of a run: its files, its lease, and requests to stop.

RUN/config.yaml        the effective configuration, below a first line that identifies a run
RUN/metrics.jsonl      one object per log interval ("train"), per validation ("val"), per start of the trainers
                       ("start"), per fault of the stream ("fault") and per change of the pool's size ("scale");
                       see `raypipe.metrics.records`, and `raypipe.streaming.run_log`, which writes them
RUN/status.json        progress of its loop, and the ranks that it waits for, written every few seconds
RUN/samples.jsonl      with train.log "samples": the samples of each micro-batch
RUN/digests/           with train.log "digest": hashes of each rank's micro-batches, and sums over them, see
                       `raypipe.streaming.record.digest_log`
RUN/stop               a request to end the run within seconds, with a checkpoint; the run removes it
RUN/figures.json       at the run's end: sums over the training, the newest validation, and the progress
RUN/error.txt          the error that ended the run, with the traceback unless it is raypipe's own; removed when
                       the run starts again
RUN/quarantine/        one JSON-lines object per micro-batch that had bad samples
RUN/flags/             what the loop has flagged, see `raypipe.metrics.flags`
RUN/checkpoint_*/      see `raypipe.streaming.saving.checkpoints`
RUN/lease/             the lease of the folder, see `raypipe.storage.lease`
RUN/ray/               files of Ray Train
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
from raypipe.storage.files import (
    open_input,
    read_text,
    read_whole,
    write_text,
)
from raypipe.storage.filesystem import (
    as_uri,
    check_bucket,
    check_lasting,
    errors_as,
    exists,
    join_address,
    open_filesystem,
    split_address,
)
from raypipe.storage.lease import RunExistsError, check_owner, lease
from raypipe.streaming.opening import with_digits
from raypipe.streaming.saving.checkpoints import has_checkpoints

ERROR_FILE = "error.txt"
FIGURES_FILE = "figures.json"
CONFIG_FILE = "config.yaml"
CONFIG_HEAD = "# A run of raypipe: its settings.\n"
"""First line of a run's configuration, since datasets and other programs' folders have a config.yaml too."""

logger = logging.getLogger(__name__)

# the steps of a transform take at most 1 MiB, see `transform_steps`
_MAX_CONFIG_BYTES = 16 << 20


@contextlib.contextmanager
def located(run: RunConfig, prefix: str = "") -> Iterator[tuple[RunConfig, str, str]]:
    """Context manager: hold the lease of a run's folder.

    Args:
        run: the configuration; its name is the resumed run's, its own, or made from the date.
        prefix: prefix of a name that is made from the date.

    Yields:
        The run with its name and its stores; the URI of its folder; and its lease.

    Raises:
        ConfigError: the folder has a run that is not resumed, or none to resume, or a running one; or the folder
            is removed with the job.
    """
    run = dataclasses.replace(
        run, resume=folder_to_resume(run.resume, run.storage_path, run.name)
    )
    if not (run.name or run.resume):
        # The random suffix is for runs that start in the same second.
        now = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
        run = dataclasses.replace(run, name=f"{prefix}{now}-{secrets.token_hex(2)}")
    if run.resume:
        check_owner(run.resume, run.trust_run_code)
        parent, name = split_address(run.resume)
        run = dataclasses.replace(run, storage_path=parent or ".", name=name)
    elif {".", ".."} & set(run.name.split("/")):
        raise ConfigError(
            f"--name {run.name} leads out of {run.storage_path}: choose another one"
        )
    run_uri = join_address(as_uri(run.storage_path), run.name)
    check_lasting(run_uri, "storage_path")
    check_run_folder(run_uri, bool(run.resume))
    if start_from := run.train.start_from:
        run = dataclasses.replace(
            run, train=dataclasses.replace(run.train, start_from=as_uri(start_from))
        )
    run = with_digits(run)
    with lease(run_uri) as token:
        # checked again, now that no other process can change it
        check_run_folder(run_uri, bool(run.resume))
        yield run, run_uri, token


def folder_to_resume(resume: str, storage_path: str, name: str) -> str:
    """Return the folder to resume; empty = a new run. "auto" is the folder of the name, if a run is in it.

    Raises:
        ConfigError: "auto" without a name, or a folder that cannot be read.
    """
    if resume != "auto":
        return resume
    if not name:
        raise ConfigError("resume=auto finds the run by its name: set --name")
    folder = join_address(storage_path, name)
    with errors_as(ConfigError, f"{folder} cannot be used"):
        return folder if has_run(as_uri(folder)) else ""


def write_error(run_uri: str, text: str) -> None:
    """Record the error that ended a run: its first line is the message.

    Raises:
        ConfigError, OutageError: it cannot be written.
    """
    write_text(join_address(run_uri, ERROR_FILE), text + "\n")


def read_error(run_uri: str) -> str:
    """Return the message of the error that ended a run; empty if none did."""
    content = read_whole(join_address(run_uri, ERROR_FILE)) or b""
    return content.decode(errors="replace").partition("\n")[0]


def remove_error(run_uri: str) -> None:
    """Remove the error of an earlier start, since the run continues."""
    if exists(join_address(run_uri, ERROR_FILE)):
        filesystem, path = open_filesystem(join_address(run_uri, ERROR_FILE))
        filesystem.delete_file(path)


def has_run(run_uri: str) -> bool:
    """Return whether a folder has a run: a configuration, or checkpoints of a run that has lost it."""
    return has_config(run_uri) or has_checkpoints(run_uri)


def check_run_folder(run_uri: str, resume: bool) -> None:
    """Raise ConfigError if a resume finds no run, or a new run finds one."""
    check_bucket(run_uri)
    with errors_as(ConfigError, f"{run_uri} cannot be used"):
        is_run = has_run(run_uri)
        is_foreign = not is_run and exists(join_address(run_uri, CONFIG_FILE))
    if resume and not is_run:
        raise ConfigError(
            f"no run at {run_uri}: pass the folder that the run printed as run_dir"
        )
    if is_foreign:
        raise ConfigError(
            f"{run_uri} has a {CONFIG_FILE} that is not a run's: choose another --name"
        )
    if not resume and is_run:
        raise RunExistsError(
            f"{run_uri} already has a run: continue it with --resume, or choose another --name"
        )


def has_config(run_uri: str) -> bool:
    """Return whether a folder has a run's configuration, by its first line; raise OSError if it cannot be read."""
    try:
        with open_input(*open_filesystem(join_address(run_uri, CONFIG_FILE))) as file:
            return file.read(len(CONFIG_HEAD.encode())) == CONFIG_HEAD.encode()
    except FileNotFoundError:
        return False


def read_config(run_uri: str) -> str:
    """Return a run's configuration as YAML, "" without one; raise ConfigError if the file is not a run's."""
    address = join_address(run_uri, CONFIG_FILE)
    if not exists(address):
        return ""
    text = read_text(address, _MAX_CONFIG_BYTES)
    if not text.startswith(CONFIG_HEAD):
        raise ConfigError(
            f"{address} is not a run's: its first line must be {CONFIG_HEAD.strip()!r}"
        )
    return text


def store_config(run: RunConfig, run_uri: str) -> None:
    with errors_as(ConfigError, f"{run_uri} cannot be written to"):
        filesystem, path = open_filesystem(run_uri)
        filesystem.create_dir(path, recursive=True)
    write_text(
        join_address(run_uri, CONFIG_FILE),
        CONFIG_HEAD + yaml.safe_dump(as_plain(run), sort_keys=False),
    )


def as_plain(run: RunConfig) -> dict[str, Any]:
    """Return a configuration as dicts, lists and scalars, for YAML, without `resume` and `trust_run_code`."""
    plain = dataclasses.asdict(run)
    del plain["resume"], plain["trust_run_code"]
    return json.loads(json.dumps(plain))  # tuples become lists
