"""Console output of a run: its settings and values derived from them, then its progress."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import yaml

from raypipe.config import RunConfig
from raypipe.rayext.allocation import Allocation
from raypipe.rayext.console import show_progress
from raypipe.storage.files import read_whole
from raypipe.storage.filesystem import join
from raypipe.streaming.spec import StreamSpec
from raypipe.train.run_folder import CONFIG_FILE, as_plain
from raypipe.transform.jpeg import missing_extension

_LINE_EVERY_S = 10.0  # period of lines between those of the epochs
_END_S = 3.0  # longest wait for the trainers' last lines, which Ray delivers late


class RunConsole:
    """Context manager: show the progress that a run's trainers relay.

    It prints a line per epoch, and in long epochs a line every ten seconds.

    Args:
        steps_per_epoch: steps of an epoch of the run.
        validates: number of an epoch → whether a validation follows it.
        relays: whether the trainers should relay progress; otherwise they print it.

    Attributes:
        relays: whether the trainers should relay progress, and this console gets it.
    """

    def __init__(self, steps_per_epoch: int, validates: Callable[[int], bool], relays: bool = True) -> None:
        self._steps_per_epoch, self._validates, self.relays = steps_per_epoch, validates, relays
        self._ended = threading.Event()
        self._epoch_line, self._printed_at = "", -_LINE_EVERY_S

    def __enter__(self) -> RunConsole:
        self.relays = self.relays and show_progress(self.show)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self.relays and kind is None:
            self._ended.wait(_END_S)
        show_progress(None)
        self._print_epoch()

    def show(self, text: str, values: dict[str, Any]) -> None:
        """Show a line of the trainers; called in a thread of Ray."""
        kind = values.get("kind")
        if kind == "val" and self._epoch_line:  # the line of the same epoch already has its number
            self._epoch_line += "  " + text.partition("  ")[2]
            text = ""
        self._print_epoch()
        if kind == "end":
            self._ended.set()
        elif kind == "train":
            self._show_step(text, values)
        elif text:
            print(text, flush=True)

    def _show_step(self, text: str, values: dict[str, Any]) -> None:
        now = time.monotonic()
        ends_epoch = values["step"] == (values["epoch"] + 1) * self._steps_per_epoch
        if ends_epoch and self._validates(values["epoch"]):
            self._epoch_line = text  # printed after the validation
        elif ends_epoch or now - self._printed_at >= _LINE_EVERY_S:
            print(text, flush=True)
            self._printed_at = self._printed_at if ends_epoch else now

    def _print_epoch(self) -> None:
        if self._epoch_line:
            print(self._epoch_line, flush=True)
            self._epoch_line = ""


def changes(run: RunConfig, run_uri: str) -> str:
    """Return the settings that a resume changes, with both values; empty if there are none or they are unknown."""
    try:
        before = yaml.safe_load(read_whole(join(run_uri, CONFIG_FILE)) or b"") or {}
    except yaml.YAMLError:
        return ""
    then, now = _flat(before), _flat(as_plain(run))
    names = [name for name in now if name in then and then[name] != now[name]]
    return ", ".join(f"{name}={now[name]} (was {then[name]})" for name in names)


def _flat(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return settings by whole name, such as `plan.seed`."""
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return flat


def describe(run: RunConfig, spec: StreamSpec, allocation: Allocation, run_uri: str) -> str:
    """Describe a run: the settings that differ from the defaults, and values derived from the settings."""
    plan = spec.plan
    num_excluded = sum(kept.num_left_out for kept in plan.kept.values())
    slower = missing_extension()
    trainers = f"{allocation.workers} x {'GPU' if allocation.gpu else f'{allocation.cpus_per_worker:g} CPU'}"
    if allocation.min_workers:
        trainers = f"{allocation.min_workers} to {trainers}"
    if allocation.idle_gpus:
        all_gpus = allocation.workers + allocation.idle_gpus
        batch_size = all_gpus * plan.config.micro_batch_size
        trainers += (
            f"\nidle GPUs  {allocation.idle_gpus} of {all_gpus}, since the number of workers must divide the "
            f"{plan.config.per_step} micro-batches of a step: set plan.global_batch_size to {batch_size} or a "
            f"multiple of it, or train.num_workers={allocation.workers} if this is intended"
        )
    actors = f"{run.pool.least_actors} to {allocation.max_actors} actors"
    if run.pool.engine == "inline":
        actors = "in the trainers themselves (pool.engine=inline)"
    defaults = _flat(as_plain(RunConfig()))
    settings = [f"{name}={value}" for name, value in _flat(as_plain(run)).items() if value != defaults.get(name)]
    return (
        f"settings   {', '.join(settings)}\n"
        f"run        {run_uri}  (all settings: config.yaml)\n"
        f"plan       {plan.fingerprint}: {plan.config.epochs} epochs of {plan.steps_per_epoch} steps of "
        f"{plan.config.per_step} x {plan.config.micro_batch_size} = {plan.global_batch_size} samples "
        f"({plan.num_train} train, {plan.num_val} val"
        f"{f'; {num_excluded} excluded' if num_excluded else ''})\n"
        f"trainers   {trainers}\n"
        f"transform  {actors}" + (f"\nslower     {slower}" if slower else "")
    )
