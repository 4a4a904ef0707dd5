"""The progress of a run, where its user looks: one live bar in a terminal or a notebook, else some plain lines."""

from __future__ import annotations

import datetime
import threading
import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from raypipe.rayext.console import show_progress

_LINE_EVERY_S = 10.0  # beside those of each epoch
_END_S = 3.0  # for the trainers' last lines, which Ray brings after a while


class RunConsole:
    """Within, progress that the trainers of a run relay is shown.

    A line for each epoch; in a terminal or a notebook a bar below them, else lines of an epoch that takes long.

    Args:
        epochs, steps_per_epoch: of the run.
        validates: whether a validation follows an epoch, by its number.
        relays: whether the trainers are to relay it; else they print it.

    Attributes:
        relays: whether they are, and can.
    """

    def __init__(
        self, epochs: int, steps_per_epoch: int, validates: Callable[[int], bool], relays: bool = True
    ) -> None:
        self._validates, self.relays = validates, relays
        self._epochs, self._steps_per_epoch = epochs, steps_per_epoch
        self._bar = _bar() if relays else None
        self._ended = threading.Event()
        self._held, self._printed_at = "", -_LINE_EVERY_S
        self._begun: tuple[float, int] | None = None

    def __enter__(self) -> RunConsole:
        self.relays = self.relays and show_progress(self.show)
        if self._bar and self.relays:
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self.relays and kind is None:
            self._ended.wait(_END_S)
        show_progress(None)
        self._print_held()
        if self._bar:
            self._bar.stop()

    def show(self, text: str, values: dict[str, Any]) -> None:
        """One line of the trainers; in a thread of Ray's."""
        kind = values.get("kind")
        if kind == "end":
            self._ended.set()
        elif kind == "train":
            self._show_step(text, values)
        elif kind == "val" and self._held:  # the same epoch's: its number is told already
            self._held += "  " + text.partition("  ")[2]
            self._print_held()
        else:
            self._print_held()
            print(text, flush=True)

    def _show_step(self, text: str, values: dict[str, Any]) -> None:
        self._print_held()
        step, now = values["step"], time.monotonic()
        ends_epoch = step == (values["epoch"] + 1) * self._steps_per_epoch
        if ends_epoch and self._validates(values["epoch"]):
            self._held = text  # until it has
        elif ends_epoch:
            print(text, flush=True)
        elif self._bar is None and now - self._printed_at >= _LINE_EVERY_S:
            print(text, flush=True)
            self._printed_at = now
        if self._bar is None:
            return
        total = self._epochs * self._steps_per_epoch
        if self._begun is None:
            self._begun = now, step
            self._bar.add_task("", total=total, epochs=self._epochs, epoch=0, steps=self._steps_per_epoch, told="")
        since, first = self._begun
        left = f"{_clock((now - since) / (step - first) * (total - step))} left" if step > first else ""
        told = (
            f"step {step - values['epoch'] * self._steps_per_epoch}/{self._steps_per_epoch}  "
            f"{values['images_per_s']:,.0f} images/s  waiting {values['wait_fraction']:.0%}  {left}"
        )
        self._bar.update(self._bar.task_ids[0], completed=step, epoch=values["epoch"] + 1, told=told)

    def _print_held(self) -> None:
        if self._held:
            print(self._held, flush=True)
            self._held = ""


def _clock(seconds: float) -> str:
    return str(datetime.timedelta(seconds=round(seconds)))


def _bar() -> Progress | None:
    """Where there is a place for one: what is printed meanwhile is printed above it."""
    console = Console()
    # Without ipywidgets rich has no live display in a notebook.
    is_live = console.is_terminal and not console.is_dumb_terminal
    if not (find_spec("ipywidgets") if console.is_jupyter else is_live):
        return None
    epoch, told = TextColumn("epoch {task.fields[epoch]}/{task.fields[epochs]}"), TextColumn("{task.fields[told]}")
    return Progress(epoch, BarColumn(20), told, console=console, transient=True)
