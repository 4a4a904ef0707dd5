"""The build hook, by itself: wheels are built by .ci/wheel.

csrc/probe_entropy.c, jpeg_entropy.h: another inside of libjpeg is refused.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

# Each starts compilers and programs that use what they made.
pytestmark = pytest.mark.system

ROOT = Path(__file__).parents[1]
pytest.importorskip(
    "hatchling", reason="hatchling is a build dependency; the dev group has it"
)


@pytest.fixture(scope="module")
def hook() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "hatch_build", ROOT / "hatch_build.py"
    )
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def kernel_in(folder: Path) -> str:
    """Use the extension in a folder; whether it replaces libjpeg's decoding of bits, and where it lies."""
    code = (
        f"import sys; sys.path.insert(0, {str(folder)!r})\n"
        "from raypipe.kernel import why_no_kernel\n"
        "module = None if why_no_kernel() else sys.modules['_raypipe_kernel']\n"
        "print(module.REPLACES_ENTROPY, module.__file__)"
    )
    command = [sys.executable, "-c", code]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True).stdout


def test_what_is_compiled_here_can_be_used_here(
    hook: ModuleType, tmp_path: Path
) -> None:
    reason = hook.compile_extension(hook.KERNEL, ROOT, tmp_path)
    if reason:
        pytest.skip(f"cannot be compiled here: {reason}")
    assert kernel_in(tmp_path).partition(" ")[2].startswith(str(tmp_path))


def test_the_reader_of_lmdb_needs_no_libjpeg(
    hook: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hook, "libjpeg_flags", lambda: ([], ["-lno-such-library"]))
    reason = hook.compile_extension(hook.LMDB, ROOT, tmp_path)
    if reason:
        pytest.skip(f"cannot be compiled here: {reason}")
    assert hook.compile_extension(hook.KERNEL, ROOT, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["_raypipe_lmdb.abi3.so"]


@pytest.mark.parametrize(
    "wrong",
    [
        "void *another; void (*start_pass)(j_decompress_ptr info);",
        "",
    ],
)
def test_another_inside_of_libjpeg_is_refused_in_a_line(
    hook: ModuleType, tmp_path: Path, wrong: str
) -> None:
    """`decode_mcu` would be one place behind where libjpeg has it, or one before."""
    source = Path(hook.KERNEL.source).parent
    shutil.copytree(ROOT / source, tmp_path / source)
    header = tmp_path / source / "jpeg_entropy.h"
    line = "void (*start_pass)(j_decompress_ptr info);"
    assert line in header.read_text()
    header.write_text(header.read_text().replace(line, wrong))
    said: list[str] = []
    reason = hook.compile_extension(hook.KERNEL, tmp_path, tmp_path, said.append)
    if reason:
        pytest.skip(f"cannot be compiled here: {reason}")
    assert len(said) == 1
    assert "without -DCHECKED_ENTROPY: libjpeg's inside is not as expected" in said[0]
    assert kernel_in(tmp_path).startswith(f"0 {tmp_path}")


@pytest.mark.parametrize(
    ("compiler", "reason"),
    [
        ("no-such-compiler", "no C compiler"),
        (f"{sys.executable} -c 'raise SystemExit(1)'", ""),
    ],
)
def test_what_cannot_be_compiled_has_a_reason(
    hook: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    compiler: str,
    reason: str,
) -> None:
    monkeypatch.setenv("CC", compiler)
    found = hook.compile_extension(hook.KERNEL, ROOT, tmp_path)
    assert found and reason in found


def test_the_hardening_that_a_compiler_knows_is_used(hook: ModuleType) -> None:
    if not shutil.which("gcc"):
        pytest.skip("there is no gcc")
    flags = hook.hardening(["gcc"])
    assert {"-D_FORTIFY_SOURCE=3", "-fstack-protector-strong"} <= set(flags)
    assert (
        hook.hardening(["gcc", "-fno-such-option"])
        == []
        == hook.hardening(["no-such-compiler"])
    )


def test_old_and_other_libjpegs_are_refused(
    hook: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "jpeglib.h").write_text(
        "#define LIBJPEG_TURBO_VERSION_NUMBER 2000006\n"
    )
    (tmp_path / "jerror.h").write_text("")
    monkeypatch.setattr(hook, "libjpeg_flags", lambda: ([f"-I{tmp_path}"], ["-ljpeg"]))
    found = hook.compile_extension(hook.KERNEL, ROOT, tmp_path)
    assert "libjpeg-turbo 2.1 or later" in found or "no C compiler" in found


def test_a_releases_libjpeg_is_linked_as_an_archive_with_its_own_headers(
    hook: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = tmp_path.resolve() / "lib/libjpeg.a"
    monkeypatch.setenv("RAYPIPE_LIBJPEG", str(archive))
    include, libraries = hook.libjpeg_flags()
    assert include == [f"-I{tmp_path.resolve()}/include"] and libraries[0] == str(
        archive
    )
    assert "-ljpeg" not in libraries
