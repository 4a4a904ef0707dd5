from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from patience import until
from s3_server import FaultyProxy

from raypipe.errors import ConfigError, StoreError
from raypipe.storage import byte_ranges, local_cache, retries
from raypipe.storage.files import (
    RemoteFile,
    digest_of_file,
    look_up,
    read_whole,
    write_bytes,
)
from raypipe.storage.local_cache import LocalCache, shared_cache
from raypipe.storage.local_file import OpenFile, boot_id

SIZE = 200_000
Put = Callable[..., RemoteFile]


@pytest.fixture
def proxy(proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch) -> FaultyProxy:
    monkeypatch.setattr(byte_ranges, "PART_BYTES", 20_000)
    return proxy


@pytest.fixture
def put(bucket: str, proxy: FaultyProxy) -> Put:
    def write(name: str = "a", num_bytes: int = SIZE) -> RemoteFile:
        write_bytes(f"{bucket}/{name}", secrets.token_bytes(num_bytes))
        return look_up(f"{bucket}/{name}")

    return write


def content_of(cache: LocalCache, file: RemoteFile) -> bytes:
    return cache.get(file, Path.read_bytes)


def sent(proxy: FaultyProxy) -> int:
    """Bytes of contents that have passed since the last call."""
    with proxy.lock:
        num_bytes = sum(proxy.sent.values())
        proxy.sent.clear()
    return num_bytes


def program(
    tmp_path: Path, file: RemoteFile, then: str, limit: int = 0
) -> subprocess.Popen[str]:
    """A process that uses a shard of the cache, prints its digest, and does one thing more while it is open."""
    code = f"""
import hashlib, os, sys, time
from pathlib import Path
from raypipe.storage import byte_ranges, local_cache
from raypipe.storage.local_cache import LocalCache
from raypipe.storage.files import RemoteFile
byte_ranges.PART_BYTES = 20_000
path = LocalCache(Path({str(tmp_path / "shards")!r}), {limit}).get(RemoteFile(**{vars(file)!r}), Path)
print(hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest(), flush=True)
{then}
"""
    return subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_processes_and_threads_that_want_one_shard_share_one_download(
    put: Put, proxy: FaultyProxy, tmp_path: Path
) -> None:
    file = put()
    others = [program(tmp_path, file, "pass") for _ in range(3)]
    cache, found = LocalCache(tmp_path / "shards"), []
    threads = [
        threading.Thread(target=lambda: found.append(content_of(cache, file)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    digests = {other.communicate()[0].strip() for other in others}
    assert len(found) == 4 and set(found) == {read_whole(file.address)}
    assert digests == {digest_of_file(cache.path_of(file))}
    assert sent(proxy) == 2 * SIZE  # once by them, once by this test


def test_a_killed_download_goes_on_where_it_was(
    put: Put,
    proxy: FaultyProxy,
    s3_endpoint: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = put(num_bytes=2_000_000)
    data = LocalCache(tmp_path / "shards").path_of(file)
    partial = data.with_name(f"{data.name}-{boot_id()}.partial")
    with FaultyProxy(s3_endpoint, rates={"slow": 1.0}, slow_s=0.1) as slow:
        monkeypatch.setenv("AWS_ENDPOINT_URL", slow.endpoint)
        process = program(tmp_path, file, "pass")
        until(lambda: partial.exists() and partial.stat().st_size >= 200_000)
        process.send_signal(signal.SIGKILL)
        process.communicate()
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
    arrived = partial.stat().st_size
    assert not data.exists() and 200_000 <= arrived < file.num_bytes
    cache = LocalCache(tmp_path / "shards")
    content = content_of(cache, file)
    assert sent(proxy) == file.num_bytes - arrived
    assert content == read_whole(file.address) and not partial.exists()


def test_the_least_recently_opened_shards_make_room(
    put: Put, proxy: FaultyProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_cache, "_TOUCH_S", 0.0)
    files = [put(name) for name in "abcd"]
    cache = LocalCache(tmp_path / "shards", limit_bytes=2 * SIZE + 100)
    for name in "abacad":
        content_of(cache, files["abcd".index(name)])
        held = sum(path.stat().st_size for path in (tmp_path / "shards").glob("[!.]*"))
        assert held <= 2 * SIZE
        time.sleep(0.01)
    assert [cache.path_of(file).exists() for file in files] == [
        True,
        False,
        False,
        True,
    ]
    assert sent(proxy) == 4 * SIZE


def test_readers_of_an_evicted_shard_read_on_and_then_free_its_room(
    put: Put, proxy: FaultyProxy, tmp_path: Path
) -> None:
    one, other = put("a"), put("b")
    caches = [LocalCache(tmp_path / "shards", limit_bytes=SIZE) for _ in range(2)]
    held = caches[0].get(one, OpenFile)
    assert content_of(caches[1], other) == read_whole(other.address)
    assert not caches[0].path_of(one).exists()
    caches[0].close_evicted()
    assert (
        os.pread(held.descriptor, SIZE, 0)
        == held.path.read_bytes()
        == read_whole(one.address)
    )
    descriptor = held.descriptor
    del held

    def is_closed() -> bool:
        try:
            return os.fstat(descriptor).st_nlink > 0  # another file has its number
        except OSError:
            return True

    # nobody uses that cache
    until(is_closed)
    assert content_of(caches[0], one) == read_whole(one.address)


def test_a_download_does_not_continue_across_a_reboot(
    put: Put, proxy: FaultyProxy, tmp_path: Path
) -> None:
    file = put()
    cache = LocalCache(tmp_path / "shards")
    (tmp_path / "shards").mkdir()
    data = cache.path_of(file)
    data.with_name(f"{data.name}-another.partial").write_bytes(bytes(SIZE // 2))
    assert content_of(cache, file) == read_whole(file.address)
    assert sent(proxy) == 2 * SIZE


def test_a_forked_child_has_a_view_of_its_own(
    put: Put, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAYPIPE_CACHE", str(tmp_path))
    one = put("a")
    cache = shared_cache()
    held = cache.get(one, OpenFile)
    child = os.fork()
    if not child:
        os._exit(
            0 if shared_cache() is not cache and content_of(shared_cache(), one) else 1
        )
    assert os.waitpid(child, 0)[1] == 0
    assert os.pread(held.descriptor, SIZE, 0) == read_whole(one.address)


def test_a_shard_larger_than_the_cache_is_one_error(
    put: Put, proxy: FaultyProxy, tmp_path: Path
) -> None:
    file = put()
    message = r"/a has 200,000 bytes, but the cache in .* has a limit of 199,999: raise RAYPIPE_CACHE_BYTES"
    with pytest.raises(StoreError, match=message):
        content_of(LocalCache(tmp_path / "shards", limit_bytes=SIZE - 1), file)
    assert sent(proxy) == 0


def test_an_object_that_has_changed_is_refused_by_who_knew_the_old_one(
    put: Put, tmp_path: Path
) -> None:
    old = put()
    cache = LocalCache(tmp_path / "shards")
    before = content_of(cache, old)
    new = put()  # of the same size, within the same second
    assert new.version != old.version
    assert content_of(cache, new) == read_whole(new.address) != before
    assert content_of(cache, old) == before  # it is still here
    with pytest.raises(
        StoreError,
        match=r"/a has changed since the store was opened: 200000 bytes of version",
    ):
        content_of(LocalCache(tmp_path / "elsewhere"), old)


def test_an_object_that_changes_while_it_is_downloaded_is_refused(
    put: Put, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, calls = put(), []

    def change() -> None:
        calls.append(1)
        if len(calls) == 2:
            put()

    monkeypatch.setattr(retries, "on_progress", [change])
    cache = LocalCache(tmp_path / "shards")
    with pytest.raises(StoreError, match="has changed since the store was opened"):
        content_of(cache, old)
    assert not cache.path_of(old).exists()


def damage(data: Path) -> None:
    content = bytearray(data.read_bytes())
    content[SIZE // 2] ^= 1
    data.write_bytes(content)


def truncate(data: Path) -> None:
    os.truncate(data, SIZE // 2)


@pytest.mark.parametrize("harm", [damage, truncate])
def test_a_damaged_file_of_the_cache_is_fetched_again(
    harm: Callable[[Path], None], put: Put, proxy: FaultyProxy, tmp_path: Path
) -> None:
    file = put()
    cache = LocalCache(tmp_path / "shards")
    content = content_of(cache, file)
    harm(cache.path_of(file))
    assert content_of(LocalCache(tmp_path / "shards"), file) == content
    assert sent(proxy) == 2 * SIZE


def test_settings_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAYPIPE_CACHE", str(tmp_path))
    monkeypatch.setenv("RAYPIPE_CACHE_BYTES", "1000")
    cache = shared_cache()
    assert cache is shared_cache()
    assert cache.path_of(RemoteFile("s3://b/a", 1, "")).parent == tmp_path / "shards"
    monkeypatch.setenv("RAYPIPE_CACHE_BYTES", "50 GB")
    with pytest.raises(
        ConfigError,
        match="RAYPIPE_CACHE_BYTES must be a whole number of bytes, got '50 GB'",
    ):
        shared_cache()


def test_a_folder_that_cannot_be_made_is_one_error(put: Put, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        StoreError,
        match=r"cannot be written to: .*or set RAYPIPE_CACHE to another disk",
    ):
        content_of(LocalCache(tmp_path / "file" / "shards"), put())


def test_a_cache_that_others_have_made_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAYPIPE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "shards").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(
        StoreError,
        match=r"/shards belongs to another user, or is a link.* set RAYPIPE_CACHE",
    ):
        shared_cache()
    (tmp_path / "cache" / "shards").unlink()
    (tmp_path / "cache" / "shards").mkdir(mode=0o700)
    if os.getuid():
        pytest.skip("only root can give a folder to somebody else")
    for folder in ("cache/shards", "cache"):
        os.chown(tmp_path / folder, 12345, 12345)
        with pytest.raises(
            StoreError, match=rf"/{folder} belongs to another user.* set RAYPIPE_CACHE"
        ):
            shared_cache()
        os.chown(tmp_path / folder, 0, 0)
    assert shared_cache()
