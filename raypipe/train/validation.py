"""Metrics of the validation: the same values for any number of workers, to the last bit.

Each micro-batch gives sums, in float64. At the end every rank gets those of all ranks, in the order of the plan,
and adds them up exactly, so that neither W nor the order of the ranks reaches a result.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from raypipe.errors import ConfigError

Gather = Callable[[Any], list[Any]]
"""Value of this rank → the values of all ranks."""

_EXPECTED = (
    "it must return a dict: a name, and one value per sample or a pair (sum, count)"
)
_METHODS = ("update", "compute", "merge_state")
# Names that the record of kind "val" has in metrics.jsonl.
_TAKEN = ("accuracy", "loss", "samples", "epoch", "kind", "step", "time")


class UserMetric:
    """The metric of `train.metrics`: a function, or an object like those of torchmetrics.

    Args:
        address: `module:name`, for messages and for the name of an object's value.
        value: the function or the object.

    Raises:
        ConfigError: it is neither.
    """

    def __init__(self, address: str, value: Any) -> None:
        self.setting = f"train.metrics={address}"
        self._value = value
        self._name = address.rpartition(":")[2].rpartition(".")[2]
        self.is_object = hasattr(self._value, "update")
        is_whole = all(hasattr(self._value, name) for name in _METHODS)
        ok = is_whole if self.is_object else callable(self._value)
        if isinstance(self._value, type) or not ok:
            raise ConfigError(
                f"{self.setting} must be a function of outputs, targets and weights, or an object with "
                f"{', '.join(_METHODS)}, got {self._value!r}"
            )
        if getattr(self._value, "sync_on_compute", False):
            raise ConfigError(
                f"{self.setting} would add up the ranks' values a second time: make it with sync_on_compute=False"
            )

    def seen(
        self, outputs: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor
    ) -> Any:
        """Return a copy of the object that has seen a micro-batch's samples; None = none of them can be read."""
        real = weights > 0
        if not real.any():
            return None
        metric = copy.deepcopy(self._value)
        metric.update(outputs[real].cpu(), targets[real].cpu())
        return metric

    def sums(
        self, outputs: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor
    ) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """Return the function's sums over a micro-batch, and their counts, by name."""
        values = self._value(outputs, targets, weights)
        if not isinstance(values, Mapping):
            raise ConfigError(
                f"{self.setting} returned a {type(values).__name__}: {_EXPECTED}"
            )
        return {
            self._checked(name): self._sum(name, value, weights)
            for name, value in values.items()
        }

    def _sum(
        self, name: str, value: Any, weights: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if isinstance(value, torch.Tensor) and value.shape == weights.shape:
            return weighted_sum(value, weights), weights.double().sum()
        try:
            total, count = value
            return _scalar(total, weights), _scalar(count, weights)
        except (TypeError, ValueError, RuntimeError):
            shape = tuple(value.shape) if isinstance(value, torch.Tensor) else value
            raise ConfigError(
                f"{self.setting} returned {shape} for {name!r} and {len(weights)} samples: {_EXPECTED}"
            ) from None

    def _checked(self, name: Any) -> str:
        if not (isinstance(name, str) and name.isidentifier()) or name in _TAKEN:
            raise ConfigError(
                f"{self.setting} returned the name {name!r}: use another one, of letters, digits and underscores"
            )
        return name

    def merged(self, metrics: list[Any]) -> dict[str, float]:
        """Return the values of the objects that have seen the micro-batches, in the plan's order."""
        merged = copy.deepcopy(metrics[0])
        for metric in metrics[1:]:
            merged.merge_state(metric)
        values = merged.compute()
        if not isinstance(values, Mapping):
            values = {self._name: values}
        try:
            return {self._checked(name): float(value) for name, value in values.items()}
        except (TypeError, ValueError, RuntimeError):
            raise ConfigError(
                f"{self.setting}.compute() must return a number, or a dict of names and numbers, got {values!r}"
            ) from None


class Validation:
    """Sums of the loss, the accuracy and the user's metric during validation.

    Args:
        metric: the metric; None = none.
        gather: brings the values of all ranks together.
    """

    def __init__(self, metric: UserMetric | None, gather: Gather) -> None:
        self._metric = metric
        self._gather = gather
        self._names: list[str] = []
        # Of each micro-batch: its place; its sums, on the device, so that the host does not wait; and an object.
        self._rows: list[tuple[tuple[int, int], torch.Tensor, Any]] = []

    def add(
        self,
        order: tuple[int, int],
        losses: torch.Tensor,
        correct: torch.Tensor,
        weights: torch.Tensor,
        outputs: torch.Tensor,
        targets: torch.Tensor,
    ) -> None:
        """Add a micro-batch.

        Args:
            order: step and number of the micro-batch in it.
            losses, correct, weights: (B,); padding and unreadable samples have weight 0.
            outputs, targets: arguments of the user's metric.
        """
        count = weights.double().sum()
        sums = {
            "accuracy": (weighted_sum(correct, weights), count),
            "loss": (weighted_sum(losses, weights), count),
        }
        seen = None
        if self._metric and self._metric.is_object:
            seen = self._metric.seen(outputs, targets, weights)
        elif self._metric:
            sums |= self._metric.sums(outputs, targets, weights)
            if self._rows and [*sums] != self._names:
                raise ConfigError(
                    f"{self._metric.setting} returned {[*sums][2:]} for a micro-batch, and {self._names[2:]} for "
                    "the first one: return the same names for each"
                )
        self._names = [*sums]
        terms = [term for pair in sums.values() for term in pair]
        self._rows.append((order, torch.stack(terms), seen))

    def result(self) -> tuple[dict[str, float], int]:
        """Return the values by name, and the number of samples; all ranks call it."""
        on_device = [sums for _, sums, _ in self._rows]
        on_host = torch.stack(on_device).cpu().tolist() if on_device else []
        own = [
            (order, sums, seen)
            for (order, _, seen), sums in zip(self._rows, on_host, strict=True)
        ]
        rows = [row for rank in self._gather(own) for row in rank]
        rows.sort(key=lambda row: row[0])
        totals = [math.fsum(column) for column in zip(*(sums for _, sums, _ in rows))]  # noqa: B905  equally long
        count = totals[1]
        if not count:
            return {}, 0
        values = {
            name: total / of if of else math.nan
            for name, total, of in zip(
                self._names, totals[::2], totals[1::2], strict=True
            )
        }
        if self._metric and self._metric.is_object:
            seen = [metric for _, _, metric in rows if metric is not None]
            values |= self._metric.merged(seen)
        return values, int(count)


def weighted_sum(values: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the sum of the samples' values, without those of weight 0.

    Bad samples and padding have zeros as pixels; a NaN of theirs must not enter the sum.
    """
    return torch.where(weights > 0, values.double() * weights, 0.0).sum()


def _scalar(value: Any, weights: torch.Tensor) -> torch.Tensor:
    tensor = torch.as_tensor(value, dtype=torch.float64, device=weights.device)
    return tensor.reshape(())
