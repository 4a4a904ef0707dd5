"""The stream of a run as its folder has recorded it, opened again, and the changes since."""

from __future__ import annotations

import contextlib
import functools
from dataclasses import replace
from typing import Any

from raypipe.config import AugmentConfig, PlanConfig, PoolConfig, TransformConfig
from raypipe.errors import ConfigError, RaypipeError, StoreError
from raypipe.history.record_checks import damage_told, read_lines, whole_number
from raypipe.importing import check_named_code
from raypipe.library_settings import as_text
from raypipe.packages import user_code, versions
from raypipe.plan.compose import StoreArrays
from raypipe.plan.places import MicroBatchId
from raypipe.plan.schedule import Plan
from raypipe.plan.selection import Selection
from raypipe.storage.filesystem import check_named_addresses, is_folder, join_address
from raypipe.streaming.bad_samples import BadSample
from raypipe.streaming.opening import open_stream
from raypipe.streaming.record.opened import (
    StoreRecord,
    StreamRecord,
    recorded_stores,
    rewritten,
    written_files,
)
from raypipe.streaming.record.recorded_values import restored
from raypipe.streaming.spec import StreamSpec

_SECTIONS = {
    "plan": PlanConfig,
    "transform": TransformConfig,
    "augment": AugmentConfig | None,
}
_OF_BAD = ("store", "index", "name", "substitute", "error", "fault")
_INLINE = PoolConfig(engine="inline")


class RecordedStream:
    """A stream as a run has recorded it.

    Args:
        run_uri: the run's folder.
        record: the record.
        trusts: whether code that it names may run.
        given: arguments that are used instead of the recorded ones.

    Attributes:
        record: as passed.
    """

    def __init__(
        self, run_uri: str, record: StreamRecord, trusts: bool, given: dict[str, Any]
    ) -> None:
        self.record = record
        self._run_uri = run_uri
        self._trusts = trusts
        self._given = given

    @functools.cached_property
    def spec(self) -> StreamSpec:
        """The stream, opened as the run's was, for this process (pool.engine "inline").

        Raises:
            RaypipeError: a store, code or object that it needs is missing.
        """
        names = self.record.arguments.keys() | self._given.keys()
        arguments = {name: self._value(name) for name in names - {"augment"}}
        transform = arguments.get("transform")
        for split in ("train", "val"):
            if transform and arguments.get(f"{split}_transform", "") != "":
                # a given transform replaces the settings'
                default = getattr(TransformConfig, split)
                transform = replace(transform, **{split: default})
                arguments["transform"] = transform
        # A run keeps the index of its tars next to the quarantine.
        quarantine = join_address(self._run_uri, "quarantine")
        if not is_folder(join_address(self._run_uri, "index")):
            quarantine = ""
        try:
            with damage_told(f"{self._run_uri}: the record of its stream"):
                spec = open_stream(**arguments, pool=_INLINE, quarantine=quarantine)
        except StoreError as error:
            raise StoreError(
                f"a store of the run cannot be opened (if it has moved, --train or --val names it): {error}"
            ) from error
        return replace(spec, quarantine="")

    @functools.cached_property
    def augment(self) -> AugmentConfig | None:
        """The augmentation on the device that the loader got; None = none."""
        given = self._given.get("augment")
        if given is None or isinstance(given, AugmentConfig):
            return self._value("augment")
        # a mere module, as raypipe.loader takes it
        entry = self._trusted["augment"] or {"settings": {}}
        fields = {**entry["settings"], "module": ""}
        return replace(self._restored("augment", {"settings": fields}), module=given)

    def _value(self, name: str) -> Any:
        """Return an argument: the given one, or what its entry says."""
        if name in self._given:
            return self._given[name]
        return self._restored(name, self._trusted[name])

    def _restored(self, name: str, entry: Any) -> Any:
        kind = _SECTIONS.get(name, object)
        section = AugmentConfig if name == "augment" else kind
        with damage_told(f"{self._run_uri}: the record of {name}"):
            value = restored(entry, name, self._trusts, section)
            if not isinstance(value, kind):
                raise TypeError(f"{name} are not settings")
        return value

    @functools.cached_property
    def _trusted(self) -> dict[str, Any]:
        """The entries that are used; raises ConfigError if they name code or addresses that nobody has trusted."""
        entries = {**self.record.arguments, "augment": self.record.augment}
        used = {key: entries[key] for key in entries.keys() - self._given}
        check_named_code(used, self._run_uri.removeprefix("file://"), self._trusts)
        check_named_addresses(used, self._run_uri, self._trusts)
        return entries

    @functools.cached_property
    def plan(self) -> Plan:
        """The plan: the stream's own, or one of the recorded sizes where its stores are missing or have others.

        Raises:
            RaypipeError: the order needs more of the stores than their sizes.
        """
        try:
            plan = self.spec.plan
        except RaypipeError as error:
            with contextlib.suppress(RaypipeError):
                return self._plan_of_sizes()
            raise error
        return plan if self._has_recorded_sizes else self._plan_of_sizes()

    def _plan_of_sizes(self) -> Plan:
        """The plan of stores of the recorded sizes, where its order needs no more of them."""
        arguments = self.record.arguments
        config: PlanConfig = self._restored("plan", arguments.get("plan"))
        parts = self.record.parts("train")
        has_windows = config.shuffle not in ("global", "off")
        needed = {
            "plan.weights": bool(config.weights),
            "plan.buckets": bool(config.buckets),
            "plan.sampler": bool(config.sampler),
            "store.filter": arguments.get("filter") != "",
            "store.exclude": arguments.get("exclude") != "",
            "store.take": arguments.get("take", "") != "",
            "plan.shuffle": has_windows and any(part.in_groups for part in parts),
        }
        for setting, is_needed in needed.items():
            if is_needed:
                raise ConfigError(
                    f"the order of {self._run_uri} has {setting}, which needs more than the sizes of its stores"
                )
        train, val = (
            {
                part.name: StoreArrays(
                    part.address, part.fingerprint, Selection([], part.samples)
                )
                for part in of_split
            }
            for of_split in (parts, self.record.parts("val"))
        )
        return Plan.of(config, train.get("", train), val.get(""))

    @functools.cached_property
    def _why_closed(self) -> str:
        """The reason why the stores, transforms and augmentation cannot be opened; empty = they can."""
        try:
            _ = self.spec, self.augment
        except RaypipeError as error:
            return f"its stream cannot be opened: {error}"
        return ""

    @functools.cached_property
    def _stores(self) -> list[tuple[StoreRecord, StoreRecord]]:
        """The stores as they were in the run, and as they are."""
        return [
            parts
            for split, now in recorded_stores(self.spec.stores).items()
            for parts in zip(self.record.parts(split), now, strict=False)
        ]

    @property
    def _has_recorded_sizes(self) -> bool:
        return all(then.samples == now.samples for then, now in self._stores)

    @property
    def is_open(self) -> bool:
        """True if the stores, transforms and augmentation can be opened, with as many samples as in the run."""
        return not self._why_closed and self._has_recorded_sizes

    @functools.cached_property
    def lacks(self) -> str:
        """The reason why pixels cannot be made, or would be others; empty = they can be made."""
        return self._why_closed or "; ".join(
            f"{now.address} has other contents than in the run ({now.samples} samples, fingerprint "
            f"{now.fingerprint[:8]}; it had {then.samples}, {then.fingerprint[:8]})"
            for then, now in self._stores
            if (now.fingerprint, now.samples) != (then.fingerprint, then.samples)
        )

    @functools.cached_property
    def differences(self) -> list[str]:
        """Sentences that say which stores, code and versions have changed since the run; empty = none."""
        if self.lacks:
            return [self.lacks, *self.changed_code]
        sentences = []
        now = self.spec.plan.order_fingerprint
        if now != self.record.plan:
            sentences.append(
                f"The plan has the fingerprint {now}, and the run's had {self.record.plan}: the order or the "
                "settings of pixels differ."
            )
        files = {"written": written_files(self.spec.stores)}
        return sentences + rewritten(vars(self.record), files) + self.changed_code

    @functools.cached_property
    def changed_code(self) -> list[str]:
        """Sentences that say which code and versions have changed since the run."""
        now = {**user_code(), **versions(), **as_text()}
        then = {**self.record.code, **self.record.versions}
        return [
            f"{name} has changed since the run: it is {now[name]}, and was {then[name]}."
            for name in then
            if now.get(name, then[name]) != then[name]
        ]

    @functools.cached_property
    def quarantine(self) -> str:
        """The folder with the run's record of bad samples; empty = it had none."""
        moved = join_address(self._run_uri, "quarantine")
        if is_folder(moved):
            return moved
        named = self.record.quarantine
        check_named_addresses({"quarantine": named}, self._run_uri, self._trusts)
        return named

    def bad_samples(self, place: MicroBatchId) -> list[BadSample]:
        """Read the quarantine's record of a micro-batch, an object a line; empty where it had no bad samples.

        Raises:
            ConfigError: the file cannot be read as a record of bad samples.
        """
        samples: list[BadSample] = []
        if not self.quarantine:
            return samples
        address = join_address(self.quarantine, f"{place}.jsonl")
        with damage_told(address):
            for record in read_lines(address):
                bad = BadSample(
                    **{name: record[name] for name in _OF_BAD}, position=place
                )
                whole_number(bad.index, "index")
                if bad.substitute is not None:
                    whole_number(bad.substitute, "substitute")
                samples.append(bad)
        return samples
