"""A generator of numpy that is set to the key of a sample."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.random.bit_generator import ISpawnableSeedSequence

Key = tuple[int, int]
"""Two integers in [0, 2^64), from `Plan.sample_keys`."""


class _KeyedSeeds(ISpawnableSeedSequence):
    """The seeds of generators that are spawned: a function of the key, however many were spawned under others."""

    def __init__(self, domain: int) -> None:
        self._domain = domain
        self.rewind((0, 0))

    def rewind(self, key: Key) -> None:
        self._key = key
        self._seeds: np.random.SeedSequence | None = None

    @property
    def _of_key(self) -> np.random.SeedSequence:
        if self._seeds is None:  # most transforms spawn nothing
            self._seeds = np.random.SeedSequence([*map(int, self._key), self._domain])
        return self._seeds

    def generate_state(self, n_words: int, dtype: Any = np.uint32) -> np.ndarray:
        return self._of_key.generate_state(n_words, dtype)

    def spawn(self, n_children: int) -> list[Any]:
        return self._of_key.spawn(n_children)


class KeyedGenerator:
    """Generator of numpy, set to the state of a fresh `Generator(Philox(key=key))`.

    That costs a few microseconds a sample; making a new one costs tens. Generators that it spawns, too, depend
    only on the key.

    Args:
        domain: another place in the key's stream, 2^192 draws on for each, so that two uses of a key differ.
    """

    def __init__(self, domain: int = 0) -> None:
        self._seeds = _KeyedSeeds(domain)
        # numpy takes what spawns, though its annotations do not say so
        seeds: Any = self._seeds
        self._philox = np.random.Philox(seeds)
        # a fresh generator: counter 0, empty buffer
        self._state: Any = self._philox.state
        self._state["state"]["counter"][3] = domain
        self.generator = np.random.Generator(self._philox)

    def rewind(self, key: Key) -> np.random.Generator:
        """The generator, as if it were new."""
        self._state["state"]["key"][:] = key
        self._philox.state = self._state
        self._seeds.rewind(key)
        return self.generator
