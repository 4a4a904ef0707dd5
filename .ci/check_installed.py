"""Check an installed wheel, in a folder without sources of raypipe: python .ci/check_installed.py [--linked]"""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import _raypipe_kernel
import _raypipe_lmdb

import raypipe
from raypipe.kernel import why_no_kernel
from raypipe.packages import DISTRIBUTION
from raypipe.stores.lmdb_file import why_not_compiled

SOURCES = Path(__file__).parents[1] / "raypipe"
assert raypipe.__file__ and _raypipe_kernel.__file__ and _raypipe_lmdb.__file__
package = Path(raypipe.__file__).parent
assert package != SOURCES, "this is the checkout"
assert not why_no_kernel(), why_no_kernel()
assert _raypipe_kernel.REPLACES_ENTROPY
assert not why_not_compiled(), why_not_compiled()
for source in SOURCES.rglob("*"):
    name = source.relative_to(SOURCES)
    is_left_out = source.suffix in (".pyc", ".md") or "csrc" in name.parts
    if source.is_file() and not is_left_out:
        assert (package / name).is_file(), f"{name} is not in the wheel"
files = [str(file) for file in importlib.metadata.files(DISTRIBUTION) or []]
for name in ("LICENSE", "NOTICE"):
    assert any(file.endswith(f"licenses/{name}") for file in files), f"no {name}"
if "--linked" in sys.argv:
    lister = ["otool", "-L"] if sys.platform == "darwin" else ["ldd"]
    needed = subprocess.run(
        [*lister, _raypipe_kernel.__file__], capture_output=True, text=True, check=True
    ).stdout
    assert "libjpeg" not in needed, f"it needs a libjpeg of the machine: {needed}"
assert importlib.metadata.version(DISTRIBUTION) == raypipe.__version__
print(f"{DISTRIBUTION} {raypipe.__version__} works from {package}, with the extensions")
