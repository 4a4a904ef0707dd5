"""A host that waits for the device, found by torch's own mode for it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def waiting_is_an_error() -> Iterator[None]:
    """In here, and only in here: the mode is the process's, and would fail all tests that come after."""
    with warnings.catch_warnings():
        # It warns, once a process, that it is a prototype: after it has been switched on. As an error, that would
        # leave it on.
        warnings.filterwarnings(
            "ignore", message="Synchronization debug mode is a prototype"
        )
        try:
            torch.cuda.set_sync_debug_mode("error")
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")
