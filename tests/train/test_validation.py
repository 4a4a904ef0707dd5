from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import without_ray
from recorded_runs import records
from small_runs import small_run
from torch.nn.functional import cross_entropy

from raypipe.config import TrainConfig
from raypipe.errors import ConfigError
from raypipe.launch.run_checks import check_code
from raypipe.train.models import build_metric
from raypipe.train.validation import Validation

Tensor = torch.Tensor


def top_two(outputs: Tensor, targets: Tensor, weights: Tensor) -> dict[str, Any]:
    """Values of samples, and a pair of sums."""
    best = outputs.topk(2, dim=1).indices
    chances = outputs.softmax(1).amax(1)
    return {
        "top_two": (best == targets[:, None]).any(1),
        "confidence": chances / (weights > 0),  # not finite where the weight is 0
        "of_class_0": ((chances * weights)[targets == 0].sum(), (targets == 0).sum()),
    }


class MeanMargin:
    """A metric with state, as torchmetrics has them."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        best = outputs.topk(2, dim=1).values
        self.seen += (best[:, 0] - best[:, 1]).tolist()
        assert len(outputs) == len(targets)

    def merge_state(self, other: MeanMargin) -> None:
        self.seen += other.seen

    def compute(self) -> Tensor:
        total = torch.tensor(0.0)
        for value in self.seen:  # its rounding depends on the order
            total += value
        return total / len(self.seen)


margin = MeanMargin()


class SyncedMargin(MeanMargin):
    sync_on_compute = True


synced = SyncedMargin()


def nothing(outputs: Tensor, targets: Tensor, weights: Tensor) -> None: ...


def one_number(outputs: Tensor, targets: Tensor, weights: Tensor) -> dict[str, Any]:
    return {"error": torch.tensor(0.5)}


def a_taken_name(outputs: Tensor, targets: Tensor, weights: Tensor) -> dict[str, Any]:
    return {"loss": weights}


def changing(outputs: Tensor, targets: Tensor, weights: Tensor) -> dict[str, Any]:
    return {f"name_{int(targets[0])}": weights}


def named(function: str) -> str:
    return f"{__name__}:{function}"


ROWS = 6


def batch_of(micro: int) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs, targets and weights of a micro-batch, with padding in the last one."""
    generator = torch.Generator().manual_seed(micro)
    outputs = torch.randn(ROWS, 5, generator=generator)
    targets = torch.randint(0, 5, (ROWS,), generator=generator)
    num_real = 2 if micro == 7 else ROWS
    weights = (torch.arange(ROWS) < num_real).float()
    outputs[num_real:] = float("nan")
    return outputs, targets, weights


def validated(metric: str, world_size: int) -> list[tuple[dict[str, float], int]]:
    """The results of all ranks of a validation of eight micro-batches, four a step."""
    gathered: list[Any] = []
    ranks = []
    for rank in range(world_size):
        validation = Validation(
            build_metric(TrainConfig(metrics=named(metric))), lambda _: list(gathered)
        )
        for micro in range(rank, 8, world_size):
            outputs, targets, weights = batch_of(micro)
            losses = cross_entropy(outputs, targets, reduction="none")
            correct = (outputs.argmax(1) == targets).float()
            order = divmod(micro, 4)
            validation.add(order, losses, correct, weights, outputs, targets)
        ranks.append(validation)

    def note(own: Any) -> list[Any]:
        gathered.append(own)
        return [own]

    for validation in reversed(ranks):  # as nothing may depend on it
        gather, validation._gather = validation._gather, note
        validation.result()
        validation._gather = gather
    return [validation.result() for validation in ranks]


@pytest.mark.parametrize("metric", ["top_two", "margin"])
def test_metrics_have_the_same_bits_for_any_number_of_workers(metric: str) -> None:
    ((values, num),) = validated(metric, 1)
    assert num == 44 and set(values) > {"loss", "accuracy"}
    for world_size in (2, 4):
        assert validated(metric, world_size) == [(values, num)] * world_size


def test_a_metric_is_what_it_would_be_of_all_samples_at_once() -> None:
    batches = [batch_of(micro) for micro in range(8)]
    outputs, targets, weights = (torch.cat(of) for of in zip(*batches, strict=True))
    real = weights > 0
    outputs, targets = outputs[real], targets[real]
    chances = outputs.softmax(1).amax(1)
    ((values, _),) = validated("top_two", 1)
    best = outputs.topk(2, dim=1).indices
    assert values == pytest.approx(
        {
            "loss": float(cross_entropy(outputs, targets)),
            "accuracy": float((best[:, 0] == targets).float().mean()),
            "top_two": float((best == targets[:, None]).any(1).float().mean()),
            "confidence": float(chances.mean()),
            "of_class_0": values["of_class_0"],
        }
    )


def test_a_metric_of_torchmetrics_is_that_of_all_samples_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from torchmetrics.classification import MulticlassAccuracy

    hits = MulticlassAccuracy(5, top_k=2, average="micro", sync_on_compute=False)
    monkeypatch.setattr(sys.modules[__name__], "hits", hits, raising=False)
    batches = [batch_of(micro) for micro in range(8)]
    for outputs, targets, weights in batches:
        hits.update(outputs[weights > 0], targets[weights > 0])
    expected = float(hits.compute())
    hits.reset()
    for world_size in (1, 2):
        for values, _ in validated("hits", world_size):
            assert values["hits"] == expected


@pytest.mark.parametrize(
    ("metric", "message"),
    [
        ("nothing", r"train\.metrics=.*:nothing returned a NoneType: it must return"),
        ("one_number", r"returned \(\) for 'error' and 6 samples: it must return"),
        ("a_taken_name", r"returned the name 'loss': use another one"),
        ("changing", r"returned \['name_\d'\] for a micro-batch, and"),
    ],
)
def test_what_a_metric_returns_is_checked(metric: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        validated(metric, 1)


@pytest.mark.parametrize(
    ("metric", "message"),
    [
        ("MeanMargin", r"must be a function of outputs, targets and weights, or an"),
        ("ROWS", r"must be a function of outputs, targets and weights, or an object"),
        ("synced", r"make it with sync_on_compute=False"),
        ("missing", r"train\.metrics '.*:missing' cannot be imported"),
    ],
)
def test_a_metric_that_cannot_be_is_told_before_the_run(
    metric: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_code(TrainConfig(model="small", metrics=named(metric)), 3)
    with pytest.raises(ConfigError, match=r"train\.metrics .*module:name"):
        TrainConfig(metrics="accuracy")


@pytest.mark.parametrize("metric", ["top_two", "margin"])
def test_a_run_records_the_metric_of_the_users(
    metric: str, stores: dict[str, Path], tmp_path: Path
) -> None:
    run = small_run(
        tmp_path, stores["train"], stores["val"], 1, 4, metrics=named(metric)
    )
    found = without_ray.train(dataclasses.replace(run, name="first"))
    ((value, accuracy),) = records(found, "val", metric, "accuracy")
    assert found[f"val_{metric}"] == value >= (accuracy if metric == "top_two" else 0)
    (checkpoint,) = (tmp_path / "first").glob("checkpoint_*/")
    texts = [file.read_text() for file in checkpoint.glob("*.json")]
    assert any(f'"val_{metric}"' in text for text in texts)
