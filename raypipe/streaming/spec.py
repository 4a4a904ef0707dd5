"""Description of a stream, as a plain value that pickles: `opening` makes it on the driver; `pipeline` runs it by
Ray, `inline` and the head start in one process."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from raypipe.config import PoolConfig, TransformConfig
from raypipe.errors import ConfigError
from raypipe.logs import LogFormat
from raypipe.mistakes import Unlike
from raypipe.packages import versions
from raypipe.plan.places import Split
from raypipe.plan.schedule import Plan
from raypipe.stores.base import Store, keeps_groups
from raypipe.streaming.items import DatasetItems
from raypipe.transform.columns import NO_COLUMNS, SampleColumns
from raypipe.transform.device_input import DeviceInput
from raypipe.transform.ending import Ending
from raypipe.transform.fields import LABEL
from raypipe.transform.transform_steps import Steps
from raypipe.transform.user_code import copied
from raypipe.transform.views import makes_views

UserTransform = Callable[..., Any] | str | Steps | Mapping[str, Any] | None
"""A callable on uint8 RGB (H, W, 3), or on what `transform.decode` gives, an Albumentations or torchvision v2
pipeline, None, or what `transform.train` may be; or views of several, `{NAME: (transform, count), …}`."""


@dataclass(frozen=True)
class StreamSpec(
    Unlike, instead="iterate raypipe.loader(spec).epochs(), and then epoch.train"
):
    """Everything that determines a stream, and the pool that makes it; `raypipe.open_stream` makes one.

    Attributes:
        plan: the order.
        stores: the store of each split of the schedule.
        transforms: the CPU transform of each split.
        transform: decode and bad-sample settings.
        pool: the actor pool.
        quarantine: URI of the folder that records bad samples; empty = log only.
        run: name of the run, for metrics and logs.
        log_format: format of the stream's log lines.
        columns: columns of batches besides images, and the target if it is not a class.
        versions: those of the driver's packages that pixels depend on.
        endings: dtype and normalization with which pipelines ended, see `raypipe.transform.ending`.
        store_facts: facts about the store of each split, see `raypipe.stores.facts`.
        opened: the arguments that it was opened with, see `raypipe.streaming.record.opened`.
        traces: whether its processes record events for a trace, see `raypipe.metrics.tracer`.
        share: (rank, W), the share of it that a pool makes: the micro-batches m of each step with m mod W = rank.
        library_settings: those of the process that has started its pool, see `raypipe.library_settings`.
        resident: its images on the device, see `raypipe.streaming.resident`; None = they are made as they come.
    """

    plan: Plan
    stores: dict[Split, Store]
    transforms: dict[Split, UserTransform] = field(repr=False)
    transform: TransformConfig
    pool: PoolConfig
    quarantine: str = ""
    run: str = ""
    log_format: LogFormat = "text"
    columns: SampleColumns = field(default=NO_COLUMNS, repr=False)
    versions: dict[str, str | None] = field(default_factory=versions, repr=False)
    endings: dict[Split, Ending] = field(default_factory=dict, repr=False)
    store_facts: dict[Split, Any] = field(default_factory=dict, repr=False)
    opened: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)
    traces: bool = field(default=False, repr=False)
    share: tuple[int, int] = field(default=(0, 1), repr=False)
    library_settings: dict[str, Any] = field(
        default_factory=dict, repr=False, compare=False
    )
    resident: Any = field(default=None, repr=False, compare=False)

    @property
    def names(self) -> tuple[str, ...]:
        """The store's names of the columns to read: the image, the label if it is a class, and others."""
        columns = dict.fromkeys(
            (*self.columns.stored, *self.transform.target_columns.values())
        )
        return ("image", *([LABEL] if self.columns.reads_class else ()), *columns)

    def with_own_code(self) -> StreamSpec:
        """Return the stream with its own copies of the user's code, as another process has them."""
        columns = replace(self.columns, function=copied(self.columns.function))
        return replace(self, transforms=copied(self.transforms), columns=columns)

    @property
    def device_input(self) -> DeviceInput:
        """Facts about the batches as they reach a device."""
        return DeviceInput(
            self.endings,
            self.columns.target,
            self.columns.has_target,
            tuple(self.transform.target_columns),
            makes_views(self.transforms["train"]),
            self.transform.decode == "array",
            not isinstance(self.transforms["train"], DatasetItems),
        )

    def readers(self, is_one_machine: bool = False) -> dict[Split, Store]:
        """The stores that the read stage reads; the actors read the others themselves.

        Args:
            is_one_machine: whether all actors are on one machine: what one fetches into its cache, all have.
        """
        if self.pool.reader == "auto":
            return {
                split: store
                for split, store in self.stores.items()
                if store.groups is not None
                and not (is_one_machine and keeps_groups(store))
            }
        if self.pool.reader == "separate":
            return dict(self.stores)
        return {}


def check_pickles(spec: StreamSpec) -> None:
    """Raise ConfigError for a part of the user's that does not pickle; Ray would print a page."""
    from ray import cloudpickle

    parts: dict[str, Any] = {"make_columns": spec.columns.function}
    for split, store in spec.stores.items():
        parts[f"{split}_transform"] = spec.transforms[split]
        parts[f"the {split} store"] = store
    with Path(os.devnull).open("wb") as nowhere:
        for name, component in parts.items():
            try:
                cloudpickle.dump(component, nowhere)
            except Exception as error:
                raise ConfigError(
                    f"{name} cannot be sent to the actors ({error}): let it make what does not pickle, such as an "
                    "open file or a lock, at its first use"
                ) from error
