"""A run for some seconds, to measure or trace it, in a new folder that is removed afterwards."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import logging
import secrets
import threading
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import pyarrow as pa

from raypipe.config import RunConfig
from raypipe.errors import ConfigError, RaypipeError
from raypipe.metrics.records import RECORDS, read_records
from raypipe.storage.filesystem import (
    as_uri,
    exists,
    is_remote,
    join_address,
    open_filesystem,
)
from raypipe.streaming.stop_file import request_stop

logger = logging.getLogger(__name__)

_LOOK_S = 0.25
_LOOK_REMOTE_S = 2.0  # there each look is a request


class ShortRun:
    """A run that is stopped some seconds after its first step, unless it ends before.

    Args:
        run: its configuration; its name is not used, and nothing is resumed.
        name: the first part of its folder's name.
        seconds: how long it trains.

    Attributes:
        uri: its folder.
        figures: its result, see `raypipe.launch.run.launch`.
    """

    def __init__(self, run: RunConfig, name: str, seconds: float) -> None:
        now = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
        self._run = dataclasses.replace(
            run, name=f"{name}-{now}-{secrets.token_hex(2)}", resume=""
        )
        self.uri = join_address(as_uri(run.storage_path), self._run.name)
        self._seconds = seconds
        self._ended = threading.Event()
        self.figures: dict[str, Any] = {}

    @contextlib.contextmanager
    def done(self) -> Iterator[None]:
        """Context manager: train, and remove the folder afterwards; it stays if the run fails."""
        watching = threading.Thread(
            target=self._stop_in_time, name="raypipe-short-run", daemon=True
        )
        watching.start()
        try:
            # no other command but `train` needs the whole program
            launch = import_module("raypipe.launch.run").launch
            self.figures = launch(self._run, folder_stays=False)
        finally:
            self._ended.set()
            watching.join()
        try:
            yield
        finally:
            self._remove()

    def _stop_in_time(self) -> None:
        self._wait_for_a_record()
        self._ended.wait(self._seconds)
        if not self._ended.is_set():
            request_stop(self.uri)

    def _wait_for_a_record(self) -> None:
        """Wait until the training has a record, or has ended."""
        look_s = _LOOK_REMOTE_S if is_remote(self.uri) else _LOOK_S
        while not (self._ended.is_set() or self._has_trained()):
            self._ended.wait(look_s)

    def _has_trained(self) -> bool:
        """Return whether the training has a record."""
        try:
            records = read_records(self.uri)
        except RaypipeError:
            return False
        return any(record["kind"] == "train" for record in records)

    def _remove(self) -> None:
        filesystem, path = open_filesystem(self.uri)
        try:
            filesystem.delete_dir(path)
        except (RaypipeError, pa.ArrowException, OSError) as error:
            logger.warning("%s cannot be removed: %s", self.uri, error)


def check_has_settings(target: str, instead: str) -> None:
    """Raise ConfigError for the folder of an own loop: its code is not there.

    Args:
        target: a folder, or the address of a store.
        instead: what to do with an own loop.
    """
    if not target:
        return
    has_records = exists(join_address(as_uri(target), RECORDS))
    if has_records and not exists(join_address(as_uri(target), "config.yaml")):
        raise ConfigError(
            f"{target} is the folder of an own loop, whose code is not in it: {instead}"
        )
