"""A training of a search: a whole run in the process of a Ray Tune trial, an epoch at a time.

It has one device and W = 1. What a run learns does not depend on W, so trials side by side are worth as much as
one trial after another on all devices, without their meetings.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray
from ray import tune
from ray.train.v2._internal.execution.train_fn_utils import LocalTrainFnUtils, set_train_fn_utils

from raypipe.config import RunConfig
from raypipe.storage.filesystem import as_uri, join
from raypipe.train.launch import num_classes_of, spec_of
from raypipe.train.loop import Trainer
from raypipe.train.run_folder import store_config


class _Session(LocalTrainFnUtils):
    """Stands where Ray Train stands in a run: keeps what the loop reports, and has a folder for checkpoints."""

    def __init__(self) -> None:
        super().__init__(experiment_name="trial")
        self.metrics: dict[str, Any] = {}
        self._folder = tempfile.TemporaryDirectory(prefix="raypipe-trial-")
        self.checkpoints = Path(self._folder.name)

    def report(self, metrics: dict[str, Any], *_: Any, **__: Any) -> None:
        self.metrics = metrics

    def close(self) -> None:
        self._folder.cleanup()


class Trial(tune.Trainable):
    """Trains one of `runs`, the one that its configuration has the `number` of; a step of it is an epoch."""

    def setup(  # type: ignore[override]  # what `tune.with_parameters` gives
        self, config: dict[str, Any], runs: list[RunConfig], max_actors: int
    ) -> None:
        # It would tell of every checkpoint and every execution, between the lines of progress.
        for name in ("ray.train", "ray.data._internal.execution.streaming_executor"):
            logging.getLogger(name).setLevel(logging.WARNING)
        self._run, self._max_actors = runs[config["number"]], max_actors
        self._session = _Session()
        self._trainer: Trainer | None = None

    def step(self) -> dict[str, Any]:
        with _quiet():
            if self._trainer is None:
                self._trainer = self._started()
                self._epochs = self._trainer.epochs()
            next(self._epochs)
            plan, metrics = self._trainer.plan, self._session.metrics
            # Not Tune's number of steps: what goes on from a checkpoint validates that once more.
            epochs = metrics["steps"] // plan.steps_per_epoch
            done = epochs == plan.config.epochs
            if done:
                next(self._epochs, None)  # to the end of the stream, and of the log
                self._trainer = None
        return {**metrics, "epochs": epochs, "done": done}

    def _started(self) -> Trainer:
        run = self._run
        run_uri = join(as_uri(run.runs), run.name)
        spec = spec_of(run, run_uri)
        store_config(run, run_uri)
        set_train_fn_utils(self._session)
        # Ray hides the host's GPUs only from processes that have one of them.
        device = "" if ray.get_gpu_ids() else "cpu"
        return Trainer(
            run,
            spec,
            num_classes_of(run, spec),
            self._max_actors,
            run_uri,
            device=device,
            checkpoints=self._session.checkpoints.as_uri(),
        )

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        shutil.copytree(self._session.checkpoints, checkpoint_dir, dirs_exist_ok=True)

    def load_checkpoint(self, checkpoint: Any) -> None:
        self._end()
        shutil.rmtree(self._session.checkpoints)
        shutil.copytree(checkpoint, self._session.checkpoints)

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """The next trial, in the same process."""
        self.cleanup()
        self.setup(new_config)  # type: ignore[call-arg]  # so does it here
        return True

    def cleanup(self) -> None:
        self._end()
        self._session.close()

    def _end(self) -> None:
        if self._trainer is not None:
            self._epochs.close()  # type: ignore[attr-defined]
            self._trainer.close()
            self._trainer = None


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the loop's lines of progress: the search has its own, and RUN/metrics.jsonl has all."""
    with Path(os.devnull).open("w") as nowhere, contextlib.redirect_stdout(nowhere):
        yield


class Progress(tune.Callback):
    """A line for each epoch of each training, and for those that fail.

    Args:
        names: of the trainings, by their numbers.
    """

    def __init__(self, names: list[str]) -> None:
        self._names = names

    def _print(self, trial: Any, text: str) -> None:
        number = trial.config["number"]
        print(f"{number + 1}/{len(self._names)}  {text}  {self._names[number]}", flush=True)

    def on_trial_result(self, iteration: int, trials: Any, trial: Any, result: dict[str, Any], **_: Any) -> None:
        accuracy = result["val_accuracy"]
        shown = f"{accuracy:.4f}" if accuracy is not None else "not yet known"
        self._print(trial, f"epoch {result['epochs']}  validation accuracy {shown}")

    def on_trial_error(self, iteration: int, trials: Any, trial: Any, **_: Any) -> None:
        self._print(trial, "failed")
