"""Gradients of all ranks: by torch's DistributedDataParallel, or summed in an order that does not depend on W.

Each micro-batch has its own forward and backward. Gradients are averaged over the M of a step: over this rank's by
scaling the loss, over ranks by DDP. So one worker with accumulation and M workers without it have the same loss
curve up to rounding; with the sums of ordered.py, bit for bit.
"""

from __future__ import annotations

import contextlib
import warnings

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from raypipe.train.ordered import OrderedGradients


class RankGradients:
    """Gradients of a model, averaged over the M micro-batches of a step.

    Args:
        model: the model, on its device.
        per_step: M.
        world_size: W.
        is_ordered: sum the gradients in an order that does not depend on W, instead of by DDP.

    Attributes:
        model: the model to call in training.
        divisor: number by which a micro-batch's loss is divided before its backward.
    """

    def __init__(
        self, model: nn.Module, per_step: int, world_size: int, is_ordered: bool
    ) -> None:
        self.model = model
        self.divisor = per_step  # the ordered sum adds, while DDP averages
        per_rank = per_step // world_size
        self._ordered: OrderedGradients | None = None
        if is_ordered:
            self._ordered = OrderedGradients(model, per_rank, world_size)
            return
        self.divisor = per_rank
        if world_size > 1:
            # Gradients of 1 x 1 convolutions may have other strides than the bucket: DDP copies them correctly.
            warnings.filterwarnings(
                "ignore", "Grad strides do not match bucket view strides"
            )
            with warnings.catch_warnings():
                # The argument's new name exists only since torch 2.15.
                warnings.filterwarnings(
                    "ignore", "`broadcast_buffers` is deprecated", FutureWarning
                )
                # No broadcast: training only changes BatchNorm's buffers, which StepBatchNorm keeps equal.
                self.model = DistributedDataParallel(
                    model, broadcast_buffers=False, gradient_as_bucket_view=True
                )

    def of_micro_batch(self, is_last: bool) -> contextlib.AbstractContextManager[None]:
        """Context manager of a forward and backward; DDP sums over ranks after the last one of a step."""
        if is_last or not isinstance(self.model, DistributedDataParallel):
            return contextlib.nullcontext()
        return self.model.no_sync()

    def take(self) -> None:
        """Add the gradient of a micro-batch; call after its backward."""
        if self._ordered:
            self._ordered.take()

    def finish(self) -> None:
        """Set every `.grad` to the average of the step."""
        if self._ordered:
            self._ordered.finish()
