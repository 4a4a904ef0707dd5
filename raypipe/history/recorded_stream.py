"""The stream of a run as its folder has recorded it, opened again, and the changes since."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from raypipe.config import AugmentConfig, PlanConfig, PoolConfig, TransformConfig
from raypipe.errors import ConfigError, RaypipeError, StoreError
from raypipe.history.quarantined import BadRecord, read_bad_samples
from raypipe.history.record_checks import damage_told
from raypipe.importing import check_named_code
from raypipe.packages import user_code, versions
from raypipe.plan.compose import StoreArrays
from raypipe.plan.places import PADDING, MicroBatchId, Split
from raypipe.plan.schedule import Plan
from raypipe.plan.selection import Selection
from raypipe.storage.filesystem import check_named_addresses, is_folder, join_address
from raypipe.streaming.opening import open_stream
from raypipe.streaming.record.opened import parts_of, rewritten, written_files
from raypipe.streaming.record.recorded_values import restored
from raypipe.streaming.spec import StreamSpec

_SECTIONS = {"plan": PlanConfig, "transform": TransformConfig}
_INLINE = PoolConfig(engine="inline")


class MicroBatchDraws(NamedTuple):
    """The samples of a micro-batch, arrays (B,).

    Attributes:
        place: the micro-batch.
        indices: int64, as the model saw them: with the substitutes of bad samples; PADDING = no sample.
        drawn: int64, as the plan drew them.
        keys: uint64 (B, 2), the keys of their CPU transforms.
        weights: float32, 0 for padding, and for bad samples of a validation.
        passes, repeats: int64, see `raypipe.plan.samplers.Draws`.
        bad: why a drawn sample could not be used, by its row.
    """

    place: MicroBatchId
    indices: np.ndarray
    drawn: np.ndarray
    keys: np.ndarray
    weights: np.ndarray
    passes: np.ndarray
    repeats: np.ndarray
    bad: dict[int, str]


class RecordedStream:
    """A stream as a run has recorded it.

    Args:
        run_uri: the run's folder.
        record: from `raypipe.streaming.record.opened.stream_record`.
        trusts: whether code that it names may run.
        given: arguments that are used instead of the recorded ones.

    Attributes:
        record: as passed.
    """

    def __init__(
        self, run_uri: str, record: dict[str, Any], trusts: bool, given: dict[str, Any]
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
        self._check_code()
        arguments = {
            name: self._restored(name)
            for name in self.record["arguments"]
            if name not in self._given
        }
        for name, value in self._given.items():
            if name != "augment":
                arguments[name] = value
        named = {
            split: getattr(TransformConfig, split)
            for split in ("train", "val")
            if arguments.get(f"{split}_transform", "") != ""
        }
        if arguments.get("transform"):  # a given transform replaces the settings'
            arguments["transform"] = replace(arguments["transform"], **named)
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

    def _restored(self, name: str) -> Any:
        section = _SECTIONS.get(name)
        with damage_told(f"{self._run_uri}: the record of {name}"):
            value = restored(
                self.record["arguments"][name], name, self._trusts, section
            )
            if section and not isinstance(value, section):
                raise TypeError(f"{name} are not settings")
        return value

    @functools.cached_property
    def augment(self) -> AugmentConfig | None:
        """The augmentation on the device that the loader got; None = none."""
        if "augment" in self._given:
            given = self._given["augment"]
            if given is None or isinstance(given, AugmentConfig):
                return given
            # a mere module, as raypipe.loader takes it
            config = self._restored_augment(
                {"settings": _without_module(self.record["augment"])}
            )
            assert config is not None
            return replace(config, module=given)
        return self._restored_augment(self.record["augment"])

    def _check_code(self) -> None:
        """Raise ConfigError if the run names code or addresses that nobody has trusted."""
        entries = {**self.record["arguments"], "augment": self.record["augment"]}
        named = {key: entry for key, entry in entries.items() if key not in self._given}
        run = self._run_uri.removeprefix("file://")
        check_named_code(named, run, self._trusts)
        check_named_addresses(named, self._run_uri, self._trusts)

    def _restored_augment(self, entry: Any) -> AugmentConfig | None:
        self._check_code()
        with damage_told(f"{self._run_uri}: the record of augment"):
            config = restored(entry, "augment", self._trusts, AugmentConfig)
            if not isinstance(config, AugmentConfig | None):
                raise TypeError("augment are not settings")
        return config

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

    @functools.cached_property
    def _why_closed(self) -> str:
        """The reason why the stores, transforms and augmentation cannot be opened; empty = they can."""
        try:
            _ = self.spec, self.augment
        except RaypipeError as error:
            return str(error)
        return ""

    @property
    def is_open(self) -> bool:
        """True if the stores, transforms and augmentation can be opened, with as many samples as in the run."""
        return not self._why_closed and self._has_recorded_sizes

    @property
    def lacks(self) -> str:
        """The reason why pixels cannot be made, or would be others; empty = they can be made."""
        return self._why_closed or "; ".join(self._changed_stores)

    @functools.cached_property
    def differences(self) -> list[str]:
        """Sentences that say which stores, code and versions have changed since the run; empty = none."""
        sentences = []
        if why := self._why_closed:
            sentences.append(f"The stream cannot be opened: {why}{_end(why)}")
        elif self._changed_stores:
            sentences += [f"{change}." for change in self._changed_stores]
        else:
            fingerprint = self.spec.plan.order_fingerprint
            if fingerprint != self.record["plan"]:
                sentences.append(
                    f"The plan has the fingerprint {fingerprint}, and the run's had "
                    f"{self.record['plan']}: the order or the settings of pixels differ."
                )
            now = {"written": written_files(self.spec.stores)}
            sentences += rewritten(self.record, now)
        return sentences + self.changed_code

    @functools.cached_property
    def changed_code(self) -> list[str]:
        """Sentences that say which code and versions have changed since the run."""
        return self._changed_modules() + self._changed_versions()

    def draws(self, place: MicroBatchId) -> MicroBatchDraws:
        """Return the samples of a micro-batch, see `RecordedRun.draws`."""
        plan = self.plan
        draws = plan.draw(place)
        keys = plan.sample_keys(place.split, draws)
        weights = (draws.indices != PADDING).astype(np.float32)
        indices = draws.indices.copy()
        reasons: dict[int, str] = {}
        bad = self.bad_samples(place)
        for row, index in enumerate(draws.indices.tolist()):
            if index not in bad:
                continue
            reasons[row] = bad[index].error
            substitute = bad[index].substitute
            if substitute is None:
                weights[row] = 0
                continue
            indices[row] = substitute
            of_row = draws.at(slice(row, row + 1))
            keys[row] = plan.substitute_keys(place.split, of_row, substitute)[0]
        return MicroBatchDraws(
            place,
            indices,
            draws.indices,
            keys,
            weights,
            draws.passes,
            draws.repeats,
            reasons,
        )

    @functools.cached_property
    def quarantine(self) -> str:
        """The folder with the run's record of bad samples; empty = it had none."""
        own = join_address(self._run_uri, "quarantine")
        if is_folder(own):
            return own
        named = str(self.record.get("quarantine", ""))
        check_named_addresses({"quarantine": named}, self._run_uri, self._trusts)
        return named

    def bad_samples(self, place: MicroBatchId) -> dict[int, BadRecord]:
        """Return the recorded bad samples of a micro-batch by their indices."""
        if not self.quarantine:
            return {}
        records = read_bad_samples(self.quarantine, place)
        return {record.index: record for record in records}

    def _plan_of_sizes(self) -> Plan:
        """The plan of stores of the recorded sizes, where its order needs no more of them."""
        config = self._restored("plan")
        arguments = self.record["arguments"]
        of_train = self.record["stores"]["train"]
        needed = [
            setting
            for setting, is_set in {
                "plan.weights": bool(config.weights),
                "plan.buckets": bool(config.buckets),
                "plan.sampler": bool(config.sampler),
                "store.filter": arguments["filter"] != "",
                "store.exclude": arguments["exclude"] != "",
                "plan.shuffle": config.shuffle in ("auto", "window")
                and any(part["in_groups"] for part in of_train),
            }.items()
            if is_set
        ]
        if needed:
            raise ConfigError(
                f"the order of {self._run_uri} depends on {needed[0]}, and so on more than the sizes of its stores"
            )

        def arrays(part: Mapping[str, Any]) -> StoreArrays:
            return StoreArrays(
                part["address"], part["fingerprint"], Selection([], part["samples"])
            )

        val = self.record["stores"].get("val")
        if len(of_train) == 1 and not of_train[0]["name"]:
            train: Any = arrays(of_train[0])
        else:
            train = {part["name"]: arrays(part) for part in of_train}
        return Plan.of(config, train, arrays(val[0]) if val else None)

    @property
    def _has_recorded_sizes(self) -> bool:
        stores = {
            split: [len(part) for part in parts_of(store).values()]
            for split, store in self.spec.stores.items()
        }
        return stores == {
            split: [part["samples"] for part in parts]
            for split, parts in self.record["stores"].items()
        }

    @functools.cached_property
    def _changed_stores(self) -> list[str]:
        """Describe each store whose contents differ from the run's."""
        changed = []
        for split, parts in self.record["stores"].items():
            of_split: Split = split
            stores = [*parts_of(self.spec.stores[of_split]).values()]
            for part, store in zip(parts, stores, strict=True):
                if len(store) != part["samples"]:
                    changed.append(
                        f"{store.address} has {len(store)} samples, and had {part['samples']} in the run"
                    )
                elif store.fingerprint != part["fingerprint"]:
                    changed.append(
                        f"{store.address} has other contents than in the run (fingerprint "
                        f"{store.fingerprint[:8]}, it was {part['fingerprint'][:8]})"
                    )
        return changed

    def _changed_modules(self) -> list[str]:
        now = user_code()
        return [
            f"The file of {module} has changed since the run."
            for module, digest in self.record["code"].items()
            if now.get(module, digest) != digest
        ]

    def _changed_versions(self) -> list[str]:
        now = versions()
        return [
            f"{name} is {now[name]}, and was {then} in the run."
            for name, then in self.record["versions"].items()
            if name in now and now[name] != then
        ]


def _end(text: str) -> str:
    """The end of a sentence that ends with a text."""
    return "" if text.endswith(("?", ".")) else "."


def _without_module(entry: Any) -> dict[str, Any]:
    """The recorded fields of an augmentation, but for its module."""
    fields = dict(entry["settings"]) if entry else {}
    fields.pop("module", None)
    return fields
