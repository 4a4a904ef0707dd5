"""Fixtures of stores in the working folder, and in a bucket whose requests are counted, or fail."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from s3_server import FaultyProxy

from raypipe.storage import retries


@pytest.fixture
def in_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make an empty folder the working folder: relative paths lead to it."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def proxy(
    bucket: str, s3_endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[FaultyProxy]:
    """A proxy before the server of the bucket, by which all requests go."""
    # pyarrow has pauses of its own between its attempts
    monkeypatch.setattr(retries, "_FIRST_S", 0.01)
    with FaultyProxy(s3_endpoint) as made:
        monkeypatch.setenv("AWS_ENDPOINT_URL", made.endpoint)
        yield made
