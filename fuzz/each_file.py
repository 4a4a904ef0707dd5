"""Gives each file of a folder to raypipe, in a process of its own, and prints what came of it as a line of JSON.

    python fuzz/each_file.py FOLDER

A process may take 1 GiB beyond what its imports hold, 20 s of CPU and 120 s in all. It puts the file into a store
of each kind, has it delivered in each reading, with and without the extension, and compares with other libraries
(support/readings).
"""

from __future__ import annotations

import importlib
import json
import os
import pickle
import re
import resource
import select
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

import cv2
import deliveries
import imagecodecs  # noqa: F401  so that no process imports it
import numpy as np
import pillow_heif  # noqa: F401
import readings
import tifffile  # noqa: F401
from deliveries import LAYOUTS, READINGS
from PIL import Image

from raypipe import kernel
from raypipe.errors import ConfigError, SampleError, StoreError
from raypipe.transform.decode.jpeg_header import jpeg_size
from raypipe.transform.decode.rgb import decode

MAX_BYTES = 1 << 30
MAX_CPU_S, MAX_WALL_S = 20, 120  # other programs may be using the machine
_NO_FILES = {".md", ".tar", ".txt"}


@dataclass
class Finding:
    """What came of a file.

    Attributes:
        kind: by Pillow.
        verdict: equal, refused, WRONG, HANG or CRASH.
        reasons: why, by the readings or stores that it is true of; of a file that is equal, what is refused of it.
        noise: bytes that it made libraries write to stderr.
    """

    file: str
    kind: str = ""
    verdict: str = "equal"
    reasons: dict[str, list[str]] = field(default_factory=dict)
    noise: int = 0

    def add(self, reason: str, where: str) -> None:
        places = self.reasons.setdefault(reason, [])
        if where not in places:
            places.append(where)


def judged(path: Path) -> Finding:
    """A file's finding, by two processes: one for the reference, since that may die or hang as well."""
    known = in_process(lambda: readings.read(path.read_bytes()), limited=False)
    reading = (
        known.value
        if isinstance(known.value, readings.Reading)
        else readings.Reading(kind="no reference")
    )
    tried = in_process(lambda: tried_out(path, reading), limited=True)
    if not isinstance(tried.value, Finding):
        return Finding(
            path.name, reading.kind, tried.death, {tried.why: ["all"]}, tried.noise
        )
    tried.value.noise = tried.noise
    return tried.value


@dataclass
class End:
    """How a process ended: its value, or how it died and why."""

    value: Any = None
    death: str = ""
    why: str = ""
    noise: int = 0


def in_process(work: Callable[[], Any], limited: bool) -> End:
    """The value of a call in a process of its own, which is ended after its time."""
    with tempfile.TemporaryFile() as noise:
        receiver, sender = os.pipe()
        child = os.fork()
        if not child:
            os.dup2(noise.fileno(), 2)
            os.close(receiver)
            _answer(work, sender, limited)
        os.close(sender)
        data, deadline = bytearray(), time.monotonic() + MAX_WALL_S
        while (left := deadline - time.monotonic()) > 0 and select.select(
            [receiver], [], [], left
        )[0]:
            part = os.read(receiver, 1 << 20)
            if not part:
                break
            data += part
        else:
            os.kill(child, signal.SIGKILL)
        os.close(receiver)
        status = os.waitpid(child, 0)[1]
        size = noise.seek(0, os.SEEK_END)
        noise.seek(0)
        last = noise.read()[-300:].decode(errors="replace")
    if left <= 0 or status == signal.SIGXCPU:
        return End(
            death="HANG",
            why=f"more than {MAX_CPU_S} s of CPU or {MAX_WALL_S} s",
            noise=size,
        )
    if status or not data:
        return End(death="CRASH", why=f"status {status}: {last}", noise=size)
    return End(pickle.loads(data), noise=size)  # by our own process


def _answer(work: Callable[[], Any], sender: int, limited: bool) -> None:
    """What the process does."""
    code = 1
    try:
        resource.setrlimit(resource.RLIMIT_CPU, (MAX_CPU_S, MAX_CPU_S + 1))
        if limited:
            (line,) = re.findall(
                r"VmData:\s+(\d+) kB", Path("/proc/self/status").read_text()
            )
            most = int(line) * 1024 + MAX_BYTES
            resource.setrlimit(resource.RLIMIT_DATA, (most, most))
        with open(sender, "wb") as pipe:
            pipe.write(pickle.dumps(work()))
        code = 0
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    os._exit(code)


def tried_out(path: Path, reading: readings.Reading) -> Finding:
    """What each store delivers of a file, in each reading, with and without the extension."""
    data, finding = path.read_bytes(), Finding(path.name, reading.kind)
    with tempfile.TemporaryDirectory() as name:
        folder, wrong, num_equal = Path(name), list[tuple[str, str]](), 0
        for each in READINGS:
            expected = _twin(folder, each, reading)
            first: Any = None
            for layout in LAYOUTS:
                address = folder / layout
                if not address.exists():
                    address.mkdir()
                    deliveries.write_store(address, layout, [(path.name, data)])
                in_both = _delivered(
                    str(address / deliveries.NAMES[layout]), each, path.name
                )
                for is_used, found in in_both.items():
                    where = f"{each} {layout} {'with' if is_used else 'without'}"
                    if isinstance(found, str):
                        finding.add(
                            found,
                            layout
                            if "no class folders" in found or "no images" in found
                            else each,
                        )
                        if "MemoryError" in found:
                            wrong.append((f"more than {MAX_BYTES >> 20} MiB", where))
                        continue
                    num_equal += 1
                    if expected is None:
                        wrong.append(
                            (
                                f"delivered; the reference refuses it: {reading.why}",
                                where,
                            )
                        )
                        continue
                    first = first or found
                    why = _difference(found, first, 0) and "not as by the first store"
                    why = why or _difference(found, expected, reading.levels)
                    if why:
                        wrong.append((why, where))
        wrong += _wrong_scales(data, reading)
    finding.verdict = "WRONG" if wrong else "equal" if num_equal else "refused"
    if wrong:
        finding.reasons = {}
        for why, where in wrong:
            finding.add(why, where)
    return finding


def _twin(folder: Path, name: str, reading: readings.Reading) -> Any:
    """What the reference's pixels become in a reading; None where it refuses."""
    pixels = getattr(reading, name)
    if pixels is None or not pixels.size:
        return None
    pack = deliveries.as_npy if name == "array" else deliveries.as_png
    twin = folder / f"twin-{name}"
    twin.mkdir()
    address = deliveries.write_store(twin, "lmdb", [("twin", pack(pixels))])
    return deliveries.delivered(deliveries.opened(address, name, 1, tolerant=False))


def _delivered(address: str, reading: str, name: str) -> dict[bool, Any]:
    """What comes of a store of one sample, with the extension and without, or why it is refused; other errors end
    the process."""
    found: dict[bool, Any] = {}
    for is_used in (True, False):
        try:
            spec = deliveries.opened(address, reading, 1, tolerant=False)
            found[is_used] = deliveries.delivered(spec, with_extension=is_used)
        except (SampleError, StoreError, ConfigError) as error:
            text = str(error)
            assert address in text or name in text, f"not refused by name: {text}"
            reason = re.sub(
                r"^.*sample 0( \([^()]*\))?: ", "", text, flags=re.DOTALL
            ).replace(address, "STORE")
            found[is_used] = reason.partition(" (with a transform.max_bad_fraction")[0]
    return found


def _difference(found: Any, expected: Any, levels: int) -> str:
    for split in found:
        one, other = found[split][0], expected[split][0]
        if (one.shape, one.dtype) != (other.shape, other.dtype):
            return f"{one.dtype} {one.shape}, expected {other.dtype} {other.shape}"
        if levels:
            most = np.abs(one.astype(float) - other).max()
            if most > levels + 1:  # a resize rounds
                return f"other values, by up to {most:g}"
        elif not np.array_equal(one, other, equal_nan=one.dtype.kind == "f"):
            return "other values"
    return ""


def _wrong_scales(data: bytes, reading: readings.Reading) -> list[tuple[str, str]]:
    """Where a JPEG at a reduced scale is not as libjpeg reduces it."""
    wrong = list[tuple[str, str]]()
    try:
        is_read = data.startswith(b"\xff\xd8") and reading.rgb is not None
        size = (jpeg_size(data) if is_read else None) or (0, 0)
        for part in (2, 4, 8) if min(size) >= 16 else ():
            if min(size) % part:  # decoded larger
                continue
            for is_used in (True, False):
                with deliveries.extension(is_used):
                    found = decode(data, min_side=min(size) // part)
                most = np.abs(found.astype(float) - readings.reduced(data, part)).max()
                if most > reading.levels:
                    wrong.append((f"other values, by up to {most:g}", f"1/{part}"))
    except SampleError:
        pass  # the other readings say so
    return wrong


def main() -> None:
    folder = Path(sys.argv[1])
    Image.init()
    for module in (
        "folder",
        "tar",
        "lmdb",
        "parquet",
        "writers",
        "destination",
        "joined",
    ):
        importlib.import_module(f"raypipe.stores.{module}")
    cv2.setNumThreads(1)
    assert not kernel.why_no_kernel(), kernel.why_no_kernel()
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.suffix not in _NO_FILES:
            print(json.dumps(asdict(judged(path))), flush=True)


if __name__ == "__main__":
    main()
