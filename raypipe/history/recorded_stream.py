"""The stream of a run as its folder has recorded it, opened again, and the changes since."""

from __future__ import annotations

import contextlib
import functools
from dataclasses import replace
from typing import Any

from raypipe.config import AugmentConfig, PlanConfig, PoolConfig, TransformConfig
from raypipe.errors import ConfigError, RaypipeError, StoreError
from raypipe.history.record_checks import damage_told, read_lines, whole_number
from raypipe.importing import check_named_code, user_code
from raypipe.library_settings import as_text
from raypipe.packages import versions
from raypipe.plan.compose import StoreArrays
from raypipe.plan.places import MicroBatchId, Split
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
    "augment": AugmentConfig,
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
        fields = (self.record.augment or {"settings": {}})["settings"]
        entry = {"settings": {**fields, "module": ""}}
        return replace(self._restored("augment", entry), module=given)

    def _value(self, name: str) -> Any:
        """Return an argument: the given one, or what its entry says."""
        if name in self._given:
            return self._given[name]
        entries = {**self.record.arguments, "augment": self.record.augment}
        return self._restored(name, entries[name])

    def _restored(self, name: str, entry: Any) -> Any:
        """The value of an entry; raises ConfigError for code or an address that nobody has trusted."""
        folder = self._run_uri.removeprefix("file://")
        check_named_code({name: entry}, folder, self._trusts)
        check_named_addresses({name: entry}, self._run_uri, self._trusts)
        with damage_told(f"{self._run_uri}: the record of {name}"):
            return restored(entry, name, self._trusts, _SECTIONS.get(name))

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
        config: PlanConfig = self._restored("plan", arguments["plan"])
        needed = [
            f"plan.{name}"
            for name in ("weights", "buckets", "sampler")
            if getattr(config, name)
        ]
        needed += [
            f"store.{name}"
            for name in ("filter", "exclude", "take")
            if arguments.get(name) != ""
        ]
        has_windows = config.shuffle not in ("global", "off")
        if has_windows and any(part.in_groups for part in self.record.parts("train")):
            needed.append("plan.shuffle")
        if needed:
            raise ConfigError(
                f"the order of {self._run_uri} has {needed[0]}, which needs more than the sizes of its stores"
            )

        def arrays(split: Split) -> dict[str, StoreArrays]:
            return {
                part.name: StoreArrays(
                    part.address, part.fingerprint, Selection([], part.samples)
                )
                for part in self.record.parts(split)
            }

        train = arrays("train")
        return Plan.of(config, train.get("", train), arrays("val").get(""))

    @functools.cached_property
    def _why_closed(self) -> str:
        """The reason why the stores, transforms and augmentation cannot be opened; empty = they can."""
        try:
            _ = self.spec, self.augment
        except RaypipeError as error:
            return f"its stream cannot be opened: {error}"
        return ""

    @functools.cached_property
    def _other_stores(self) -> list[tuple[StoreRecord, StoreRecord]]:
        """The stores that have other contents than in the run: as they were, and as they are."""
        return [
            (then, now)
            for split, parts in recorded_stores(self.spec.stores).items()
            for then, now in zip(self.record.parts(split), parts, strict=False)
            if (then.fingerprint, then.samples) != (now.fingerprint, now.samples)
        ]

    @property
    def _has_recorded_sizes(self) -> bool:
        return all(then.samples == now.samples for then, now in self._other_stores)

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
            for then, now in self._other_stores
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
        if not self.quarantine:
            return []
        address = join_address(self.quarantine, f"{place}.jsonl")
        return read_lines(address, functools.partial(_bad_sample, place))


def _bad_sample(place: MicroBatchId, record: dict[str, Any]) -> BadSample:
    """A bad sample by its line; raises ValueError for anything else."""
    bad = BadSample(place, **{name: record[name] for name in _OF_BAD})
    whole_number(bad.index, "index")
    if bad.substitute is not None:
        whole_number(bad.substitute, "substitute")
    return bad
