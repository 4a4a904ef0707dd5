"""What Accelerate keeps for all of a process."""

from __future__ import annotations

from accelerate.state import AcceleratorState, GradientState


def forget_accelerate() -> None:
    """Let the next `Accelerator` of this process be as its first."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
