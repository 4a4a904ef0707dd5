"""Builds the optional extensions into the wheel: the kernel, and the reader of LMDB's pages (EXTENSIONS).

They need a C compiler and Python's headers. The kernel also needs libjpeg-turbo 2.1 or later with its headers
(Debian and Ubuntu: libjpeg-dev; Fedora: libjpeg-turbo-devel; Homebrew: jpeg-turbo). Where one of them is missing,
the build warns and goes on without that extension: raypipe then gives the same samples and pixels, only slower.
Editable installs get them as well. To build them later, install again: `uv sync --reinstall-package raypipe-data`.

RAYPIPE_EXTENSION=no leaves them out, and RAYPIPE_EXTENSION=yes makes a failure to build one an error.
RAYPIPE_LIBJPEG=PREFIX/lib/libjpeg.a links that archive into it, which must hold position-independent code and have
its headers in PREFIX/include: the wheel then needs no libjpeg-turbo of the machine. Wheels are released so
(`.ci/libjpeg`, `.ci/wheel`).
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from packaging.tags import sys_tags


class Extension(NamedTuple):
    """A module in C.

    Attributes:
        name: what is imported. It lies beside the package, not in it, and is found as well where Ray puts a
            working_dir of raypipe's sources in front.
        source: the file that includes all others, within the checkout.
        probe: a program beside it, which shows that libjpeg is as the source expects, and the option that says
            so; "" = it does not use libjpeg.
    """

    name: str
    source: str
    probe: str = ""
    checked: str = ""

    @property
    def file(self) -> str:
        """Return the file's name; abi3: one file serves this and all later versions of Python."""
        return f"{self.name}.abi3.so"


KERNEL = Extension(
    "_raypipe_kernel",
    "raypipe/kernel/csrc/kernel.c",
    "probe_entropy.c",
    "-DCHECKED_ENTROPY",
)
LMDB = Extension("_raypipe_lmdb", "raypipe/stores/csrc/lmdb.c")
EXTENSIONS = (KERNEL, LMDB)

# Of each line, the first that the compiler takes without a word: a write beyond an array ends the process, and
# goes no further. Together they cost less than 1 % of CPU (raypipe/kernel/README.md), as long as loops over pixels
# take pointers: GCC makes no vector loop of an index that it checks.
HARDENING = [
    [
        ["-U_FORTIFY_SOURCE", "-D_FORTIFY_SOURCE=3"]
    ],  # sizes of copies, where the compiler knows the buffer
    [["-fstack-protector-strong"]],
    [["-fstack-clash-protection"]],
    # Indexes of arrays; the second line is for GCC before 13.
    [
        ["-fsanitize=bounds", "-fsanitize-trap=bounds"],
        ["-fsanitize=bounds", "-fsanitize-undefined-trap-on-error"],
    ],
    [["-Wl,-z,relro,-z,now"]],
]


class ExtensionHook(BuildHookInterface):
    """Hatchling's build hook; see the module."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the extensions to a wheel, and tag it for this platform."""
        wanted = os.environ.get("RAYPIPE_EXTENSION", "auto")
        if self.target_name != "wheel" or wanted == "no":
            return
        self._folder = tempfile.mkdtemp(prefix="raypipe-build-")
        where = "force_include_editable" if version == "editable" else "force_include"
        for extension in EXTENSIONS:
            reason = compile_extension(
                extension, Path(self.root), Path(self._folder), self.app.display_warning
            )
            if reason and wanted == "yes":
                raise RuntimeError(
                    f"RAYPIPE_EXTENSION=yes, but {extension.source} cannot be built: {reason}"
                )
            if reason:
                self.app.display_warning(
                    f"raypipe is built without its optional {extension.name}: {reason}"
                )
                continue
            build_data[where][f"{self._folder}/{extension.file}"] = extension.file
            build_data["pure_python"] = False
            build_data["tag"] = wheel_tag()

    def finalize(
        self, version: str, build_data: dict[str, Any], artifact_path: str
    ) -> None:
        """Remove what was built outside of the wheel."""
        if folder := getattr(self, "_folder", ""):
            shutil.rmtree(folder, ignore_errors=True)


def compile_extension(
    extension: Extension, root: Path, folder: Path, warn: Callable[[str], None] = print
) -> str:
    """Compile an extension of a checkout into a folder, and try it.

    Args:
        warn: is told what the extension is built without.

    Returns:
        The reason why it cannot be done, or nothing.
    """
    if sys.platform == "win32":
        return "it is not built on Windows"
    if not wheel_tag():
        return f"{sys.implementation.name} {sysconfig.get_python_version()} has no stable ABI"
    compiler = shlex.split(os.environ.get("CC") or "") or [
        shutil.which("cc") or shutil.which("gcc") or "cc"
    ]
    source = root / extension.source
    # -ffp-contract=off: OpenCV rounds coefficients after each step, also where a processor could multiply and add
    flags = [
        "-O3",
        "-ffp-contract=off",
        "-fPIC",
        "-shared",
        "-pthread",
        "-fvisibility=hidden",
    ]
    flags += ["-DPy_LIMITED_API=0x030b0000"]
    if sys.platform == "darwin":
        flags += ["-undefined", "dynamic_lookup"]
    include: list[str] = []
    libraries: list[str] = []
    difference = ""
    if extension.probe:
        include, libraries = libjpeg_flags()
        probe = [*compiler, *include, str(source.parent / extension.probe)]
        difference = difference_of(probe, libraries)
        if not difference:
            flags.append(extension.checked)
    python = [
        f"-I{path}"
        for path in dict.fromkeys(
            sysconfig.get_paths()[at] for at in ("include", "platinclude")
        )
    ]
    flags += hardening(compiler)
    command = [
        *compiler,
        *flags,
        *python,
        *include,
        str(source),
        "-o",
        str(folder / extension.file),
        *libraries,
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"no C compiler ({error})"
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "error" in line] or [
            done.stderr.strip()[-200:]
        ]
        return f"{shlex.join(compiler)} says: {errors[0].strip()}"
    trial = [
        sys.executable,
        "-I",
        "-c",
        f"import sys; sys.path.insert(0, {str(folder)!r}); import {extension.name}",
    ]
    done = subprocess.run(trial, capture_output=True, text=True, timeout=60)
    if done.returncode:
        return done.stderr.strip().splitlines()[-1]
    if difference:
        warn(f"{extension.name} is built without {extension.checked}: {difference}")
    return ""


def difference_of(probe: list[str], libraries: list[str]) -> str:
    """Compile and run a program that shows that libjpeg's inside is as expected; why it is not, or nothing."""
    with tempfile.TemporaryDirectory(prefix="raypipe-build-") as folder:
        program = f"{folder}/probe"
        try:
            for command in ([*probe, "-o", program, *libraries], [program]):
                done = subprocess.run(command, capture_output=True, timeout=60)
                if done.returncode:
                    name = Path(command[0]).name
                    return f"libjpeg's inside is not as expected ({name}: exit code {done.returncode})"
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"libjpeg's inside could not be looked at ({error})"
    return ""


def hardening(compiler: list[str]) -> list[str]:
    """Those of HARDENING that this compiler, and its linker, know."""
    if not shutil.which(compiler[0]):
        return []
    with tempfile.TemporaryDirectory(prefix="raypipe-build-") as folder:
        source = Path(folder) / "empty.c"
        source.write_text(
            "#include <string.h>\nint nothing(void);\nint nothing(void) { return 0; }\n"
        )
        return known_of(lambda flags: _is_known(compiler, flags, source))


def known_of(is_known: Callable[[list[str]], bool]) -> list[str]:
    """The first known choice of each line of HARDENING; most compilers know all first ones, or all last ones."""
    for at in (0, -1):
        flags = [flag for choices in HARDENING for flag in choices[at]]
        if is_known(flags):
            return flags
    if not is_known([]):  # it compiles nothing at all
        return []
    known = []
    for choices in HARDENING:
        known += next((flags for flags in choices if is_known(flags)), [])
    return known


def _is_known(compiler: list[str], flags: list[str], source: Path) -> bool:
    command = [
        *compiler,
        "-O3",
        "-fPIC",
        "-shared",
        "-Werror",
        *flags,
        str(source),
        "-o",
        f"{source}.so",
    ]
    try:
        return subprocess.run(command, capture_output=True, timeout=60).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def libjpeg_flags() -> tuple[list[str], list[str]]:
    """Compiler and linker options of libjpeg: of RAYPIPE_LIBJPEG, or by pkg-config where there is one."""
    if given := os.environ.get("RAYPIPE_LIBJPEG"):
        archive = Path(given).resolve()
        # Other modules of the process bring a libjpeg of their own: neither may take the other's functions.
        hidden = [] if sys.platform == "darwin" else ["-Wl,--exclude-libs,ALL"]
        return [f"-I{archive.parent.parent / 'include'}"], [str(archive), *hidden]
    try:
        asked = [
            subprocess.run(
                ["pkg-config", option, "libjpeg"],
                capture_output=True,
                text=True,
                check=True,
                timeout=30,
            )
            for option in ("--cflags", "--libs")
        ]
    except (OSError, subprocess.SubprocessError):
        return [], ["-ljpeg"]
    return shlex.split(asked[0].stdout), shlex.split(asked[1].stdout)


def wheel_tag() -> str:
    """Of this platform, without a manylinux tag's promise to run on others; empty = pip has no such."""
    tags = [
        tag for tag in sys_tags() if (tag.interpreter, tag.abi) == ("cp311", "abi3")
    ]
    # macOS: the oldest that the compiler was told to build for; without, this one.
    oldest = (
        f"macosx_{os.environ.get('MACOSX_DEPLOYMENT_TARGET', '').replace('.', '_')}_"
    )
    tags.sort(key=lambda tag: not tag.platform.startswith(oldest))
    return next(
        (
            str(tag)
            for tag in tags
            if not tag.platform.startswith(("manylinux", "musllinux"))
        ),
        "",
    )
