"""The digests of a stream as a file, and the comparison of two streams. Knows neither Ray nor torch.

    {"settings": {name: value}, "micro_batches": {"train-e0000-s000000-m000": 32 hex digits, …}}

The settings are what fixes the stream (the plan's fingerprint, the transform, the versions of what decodes and
transforms) and what must not change it (workers, actors, where it was resumed): where two streams differ, they
tell why.
"""

from __future__ import annotations

import dataclasses
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raypipe.errors import ConfigError
from raypipe.lookup import version_of
from raypipe.storage.whole_file import read_json, write_json

if TYPE_CHECKING:
    from raypipe.streaming.pipeline import StreamSpec

# Whatever reads, decodes, transforms or draws at random on the CPU.
PACKAGES = (
    "raypipe",
    "ray",
    "numpy",
    "pyarrow",
    "simplejpeg",
    "opencv-python-headless",
    "pillow",
    "albumentations",
    "albucore",
    "torch",
    "torchvision",
)


@dataclass(frozen=True)
class DigestFile:
    """The digests of a stream.

    Attributes:
        address: of the file.
        settings: that the stream was made with.
        micro_batches: name → digest, 32 hex digits, in the order of the stream.
    """

    address: str
    settings: dict[str, Any]
    micro_batches: dict[str, str]

    @staticmethod
    def read(address: str | Path) -> DigestFile:
        """Raises ConfigError where there is no such file."""
        content = read_json(address)
        try:
            settings, micro_batches = dict(content["settings"]), dict(content["micro_batches"])
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"{address} holds no digests ({type(error).__name__}: {error}): make it by "
                "`raypipe digest STORE --output FILE`"
            ) from None
        return DigestFile(str(address), settings, micro_batches)

    def write(self) -> None:
        """Raises ConfigError where it cannot be written."""
        write_json(self.address, {"settings": self.settings, "micro_batches": self.micro_batches})


class Comparison:
    """Compares a stream, micro-batch after micro-batch, with the digests of another.

    Attributes:
        num_compared: micro-batches that both streams have.
        num_different: of these, the ones that differ.
        first_different: the name of the first of these; None = all are equal.
    """

    def __init__(self, expected: DigestFile) -> None:
        self._expected = expected
        self.num_compared = self.num_different = 0
        self.first_different: str | None = None

    def add(self, name: str, digest: str) -> None:
        """Compare one micro-batch; one that the other stream does not have is passed over."""
        expected = self._expected.micro_batches.get(name)
        if expected is None:
            return
        self.num_compared += 1
        if digest != expected:
            self.num_different += 1
            self.first_different = self.first_different or name

    def summary(self, settings: dict[str, Any]) -> dict[str, Any]:
        """What was found.

        Args:
            settings: of the stream that was added.

        Returns:
            `equal`, `compared`, `different` (how many), `first_different`, and `settings` that differ, name →
            [the other stream's, this one's].

        Raises:
            ConfigError: the streams have no micro-batch in common.
        """
        if not self.num_compared:
            raise ConfigError(
                f"{self._expected.address} has no micro-batch of this stream: their ranges lie apart (from_step, "
                "to_step), and there is nothing to compare"
            )
        names = dict.fromkeys([*self._expected.settings, *settings])
        both = {name: [self._expected.settings.get(name), settings.get(name)] for name in names}
        return {
            "equal": self.num_different == 0,
            "compared": self.num_compared,
            "different": self.num_different,
            "first_different": self.first_different,
            "settings": {name: values for name, values in both.items() if values[0] != values[1]},
        }


def compare(expected: DigestFile, found: DigestFile) -> dict[str, Any]:
    """Compare two streams by their files, see `Comparison.summary`."""
    comparison = Comparison(expected)
    for name, digest in found.micro_batches.items():
        comparison.add(name, digest)
    return comparison.summary(found.settings)


def settings_of(spec: StreamSpec, *, workers: int, actors: int, from_step: int, to_step: int) -> dict[str, Any]:
    """What a stream is made with, as names and plain values.

    Args:
        spec: the stream.
        workers: W.
        actors: of the pool, at most.
        from_step, to_step: the range, in training steps counted through all epochs.
    """
    val = spec.stores.get("val")
    settings: dict[str, Any] = {
        "plan": spec.plan.fingerprint,
        "store": spec.stores["train"].address,
        "val": None if val is None else val.address,
        "val.fingerprint": None if val is None else val.fingerprint,
        "left_out": len(spec.plan.kept["train"].left_out),
        "val.left_out": len(spec.plan.kept["val"].left_out),
    }
    for section, values in (("plan", spec.plan.config), ("transform", spec.transform)):
        settings |= {f"{section}.{name}": value for name, value in dataclasses.asdict(values).items()}
    settings |= {"workers": workers, "actors": actors, "cache": spec.pool.cache}
    settings |= {"from_step": from_step, "to_step": to_step}
    settings |= {f"version.{name}": version_of(name) for name in PACKAGES}
    return settings | {"version.python": platform.python_version(), "machine": platform.machine()}
