"""What is waited for, how long, and what is told of it; against a server that refuses requests."""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from patience import until
from s3_server import FaultyProxy, first

from raypipe.errors import OutageError, StoreError
from raypipe.rayext.failures import is_final
from raypipe.storage import retries
from raypipe.storage.files import look_up, read_whole, write_bytes
from raypipe.storage.filesystem import errors_as, exists, open_filesystem
from raypipe.storage.retries import (
    allow_retries,
    outages_s,
    stop_retries,
    take_counts,
    without_retries,
)

# more than pyarrow tries a request by itself, which is three times, in two seconds
SOME = 4
MANY = 9  # and than it ever did for raypipe


@pytest.fixture
def proxy(proxy: FaultyProxy, bucket: str) -> FaultyProxy:
    write_bytes(f"{bucket}/a", b"content")
    return proxy


@pytest.fixture
def long_pause_s(monkeypatch: pytest.MonkeyPatch) -> float:
    """What each wait takes at least: the first pause is between a half and the whole of it."""
    monkeypatch.setattr(retries, "_FIRST_S", 1.0)
    return 0.5


def test_an_outage_is_waited_for_and_told_in_two_lines(
    bucket: str,
    proxy: FaultyProxy,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(retries, "_LOG_AFTER_S", 0.0)
    signs: list[None] = []
    monkeypatch.setattr(retries, "on_progress", [lambda: signs.append(None)])
    proxy.outage = first(MANY)
    with caplog.at_level(logging.WARNING, "raypipe"):
        assert read_whole(f"{bucket}/a") == b"content"
    assert proxy.faults["SlowDown"] == MANY
    waiting, back = [record.getMessage() for record in caplog.records]
    assert waiting.startswith(f"waiting for {bucket}/a, for ")
    assert (
        "(RAYPIPE_STORAGE_PATIENCE_S): open: " in waiting
        and "HTTP status 503" in waiting
    )
    assert back.startswith(f"{bucket}/a answers again, after ")
    assert len(signs) > 3  # of life, while it waited


def test_an_outage_for_good_is_an_error_that_is_tried_again_by_the_run(
    bucket: str, proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAYPIPE_STORAGE_PATIENCE_S", "1")
    proxy.outage = first(10**6)
    told = rf"^{bucket}/a was unavailable for 1 s \(RAYPIPE_STORAGE_PATIENCE_S\): open: .*HTTP status 503"
    with pytest.raises(OutageError, match=told) as caught:
        look_up(f"{bucket}/a")
    assert not is_final([caught.value])


def test_expired_credentials_are_read_anew(
    bucket: str, proxy: FaultyProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "credentials"

    def put(key: str) -> None:
        file.write_text(
            f"[default]\naws_access_key_id = {key}\naws_secret_access_key = test\n"
        )

    def refuse(authorization: str) -> tuple[int, str] | None:
        if "Credential=new/" in authorization:
            return None
        if proxy.faults["ExpiredToken"]:
            put("new")
        return 403, "ExpiredToken"

    put("old")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    filesystem, path = open_filesystem(f"{bucket}/a")
    with filesystem.open_input_file(path) as opened:
        proxy.outage = refuse
        assert opened.read() == b"content"  # by a file of the old ones
    write_bytes(f"{bucket}/b", b"new content")
    assert (
        read_whole(f"{bucket}/b") == b"new content"
        and proxy.faults["ExpiredToken"] == 2
    )


def test_credentials_that_stay_refused_are_a_final_error(
    bucket: str, proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAYPIPE_STORAGE_PATIENCE_S", "5")
    proxy.outage = first(10**6, 403, "AccessDenied")
    told = "check the credentials, which every node needs; denied for [0-9]+ s, with credentials read again"
    with pytest.raises(StoreError, match=told) as caught:
        look_up(f"{bucket}/a")
    assert is_final([caught.value])


def test_what_would_come_again_is_not_waited_for(
    bucket: str, proxy: FaultyProxy
) -> None:
    proxy.requests.clear()
    assert read_whole(f"{bucket}/none") is None and proxy.requests.total() == 1
    with pytest.raises(OSError, match="NO_SUCH_BUCKET"):
        open_filesystem("s3://no-such")[0].handler.write("no-such/a", b"")
    assert proxy.requests.total() == 2
    assert not exists(f"{bucket}/none")


def test_what_can_be_left_out_is_not_waited_for(
    bucket: str, proxy: FaultyProxy
) -> None:
    proxy.outage = first(10**6)
    told = r"^x: .*503.*; the server is down, or limits the request rate"
    with (
        pytest.raises(StoreError, match=told),
        errors_as(StoreError, "x"),
        without_retries(),
    ):
        exists(f"{bucket}/a")
    assert proxy.faults["SlowDown"] == 3  # pyarrow's own attempts


def test_a_deletion_whose_answer_was_lost_is_done(
    bucket: str, proxy: FaultyProxy
) -> None:
    filesystem, path = open_filesystem(f"{bucket}/a")
    inner, done = filesystem.handler.inner(), []

    class LosesAnAnswer:
        def delete_file(self, path: str) -> None:
            inner.delete_file(path)
            if not done:
                done.append(path)
                raise OSError("AWS Error NETWORK_CONNECTION")

    filesystem.handler._inner = LosesAnAnswer()
    try:
        filesystem.delete_file(path)
        assert done == [path]
        with pytest.raises(FileNotFoundError):
            filesystem.delete_file(path)
    finally:
        filesystem.handler._inner = inner


def test_what_others_write_is_written_through_an_outage(
    bucket: str, proxy: FaultyProxy
) -> None:
    filesystem, path = open_filesystem(f"{bucket}/marker")
    proxy.outage = first(SOME)
    with filesystem.open_output_stream(path) as file:
        # as Ray Train does when a run begins
        file.write(b"of ")
        file.write(b"Ray")
    assert (
        read_whole(f"{bucket}/marker") == b"of Ray" and proxy.faults["SlowDown"] == SOME
    )


@pytest.mark.parametrize("by", ["this thread", "others"])
def test_ctrl_c_ends_the_waiting_at_once(
    by: str, bucket: str, proxy: FaultyProxy
) -> None:
    proxy.outage = first(10**6)
    code = f"""
from raypipe.storage import retries
from raypipe.storage.files import read_whole
retries._LOG_AFTER_S = 0.0
retries._FIRST_S = retries._LONGEST_S = 100.0
if {by == "others"}:
    with retries.Threads(4) as threads:
        list(threads.map(read_whole, ["{bucket}/a"] * 8))
read_whole("{bucket}/a")
"""
    program = subprocess.Popen(
        [sys.executable, "-c", code], stderr=subprocess.PIPE, text=True
    )
    assert program.stderr is not None
    try:
        assert program.stderr.readline().startswith("waiting for s3://")
        program.send_signal(signal.SIGINT)
        assert "KeyboardInterrupt" in program.communicate()[1]
    finally:
        program.kill()


def test_a_process_that_ends_waits_for_no_storage(
    bucket: str, proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    # pyarrow has pauses of its own between its attempts
    monkeypatch.setattr(retries, "_LOST_S", 30.0)
    proxy.outage = first(10**6)
    failed: list[BaseException] = []

    def ask() -> None:
        try:
            read_whole(f"{bucket}/a")
        except BaseException as error:
            failed.append(error)

    waiting = threading.Thread(target=ask)
    waiting.start()
    until(lambda: proxy.faults["SlowDown"])
    try:
        stop_retries()
        waiting.join()
        with pytest.raises(OSError, match="503"):
            exists(f"{bucket}/a")
        assert len(failed) == 1 and "503" in str(failed[0])
        proxy.outage = None
        assert read_whole(f"{bucket}/a") == b"content", (
            "storage that answers is asked as ever"
        )
    finally:
        allow_retries()
    proxy.outage = first(SOME)
    assert read_whole(f"{bucket}/a") == b"content"


def test_a_process_counts_what_it_asks_of_storage(
    bucket: str, proxy: FaultyProxy, long_pause_s: float
) -> None:
    take_counts()
    proxy.outage = first(SOME)
    read_whole(f"{bucket}/a")
    write_bytes(f"{bucket}/b", b"12345")
    with pytest.raises(OSError, match="NO_SUCH_BUCKET"):
        open_filesystem("s3://no-such")[0].handler.write("no-such/a", b"")
    counts = take_counts()
    assert counts["open"]["retries"] == 1 and counts["open"]["seconds"] > long_pause_s
    assert counts["read"]["bytes"] == 7 and counts["read"]["requests"] == 1
    assert counts["write"]["bytes"] == 5 and counts["write"]["errors"] == 1
    assert take_counts() == {}


def test_a_process_knows_for_how_long_storage_did_not_answer(
    bucket: str, proxy: FaultyProxy, long_pause_s: float
) -> None:
    before_s = outages_s()
    read_whole(f"{bucket}/a")
    assert outages_s() == before_s
    proxy.outage = first(SOME)
    begun = time.monotonic()
    read_whole(f"{bucket}/a")
    waited_s = outages_s() - before_s
    assert long_pause_s < waited_s <= time.monotonic() - begun
