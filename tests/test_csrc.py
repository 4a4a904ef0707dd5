"""Copies in C whose sizes come from files stand in one file: bounds.h."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

# The C code of each extension.
FILES = sorted((Path(__file__).parents[1] / "raypipe").rglob("csrc/*.[ch]"))


# Without comments, and without the program of the build, which reads nothing from outside.
SOURCES = {
    path.name: re.sub(r"/\*.*?\*/", "", path.read_text(), flags=re.DOTALL)
    for path in FILES
    if path.name != "probe_entropy.c"
}
COPIES = ("memcpy", "memmove", "memset")
UNBOUNDED = (
    "strcpy",
    "strcat",
    "sprintf",
    "vsprintf",
    "gets",
    "alloca",
    "stpcpy",
    "jpeg_mem_dest",
)
CONSTANT_SIZE = re.compile(r"sizeof [*\w.>-]+|[A-Z][A-Z0-9_]*")
# Files whose every length is of an image that the kernel has made itself, of sides that new_image has checked.
OF_IMAGES = {"filter.h", "resize.h"}
ALLOWED = {
    ("bounds.h", "from.left"): "the Writer has as many",
    ("bounds.h", "(size_t)num"): "the Writer has as many",
    (
        "image.h",
        "(size_t)num * CHANNELS",
    ): "copy_row: a row of an image that the kernel has made",
    (
        "jpeg_baseline.h",
        "(size_t)scan.num_blocks * sizeof *blocks",
    ): "six at most, by the sampling",
}


def calls(names: tuple[str, ...]) -> Iterator[tuple[str, str, list[str]]]:
    """The file, the function and the arguments of each call of these functions."""
    for file, text in SOURCES.items():
        for match in re.finditer(rf"\b({'|'.join(names)})\(", text):
            arguments, depth = [""], 0
            for character in text[match.end() :]:
                depth += {"(": 1, ")": -1}.get(character, 0)
                if depth < 0:
                    break
                if character == "," and not depth:
                    arguments.append("")
                else:
                    arguments[-1] += character
            yield file, match[1], [argument.strip() for argument in arguments]


def test_bytes_are_copied_with_constant_sizes_or_through_bounds() -> None:
    found = list(calls(COPIES))
    unknown = [
        call
        for call in found
        if not CONSTANT_SIZE.fullmatch(call[2][-1])
        and (call[0], call[2][-1]) not in ALLOWED
        and not (call[1] == "memset" and call[0] in OF_IMAGES)
    ]
    assert len(found) > 20 and unknown == []
    assert list(calls(UNBOUNDED)) == []


@pytest.mark.parametrize(
    "file", ["jpeg_header.h", "jpeg_seek.h", "jpeg_transcode.h", "lmdb.c"]
)
def test_a_file_is_not_read_by_pointers(file: str) -> None:
    """What a file says goes through a Reader: no byte is taken by `data[at]`, `body[…]` or `page + …`."""
    assert (
        re.findall(
            r"\b(?:data|body|page|record|segment|file)(?:\[| \+ )", SOURCES[file]
        )
        == []
    )
