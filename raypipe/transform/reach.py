"""Random generators that a user's code can reach, and that are not those of the process.

    def f(image): return pipeline(image=image)["image"]      a pipeline of Albumentations in a closure or a module
    class Jitter: def __init__(self): self.rng = np.random.default_rng()

Found are those in closures, defaults, the globals that a function names, attributes, classes, lists, dicts,
partials and methods. Not found are those that the code makes in each call, or keeps in a library: making a sample
twice shows these, see `raypipe.streaming.sample_makers`.
"""

from __future__ import annotations

import contextlib
import functools
import random
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from raypipe.importing import is_of, is_own_code
from raypipe.transform.keys import Key, KeyedGenerator
from raypipe.transform.pipelines import RANDOM_STATE
from raypipe.transform.process_state import torchs_generator
from raypipe.transform.user_code import contents

# a policy has some hundred; data that a transform holds can be endless
_MAX_OBJECTS = 5_000
_MAX_ITEMS = 256
# Keys: 64 gain no more, and the generators of Python for each have 2.5 KB.
_NUM_AHEAD = 16
_LEAVES = (
    str,
    bytes,
    int,
    float,
    complex,
    type(None),
    np.ndarray,
    np.generic,
    type,
    types.ModuleType,
)


def reached(root: Any) -> Iterator[Any]:
    """The objects that a user's code can reach, each once, in an order that copies of the code share."""
    todo = [root]
    seen = set[int]()
    while todo and len(seen) < _MAX_OBJECTS:
        value = todo.pop()
        if id(value) in seen or isinstance(value, _LEAVES):
            continue
        seen.add(id(value))
        yield value
        todo += reversed(list(_within(value, is_root=value is root)))


def _within(value: Any, is_root: bool) -> Iterator[Any]:
    match value:
        case types.FunctionType():
            if is_root or is_own_code(value.__code__.co_filename):
                yield from _within_function(value)
        case types.MethodType():
            yield from (value.__self__, value.__func__)
        case functools.partial():
            yield from (value.func, *value.args, *value.keywords.values())
        case list() | tuple():
            yield from value[:_MAX_ITEMS]
        case dict():
            yield from list(value.values())[:_MAX_ITEMS]
        case _:
            attributes = list(getattr(value, "__dict__", {}).items())
            yield from (
                attribute
                for name, attribute in attributes
                if not RANDOM_STATE.fullmatch(name)
            )
            for kind in filter(is_own_class, type(value).__mro__):
                yield from vars(kind).values()


def _within_function(function: types.FunctionType) -> Iterator[Any]:
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    yield from function.__dict__.values()
    yield from contents(function)
    names = list(_names(function.__code__))
    for name in names:
        value = function.__globals__.get(name)
        if isinstance(value, types.ModuleType) and is_own_code(
            getattr(value, "__file__", None) or ""
        ):
            yield from (
                vars(value)[attribute]
                for attribute in names
                if attribute in vars(value)
            )
        elif value is not None:
            yield value


def _names(code: types.CodeType) -> Iterator[str]:
    """The global names, and those of attributes, in a function and in those within it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def is_own_class(kind: type) -> bool:
    """True for a class of the user's, which no library has installed."""
    module = sys.modules.get(kind.__module__)
    # a notebook has no file, and in an actor that of a script is Ray's
    if module is None or kind.__module__ == "__main__":
        return True
    return is_own_code(getattr(module, "__file__", None) or "")


Put = Callable[[], object]


class ReachedGenerators:
    """The generators that a user's code can reach, which it shares with the rest of the process.

    Args:
        code: the user's function, module or pipeline.
        seeded: a generator that is seeded already: steps of Albumentations that have it stay as they are.
    """

    def __init__(self, code: Any, seeded: np.random.Generator | None = None) -> None:
        self._code = code
        self._seeded = seeded
        # those that pipelines draw from, for keys that follow each other
        self._ahead = list[tuple[KeyedGenerator, random.Random]]()
        self._found: list[Any] = []
        self.look()

    def __bool__(self) -> bool:
        return bool(self._found)

    def look(self) -> bool:
        """Look for them again, since some are made at the first call; True = there are more."""
        before = {id(generator) for generator in self._found}
        self._found = [
            generator
            for generator in filter(_is_random, reached(self._code))
            if getattr(generator, "random_generator", self) is not self._seeded
        ]
        # looked at once, since `rewind` is called for each sample
        self._numbered = list[tuple[int, Any]]()
        self._pipelines = list[Any]()
        for number, generator in enumerate(self._found):
            if is_generator(generator):
                self._numbered.append((number, generator))
            else:
                self._pipelines.append(generator)
        return any(id(generator) not in before for generator in self._found)

    def kept(self) -> contextlib.AbstractContextManager[None]:
        """Context manager: then their states are as they were."""
        return self._states_kept() if self._found else contextlib.nullcontext()

    @contextlib.contextmanager
    def _states_kept(self) -> Iterator[None]:
        put_back = [_state_of(generator) for generator in self._found]
        try:
            yield
        finally:
            for put in reversed(put_back):
                put()

    def rewind(self, key: Key) -> None:
        """Let them draw under a sample's key; within `kept`."""
        if self._found:
            next(self.rewound([key]))

    def rewound(self, keys: Sequence[Key]) -> Iterator[Key]:
        """Yield keys, one after the other, under which they then draw; within `kept`.

        The generators of pipelines are seeded for several keys at once: between two samples, whose work has driven
        that code out of the CPU's caches, it takes twice as long.
        """
        num_ahead = _NUM_AHEAD
        if self._numbered:  # one of them may be a pipeline's
            num_ahead = 1
        for first in range(0, len(keys), num_ahead):
            of_keys = keys[first : first + num_ahead]
            self._seed_ahead(of_keys)
            for key, (keyed, of_python) in zip(of_keys, self._ahead, strict=False):
                for pipeline in self._pipelines:
                    pipeline.random_generator = keyed.generator
                    pipeline.py_random = of_python
                for number, generator in self._numbered:
                    _seed(generator, [*key, number])
                yield key

    def _seed_ahead(self, keys: Sequence[Key]) -> None:
        missing = len(keys) - len(self._ahead)
        self._ahead += [(KeyedGenerator(), random.Random()) for _ in range(missing)]
        if not self._pipelines:
            return
        for key, (keyed, of_python) in zip(keys, self._ahead, strict=False):
            keyed.rewind(key)
            # as `seed` does for an integer, which takes half as long again to find out that it is one
            super(random.Random, of_python).seed(key[0] << 64 | key[1])
            of_python.gauss_next = None  # type: ignore[attr-defined]


def _state_of(generator: Any) -> Put:
    """Return what puts back the state that a generator, or a pipeline, has now."""
    if isinstance(generator, np.random.Generator):
        bits = generator.bit_generator
        return functools.partial(setattr, bits, "state", bits.state)
    if isinstance(generator, random.Random):
        return functools.partial(generator.setstate, generator.getstate())
    if is_generator(generator):
        return functools.partial(generator.set_state, generator.get_state())
    kept = {
        name: value
        for name, value in vars(generator).items()
        if RANDOM_STATE.fullmatch(name)
    }
    return functools.partial(generator.__dict__.update, kept)


def _seed(generator: Any, words: list[int]) -> None:
    if isinstance(generator, random.Random):
        generator.seed(functools.reduce(lambda seed, word: seed << 64 | word, words))
        return
    seeds = np.random.SeedSequence(words)
    if isinstance(generator, np.random.Generator):
        bits = generator.bit_generator
        bits.state = type(bits)(seeds).state  # type: ignore[call-arg]
    elif isinstance(generator, np.random.RandomState):
        generator.seed(seeds.generate_state(4))
    else:
        generator.manual_seed(int(seeds.generate_state(1, np.uint64)[0]) >> 1)


def is_generator(value: Any) -> bool:
    """Return whether a value is a random generator, of the process or another."""
    is_plain = isinstance(
        value, np.random.Generator | np.random.RandomState | random.Random
    )
    return is_plain or is_of(value, "torch", "Generator")


def _is_random(value: Any) -> bool:
    if is_generator(value):
        of_numpy: Any = np.random.mtrand
        return value is not of_numpy._rand and value is not torchs_generator()
    is_pipeline = is_of(value, "albumentations", "BaseCompose", "BasicTransform")
    return is_pipeline and hasattr(value, "random_generator")
