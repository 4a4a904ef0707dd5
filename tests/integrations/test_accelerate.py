"""Accelerate's loop, in this process: where it may save its state, and what it resumes with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
from accelerate import Accelerator
from accelerated import forget_accelerate
from torch.nn.functional import cross_entropy

from raypipe.device.prefetcher import Batch
from raypipe.errors import ConfigError
from raypipe.streaming.handover import loader
from raypipe.streaming.loader import Loader
from raypipe.streaming.plain import plain_loaders
from raypipe.streaming.spec import StreamSpec


class Loop:
    """A training as Accelerate's examples have it.

    Args:
        stream: the loader.
        folder: where it saves, and resumes if there is a state.
        every: batches between two checkpoints; 0 = none.
        dies_at: batch after which it ends; 0 = the last.
        limit: batches of an epoch.
        after_epoch: whether it saves after each epoch.
        validates: whether it validates after each epoch, before it saves.
    """

    def __init__(
        self,
        stream: Loader,
        folder: Path,
        *,
        every: int = 0,
        dies_at: int = 0,
        **others: Any,
    ) -> None:
        self.stream, self.folder, self.every, self.dies_at = (
            stream,
            folder,
            every,
            dies_at,
        )
        self.limit = others.get("limit", 1_000)
        self.after_epoch, self.validates = (
            others.get("after_epoch", False),
            others.get("validates", False),
        )
        forget_accelerate()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(3 * 12 * 12, 5)
        self.synced, self.num_val = list[tuple[int, int, int]](), 0
        self.seen = list[tuple[int, int, int]]()

    def run(self) -> Loop:
        stream = self.stream
        self.accelerator = Accelerator(
            cpu=True, gradient_accumulation_steps=stream.accumulation_steps
        )
        optimizer = torch.optim.SGD(self.layer.parameters(), lr=0.1)
        self.model, self.optimizer, train, val = self.accelerator.prepare(
            self.layer, optimizer, *plain_loaders(stream, "batch")
        )
        self.accelerator.register_for_checkpointing(train)
        if self.folder.exists():
            self.accelerator.load_state(str(self.folder))
        try:
            self._epochs(train, val)
        finally:
            stream.close()
        return self

    def _epochs(self, train: Any, val: Any) -> None:
        num = 0
        for _ in range(self.stream.cursor.epoch, self.stream.num_epochs):
            for in_epoch, batch in enumerate(train, 1):
                self._step(batch)
                num += 1
                if self.every and num % self.every == 0:
                    self.accelerator.save_state(str(self.folder))
                if num == self.dies_at:
                    return
                if in_epoch == self.limit:
                    break
            for _ in val if self.validates else ():
                self.num_val += 1
            if self.after_epoch:
                self.accelerator.save_state(str(self.folder))
                if self.dies_at:
                    return

    def _step(self, batch: Batch) -> None:
        at = batch.position
        with self.accelerator.accumulate(self.model):
            self.accelerator.backward(
                cross_entropy(
                    self.model(batch.image.flatten(1) / 255), batch.target.clamp(min=0)
                )
            )
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.seen.append((at.epoch, at.step, at.micro))
        if self.accelerator.sync_gradients:
            self.synced.append(self.seen[-1])


Specs = Callable[..., StreamSpec]


@pytest.mark.parametrize(("every", "dies_at"), [(4, 9), (8, 17), (24, 24), (28, 30)])
def test_a_state_saved_between_steps_resumes_with_equal_weights(
    every: int, dies_at: int, spec_of: Specs, tmp_path: Path
) -> None:
    spec, folder = spec_of(4, False), tmp_path / "state"
    whole = Loop(loader(spec), folder).run()
    assert {micro for *_, micro in whole.synced} == {3} and len(whole.seen) == 48
    Loop(loader(spec), folder, every=every, dies_at=dies_at).run()
    resumed = Loop(loader(spec), folder).run()
    assert resumed.seen == whole.seen[dies_at // every * every :]
    assert torch.equal(resumed.layer.weight, whole.layer.weight)


@pytest.mark.parametrize("every", [1, 5, 6, 7])
def test_a_state_in_the_midst_of_a_step_is_refused(
    every: int, spec_of: Specs, tmp_path: Path
) -> None:
    with pytest.raises(
        ConfigError,
        match=r"inside an optimizer step, after \d of this rank's 4 batches",
    ):
        Loop(loader(spec_of(4, False)), tmp_path / "state", every=every).run()


@pytest.mark.parametrize(("saved", "resumed"), [(1, 2), (2, 1), (2, 4), (4, 1)])
def test_a_state_resumes_in_step_on_another_number_of_ranks(
    saved: int, resumed: int, spec_of: Specs, tmp_path: Path
) -> None:
    """After an odd number of steps, so that one count of batches is no multiple of the other's."""
    spec, folder = spec_of(4, False), tmp_path / "state"
    every = 3 * 4 // saved
    Loop(ranks.rank_of(spec, 0, saved), folder, every=every, dies_at=every).run()
    after = Loop(ranks.rank_of(spec, 0, resumed), folder).run()
    last = 4 - resumed
    assert after.seen[0] == (0, 3, 0)
    assert after.synced == [(step // 6, step % 6, last) for step in range(3, 12)]


def test_a_resume_before_a_validation_trains_nothing_and_validates(
    spec_of: Specs, tmp_path: Path
) -> None:
    spec, folder = spec_of(4, True), tmp_path / "state"
    Loop(loader(spec), folder, every=24, dies_at=24).run()
    resumed = Loop(loader(spec), folder, validates=True).run()
    assert {epoch for epoch, *_ in resumed.seen} == {1} and len(resumed.seen) == 24
    assert resumed.num_val == 2 * -(-spec.plan.num_val // 4)
