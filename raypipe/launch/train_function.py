"""Train function of a run, on each worker of Ray Train: its logs, and the training loop."""

from __future__ import annotations

import contextlib
import logging
import os
from typing import Any

import ray.train
import torch

from raypipe.errors import RaypipeError
from raypipe.launch.run_folder import FIGURES_FILE
from raypipe.logs import configure_logs
from raypipe.metrics.observer import Observer
from raypipe.metrics.records import read_records
from raypipe.plan.places import Split
from raypipe.progress import (
    begin_phases,
    phase,
    phase_seconds,
    phases,
    print_progress,
    relay_progress,
)
from raypipe.rayext.tweaks import quiet_trainer
from raypipe.storage.files import write_json
from raypipe.storage.filesystem import exists, join_address
from raypipe.streaming.metrics import LoaderMetrics
from raypipe.train.loop import Trainer

logger = logging.getLogger(__name__)


class _StartRecord(Observer):
    """Records the phases of a run's start once the first batch is there, unless its trainers were restarted."""

    def __init__(self, metrics: LoaderMetrics, run_uri: str) -> None:
        self._metrics = metrics
        self._run_uri = run_uri
        self._begun = phases()[0].began_at
        self._is_due = True

    def arrived(self, split: Split) -> None:
        if not self._is_due:
            return
        self._is_due = False
        seconds = phase_seconds()
        records = list[dict[str, Any]]()
        with contextlib.suppress(RaypipeError):  # storage does not answer now
            records = read_records(self._run_uri)
        if all(record.get("begun") != self._begun for record in records):
            self._metrics.record("phases", begun=self._begun, seconds=seconds)


def train_loop(config: dict[str, Any]) -> None:
    """Train on each Ray Train worker, and write the run's figures to its folder.

    Args:
        config: the arguments of `Trainer`; `relays`, whether the driver shows progress that this process relays;
            `phases`, those of the run's start so far; and `until`, see `launch`.
    """
    quiet_trainer()
    num_threads = os.environ.get("OMP_NUM_THREADS", "")
    if num_threads.isdecimal() and int(num_threads) > 0:
        # Ray has set the number: this process may be a fork that has imported torch before
        torch.set_num_threads(int(num_threads))
    options = dict(config)
    rank = ray.train.get_context().get_world_rank()
    is_first = rank == 0
    relays = options.pop("relays")
    until = options.pop("until")
    relay_progress(relays)
    configure_logs(options["run"].log_format, run=options["spec"].run, rank=rank)
    begin_phases(options.pop("phases"))
    if is_first:
        phase(logger, "starting the stream and the model")
    trainer = Trainer(**options)
    if is_first:
        phase(logger, "waiting for the first micro-batch")
        metrics = trainer.loader.metrics
        metrics.observers.append(_StartRecord(metrics, trainer.run_uri))
    if until:
        last = join_address(trainer.run_uri, until)
        trainer.loader.stop_when(lambda: exists(last))
    for _ in trainer.epochs():
        pass
    if is_first:
        write_json(join_address(trainer.run_uri, FIGURES_FILE), trainer.figures())
        if relays:
            print_progress(logger, "")  # the end of it
