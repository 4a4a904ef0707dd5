"""Train function of a run, on each worker of Ray Train: its logs, and the training loop."""

from __future__ import annotations

import logging
from typing import Any

import ray.train

from raypipe.launch.run_folder import FIGURES_FILE
from raypipe.logs import configure_logs
from raypipe.progress import begin_phases, phase, print_progress, relay_progress
from raypipe.rayext.tweaks import quiet_trainer
from raypipe.storage.files import write_json
from raypipe.storage.filesystem import join_address
from raypipe.train.loop import Trainer

logger = logging.getLogger(__name__)


def train_loop(config: dict[str, Any]) -> None:
    """Train on each Ray Train worker, and write the run's figures to its folder.

    Args:
        config: the arguments of `Trainer`; `relays`, whether the driver shows progress that this process relays;
            and `begun`, the start time of the run.
    """
    quiet_trainer()
    options = dict(config)
    rank = ray.train.get_context().get_world_rank()
    is_first = rank == 0
    relays = options.pop("relays")
    relay_progress(relays)
    configure_logs(options["run"].log_format, run=options["spec"].run, rank=rank)
    begin_phases(options.pop("begun"))
    if is_first:
        phase(logger, "starting the stream and the model")
    trainer = Trainer(**options)
    if is_first:
        phase(logger, "waiting for the first micro-batch")
    for _ in trainer.epochs():
        pass
    if is_first:
        write_json(join_address(trainer.run_uri, FIGURES_FILE), trainer.figures())
        if relays:
            print_progress(logger, "")  # the end of it
