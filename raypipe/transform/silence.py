"""Silence of decoders: damage in a file is reported once, by the error of its sample.

libtiff prints a line for each damaged row, 43 KB for one file, and Pillow and tifffile log what they find odd.
All is as before behind the last decode, for a program's own use of these libraries.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import threading
from collections.abc import Iterator
from typing import Any

_LOGGERS = "PIL", "tifffile"
_lock = threading.Lock()
_restored = contextlib.ExitStack()
_num_within = 0


class _Found(threading.local):
    """Messages that libtiff called errors on this thread."""

    def __init__(self) -> None:
        self.errors: list[str] = []


_found = _Found()
_HANDLER = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_void_p)


@_HANDLER
def _on_error(module: bytes | None, message: bytes | None, _: Any) -> None:
    """Remember an error of libtiff, but for its numbers, whose form is C's."""
    text = (message or b"").partition(b"%")[0].decode(errors="replace").strip()
    _found.errors.append(f"{(module or b'libtiff').decode(errors='replace')}: {text}")


@contextlib.contextmanager
def silenced() -> Iterator[list[str]]:
    """Keep decoders silent within, on all threads; several may be in it at the same time.

    Yields:
        Messages that libtiff calls errors on this thread, as they come; Pillow ignores some of them.
    """
    global _num_within
    with _lock:
        if not _num_within:
            _begin()
        _num_within += 1
    before, _found.errors = _found.errors, []
    try:
        yield _found.errors
    finally:
        _found.errors = before
        with _lock:
            _num_within -= 1
            if not _num_within:
                _restored.close()


def _begin() -> None:
    for name in _LOGGERS:
        logger = logging.getLogger(name)
        handler = logging.NullHandler()
        _restored.callback(setattr, logger, "propagate", logger.propagate)
        _restored.callback(logger.removeHandler, handler)
        logger.addHandler(handler)  # where there is none, messages go to stderr
        logger.propagate = False
    # one for errors, one for warnings
    handlers = (
        ctypes.cast(_on_error, ctypes.c_void_p),
        None,
    )
    for set_handler, address in zip(_libtiff(), handlers, strict=False):
        _restored.callback(set_handler, set_handler(address))


@functools.cache
def _libtiff() -> tuple[Any, ...]:
    """Functions of Pillow's libtiff that set its handlers of errors and of warnings, and return the one before."""
    try:
        from PIL import _imaging

        library = ctypes.CDLL(_imaging.__file__)
        setters = library.TIFFSetErrorHandler, library.TIFFSetWarningHandler
    except (
        ImportError,
        OSError,
        AttributeError,
    ):
        # one without libtiff, or with one that is not to be reached
        return ()
    for set_handler in setters:
        set_handler.argtypes = [ctypes.c_void_p]
        set_handler.restype = ctypes.c_void_p
    return setters
