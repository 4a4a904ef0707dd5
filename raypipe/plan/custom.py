"""A user's own sampler: its protocol, its population, and the checks when a stream is opened. Numpy only."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

import numpy as np

from raypipe.errors import ConfigError
from raypipe.importing import import_name, with_origin
from raypipe.plan.order import Shuffle
from raypipe.plan.samplers import Draws, PassSampler
from raypipe.plan.selection import JoinedSelection, Selection
from raypipe.section import shown

# Positions of an epoch that are drawn when a stream is opened, for its checks and its fingerprint.
_NUM_PROBED = 4096


class Population:
    """The samples that a sampler draws from, after `store.exclude` and `store.filter`, numbered 0 to size - 1.

    In a mixture these are the samples of all stores, one store after the other.

    Attributes:
        size: number of samples.
        seed: `plan.seed`.
        selection: which samples of the store, or of the joined stores, these are.
        groups: offsets, int64 (groups + 1,), of samples that are stored together, for a sampler that reads a store
            group by group; None = the store has no groups, or there are several stores.
    """

    def __init__(
        self,
        selection: Selection | JoinedSelection,
        seed: int,
        read: Callable[[str], np.ndarray],
        groups: np.ndarray | None = None,
    ) -> None:
        self.size = selection.size
        self.seed = seed
        self.groups = groups
        self.selection = selection
        self._read: Callable[[str], np.ndarray] | None = read

    @property
    def indices(self) -> np.ndarray:
        """Return each sample's index in its store, or in a mixture's stores one after the other: int64 (size,)."""
        return self.selection.indices(np.arange(self.size))

    @property
    def labels(self) -> np.ndarray:
        """Return each sample's label: numbers (size,)."""
        return self.column("label")

    def column(self, name: str) -> np.ndarray:
        """Read a column of numbers of the store, (size,); in a mixture, of each of its stores.

        Raises:
            ConfigError: a store lacks the column, or it has other values than numbers.
        """
        if self._read is None:
            raise RuntimeError(
                "a population's columns can be read where the sampler is made: read them in its __init__"
            )
        return self._read(name)

    def shuffled(
        self, epoch: int, positions: np.ndarray, size: int | None = None
    ) -> np.ndarray:
        """Return the numbers at positions of a permutation of [0, size), a different one in each epoch.

        No array of `size` is made, so this takes as long for 10^9 samples as for ten. With `size` left out, it is
        the order of a run without a sampler.

        Args:
            positions: int64 (n,), each in [0, size).
            size: None = all samples.
        """
        num = self.size if size is None else size
        return Shuffle("global", num, self.seed).numbers(epoch, np.asarray(positions))

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_read": None}


class Sampler(Protocol):
    """Order of a run's training samples, by the class that `plan.sampler` names; see docs/sampling.md.

    raypipe makes it once, where the stream is opened, as `Class(population, **arguments)` with a `Population`, and
    sends it to the processes that need it. Subclassing is optional. All draws are pure functions: any process may
    ask for any position at any time, more than once, so a resume needs no history.
    """

    def __len__(self) -> int:
        """Return the draws of an epoch; fewer than a global batch at its end are left out."""
        ...

    def draw(self, epoch: int, positions: np.ndarray) -> np.ndarray:
        """Return the samples at positions of an epoch, by their numbers in the population.

        Args:
            epoch: training epoch, from 0.
            positions: int64 (n,), each in [0, len(self)): those of a micro-batch, or of several.

        Returns:
            Integers (n,), each in [0, population.size).
        """
        ...

    def validation(self, population: Population) -> np.ndarray | None:
        """Return the different samples to validate, by their numbers; None = all, as without this method.

        Args:
            population: the samples of the validation store.
        """
        return None


class CustomSampler(PassSampler):
    """Draws of a user's sampler, each checked: an epoch is a pass, and the position in it is the repeat.

    So no two draws share a key, without knowledge of how often a sample was drawn before.

    Args:
        setting: `plan.sampler`.
        population: the samples to draw from.

    Attributes:
        name: the sampler's name, for errors.

    Raises:
        ConfigError: the sampler cannot be imported or made, or breaks the protocol.
    """

    def __init__(
        self,
        setting: str | Mapping[str, Any] | type,
        population: Population,
    ) -> None:
        self._selection = population.selection
        self._content = sampler_content(setting)
        self.name = self._content[0]
        named, arguments = _named(setting)
        if isinstance(named, str):
            named = import_name(named, "plan.sampler", trusted=True)
        self._sampler: Sampler = self._called(
            "cannot be made", partial(named, **arguments), population
        )
        for method in ("__len__", "draw"):
            if not callable(getattr(self._sampler, method, None)):
                raise ConfigError(
                    f"plan.sampler {self.name!r} makes a {type(self._sampler).__name__}, which lacks {method}: "
                    "see raypipe.Sampler"
                )
        self.size = self.per_pass = self._called("has no length", self._sampler.__len__)
        if not self.size:
            raise ConfigError(
                f"plan.sampler {self.name!r} has a length of 0: it draws nothing"
            )

    def check(self, epochs: int) -> None:
        """Raise ConfigError unless draws are in range, and the same when they are asked for again."""
        positions = self._probed()
        probed = sorted({0, epochs - 1})
        drawn = {epoch: self._numbers(epoch, positions) for epoch in probed}
        for epoch in reversed(probed):
            backwards = positions[::-1]
            halves = np.array_split(backwards, 2) if len(backwards) > 1 else [backwards]
            again = np.concatenate([self._numbers(epoch, half) for half in halves])
            differs = np.flatnonzero(again[::-1] != drawn[epoch])
            if differs.size:
                first = differs[0]
                raise ConfigError(
                    f"plan.sampler {self.name!r} is not a pure function: at position {positions[first]} of epoch "
                    f"{epoch} it drew sample {drawn[epoch][first]}, and then {again[::-1][first]}. Draw random "
                    "numbers by population.shuffled, or by a generator made of population.seed and the epoch"
                )

    def signature(self) -> list[Any]:
        """Return JSON values that determine the draws: name, arguments, length, and a hash of draws of epoch 0."""
        drawn = self._numbers(0, self._probed())
        return [*self._content, self.size, hashlib.blake2b(drawn.tobytes()).hexdigest()]

    def of_epochs(self, per_epoch: int) -> CustomSampler:
        """Return this sampler with so many of its draws in an epoch."""
        cut = copy.copy(self)
        cut.per_pass = per_epoch
        return cut

    def draw_pass(self, pass_number: int, positions: np.ndarray) -> Draws:
        """See `PassSampler.draw_pass`."""
        indices = self._selection.indices(self._numbers(pass_number, positions))
        zeros = np.zeros(len(positions), np.int64)
        return Draws(indices, zeros + pass_number, positions, zeros)

    def sample_of(self, key: int, epoch: int) -> int:
        """Return a sample of an epoch, chosen by a key."""
        position = np.array([key % self.per_pass])
        return int(self._selection.indices(self._numbers(epoch, position))[0])

    def validated(self, population: Population) -> Selection:
        """Return the samples of the validation store that the sampler chooses.

        Raises:
            ConfigError: they are none, or are not different samples of the store.
        """
        choose = getattr(self._sampler, "validation", None)
        chosen = (
            None
            if choose is None
            else self._called("failed in validation()", choose, population)
        )
        selection = population.selection
        assert isinstance(selection, Selection), "there is one validation store"
        if chosen is None:
            return selection
        numbers = np.asarray(chosen)
        self._check_range(numbers, selection.size, "validates")
        different = np.unique(numbers)
        if len(different) != numbers.size or not numbers.size:
            raise ConfigError(
                f"plan.sampler {self.name!r} validates {numbers.size} samples, {len(different)} of them "
                "different: validation() must return different samples, at least one, or None for all"
            )
        return Selection(
            selection.indices(different.astype(np.int64)),
            selection.num_samples,
            includes=True,
        )

    def _probed(self) -> np.ndarray:
        """Positions, all around an epoch: int64 (n,), ascending."""
        num = min(self.size, _NUM_PROBED)
        return np.arange(num, dtype=np.int64) * self.size // num

    def _numbers(self, epoch: int, positions: np.ndarray) -> np.ndarray:
        """The numbers, int64 (n,), of the samples at positions of an epoch."""
        numbers = np.asarray(
            self._called(
                "failed in draw()", self._sampler.draw, epoch, positions.copy()
            )
        )
        if numbers.shape != positions.shape:
            raise ConfigError(
                f"plan.sampler {self.name!r} drew {numbers.shape} for {len(positions)} positions of epoch "
                f"{epoch}: draw() must return a sample for each position"
            )
        self._check_range(numbers, self._selection.size, f"in epoch {epoch} draws")
        return numbers.astype(np.int64)

    def _check_range(self, numbers: np.ndarray, size: int, does: str) -> None:
        expected = f"the numbers of samples are integers from 0 to {size - 1}"
        if (numbers.size and numbers.dtype.kind not in "iu") or numbers.ndim != 1:
            raise ConfigError(
                f"plan.sampler {self.name!r} {does} {numbers.dtype} of {numbers.shape}: {expected}"
            )
        wrong = numbers[(numbers < 0) | (numbers >= size)]
        if wrong.size:
            raise ConfigError(
                f"plan.sampler {self.name!r} {does} sample {wrong[0]}: {expected}"
            )

    def _called(
        self, failure: str, function: Callable[..., Any], *arguments: Any
    ) -> Any:
        """Call the user's code; an error of it becomes a ConfigError that names the sampler and the line."""
        try:
            return function(*arguments)
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(
                f"plan.sampler {self.name!r} {failure}: {with_origin(error)}"
            ) from error


def _named(
    setting: str | Mapping[str, Any] | type,
) -> tuple[str | type, dict[str, Any]]:
    """Return what names the sampler, and its arguments."""
    if not isinstance(setting, Mapping):
        return setting, {}
    arguments = dict(setting)
    return arguments.pop("name"), arguments


def sampler_content(
    setting: str | Mapping[str, Any] | type,
) -> list[Any]:
    """Return the name and the arguments of `plan.sampler`, as JSON has them.

    A class has only its own name, since the name of its module depends on how a script was started.

    Raises:
        ConfigError: an argument is neither a plain value nor an array.
    """
    named, arguments = _named(setting)
    name = named if isinstance(named, str) else named.__qualname__
    return [name, _as_json(arguments)]


def _as_json(value: Any) -> Any:
    """A plain value as JSON has it; an array by the hash of its numbers."""

    def of_array(array: Any) -> Any:
        if isinstance(array, np.ndarray | np.generic) and array.dtype.kind in "biufUS":
            content = hashlib.blake2b(
                np.ascontiguousarray(array).tobytes(), digest_size=16
            )
            return [array.dtype.str, list(array.shape), content.hexdigest()]
        raise ConfigError(
            f"plan.sampler: the argument {shown(array)} cannot be part of a fingerprint: give numbers, text, "
            "lists, mappings or arrays"
        )

    return json.loads(json.dumps(value, default=of_array, sort_keys=True))
